//! Probe 6: what the host takes for changing mappings, by count, contiguity and kind; and the limits.
//! Also the other half of probe 5: re-pointing one process's mappings instead of changing process.

use crate::host::{self, PAGE, RW, RWX, must};
use crate::measure::{price_ticks, tsc};
use crate::report::{fact, law, row};

/// Where the probes map; nothing else lives there.
const AT: usize = 0x0300_0000_0000;
const RAM: usize = 256 << 20;
const SHARED: i32 = libc::MAP_SHARED;
const POPULATE: i32 = libc::MAP_SHARED | libc::MAP_POPULATE;

/// Prices every kind of change, then finds the limits.
pub fn run() {
    let cases: &[fn()] = &[
        contiguous,
        first_writes,
        scattered,
        replace,
        harvest,
        guards,
        move_many,
        drop_slot,
        huge,
        faults,
        write_protect,
        limit,
    ];
    for case in cases {
        let status = host::in_child(case);
        if status != 0 {
            fact("a mappings case ended with", format!("{status:#x}"));
        }
    }
}

/// A RAM memfd whose pages all exist, as guest RAM's do once the guest has run for a while.
fn ram() -> i32 {
    let fd = host::memfd(RAM);
    host::map(AT, RAM, RW, POPULATE, fd, 0);
    host::unmap(AT, RAM);
    fd
}

/// Times `body` once per batch, with `before` and `after` outside the clock.
fn timed(
    name: impl std::fmt::Display,
    ops: usize,
    before: impl Fn(),
    body: impl Fn(),
    after: impl Fn(),
) {
    let cost = price_ticks(15, ops as u64, || {
        before();
        let start = tsc();
        body();
        let ticks = tsc() - start;
        after();
        ticks
    });
    row(name, cost);
}

fn touch(at: usize, pages: usize, stride: usize) {
    for n in 0..pages {
        // SAFETY: the caller mapped these pages readable.
        unsafe { ((at + n * stride) as *const u8).read_volatile() };
    }
}

/// One mapping of n pages: lazily, populated, and by touching; then protect and unmap.
fn contiguous() {
    let fd = ram();
    for pages in [1, 16, 64, 512, 4096] {
        let len = pages * PAGE;
        let gone = || host::unmap(AT, len);
        let map = |flags| move || host::map(AT, len, RWX, flags, fd, 0);
        let nothing = || ();
        timed(
            format!("mmap {pages} contiguous pages, lazy: whole call"),
            1,
            nothing,
            map(SHARED),
            gone,
        );
        timed(
            format!("mmap {pages} contiguous pages, populate: whole call"),
            1,
            nothing,
            map(POPULATE),
            gone,
        );
        let mapped = map(SHARED);
        timed(
            format!("touch {pages} lazily mapped pages: whole"),
            1,
            mapped,
            || touch(AT, pages, PAGE),
            gone,
        );
        let ready = map(POPULATE);
        let read_only = || host::protect(AT, len, libc::PROT_READ);
        timed(
            format!("mprotect {pages} present pages to read-only: whole call"),
            1,
            ready,
            read_only,
            gone,
        );
        timed(format!("munmap {pages} present pages: whole call"), 1, ready, gone, nothing);
    }
}

/// Whether a populated shared mapping takes its first writes without a fault.
fn first_writes() {
    let fd = ram();
    let (pages, len) = (256, 256 * PAGE);
    let gone = || host::unmap(AT, len);
    let write = || {
        for n in 0..pages {
            // SAFETY: the range is mapped writable while this runs.
            unsafe { ((AT + n * PAGE) as *mut u8).write_volatile(1) };
        }
    };
    // SAFETY: acts on the mapping just made; 23 is MADV_POPULATE_WRITE.
    let advise = || unsafe { libc::madvise(AT as *mut _, len, 23) };
    let populated = || host::map(AT, len, RW, POPULATE, fd, 0);
    let for_writing = || {
        host::map(AT, len, RW, SHARED, fd, 0);
        assert_eq!(advise(), 0);
    };
    timed("first write to a page mapped by MAP_POPULATE", pages, populated, write, gone);
    timed("first write to a page mapped by MADV_POPULATE_WRITE", pages, for_writing, write, gone);
    let both = || {
        write();
        write();
    };
    timed("first and second write after MAP_POPULATE", pages, populated, both, gone);
    timed(
        "mmap 256 contiguous pages and MADV_POPULATE_WRITE: per page",
        pages,
        || (),
        for_writing,
        gone,
    );
}

