//! Page faults without the monitor: answered with a mapping, or delivered to the guest's kernel.

use crate::{
    assist, bias, blocks,
    context::{Context, Next},
    kernel_start, lookup,
    mmu::{self, Access, Walk},
    narrow_crossing, narrow_kernel,
};
use core::arch::naked_asm;
use wedge_abi::{FaultState, Reason, SITES, SITES_LEN, STRING_BIASES, VcpuPage, go, walks};
use x86::{
    exception::pf,
    flags::{FIXED, IF, NT, RF, TF, VM},
    narrow,
    reg::{RDI, RSI, RSP},
    vector,
};

/// Page-fault error code: the access writes.
pub const WRITE: u64 = pf::WRITE as u64;
const USER: u64 = pf::USER as u64;
/// Page-fault error code: the access is the fetch of an instruction.
pub const FETCH: u64 = pf::FETCH as u64;
const PAGE_FAULT: u64 = vector::PF as u64;
/// Beside the error code of a fault that is being answered: the access is by a mapping, not looked up.
const DIRECT: u64 = 1 << 32;
/// RFLAGS an interrupt gate clears: TF, IF, NT, RF, VM.
pub const CLEARED: u64 = TF | IF | NT | RF | VM;

/// User code has faulted; its state is in the vCPU page.
pub fn user(cx: &mut Context<'_>) -> Next {
    let (gva, code) = (cx.vcpu.exit.address, cx.vcpu.exit.error);
    let at_sites = is_at_sites(gva);
    if cx.vcpu.run.walks != walks::FOUR_LEVELS
        || at_sites
        || gva >> 47 != 0
        || cx.vcpu.regs.rip >> 47 != 0
    {
        return Next::Exit(Reason::UserSignal);
    }
    let access = user_access(code);
    let next = match mmu::walk(cx, gva, access) {
        Walk::Found(leaf) => {
            cx.vcpu.run.go = go::USER;
            mmu::install(cx, gva, leaf, access).then_some(Next::Run)
        }
        Walk::Fault(present) => deliver(cx, gva, present | code & (WRITE | FETCH) | USER),
        Walk::Unknown => None,
    };
    next.unwrap_or(Next::Exit(Reason::UserSignal))
}

/// What the CPU's error code says about an access by user code.
fn user_access(code: u64) -> Access {
    Access { write: code & WRITE != 0, fetch: code & FETCH != 0, user: true }
}

/// Translated code has faulted; the vCPU page has the host's registers. What cannot be mapped needs the
/// exact state, which the monitor knows, and tells of programs' code. User code reaches its own addresses, never the
/// kernel's.
pub fn kernel(cx: &mut Context<'_>) -> Next {
    let write = cx.vcpu.exit.error & WRITE != 0;
    let access = Access { write, fetch: false, user: cx.vcpu.regs.cpl != 0 };
    let gva = match cx.vcpu.run.walks {
        walks::NONE => None,
        walks::PAE => narrow_accessed(cx),
        _ => accessed(cx),
    };
    if let Some(next) = gva.and_then(|gva| narrow_kernel::of_fleeting_page(cx, gva)) {
        return next;
    }
    let next = gva.and_then(|gva| match mmu::walk(cx, gva, access) {
        Walk::Found(leaf) if mmu::install(cx, gva, leaf, access) => Some(goes_on(cx)),
        Walk::Fault(present) if access.user => of_known_code(cx, gva, present),
        Walk::Fault(present) if cx.vcpu.regs.ac != 0 => of_known_kernel_code(cx, gva, present),
        _ => None,
    });
    next.unwrap_or(Next::Exit(Reason::KernelSignal))
}

/// Translated code goes on at the host's instruction that has faulted: what the instruction has missed is there now.
pub fn goes_on(cx: &mut Context<'_>) -> Next {
    // A step is not over: the kick that it was for would be lost.
    match cx.vcpu.run.go {
        go::STEP => cx.vcpu.block.host_flags |= TF,
        _ => cx.vcpu.run.go = go::RAW,
    }
    Next::Run
}

