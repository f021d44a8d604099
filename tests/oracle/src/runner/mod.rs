//! Runs cases on the host CPU itself, in a scratch process, without stopping it by ptrace.
//!
//! A case costs two futex hand-overs, one signal delivery and one `rt_sigreturn`: some
//! microseconds. Everything runs as an ordinary user.

// UNSAFETY: forks, shares memory and hands register state to the kernel; that is what it is for.
#![allow(unsafe_code)]

mod child;
mod frame;
mod shared;
#[cfg(test)]
mod tests;

use std::io;
use std::ops::Range;
use std::time::Duration;

use crate::layout::{IMAGE_LEN, image_offset};
use crate::state::{Case, Outcome, START_FLAGS, Stop, changes};
use frame::{Frame, SIGRETURN_FLAGS};
use shared::Shared;
use x86::{flags, seg};

/// How long the native process may take to answer. Its own timer ends endless cases sooner, unless
/// it is the kernel or the hypervisor that does not come to an end.
const PATIENCE: Duration = Duration::from_secs(4);
/// The segment registers in the control page.
const CONTROL_SEGMENTS: [usize; 4] = [seg::DS, seg::ES, seg::FS, seg::GS];

/// A wild case can kill the process by making the kernel unable to deliver a signal; then the
/// case is tried again in a new one.
const ATTEMPTS: usize = 3;

/// Why there is no outcome.
#[derive(Debug, thiserror::Error)]
pub enum RunnerError {
    /// The host refused something the runner needs.
    #[error("the native process cannot be set up: {0}")]
    Host(#[from] io::Error),
    /// The host has no RDFSBASE for user code.
    #[error("the host kernel does not let user code read segment bases (Linux 5.9 or later does)")]
    NoFsGsBase,
    /// The native process ended.
    #[error("the native process ended with wait status {0:#x}")]
    Died(i32),
    /// The native process does not answer.
    #[error("the native process does not answer")]
    Silent,
    /// The native process was stopped by a signal that no exception causes.
    #[error("unexpected signal {0} in the native process")]
    Signal(i32),
    /// The kernel's signal frame is not as expected.
    #[error("signal frame at {0:#x} is not understood")]
    Frame(u64),
}

/// A scratch process that runs cases. To be used by the thread that made it: the process dies
/// with that thread.
pub struct NativeRunner {
    shared: Shared,
    pid: libc::pid_t,
    /// The memory after a case.
    after: Box<[u8; IMAGE_LEN]>,
}

impl NativeRunner {
    /// Starts the scratch process.
    ///
    /// # Errors
    /// The host lacks something: memfd, seccomp, user-mode FS and GS base instructions.
    pub fn new() -> Result<Self, RunnerError> {
        const HWCAP2_FSGSBASE: u64 = 2;
        // SAFETY: reads the auxiliary vector.
        if unsafe { libc::getauxval(libc::AT_HWCAP2) } & HWCAP2_FSGSBASE == 0 {
            return Err(RunnerError::NoFsGsBase);
        }
        let shared = Shared::new()?;
        let mut runner = Self { shared, pid: 0, after: Box::new([0; IMAGE_LEN]) };
        runner.spawn()?;
        Ok(runner)
    }

    fn spawn(&mut self) -> Result<(), RunnerError> {
        self.shared.reset_turn();
        self.pid = child::spawn(self.shared.fd())?;
        self.wait()
    }

    /// Runs a case and tells what came of it.
    ///
    /// # Errors
    /// The scratch process failed, through no fault of the case.
    pub fn run(&mut self, case: &Case) -> Result<Outcome, RunnerError> {
        let image = case.image();
        self.run_on(case, &image)
    }

    /// [`NativeRunner::run`] with `image` already made from `case`.
    ///
    /// # Errors
    /// As there.
    pub fn run_on(&mut self, case: &Case, image: &[u8; IMAGE_LEN]) -> Result<Outcome, RunnerError> {
        let mut result = self.attempt(case, image);
        for _ in 1..ATTEMPTS {
            match result {
                // The timer may have hit a case that is not endless.
                Ok(Outcome { stop: Stop::Timeout, .. }) => {}
                Err(RunnerError::Died(_) | RunnerError::Silent) => self.spawn()?,
                _ => return result,
            }
            result = self.attempt(case, image);
        }
        if matches!(result, Err(RunnerError::Died(_) | RunnerError::Silent)) {
            self.spawn()?;
        }
        match result {
            Err(RunnerError::Silent) => {
                Ok(Outcome { stop: Stop::Timeout, state: case.state.clone(), changes: Vec::new() })
            }
            result => result,
        }
    }

