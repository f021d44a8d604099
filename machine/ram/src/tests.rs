//! RAM as its users rely on it.

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use contract::GuestRam;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};
use x86::paging::WalkMemory;

use super::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

#[test]
fn sizes_are_checked() {
    assert!(matches!(Ram::new(0), Err(RamError::BadSize { .. })));
    assert!(matches!(Ram::new(MIB - PAGE), Err(RamError::BadSize { .. })));
    assert!(matches!(Ram::new(MIB + 1), Err(RamError::BadSize { .. })));
    let error = Ram::new(1 << 60).unwrap_err().to_string();
    assert!(error.contains("the host cannot give the guest 1099511627776 MiB"), "{error}");
}

/// A page of code is copied if its bytes are good, and counts as copied until somebody writes the page.
#[test]
fn code_is_copied_behind_ram_until_it_is_written() {
    const AT: u64 = 0x5000;
    let ram = Ram::with_copies(MIB).unwrap();
    let shown = |ram: &Ram| {
        let mut byte = [0];
        let object = std::fs::File::from(own(ram.object()));
        object.read_exact_at(&mut byte, MIB + AT).unwrap();
        byte[0]
    };
    assert_eq!(ram.copy_code(AT, |_| true), None, "it is no code");
    for value in [7, 8] {
        ram.store8(AT, value);
        ram.mark_code(AT);
        assert_eq!(ram.copy_code(AT, |_| false), None, "it is bad");
        assert_eq!(ram.copy_code(AT, |bytes| bytes[0] == value), Some(MIB + AT));
        assert_eq!(ram.copy_code(AT, |_| false), Some(MIB + AT), "there is one");
        ram.write_gpa(AT, &[9]).unwrap();
        assert_eq!(ram.copy_code(AT, |_| true), None, "it has been written");
        assert_eq!(shown(&ram), value);
    }
    // What is written while a copy is made is in no copy.
    ram.mark_code(AT);
    let written = |_: &[u8; PAGE as usize]| ram.write_gpa(AT, &[10]).is_ok();
    assert_eq!(ram.copy_code(AT, written), None);
    assert_eq!(Ram::new(MIB).unwrap().len(), MIB);
}

#[test]
fn hole_below_4_gib() {
    let ram = Ram::new(4 * GIB).unwrap();
    assert_eq!((ram.low_len(), ram.high_len()), (LOW_MAX, GIB));
    assert_eq!(ram.page(LOW_MAX - 1).unwrap().offset, LOW_MAX - PAGE);
    assert_eq!(ram.page(LOW_MAX), None);
    assert_eq!(ram.page(HIGH_BASE - 1), None);
    assert_eq!(ram.page(HIGH_BASE + 5).unwrap().offset, LOW_MAX);
    assert_eq!(ram.page(HIGH_BASE + GIB - 1).unwrap().offset, 4 * GIB - PAGE);
    assert_eq!(ram.page(HIGH_BASE + GIB), None);
    assert_eq!(ram.page(u64::MAX), None);
}

#[test]
fn ranges_do_not_cross_the_hole() {
    let ram = Ram::new(4 * GIB).unwrap();
    let mut four = [0; 4];
    ram.write_gpa(LOW_MAX - 4, &[1, 2, 3, 4]).unwrap();
    ram.read_gpa(LOW_MAX - 4, &mut four).unwrap();
    assert_eq!(four, [1, 2, 3, 4]);
    let error = ram.read_gpa(LOW_MAX - 3, &mut four).unwrap_err();
    assert_eq!(error, OutOfRam { gpa: LOW_MAX - 3, len: 4 });
    assert!(ram.write_gpa(HIGH_BASE - 1, &[0; 2]).is_err());
    assert!(ram.write_gpa(u64::MAX - 1, &[0; 4]).is_err());
    assert!(ram.write_untouched(HIGH_BASE - 1, &[0; 2]).is_err());
    ram.write_gpa(HIGH_BASE, &[9]).unwrap();
    assert_eq!(ram.load8(LOW_MAX), 9);
}

#[test]
fn words_of_every_size_and_alignment() {
    let ram = Ram::new(MIB).unwrap();
    for offset in 0x100..0x110 {
        ram.store64(offset, 0x8877_6655_4433_2211);
        assert_eq!(ram.load64(offset), 0x8877_6655_4433_2211);
        assert_eq!(ram.load32(offset + 1), 0x5544_3322);
        assert_eq!(ram.load16(offset + 3), 0x5544);
        assert_eq!(ram.load8(offset + 7), 0x88);
        ram.store32(offset + 2, 0xdead_beef);
        ram.store16(offset, 0x0102);
        ram.store8(offset + 7, 0);
        assert_eq!(ram.load64(offset), 0x0077_dead_beef_0102);
    }
    ram.store64(MIB - 8, 7);
    assert_eq!(ram.load64(MIB - 8), 7);
}

