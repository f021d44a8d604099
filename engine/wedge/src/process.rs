//! Starting a wedge and taking turns with it.
// UNSAFETY: forks, maps memory at fixed addresses and shares it with another process.
#![allow(unsafe_code)]

use crate::{
    Pages, affinity, cpuid,
    memory::MemoryObject,
    starter::{self, Process},
    strict::{self, Apart},
    turns::Turns,
};
use frame::{
    ALT_STACK, ALT_STACK_LEN, BLOB, Base, CACHE, CACHE_LEN, COPIES, COPIES_LEN, EMPTY, FRAME,
    FRAME_LEN, GATE, JOURNAL, LISTENER_FD, LOOKUPS, Lookups, MARKS, MAX_MADE, MAX_ORDERS, MAX_RUN,
    MONITOR, Order, RAM, RAM_FD, RAM_MAX, REGIONS, REGIONS_LEN, SHARED, SITES, SITES_LEN, STACK,
    STACK_LEN, STUBS, Shared, TABLES, TABLES_LEN, TOP, TURNS, Turns as TurnsPage, USER_PAGE,
};
use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
    sync::OnceLock,
};

static IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/wedge.bin"));
pub(crate) const PAGE: usize = 4096;
/// Bytes of a large page.
const LARGE: u64 = 1 << 21;

/// Why a wedge cannot be started or has stopped working.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The host refused something.
    #[error("cannot start a process for guest code: {0}")]
    Start(#[from] io::Error),
    /// The process is gone.
    #[error("a process running guest code ended unexpectedly")]
    Gone,
    /// It was killed: nobody here does that.
    #[error(
        "a process running guest code was killed by signal {0}, perhaps for want of memory on the host (its kernel's log says so): \
         give the guest less (--memory), or the host more, and start it again"
    )]
    Killed(i32),
}

/// Guest RAM, as a wedge needs it.
#[derive(Clone, Copy, Debug)]
pub struct Ram<'a> {
    /// Its memory object.
    pub fd: BorrowedFd<'a>,
    /// Its bytes, at most [`RAM_MAX`].
    pub len: u64,
    /// How many of them lie at GPA 0 and up; the rest begins at 4 GiB.
    pub low: u64,
    /// Memory object with a byte a page, not zero if the monitor decides what becomes of it.
    pub marks: BorrowedFd<'a>,
    /// The wedge walks the guest's page tables, for which it has all of RAM in its window.
    pub walked: bool,
}

/// A wedge process.
#[derive(Debug)]
pub struct Wedge {
    pid: i32,
    shared: MemoryObject<Shared>,
    orders: Vec<Order>,
    turns: Turns,
    number: usize,
    ram_len: u64,
    /// Orders could not be carried out, and guest code has not run since.
    failed: bool,
    /// Read before guest code has run.
    patched_entry: u64,
    keeps: bool,
    base: Base,
    lookups: MemoryObject<Lookups>,
    /// Pages that kernel code must not read as they are mapped.
    hidden: Vec<u64>,
    user: Option<i32>,
}

