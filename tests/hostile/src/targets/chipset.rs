//! A guest that writes anything to the registers of the chipset, while time goes by.

use std::sync::Arc;

use arbitrary::Arbitrary;
use bus::{Bus, Kicker, Rearm};
use chipset::{
    KvmClock, MachineEvent, MachineEvents, Platform, PutOffEoi, SerialOutput, Settings, StealTime,
    Surroundings,
};
use host_fake::FakeClock;
use ram::Ram;
use x86::kvm;

use super::{all, none};
use fuzzer::Target;

pub(crate) const TARGET: Target = Target { name: "chipset", seeds: none, run };

/// Deeds of one input.
const MOST: usize = 600;
/// Bytes of guest RAM.
const RAM: u64 = 1 << 20;
const APIC: u64 = 0xfee0_0000;
const IO_APIC: u64 = 0xfec0_0000;
const HPET: u64 = 0xfed0_0000;
/// The ports with something at them.
const PORTS: [u16; 14] =
    [0x20, 0xa0, 0x40, 0x43, 0x60, 0x61, 0x64, 0x70, 0x71, 0x92, 0x3f8, 0x510, 0x4d0, 0x600];

struct Nobody;

impl Rearm for Nobody {
    fn rearm(&self) {}
}
impl Kicker for Nobody {
    fn kick(&self) {}
}
impl MachineEvents for Nobody {
    fn raise(&self, _: MachineEvent) {}
}
impl SerialOutput for Nobody {
    fn write(&mut self, _: u8) {}
}

#[derive(Arbitrary, Debug)]
enum Action {
    /// A port with something at it, or one beside it.
    Port { which: u8, beside: u8, size: u8, write: Option<u64> },
    /// Any port.
    AnyPort { port: u16, size: u8, write: Option<u64> },
    /// A register of the local APIC.
    Apic { cpu: bool, offset: u16, write: Option<u32> },
    /// A model-specific register of it.
    Msr { cpu: bool, index: u16, write: Option<u64> },
    /// The I/O APIC or the HPET, in whole registers more often than not.
    Mmio { hpet: bool, offset: u16, size: u8, write: Option<u64> },
    /// Takes an interrupt.
    Acknowledge { cpu: bool },
    /// Where KVM's interface is to keep something (GPA), and what it does there then.
    Paravirt { which: u8, cpu: bool, place: u64 },
    /// Time goes by.
    Time { ns: u32 },
    /// Much of it.
    LongTime { ns: u64 },
    /// Something is typed.
    Key(u8),
    /// Somebody presses the button.
    Power,
}

fn run(bytes: &[u8]) {
    let clock = Arc::new(FakeClock::new(1_772_368_496_000_000_000));
    let settings =
        Settings { ram: 1 << 30, debug_exit: Some(0xf4), test_devices: true, fw_cfg: true };
    let ram = Ram::new(RAM).expect("memory");
    let kvm_clock = Arc::new(KvmClock::new(ram.clone(), clock.clone()));
    let (steal, eoi) = (StealTime::new(ram.clone()), PutOffEoi::new(ram));
    let interface = Interface { clock: kvm_clock.clone(), steal, eoi };
    let around = Surroundings {
        clock: clock.clone(),
        rearm: Arc::new(Nobody),
        kickers: vec![Arc::new(Nobody), Arc::new(Nobody)],
        events: Arc::new(Nobody),
        serial: Box::new(Nobody),
        kvm_clock: Some(kvm_clock),
    };
    let (mut ports, mut mmio) = (Bus::new(), Bus::new());
    let platform = Platform::new(&settings, around, &mut ports, &mut mmio).expect("a platform");
    for action in all::<Action>(bytes, MOST) {
        match action {
            Action::Paravirt { which, cpu, place } => {
                interface.perform(which, cpu, place, &platform)
            }
            action => perform(&action, &platform, &ports, &mmio, &clock),
        }
    }
}

/// KVM's interface: what a vCPU has of it, and the clock of all.
struct Interface {
    clock: Arc<KvmClock>,
    steal: StealTime,
    eoi: PutOffEoi,
}