#[test]
#[should_panic(expected = "outside guest RAM")]
fn load_past_the_end_panics() {
    Ram::new(MIB).unwrap().load64(MIB - 7);
}

#[test]
#[should_panic(expected = "outside guest RAM")]
fn load_far_past_the_end_panics() {
    Ram::new(MIB).unwrap().load8(u64::MAX);
}

#[test]
fn compare_and_swap() {
    let ram = Ram::new(MIB).unwrap();
    for (size, mask) in [(1, 0xff), (2, 0xffff), (4, 0xffff_ffff), (8, u64::MAX)] {
        for offset in [0x200, 0x203] {
            ram.store64(offset, 0x1122_3344_5566_7788);
            let now = 0x1122_3344_5566_7788 & mask;
            assert_eq!(ram.cas(offset, size, 1, 2), now, "no match, no swap");
            assert_eq!(ram.load64(offset), 0x1122_3344_5566_7788);
            assert_eq!(ram.cas(offset, size, now, !0), now);
            assert_eq!(ram.load64(offset), 0x1122_3344_5566_7788 | mask);
        }
    }
    assert_eq!(ram.cas128(0x300, 0, 5 << 64), 0);
    assert_eq!(ram.cas128(0x300, 0, 6), 5 << 64);
    assert_eq!(ram.load64(0x308), 5);
}

#[test]
fn code_pages_go_stale_once() {
    let ram = Ram::new(MIB).unwrap();
    ram.mark_code(0x5123);
    assert!(ram.is_code(0x5000) && !ram.is_code(0x4000) && !ram.is_code(0x6000));
    ram.note_write(0x4ff0, 16);
    ram.note_write(0x5000, 0);
    assert!(!ram.has_stale_code(), "ends just before the page");
    ram.note_write(0x4ff0, 17);
    ram.note_write(0x5800, 1);
    assert!(ram.has_stale_code());
    assert_eq!(ram.take_stale_code(), [0x5000]);
    assert!(!ram.has_stale_code() && !ram.is_code(0x5000));
    ram.note_write(0x5000, 1);
    assert!(!ram.has_stale_code());
}

#[test]
fn a_page_marked_while_stale_stays_stale() {
    let ram = Ram::new(MIB).unwrap();
    ram.mark_code(0x1000);
    ram.note_write(0x1000, 1);
    ram.mark_code(0x1000);
    assert_eq!(ram.take_stale_code(), [0x1000]);
}

#[test]
fn writes_by_loaders_and_devices_are_noted() {
    let ram = Ram::new(4 * GIB).unwrap();
    ram.mark_code(0x1000);
    ram.mark_code(LOW_MAX + 0x3000);
    ram.write_gpa(0xfff, &[1, 2]).unwrap();
    assert_eq!(ram.take_stale_code(), [0x1000]);
    ram.mark_code(0x1000);
    ram.write_untouched(0xfff, &[3, 4]).unwrap();
    assert_eq!(ram.take_stale_code(), [0x1000]);
    assert_eq!([ram.load8(0xfff), ram.load8(0x1000)], [3, 4]);
    ram.dma().write_slice(&[1; 8], GuestAddress(HIGH_BASE + 0x2ffc)).unwrap();
    assert_eq!(ram.take_stale_code(), [LOW_MAX + 0x3000]);
    ram.mark_code(LOW_MAX + 0x3000);
    ram.dma().write_obj(1_u32, GuestAddress(HIGH_BASE + 0x3008)).unwrap();
    ram.dma().read_obj::<u32>(GuestAddress(0x1000)).unwrap();
    assert_eq!(ram.take_stale_code(), [LOW_MAX + 0x3000]);
}

#[test]
fn devices_see_the_same_bytes() {
    let ram = Ram::new(4 * GIB).unwrap();
    ram.store32(LOW_MAX + 0x10, 0xcafe);
    assert_eq!(ram.dma().read_obj::<u32>(GuestAddress(HIGH_BASE + 0x10)).unwrap(), 0xcafe);
    ram.dma().write_obj(0x77_u8, GuestAddress(0x42)).unwrap();
    assert_eq!(ram.load8(0x42), 0x77);
    assert_eq!(ram.dma().num_regions(), 2);
    assert!(ram.dma().read_obj::<u8>(GuestAddress(LOW_MAX)).is_err());
    assert_eq!(Ram::new(MIB).unwrap().dma().num_regions(), 1);
}