impl Wedge {
    /// Starts the wedge with a number (from 1 to [`frame::MAX_WEDGES`]) over guest RAM and a vCPU's pages, from
    /// the thread that is going to take turns with it.
    ///
    /// # Errors
    /// If the host refuses a process, memory or the sandbox.
    pub fn start(ram: Ram<'_>, pages: &Pages, number: usize) -> Result<Self, Error> {
        if ram.len > RAM_MAX as u64 {
            return Err(Error::Start(io::ErrorKind::OutOfMemory.into()));
        }
        cpuid::fault_as_in_wedges();
        let mut shared = MemoryObject::<Shared>::new("ring3-wedge-orders", size_of::<Shared>())?;
        prepare(shared.get_mut(), &ram, pages, number);
        let mut lookups = MemoryObject::<Lookups>::new("ring3-lookups", size_of::<Lookups>())?;
        lookups.get_mut().hide_sites();
        let mut apart = if pages.is_strict() { Some(Apart::new()?) } else { None };
        let parts = Parts {
            base: pages.base(),
            ram: (ram.fd.as_raw_fd(), ram.len as usize),
            walked: ram.walked,
            marks: ram.marks.as_raw_fd(),
            shared: shared.fd(),
            frame: pages.frame_fd(),
            turns: pages.turns().fd(),
            tables: pages.tables_fd(),
            cache: pages.cache_fd(),
            regions: pages.regions_fd(),
            sites: pages.sites_fd(),
            lookups: lookups.fd(),
            user: apart.as_ref().map(Apart::of_kernel),
        };
        let turns = pages.turns().clone();
        let mut user = None;
        if let Some(apart) = &mut apart {
            let shared = shared.get_mut();
            shared.setup.user_secret = strict::secret();
            let Process { pid, pidfd } = apart.start(&parts, shared)?;
            turns.adopt_user(number, pidfd);
            user = Some(pid);
        }
        let started = starter::start(&parts).inspect_err(|_| turns.end(number))?;
        let Process { pid, pidfd } = started;
        turns.adopt(number, pidfd);
        let mut wedge = Self {
            pid,
            shared,
            orders: Vec::new(),
            turns,
            number,
            ram_len: ram.len,
            failed: false,
            patched_entry: 0,
            keeps: pages.keeps,
            base: pages.base(),
            lookups,
            hidden: Vec::new(),
            user,
        };
        wedge.wait()?; // until it is ready
        wedge.processes().for_each(affinity::share);
        wedge.patched_entry = wedge.shared.get().ready.patched_entry;
        Ok(wedge)
    }

    /// Changes the mappings before guest code runs the next time. A full list is carried out at once.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn order(&mut self, order: Order) -> Result<(), Error> {
        self.orders.push(order);
        if self.orders.len() == MAX_ORDERS {
            // The orders behind one that fails are not carried out: what they were to take away is there.
            self.failed |= !self.hand_over(true)?;
        }
        Ok(())
    }

    /// The process, and that of user code if it has one of its own.
    pub fn processes(&self) -> impl Iterator<Item = i32> + use<> {
        [Some(self.pid), self.user].into_iter().flatten()
    }

    /// What the page tables do not say any more is closed, not unmapped.
    pub fn keeps(&self) -> bool {
        self.keeps
    }

    /// Guest code is about to run here: kicks reach it from now on.
    pub fn aim_kicks(&self) {
        self.turns.aim(self.number);
    }

    /// Guest code may go on here, in the space of a PCID, without the monitor; with `None` it may not. It may
    /// not either while there are orders.
    pub fn publish(&self, pcid: Option<u64>) {
        let idle = self.orders.is_empty() && !self.failed;
        self.turns.publish(self.number, pcid.filter(|_| idle));
    }

    /// Runs guest code as the frame says until it stops; false if the orders could not all be
    /// carried out (too many mappings, no memory), in which case no guest code has run.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn run(&mut self) -> Result<bool, Error> {
        if std::mem::take(&mut self.failed) {
            return Ok(false);
        }
        let done = self.hand_over(false);
        // Whoever kicks from now on finds guest code standing still; the wedge would be woken for nothing, and give up its next turn.
        self.turns.aim(MONITOR);
        done
    }

    /// What the wedge has mapped, or with no protection unmapped, by itself since the last call. What
    /// no wedge does has been written by guest code, and is left out.
    pub fn take_made(&mut self) -> Vec<Order> {
        let shared = self.shared.get_mut();
        let count = (shared.made.count as usize).min(MAX_MADE);
        shared.made.count = 0;
        let made = shared.made.list[..count].to_vec();
        made.into_iter().filter(|order| is_possible(order, self.ram_len)).collect()
    }

    /// Where stubs of patched system calls go on: HVA, the same in all wedges.
    pub fn patched_entry(&self) -> u64 {
        self.patched_entry
    }

    /// An instruction at `rip` (GVA), behind a system call, has been displaced by a patch.
    pub fn displaced(&mut self, rip: u64) {
        let low = rip as usize & 0xfff;
        self.shared.get_mut().patched.displaced[low / 64] |= 1 << (low % 64);
    }

    /// How many mappings the wedge may make by itself, and whether large user pages may be mapped.
    pub fn allow(&mut self, mappings: usize, large: bool) {
        let shared = self.shared.get_mut();
        shared.mapped.budget = mappings as u64;
        shared.mapped.large = large.into();
    }

    /// User code is to be run translated, with look-ups, or not.
    pub fn look_up(&mut self, on: bool) {
        self.shared.get_mut().mapped.lookups = on.into();
    }

    /// Kernel code must not read the page at this GVA as it is mapped.
    pub fn hide(&mut self, page: u64) {
        self.hidden.push(page);
        self.lookups.get_mut().hide(page);
    }

    /// Kernel code may read all pages as they are mapped.
    pub fn show_all(&mut self) {
        if self.hidden.is_empty() {
            return;
        }
        let tables = self.lookups.get_mut();
        self.hidden.drain(..).for_each(|page| tables.show(page));
        tables.hide_sites();
    }

    /// The user's pages in a range (GVA) have no look-ups any more.
    pub fn forget_lookups(&mut self, start: u64, len: u64) {
        self.lookups.get_mut().forget(start, len);
    }

    /// There are no look-ups any more.
    pub fn clear_lookups(&mut self) {
        self.lookups.get_mut().clear();
    }

    /// No look-up leads to the RAM page at this offset any more and lets it be written.
    pub fn protect_lookups(&mut self, offset: u64) {
        if !self.lookups.get().is_empty() {
            let hva = self.base.at(RAM as u64) + offset;
            self.lookups.get_mut().protect(hva);
        }
    }

    /// Carries out what has been ordered and, unless `orders_only`, runs guest code.
    fn hand_over(&mut self, orders_only: bool) -> Result<bool, Error> {
        let orders = std::mem::take(&mut self.orders);
        let shared = self.shared.get_mut();
        for (to, from) in shared.orders.list.iter_mut().zip(&orders) {
            *to = *from;
        }
        shared.orders.count = orders.len() as u64;
        shared.orders.only = orders_only.into();
        self.orders = orders;
        self.orders.clear();
        self.take_turns()?;
        Ok(self.shared.get().orders.failed == 0)
    }

    pub(crate) fn take_turns(&mut self) -> Result<(), Error> {
        self.turns.give(self.number);
        self.wait()
    }

    /// Waits for our turn; a dead process is noticed within a second.
    fn wait(&mut self) -> Result<(), Error> {
        while !self.turns.wait() {
            if let Some(status) = self.turns.lost_one() {
                let killed = libc::WIFSIGNALED(status);
                return Err(if killed {
                    Error::Killed(libc::WTERMSIG(status))
                } else {
                    Error::Gone
                });
            }
        }
        Ok(())
    }
}

