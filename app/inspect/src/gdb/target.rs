//! The machine as GDB sees it.

use std::{convert::Infallible, sync::mpsc::Sender};

use contract::Engine;
use gdbstub::{
    common::{Signal, Tid},
    target::{
        Target, TargetError, TargetResult,
        ext::{
            base::{
                BaseOps,
                multithread::{
                    MultiThreadBase, MultiThreadResume, MultiThreadResumeOps,
                    MultiThreadSchedulerLocking, MultiThreadSchedulerLockingOps,
                    MultiThreadSingleStep, MultiThreadSingleStepOps,
                },
                single_register_access::{SingleRegisterAccess, SingleRegisterAccessOps},
            },
            breakpoints::{
                Breakpoints, BreakpointsOps, HwBreakpoint, HwBreakpointOps, HwWatchpoint,
                HwWatchpointOps, SwBreakpoint, SwBreakpointOps, WatchKind,
            },
            monitor_cmd::{ConsoleOutput, MonitorCmd, MonitorCmdOps, outputln},
        },
    },
};
use vmm::{Inspector, ProbeHandler, Probes, Reached, Verdict, Watch};
use x86::{Activity, Vcpu, paging::Roots};

use super::{
    catch::{Catchpoints, ProcessFilter},
    monitor,
    registers::{DebugArch, RegisterFile, RegisterId},
    session::DebuggerEvent,
};
use crate::memory;

/// EFAULT: the error for memory that is not there.
const FAULT: u8 = 14;

/// The machine as a target of the crate gdbstub, with the session's breakpoints.
pub struct DebugTarget {
    inspector: Inspector,
    /// The number of the session's handler at each vCPU; `None` at one that has ended.
    handlers: Vec<Option<u64>>,
    probes: Probes,
    /// The vCPU that makes one step when it is resumed.
    step: Option<usize>,
    /// The vCPU that is resumed if `others_locked`.
    resumed: Option<usize>,
    /// The other vCPUs stay stopped: GDB has locked the scheduler.
    others_locked: bool,
    /// The vCPU whose step begins at HLT, and where the step ends (GVA): a breakpoint of ours is there.
    halt_step: Option<(usize, u64)>,
    events: Sender<DebuggerEvent>,
    /// GDB's addresses are GPAs.
    pub(super) physical: bool,
    /// Code that stops the machine besides breakpoints.
    catchpoints: Catchpoints,
    /// The process whose breakpoints in user code count.
    pub(super) process_filter: ProcessFilter,
}

/// Tells the session which probes a vCPU has reached, and that the machine has ended.
struct GdbHandler {
    vcpu: usize,
    events: Sender<DebuggerEvent>,
    process_filter: ProcessFilter,
}

impl ProbeHandler for GdbHandler {
    fn reached(&mut self, engine: &mut dyn Engine, _: &mut Probes, reached: Reached) -> Verdict {
        if matches!(reached, Reached::Breakpoint) && self.process_filter.excludes(engine.vcpu()) {
            return Verdict::Resume;
        }
        match self.events.send(DebuggerEvent::Reached(self.vcpu, reached)) {
            Ok(()) => Verdict::Stop,
            // The session is over, and its handler is about to be removed.
            Err(_) => Verdict::Resume,
        }
    }
}

impl Drop for GdbHandler {
    fn drop(&mut self) {
        // A session that is over need not know.
        let _ = self.events.send(DebuggerEvent::Ended);
    }
}

impl DebugTarget {
    /// Stops the machine for a session.
    pub fn new(inspector: &Inspector, events: Sender<DebuggerEvent>) -> Self {
        let process_filter = ProcessFilter::default();
        let add = |vcpu| {
            let handler =
                GdbHandler { vcpu, events: events.clone(), process_filter: process_filter.clone() };
            inspector.run_on_vcpu(vcpu, |access| {
                access.add_handler(Box::new(handler), Probes::default(), true)
            })
        };
        let handlers = (0..inspector.vcpus()).map(add).collect();
        let (probes, inspector) = (Probes::default(), inspector.clone());
        Self {
            inspector,
            handlers,
            probes,
            step: None,
            resumed: None,
            others_locked: false,
            halt_step: None,
            events,
            physical: false,
            catchpoints: Catchpoints::default(),
            process_filter,
        }
    }

