//! Kicks at each instruction that the process of user code executes outside of programs. A debugger steps the
//! process, so that each of them is met.
//!
//! Now and then the answer of its wedge does not arrive, as where a host drops it for a signal.

use super::{Over, attend, in_peace, kick, machine, state};
use crate::test_machine::STRICT;
use bus::Kicker;
use engine::VcpuRequests;
use libc::user_regs_struct;
use nix::{
    errno::Errno,
    sys::{
        ptrace,
        signal::Signal,
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};
use std::{
    collections::BTreeMap,
    mem::offset_of,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};
use wedge_abi::{BLOB, HAND_OVER, JOURNAL, Journal, SHARED};

/// Instructions that are stepped, in the program as well.
const STEPS: u32 = 100_000;
/// Kicks that each of ours gets.
const KICKS: u32 = 4;
/// One comes to so many instructions.
const SELDOM: u64 = 8;
/// Of so many answers one does not arrive.
const DROPPED: u32 = 7;
/// Instructions that are kicked at, those with and without orders counted apart. Fewer would not be all parts.
const ENOUGH: usize = 350;
/// How many orders the process has (HVA).
const COUNT: u64 = (JOURNAL + offset_of!(Journal, count)) as u64;
const PUSHFQ: u8 = 0x9c;
const POPFQ: u8 = 0x9d;
const IRET: u8 = 0xcf;
const REP: u8 = 0xf3;
const STOS: u8 = 0xab;
const REX_W: u8 = 0x48;
const WORD: u64 = 8;
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Bytes of SYSCALL.
const SYSCALL_LEN: u64 = 2;

/// The debugger of a process.
struct Stepper<'a> {
    process: Pid,
    requests: &'a VcpuRequests,
    over: &'a AtomicBool,
    /// Kicks by address (HVA), and by whether the process has orders.
    kicks: BTreeMap<(u64, bool), u32>,
    answers: u32,
    dropped: u32,
    random: u64,
}