impl Drop for Wedge {
    fn drop(&mut self) {
        self.turns.end(self.number);
    }
}

/// A wedge can have carried this out.
fn is_possible(order: &Order, ram_len: u64) -> bool {
    let page = PAGE as u64;
    let whole = [order.address, order.len, order.offset].iter().all(|n| n.is_multiple_of(page));
    let inside = |start: u64, len: u64, end: u64| start <= end && len <= end - start;
    let source = if order.protection & EMPTY != 0 { page } else { order.len };
    whole
        && (order.len <= MAX_RUN || order.len == LARGE)
        && inside(order.address, order.len, TOP as u64)
        && inside(order.offset, source, ram_len)
}

fn prepare(shared: &mut Shared, ram: &Ram<'_>, pages: &Pages, number: usize) {
    shared.setup.number = number as u64;
    shared.setup.secret = strict::secret();
    (shared.setup.ram_len, shared.setup.ram_low) =
        if ram.walked { (ram.len, ram.low) } else { (0, 0) };
    shared.setup.blob_end = pages.base().at((BLOB + IMAGE.len()) as u64);
    shared.setup.key = u64::from(crate::keys());
    shared.setup.searched = shared.setup.key;
    shared.setup.user_dispatch = pages.user_dispatch.into();
    shared.setup.keeps = pages.keeps.into();
}

/// Bytes of the blob, whole pages.
pub(crate) fn image_len() -> usize {
    IMAGE.len().next_multiple_of(PAGE)
}

