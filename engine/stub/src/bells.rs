//! Doorbells rung by the wedge, and the interrupts of their answers.
//!
//! The kernel's translated code ends at an instruction that accesses a device. If that is a store to a doorbell whose server looks at
//! its queues by itself, the server has the request already. So the wedge waits for the answer, as the monitor would, and then takes
//! the interrupt. Whatever is not ordinary is left to the monitor, with nothing changed: it rings once more, which does no harm.

use crate::{
    assist,
    blocks::find,
    context::{Context, Next},
    fault, reach, walk,
};
use core::{
    arch::x86_64::{_mm_pause, _rdtsc},
    sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence},
};
use wedge_abi::{Bell, RAM, Ring, Shared, VcpuPage, WORDS, walks, words};

/// What came of waiting for an answer.
enum Outcome {
    /// There is an answer, which interrupts.
    Interrupts,
    /// Everything has been answered, and nobody is to be told.
    Silent,
    /// There is no answer yet. The server has the request and will tell by an event.
    Late,
    /// The server has not said that it has the request, or a kick has come.
    Unknown,
}

/// The kernel's code has come to an instruction without a block: if that rings, it is done here.
pub fn ring(cx: &mut Context<'_>) -> Option<Next> {
    let info = cx.vcpu.exit.info;
    let next = try_ring(cx);
    // What could not be read was noted there.
    cx.vcpu.exit.info = info;
    next
}

fn try_ring(cx: &mut Context<'_>) -> Option<Next> {
    let ring = instruction(cx.vcpu)?;
    let may =
        assist::delivers(cx) && cx.vcpu.run.alone == 0 && cx.vcpu.run.walks == walks::FOUR_LEVELS;
    if !may || epoch() != cx.vcpu.told.bells.epoch || take_late(cx.vcpu) {
        return None;
    }
    let base = cx.vcpu.regs.gpr.get(ring.base as usize)?;
    let gpa = walk::gpa_of_store(cx, base.wrapping_add(ring.displacement))?;
    let bell = *cx.vcpu.told.bells.bells.iter().find(|bell| bell.gpa == gpa)?;
    if gpa == 0 || !is_open(cx, bell.vector) {
        return None;
    }
    let next = cx.vcpu.regs.rip.wrapping_add(ring.len);
    let behind = find(next, cx.vcpu.regs.ac != 0);
    if behind == 0 {
        return None;
    }
    answer(cx, bell, (next, behind))
}

/// The last answer was late: it is the monitor's turn, which knows where the server should be.
fn take_late(vcpu: &mut VcpuPage) -> bool {
    core::mem::take(&mut vcpu.bells.late) != 0
}

/// What the monitor's word says.
fn epoch() -> u64 {
    // SAFETY: the pages of words are mapped for good, and the word is only ever accessed as an atomic.
    unsafe { &*((reach(WORDS) + words::EPOCH) as *const AtomicU64) }.load(Ordering::Acquire)
}

/// The instruction at RIP, if it rings.
fn instruction(vcpu: &VcpuPage) -> Option<Ring> {
    let rip = vcpu.regs.rip;
    vcpu.told.bells.rings.iter().find(|ring| ring.rip == rip && rip != 0).copied()
}

/// The guest would take an interrupt with this vector at once, and tell its end by the byte.
fn is_open(cx: &Context<'_>, vector: u64) -> bool {
    let vcpu = &*cx.vcpu;
    vcpu.regs.interrupt_flag != 0
        && vcpu.run.pending == 0
        && vector >> 4 > vcpu.bells.above
        && end(cx.shared, vcpu.bells.end).is_some_and(|byte| byte.load(Ordering::Relaxed) == 0)
}

/// The byte that tells the end of an interrupt, if it lies in RAM that may be written at will.
fn end(s: &Shared, offset: u64) -> Option<&'static AtomicU8> {
    // SAFETY: RAM, which is mapped for good; a page without a mark is in it. Others write it, too.
    (walk::mark(s, offset) == 0)
        .then(|| unsafe { &*((reach(RAM) as u64 + offset) as *const AtomicU8) })
}

