//! SYSCALL, SYSRET and IRET without the monitor, as far as they are the ordinary ones.
//!
//! Whatever is not ordinary (single step, 32-bit code, odd descriptors, a pending interrupt) is left to
//! the monitor with the state untouched.

use crate::{
    bells, bias,
    blocks::{USER_END, UserBlock, find, find_user, verified_user},
    claims,
    context::{Context, Next},
    cpuid, fault, here,
    host::load_vectors_careful,
    invlpg, kernel_start,
    lookup::{self, LookupOutcome},
    mmu, narrow, narrow_crossing, narrow_kernel, narrow_segments, taps, turns, word,
};
use core::arch::naked_asm;
use wedge_abi::{
    BlockExit, COPIES, LOOKUP_WRITE, Mapped, OpenCall, REGIONS, Reason, UserPoint, VcpuPage,
    Vectors, calls, copy_slot, forks, go, percpu, region, walks,
};
use x86::{
    flags::{AC, DF, FIXED, ID, IF, IOPL, NT, RF, STATUS, TF, VM},
    msr::X2APIC_IN_SERVICE_80,
    narrow::USER_DS,
    paging::PHYS_BITS,
    reg::{R11, RAX, RCX, RDI, RDX, RSP},
};

/// Kept in the host's RFLAGS in translated code.
pub const IN_HOST: u64 = STATUS | DF | ID;
/// What SYSRET takes from R11.
const SYSRET_FLAGS: u64 = 0x003c_7fd7;
/// Flags user code may have that need no watching.
const ORDINARY_USER: u64 = STATUS | IF | DF | NT | AC | ID | FIXED;
pub const ORDINARY_KERNEL: u64 = IN_HOST | IF | AC | FIXED;
/// The MSR of the interrupts from 0x80 to 0x9f that are in service.
const IN_SERVICE_80: u64 = X2APIC_IN_SERVICE_80 as u64;
/// Bytes of RDMSR without prefixes, which nobody writes. Behind another one no block begins so.
const RDMSR_LEN: u64 = 2;
/// CR3: translations may stay, and the process-context identifier.
const KEEP: u64 = 1 << 63;
const PCID: u64 = 0xfff;
/// The stack segment of 32-bit user code.
const SS_NARROW: u64 = USER_DS as u64;

/// SYSCALL by user code, whose state is in the vCPU page with RIP behind the instruction.
pub fn system_call(cx: &mut Context<'_>) -> Next {
    let vcpu = &mut *cx.vcpu;
    let flags = vcpu.regs.rflags & !(vcpu.system.sfmask | RF);
    if flags & (TF | NT | VM | IOPL) != 0 {
        return Next::Exit(Reason::UserSignal);
    }
    let from = UserPoint { cr3: vcpu.regs.cr3, rip: vcpu.regs.rip, rsp: vcpu.regs.gpr[RSP] };
    vcpu.claims.call = OpenCall { number: vcpu.regs.gpr[RAX], from };
    vcpu.regs.gpr[RCX] = vcpu.regs.rip;
    vcpu.regs.gpr[R11] = vcpu.regs.rflags & !RF;
    vcpu.regs.cs = vcpu.system.star >> 32 & 0xfffc;
    vcpu.regs.ss = (vcpu.system.star >> 32).wrapping_add(8) & 0xfffc;
    vcpu.regs.rip = vcpu.system.lstar;
    vcpu.counters.system_calls += 1;
    if calls::copies_space(vcpu.claims.call.number, vcpu.regs.gpr[RDI]) {
        note_fork(&mut cx.shared.mapped);
    }
    // The monitor closes the table at its next turn.
    if calls::asks_near_sites(vcpu.claims.call.number, vcpu.regs.gpr[RDI]) {
        enter_kernel_at(cx, flags, 0);
        return miss_for_good(cx);
    }
    enter_kernel(cx, flags)
}

/// Each page that the process writes next becomes another one: it is cheaper to look pages up meanwhile.
fn note_fork(mapped: &mut Mapped) {
    if mapped.forks != forks::UNSEEN {
        (mapped.forks, mapped.lookups) = (forks::SOME, 1);
    }
}