impl Stepper<'_> {
    /// Steps the process, and then lets it run.
    fn step_all(&mut self) -> Result<(), Errno> {
        ptrace::attach(self.process)?;
        let mut signal = self.wait()?.filter(|signal| *signal != Signal::SIGSTOP);
        for _ in 0..STEPS {
            signal = self.step(signal)?;
        }
        loop {
            ptrace::cont(self.process, signal)?;
            match self.wait() {
                Err(_) if self.over.load(Ordering::Relaxed) => return Ok(()),
                next => signal = next?,
            }
        }
    }

    /// Steps over an instruction, or into the handler of `signal`. Returns the next signal, if one has come.
    fn step(&mut self, signal: Option<Signal>) -> Result<Option<Signal>, Errno> {
        let before = ptrace::getregs(self.process)?;
        let ours = (BLOB as u64..SHARED as u64).contains(&before.rip);
        // The program's page may not be mapped yet.
        let bytes = ptrace::read(self.process, before.rip as _).unwrap_or(0).to_le_bytes();
        if signal.is_none() {
            if ours {
                self.kick_at(before.rip)?;
            }
            if self.carry_out(before, bytes)? {
                return Ok(None);
            }
        }
        ptrace::step(self.process, signal)?;
        let signal = self.wait()?;
        if ours && bytes.starts_with(&SYSCALL) && before.rax == HAND_OVER {
            self.answered(before.rip)?;
        }
        Ok(signal)
    }

    /// Carries out an instruction that moves RFLAGS, if this is one: there the host would take the debugger's TF for
    /// the program's. And one that stores many words, of which each would be a step.
    fn carry_out(&self, mut regs: user_regs_struct, bytes: [u8; 8]) -> Result<bool, Errno> {
        match bytes {
            [PUSHFQ, ..] => {
                regs.rsp -= WORD;
                if ptrace::write(self.process, regs.rsp as _, regs.eflags as i64).is_err() {
                    return Ok(false); // its page is not mapped
                }
                regs.rip += 1;
            }
            [POPFQ, ..] => {
                regs.eflags = self.word(regs.rsp, 0)?;
                regs.rsp += WORD;
                regs.rip += 1;
            }
            [REX_W, IRET, ..] => {
                regs.eflags = self.word(regs.rsp, 2)?;
                (regs.rip, regs.rsp) = (self.word(regs.rsp, 0)?, self.word(regs.rsp, 3)?);
            }
            [REP, REX_W, STOS, ..] => {
                for _ in 0..regs.rcx {
                    ptrace::write(self.process, regs.rdi as _, regs.rax as i64)?;
                    regs.rdi += WORD;
                }
                regs.rcx = 0;
                regs.rip += 3;
            }
            _ => return Ok(false),
        }
        ptrace::setregs(self.process, regs)?;
        Ok(true)
    }

    fn word(&self, hva: u64, index: u64) -> Result<u64, Errno> {
        ptrace::read(self.process, (hva + index * WORD) as _).map(|word| word as u64)
    }

    /// The process stands; the signal that it is about to take.
    fn wait(&self) -> Result<Option<Signal>, Errno> {
        loop {
            match waitpid(self.process, Some(WaitPidFlag::WNOHANG | WaitPidFlag::__WALL))? {
                WaitStatus::Stopped(_, Signal::SIGTRAP) => return Ok(None),
                WaitStatus::Stopped(_, signal) => return Ok(Some(signal)),
                WaitStatus::StillAlive if !self.over.load(Ordering::Relaxed) => thread::yield_now(),
                _ => return Err(Errno::ESRCH),
            }
        }
    }

    fn kick_at(&mut self, rip: u64) -> Result<(), Errno> {
        let ordered = self.word(COUNT, 0)? != 0;
        self.random =
            self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let kicks = self.kicks.entry((rip, ordered)).or_default();
        if *kicks < KICKS && (self.random >> 33).is_multiple_of(SELDOM) {
            *kicks += 1;
            self.requests.kick();
        }
        Ok(())
    }

    /// Takes an answer back now and then, as the host would for a kick that came before it arrived.
    fn answered(&mut self, call: u64) -> Result<(), Errno> {
        let mut regs = ptrace::getregs(self.process)?;
        if regs.rip != call + SYSCALL_LEN {
            return Ok(()); // a signal came first
        }
        self.answers += 1;
        if self.answers.is_multiple_of(DROPPED) {
            self.dropped += 1;
            (regs.rip, regs.rax, regs.orig_rax) = (call, HAND_OVER, u64::MAX);
            ptrace::setregs(self.process, regs)?;
            self.requests.kick();
        }
        Ok(())
    }
}

/// Runs the machine until there is a process of user code, and returns that.
fn begin(fast: &mut crate::Fast, requests: &VcpuRequests) -> Option<Pid> {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let _over = Over(&over);
        scope.spawn(|| kick(requests, &over));
        loop {
            assert_eq!(attend(fast, requests), None, "it has begun only now");
            if let &[_, user] = fast.slots.processes().as_slice() {
                return Some(Pid::from_raw(user));
            }
        }
    })
}

#[test]
fn a_kick_at_each_instruction_changes_nothing() {
    let expected = in_peace();
    let (requests, over) = (Arc::new(VcpuRequests::default()), AtomicBool::new(false));
    let mut fast = machine(state(), STRICT, &requests);
    let process = begin(&mut fast, &requests).expect("a process");
    let (ending, stepper) = thread::scope(|scope| {
        let _over = Over(&over);
        let (requests, over) = (&*requests, &over);
        let stepper = scope.spawn(move || {
            let mut stepper = Stepper {
                process,
                requests,
                over,
                kicks: BTreeMap::new(),
                answers: 0,
                dropped: 0,
                random: 1,
            };
            stepper.step_all().expect("it can be stepped");
            stepper
        });
        let ending = super::run(&mut fast, requests);
        over.store(true, Ordering::Relaxed);
        (ending, stepper.join().expect("it has not ended"))
    });
    assert_eq!(ending, expected);
    assert!(stepper.dropped > 10, "of {}", stepper.answers);
    let kicked = stepper.kicks.values().filter(|kicks| **kicks != 0).count();
    assert!(kicked >= ENOUGH, "{kicked}");
}
