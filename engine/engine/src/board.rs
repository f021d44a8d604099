//! The machine as one CPU sees it.
//!
//! RAM is direct; everything else is found by address on the two buses, except the CPU's own
//! local APIC, whose register page each CPU sees at an address of its own choosing.

use std::sync::Arc;

use bus::{Bell, Bus};
use contract::{VcpuEvent, Watcher};
use host::{Clock, Entropy};
use ram::Ram;
use x86::{
    Fault,
    cpuid::{CpuidResult, Model},
};
use x86_interp::{System, VectorUnit};

use crate::requests::VcpuRequests;

/// Leaf 1 EDX: the local APIC is there and enabled (SDM 10.4.3).
const CPUID_APIC: u32 = 1 << 9;
/// PAUSEs that are interpreted before the vCPU lets others have its CPU.
const PAUSES: u64 = 100;

/// A CPU's local APIC, and how it reaches the CPU.
pub trait LocalApic: Send + Sync {
    /// What waits: a set of [`contract::pending`] bits without `EXIT`.
    fn pending(&self) -> u32;
    /// Takes the interrupt to deliver now: its vector, or `None` if none is left.
    fn acknowledge(&self) -> Option<u8>;
    /// Takes a waiting NMI; false if there is none.
    fn take_nmi(&self) -> bool;
    /// The handler of the NMI that was taken last has ended.
    fn nmi_ended(&self);
    /// Takes a waiting INIT; false if there is none.
    fn take_init(&self) -> bool;
    /// Takes a waiting start-up IPI: its vector.
    fn take_start_up(&self) -> Option<u8>;
    /// Whether it is enabled in IA32_APIC_BASE.
    fn enabled(&self) -> bool;
    /// CR8.
    fn cr8(&self) -> u8;
    /// Sets CR8.
    fn set_cr8(&self, value: u8);
    /// Reads one of the APIC's MSRs.
    /// # Errors
    /// #GP for one that does not exist.
    fn msr_read(&self, index: u32) -> Result<u64, Fault>;
    /// Writes one of the APIC's MSRs.
    /// # Errors
    /// #GP for one that does not exist, or a value it does not take.
    fn msr_write(&self, index: u32, value: u64) -> Result<(), Fault>;
    /// A hypercall of kernel code (`true`) or user code; `None` where there are none.
    fn hypercall(&self, kernel: bool, number: u64, arguments: [u64; 4]) -> Option<u64> {
        let _ = (kernel, number, arguments);
        None
    }
    /// Which interrupts the vCPU may take by itself: the GPA of the byte by which the guest tells the end of an interrupt, and a class.
    /// While that byte is zero the vCPU may take vectors of higher classes. `None` means that the vCPU may take no interrupt by itself.
    /// Ask anew whenever guest code is about to run.
    fn direct(&self) -> Option<(u64, u8)> {
        None
    }
    /// The vCPU has taken an interrupt by itself, and has set the byte that [`LocalApic::direct`] names.
    fn took(&self, vector: u8) {
        let _ = vector;
    }
    /// The vector that a message (its GPA and data) brings to this vCPU. `None` if the message is also for other vCPUs, or if an
    /// interrupt by it is not an ordinary one.
    fn vector_of(&self, message: (u64, u32)) -> Option<u8> {
        let _ = message;
        None
    }
    /// Another vCPU has woken this one by a hypercall since this was asked last.
    fn take_unhalt(&self) -> bool {
        false
    }
    /// The vCPU halts: it executes nothing until something comes for it.
    fn halts(&self) {}
    /// The vCPU waits for a CPU of the host from now on: it executes nothing.
    fn set_preempted(&self) {}
    /// The vCPU has waited for some time by looking.
    fn has_spun(&self) {}
    /// It has waited so long.
    fn note_stolen(&self, ns: u64) {
        let _ = ns;
    }
    /// It goes on; true if it must flush its TLB before.
    fn set_running(&self) -> bool {
        false
    }
    /// Reads the register page; false if `gpa` is not in it.
    fn mmio_read(&self, gpa: u64, data: &mut [u8]) -> bool;
    /// Writes the register page; false if `gpa` is not in it.
    fn mmio_write(&self, gpa: u64, data: &[u8]) -> bool;
}