/// Translated user code has accessed a page that it may not, by an instruction of which the monitor has told the state. `None`,
/// with nothing changed, if that is the monitor's to deliver. Such an instruction accesses what is mapped, not what is looked up.
fn of_known_code(cx: &mut Context<'_>, gva: u64, present: u64) -> Option<Next> {
    let state = blocks::fault_state(cx.vcpu.exit.pc).filter(|_| assist::delivers(cx))?;
    let (gpr, rip) = (cx.vcpu.regs.gpr, cx.vcpu.regs.rip);
    begin_again(cx.vcpu, &state);
    let code = present | cx.vcpu.exit.error & WRITE;
    let next = of_translated_user(cx, gva, code);
    match next {
        Some(_) => cx.vcpu.paging.faulted[2] |= DIRECT,
        None => (cx.vcpu.regs.gpr, cx.vcpu.regs.rip) = (gpr, rip),
    }
    next
}

/// The registers become those at the start of the instruction that has faulted.
fn begin_again(vcpu: &mut VcpuPage, state: &FaultState) {
    for (value, register) in vcpu.block.spill.iter().zip(state.spilled) {
        let register = register.and_then(|number| vcpu.regs.gpr.get_mut(usize::from(number)));
        register.into_iter().for_each(|register| *register = *value);
    }
    vcpu.regs.rip = state.rip;
}

/// Takes from RSI and from RDI what the translation of a string instruction has added to each that is `moved`.
fn move_back(gpr: &mut [u64; 16], moved: [bool; 2]) {
    let registers = [RSI, RDI].into_iter().zip(STRING_BIASES).zip(moved);
    for ((register, bias), _) in registers.filter(|(_, moved)| *moved) {
        gpr[register] = gpr[register].wrapping_sub(gpr[usize::from(bias) & 15]);
    }
}

/// The kernel's code has accessed a page of the user's inside STAC..CLAC, by an instruction of which the monitor has told the state.
/// `None`, with nothing changed, if the fault is the monitor's to deliver. The frame goes on the kernel's current stack.
fn of_known_kernel_code(cx: &mut Context<'_>, gva: u64, present: u64) -> Option<Next> {
    let may = assist::delivers(cx) && cx.vcpu.run.alone == 0;
    let state = blocks::kernel_fault_state(cx.vcpu.exit.pc).filter(|_| may)?;
    let vcpu = &mut *cx.vcpu;
    let gate = gate(vcpu, PAGE_FAULT)?;
    let (gpr, rip) = (vcpu.regs.gpr, vcpu.regs.rip);
    move_back(&mut vcpu.regs.gpr, state.moved);
    begin_again(vcpu, &state.state);
    let flags = kernel_flags(vcpu);
    let code = present | vcpu.exit.error & WRITE;
    let (rsp, [ss, cs]) = (vcpu.regs.gpr[RSP], [vcpu.regs.ss, vcpu.regs.cs]);
    let words = [ss, rsp, flags | FIXED | RF, cs, vcpu.regs.rip, code];
    if !push(vcpu, gate, rsp, &words) {
        (vcpu.regs.gpr, vcpu.regs.rip) = (gpr, rip);
        return None;
    }
    vcpu.paging.faulted = [state.state.rip, gva, code, vcpu.regs.cr3];
    vcpu.regs.cr2 = gva;
    vcpu.counters.faults += 1;
    Some(assist::enter_kernel(cx, flags & !CLEARED))
}

/// The guest address that the code that runs has meant.
fn accessed(cx: &Context<'_>) -> Option<u64> {
    let address = cx.vcpu.exit.address;
    match cx.vcpu.regs.cpl {
        0 => kernel_address(cx),
        _ => (address >> 47 == 0 && !is_at_sites(address)).then_some(address),
    }
}

/// The same of a 32-bit guest's code.
fn narrow_accessed(cx: &Context<'_>) -> Option<u64> {
    let (address, user) = (cx.vcpu.exit.address, cx.vcpu.regs.cpl != 0);
    let gva = narrow::accessed(address, bias(), user, user || cx.vcpu.regs.ac != 0);
    gva.filter(|_| !is_at_sites(address))
}

/// A fault there may be that of a patched call.
fn is_at_sites(address: u64) -> bool {
    address.wrapping_sub(SITES as u64) < SITES_LEN as u64
}

