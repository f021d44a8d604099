//! Devices against their data sheets, seen as the guest sees them: through the buses and the CPU's
//! interrupt handle, with a clock that moves only when told.

mod hpet;
mod interrupts;
mod lapic;
mod machine_check;
mod pit;
mod power;
mod put_off_eoi;
mod rtc;
mod smp;
mod testdev;
mod uart;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bus::{Bus, Kicker, Rearm};
use host::Clock;

use crate::*;

/// 2026-03-01T12:34:56Z, in seconds.
const WALL: u64 = 1_772_368_496;
/// Ticks of the TSC in a nanosecond.
const TSC_PER_NS: u64 = 2;

/// A clock that moves when told.
#[derive(Default)]
struct FakeClock(AtomicU64);

impl Clock for FakeClock {
    fn monotonic_ns(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
    fn wall_clock_ns(&self) -> u64 {
        WALL * 1_000_000_000 + self.monotonic_ns()
    }
    fn tsc(&self) -> u64 {
        self.monotonic_ns() * TSC_PER_NS
    }
    fn tsc_hz(&self) -> u64 {
        1_000_000_000 * TSC_PER_NS
    }
}

/// Counts how often it was called.
#[derive(Default)]
struct Bell(AtomicUsize);

impl Bell {
    fn ring(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Kicker for Bell {
    fn kick(&self) {
        self.ring();
    }
}

impl Rearm for Bell {
    fn rearm(&self) {
        self.ring();
    }
}

/// Remembers the machine's events.
#[derive(Default)]
struct Events(Mutex<Vec<MachineEvent>>);

impl MachineEvents for Events {
    fn raise(&self, event: MachineEvent) {
        lock(&self.0).push(event);
    }
}

/// Remembers serial output.
#[derive(Clone, Default)]
struct Output(Arc<Mutex<Vec<u8>>>);

impl SerialOutput for Output {
    fn write(&mut self, byte: u8) {
        lock(&self.0).push(byte);
    }
}

/// A machine whose CPUs and timer thread are the test.
struct Machine {
    clock: Arc<FakeClock>,
    rearms: Arc<Bell>,
    kicks: Vec<Arc<Bell>>,
    events: Arc<Events>,
    output: Output,
    ports: Bus,
    mmio: Bus,
    platform: Platform,
}

impl Machine {
    fn new(cpus: usize) -> Self {
        let (clock, rearms) = (Arc::new(FakeClock::default()), Arc::new(Bell::default()));
        let kicks: Vec<_> = (0..cpus).map(|_| Arc::new(Bell::default())).collect();
        let (events, output) = (Arc::new(Events::default()), Output::default());
        let around = Surroundings {
            clock: clock.clone(),
            rearm: rearms.clone(),
            kickers: kicks.iter().map(|kick| kick.clone() as Arc<dyn Kicker>).collect(),
            events: events.clone(),
            serial: Box::new(output.clone()),
            kvm_clock: None,
        };
        let settings =
            Settings { ram: 64 << 20, debug_exit: Some(0xf4), test_devices: true, fw_cfg: true };
        let (mut ports, mut mmio) = (Bus::new(), Bus::new());
        let platform = Platform::new(&settings, around, &mut ports, &mut mmio).unwrap();
        ports.insert(crate::power::RESET, 1, platform.reset_register.clone()).unwrap();
        Self { clock, rearms, kicks, events, output, ports, mmio, platform }
    }

    fn cpu(&self) -> &CpuInterrupts {
        &self.platform.cpus[0]
    }

    fn inb(&self, port: u64) -> u8 {
        let mut byte = [0];
        self.ports.read(port, &mut byte);
        byte[0]
    }
    fn inl(&self, port: u64) -> u32 {
        let mut word = [0; 4];
        self.ports.read(port, &mut word);
        u32::from_le_bytes(word)
    }
    fn outb(&self, port: u64, value: u8) {
        self.ports.write(port, &[value]);
    }
    fn outw(&self, port: u64, value: u16) {
        self.ports.write(port, &value.to_le_bytes());
    }
    fn read32(&self, gpa: u64) -> u32 {
        let mut word = [0; 4];
        self.mmio.read(gpa, &mut word);
        u32::from_le_bytes(word)
    }
    fn read64(&self, gpa: u64) -> u64 {
        let mut word = [0; 8];
        self.mmio.read(gpa, &mut word);
        u64::from_le_bytes(word)
    }
    fn write32(&self, gpa: u64, value: u32) {
        self.mmio.write(gpa, &value.to_le_bytes());
    }
    fn write64(&self, gpa: u64, value: u64) {
        self.mmio.write(gpa, &value.to_le_bytes());
    }

    /// Reads a local APIC register by its offset.
    fn apic_read(&self, cpu: usize, offset: u64) -> u32 {
        let mut word = [0; 4];
        self.platform.cpus[cpu].mmio_read(0xfee0_0000 + offset, &mut word);
        u32::from_le_bytes(word)
    }
    fn apic_write(&self, cpu: usize, offset: u64, value: u32) {
        self.platform.cpus[cpu].mmio_write(0xfee0_0000 + offset, &value.to_le_bytes());
    }
    /// Enables a local APIC by its spurious-interrupt register.
    fn apic_enable(&self, cpu: usize) {
        self.apic_write(cpu, 0xf0, 0x1ff);
    }

    fn ioapic_write(&self, index: u32, value: u32) {
        self.write32(ioapic::BASE, index);
        self.write32(ioapic::BASE + 0x10, value);
    }
    fn ioapic_read(&self, index: u32) -> u32 {
        self.write32(ioapic::BASE, index);
        self.read32(ioapic::BASE + 0x10)
    }
    /// Points a pin at CPU 0.
    fn route(&self, pin: u32, entry: u32) {
        self.ioapic_write(0x11 + pin * 2, 0);
        self.ioapic_write(0x10 + pin * 2, entry);
    }

    fn now(&self) -> u64 {
        self.clock.monotonic_ns()
    }

    /// Lets time pass, stopping at each deadline as the timer thread would.
    fn pass(&self, ns: u64) {
        let end = self.now() + ns;
        while let Some(at) = self.platform.timers.deadline().filter(|at| *at <= end) {
            let at = at.max(self.now());
            self.clock.0.store(at, Ordering::Relaxed);
            self.platform.timers.expire(at);
        }
        self.clock.0.store(end, Ordering::Relaxed);
    }

    /// Lets time pass while the timer thread is not scheduled.
    fn pass_unseen(&self, ns: u64) {
        self.clock.0.fetch_add(ns, Ordering::Relaxed);
    }

    /// How often a vector interrupts CPU 0 while time passes in `steps` of `ns`; each is ended.
    fn count_interrupts(&self, vector: u8, steps: usize, ns: u64) -> usize {
        let interrupted = |_: &usize| {
            self.pass(ns);
            let taken = self.cpu().acknowledge();
            assert!(taken.is_none_or(|v| v == vector), "{taken:?}");
            self.apic_write(0, 0xb0, 0);
            taken.is_some()
        };
        (0..steps).filter(interrupted).count()
    }

    /// Lets time pass while no thread of ours is scheduled, then lets the timer thread have its
    /// turn.
    fn oversleep(&self, ns: u64) {
        self.pass_unseen(ns);
        self.platform.timers.expire(self.now());
    }

    /// How often a vector interrupts CPU 0 while no time passes; each is ended.
    fn burst(&self, vector: u8) -> usize {
        self.count_interrupts(vector, 1000, 0)
    }
}

#[test]
fn too_many_or_no_cpus_are_refused() {
    let around = |cpus: usize| Surroundings {
        clock: Arc::new(FakeClock::default()),
        rearm: Arc::new(Bell::default()),
        kickers: (0..cpus).map(|_| Arc::new(Bell::default()) as Arc<dyn Kicker>).collect(),
        events: Arc::new(Events::default()),
        serial: Box::new(Output::default()),
        kvm_clock: None,
    };
    let settings = Settings { ram: 0, debug_exit: None, test_devices: false, fw_cfg: false };
    for (cpus, fits) in [(0, false), (1, true), (255, true), (256, false)] {
        let (mut ports, mut mmio) = (Bus::new(), Bus::new());
        let platform = Platform::new(&settings, around(cpus), &mut ports, &mut mmio);
        assert_eq!(platform.is_ok(), fits, "{cpus}");
    }
}

#[test]
fn every_register_takes_every_access() {
    let machine = Machine::new(1);
    for address in (0..0x700).chain(0x2000..0x2018) {
        for len in [1, 2, 4] {
            for fill in [0, 0x5a, 0xff] {
                machine.ports.write(address, &vec![fill; len]);
                machine.ports.read(address, &mut vec![0; len]);
            }
        }
    }
    for address in (0..0x400).flat_map(|o| [ioapic::BASE + o, crate::hpet::BASE + o]) {
        for len in [1, 2, 4, 8] {
            for fill in [0, 0x5a, 0xff] {
                machine.mmio.write(address, &vec![fill; len]);
                machine.mmio.read(address, &mut vec![0; len]);
            }
        }
    }
    for offset in 0..0x1000 {
        for (len, fill) in [(1, 0), (4, 0), (4, 0xff), (4, 0x3a), (8, 0xff)] {
            machine.cpu().mmio_write(0xfee0_0000 + offset, &vec![fill; len]);
            machine.cpu().mmio_read(0xfee0_0000 + offset, &mut vec![0; len]);
        }
    }
    machine.pass(1_000_000);
}