/// Goes on in translated code at RIP, with these flags.
pub fn enter_kernel(cx: &mut Context<'_>, flags: u64) -> Next {
    let block = find(cx.vcpu.regs.rip, flags & AC != 0);
    enter_kernel_at(cx, flags, block);
    if block == 0 { miss_for_good(cx) } else { Next::Run }
}

/// There is no block at RIP: the monitor is to make one.
pub fn miss_for_good(cx: &mut Context<'_>) -> Next {
    (cx.vcpu.exit.kind, cx.vcpu.exit.info) = (BlockExit::Miss as u64, 0);
    Next::Exit(Reason::Block)
}

fn enter_kernel_at(cx: &mut Context<'_>, flags: u64, block: u64) {
    if flags & AC != 0 {
        invlpg::finish_deferred(cx);
    }
    cx.vcpu.regs.cpl = 0;
    set_kernel_flags(cx.vcpu, flags);
    cx.vcpu.block.percpu = percpu(cx.vcpu.regs.gs_base, bias());
    cx.vcpu.run.go = go::BLOCK;
    cx.vcpu.block.jump = block;
}

/// Kernel code has these flags when it goes on.
pub fn set_kernel_flags(vcpu: &mut VcpuPage, flags: u64) {
    vcpu.regs.interrupt_flag = flags & IF;
    vcpu.regs.ac = flags & AC;
    vcpu.block.host_flags = flags & IN_HOST;
}

/// What translated code would reach by this address.
fn host_address(address: u64) -> u64 {
    // SAFETY: the table has an entry for every region.
    let bias = unsafe { word(here(REGIONS) + region(address) * 8) };
    address.wrapping_add(bias)
}

/// What is mapped at an address is what the guest has there, and no copy for user code.
fn is_shown(address: u64) -> bool {
    // SAFETY: the table has an entry for every page.
    unsafe { word(here(COPIES) + copy_slot(address) * 8) == 0 }
}

/// An indirect jump has missed its table, in which two addresses can be in each other's way; or a gate has let nobody in.
fn miss(cx: &mut Context<'_>) -> Option<Next> {
    let rip = cx.vcpu.regs.rip;
    if cx.vcpu.regs.cpl != 0 {
        return miss_of_user(cx, rip);
    }
    match find(rip, cx.vcpu.regs.ac != 0) {
        0 => bells::ring(cx),
        block => Some(run_block(cx, block)),
    }
}

/// Goes on with a block, at RIP.
pub fn run_block(cx: &mut Context<'_>, block: u64) -> Next {
    cx.vcpu.block.jump = block;
    cx.vcpu.run.go = go::BLOCK;
    Next::Run
}

/// CPUID of translated user code, if the answer is known.
fn answer_cpuid(cx: &mut Context<'_>) -> Option<Next> {
    if !delivers(cx) || !cpuid::answer(cx) {
        return None;
    }
    cx.vcpu.counters.cpuids += 1;
    let next = miss_of_user(cx, cx.vcpu.regs.rip);
    Some(next.unwrap_or_else(|| miss_for_good(cx)))
}

fn miss_of_user(cx: &mut Context<'_>, rip: u64) -> Option<Next> {
    match verified_user(cx, rip) {
        UserBlock::Found(block) => Some(run_block(cx, block)),
        UserBlock::Fault(present) if delivers(cx) => {
            fault::of_translated_user(cx, rip, present | fault::FETCH)
        }
        _ => None,
    }
}

/// The wedge may deliver a page fault of translated user code. A step goes no further: the monitor delivers it.
pub fn delivers(cx: &Context<'_>) -> bool {
    cx.vcpu.run.fast != 0 && matches!(cx.vcpu.run.go, go::BLOCK | go::RAW)
}