/// The blob as a memory object, made once.
pub(crate) fn image() -> io::Result<i32> {
    static OBJECT: OnceLock<MemoryObject<[u8; 0]>> = OnceLock::new();
    if let Some(object) = OBJECT.get() {
        return Ok(object.fd());
    }
    let object = MemoryObject::new("ring3-wedge", IMAGE.len().next_multiple_of(PAGE))?;
    object.write(0, IMAGE);
    object.seal()?;
    Ok(OBJECT.get_or_init(|| object).fd())
}

/// Descriptors of what a wedge consists of, but for the blob.
pub(crate) struct Parts {
    pub(crate) base: Base,
    pub(crate) shared: i32,
    pub(crate) frame: i32,
    pub(crate) turns: i32,
    pub(crate) tables: i32,
    pub(crate) cache: i32,
    pub(crate) regions: i32,
    pub(crate) sites: i32,
    pub(crate) lookups: i32,
    pub(crate) marks: i32,
    /// With its length in bytes.
    pub(crate) ram: (i32, usize),
    pub(crate) walked: bool,
    /// If user code has a process of its own, what this one shares with it.
    pub(crate) user: Option<strict::Shared>,
}

pub(crate) const R: i32 = libc::PROT_READ;
pub(crate) const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
pub(crate) const RX: i32 = libc::PROT_READ | libc::PROT_EXEC;

/// The child: maps the window and becomes the blob. Only plain system calls.
pub(crate) fn become_wedge(image: i32, parts: &Parts) -> ! {
    let user = parts.user.as_ref();
    let listener =
        user.map(|user| strict::receive(user.socket).unwrap_or_else(|| strict::give_up()));
    let shared_len = size_of::<Shared>().next_multiple_of(PAGE);
    let closed = [
        (SHARED, shared_len, RW, parts.shared),
        (STACK, STACK_LEN, RW, -1),
        (ALT_STACK, ALT_STACK_LEN, RW, -1),
        (TURNS, size_of::<TurnsPage>(), RW, parts.turns),
        (FRAME, FRAME_LEN, RW, parts.frame),
        (TABLES, TABLES_LEN, R, parts.tables),
        (CACHE, CACHE_LEN, RX, parts.cache),
        (REGIONS, REGIONS_LEN, R, parts.regions),
        (COPIES, COPIES_LEN, R, parts.lookups),
        (LOOKUPS, size_of::<Lookups>(), RW, parts.lookups),
        (MARKS, (parts.ram.1 / PAGE).next_multiple_of(PAGE), R, parts.marks),
        (RAM, parts.ram.1, RW, parts.ram.0),
    ];
    let closed = &closed[..if parts.walked { closed.len() } else { closed.len() - 3 }];
    let here = |usual: usize| parts.base.at(usual as u64) as usize;
    // SAFETY: this process is about to be nothing but the window.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        forget_handlers();
        forget_rseq();
        fixed(here(BLOB), IMAGE.len().next_multiple_of(PAGE), RX, image);
        fixed(here(GATE), PAGE, RW, -1);
        fixed(SITES, SITES_LEN, R, parts.sites);
        let key = if crate::keys() { libc::syscall(libc::SYS_pkey_alloc, 0, 0) } else { 0 };
        for (at, len, protection, fd) in closed.iter().copied() {
            fixed(here(at), len, protection, fd);
            // The stubs, at the end of the cache, load with the keys closed where they go on.
            let len = if at == CACHE { STUBS - CACHE } else { len };
            let marked = key == 0
                || libc::syscall(libc::SYS_pkey_mprotect, here(at), len, protection, key) == 0;
            if !marked {
                libc::_exit(112);
            }
        }
        if let Some(user) = user {
            fixed(here(USER_PAGE), PAGE, RW, user.page);
            fixed(here(JOURNAL), PAGE, RW, user.journal);
        }
        close(parts.ram, listener);
        std::arch::asm!("jmp {}", in(reg) here(BLOB), options(noreturn))
    }
}

/// Leaves the process no descriptor but RAM's and, if there is one, the one it hears of user code by; no rights, and little of the host.
///
/// # Safety
/// In the child only.
pub(crate) unsafe fn close((ram, len): (i32, usize), listener: Option<i32>) {
    // SAFETY: as asked of the caller.
    unsafe {
        keep_only(ram, listener);
        be_the_first_to_go();
        give_up_rights();
        limit(len as u64, listener.is_some());
    }
}

