//! A wedge that writes anything into the page it shares with the monitor: what comes of that is what a guest's registers may be.

use std::{cell::RefCell, fs};

use engine::{Engine, VcpuRequests};
use fuzzer::Target;
use ram::Ram;
use wedge_abi::{MapReport, Owner, RawChange, Rights, TOP, WINDOW, WINDOW_END};
use x86::{Vcpu, paging::G};
use x86_interp::GuestRam;

use crate::{
    Fast,
    test_machine::{MODES, board, kernel_state, map},
};

const CODE: (u64, u64) = (0xffff_ffff_8100_0000, 0x4_0000);
const DATA: (u64, u64) = (0xffff_ffff_8200_0000, 0x5_0000);
const PAGE: u64 = 4096;
const RAM_LEN: u64 = 2 << 20;
/// Instructions that the interpreter goes on for.
const BUDGET: u64 = 50;

thread_local! {
    static MACHINE: RefCell<Option<Fast>> = const { RefCell::new(None) };
}

fn start() -> Vcpu {
    kernel_state(CODE.0, DATA.0 + 0x800)
}

fn machine() -> Fast {
    let ram = Ram::new(RAM_LEN).expect("memory");
    map(&ram, &[(CODE, G), (DATA, G)]);
    ram.write(CODE.1, &[0x90; 4000]);
    let requests = std::sync::Arc::new(VcpuRequests::default());
    Fast::new(
        start(),
        board(ram, requests.clone()),
        &requests,
        MODES,
        (&crate::Machine::new(1), &crate::Placement::default()),
    )
    .expect("an engine")
}

/// Of the monitor, from which it was forked, and of the host, which gives processes memory of its own.
#[test]
fn a_wedge_has_nothing_of_others() {
    let mut fast = machine();
    let _ = fast.run(BUDGET);
    let processes = fast.slots.processes();
    assert!(!processes.is_empty());
    for process in processes {
        let maps = fs::read_to_string(format!("/proc/{process}/maps")).expect("it runs");
        let is_ours = |line: &&str| {
            let mut words = line.split_whitespace();
            let at = words.next().and_then(|range| range.split('-').next()).unwrap_or_default();
            let at = usize::from_str_radix(at, 16).expect("an address");
            match words.nth(4) {
                Some(name) => {
                    name.starts_with("/memfd:ring3-") || matches!(name, "[vsyscall]" | "[vdso]")
                }
                None => (WINDOW..WINDOW_END).contains(&at),
            }
        };
        let others: Vec<_> = maps.lines().filter(|line| !is_ours(line)).collect();
        assert!(others.is_empty() && maps.contains("/memfd:ring3-"), "{others:#?}");
    }
}

/// Writes all that a wedge tells by, from these bytes.
fn tamper(fast: &mut Fast, bytes: &[u8]) {
    let mut words = bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    let mut word = || words.next().unwrap_or_default();
    let page = fast.pages.vcpu_page();
    page.regs.gpr.iter_mut().for_each(|register| *register = word());
    page.block.spill.iter_mut().for_each(|register| *register = word());
    (page.regs.rip, page.run.user_rip, page.regs.rflags, page.block.host_flags) =
        (word(), word(), word(), word());
    (page.block.jump, page.exit.pc, page.regs.interrupt_flag, page.regs.ac) =
        (word(), word(), word(), word());
    (page.exit.kind, page.exit.reason, page.exit.info) = (word(), word() % 16, word());
    (page.exit.operand, page.exit.next, page.exit.signal) = (word(), word(), word());
    (page.regs.fs_base, page.regs.gs_base, page.regs.kernel_gs_base) = (word(), word(), word());
    (page.regs.cr2, page.regs.cr3, page.run.go, page.run.compatibility) =
        (word(), word(), word(), word());
    // Mostly one of the two that there are.
    page.regs.cpl = [0, 3, 3, word()][(word() % 4) as usize];
    (page.regs.es, page.regs.cs, page.regs.ss, page.regs.ds, page.regs.fs, page.regs.gs) =
        (word(), word(), word(), word(), word(), word());
    page.vectors.0.as_chunks_mut::<8>().0.iter_mut().for_each(|part| *part = word().to_le_bytes());
}

/// What decodes is what a wedge can have done, whoever wrote it.
fn check_reports(bytes: &[u8]) {
    for entry in bytes.as_chunks::<32>().0 {
        let words = std::array::from_fn(|n| {
            u64::from_le_bytes(std::array::from_fn(|byte| entry[n * 8 + byte]))
        });
        let raw = RawChange::from_words(words);
        let Some(report) = MapReport::decode(raw, RAM_LEN) else { continue };
        assert_eq!(MapReport::decode(report.encode(), RAM_LEN), Some(report));
        let (start, len, offset) = match report {
            MapReport::Mapped { start, len, offset, .. } => (start, len, offset..offset + len),
            MapReport::Code { start, len, offset } => (start, len, offset..offset + len),
            MapReport::Empty { start, len, offset } => (start, len, offset..offset + PAGE),
            MapReport::ShownCode { page, offset } | MapReport::Shown { page, offset, .. } => {
                (page, PAGE, offset..offset + PAGE)
            }
            MapReport::Dropped { start, len } => (start, len, 0..0),
            MapReport::Refused { page } | MapReport::KernelDropped { page } => (page, PAGE, 0..0),
        };
        assert!(start + len <= TOP as u64 && offset.end <= RAM_LEN, "{report:x?}");
        assert!(start % PAGE == 0 && offset.start % PAGE == 0, "{report:x?}");
    }
}

fn run(bytes: &[u8]) {
    check_reports(bytes);
    MACHINE.with_borrow_mut(|fast| {
        let fast = fast.get_or_insert_with(machine);
        fast.cpu.vcpu = start();
        fast.cpu.state_changed();
        tamper(fast, bytes);
        let pc = fast.pages.vcpu_page().exit.pc;
        fast.exited();
        fast.code.position(fast.pages.base(), pc);
        fast.take_state();
        assert!(matches!(fast.cpu.vcpu.cpl(), 0 | 3));
        for _ in 0..BUDGET {
            fast.interpret();
        }
        fast.follow_record();
    });
}

/// States of a program and of a kernel, and anything.
fn seeds() -> Vec<Vec<u8>> {
    let kernel: Vec<u64> =
        (0..20).map(|n| DATA.0 + n * 8).chain([CODE.0, CODE.0, 0x202, 2]).collect();
    let bytes: Vec<u8> = kernel.iter().flat_map(|word| word.to_le_bytes()).collect();
    let mapped = MapReport::Mapped {
        start: 0x40_0000,
        len: PAGE,
        offset: PAGE,
        rights: Rights::READ_WRITE,
        owner: Owner::User,
        piece: true,
    };
    let empty = MapReport::Empty { start: 0x40_0000, len: 2 * PAGE, offset: PAGE };
    let reports = [mapped, empty, MapReport::Dropped { start: 0x40_0000, len: PAGE }];
    let reports: Vec<u8> = reports.iter().flat_map(|report| report.encode().to_bytes()).collect();
    vec![
        reports,
        bytes.clone(),
        [bytes, vec![0x5a; 700]].concat(),
        (0..=255).cycle().take(1000).collect(),
    ]
}

#[test]
fn any_page_of_a_wedge_is_a_guests_registers() {
    fuzzer::test(Target { name: "wedge", seeds, run });
}