/// Translated code has exited: goes on as `RunControl::go` says, or has the monitor do what is not ordinary.
pub fn after_block(cx: &mut Context<'_>) -> Next {
    const CALL_OUT: u64 = BlockExit::CallOut as u64;
    const SYSRET: u64 = BlockExit::Sysret as u64;
    const SYSRET_NARROW: u64 = BlockExit::SysretNarrow as u64;
    const IRET: u64 = BlockExit::Iret as u64;
    const IRET_NARROW: u64 = BlockExit::IretNarrow as u64;
    const ENTER_SYSTEM: u64 = BlockExit::EnterSystem as u64;
    const SOFTWARE_INTERRUPT: u64 = BlockExit::SoftwareInterrupt as u64;
    const EXIT_SYSTEM: u64 = BlockExit::ExitSystem as u64;
    const LOAD_SEGMENT: u64 = BlockExit::LoadSegment as u64;
    const MISS: u64 = BlockExit::Miss as u64;
    const INVALIDATE: u64 = BlockExit::InvalidatePage as u64;
    const LOAD_VECTORS: u64 = BlockExit::LoadVectors as u64;
    const LOAD_SPACE: u64 = BlockExit::LoadSpace as u64;
    const LOOKUP: u64 = BlockExit::Lookup as u64;
    const SYSTEM_CALL: u64 = BlockExit::SystemCall as u64;
    const TAP: u64 = BlockExit::Tap as u64;
    let vcpu = &mut *cx.vcpu;
    let (fast, walks) = (vcpu.run.fast != 0, vcpu.run.walks == walks::FOUR_LEVELS);
    let of_narrow_program = fast && vcpu.run.walks == walks::PAE && vcpu.regs.cpl != 0;
    let next = match vcpu.exit.kind {
        // Jumps of programs' code to other texts are never linked.
        MISS if vcpu.exit.info == 0 || vcpu.regs.cpl != 0 => miss(cx),
        // A jump that is not linked: the monitor is to link it, but it links none to what has no block.
        MISS => bells::ring(cx),
        LOOKUP => look_up(cx),
        SYSTEM_CALL if fast && vcpu.regs.cpl != 0 => {
            vcpu.regs.rip = vcpu.exit.next;
            leave_translated_user(vcpu);
            Some(system_call(cx))
        }
        CALL_OUT if vcpu.system.none_in_service == vcpu.exit.info && vcpu.regs.cpl == 0 => {
            read_in_service(vcpu).then_some(Next::Run)
        }
        CALL_OUT if vcpu.regs.cpl != 0 => answer_cpuid(cx),
        TAP => taps::pass(cx).then_some(Next::Run),
        LOAD_VECTORS => load_guest_vectors(cx).then_some(Next::Run),
        SYSRET if fast => sysret(cx),
        SYSRET_NARROW if fast => sysret_narrow(cx).then_some(Next::Run),
        IRET if fast => iret(cx),
        IRET_NARROW => narrow_kernel::iret(cx),
        ENTER_SYSTEM if of_narrow_program => cross(cx, narrow_crossing::enter_system),
        SOFTWARE_INTERRUPT if of_narrow_program => cross(cx, narrow_crossing::software_interrupt),
        EXIT_SYSTEM => narrow_crossing::exit_system(cx),
        LOAD_SEGMENT => narrow_segments::load(cx).then_some(Next::Run),
        INVALIDATE => invalidate(cx).then_some(Next::Run),
        // Another wedge would not know that it is to go no further.
        LOAD_SPACE if walks && vcpu.run.pcids != 0 && vcpu.run.go != go::LEAVE => load_space(cx),
        _ => None,
    };
    next.unwrap_or(Next::Exit(Reason::Block))
}

/// RDMSR of the local APIC's word of interrupts in service around 0x80, of which there are none: Linux looks whether
/// an INT 0x80 came from outside.
fn read_in_service(vcpu: &mut VcpuPage) -> bool {
    vcpu.exit.next = vcpu.regs.rip.wrapping_add(RDMSR_LEN);
    let asked = vcpu.regs.gpr[RCX] & 0xffff_ffff == IN_SERVICE_80;
    let next = if asked { find(vcpu.exit.next, vcpu.regs.ac != 0) } else { 0 };
    if next == 0 {
        return false;
    }
    (vcpu.regs.gpr[RAX], vcpu.regs.gpr[RDX]) = (0, 0);
    go_on_behind(vcpu, next)
}