#[test]
fn rom_loses_page_walk_writes() {
    let ram = Ram::new(MIB).unwrap();
    ram.write_gpa(0xf_0000, &1_u64.to_le_bytes()).unwrap();
    ram.set_rom(0xf_0000, 0x1_0000).unwrap();
    assert!(!ram.page(0xf_0000).unwrap().writable && ram.page(0xe_f000).unwrap().writable);
    assert!(!ram.page(0xf_f000).unwrap().writable);
    assert!((&ram).cas_u64(0xf_0000, 1, 2), "lost, not retried forever");
    assert_eq!((&ram).read_u64(0xf_0000), 1);
    assert!(ram.set_rom(MIB, PAGE).is_err());
}

#[test]
fn page_walker_sees_a_bus() {
    let ram = Ram::new(MIB).unwrap();
    let mut bus = &ram;
    assert_eq!(bus.read_u64(MIB), u64::MAX);
    assert_eq!(bus.read_u32(LOW_MAX), u32::MAX);
    assert!(bus.cas_u64(MIB, 1, 2));
    assert!(bus.cas_u32(0x1000, 0, 3) && !bus.cas_u32(0x1000, 0, 4));
    assert_eq!(bus.read_u32(0x1000), 3);
    assert!(bus.cas_u64(0x1000, 3, 1 << 40));
    assert_eq!(bus.read_u64(0x1000), 1 << 40);
}

#[test]
fn the_memory_object_is_sealed_and_shared() {
    use std::os::unix::fs::FileExt;
    let ram = Ram::new(MIB).unwrap();
    let file = std::fs::File::from(own(ram.object()));
    assert!(file.set_len(0).is_err());
    file.write_all_at(&[0x5a], 0x777).unwrap();
    assert_eq!(ram.clone().load8(0x777), 0x5a);
}

/// A writer that stores then looks, and a reader that marks then reads, cannot both miss.
#[test]
fn marks_and_writes_never_miss_each_other() {
    let ram = Ram::new(MIB).unwrap();
    for round in 1..2000 {
        let writer = ram.clone();
        let thread = std::thread::spawn(move || {
            writer.store64(0x2000, round);
            writer.note_write(0x2000, 8);
        });
        ram.mark_code(0x2000);
        let seen = ram.load64(0x2000);
        thread.join().unwrap();
        assert!(seen == round || ram.has_stale_code(), "round {round}");
        ram.note_write(0x2000, 8);
        assert_eq!(ram.take_stale_code(), [0x2000]);
    }
}

fn own(object: &dyn MemoryObject) -> OwnedFd {
    object.descriptor().unwrap().try_clone_to_owned().unwrap()
}

/// The same RAM as a process that serves a device has it.
fn of_another(ram: &Ram) -> Ram {
    let [memory, marks, notes] = [ram.object(), ram.marks(), ram.notes()].map(own);
    Ram::of_another(memory, marks, notes).unwrap()
}

#[test]
fn what_another_process_writes_over_code_is_stale() {
    let ram = Ram::new(2 * MIB).unwrap();
    let device = of_another(&ram);
    assert_eq!(device.len(), ram.len());
    ram.mark_code(0x3000);
    ram.mark_code(0x5000);
    device.dma().write_slice(&[1; 0x1000], GuestAddress(0x1000)).unwrap();
    assert!(!ram.has_stale_code(), "nobody made anything of that page");
    device.dma().write_slice(&[7; 0x2001], GuestAddress(0x3000)).unwrap();
    assert_eq!(ram.load8(0x5000), 7);
    assert!(ram.has_stale_code());
    assert_eq!(ram.take_stale_code(), [0x3000, 0x5000]);
    assert!(!ram.has_stale_code() && ram.take_stale_code().is_empty());
    device.dma().write_slice(&[8], GuestAddress(0x3000)).unwrap();
    assert!(!ram.has_stale_code(), "the mark is gone with what was made");
    ram.mark_code(0x3000);
    ram.note_write(0x3000, 1);
    device.dma().write_slice(&[9], GuestAddress(0x3000)).unwrap();
    assert_eq!(ram.take_stale_code(), [0x3000], "once, though noted on both sides");
}