/// What a [`Board`] is made of.
pub struct BoardParts {
    /// Guest RAM.
    pub ram: Ram,
    /// Devices by port.
    pub ports: Bus,
    /// Devices by GPA.
    pub mmio: Bus,
    /// This CPU's local APIC.
    pub apic: Arc<dyn LocalApic>,
    /// This CPU's APIC identifier.
    pub apic_id: u32,
    /// What CPUID says.
    pub cpuid: Arc<Model>,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Randomness.
    pub entropy: Arc<dyn Entropy>,
    /// Floating point and SIMD.
    pub vector_unit: Box<dyn VectorUnit>,
    /// Where kicks for this CPU arrive.
    pub requests: Arc<VcpuRequests>,
}

/// The machine around one CPU.
pub struct Board {
    parts: BoardParts,
    random: RandomWords,
    /// Accesses that left the CPU.
    pub(crate) traffic: Traffic,
    /// PAUSEs since the last look at who else wants the CPU.
    pauses: u64,
    watchers: Vec<Watcher>,
}

/// Accesses that left the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Traffic {
    pub(crate) mmio: u64,
    pub(crate) port: u64,
    /// GPA of the last store to device memory, until somebody has asked.
    pub(crate) stored: Option<u64>,
}

impl Board {
    /// A machine of the given parts.
    pub fn new(parts: BoardParts) -> Self {
        let (random, traffic) = Default::default();
        Self { parts, random, traffic, pauses: 0, watchers: Vec::new() }
    }

    /// Who is told from now on what the vCPU does.
    pub fn set_watchers(&mut self, watchers: &[Watcher]) {
        self.watchers = watchers.to_vec();
    }

    /// Somebody is told.
    pub fn is_watched(&self) -> bool {
        !self.watchers.is_empty()
    }

    /// Tells of something the vCPU has done.
    pub fn tell(&self, event: VcpuEvent) {
        self.watchers.iter().for_each(|watcher| watcher(event));
    }

    fn tell_mmio(&self, gpa: u64, data: &[u8], write: bool) {
        if self.is_watched() {
            let mut bytes = [0; 8];
            let len = data.len().min(8);
            bytes[..len].copy_from_slice(&data[..len]);
            self.tell(VcpuEvent::Mmio {
                gpa,
                size: len as u8,
                write,
                value: u64::from_le_bytes(bytes),
            });
        }
    }

    /// The next PAUSE is the last of many.
    pub fn has_paused(&mut self) {
        self.pauses = PAUSES;
    }

    /// GPA of the last store to device memory since the last call of this function.
    pub fn take_stored(&mut self) -> Option<u64> {
        self.traffic.stored.take()
    }

    /// What the doorbell at a GPA does, and the vector of its interrupt, if this vCPU may ring and take it by itself.
    pub fn bell(&self, gpa: u64) -> Option<(Bell, u8)> {
        let bell = self.parts.mmio.bell(gpa)?;
        Some((bell, self.parts.apic.vector_of(bell.message)?))
    }

    /// See [`LocalApic::direct`].
    pub fn direct(&self) -> Option<(u64, u8)> {
        self.parts.apic.direct()
    }

    /// See [`LocalApic::took`].
    pub fn took(&self, vector: u8) {
        self.parts.apic.took(vector);
    }

    /// How often the time-stamp counter ticks, Hz.
    pub fn tsc_hz(&self) -> u64 {
        self.parts.clock.tsc_hz()
    }

    /// Accesses to device memory and to ports so far.
    pub fn traffic(&self) -> (u64, u64) {
        (self.traffic.mmio, self.traffic.port)
    }
}

