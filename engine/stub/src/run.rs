//! Going on with guest code.

use crate::{
    assist,
    gates::{
        enter_block, enter_narrow, enter_narrow_without_keys, enter_user, enter_user_without_keys,
        resume_raw,
    },
    host::{set_bases, set_selectors},
    mmu, narrow,
    patched::resume_at,
    strict,
    turns::{self, Turn},
};
use core::arch::asm;
use frame::{Reason, go};
use x86::flags::TF;

/// Goes on as `RunControl::go` says, until the monitor is needed.
pub fn run(turn: &mut Turn) -> ! {
    loop {
        let f = turn.vcpu();
        let how = f.run.go;
        let exited = match how {
            go::USER => enter_user_code(turn),
            // SAFETY: nothing of the turn is lent from here on.
            go::BLOCK => unsafe { enter_block() },
            _ => {
                set_bases(f.block.percpu, f.block.bias);
                // SAFETY: as above.
                unsafe { resume_raw() }
            }
        };
        if exited == 0 {
            turns::exit(turn, Reason::Kicked);
        }
        if turn.vcpu().run.alone != 0 || !assist::after_block(turn) {
            turns::exit(turn, Reason::Block);
        }
        if how == go::LEAVE {
            turns::exit(turn, Reason::Kicked);
        }
    }
}

/// Goes on at `then` on an empty stack, with the turn: what was lent of it to whoever calls this is given up.
pub fn restart(then: fn(&mut Turn) -> !) -> ! {
    // SAFETY: nothing on the stack is needed any more.
    unsafe {
        asm!("lea rsp, [rip + stack_top]", "xor ebp, ebp", "call {begin}", "ud2",
            begin = sym begin, in("rdi") then, options(noreturn))
    }
}

extern "C" fn begin(then: fn(&mut Turn) -> !) -> ! {
    // SAFETY: by `restart`, which has left the stack.
    then(&mut unsafe { Turn::take_up() })
}

/// Returns only if a kick came first. What is single-stepped is the monitor's: the gate would be stepped
/// first.
fn enter_user_code(turn: &mut Turn) -> u64 {
    let (f, s) = turn.pages();
    if f.regs.rflags & TF != 0 {
        return 0;
    }
    mmu::finish_deferred(f, s);
    f.run.user_rip = resume_at(s, f.regs.rip);
    if s.setup.user_secret != 0 {
        return strict::enter(turn);
    }
    if !narrow::prepare(f, s) {
        turns::exit(turn, Reason::Interpret);
    }
    set_selectors(f);
    set_bases(f.regs.fs_base, f.regs.gs_base);
    let kind = (f.run.compatibility != 0, s.setup.key != 0);
    // SAFETY: nothing of the turn is lent from here on.
    unsafe {
        match kind {
            (false, true) => enter_user(),
            (false, false) => enter_user_without_keys(),
            (true, true) => enter_narrow(),
            (true, false) => enter_narrow_without_keys(),
        }
    }
    0
}
