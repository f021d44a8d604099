//! System calls from patched sites: no signal, no host call.
//!
//! A site `mov eax, nr; syscall` or `syscall; cmp rax, imm32` jumps through a table to a stub, which loads
//! the address behind the call (and the number) and comes here. Code that jumps into the middle of the
//! former, as a kernel does that starts a call over, finds no instruction there ([`call_at`]). RCX and R11
//! are lost in a system call, so there are two registers to work with; everything else is the user's.

use crate::{
    assist,
    context::{Context, Next, go_on, step},
    die, here,
    host::{save_segments, user_word},
};
use core::{arch::naked_asm, mem::offset_of};
use wedge_abi::{
    CMP_LEN, HEAT, HOT, MAX_SITES, SITE_LEN, SITES, STUB_LEN, STUB_RETURN, STUB_TAIL, STUBS,
    Shared, VcpuPage, mode,
};

macro_rules! entry {
    ($name:ident, $($open:literal),*) => {
        /// EAX is the number, RCX the address behind the call.
        ///
        /// Nothing established before the keys are opened is relied on after it: user code can jump
        /// anywhere in here, and then has done no more than a system call with odd registers.
        #[unsafe(naked)]
        pub extern "C" fn $name() {
            naked_asm!(
                "mov [rip + gate_page + 64], rsp",
                "lea rsp, [rip + gate_page + 512]",
                "pushfq",
                "pop r11",
                "mov [rip + gate_page + 72], rax",
                "mov [rip + gate_page + 80], rcx",
                "mov [rip + gate_page + 88], rdx",
                $($open,)*
                "lea rsp, [rip + stack_top]",
                "push 0x202",
                "popfq",
                "lea rcx, [rip + vcpu_page]",
                "mov [rcx + {gpr} + 24], rbx",
                "mov [rcx + {gpr} + 40], rbp",
                "mov [rcx + {gpr} + 48], rsi",
                "mov [rcx + {gpr} + 56], rdi",
                "mov [rcx + {gpr} + 64], r8",
                "mov [rcx + {gpr} + 72], r9",
                "mov [rcx + {gpr} + 80], r10",
                "mov [rcx + {gpr} + 96], r12",
                "mov [rcx + {gpr} + 104], r13",
                "mov [rcx + {gpr} + 112], r14",
                "mov [rcx + {gpr} + 120], r15",
                "mov [rcx + {rflags}], r11",
                "mov rax, [rip + gate_page + 72]",
                "mov [rcx + {gpr}], rax",
                "mov rax, [rip + gate_page + 88]",
                "mov [rcx + {gpr} + 16], rax",
                "mov rax, [rip + gate_page + 64]",
                "mov [rcx + {gpr} + 32], rax",
                "mov rax, [rip + gate_page + 80]",
                "mov [rcx + {rip}], rax",
                "xor ebp, ebp",
                "call {body}",
                "ud2",
                gpr = const offset_of!(VcpuPage, regs.gpr),
                rip = const offset_of!(VcpuPage, regs.rip),
                rflags = const offset_of!(VcpuPage, regs.rflags),
                body = sym arrived)
        }
    };
}

entry!(entry_with_keys, "xor eax, eax", "xor ecx, ecx", "xor edx, edx", "wrpkru");
entry!(entry_without_keys, "nop");

extern "C" fn arrived() -> ! {
    go_on(step(patched_call))
}

fn patched_call(cx: &mut Context<'_>) -> Next {
    cx.vcpu.run.mode = mode::WEDGE;
    save_segments(cx.vcpu);
    cx.vcpu.counters.patched_system_calls += 1;
    assist::system_call(cx)
}

/// First byte of a stub that loads the number: MOV EAX, imm32.
const MOV_EAX: u64 = 0xb8;
/// `jmp [disp32]`
const JUMP: u64 = 0x25_24ff;
/// `syscall`, and `cmp rax, imm32`
const SYSCALL: u64 = 0x050f;
const CMP_RAX: u64 = 0x3d48;

fn stub(index: u64) -> u64 {
    here(STUBS) as u64 + index * STUB_LEN as u64
}

/// A word of the stubs.
fn stub_word(at: u64) -> u64 {
    if at.wrapping_sub(here(STUBS) as u64) > (MAX_SITES * STUB_LEN - size_of::<u64>()) as u64 {
        die();
    }
    // SAFETY: inside the stubs, which are mapped for good.
    unsafe { core::ptr::read_unaligned(at as *const u64) }
}