#[test]
fn what_another_process_gives_is_checked() {
    let (ram, small) = (Ram::new(2 * MIB).unwrap(), Ram::new(MIB).unwrap());
    let parts = (own(ram.object()), own(ram.marks()), own(small.notes()));
    // Both are rounded up to a page, so the notes of less RAM do as well as long as they are long enough.
    assert!(Ram::of_another(parts.0, parts.1, parts.2).is_ok());
    let unsealed = rustix::fs::memfd_create("unsealed", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&unsealed, 2 * MIB).unwrap();
    let unsealed = Ram::of_another(unsealed, own(ram.marks()), own(ram.notes()));
    assert!(unsealed.is_err());
    // A page of marks is enough for 16 MiB.
    let large = Ram::new(17 * MIB).unwrap();
    assert!(Ram::of_another(own(large.object()), own(ram.marks()), own(large.notes())).is_err());
}

/// Kicks nobody: those who listen here look by themselves.
struct Looks;
impl Kicker for Looks {
    fn kick(&self) {}
}

fn for_vcpus(ram: &Ram, count: usize) -> Vec<Ram> {
    ram.for_vcpus((0..count).map(|_| Arc::new(Looks) as Arc<dyn Kicker>).collect())
}

#[test]
fn a_page_is_closed_when_the_other_vcpu_has_heard_of_it() {
    let ram = Ram::new(MIB).unwrap();
    let vcpus = for_vcpus(&ram, 2);
    vcpus[1].enter();
    std::thread::scope(|scope| {
        let marker = scope.spawn(|| vcpus[0].mark_code(0x5000));
        while !vcpus[1].has_stale_code() {
            std::thread::yield_now();
        }
        assert!(ram.is_code(0x5000) && !ram.is_settled(0x5000), "not before it is heard");
        assert!(!marker.is_finished());
        let news = vcpus[1].take_code_news();
        assert_eq!((news.closed, news.stale), (vec![0x5000], vec![]));
        assert!(marker.join().unwrap());
    });
    assert!(ram.is_settled(0x5000) && !vcpus[1].mark_code(0x5000), "once for all");
}

#[test]
fn a_vcpu_that_halts_is_not_waited_for_and_hears_later() {
    let ram = Ram::new(MIB).unwrap();
    let vcpus = for_vcpus(&ram, 2);
    assert!(vcpus[0].mark_code(0x5000));
    vcpus[0].note_write(0x5000, 1);
    assert_eq!(vcpus[0].take_code_news().stale, [0x5000]);
    vcpus[1].enter();
    let news = vcpus[1].take_code_news();
    assert_eq!((news.closed, news.stale), (vec![0x5000], vec![0x5000]));
}

#[test]
fn all_vcpus_hear_of_a_device() {
    let ram = Ram::new(MIB).unwrap();
    let vcpus = for_vcpus(&ram, 3);
    vcpus[0].mark_code(0x5000);
    of_another(&ram).dma().write_slice(&[1], GuestAddress(0x5000)).unwrap();
    // Whoever looks first tells the others.
    assert!(vcpus[2].has_stale_code());
    for vcpu in vcpus.iter().rev() {
        assert_eq!(vcpu.take_code_news().stale, [0x5000]);
    }
}

/// A CPU as far as pages of code go: a TLB of one entry, and what it has made from the page.
struct Model<'a> {
    ram: &'a Ram,
    writes_unnoticed: bool,
    made: Option<u64>,
}

impl Model<'_> {
    const PAGE: u64 = 0x7000;

    fn hear(&mut self) {
        if !self.ram.has_stale_code() {
            return;
        }
        let news = self.ram.take_code_news();
        self.writes_unnoticed &= !news.closed.contains(&Self::PAGE);
        self.made = self.made.filter(|_| !news.stale.contains(&Self::PAGE));
    }

    fn execute(&mut self) -> u64 {
        if let Some(made) = self.made {
            return made;
        }
        while self.ram.mark_code(Self::PAGE) {
            self.writes_unnoticed = false;
            if !self.ram.has_stale_code() {
                break;
            }
            self.hear();
        }
        *self.made.insert(self.ram.load64(Self::PAGE))
    }

    fn write(&mut self, value: u64) {
        if !self.writes_unnoticed {
            self.writes_unnoticed = !self.ram.is_code(Self::PAGE);
        }
        self.ram.store64(Self::PAGE, value);
        if !self.writes_unnoticed {
            self.ram.note_write(Self::PAGE, 8);
        }
    }
}