    /// Runs a command of `monitor catch`; returns what it prints.
    pub fn catch(&mut self, words: &[&str]) -> String {
        let Some(state) = self.state(0) else { return "the vCPU has ended\n".to_owned() };
        let text = self.catchpoints.run_command(self.inspector.ram(), &state, words);
        self.arm();
        text
    }

    /// The vCPU is at a catchpoint, and GDB has no breakpoint there. GDB would resume the vCPU if it were told of a breakpoint.
    pub fn has_caught(&self, vcpu: usize) -> bool {
        let caught = |state: Vcpu| {
            self.catchpoints.has(state.rip) && !self.probes.breakpoints.contains(&state.rip)
        };
        self.state(vcpu).is_some_and(caught)
    }

    /// The machine.
    pub fn inspector(&self) -> &Inspector {
        &self.inspector
    }

    /// Stops all vCPUs.
    pub fn stop(&mut self) {
        self.each(|access, number| access.set_stopped(number, true));
        if self.halt_step.take().is_some() {
            self.arm();
        }
    }

    /// Detaches from the machine, which goes on.
    pub fn detach(&mut self) {
        self.each(|access, number| access.remove_handler(number));
    }

    /// The vCPU is where its step from HLT ends.
    pub fn has_left_halt(&self, vcpu: usize) -> bool {
        let state = self.state(vcpu);
        state.is_some_and(|state| self.halt_step == Some((vcpu, state.rip)))
    }

    /// The watchpoint that an access of `len` bytes has met.
    pub fn watch_at(&self, gva: u64, len: u64, write: bool) -> Option<Watch> {
        self.probes.watches.iter().find(|watch| watch.counts(gva, len, write)).copied()
    }

    /// The state of a vCPU, if it has not ended.
    pub fn state(&self, vcpu: usize) -> Option<Vcpu> {
        self.inspector.run_on_vcpu(vcpu, |access| access.engine.vcpu().clone())
    }

    fn each(&self, act: impl Fn(&mut vmm::VcpuAccess<'_>, u64) + Clone + Send + 'static) {
        for (vcpu, handler) in self.handlers.iter().enumerate() {
            let Some(number) = *handler else { continue };
            let act = act.clone();
            // A vCPU that has ended needs nothing.
            let _ = self.inspector.run_on_vcpu(vcpu, move |access| act(access, number));
        }
    }

    /// Sets the session's probes at all vCPUs.
    fn arm(&self) {
        let mut probes = self.probes.clone();
        probes.breakpoints.extend(self.halt_step.map(|(_, rip)| rip));
        probes.breakpoints.extend(self.catchpoints.addresses());
        self.each(move |access, number| access.set_probes(number, probes.clone()));
    }

    /// One instruction of a vCPU.
    fn make_step(&mut self, vcpu: usize) {
        let halted = self.state(vcpu).filter(|state| state.activity == Activity::Halted);
        if let Some(state) = halted {
            // The step ends when the interrupt that wakes the vCPU has been handled.
            self.halt_step = Some((vcpu, state.rip));
            self.arm();
            return self.resume_vcpus(Some(vcpu));
        }
        let event = match self.inspector.run_on_vcpu(vcpu, |access| access.engine.step()) {
            None => DebuggerEvent::Ended,
            Some(Some(reached)) => DebuggerEvent::Reached(vcpu, reached),
            Some(None) => DebuggerEvent::Stepped,
        };
        // The receiver is in the session that has called this.
        let _ = self.events.send(event);
    }

    /// Resumes one vCPU, or all.
    fn resume_vcpus(&self, only: Option<usize>) {
        for (vcpu, handler) in self.handlers.iter().enumerate() {
            let meant = only.is_none_or(|only| only == vcpu);
            if let Some(number) = handler.filter(|_| meant) {
                // As in `each`.
                let _ = self
                    .inspector
                    .run_on_vcpu(vcpu, move |access| access.set_stopped(number, false));
            }
        }
    }

    fn change(&self, tid: Tid, change: impl FnOnce(&mut Vcpu) -> bool + Send + 'static) -> bool {
        let changed = self.inspector.run_on_vcpu(vcpu_of(tid), |access| {
            let mut state = access.engine.vcpu().clone();
            let done = change(&mut state);
            if done && state != *access.engine.vcpu() {
                access.engine.set_vcpu(state);
            }
            done
        });
        changed == Some(true)
    }

    fn roots(&self, tid: Tid) -> Option<Roots> {
        let roots = |access: &mut vmm::VcpuAccess<'_>| Roots::from(access.engine.vcpu());
        let roots = self.inspector.run_on_vcpu(vcpu_of(tid), roots)?;
        // Without paging, addresses are physical ones.
        Some(if self.physical { Roots { cr0: 0, ..roots } } else { roots })
    }
}

/// Threads are counted from one.
pub fn tid_of(vcpu: usize) -> Tid {
    Tid::MIN.saturating_add(vcpu)
}

fn vcpu_of(tid: Tid) -> usize {
    tid.get() - 1
}

fn or_fault<T>(done: Option<T>) -> Result<T, TargetError<Infallible>> {
    done.ok_or(TargetError::Errno(FAULT))
}

impl Target for DebugTarget {
    type Arch = DebugArch;
    type Error = Infallible;