/// n pages in guest-physical disorder: each is a mapping of its own.
fn map_scattered(at: usize, pages: usize, flags: i32, fd: i32, shift: usize) {
    for n in 0..pages {
        let frame = (n * 37 + shift) % (RAM / PAGE);
        host::map(at + n * PAGE, PAGE, RWX, flags, fd, frame * PAGE);
    }
}

fn scattered() {
    let fd = ram();
    for pages in [16, 64, 256, 1024] {
        let gone = || host::unmap(AT, pages * PAGE);
        let populate = || map_scattered(AT, pages, POPULATE, fd, 0);
        timed(
            format!("mmap {pages} scattered pages, populate: per page"),
            pages,
            || (),
            populate,
            gone,
        );
        timed("munmap them in one call: per page", pages, populate, gone, || ());
        let singly =
            || (0..pages).for_each(|n| host::protect(AT + n * PAGE, PAGE, libc::PROT_READ));
        timed(
            format!("mprotect {pages} scattered pages, one call each: per page"),
            pages,
            populate,
            singly,
            gone,
        );
        let at_once = || host::protect(AT, pages * PAGE, libc::PROT_READ);
        timed(
            format!("mprotect {pages} scattered pages, one call: per page"),
            pages,
            populate,
            at_once,
            gone,
        );
    }
}

/// MAP_FIXED over existing mappings: what switching address spaces inside one process would do.
fn replace() {
    let fd = ram();
    for pages in [16, 64, 256] {
        map_scattered(AT, pages, POPULATE, fd, 0);
        let shift = std::cell::Cell::new(1);
        let populated = || map_scattered(AT, pages, POPULATE, fd, shift.replace(shift.get() + 1));
        timed(
            format!("replace {pages} scattered mappings, populate: whole switch"),
            1,
            || (),
            populated,
            || (),
        );
        let lazily = || map_scattered(AT, pages, SHARED, fd, shift.replace(shift.get() + 1));
        timed(
            format!("replace {pages} scattered mappings, lazy: whole switch"),
            1,
            || (),
            lazily,
            || (),
        );
        host::unmap(AT, pages * PAGE);
    }
}

/// Dropping pages but not the mapping, and asking for them again.
fn harvest() {
    let fd = ram();
    for pages in [1, 64, 512] {
        let len = pages * PAGE;
        host::map(AT, len, RW, POPULATE, fd, 0);
        let advise = |what: i32| {
            // SAFETY: the range is the mapping just made.
            must("madvise", unsafe { libc::madvise(AT as *mut _, len, what) }.into());
        };
        let (drop, fill) = (|| advise(libc::MADV_DONTNEED), || advise(libc::MADV_POPULATE_WRITE));
        timed(format!("MADV_DONTNEED {pages} present pages: whole call"), 1, fill, drop, || ());
        timed(format!("MADV_POPULATE_WRITE {pages} pages: whole call"), 1, drop, fill, || ());
        // SAFETY: MADV_GUARD_INSTALL (102) and _REMOVE (103) act on this mapping only.
        let guard = |what: i32| unsafe { libc::madvise(AT as *mut _, len, what) };
        if guard(102) == 0 {
            timed(
                format!("MADV_GUARD_INSTALL over {pages} pages: whole call"),
                1,
                || advise(103),
                || advise(102),
                || (),
            );
            timed(
                format!("MADV_GUARD_REMOVE over {pages} pages: whole call"),
                1,
                || advise(102),
                || advise(103),
                || (),
            );
        } else {
            fact("MADV_GUARD_INSTALL on a shared file mapping", "refused");
        }
        host::unmap(AT, len);
    }
}

