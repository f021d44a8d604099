//! A kernel of a few instructions, compared.

use super::*;
use crate::Modes;
use engine::{Attention, Board, BoardParts, Engine, LocalApic};
use host_fake::{FakeClock, FakeEntropy};
use std::sync::Arc;
use x86::{
    Fault,
    control::{cr0, cr4, efer},
    cpuid::{CpuidResult, Model, Settings},
    fpu::xstate,
    paging::{ADDRESS, P, RW},
    seg,
    segment::attr,
};
use x86_interp::Exit;

/// GVA of the code, and its place in RAM.
const CODE: (u64, u64) = (0xffff_ffff_8100_0000, 0x4_0000);
/// GVA of the data, whose middle is the top of the stack, and its place in RAM.
const DATA: (u64, u64) = (0xffff_ffff_8200_0000, 0x5_0000);
const ROOT: u64 = 0x1000;
/// Bytes before the loop.
const HEAD: usize = 5;

/// Counts down from 100, stores, calls, halts.
const KERNEL: &[u8] = &[
    0xb9, 0x64, 0, 0, 0, // mov ecx, 100
    0x48, 0x01, 0xc8, // add rax, rcx
    0x9c, // pushfq
    0x5a, // pop rdx
    0x48, 0xc7, 0x04, 0x25, 0x10, 0, 0, 0x82, 5, 0, 0, 0, // mov qword [DATA + 16], 5
    0xff, 0xc9, // dec ecx
    0x75, 0xeb, // jnz to add
    0xe8, 1, 0, 0, 0,    // call
    0xf4, // hlt
    0x0f, 0x31, // rdtsc
    0x31, 0xd2, // xor edx, edx
    0xc3, // ret
];

struct NoApic;

impl LocalApic for NoApic {
    fn pending(&self) -> u32 {
        0
    }
    fn acknowledge(&self) -> Option<u8> {
        None
    }
    fn take_nmi(&self) -> bool {
        false
    }
    fn enabled(&self) -> bool {
        false
    }
    fn cr8(&self) -> u8 {
        0
    }
    fn set_cr8(&self, _: u8) {}
    fn msr_read(&self, _: u32) -> Result<u64, Fault> {
        Err(Fault::gp(0))
    }
    fn msr_write(&self, _: u32, _: u64) -> Result<(), Fault> {
        Err(Fault::gp(0))
    }
    fn mmio_read(&self, _: u64, _: &mut [u8]) -> bool {
        false
    }
    fn mmio_write(&self, _: u64, _: &[u8]) -> bool {
        false
    }
}

fn board(ram: Ram) -> Board {
    Board::new(BoardParts {
        ram,
        ports: bus::Bus::new(),
        mmio: bus::Bus::new(),
        apic: Arc::new(NoApic),
        apic_id: 0,
        cpuid: Arc::new(Model::new(
            |_, _| CpuidResult::default(),
            Settings { tsc_hz: 1_000_000_000, cpus: 1 },
        )),
        clock: Arc::new(FakeClock::default()),
        entropy: Arc::new(FakeEntropy::new(1)),
        vector_unit: Box::new(native::HostVectorUnit::new().expect("executable memory")),
        attention: Arc::new(Attention::default()),
    })
}

/// RAM with the kernel and its page tables.
fn memory() -> Ram {
    let ram = Ram::new(2 << 20).expect("memory");
    let mut last = ROOT;
    for (gva, gpa) in [CODE, DATA] {
        let mut table = ROOT;
        for shift in [39, 30, 21] {
            let slot = table + (gva >> shift & 0x1ff) * 8;
            if ram.load64(slot) == 0 {
                last += PAGE;
                ram.store64(slot, last | P | RW);
            }
            table = ram.load64(slot) & ADDRESS;
        }
        ram.store64(table + (gva >> 12 & 0x1ff) * 8, gpa | P | RW);
    }
    ram.write(CODE.1, KERNEL);
    ram
}

fn state() -> Vcpu {
    let mut v = Vcpu {
        rip: CODE.0,
        cr0: cr0::PE | cr0::MP | cr0::ET | cr0::NE | cr0::WP | cr0::AM | cr0::PG,
        cr3: ROOT,
        cr4: cr4::PAE | cr4::OSFXSR | cr4::OSXMMEXCPT | cr4::OSXSAVE | cr4::FSGSBASE | cr4::SMAP,
        efer: efer::SCE | efer::LME | efer::LMA | efer::NXE,
        xcr0: xstate::SUPPORTED,
        ..Vcpu::default()
    };
    v.gpr[x86::reg::RSP] = DATA.0 + PAGE / 2;
    v.seg[seg::CS].attr |= attr::L;
    for segment in [seg::CS, seg::SS] {
        v.seg[segment].attr &= !(3 << attr::DPL_SHIFT);
    }
    v
}