/// After a store that tells of new code, nobody executes the old one.
#[test]
fn no_vcpu_runs_what_it_has_been_told_is_old() {
    use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
    const ROUNDS: u64 = 5000;
    let (ram, told) = (Ram::new(MIB).unwrap(), AtomicU64::new(0));
    let vcpus = for_vcpus(&ram, 3);
    let run = |number: usize| {
        let ram = &vcpus[number];
        let mut cpu = Model { ram, writes_unnoticed: false, made: None };
        ram.enter();
        // Instructions are blocks of one: each begins with a look.
        for round in 1.. {
            cpu.hear();
            let least = told.load(SeqCst);
            if least >= ROUNDS {
                break;
            }
            cpu.hear();
            match number {
                0 => {
                    cpu.write(round);
                    cpu.hear();
                    told.store(round, SeqCst);
                }
                _ => {
                    let found = cpu.execute();
                    assert!(found >= least, "{found} after {least}");
                }
            }
        }
        ram.leave();
    };
    std::thread::scope(|scope| {
        for number in 0..3 {
            let run = &run;
            scope.spawn(move || run(number));
        }
    });
}

/// Two threads count up and down in the same bytes, which are not aligned, lie in two cache lines, or in two pages. Some hosts make
/// such an access wait for a long time, so they count for no longer than [`PATIENCE`].
fn counts(size: usize, at: u64, second: Option<u64>) {
    const ROUNDS: u64 = 20_000;
    const PATIENCE: Duration = Duration::from_millis(300);
    let ram = Ram::new(MIB).unwrap();
    let mask = u64::MAX >> (64 - 8 * size);
    let swap = |old, new| match second {
        Some(second) => ram.cas_split(at, second, size, old, new),
        None => ram.cas(at, size, old, new),
    };
    let end = Instant::now() + PATIENCE;
    let add = |number: u64| {
        let (mut old, mut rounds) = (0, 0);
        while rounds < ROUNDS && Instant::now() < end {
            let found = swap(old, old.wrapping_add(number) & mask);
            rounds += u64::from(found == old);
            old = found;
        }
        rounds
    };
    let (up, down) = std::thread::scope(|scope| {
        let (up, down) = (scope.spawn(|| add(5)), scope.spawn(|| add(mask - 1)));
        (up.join().expect("it counts"), down.join().expect("it counts"))
    });
    assert!(up != 0 && down != 0, "{size} bytes at {at:#x}, {second:x?}");
    let all = up.wrapping_mul(5).wrapping_sub(2 * down) & mask;
    assert_eq!(swap(all, all), all, "{size} bytes at {at:#x}, {second:x?}");
}

#[test]
fn a_swap_is_one_step_whatever_its_alignment() {
    for size in [2, 4, 8] {
        counts(size, 0x101, None);
        counts(size, 0x140 - 1, None);
        counts(size, 0x2000 - 1, None);
        counts(size, 0x2000 - 1, Some(0x2000));
        counts(size, 0x2000 - size as u64 / 2, Some(0x5000));
    }
}

#[test]
fn a_swap_in_two_pages_writes_where_it_should() {
    let ram = Ram::new(MIB).unwrap();
    ram.store16(0x7000, 0x4433);
    ram.store16(0x1ffe, 0x2211);
    assert_eq!(ram.cas_split(0x1ffe, 0x7000, 4, 0, 1), 0x4433_2211);
    assert_eq!(ram.cas_split(0x1ffe, 0x7000, 4, 0x4433_2211, 0x8877_6655), 0x4433_2211);
    assert_eq!((ram.load16(0x1ffe), ram.load16(0x7000)), (0x6655, 0x8877));
    assert_eq!((ram.load8(0x1ffd), ram.load8(0x7002)), (0, 0));
}

/// The last page of words is the monitor's own.
#[test]
fn pages_of_words_lie_behind_all_that_the_guest_has() {
    let ram = Ram::with_copies(2 << 20).expect("RAM");
    let pages: Vec<_> = std::iter::from_fn(|| ram.take_words()).collect();
    assert_eq!(pages.len() as u64, words::PAGES - 1);
    assert!(pages.iter().all(|page| *page >= 2 * ram.len() && page % PAGE == 0));
    assert_eq!(pages[0], ram.words_start());
    assert_eq!(ram.take_words(), None, "nor later");
    let (before, other) = (ram.bells_epoch(), ram.clone());
    other.change_bells();
    assert_ne!(ram.bells_epoch(), before);
    assert_eq!(ram.object().len(), ram.words_start() + words::LEN);
}