impl System for Board {
    type Ram = Ram;

    #[inline]
    fn ram(&self) -> &Ram {
        &self.parts.ram
    }

    #[inline]
    fn pending(&self) -> u32 {
        self.parts.requests.waiting()
    }

    fn mmio_read(&mut self, gpa: u64, data: &mut [u8]) {
        self.traffic.mmio += 1;
        if !self.parts.apic.mmio_read(gpa, data) {
            self.parts.mmio.read(gpa, data);
        }
        self.tell_mmio(gpa, data, false);
    }

    fn mmio_write(&mut self, gpa: u64, data: &[u8]) {
        self.traffic.mmio += 1;
        self.traffic.stored = Some(gpa);
        self.tell_mmio(gpa, data, true);
        if !self.parts.apic.mmio_write(gpa, data) {
            self.parts.mmio.write(gpa, data);
        }
    }

    fn port_read(&mut self, port: u16, size: u8) -> u32 {
        self.traffic.port += 1;
        let mut bytes = [0; 4];
        let data = &mut bytes[..usize::from(size).min(4)];
        self.parts.ports.read(port.into(), data);
        let value = u32::from_le_bytes(bytes);
        self.tell(VcpuEvent::Port { port, size, write: false, value });
        value
    }

    fn port_write(&mut self, port: u16, size: u8, value: u32) {
        self.traffic.port += 1;
        self.tell(VcpuEvent::Port { port, size, write: true, value });
        let bytes = value.to_le_bytes();
        self.parts.ports.write(port.into(), &bytes[..usize::from(size).min(4)]);
    }

    fn msr_read(&mut self, index: u32) -> Result<u64, Fault> {
        self.parts.apic.msr_read(index)
    }

    fn msr_write(&mut self, index: u32, value: u64) -> Result<(), Fault> {
        self.parts.apic.msr_write(index, value)
    }

    fn note_msr(&mut self, index: u32, write: bool, value: u64) {
        self.tell(VcpuEvent::Msr { index, write, value });
    }

    fn cpuid(&self, leaf: u32, subleaf: u32) -> CpuidResult {
        let mut result = self.parts.cpuid.query(leaf, subleaf, self.parts.apic_id);
        if leaf == 1 && !self.parts.apic.enabled() {
            result.edx &= !CPUID_APIC;
        }
        result
    }

    fn tsc(&mut self) -> u64 {
        self.parts.clock.tsc()
    }

    fn hypercall(&mut self, kernel: bool, number: u64, arguments: [u64; 4]) -> Option<u64> {
        self.parts.apic.hypercall(kernel, number, arguments)
    }

    fn pause(&mut self) {
        self.pauses += 1;
        if self.pauses >= PAUSES {
            self.pauses = 0;
            self.parts.apic.has_spun();
        }
    }

    fn random(&mut self) -> Option<u64> {
        self.random.next(&*self.parts.entropy)
    }

    fn nmi_ended(&mut self) {
        self.parts.apic.nmi_ended();
    }

    fn cr8(&mut self) -> u8 {
        self.parts.apic.cr8()
    }

    fn set_cr8(&mut self, value: u8) {
        self.parts.apic.set_cr8(value);
    }

    fn vector_unit(&mut self) -> &mut dyn VectorUnit {
        &mut *self.parts.vector_unit
    }
}

/// Random words, fetched from the host by the page.
#[derive(Default)]
struct RandomWords(Vec<u8>);

impl RandomWords {
    fn next(&mut self, entropy: &dyn Entropy) -> Option<u64> {
        if self.0.is_empty() {
            let mut fresh = vec![0; 4096];
            if !entropy.fill(&mut fresh) {
                return None;
            }
            self.0 = fresh;
        }
        let (rest, word) = self.0.split_last_chunk::<8>()?;
        let word = u64::from_le_bytes(*word);
        self.0.truncate(rest.len());
        Some(word)
    }
}