/// Waits for the answer and goes on behind the instruction, or in the interrupt's handler.
fn answer(cx: &mut Context<'_>, bell: Bell, (next, behind): (u64, u64)) -> Option<Next> {
    let frame = fault::Frame::store(cx.vcpu, bell.vector, next)?;
    let outcome = wait(cx, &bell);
    match outcome {
        Outcome::Interrupts => {
            let byte = end(cx.shared, cx.vcpu.bells.end);
            byte.into_iter().for_each(|byte| byte.store(1, Ordering::Relaxed));
            cx.vcpu.bells.taken = bell.vector;
            cx.vcpu.counters.rung += 1;
            cx.vcpu.counters.interrupts += 1;
            Some(frame.enter(cx))
        }
        Outcome::Silent | Outcome::Late => {
            cx.vcpu.bells.late = matches!(outcome, Outcome::Late).into();
            cx.vcpu.counters.rung += 1;
            cx.vcpu.regs.rip = next;
            Some(assist::run_block(cx, behind))
        }
        Outcome::Unknown => None,
    }
}

/// Waits for the answer of a queue whose server looks at it.
fn wait(cx: &Context<'_>, bell: &Bell) -> Outcome {
    let (Some(watched), Some(word)) =
        (word(bell, words::WATCHED), word(bell, words::FIRST_QUEUE + bell.queue as usize))
    else {
        return Outcome::Unknown;
    };
    // What the guest has offered is seen before this is read.
    fence(Ordering::SeqCst);
    if watched.load(Ordering::SeqCst) == words::NOT_WATCHED {
        return Outcome::Unknown;
    }
    match word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, expect) {
        Ok(words::EARLY) => return Outcome::Interrupts,
        Ok(_) => {}
        Err(_) => return Outcome::Silent,
    }
    let outcome = look(cx, bell, word);
    match word.swap(words::NOBODY, Ordering::SeqCst) {
        words::ANSWERED | words::EARLY => Outcome::Interrupts,
        words::SILENT => Outcome::Silent,
        _ => outcome,
    }
}

/// The next value of a queue's word for a vCPU that comes to wait for an answer. An answer that is there already is taken. `None` if another vCPU
/// waits: the word must stay, because the server tells of an answer once.
fn expect(said: u32) -> Option<u32> {
    match said {
        words::NOBODY => Some(words::LOOKING),
        words::EARLY => Some(words::NOBODY),
        _ => None,
    }
}

/// Looks for the answer until it is there or has taken too long.
fn look(cx: &Context<'_>, bell: &Bell, word: &AtomicU32) -> Outcome {
    let bells = &cx.vcpu.told.bells;
    // What has been given back by now tells of itself soon, if at all. Later a count says nothing: it changes before the word does.
    let counts = [bell.offered, bell.used].map(|at| count(cx.shared, at));
    let awaited = counts[0] != counts[1] || counts[0].is_none();
    let start = now();
    loop {
        match word.load(Ordering::Acquire) {
            words::ANSWERED | words::EARLY => return Outcome::Interrupts,
            words::SILENT => return Outcome::Silent,
            _ => {}
        }
        let waited = now().wrapping_sub(start);
        if waited > bells.moment && !awaited {
            return Outcome::Silent;
        }
        // SAFETY: the monitor and the handler of kicks write it at any time.
        let kicked = unsafe { core::ptr::read_volatile(&raw const cx.vcpu.run.kicked) };
        if waited > bells.patience {
            return Outcome::Late;
        }
        if kicked != 0 {
            return Outcome::Unknown;
        }
        _mm_pause();
    }
}

fn now() -> u64 {
    // SAFETY: the host lets its processes read the counter, as the guest's code may.
    unsafe { _rdtsc() }
}

/// How many requests a ring counts, modulo 2^16; `None` if that is not in RAM.
fn count(s: &Shared, offset: u64) -> Option<u16> {
    let fits = offset.is_multiple_of(2) && offset < s.setup.ram_len;
    // SAFETY: RAM, which is mapped for good, and aligned; others write it atomically.
    fits.then(|| unsafe { &*((reach(RAM) as u64 + offset) as *const AtomicU16) })
        .map(|word| word.load(Ordering::Acquire))
}

/// A word of the device's page.
fn word(bell: &Bell, number: usize) -> Option<&'static AtomicU32> {
    let at = bell.words.checked_add((number * words::STEP) as u64)?;
    let fits = at < words::EPOCH as u64 && at.is_multiple_of(4);
    // SAFETY: the pages of words are mapped for good; the word is aligned and only ever accessed as an atomic.
    fits.then(|| unsafe { &*((reach(WORDS) as u64 + at) as *const AtomicU32) })
}
