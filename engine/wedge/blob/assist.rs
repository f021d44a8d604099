//! SYSCALL, SYSRET and IRET without the monitor, as far as they are the ordinary ones.
//!
//! Whatever is not ordinary (single step, 32-bit code, odd descriptors, a pending interrupt) is left to
//! the monitor with the state untouched.

use crate::{
    bias, claims, fault, here,
    host::load_vectors_careful,
    kernel_start,
    layout::{
        COPIES, DEEP, DEEP_REACH, ExitKind, Frame, REGIONS, Vectors, copy_slot, TABLE_LEN, TABLE_SLOTS, TABLES, USER_TABLES,
        deep_slot, go, percpu, region,
    },
    lookup::{self, Outcome},
    lookups::LOOKUP_WRITE,
    mmu, shared, turns,
};
use core::arch::naked_asm;

const CF_TO_OF: u64 = 0x8d5;
const TF: u64 = 1 << 8;
const IF: u64 = 1 << 9;
const DF: u64 = 1 << 10;
const IOPL: u64 = 3 << 12;
const NT: u64 = 1 << 14;
const RF: u64 = 1 << 16;
const VM: u64 = 1 << 17;
const AC: u64 = 1 << 18;
const ID: u64 = 1 << 21;
/// Kept in the host's RFLAGS in translated code.
const IN_HOST: u64 = CF_TO_OF | DF | ID;
/// What SYSRET takes from R11.
const SYSRET_FLAGS: u64 = 0x003c_7fd7;
/// Flags user code may have that need no watching.
const ORDINARY_USER: u64 = CF_TO_OF | IF | DF | NT | AC | ID | 2;
const ORDINARY_KERNEL: u64 = IN_HOST | IF | AC | 2;
/// CR3: translations may stay, and the process-context identifier.
const KEEP: u64 = 1 << 63;
const PCID: u64 = 0xfff;
/// Bits of a GPA.
const PHYSICAL_BITS: u32 = 46;
const USER_END: u64 = 0x7fff_ffff_f000;
const RAX: usize = 0;
const RCX: usize = 1;
const RSP: usize = 4;
const R11: usize = 11;

/// SYSCALL by user code, whose state is in the frame with RIP behind the instruction.
pub fn system_call(f: &mut Frame) -> ! {
    make_system_call(f);
    crate::run::run()
}

fn make_system_call(f: &mut Frame) {
    let flags = f.rflags & !(f.sfmask | RF);
    if flags & (TF | NT | VM | IOPL) != 0 {
        turns::exit(ExitKind::UserSignal);
    }
    (f.call, f.caller) = (f.gpr[RAX], f.cr3);
    f.gpr[RCX] = f.rip;
    f.gpr[R11] = f.rflags & !RF;
    f.cs = f.star >> 32 & 0xfffc;
    f.ss = (f.star >> 32).wrapping_add(8) & 0xfffc;
    f.rip = f.lstar;
    f.fast_system_calls += 1;
    enter_kernel(f, flags);
}

/// Goes on in translated code at RIP, with these flags.
pub fn enter_kernel(f: &mut Frame, flags: u64) {
    let block = find(f.rip, flags & AC != 0);
    enter_kernel_at(f, flags, block);
    if block == 0 {
        f.exit_info = 0;
        turns::exit(ExitKind::Miss)
    }
}

fn enter_kernel_at(f: &mut Frame, flags: u64, block: u64) {
    if flags & AC != 0 {
        mmu::finish_deferred(f);
    }
    f.cpl = 0;
    f.interrupt_flag = flags & IF;
    f.alignment_flag = flags & AC;
    f.host_flags = flags & IN_HOST;
    f.percpu = percpu(f.gs_base, bias());
    f.go = go::BLOCK;
    f.jump = block;
}

/// What translated code would reach by this address.
fn host_address(address: u64) -> u64 {
    // SAFETY: the table has an entry for every region.
    let bias = unsafe { *(here(REGIONS) as *const u64).add(region(address)) };
    address.wrapping_add(bias)
}