fn machine(lock_step: LockStep) -> Fast {
    let modes = Modes { user_direct: true, kernel_translated: true, lock_step: Some(lock_step) };
    Fast::new(state(), board(memory()), &Attention::default(), modes).expect("an engine")
}

/// Counters by name.
fn count(fast: &mut Fast, name: &str) -> u64 {
    let found = fast.details().into_iter().find(|(row, _)| row == name);
    found.unwrap_or_else(|| panic!("no counter {name}")).1
}

#[test]
fn right_translations_differ_nowhere() {
    let mut fast = machine(LockStep { runs: None, ..LockStep::default() });
    let exit = fast.run(u64::MAX);
    assert_eq!((exit, fast.failure()), (Exit::Halted, None));
    assert_eq!(fast.ram().load64(DATA.1 + 16), 5);
    // The head with the first round, and the others; the return is behind RDTSC.
    assert_eq!(count(&mut fast, "blocks compared"), 100);
    assert_eq!(count(&mut fast, "instructions compared"), 100 * 6 + 1 + 1);
    assert_eq!(count(&mut fast, "not compared: time or chance"), 1);
}

#[test]
fn what_has_been_compared_often_enough_runs_as_ever() {
    let mut fast = machine(LockStep { runs: Some(3), ..LockStep::default() });
    assert_eq!((fast.run(u64::MAX), fast.failure()), (Exit::Halted, None));
    assert_eq!(count(&mut fast, "blocks compared"), 1 + 3);
}

#[test]
fn comparing_starts_when_it_is_to() {
    let mut fast = machine(LockStep { from: 1_000_000, ..LockStep::default() });
    assert_eq!((fast.run(u64::MAX), fast.failure()), (Exit::Halted, None));
    assert_eq!(count(&mut fast, "blocks compared"), 0);
}

/// Runs the kernel with a byte of its first block's translation changed; what is said.
fn spoiled(find: &[u8], byte: usize, by: u8) -> String {
    let mut fast = machine(LockStep::default());
    fast.start_comparing();
    let host = fast.block_at_rip().expect("a block");
    let code: Vec<u8> = (0..200).map(|n| fast.code.byte(&fast.pages, host + n)).collect();
    let at = code.windows(find.len()).position(|part| part == find).expect("is copied");
    fast.pages.write_code(host - frame::CACHE as u64 + (at + byte) as u64, &[by]);
    assert_eq!(fast.run(u64::MAX), Exit::Shutdown);
    fast.failure().expect("a difference")
}

#[test]
fn a_wrong_register_is_found() {
    let report = spoiled(&KERNEL[..HEAD], 1, 0x65);
    let line = report.lines().find(|line| line.contains("rcx")).expect("named");
    assert!(line.ends_with('*'), "{report}");
    assert!(line.contains("64") && line.contains("63"), "{report}");
    for part in ["guest code:", "host code:", "ffffffff81000000 b964000000", "dec ecx"] {
        assert!(report.contains(part), "no {part} in\n{report}");
    }
}

#[test]
fn a_wrong_write_is_found() {
    let report = spoiled(&[0x82, 5, 0, 0, 0], 1, 7);
    let line = report.lines().find(|line| line.contains("ram 0x50010")).expect("named");
    assert!(line.contains("0007") && line.contains("0005"), "{report}");
}

#[test]
fn a_wrong_jump_is_found() {
    let report = spoiled(&[0xff, 0xc9, 0x0f, 0x85], 3, 0x84); // je
    assert!(report.contains("differs where it has come to"), "{report}");
}

#[test]
fn options() {
    let parse = |text: &str| text.parse::<LockStep>();
    assert_eq!(parse(""), Ok(LockStep::default()));
    let all = LockStep { runs: None, from: 7, every: Some(9) };
    assert_eq!(parse("runs=all,from=7,every=9"), Ok(all));
    assert_eq!(parse("runs=9").map(|options| options.runs), Ok(Some(9)));
    for wrong in ["runs", "runs=0", "from=x", "for=1"] {
        assert!(parse(wrong).is_err(), "{wrong}");
    }
}
