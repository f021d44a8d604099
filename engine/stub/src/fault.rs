//! Page faults without the monitor: answered with a mapping, or delivered to the guest's kernel.

use crate::{
    assist, bias, kernel_start, lookup,
    mmu::{self, Access, Walk},
    run,
    turns::{self, Turn},
};
use core::arch::naked_asm;
use frame::{Reason, SITES, SITES_LEN, Shared, VcpuPage, go};
use x86::{
    exception::pf,
    flags::{IF, NT, RF, TF, VM},
    reg::RSP,
    vector,
};

/// Page-fault error code.
const WRITE: u64 = pf::WRITE as u64;
const USER: u64 = pf::USER as u64;
const FETCH: u64 = pf::FETCH as u64;
const PAGE_FAULT: u64 = vector::PF as u64;
/// RFLAGS an interrupt gate clears: TF, IF, NT, RF, VM.
const CLEARED: u64 = TF | IF | NT | RF | VM;

/// User code has faulted; its state is in the frame.
pub fn user(turn: &mut Turn) -> ! {
    let (f, s) = turn.pages();
    let (gva, code) = (f.exit.address, f.exit.error);
    // A fault at the table of patched calls may be that of a patched one.
    let at_sites = gva.wrapping_sub(SITES as u64) < SITES_LEN as u64;
    if f.run.walks == 0 || at_sites || gva >> 47 != 0 || f.regs.rip >> 47 != 0 {
        turns::exit(turn, Reason::UserSignal);
    }
    let access = user_access(code);
    let done = match mmu::walk(f, s, gva, access) {
        Walk::Found(leaf) => {
            f.run.go = go::USER;
            mmu::install(f, s, gva, leaf, access)
        }
        Walk::Fault(present) => deliver(turn, gva, present | code & (WRITE | FETCH) | USER),
        Walk::Unknown => false,
    };
    if done { run::run(turn) } else { turns::exit(turn, Reason::UserSignal) }
}

/// What the CPU's error code says about an access by user code.
fn user_access(code: u64) -> Access {
    Access { write: code & WRITE != 0, fetch: code & FETCH != 0, user: true }
}

/// Translated code has faulted; the frame has the host's registers. What cannot be mapped needs the
/// exact state, which the monitor knows. User code reaches its own addresses, never the kernel's.
pub fn kernel(turn: &mut Turn) -> ! {
    let (f, s) = turn.pages();
    let access = Access { write: f.exit.error & WRITE != 0, fetch: false, user: f.regs.cpl != 0 };
    let done = f.run.walks != 0
        && accessed(f, s).is_some_and(|gva| match mmu::walk(f, s, gva, access) {
            Walk::Found(leaf) => mmu::install(f, s, gva, leaf, access),
            _ => false,
        });
    if done {
        // A step is not over: the kick that it was for would be lost.
        match f.run.go {
            go::STEP => f.block.host_flags |= TF,
            _ => f.run.go = go::RAW,
        }
        run::run(turn)
    }
    turns::exit(turn, Reason::KernelSignal)
}

/// The guest address that the code that runs has meant.
fn accessed(f: &VcpuPage, s: &Shared) -> Option<u64> {
    let at_sites = f.exit.address.wrapping_sub(SITES as u64) < SITES_LEN as u64;
    match f.regs.cpl {
        0 => kernel_address(f, s),
        _ => (f.exit.address >> 47 == 0 && !at_sites).then_some(f.exit.address),
    }
}

/// The guest address that a host address stands for. Inside STAC..CLAC it is the user's unless the
/// guest has kernel memory where it would be the kernel's.
fn kernel_address(f: &VcpuPage, s: &Shared) -> Option<u64> {
    let gva = f.exit.address.wrapping_sub(bias());
    if f.regs.ac == 0 {
        return (gva >= kernel_start()).then_some(gva);
    }
    let top = Access { write: false, fetch: false, user: false };
    let alias = gva >= kernel_start() && !matches!(mmu::walk(f, s, gva, top), Walk::Fault(0));
    (!alias && f.exit.address >> 47 == 0).then_some(f.exit.address)
}

/// Translated user code, whose state is in the frame, has accessed a page that it may not; false, with
/// nothing changed, if that is the monitor's to deliver.
pub fn of_translated_user(turn: &mut Turn, gva: u64, present: u64, write: bool) -> bool {
    let f = turn.vcpu();
    let flags = f.regs.rflags;
    assist::leave_translated_user(f);
    let code = present | USER | if write { WRITE } else { 0 };
    if deliver(turn, gva, code) {
        return true;
    }
    let f = turn.vcpu();
    (f.regs.rflags, f.block.bias, f.run.user_translated) = (flags, 0, 1);
    false
}