/// What is mapped at an address is what the guest has there, and no copy for user code.
fn is_shown(address: u64) -> bool {
    // SAFETY: the table has an entry for every page.
    unsafe { *(here(COPIES) as *const u64).add(copy_slot(address)) == 0 }
}

/// HVA of the block for a guest address, zero if the tables do not know it.
fn find(guest: u64, alignment: bool) -> u64 {
    find_in(here(TABLES), guest, alignment)
}

/// HVA of the block of the program that runs, zero if there is none or the blocks are another's.
fn find_user(f: &Frame, guest: u64) -> u64 {
    if f.code_space != f.cr3 || guest >= USER_END { 0 } else { find_in(here(TABLES + USER_TABLES), guest, false) }
}

fn find_in(tables: usize, guest: u64, alignment: bool) -> u64 {
    let table = tables + if alignment { TABLE_LEN } else { 0 };
    let slot = guest as usize & (TABLE_SLOTS - 1);
    // SAFETY: the tables are mapped for good.
    unsafe {
        let [key, value] = *((table + slot * 16) as *const [u64; 2]);
        if key.wrapping_add(guest) == 0 { value } else { search(tables, guest, alignment) }
    }
}

/// The same, in the table behind the others; it has no room for the rare blocks inside STAC..CLAC.
fn search(tables: usize, guest: u64, alignment: bool) -> u64 {
    if alignment {
        return 0;
    }
    for n in 0..DEEP_REACH {
        let slot = deep_slot(guest) + n;
        let at = (tables + DEEP + slot * 16) as *const u64;
        // SAFETY: as above.
        unsafe {
            if *at == guest {
                return *at.add(1);
            }
        }
    }
    0
}

/// An indirect jump has missed its table, in which two addresses can be in each other's way.
fn miss(f: &mut Frame) -> bool {
    f.jump = if f.cpl == 0 { find(f.rip, f.alignment_flag != 0) } else { find_user(f, f.rip) };
    f.go = go::BLOCK;
    f.jump != 0
}

/// Translated code has exited. True: go on with `Frame::go`. False: the monitor is needed.
pub fn after_block(f: &mut Frame) -> bool {
    const SYSRET: u64 = ExitKind::Sysret as u64;
    const IRET: u64 = ExitKind::Iret as u64;
    const MISS: u64 = ExitKind::Miss as u64;
    const INVALIDATE: u64 = ExitKind::InvalidatePage as u64;
    const LOAD_VECTORS: u64 = ExitKind::LoadVectors as u64;
    const LOAD_SPACE: u64 = ExitKind::LoadSpace as u64;
    const LOOKUP: u64 = ExitKind::Lookup as u64;
    const SYSTEM_CALL: u64 = ExitKind::SystemCall as u64;
    match f.exit_kind {
        MISS if f.exit_info == 0 => miss(f),
        LOOKUP if f.walks != 0 && f.cpl != 0 => look_up(f),
        SYSTEM_CALL if f.fast != 0 && f.cpl != 0 => {
            f.rip = f.next;
            leave_translated_user(f);
            make_system_call(f);
            true
        }
        LOAD_VECTORS => load_guest_vectors(f),
        SYSRET if f.fast != 0 => sysret(f),
        IRET if f.fast != 0 => iret(f),
        INVALIDATE if f.walks != 0 => invalidate(f),
        // Another wedge would not know that it is to go no further.
        LOAD_SPACE if f.walks != 0 && f.pcids != 0 && f.go != go::LEAVE => load_space(f),
        _ => false,
    }
}

/// XRSTOR of what the guest asks for, if it is in order.
fn load_guest_vectors(f: &mut Frame) -> bool {
    let area = host_address(f.operand);
    let next = find(f.next, f.alignment_flag != 0);
    let open = f.operand >= kernel_start() || f.alignment_flag != 0;
    let known = open && area % 64 == 0 && area >> 47 == 0 && next != 0;
    let shown = is_shown(area) && is_shown(area + size_of::<Vectors>() as u64 - 1);
    if !known || !shown || !load_vectors_careful(area, f.gpr[RAX] & f.vector_mask) {
        return false;
    }
    go_on_behind(f, next)
}