/// Maps a descriptor, or anonymous memory for -1, where nothing is yet.
///
/// # Safety
/// In the child only.
pub(crate) unsafe fn fixed(at: usize, len: usize, protection: i32, fd: i32) {
    // SAFETY: as asked of the caller.
    unsafe { fixed_part(at, len, protection, (fd, 0)) }
}

/// The same from an offset on.
///
/// # Safety
/// In the child only.
pub(crate) unsafe fn fixed_part(at: usize, len: usize, protection: i32, (fd, offset): (i32, i64)) {
    let kind = if fd < 0 { libc::MAP_PRIVATE | libc::MAP_ANONYMOUS } else { libc::MAP_SHARED };
    let flags = kind | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: replaces nothing.
    unsafe {
        if libc::mmap(at as *mut _, len, protection, flags, fd, offset) != at as *mut _ {
            libc::_exit(111);
        }
    }
}

/// Guest code may come to make host calls, and these take descriptors: there is none but guest RAM's.
///
/// # Safety
/// In the child only.
unsafe fn keep_only(ram: i32, listener: Option<i32>) {
    let [first, second] = [RAM_FD, LISTENER_FD].map(|fd| fd as i32);
    // SAFETY: descriptors of this process, which uses no other any more.
    unsafe {
        // Neither takes the other's place before that is at its own.
        let ram = libc::fcntl(ram, libc::F_DUPFD, second + 1);
        let listener = listener.map(|fd| libc::fcntl(fd, libc::F_DUPFD, second + 1));
        let kept = libc::dup2(ram, first) >= 0
            && listener.is_none_or(|fd| libc::dup2(fd, second) >= 0)
            && libc::syscall(
                libc::SYS_close_range,
                first + 1 + i32::from(listener.is_some()),
                u32::MAX,
                0,
            ) == 0;
        if !kept {
            libc::_exit(113);
        }
    }
}

/// Guest code can make this process take memory, by page tables and private pages. If the host runs out
/// of it, nobody else is to be killed for that, and nothing is to be written to a disk. Best effort.
///
/// # Safety
/// In the child only.
pub(crate) unsafe fn be_the_first_to_go() {
    let worst = c"1000";
    // SAFETY: plain system calls; the strings are constants.
    unsafe {
        let file = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY);
        libc::write(file, worst.as_ptr().cast(), worst.count_bytes());
        libc::close(file);
    }
}

/// What is root's outside is nothing here: guest code needs no rights, whoever runs it.
///
/// # Safety
/// In the child only.
unsafe fn give_up_rights() {
    /// `_LINUX_CAPABILITY_VERSION_3`, for this process; and three sets of 64 bits, in halves.
    const VERSION: [u32; 2] = [0x2008_0522, 0];
    let none = [0_u32; 6];
    // SAFETY: the call reads both.
    unsafe {
        if libc::syscall(libc::SYS_capset, VERSION.as_ptr(), none.as_ptr()) != 0 {
            libc::_exit(114);
        }
    }
}

/// Bytes a wedge may have of memory that it writes and shares with nobody: stacks, and pages of code while they are changed.
const PRIVATE: u64 = 64 << 20;
/// Address space beyond RAM: the window, and memory without content.
const SPACE: u64 = 32 << 30;

/// What the host grants at the most, in case something gets by what it may ask for. A guest may have its RAM mapped several times.
///
/// # Safety
/// In the child only.
unsafe fn limit(ram: u64, listens: bool) {
    let limits = [
        (libc::RLIMIT_CORE, 0),
        (libc::RLIMIT_FSIZE, 0),
        (libc::RLIMIT_MEMLOCK, 0),
        (libc::RLIMIT_MSGQUEUE, 0),
        (libc::RLIMIT_NPROC, 0),
        (libc::RLIMIT_NOFILE, RAM_FD + 1 + u64::from(listens)),
        (libc::RLIMIT_DATA, PRIVATE),
        (libc::RLIMIT_AS, SPACE + 4 * ram),
    ];
    for (resource, most) in limits {
        let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
        // SAFETY: reads the structure. Where the host's own limit is lower, that stays.
        unsafe { libc::setrlimit(resource, &raw const limit) };
    }
}

