//! Orders of a service: reading and changing memory and stopped vCPUs.
//!
//! Orders come from another process: nothing is done that the service has not asked the right for, and nothing to a vCPU that does
//! not stand for this service.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use ring3_trace::{Answer, Order, Request, Rights, bytes, hex};
use vmm::Inspector;
use x86::{Vcpu, paging::Roots, reg::RAX, reg::RSP};

use super::{
    lock, plan,
    state::{Shared, StoppedVcpu},
};
use crate::{linux::LinuxKernel, memory};

/// Bytes that are read at once, at the most.
const MOST_BYTES: usize = 64 << 10;
/// Symbols that are told at once, at the most.
const MOST_SYMBOLS: usize = 4096;
/// General registers by number.
const NAMES: [&str; 16] = [
    "rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13",
    "r14", "r15",
];
/// The bits of RFLAGS that a service changes: those of arithmetic.
const FLAGS: u64 = 0x8d5;

/// Carries out a service's orders.
pub struct Orders {
    inspector: Inspector,
    kernel: Arc<LinuxKernel>,
    shared: Arc<Shared>,
    handlers: Vec<Option<u64>>,
    /// Points that are not moved (GVA).
    fixed: HashSet<u64>,
    registers: Rights,
    memory: Rights,
}

type Done = Result<Answer, String>;

impl Orders {
    pub(super) fn new(
        inspector: Inspector,
        kernel: Arc<LinuxKernel>,
        shared: Arc<Shared>,
        handlers: Vec<Option<u64>>,
        fixed: HashSet<u64>,
        request: &Request,
    ) -> Self {
        let Request { registers, memory, .. } = *request;
        Self { inspector, kernel, shared, handlers, fixed, registers, memory }
    }

    /// Does what a line asks for.
    pub fn obey(&self, line: &str) -> Answer {
        let done = match serde_json::from_str(line) {
            Ok(order) => self.carry_out(order),
            Err(problem) => Err(format!("not an order: {problem}")),
        };
        done.unwrap_or_else(Answer::Refused)
    }

    fn carry_out(&self, order: Order) -> Done {
        match order {
            Order::Go { vcpu } => self.go(vcpu),
            Order::Read { vcpu, gva, len } => self.read(vcpu, gva, len),
            Order::Write { vcpu, gva, bytes } => self.write(vcpu, gva, &bytes),
            Order::Registers { vcpu } => self.registers(vcpu),
            Order::Set { vcpu, registers } => self.set(vcpu, &registers),
            Order::Argument { vcpu, number, value } => self.argument(vcpu, number, value),
            Order::Reply { vcpu, value } => self.reply(vcpu, value),
            Order::Move { from, to } => self.move_break(&from, &to),
            Order::Symbol { name } => {
                let address = self.kernel.symbols.find(&name).map(Answer::Address);
                address.ok_or_else(|| format!("this kernel has no symbol `{name}`"))
            }
            Order::Symbols { prefix } => {
                let found = self.kernel.symbols.starting(&prefix).take(MOST_SYMBOLS);
                Ok(Answer::Values(found.map(|(name, at)| (name.to_owned(), at)).collect()))
            }
        }
    }

    fn go(&self, vcpu: usize) -> Done {
        let stop = lock(&self.shared.stopped).remove(&vcpu).ok_or_else(|| runs(vcpu))?;
        let number = self.handlers.get(vcpu).copied().flatten().ok_or_else(|| runs(vcpu))?;
        self.run_on_vcpu(vcpu, move |access| {
            // The probe is still there: its instruction is executed past it.
            if access.engine.vcpu().rip == stop.rip {
                let _ = access.engine.step();
            }
            access.set_stopped(number, false);
        })?;
        Ok(Answer::Done)
    }

    fn read(&self, vcpu: Option<usize>, gva: u64, len: usize) -> Done {
        allowed(self.memory, Rights::Read, "memory", "read")?;
        let mut data = vec![0; len.min(MOST_BYTES)];
        let count = memory::read(self.inspector.ram(), self.roots(vcpu)?, gva, &mut data);
        Ok(Answer::Bytes(hex(&data[..count])))
    }

    fn write(&self, vcpu: Option<usize>, gva: u64, digits: &str) -> Done {
        allowed(self.memory, Rights::Write, "memory", "write")?;
        let data = bytes(digits).ok_or("`bytes` is to be hexadecimal digits, two a byte")?;
        let roots = self.roots(vcpu)?;
        let written = memory::write(self.inspector.ram(), roots, gva, &data);
        written.then_some(Answer::Done).ok_or_else(|| format!("not all of it is RAM: {gva:#x}"))
    }

    fn registers(&self, vcpu: usize) -> Done {
        allowed(self.registers, Rights::Read, "registers", "read")?;
        self.stop(vcpu)?;
        let state = self.run_on_vcpu(vcpu, |access| access.engine.vcpu().clone())?;
        let general = NAMES.iter().zip(state.gpr).map(|(name, value)| ((*name).to_owned(), value));
        let others = [
            ("rip", state.rip),
            ("rflags", state.rflags),
            ("cr2", state.cr2),
            ("cr3", state.cr3),
            ("fs_base", state.seg[x86::seg::FS].base),
            ("gs_base", state.seg[x86::seg::GS].base),
        ];
        let others = others.map(|(name, value)| (name.to_owned(), value));
        Ok(Answer::Values(general.chain(others).collect()))
    }