/// The instruction has been done: the block behind it comes next.
fn go_on_behind(f: &mut Frame, block: u64) -> bool {
    f.rip = f.next;
    f.jump = block;
    f.go = go::BLOCK;
    true
}

fn invalidate(f: &mut Frame) -> bool {
    let next = find(f.next, f.alignment_flag != 0);
    if next == 0 || !mmu::invalidate(f, shared(), f.operand) {
        return false;
    }
    go_on_behind(f, next)
}

/// MOV to CR3 that keeps translations, of a space that some wedge holds: that one goes on.
fn load_space(f: &mut Frame) -> bool {
    let root = f.operand & !KEEP;
    let next = find(f.next, f.alignment_flag != 0);
    if f.operand & KEEP == 0 || root >> PHYSICAL_BITS != 0 || next == 0 {
        return false;
    }
    let Some(to) = turns::holder(root & PCID) else { return false };
    f.cr3 = root;
    f.hand_overs += 1;
    go_on_behind(f, next);
    if to as u64 != shared().number {
        turns::pass_on(to);
    }
    true
}

/// An interrupt is due as soon as interrupts are enabled.
fn open_to_interrupt(f: &Frame, flags: u64) -> bool {
    f.pending != 0 && flags & IF != 0
}

fn sysret(f: &mut Frame) -> bool {
    let flags = f.gpr[R11] & SYSRET_FLAGS | 2;
    let target = f.gpr[RCX];
    // Whoever returns, the monitor is to know of it.
    let questionable = claims::are_in_question(f);
    let plain = target < USER_END && plain_user(f, flags);
    if questionable || !plain || claims::are_met(f, shared()) {
        return false;
    }
    f.cs = (f.star >> 48).wrapping_add(16) | 3;
    f.ss = (f.star >> 48).wrapping_add(8) | 3;
    enter_user(f, target, flags);
    need_block(f);
    true
}

/// Flags user code can run with directly; kicks would be lost on code with IF clear.
fn plain_user(f: &Frame, flags: u64) -> bool {
    flags & !ORDINARY_USER == 0 && flags & IF != 0 && !open_to_interrupt(f, flags)
}

fn enter_user(f: &mut Frame, rip: u64, flags: u64) {
    f.rip = rip;
    f.rflags = flags;
    f.cpl = 3;
    f.fast_returns += 1;
    f.go = go::USER;
    f.user_translated = 0;
    if shared().lookups != 0 && flags & !(IN_HOST | IF | 2) == 0 {
        enter_translated_user(f);
    }
}

/// User code whose state is in the frame is run translated.
fn enter_translated_user(f: &mut Frame) {
    mmu::finish_deferred(f);
    f.user_translated = 1;
    f.host_flags = f.rflags & IN_HOST;
    (f.interrupt_flag, f.alignment_flag) = (IF, 0);
    (f.bias, f.percpu) = (0, f.fs_base);
    f.go = go::BLOCK;
    f.jump = find_user(f, f.rip);
}

/// No block has been found for it.
fn need_block(f: &mut Frame) {
    if f.user_translated != 0 && f.jump == 0 {
        f.exit_info = 0;
        turns::exit(ExitKind::Miss)
    }
}

/// Translated user code has stopped at RIP; the state becomes that of user code for the wedge.
pub fn leave_translated_user(f: &mut Frame) {
    f.user_translated = 0;
    f.rflags = f.host_flags & IN_HOST | IF | 2;
    f.bias = bias();
}