impl Interface {
    fn perform(&self, which: u8, cpu: bool, place: u64, platform: &Platform) {
        // Most places are in RAM, and kept.
        let kept = u64::from(place.is_multiple_of(2));
        let place = if place % 8 == 7 { place } else { (place % RAM) | kept };
        let (vcpu, interrupts) = (usize::from(cpu), &platform.cpus[0]);
        match which % 12 {
            0 => assert!(self.clock.msr_write(vcpu, kvm::WALL_CLOCK, place)),
            1 | 2 => assert!(self.clock.msr_write(vcpu, kvm::SYSTEM_TIME, place)),
            3 => {
                self.clock.pair(place, u64::from(cpu));
            }
            4 => self.clock.refresh(),
            5 => self.clock.halts(),
            6 => self.clock.hold(),
            7 => self.clock.set(place),
            8 => {
                // What is refused is an exception for the guest.
                let _ = self.steal.msr_write(place);
            }
            9 => {
                self.steal.set_preempted();
                self.steal.add(place);
                self.steal.set_running();
            }
            10 => {
                self.eoi.settle(interrupts);
                let _ = self.eoi.msr_write(place);
            }
            _ => {
                self.eoi.settle(interrupts);
                interrupts.acknowledge();
                self.eoi.taken(interrupts);
            }
        }
    }
}

fn perform(action: &Action, platform: &Platform, ports: &Bus, mmio: &Bus, clock: &FakeClock) {
    let cpu = |second: bool| &platform.cpus[usize::from(second)];
    match *action {
        Action::Port { which, beside, size, write } => {
            let port = PORTS[usize::from(which) % PORTS.len()] + u16::from(beside % 8);
            access(ports, port.into(), size % 3, write);
        }
        Action::AnyPort { port, size, write } => access(ports, port.into(), size % 3, write),
        Action::Apic { cpu: which, offset, write } => {
            let at = APIC + u64::from(offset & 0xff0);
            match write {
                Some(value) => cpu(which).mmio_write(at, &value.to_le_bytes()),
                None => cpu(which).mmio_read(at, &mut [0; 4]),
            }
        }
        Action::Msr { cpu: which, index, write } => {
            let index = if index % 4 == 0 { index.into() } else { 0x800 + u32::from(index % 0x40) };
            // What is refused is an exception for the guest.
            let _ = match write {
                Some(value) => cpu(which).msr_write(index, value),
                None => cpu(which).msr_read(index).map(drop),
            };
        }
        Action::Mmio { hpet, offset, size, write } => {
            let base = if hpet { HPET } else { IO_APIC };
            let offset = if size % 8 == 7 { offset } else { offset & 0x3f8 };
            access(mmio, base + u64::from(offset % 0x400), size % 4, write);
        }
        Action::Acknowledge { cpu: which } => {
            cpu(which).acknowledge();
            cpu(which).take_nmi();
            cpu(which).take_init();
            cpu(which).take_start_up();
        }
        Action::Time { ns } => pass(u64::from(ns), platform, clock),
        Action::LongTime { ns } => pass(ns >> 8, platform, clock),
        Action::Key(key) => drop(platform.uart.lock().expect("sound").receive(&[key])),
        Action::Paravirt { .. } => unreachable!("it is the interface's"),
        Action::Power => platform.power.lock().expect("sound").press_power_button(),
    }
}

fn pass(ns: u64, platform: &Platform, clock: &FakeClock) {
    use host::Clock;
    // No machine runs for a hundred years.
    if clock.monotonic_ns() < 3_000_000_000_000_000_000 {
        clock.advance(ns);
    }
    platform.timers.deadline();
    platform.timers.expire(clock.monotonic_ns());
}

fn access(bus: &Bus, address: u64, size: u8, write: Option<u64>) {
    let size = 1_usize << size;
    match write {
        Some(value) => bus.write(address, &value.to_le_bytes()[..size]),
        None => bus.read(address, &mut [0; 8][..size]),
    }
}