/// XRSTOR of what the guest asks for, if it is in order.
fn load_guest_vectors(cx: &mut Context<'_>) -> bool {
    let area = host_address(cx.vcpu.exit.operand);
    let next = find(cx.vcpu.exit.next, cx.vcpu.regs.ac != 0);
    let open = cx.vcpu.exit.operand >= kernel_start() || cx.vcpu.regs.ac != 0;
    let known = open && area.is_multiple_of(64) && area >> 47 == 0 && next != 0;
    let shown = is_shown(area) && is_shown(area + size_of::<Vectors>() as u64 - 1);
    if !known
        || !shown
        || !load_vectors_careful(
            cx.secret(),
            area,
            cx.vcpu.regs.gpr[RAX] & cx.vcpu.system.vector_mask,
        )
    {
        return false;
    }
    go_on_behind(cx.vcpu, next)
}

/// The instruction has been done: the block behind it comes next.
pub fn go_on_behind(vcpu: &mut VcpuPage, block: u64) -> bool {
    vcpu.regs.rip = vcpu.exit.next;
    vcpu.block.jump = block;
    vcpu.run.go = go::BLOCK;
    true
}

fn invalidate(cx: &mut Context<'_>) -> bool {
    let (gva, next) = (cx.vcpu.exit.operand, find(cx.vcpu.exit.next, cx.vcpu.regs.ac != 0));
    let done = next != 0
        && match cx.vcpu.run.walks {
            walks::FOUR_LEVELS => invlpg::of_user(cx, gva),
            _ => invlpg::of_narrow_kernel(cx, gva),
        };
    done && go_on_behind(cx.vcpu, next)
}

/// MOV to CR3, of a space that some wedge holds: that one goes on. If translations are not to be kept, they must be up to date.
fn load_space(cx: &mut Context<'_>) -> Option<Next> {
    let vcpu = &mut *cx.vcpu;
    let root = vcpu.exit.operand & !KEEP;
    let next = find(vcpu.exit.next, vcpu.regs.ac != 0);
    if root >> PHYS_BITS != 0 || next == 0 {
        return None;
    }
    leave_space(vcpu, cx.shared.setup.number, root);
    let to = match vcpu.exit.operand & KEEP {
        0 => up_to_date(vcpu, root)?,
        _ => turns::holder(root & PCID)?,
    };
    vcpu.regs.cr3 = root;
    vcpu.counters.hand_overs += 1;
    go_on_behind(vcpu, next);
    let stays = to as u64 == cx.shared.setup.number;
    Some(if stays { Next::Run } else { turns::pass_on(cx, to) })
}

/// Notes at which version guest code leaves the space that is loaded, for another CR3. Where that has the same PCID, the kernel has
/// written the new space's version in its place.
fn leave_space(vcpu: &mut VcpuPage, number: u64, next: u64) {
    let cr3 = vcpu.regs.cr3;
    if (cr3 ^ next) & PCID != 0 {
        turns::leave_space(vcpu, number, cr3 & !PCID, cr3 & PCID);
    }
}

/// The wedge with the space of this CR3, if the space needs no flush. The space that is loaded already always does: the flush is
/// all that the guest can want.
fn up_to_date(vcpu: &mut VcpuPage, cr3: u64) -> Option<usize> {
    let is_loaded = (cr3 ^ vcpu.regs.cr3) & !PCID == 0;
    if is_loaded { None } else { turns::take_over(vcpu, cr3 & !PCID, cr3 & PCID) }
}

/// An interrupt is due as soon as interrupts are enabled.
pub fn open_to_interrupt(vcpu: &VcpuPage, flags: u64) -> bool {
    vcpu.run.pending != 0 && flags & IF != 0
}