/// User code's access has no entry: it gets one, or the guest its page fault.
fn look_up(f: &mut Frame) -> bool {
    let (gva, bytes, write) = (f.operand, f.exit_info & (LOOKUP_WRITE - 1), f.exit_info & LOOKUP_WRITE != 0);
    if (gva & 0xfff) + bytes > 0x1000 {
        return false;
    }
    match lookup::fill(f, shared(), gva, mmu::Access { write, fetch: false, user: true }) {
        Outcome::Filled => {
            f.go = go::BLOCK;
            true
        }
        // A step goes no further: the monitor delivers it.
        Outcome::Fault(present) if f.fast != 0 && f.go == go::BLOCK => fault::of_translated_user(f, gva, present, write),
        _ => false,
    }
}

fn iret(f: &mut Frame) -> bool {
    let mut words = [0; 5];
    for (index, word) in words.iter_mut().enumerate() {
        let at = f.gpr[RSP].wrapping_add(index as u64 * 8);
        let Some(value) = kernel_word(f, at) else { return false };
        *word = value;
    }
    let [rip, cs, flags, rsp, ss] = words;
    match cs & 3 {
        3 => iret_to_user(f, [rip, cs, flags & !RF, rsp, ss]),
        0 => iret_to_kernel(f, [rip, cs, flags & !RF, rsp, ss]),
        _ => false,
    }
}

fn iret_to_user(f: &mut Frame, [rip, cs, flags, rsp, ss]: [u64; 5]) -> bool {
    let flat = descriptor(f, cs) == Some(0x00af_fa00_0000_ffff)
        && descriptor(f, ss) == Some(0x00cf_f200_0000_ffff)
        && ss & 3 == 3;
    // Slow returns from system calls come this way.
    let questionable = claims::are_in_question(f);
    let plain = flat && rip < USER_END && plain_user(f, flags);
    if questionable || !plain || claims::are_met(f, shared()) {
        return false;
    }
    f.gpr[RSP] = rsp;
    (f.cs, f.ss) = (cs & 0xffff, ss & 0xffff);
    enter_user(f, rip, flags);
    if f.walks != 0 {
        fault::before_return(f);
    }
    need_block(f);
    true
}

fn iret_to_kernel(f: &mut Frame, [rip, cs, flags, rsp, ss]: [u64; 5]) -> bool {
    let stack = ss & 0xffff == 0 || descriptor(f, ss) == Some(0x00cf_9200_0000_ffff);
    let flat = kernel_code(f, cs) == Some(true) && stack && ss & 3 == 0;
    let ordinary = flags & !ORDINARY_KERNEL == 0 && !open_to_interrupt(f, flags);
    let known = find(rip, flags & AC != 0);
    if !flat || !ordinary || rip < kernel_start() || known == 0 {
        return false;
    }
    f.gpr[RSP] = rsp;
    (f.cs, f.ss) = (cs & 0xffff, ss & 0xffff);
    f.rip = rip;
    f.fast_kernel_returns += 1;
    enter_kernel_at(f, flags, known);
    true
}

/// The selector is of flat 64-bit kernel code; `None` if that cannot be read.
pub fn kernel_code(f: &mut Frame, selector: u64) -> Option<bool> {
    let found = descriptor(f, selector)?;
    Some(found == 0x00af_9a00_0000_ffff && selector & 3 == 0)
}

/// A code or data descriptor of the GDT, without its accessed bit.
fn descriptor(f: &mut Frame, selector: u64) -> Option<u64> {
    let index = selector & 0xfff8;
    if selector & 4 != 0 || index == 0 || index + 7 > f.gdt_limit {
        return None;
    }
    kernel_word(f, f.gdt.wrapping_add(index)).map(|d| d & !(1 << 40))
}

/// Reads guest kernel memory, if it is mapped; if not, the exit's detail says what is missing.
pub fn kernel_word(f: &mut Frame, address: u64) -> Option<u64> {
    let mut value = 0;
    let known = address >= kernel_start() && load_careful(address.wrapping_add(bias()), &mut value) != 0;
    if !known {
        f.exit_info = address;
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