    /// Whether the scratch process has memory at `address` that no case is given: it is a copy of ours, at
    /// addresses that are new in each run. A case that comes upon it does there what it would not do in
    /// the interpreter.
    pub fn has_of_its_own(&self, address: u64) -> bool {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.pid)).unwrap_or_default();
        let is_mapped = maps.lines().filter_map(range).any(|range| range.contains(&address));
        is_mapped && image_offset(address).is_none()
    }

    fn attempt(&mut self, case: &Case, image: &[u8; IMAGE_LEN]) -> Result<Outcome, RunnerError> {
        let (mut frame, at) = self.frame()?;
        frame.load(&case.state);
        self.shared.write_frame(at, frame.bytes());
        self.shared.write_image(image);
        let state = &case.state;
        let kept = (state.rflags & START_FLAGS & !SIGRETURN_FLAGS) | flags::FIXED;
        let selectors = CONTROL_SEGMENTS.map(|segment| state.selectors[segment]);
        self.shared.write_control((state.fs_base, state.gs_base), kept, selectors);
        self.shared.give_turn();
        self.wait()?;
        self.outcome(image)
    }

    fn frame(&self) -> Result<(Frame, u64), RunnerError> {
        let at = self.shared.read_control().frame;
        let bytes = self.shared.read_frame(at).ok_or(RunnerError::Frame(at))?;
        Ok((Frame::new(bytes, at).ok_or(RunnerError::Frame(at))?, at))
    }

    fn outcome(&mut self, before: &[u8; IMAGE_LEN]) -> Result<Outcome, RunnerError> {
        let (frame, _) = self.frame()?;
        let report = self.shared.read_control();
        let stop = match report.signal {
            libc::SIGSYS => Stop::Syscall,
            libc::SIGPROF => Stop::Timeout,
            libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGFPE | libc::SIGTRAP => {
                Stop::Fault(frame.fault())
            }
            other => return Err(RunnerError::Signal(other)),
        };
        let (fs_base, gs_base) = (report.fs_base, report.gs_base);
        let mut state = crate::State { fs_base, gs_base, ..frame.state() };
        for (segment, selector) in CONTROL_SEGMENTS.into_iter().zip(report.selectors) {
            state.selectors[segment] = selector;
        }
        self.shared.read_image(&mut self.after);
        Ok(Outcome { stop, state, changes: changes(before, &self.after) })
    }

    /// Waits until the native process has given the turn back.
    fn wait(&mut self) -> Result<(), RunnerError> {
        const SLICE: Duration = Duration::from_millis(200);
        for _ in 0..PATIENCE.as_millis() / SLICE.as_millis() {
            if self.shared.wait_turn(SLICE) {
                return Ok(());
            }
            let mut status = 0;
            // SAFETY: waits for our own child.
            if unsafe { libc::waitpid(self.pid, &mut status, libc::WNOHANG) } == self.pid {
                self.pid = 0;
                return Err(RunnerError::Died(status));
            }
        }
        self.kill();
        Err(RunnerError::Silent)
    }

    fn kill(&mut self) {
        if self.pid > 0 {
            // SAFETY: our own child, not yet waited for.
            unsafe {
                libc::kill(self.pid, libc::SIGKILL);
                libc::waitpid(self.pid, std::ptr::null_mut(), 0);
            }
            self.pid = 0;
        }
    }
}

/// The addresses of a line of /proc/PID/maps.
fn range(line: &str) -> Option<Range<u64>> {
    let (start, end) = line.split_whitespace().next()?.split_once('-')?;
    let number = |text| u64::from_str_radix(text, 16).ok();
    Some(number(start)?..number(end)?)
}

impl Drop for NativeRunner {
    fn drop(&mut self) {
        self.kill();
    }
}
