//! Going on with guest code.

use crate::{
    assist, blocks,
    context::{Context, Next},
    gates::gate,
    host::{set_bases, set_selectors},
    invlpg, narrow,
    patched::resume_at,
    strict,
};
use wedge_abi::{Reason, go};
use x86::flags::TF;

/// Goes on as `RunControl::go` says.
pub fn begin(cx: &mut Context<'_>) -> Next {
    match cx.vcpu.run.go {
        go::USER => enter_user_code(cx),
        go::BLOCK => Next::Block(go::BLOCK),
        how => {
            set_bases(cx.vcpu.block.percpu, cx.vcpu.block.bias);
            Next::Block(how)
        }
    }
}

/// Translated code has come to its exit.
pub fn end(cx: &mut Context<'_>, how: u64) -> Next {
    if cx.vcpu.regs.cpl != 0 {
        blocks::resolve_places(cx.vcpu);
    }
    if cx.vcpu.run.alone != 0 {
        return Next::Exit(Reason::Block);
    }
    match assist::after_block(cx) {
        Next::Run if how == go::LEAVE => Next::Exit(Reason::Kicked),
        Next::Run => begin(cx),
        next => next,
    }
}

/// What is single-stepped is the monitor's: the gate would be stepped first.
fn enter_user_code(cx: &mut Context<'_>) -> Next {
    if cx.vcpu.regs.rflags & TF != 0 {
        return Next::Exit(Reason::Kicked);
    }
    invlpg::finish_deferred(cx);
    cx.vcpu.run.user_rip = resume_at(cx.shared, cx.vcpu.regs.rip);
    if cx.shared.setup.user_secret != 0 {
        return strict::enter(cx);
    }
    if !narrow::prepare(cx) {
        return Next::Exit(Reason::Interpret);
    }
    set_selectors(cx.vcpu);
    set_bases(cx.vcpu.regs.fs_base, cx.vcpu.regs.gs_base);
    Next::User(gate(cx.vcpu.run.compatibility != 0, cx.shared.setup.key != 0))
}