    fn set(&self, vcpu: usize, registers: &BTreeMap<String, u64>) -> Done {
        allowed(self.registers, Rights::Write, "registers", "write")?;
        self.change(vcpu, |state| {
            for (name, value) in registers {
                match NAMES.iter().position(|known| known == name) {
                    Some(n) => state.gpr[n] = *value,
                    None if name == "rip" => state.rip = *value,
                    None if name == "rflags" => {
                        state.rflags = state.rflags & !FLAGS | value & FLAGS;
                    }
                    None => return Err(format!("`{name}` is no register that can be set")),
                }
            }
            Ok(())
        })
    }

    fn argument(&self, vcpu: usize, number: usize, value: u64) -> Done {
        allowed(self.registers, Rights::Write, "registers", "write")?;
        let stop = self.stop(vcpu)?;
        let frame = stop.frame.ok_or("the vCPU does not stand at a system call's entry")?;
        let at = frame.get(number).ok_or("a system call has arguments 0 to 5")?;
        let ram = self.inspector.ram();
        let written = memory::write(ram, stop.roots, *at, &value.to_le_bytes());
        written.then_some(Answer::Done).ok_or_else(|| "the arguments are not in RAM".to_owned())
    }

    fn reply(&self, vcpu: usize, value: i64) -> Done {
        allowed(self.registers, Rights::Write, "registers", "write")?;
        let stop = self.stop(vcpu)?;
        let rsp = stop.entry.ok_or("the vCPU does not stand at a function's entry")?;
        let back = memory::word(self.inspector.ram(), stop.roots, rsp);
        let back = back.ok_or("the return address is not in RAM")?;
        // Nobody waits for the end of what does not begin.
        lock(&self.shared.pending).remove(&rsp);
        if let Some(stop) = lock(&self.shared.stopped).get_mut(&vcpu) {
            (stop.entry, stop.frame) = (None, None);
        }
        self.change(vcpu, |state| {
            state.gpr[RAX] = value as u64;
            state.gpr[RSP] = rsp.wrapping_add(8);
            state.rip = back;
            Ok(())
        })
    }

    /// Moves a breakpoint: vCPUs stop at the place `to` from now on, and not at `from`.
    fn move_break(&self, from: &str, to: &str) -> Done {
        let place =
            |name: &str| plan::break_at(&self.kernel, name).map_err(|unknown| unknown.to_string());
        let ((old, _), (new, point)) = (place(from)?, place(to)?);
        let mut breaks = lock(&self.shared.breaks);
        breaks
            .remove(&old)
            .ok_or_else(|| format!("no vCPU stands at `{from}` for this service"))?;
        breaks.insert(new, point);
        drop(breaks);
        for (vcpu, handler) in self.handlers.iter().enumerate() {
            let Some(number) = *handler else { continue };
            let is_free = !self.fixed.contains(&old);
            self.run_on_vcpu(vcpu, move |access| {
                access.change_probes(number, |probes| {
                    if is_free {
                        probes.breakpoints.remove(&old);
                    }
                    probes.breakpoints.insert(new);
                });
            })?;
        }
        Ok(Answer::Address(new))
    }

    /// Gives a vCPU that stands another state.
    fn change(&self, vcpu: usize, change: impl FnOnce(&mut Vcpu) -> Result<(), String>) -> Done {
        self.stop(vcpu)?;
        let mut state = self.run_on_vcpu(vcpu, |access| access.engine.vcpu().clone())?;
        change(&mut state)?;
        self.run_on_vcpu(vcpu, |access| access.engine.set_vcpu(state))?;
        Ok(Answer::Done)
    }

    fn stop(&self, vcpu: usize) -> Result<StoppedVcpu, String> {
        lock(&self.shared.stopped).get(&vcpu).copied().ok_or_else(|| runs(vcpu))
    }

    fn roots(&self, vcpu: Option<usize>) -> Result<Roots, String> {
        vcpu.map_or_else(|| Ok(self.kernel.roots()), |vcpu| self.stop(vcpu).map(|stop| stop.roots))
    }

    fn run_on_vcpu<R: Send + 'static>(
        &self,
        vcpu: usize,
        work: impl FnOnce(&mut vmm::VcpuAccess<'_>) -> R + Send + 'static,
    ) -> Result<R, String> {
        self.inspector.run_on_vcpu(vcpu, work).ok_or_else(|| "the machine has ended".to_owned())
    }
}

fn runs(vcpu: usize) -> String {
    format!("vCPU {vcpu} does not stand for this service")
}

fn allowed(has: Rights, needs: Rights, what: &str, verb: &str) -> Result<(), String> {
    let refused = || format!("this service has not asked for the right to {verb} {what}");
    (has >= needs).then_some(()).ok_or_else(refused)
}