/// Guard marks: page-grained "not present" that splits no mapping, many ranges by one call.
fn guards() {
    let fd = ram();
    host::map(AT, RAM, RW, POPULATE, fd, 0);
    // SAFETY: writes a mapped page, then marks it.
    let marked = unsafe {
        (AT as *mut u64).write(42);
        libc::madvise(AT as *mut _, PAGE, 102)
    };
    crate::guest::prepare_stacks();
    crate::guest::catch_all(crate::guest::h_leave);
    host::install_code(crate::guest::TEXT, store_at_rsi());
    crate::guest::enter(&crate::guest::Regs { rsi: AT as u64, ..crate::guest::Regs::at_text(0) });
    let exit = crate::guest::last_exit();
    let seen = (marked, exit.signal, exit.trap(), exit.cr2()) == (0, libc::SIGSEGV, 14, AT as u64);
    law("a guarded page of a shared memfd mapping is SIGSEGV", seen);
    // SAFETY: removes the mark; the page is mapped again.
    let kept = unsafe {
        libc::madvise(AT as *mut _, PAGE, 103);
        (AT as *const u64).read_volatile() == 42
    };
    law("and comes back with its contents when the guard goes", kept);
    for (name, advice, undo) in
        [("MADV_GUARD_INSTALL", 102, 103), ("MADV_DONTNEED", libc::MADV_DONTNEED, 23)]
    {
        for pages in [16, 256] {
            let ranges: Vec<libc::iovec> = (0..pages)
                .map(|n| libc::iovec { iov_base: (AT + n * 37 * PAGE) as *mut _, iov_len: PAGE })
                .collect();
            // SAFETY: all ranges lie in the probe's mapping; -10000 is PIDFD_SELF.
            let many = |what: i32| unsafe {
                libc::syscall(libc::SYS_process_madvise, -10000, ranges.as_ptr(), pages, what, 0)
            };
            let singly = |what: i32| {
                for range in &ranges {
                    // SAFETY: as above.
                    unsafe { libc::madvise(range.iov_base, PAGE, what) };
                }
            };
            let refill = || {
                singly(undo);
                singly(23); // MADV_POPULATE_WRITE
            };
            refill();
            if many(advice) == -1 {
                fact(
                    format!("{name} of {pages} pages by one process_madvise"),
                    std::io::Error::last_os_error(),
                );
                continue;
            }
            timed(
                format!("{name}, {pages} lone pages, one process_madvise: per page"),
                pages,
                refill,
                || assert!(many(advice) > 0),
                refill,
            );
            timed(
                format!("{name}, {pages} lone pages, one call each: per page"),
                pages,
                refill,
                || singly(advice),
                refill,
            );
        }
    }
}

/// mremap of a whole span away and back: one call may move many mappings since Linux 6.17.
fn move_many() {
    let fd = ram();
    let away = AT + (1 << 40);
    for pages in [1, 64, 512, 4096] {
        map_scattered(AT, pages, POPULATE, fd, 0);
        let flags = libc::MREMAP_FIXED | libc::MREMAP_MAYMOVE;
        let go = |from: usize, to: usize| {
            // SAFETY: moves probe mappings between two probe regions.
            unsafe { libc::mremap(from as *mut _, pages * PAGE, pages * PAGE, flags, to) }
        };
        if go(AT, away) == libc::MAP_FAILED {
            fact(
                format!("mremap of {pages} mappings in one call"),
                std::io::Error::last_os_error(),
            );
        } else {
            let there = || assert_ne!(go(AT, away), libc::MAP_FAILED);
            let back = || assert_ne!(go(away, AT), libc::MAP_FAILED);
            back();
            timed(
                format!("mremap of {pages} scattered mappings in one call: per page"),
                pages,
                || (),
                there,
                back,
            );
        }
        host::unmap(AT, pages * PAGE);
    }
    host::map(AT, 1 << 28, RW, POPULATE, fd, 0);
    let whole = |from: usize, to: usize| {
        // SAFETY: as above.
        unsafe {
            libc::mremap(from as *mut _, RAM, RAM, libc::MREMAP_FIXED | libc::MREMAP_MAYMOVE, to)
        };
    };
    timed(
        "mremap of one 256 MiB mapping, all present: whole call",
        1,
        || (),
        || whole(AT, away),
        || whole(away, AT),
    );
}