fn sysret(cx: &mut Context<'_>) -> Option<Next> {
    let flags = cx.vcpu.regs.gpr[R11] & SYSRET_FLAGS | 2;
    let target = cx.vcpu.regs.gpr[RCX];
    // Whoever returns, the monitor is to know of it.
    let questionable = claims::are_in_question(cx.vcpu, target, cx.vcpu.regs.gpr[RSP]);
    let plain = target < USER_END && plain_user(cx.vcpu, flags);
    if questionable || !plain || claims::are_met(cx) {
        return None;
    }
    cx.vcpu.run.compatibility = 0;
    if !narrow::read_areas(cx) {
        return None;
    }
    cx.vcpu.regs.cs = (cx.vcpu.system.star >> 48).wrapping_add(16) | 3;
    cx.vcpu.regs.ss = (cx.vcpu.system.star >> 48).wrapping_add(8) | 3;
    enter_user(cx, target, flags);
    Some(with_block(cx))
}

/// SYSRET to 32-bit code: its segments have the base and the limits of Linux's, whatever the tables say.
fn sysret_narrow(cx: &mut Context<'_>) -> bool {
    let flags = cx.vcpu.regs.gpr[R11] & SYSRET_FLAGS | 2;
    let target = cx.vcpu.regs.gpr[RCX] & 0xffff_ffff;
    let cs = cx.vcpu.system.star >> 48 | 3;
    let ss = (cx.vcpu.system.star >> 48).wrapping_add(8) | 3;
    let questionable = claims::are_in_question(cx.vcpu, target, cx.vcpu.regs.gpr[RSP]);
    let plain = narrow::may_enter(cx, cs, target) && ss == SS_NARROW && plain_user(cx.vcpu, flags);
    if questionable || !plain || claims::are_met(cx) {
        return false;
    }
    go_to_narrow(cx, [cs, ss], target, flags)
}

/// 32-bit user code comes next. False if the monitor is needed for it.
fn go_to_narrow(cx: &mut Context<'_>, [cs, ss]: [u64; 2], rip: u64, flags: u64) -> bool {
    cx.vcpu.run.compatibility = 1;
    if !narrow::read_areas(cx) {
        return false;
    }
    (cx.vcpu.regs.cs, cx.vcpu.regs.ss) = (cs, ss);
    enter_user(cx, rip, flags);
    true
}

/// Flags user code can run with directly; kicks would be lost on code with IF clear.
fn plain_user(vcpu: &VcpuPage, flags: u64) -> bool {
    flags & !ORDINARY_USER == 0 && flags & IF != 0 && !open_to_interrupt(vcpu, flags)
}

fn enter_user(cx: &mut Context<'_>, rip: u64, flags: u64) {
    cx.vcpu.regs.rip = rip;
    cx.vcpu.regs.rflags = flags;
    cx.vcpu.regs.cpl = 3;
    cx.vcpu.counters.returns += 1;
    cx.vcpu.run.go = go::USER;
    cx.vcpu.run.user_translated = 0;
    if cx.vcpu.run.compatibility == 0
        && cx.shared.mapped.lookups != 0
        && flags & !(IN_HOST & !DF | IF | 2) == 0
    {
        enter_translated_user(cx);
    }
}

/// A program of a 32-bit guest's goes on at `rip`. What its threads have of their own lies from `own` on.
pub fn enter_narrow_program(cx: &mut Context<'_>, rip: u64, flags: u64, own: u64) -> Next {
    cx.vcpu.run.compatibility = 1;
    enter_user(cx, rip, flags);
    enter_translated(cx, own);
    fault::before_return(cx);
    with_block(cx)
}

/// User code whose state is in the vCPU page is run translated.
fn enter_translated_user(cx: &mut Context<'_>) {
    invlpg::finish_deferred(cx);
    enter_translated(cx, cx.vcpu.regs.fs_base);
}