/// The guest address that a host address stands for. Inside STAC..CLAC it is the user's unless the
/// guest has kernel memory where it would be the kernel's.
fn kernel_address(cx: &Context<'_>) -> Option<u64> {
    let gva = cx.vcpu.exit.address.wrapping_sub(bias());
    if cx.vcpu.regs.ac == 0 {
        return (gva >= kernel_start()).then_some(gva);
    }
    let top = Access { write: false, fetch: false, user: false };
    let alias = gva >= kernel_start() && !matches!(mmu::walk(cx, gva, top), Walk::Fault(0));
    (!alias && cx.vcpu.exit.address >> 47 == 0).then_some(cx.vcpu.exit.address)
}

/// Translated user code, whose state is in the vCPU page, has accessed a page that it may not, with this error code but
/// for the bit for user code; `None`, with nothing changed, if that is the monitor's to deliver.
pub fn of_translated_user(cx: &mut Context<'_>, gva: u64, code: u64) -> Option<Next> {
    assist::cross(cx, |cx| deliver(cx, gva, code | USER))
}

/// Delivers a page fault of user code through an ordinary interrupt gate (SDM 6.14). `None`, and
/// nothing changed, if anything about it is not ordinary.
fn deliver(cx: &mut Context<'_>, gva: u64, code: u64) -> Option<Next> {
    let faulted = [cx.vcpu.regs.rip, gva, code, cx.vcpu.regs.cr3];
    let next = match cx.vcpu.run.walks {
        walks::PAE => narrow_crossing::interrupt(cx, PAGE_FAULT, Some(code)),
        _ => enter_page_fault(cx, code),
    }?;
    cx.vcpu.paging.faulted = faulted;
    cx.vcpu.regs.cr2 = gva;
    cx.vcpu.counters.faults += 1;
    Some(next)
}

/// The 64-bit kernel's handler of page faults is next, with this error code.
fn enter_page_fault(cx: &mut Context<'_>, code: u64) -> Option<Next> {
    let vcpu = &mut *cx.vcpu;
    let gate = gate(vcpu, PAGE_FAULT)?;
    let words = [
        vcpu.regs.ss,
        vcpu.regs.gpr[RSP],
        vcpu.regs.rflags | RF,
        vcpu.regs.cs,
        vcpu.regs.rip,
        code,
    ];
    let flags = vcpu.regs.rflags;
    let pushed = push_to_kernel(vcpu, gate, &words);
    pushed.then(|| assist::enter_kernel(cx, flags & !CLEARED))
}

/// The same for INT and a number, which user code has executed: RIP is behind it.
pub fn interrupt(cx: &mut Context<'_>, vector: u64) -> Option<Next> {
    let vcpu = &mut *cx.vcpu;
    let gate = gate(vcpu, vector).filter(|gate| gate.open)?;
    let flags = vcpu.regs.rflags & !RF;
    let words = [vcpu.regs.ss, vcpu.regs.gpr[RSP], flags, vcpu.regs.cs, vcpu.regs.rip];
    let done = flags & TF == 0 && push_to_kernel(vcpu, gate, &words);
    done.then(|| assist::enter_kernel(cx, flags & !CLEARED))
}

/// The flags of the kernel's translated code, as far as they may be set.
pub fn kernel_flags(vcpu: &VcpuPage) -> u64 {
    vcpu.block.host_flags & assist::IN_HOST | vcpu.regs.interrupt_flag | vcpu.regs.ac
}

/// The frame of an interrupt, on the stack of the kernel's code. The registers are still those of that code.
pub struct Frame {
    gate: Gate,
    /// What RSP is at the handler.
    top: u64,
    flags: u64,
}

impl Frame {
    /// Stores the frame of an interrupt after which the kernel's code goes on at `rip`. What is below the kernel's stack pointer is
    /// free, as an interrupt may come at any time. `None` if the monitor must deliver the interrupt.
    pub fn store(vcpu: &mut VcpuPage, vector: u64, rip: u64) -> Option<Self> {
        let gate = gate(vcpu, vector)?;
        let flags = kernel_flags(vcpu);
        let (rsp, [ss, cs]) = (vcpu.regs.gpr[RSP], [vcpu.regs.ss, vcpu.regs.cs]);
        let top = store_words(vcpu, gate, rsp, &[ss, rsp, flags | FIXED, cs, rip])?;
        Some(Self { gate, top, flags: flags & !CLEARED })
    }