/// If `rip` lies in a stub: the user's RIP that it stands for. A call that has not been made yet is
/// started over.
pub fn site_of(rip: u64) -> Option<u64> {
    let into = rip.wrapping_sub(here(STUBS) as u64);
    if into >= (MAX_SITES * STUB_LEN) as u64 {
        return None;
    }
    let start = stub(into / STUB_LEN as u64);
    let back = stub_word(start + STUB_RETURN as u64);
    let before = if stub_word(start) & 0xff == MOV_EAX { SITE_LEN } else { 2 };
    Some(match rip - start {
        at if at < STUB_TAIL as u64 => back.wrapping_sub(before),
        at if at == STUB_TAIL as u64 => back,
        _ => back.wrapping_add(CMP_LEN),
    })
}

/// The stub of the patch at `at`, if there is one.
fn stub_of_patch(at: u64) -> Option<u64> {
    // Not a byte of another page, which may not be mapped.
    let word = if at & 0xfff == 0 { user_word(at)? } else { user_word(at.wrapping_sub(1))? >> 8 };
    site_of_patch(word).map(stub)
}

/// The site whose patch begins with these bytes. There may be others of the kind in a program, whose number is of no site.
fn site_of_patch(word: u64) -> Option<u64> {
    let is_patch = word & 0xff_ffff == JUMP && word >> 40 & 0xffff == SITES as u64 >> 16;
    let site = (word >> 24 & 0xffff) / 8;
    (is_patch && site < MAX_SITES as u64).then_some(site)
}

/// The address behind the SYSCALL at `rip` whose bytes are the end of a patch, if one is.
pub fn call_at(rip: u64) -> Option<u64> {
    let start = stub_of_patch(rip.wrapping_add(2).wrapping_sub(SITE_LEN))?;
    let back = stub_word(start + STUB_RETURN as u64);
    (stub_word(start) & 0xff == MOV_EAX && back == rip.wrapping_add(2)).then_some(back)
}

/// Where user code at `rip` really goes on: if the instruction there has been displaced by a patch,
/// in the stub's tail.
pub fn resume_at(s: &Shared, rip: u64) -> u64 {
    let low = rip & 0xfff;
    let maybe =
        s.patched.displaced.get(low as usize / 64).is_some_and(|word| word >> (low % 64) & 1 == 1);
    if !maybe {
        return rip;
    }
    match stub_of_patch(rip.wrapping_sub(2)) {
        Some(start) if stub_word(start + STUB_RETURN as u64) == rip => start + STUB_TAIL as u64,
        _ => rip,
    }
}

/// System calls come often from `rip`, or from elsewhere.
pub fn is_warm(s: &mut Shared, rip: u64) -> bool {
    if s.setup.unpatched != 0 {
        return false;
    }
    let Some(heat) = s.patched.heat.get_mut((rip ^ rip >> 8) as usize % HEAT) else { return false };
    *heat = heat.wrapping_add(1);
    let warm = *heat == HOT;
    if warm {
        *heat = 0;
    }
    warm
}

/// A system call has come by trap to `rip`: is its site worth patching now?
pub fn is_hot(s: &mut Shared, rip: u64) -> bool {
    if !is_warm(s, rip) {
        return false;
    }
    // mov eax, imm32 (below 4096); syscall
    let before = user_word(rip.wrapping_sub(8)).unwrap_or(0) >> 8;
    let number =
        before & 0xff == MOV_EAX && before >> 40 == SYSCALL && before >> 8 & 0xffff_f000 == 0;
    let after = user_word(rip.wrapping_sub(2)).unwrap_or(0);
    number || after & 0xffff == SYSCALL && after >> 16 & 0xffff == CMP_RAX
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `jmp [SITES + at]`
    fn patch(at: u64) -> u64 {
        JUMP | (SITES as u64 + at) << 24
    }

    #[test]
    fn bytes_like_a_patchs_lead_to_no_more_stubs_than_there_are() {
        let last = MAX_SITES as u64 - 1;
        assert_eq!(site_of_patch(patch(0)), Some(0));
        assert_eq!(site_of_patch(patch(8 * last)), Some(last));
        assert_eq!(site_of_patch(patch(8 * last + 8)), None);
        assert_eq!(site_of_patch(patch(0xfff8)), None);
        assert_eq!(site_of_patch(0x90), None);
    }
}