/// Emptying a slot: thousands of mappings by one munmap.
fn drop_slot() {
    let fd = ram();
    for pages in [1000, 4000, 16000] {
        let fill = || map_scattered(AT, pages, POPULATE, fd, 0);
        timed(
            format!("munmap a slot of {pages} mappings: per mapping"),
            pages,
            fill,
            || host::unmap(AT, 1 << 40),
            || (),
        );
    }
    map_scattered(AT, 16000, SHARED, fd, 0);
    let at = AT + 20000 * PAGE;
    let one = || host::map(at, PAGE, RWX, POPULATE, fd, 0);
    timed(
        "mmap one page, populate, beside 16000 mappings",
        1,
        || (),
        one,
        || host::unmap(at, PAGE),
    );
    timed("munmap one page, beside 16000 mappings", 1, one, || host::unmap(at, PAGE), || ());
}

/// Two-megabyte pages without privilege: MADV_COLLAPSE ignores the THP switches.
fn huge() {
    let (fd, two) = (ram(), 2 << 20);
    let at = AT + (1 << 32);
    host::map(at, 8 * two, RWX, POPULATE, fd, 0);
    // SAFETY: acts on the mapping just made. 25 is MADV_COLLAPSE.
    let collapsed = unsafe { libc::madvise(at as *mut _, 8 * two, 25) } == 0;
    let why = std::io::Error::last_os_error();
    fact("MADV_COLLAPSE of memfd pages", if collapsed { "works".into() } else { why.to_string() });
    host::unmap(at, 8 * two);
    let map = |flags| move || host::map(at, two, RWX, flags, fd, 0);
    let gone = || host::unmap(at, two);
    timed(
        "mmap 2 MiB (collapsed if it worked), populate: whole call",
        1,
        || (),
        map(POPULATE),
        gone,
    );
    timed(
        "touch first byte of a lazily mapped 2 MiB: whole",
        1,
        map(SHARED),
        || touch(at, 1, PAGE),
        gone,
    );
    let all = || touch(at, 512, PAGE);
    timed("touch all its 512 pages: whole", 1, map(SHARED), all, gone);
    timed("munmap 2 MiB: whole call", 1, map(POPULATE), gone, || ());
}

/// The host's own faults on lazily mapped pages, forward and in disorder.
fn faults() {
    let fd = ram();
    let lazy = || host::map(AT, RAM, RW, SHARED, fd, 0);
    let gone = || host::unmap(AT, RAM);
    timed(
        "host fault on a present shmem page, read, stride 1 page: per page",
        4096,
        lazy,
        || touch(AT, 4096, PAGE),
        gone,
    );
    timed(
        "the same, stride 17 pages (no fault-around help)",
        3500,
        lazy,
        || touch(AT, 3500, 17 * PAGE),
        gone,
    );
    let write = || {
        for n in 0..4096 {
            // SAFETY: `lazy` mapped the range writable.
            unsafe { ((AT + n * PAGE) as *mut u8).write_volatile(1) };
        }
    };
    timed("the same, write, stride 1 page", 4096, lazy, write, gone);
}