/// XCR0.
pub(crate) fn enabled_vectors() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: the host's kernel has enabled XSAVE wherever signal frames carry AVX state; XCR0 exists.
    unsafe {
        std::arch::asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high,
            options(nomem, nostack, preserves_flags));
    }
    u64::from(high) << 32 | u64::from(low)
}

/// The host's kernel has told that FSGSBASE may be used.
pub(crate) fn has_fsgsbase() -> bool {
    const HWCAP2_FSGSBASE: u64 = 1 << 1;
    // SAFETY: reads the auxiliary vector.
    unsafe { libc::getauxval(libc::AT_HWCAP2) & HWCAP2_FSGSBASE != 0 }
}

/// The host knows ARCH_SET_CPUID. Asks for what is the case anyway: that CPUID does not fault.
pub(crate) fn can_fault_cpuid() -> bool {
    const ARCH_SET_CPUID: i32 = 0x1012;
    // SAFETY: changes nothing.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_CPUID, 1) == 0 }
}

/// The host knows syscall user dispatch. Asks for what is the case anyway: that there is none.
pub(crate) fn can_dispatch() -> bool {
    // SAFETY: changes nothing.
    unsafe { libc::prctl(frame::SYSCALL_USER_DISPATCH as i32, 0, 0, 0, 0) == 0 }
}

/// The monitor's signal handlers are about to be unmapped, and what is sent to the whole process group
/// is the monitor's to answer.
///
/// # Safety
/// In the child only.
pub(crate) unsafe fn forget_handlers() {
    for signal in 1..=libc::SIGRTMAX() {
        // SAFETY: ignoring runs no code; where the host refuses it, nothing changes.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Unregisters glibc's rseq area: it is about to be unmapped, and the kernel writes it.
///
/// # Safety
/// In a thread that runs no more of the C library.
pub(crate) unsafe fn forget_rseq() {
    unsafe extern "C" {
        static __rseq_offset: isize;
        static __rseq_size: u32;
    }
    // SAFETY: the area is the one glibc registered for this thread; 0x53053053 is its signature.
    unsafe {
        let thread: usize;
        std::arch::asm!("rdfsbase {}", out(reg) thread, options(nomem, nostack));
        let area = thread.wrapping_add_signed(__rseq_offset);
        libc::syscall(libc::SYS_rseq, area, 32.max(__rseq_size), 1, 0x5305_3053u32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// User code can jump to each of them: `gates`, `patched` and `signal` have one WRPKRU each, `host` two XRSTORs and `user` three, which
    /// say what keeps it from gaining anything. There must be none inside other instructions.
    #[test]
    fn the_blob_opens_keys_only_where_it_means_to() {
        let opens = |bytes: &&[u8]| frame::keys::find(bytes).is_some();
        assert_eq!(IMAGE.windows(3).filter(opens).count(), 8);
    }

    /// Guest code that owns its wedge can claim anything.
    #[test]
    fn claims_are_checked() {
        const RAM: u64 = 1 << 30;
        let honest = Order { address: 0x40_0000, len: 4096, offset: RAM - 4096, protection: 3 };
        let unmapped = Order { protection: 0, offset: 0, ..honest };
        let large = Order { len: LARGE, offset: RAM - LARGE, ..honest };
        let empty = Order { len: MAX_RUN, protection: EMPTY | 1, ..honest };
        for order in [honest, unmapped, large, empty] {
            assert!(is_possible(&order, RAM), "{order:x?}");
        }
        let lies = [
            Order { address: !0xfff, ..honest },
            Order { address: TOP as u64, ..honest },
            Order { address: 0x40_0001, ..honest },
            Order { len: !0xfff, ..honest },
            Order { len: LARGE * 2, offset: 0, ..honest },
            Order { offset: RAM, ..honest },
            Order { offset: !0xfff, ..honest },
        ];
        for order in lies {
            assert!(!is_possible(&order, RAM), "{order:x?}");
        }
    }
}