fn enter_translated(cx: &mut Context<'_>, own: u64) {
    cx.vcpu.run.user_translated = 1;
    cx.vcpu.block.host_flags = cx.vcpu.regs.rflags & IN_HOST;
    (cx.vcpu.regs.interrupt_flag, cx.vcpu.regs.ac) = (IF, 0);
    (cx.vcpu.block.bias, cx.vcpu.block.percpu) = (0, own);
    cx.vcpu.run.go = go::BLOCK;
    cx.vcpu.block.jump = match find_user(cx, cx.vcpu.regs.rip) {
        0 => match verified_user(cx, cx.vcpu.regs.rip) {
            UserBlock::Found(block) => block,
            _ => 0,
        },
        block => block,
    };
}

/// User code goes on. If it is run translated, it needs a block.
fn with_block(cx: &mut Context<'_>) -> Next {
    let missing = cx.vcpu.run.user_translated != 0 && cx.vcpu.block.jump == 0;
    if missing { miss_for_good(cx) } else { Next::Run }
}

/// Translated user code has stopped at RIP; the state becomes that of user code for the wedge.
pub fn leave_translated_user(vcpu: &mut VcpuPage) {
    vcpu.run.user_translated = 0;
    vcpu.regs.rflags = vcpu.block.host_flags & IN_HOST | IF | 2;
    vcpu.block.bias = bias();
}

