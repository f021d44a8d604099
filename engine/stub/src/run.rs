//! Going on with guest code.

use crate::{
    assist, frame,
    gates::{
        enter_block, enter_narrow, enter_narrow_without_keys, enter_user, enter_user_without_keys,
        resume_raw,
    },
    host::{set_bases, set_selectors},
    mmu, narrow,
    patched::resume_at,
    shared, strict, turns,
};
use core::arch::asm;
use frame::{Reason, VcpuPage, go};
use x86::flags::TF;

/// Goes on as `RunControl::go` says, until the monitor is needed.
pub extern "C" fn run() -> ! {
    let f = frame();
    loop {
        let how = f.run.go;
        let exited = match f.run.go {
            go::USER => enter_user_code(f),
            go::BLOCK => enter_block(),
            _ => {
                set_bases(f.block.percpu, f.block.bias);
                resume_raw()
            }
        };
        if exited == 0 {
            turns::exit(Reason::Kicked);
        }
        if f.run.alone != 0 || !assist::after_block(f) {
            turns::exit(Reason::Block);
        }
        if how == go::LEAVE {
            turns::exit(Reason::Kicked);
        }
    }
}

/// Goes on at `then` on an empty stack.
pub fn restart(then: extern "C" fn() -> !) -> ! {
    // SAFETY: nothing on the stack is needed any more.
    unsafe {
        asm!("lea rsp, [rip + stack_top]", "xor ebp, ebp", "call {then}", "ud2",
            then = in(reg) then, options(noreturn))
    }
}

/// Returns only if a kick came first. What is single-stepped is the monitor's: the gate would be stepped
/// first.
fn enter_user_code(f: &mut VcpuPage) -> u64 {
    if f.regs.rflags & TF != 0 {
        return 0;
    }
    mmu::finish_deferred(f);
    let s = shared();
    f.run.user_rip = resume_at(s, f.regs.rip);
    if s.setup.user_secret != 0 {
        return strict::enter(f, s);
    }
    if !narrow::prepare(f, s) {
        turns::exit(Reason::Interpret);
    }
    set_selectors(f);
    set_bases(f.regs.fs_base, f.regs.gs_base);
    match (f.run.compatibility != 0, s.setup.key != 0) {
        (false, true) => enter_user(),
        (false, false) => enter_user_without_keys(),
        (true, true) => enter_narrow(),
        (true, false) => enter_narrow_without_keys(),
    }
    0
}