/// Delivers a page fault of user code through an ordinary interrupt gate (SDM 6.14). False, and
/// nothing changed, if anything about it is not ordinary.
fn deliver(turn: &mut Turn, gva: u64, code: u64) -> bool {
    let f = turn.vcpu();
    let Some(gate) = gate(f, PAGE_FAULT) else { return false };
    let words = [f.regs.ss, f.regs.gpr[RSP], f.regs.rflags | RF, f.regs.cs, f.regs.rip, code];
    let faulted = [f.regs.rip, gva, code, f.regs.cr3];
    let flags = f.regs.rflags;
    if !push(f, gate, &words) {
        return false;
    }
    f.paging.faulted = faulted;
    f.regs.cr2 = gva;
    f.counters.faults += 1;
    assist::enter_kernel(turn, flags & !CLEARED);
    true
}

/// The same for INT and a number, which user code has executed: RIP is behind it.
pub fn interrupt(turn: &mut Turn, vector: u64) -> bool {
    let f = turn.vcpu();
    let Some(gate) = gate(f, vector).filter(|gate| gate.open) else { return false };
    let flags = f.regs.rflags & !RF;
    let words = [f.regs.ss, f.regs.gpr[RSP], flags, f.regs.cs, f.regs.rip];
    let done = flags & TF == 0 && push(f, gate, &words);
    if done {
        assist::enter_kernel(turn, flags & !CLEARED);
    }
    done
}

/// Pushes words to the kernel's stack, and sets what is loaded from the gate and with it.
fn push(f: &mut VcpuPage, gate: Gate, words: &[u64]) -> bool {
    let Gate { handler, selector, .. } = gate;
    if f.system.tss < kernel_start() || assist::kernel_code(f, selector) != Some(true) {
        return false;
    }
    let Some(stack) = assist::kernel_word(f, f.system.tss + 4) else { return false };
    let mut top = stack & !15;
    for word in words {
        top = top.wrapping_sub(8);
        // SAFETY: of the guest's kernel, as its address says.
        let there = top >= kernel_start()
            && unsafe { store_careful(top.wrapping_add(bias()), *word) } != 0;
        if !there {
            return false;
        }
    }
    f.regs.gpr[RSP] = top;
    (f.regs.cs, f.regs.ss) = (selector, 0);
    f.regs.rip = handler;
    true
}

/// What an interrupt gate says.
#[derive(Clone, Copy)]
struct Gate {
    handler: u64,
    selector: u64,
    /// User code may go through it by INT.
    open: bool,
}

/// The gate of a vector, if it is an ordinary one.
fn gate(f: &mut VcpuPage, vector: u64) -> Option<Gate> {
    if f.system.idt < kernel_start() || vector * 16 + 15 > f.system.idt_limit {
        return None;
    }
    let low = assist::kernel_word(f, f.system.idt + vector * 16)?;
    let high = assist::kernel_word(f, f.system.idt + vector * 16 + 8)?;
    // Present, interrupt gate, no IST.
    let ordinary = low >> 40 & 0x9f == 0x8e && low >> 32 & 7 == 0;
    let handler = low & 0xffff | low >> 32 & 0xffff_0000 | high << 32;
    let gate = Gate { handler, selector: low >> 16 & 0xffff, open: low >> 45 & 3 == 3 };
    (ordinary && handler >= kernel_start()).then_some(gate)
}

/// User code goes on where it had faulted: what it will need is mapped before it faults again.
pub fn before_return(f: &mut VcpuPage, s: &mut Shared) {
    let [rip, gva, code, space] = f.paging.faulted;
    if rip != f.regs.rip || gva == 0 || space != f.regs.cr3 {
        return;
    }
    f.paging.faulted = [0; 4];
    let access = user_access(code);
    if let Walk::Found(leaf) = mmu::walk(f, s, gva, access) {
        match f.run.user_translated {
            0 => mmu::install(f, s, gva, leaf, access),
            _ => !access.fetch && lookup::enter(f, gva, leaf, access),
        };
    }
}

/// Stores a word; the fault of its first instruction becomes a zero result.
///
/// # Safety
/// The word is guest memory, or nothing is there.
#[unsafe(naked)]
pub unsafe extern "C" fn store_careful(address: u64, value: u64) -> u64 {
    naked_asm!("mov [rdi], rsi", "mov eax, 1", "ret")
}