/// userfaultfd as a page-grained write protection that splits no mapping.
fn write_protect() {
    const UFFD_USER_MODE_ONLY: i32 = 1;
    // SAFETY: creates a descriptor.
    let uffd =
        unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | UFFD_USER_MODE_ONLY) }
            as i32;
    law("userfaultfd, user mode only, as an ordinary user", uffd >= 0);
    let fd = ram();
    host::map(AT, RAM, RW, POPULATE, fd, 0);
    let mut api = [0xaau64, (1 << 12) | (1 << 7), 0]; // WP_HUGETLBFS_SHMEM, SIGBUS
    let mut register = [AT as u64, RAM as u64, 2, 0]; // mode WP
    let ioctl = |number: u64, argument: *mut u64| {
        // SAFETY: each argument is the structure its request asks for.
        unsafe { libc::ioctl(uffd, number, argument) }
    };
    fact("UFFDIO_API with WP on shmem and SIGBUS", ioctl(0xc018_aa3f, api.as_mut_ptr()));
    fact("UFFDIO_REGISTER for write protection", ioctl(0xc020_aa00, register.as_mut_ptr()));
    let set = |pages: usize, on: u64| {
        let mut range = [(AT + 64 * PAGE) as u64, (pages * PAGE) as u64, on];
        must("UFFDIO_WRITEPROTECT", ioctl(0xc018_aa06, range.as_mut_ptr()).into());
    };
    for pages in [1, 64] {
        timed(
            format!("uffd write-protect {pages} present pages: whole call"),
            1,
            || set(pages, 0),
            || set(pages, 1),
            || (),
        );
        timed(
            format!("uffd un-protect {pages} pages: whole call"),
            1,
            || set(pages, 1),
            || set(pages, 0),
            || (),
        );
    }
    set(1, 1);
    crate::guest::prepare_stacks();
    crate::guest::catch_all(crate::guest::h_leave);
    host::install_code(crate::guest::TEXT, store_at_rsi());
    crate::guest::enter(&crate::guest::Regs {
        rsi: (AT + 64 * PAGE) as u64,
        ..crate::guest::Regs::at_text(0)
    });
    let exit = crate::guest::last_exit();
    let seen = (exit.signal, exit.cr2()) == (libc::SIGBUS, (AT + 64 * PAGE) as u64);
    law("a write to it is SIGBUS with the address (UFFD_FEATURE_SIGBUS)", seen);
    fact("its trap number and error code", format!("{} {:#x}", exit.trap(), exit.error()));
}

crate::code!(store_at_rsi, "mov [rsi], rax", "ud2");

/// The number of mappings a process may have, and what happens there.
fn limit() {
    let fd = ram();
    let mut made = 0;
    let errno = loop {
        let (at, frame) = (AT + made * PAGE, (made * 37) % (RAM / PAGE));
        let flags = SHARED | libc::MAP_FIXED;
        // SAFETY: maps in the probe's region.
        let got = unsafe { libc::mmap(at as *mut _, PAGE, RW, flags, fd, (frame * PAGE) as i64) };
        if got == libc::MAP_FAILED {
            break std::io::Error::last_os_error();
        }
        made += 1;
    };
    fact("mappings made before mmap fails, and how", format!("{made}: {errno}"));
    let call = |result: i32| {
        if result == 0 { "works".into() } else { std::io::Error::last_os_error().to_string() }
    };
    // SAFETY: all act on probe mappings.
    unsafe {
        let replaced = libc::mmap(AT as *mut _, PAGE, RW, SHARED | libc::MAP_FIXED, fd, 4096 * 5);
        fact(
            "at the limit: MAP_FIXED over one existing mapping",
            call(i32::from(replaced == libc::MAP_FAILED)),
        );
        fact(
            "at the limit: mprotect of a whole mapping",
            call(libc::mprotect(AT as *mut _, PAGE, libc::PROT_READ)),
        );
        fact("at the limit: munmap of a whole mapping", call(libc::munmap(AT as *mut _, PAGE)));
    }
    let start = tsc();
    host::unmap(AT, 1 << 40);
    let ns = (tsc() - start) as f64 / crate::measure::ticks_per_ns();
    fact(
        "munmap of all of them in one call",
        format!("{:.1} ms, {:.0} ns each", ns / 1e6, ns / made as f64),
    );
}