    fn base_ops(&mut self) -> BaseOps<'_, Self::Arch, Self::Error> {
        BaseOps::MultiThread(self)
    }
    fn support_breakpoints(&mut self) -> Option<BreakpointsOps<'_, Self>> {
        Some(self)
    }
    fn support_monitor_cmd(&mut self) -> Option<MonitorCmdOps<'_, Self>> {
        Some(self)
    }
}

impl MultiThreadBase for DebugTarget {
    fn read_registers(&mut self, registers: &mut RegisterFile, tid: Tid) -> TargetResult<(), Self> {
        *registers = or_fault(self.state(vcpu_of(tid)).map(|state| RegisterFile::of(&state)))?;
        Ok(())
    }

    fn write_registers(&mut self, registers: &RegisterFile, tid: Tid) -> TargetResult<(), Self> {
        let registers = registers.clone();
        let put = move |state: &mut Vcpu| {
            registers.put(state);
            true
        };
        or_fault(self.change(tid, put).then_some(()))
    }

    fn support_single_register_access(&mut self) -> Option<SingleRegisterAccessOps<'_, Tid, Self>> {
        Some(self)
    }

    fn read_addrs(&mut self, start: u64, data: &mut [u8], tid: Tid) -> TargetResult<usize, Self> {
        let roots = or_fault(self.roots(tid))?;
        let count = memory::read(self.inspector.ram(), roots, start, data);
        or_fault((count != 0 || data.is_empty()).then_some(count))
    }

    fn write_addrs(&mut self, start: u64, data: &[u8], tid: Tid) -> TargetResult<(), Self> {
        let roots = or_fault(self.roots(tid))?;
        or_fault(memory::write(self.inspector.ram(), roots, start, data).then_some(()))
    }

    fn list_active_threads(&mut self, active: &mut dyn FnMut(Tid)) -> Result<(), Infallible> {
        (0..self.inspector.vcpus()).for_each(|vcpu| active(tid_of(vcpu)));
        Ok(())
    }

    fn support_resume(&mut self) -> Option<MultiThreadResumeOps<'_, Self>> {
        Some(self)
    }
}

impl SingleRegisterAccess<Tid> for DebugTarget {
    fn read_register(
        &mut self,
        tid: Tid,
        register: RegisterId,
        bytes: &mut [u8],
    ) -> TargetResult<usize, Self> {
        let value = or_fault(self.state(vcpu_of(tid)))?;
        let value = register.get(&value);
        let room = or_fault(bytes.get_mut(..value.len()))?;
        room.copy_from_slice(&value);
        Ok(value.len())
    }

    fn write_register(
        &mut self,
        tid: Tid,
        register: RegisterId,
        bytes: &[u8],
    ) -> TargetResult<(), Self> {
        let bytes = bytes.to_vec();
        or_fault(self.change(tid, move |state| register.set(state, &bytes)).then_some(()))
    }
}