    /// Takes the interrupt: goes on in its handler.
    pub fn enter(self, cx: &mut Context<'_>) -> Next {
        go_through(cx.vcpu, self.gate, self.top);
        assist::enter_kernel(cx, self.flags)
    }
}

/// Pushes words to the stack that the TSS has for the kernel, and sets what is loaded from the gate and with it.
fn push_to_kernel(vcpu: &mut VcpuPage, gate: Gate, words: &[u64]) -> bool {
    if vcpu.system.tss < kernel_start() {
        return false;
    }
    let stack = assist::kernel_word(vcpu, vcpu.system.tss + 4);
    stack.is_some_and(|stack| push(vcpu, gate, stack, words))
}

/// Pushes words to a stack, and sets what is loaded from the gate and with it.
fn push(vcpu: &mut VcpuPage, gate: Gate, stack: u64, words: &[u64]) -> bool {
    let top = store_words(vcpu, gate, stack, words);
    top.into_iter().for_each(|top| go_through(vcpu, gate, top));
    top.is_some()
}

/// Stores the words that an interrupt through a gate pushes to a stack. Returns the GVA of the last one; `None` if the gate's code
/// segment is not the usual one, or the stack cannot be written.
fn store_words(vcpu: &mut VcpuPage, gate: Gate, stack: u64, words: &[u64]) -> Option<u64> {
    if assist::kernel_code(vcpu, gate.selector) != Some(true) {
        return None;
    }
    let mut top = stack & !15;
    for word in words {
        top = top.wrapping_sub(8);
        let there = top >= kernel_start() && store_careful(top.wrapping_add(bias()), *word) != 0;
        if !there {
            return None;
        }
    }
    Some(top)
}

/// Sets the registers that are loaded from a gate and with it. `top` is the new stack pointer.
fn go_through(vcpu: &mut VcpuPage, gate: Gate, top: u64) {
    vcpu.regs.gpr[RSP] = top;
    (vcpu.regs.cs, vcpu.regs.ss) = (gate.selector, 0);
    vcpu.regs.rip = gate.handler;
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
fn gate(vcpu: &mut VcpuPage, vector: u64) -> Option<Gate> {
    if vcpu.system.idt < kernel_start() || vector * 16 + 15 > vcpu.system.idt_limit {
        return None;
    }
    let low = assist::kernel_word(vcpu, vcpu.system.idt + vector * 16)?;
    let high = assist::kernel_word(vcpu, vcpu.system.idt + vector * 16 + 8)?;
    // Present, interrupt gate, no IST.
    let ordinary = low >> 40 & 0x9f == 0x8e && low >> 32 & 7 == 0;
    let handler = low & 0xffff | low >> 32 & 0xffff_0000 | high << 32;
    let gate = Gate { handler, selector: low >> 16 & 0xffff, open: low >> 45 & 3 == 3 };
    (ordinary && handler >= kernel_start()).then_some(gate)
}

/// Code goes on where it had faulted, the user's or, with AC set, the kernel's: what it will need is mapped before it faults again.
pub fn before_return(cx: &mut Context<'_>) {
    let [rip, gva, code, space] = cx.vcpu.paging.faulted;
    if rip != cx.vcpu.regs.rip || gva == 0 || space != cx.vcpu.regs.cr3 {
        return;
    }
    cx.vcpu.paging.faulted = [0; 4];
    let access = Access { user: code & USER != 0, ..user_access(code) };
    if let Walk::Found(leaf) = mmu::walk(cx, gva, access) {
        let looks_up = access.user && code & DIRECT == 0 && cx.vcpu.run.user_translated != 0;
        match looks_up {
            true => !access.fetch && lookup::enter(cx, gva, leaf, access),
            false => mmu::install(cx, gva, leaf, access),
        };
    }
}

/// Stores a word; the fault of its first instruction becomes a zero result.
#[unsafe(naked)]
pub extern "C" fn store_careful(address: u64, value: u64) -> u64 {
    naked_asm!("mov [rdi], rsi", "mov eax, 1", "ret")
}

/// Stores the lower half of a word in the same way.
#[unsafe(naked)]
pub extern "C" fn store_careful_half(address: u64, value: u64) -> u64 {
    naked_asm!("mov [rdi], esi", "mov eax, 1", "ret")
}