/// Translated user code has stopped where `enter` leads to the kernel. `None`, with nothing changed, if `enter` leaves that to the monitor.
pub fn cross(
    cx: &mut Context<'_>,
    enter: impl FnOnce(&mut Context<'_>) -> Option<Next>,
) -> Option<Next> {
    let (flags, rip) = (cx.vcpu.regs.rflags, cx.vcpu.regs.rip);
    leave_translated_user(cx.vcpu);
    let next = enter(cx);
    if next.is_none() {
        (cx.vcpu.regs.rflags, cx.vcpu.regs.rip) = (flags, rip);
        (cx.vcpu.block.bias, cx.vcpu.run.user_translated) = (0, 1);
    }
    next
}

/// An access has no entry: it gets one, or the guest its page fault.
fn look_up(cx: &mut Context<'_>) -> Option<Next> {
    let exit = &cx.vcpu.exit;
    let (gva, bytes) = (exit.operand, exit.info & (LOOKUP_WRITE - 1));
    let (write, user) = (exit.info & LOOKUP_WRITE != 0, cx.vcpu.regs.cpl != 0);
    let access = mmu::Access { write, fetch: false, user };
    if (gva & 0xfff) + bytes > 0x1000 {
        return None;
    }
    let outcome = match (cx.vcpu.run.walks, user) {
        // Beyond the user's half there are other faults than a page's.
        (walks::FOUR_LEVELS, true) if gva >> 47 == 0 => lookup::fill(cx, gva, access),
        (walks::PAE, false) => lookup::fill_of_narrow_kernel(cx, gva, access),
        _ => return None,
    };
    match outcome {
        LookupOutcome::Filled => {
            cx.vcpu.run.go = go::BLOCK;
            Some(Next::Run)
        }
        LookupOutcome::Fault(present) if delivers(cx) => {
            fault::of_translated_user(cx, gva, present | if write { fault::WRITE } else { 0 })
        }
        _ => None,
    }
}

fn iret(cx: &mut Context<'_>) -> Option<Next> {
    let mut words = [0; 5];
    for (index, word) in words.iter_mut().enumerate() {
        let at = cx.vcpu.regs.gpr[RSP].wrapping_add(index as u64 * 8);
        *word = kernel_word(cx.vcpu, at)?;
    }
    let [rip, cs, flags, rsp, ss] = words;
    match cs & 3 {
        3 => iret_to_user(cx, [rip, cs, flags & !RF, rsp, ss]),
        0 => iret_to_kernel(cx, [rip, cs, flags & !RF, rsp, ss]).then_some(Next::Run),
        _ => None,
    }
}

fn iret_to_user(cx: &mut Context<'_>, [rip, cs, flags, rsp, ss]: [u64; 5]) -> Option<Next> {
    let code = descriptor(cx.vcpu, cs);
    let narrow = code == Some(0x00cf_fa00_0000_ffff)
        && narrow::may_enter(cx, cs, rip)
        && ss & 0xffff == SS_NARROW;
    let flat = (code == Some(0x00af_fa00_0000_ffff) || narrow)
        && descriptor(cx.vcpu, ss) == Some(0x00cf_f200_0000_ffff)
        && ss & 3 == 3;
    // Slow returns from system calls come this way.
    let questionable = claims::are_in_question(cx.vcpu, rip, rsp);
    let plain = flat && rip < USER_END && plain_user(cx.vcpu, flags);
    if questionable || !plain || claims::are_met(cx) {
        return None;
    }
    cx.vcpu.run.compatibility = narrow.into();
    if !narrow::read_areas(cx) {
        return None;
    }
    cx.vcpu.regs.gpr[RSP] = rsp;
    (cx.vcpu.regs.cs, cx.vcpu.regs.ss) = (cs & 0xffff, ss & 0xffff);
    enter_user(cx, rip, flags);
    if cx.vcpu.run.walks == walks::FOUR_LEVELS {
        fault::before_return(cx);
    }
    Some(with_block(cx))
}

fn iret_to_kernel(cx: &mut Context<'_>, [rip, cs, flags, rsp, ss]: [u64; 5]) -> bool {
    let stack = ss & 0xffff == 0 || descriptor(cx.vcpu, ss) == Some(0x00cf_9200_0000_ffff);
    let flat = kernel_code(cx.vcpu, cs) == Some(true) && stack && ss & 3 == 0;
    let ordinary = flags & !ORDINARY_KERNEL == 0 && !open_to_interrupt(cx.vcpu, flags);
    let known = find(rip, flags & AC != 0);
    if !flat || !ordinary || rip < kernel_start() || known == 0 {
        return false;
    }
    cx.vcpu.regs.gpr[RSP] = rsp;
    (cx.vcpu.regs.cs, cx.vcpu.regs.ss) = (cs & 0xffff, ss & 0xffff);
    cx.vcpu.regs.rip = rip;
    cx.vcpu.counters.kernel_returns += 1;
    if flags & AC != 0 && cx.vcpu.run.walks == walks::FOUR_LEVELS {
        fault::before_return(cx);
    }
    enter_kernel_at(cx, flags, known);
    true
}

/// The selector is of flat 64-bit kernel code; `None` if that cannot be read.
pub fn kernel_code(vcpu: &mut VcpuPage, selector: u64) -> Option<bool> {
    let found = descriptor(vcpu, selector)?;
    Some(found == 0x00af_9a00_0000_ffff && selector & 3 == 0)
}

/// A code or data descriptor of the GDT, without its accessed bit.
pub fn descriptor(vcpu: &mut VcpuPage, selector: u64) -> Option<u64> {
    descriptor_word(vcpu, selector).map(|d| d & !(1 << 40))
}

/// A descriptor of the GDT. `None` if there is none, the selector is of the LDT, or the GDT is not mapped, which the exit's detail says.
pub fn descriptor_word(vcpu: &mut VcpuPage, selector: u64) -> Option<u64> {
    let index = selector & 0xfff8;
    if selector & 4 != 0 || index == 0 || index + 7 > vcpu.system.gdt_limit {
        return None;
    }
    kernel_word(vcpu, vcpu.system.gdt.wrapping_add(index))
}

/// Reads guest kernel memory, if it is mapped; if not, the exit's detail says what is missing.
pub fn kernel_word(vcpu: &mut VcpuPage, address: u64) -> Option<u64> {
    let mut value = 0;
    let known =
        address >= kernel_start() && load_careful(address.wrapping_add(bias()), &mut value) != 0;
    if !known {
        vcpu.exit.info = address;
    }
    known.then_some(value)
}

/// Loads a word; the fault of its first instruction becomes a zero result.
#[unsafe(naked)]
pub extern "C" fn load_careful(address: u64, value: &mut u64) -> u64 {
    naked_asm!("mov rax, [rdi]", "mov [rsi], rax", "mov eax, 1", "ret")
}

/// Where a failed [`load_careful`] goes on.
#[unsafe(naked)]
pub extern "C" fn load_failed() -> u64 {
    naked_asm!("xor eax, eax", "ret")
}