impl MultiThreadResume for DebugTarget {
    fn resume(&mut self) -> Result<(), Infallible> {
        match self.step.take() {
            Some(vcpu) => self.make_step(vcpu),
            None => self.resume_vcpus(self.resumed.filter(|_| self.others_locked)),
        }
        Ok(())
    }

    fn clear_resume_actions(&mut self) -> Result<(), Infallible> {
        (self.step, self.resumed, self.others_locked) = (None, None, false);
        Ok(())
    }

    fn set_resume_action_continue(
        &mut self,
        tid: Tid,
        _: Option<Signal>,
    ) -> Result<(), Infallible> {
        self.resumed = Some(vcpu_of(tid));
        Ok(())
    }

    fn support_single_step(&mut self) -> Option<MultiThreadSingleStepOps<'_, Self>> {
        Some(self)
    }

    fn support_scheduler_locking(&mut self) -> Option<MultiThreadSchedulerLockingOps<'_, Self>> {
        Some(self)
    }
}

/// A vCPU that makes a step makes it alone anyway.
impl MultiThreadSchedulerLocking for DebugTarget {
    fn set_resume_action_scheduler_lock(&mut self) -> Result<(), Infallible> {
        self.others_locked = true;
        Ok(())
    }
}

impl MultiThreadSingleStep for DebugTarget {
    fn set_resume_action_step(&mut self, tid: Tid, _: Option<Signal>) -> Result<(), Infallible> {
        self.step = Some(vcpu_of(tid));
        Ok(())
    }
}

impl Breakpoints for DebugTarget {
    fn support_sw_breakpoint(&mut self) -> Option<SwBreakpointOps<'_, Self>> {
        Some(self)
    }
    fn support_hw_breakpoint(&mut self) -> Option<HwBreakpointOps<'_, Self>> {
        Some(self)
    }
    fn support_hw_watchpoint(&mut self) -> Option<HwWatchpointOps<'_, Self>> {
        Some(self)
    }
}

impl SwBreakpoint for DebugTarget {
    fn add_sw_breakpoint(&mut self, address: u64, _: usize) -> TargetResult<bool, Self> {
        self.probes.breakpoints.insert(address);
        self.arm();
        Ok(true)
    }
    fn remove_sw_breakpoint(&mut self, address: u64, _: usize) -> TargetResult<bool, Self> {
        let known = self.probes.breakpoints.remove(&address);
        self.arm();
        Ok(known)
    }
}

/// There is one kind of breakpoint; GDB never has two of them at one address.
impl HwBreakpoint for DebugTarget {
    fn add_hw_breakpoint(&mut self, address: u64, kind: usize) -> TargetResult<bool, Self> {
        self.add_sw_breakpoint(address, kind)
    }
    fn remove_hw_breakpoint(&mut self, address: u64, kind: usize) -> TargetResult<bool, Self> {
        self.remove_sw_breakpoint(address, kind)
    }
}

impl HwWatchpoint for DebugTarget {
    fn add_hw_watchpoint(
        &mut self,
        gva: u64,
        len: u64,
        kind: WatchKind,
    ) -> TargetResult<bool, Self> {
        if len == 0 {
            return Ok(false);
        }
        self.probes.watches.push(watch(gva, len, kind));
        self.arm();
        Ok(true)
    }
    fn remove_hw_watchpoint(
        &mut self,
        gva: u64,
        len: u64,
        kind: WatchKind,
    ) -> TargetResult<bool, Self> {
        let wanted = watch(gva, len, kind);
        let at = self.probes.watches.iter().position(|watch| *watch == wanted);
        if let Some(at) = at {
            self.probes.watches.remove(at);
        }
        self.arm();
        Ok(at.is_some())
    }
}

fn watch(gva: u64, len: u64, kind: WatchKind) -> Watch {
    let (read, write) = (kind != WatchKind::Write, kind != WatchKind::Read);
    Watch { gva, len, read, write }
}

impl MonitorCmd for DebugTarget {
    fn handle_monitor_cmd(
        &mut self,
        command: &[u8],
        mut out: ConsoleOutput<'_>,
    ) -> Result<(), Infallible> {
        let command = String::from_utf8_lossy(command).into_owned();
        for line in monitor::answer(self, &command).lines() {
            outputln!(out, "{line}");
        }
        Ok(())
    }
}
