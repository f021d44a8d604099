//! Puts the devices together: the builder of everything this crate has.

use std::sync::{Arc, Mutex};

use bus::{Bus, Device, Kicker, Overlap, Rearm, Shared, Timed};
use host::Clock;

use crate::fw_cfg::FwCfg;
use crate::hpet::{Hpet, LegacyLine};
use crate::i8042::{I8042, I8042Port, PortA};
use crate::interrupts::{ElcrPorts, Interrupts, IoApicDevice, NoSuchGsi, PicPorts};
use crate::kvm_clock::KvmClock;
use crate::lapic::{ApicBus, Lapic, LapicTimer};
use crate::pit::{Pit, PortB};
use crate::power::{PowerManagement, ResetRegister};
use crate::rtc::Rtc;
use crate::testdev::{DebugExit, Echo, TestLines, TestMemory};
use crate::uart::{SerialOutput, Uart};
use crate::{
    CpuInterrupts, InterruptController, MachineEvents, TimerWheel, fw_cfg, hpet, i8042, ioapic,
    pic, pit, power, rtc, testdev, uart,
};

/// ISA interrupt of the real-time clock.
const RTC_IRQ: u32 = 8;

/// What a machine has, beyond what every PC has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Bytes of RAM, for the firmware configuration device.
    pub ram: u64,
    /// Port of the debug exit device, if any; kvm-unit-tests want 0xf4.
    pub debug_exit: Option<u16>,
    /// Devices for kvm-unit-tests.
    pub test_devices: bool,
    /// The firmware configuration device.
    pub fw_cfg: bool,
}

/// What the devices need from around them.
pub struct Surroundings {
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Told when the [`TimerWheel`]'s deadline moves closer.
    pub rearm: Arc<dyn Rearm>,
    /// One a vCPU, in order of APIC ID.
    pub kickers: Vec<Arc<dyn Kicker>>,
    /// Where the guest's requests to the machine go.
    pub events: Arc<dyn MachineEvents>,
    /// Where the serial port's output goes.
    pub serial: Box<dyn SerialOutput>,
    /// The clock that Linux keeps its time by, if there is one: see [`rtc`].
    pub kvm_clock: Option<Arc<KvmClock>>,
}

/// Why there is no machine.
#[derive(Debug, thiserror::Error)]
pub enum PlatformError {
    /// A device's addresses are taken.
    #[error(transparent)]
    Overlap(#[from] Overlap),
    /// A device's interrupt does not exist.
    #[error(transparent)]
    NoSuchGsi(#[from] NoSuchGsi),
    /// The number of vCPUs is impossible.
    #[error("{0} vCPUs: must be 1 to 255")]
    Cpus(usize),
}

/// The devices, and the handles to them. They hold on to each other: dropping the handles and the
/// buses drops the devices.
pub struct Platform {
    /// One a vCPU, in order of APIC ID.
    pub cpus: Vec<CpuInterrupts>,
    /// Interrupt lines and the sink of message-signalled interrupts.
    pub interrupts: InterruptController,
    /// All devices that keep time; further ones may be added.
    pub timers: TimerWheel,
    /// The serial port, for its input.
    pub uart: Shared<Uart>,
    /// The power button.
    pub power: Shared<PowerManagement>,
    /// The reset control register. A PCI host bridge owns the ports around it and passes accesses
    /// on; without one, it goes to port [`power::RESET`].
    pub reset_register: Shared<dyn Device>,
}

impl Platform {
    /// Creates all devices and puts them on the buses.
    ///
    /// # Errors
    /// Addresses are taken, or there are no or too many vCPUs.
    pub fn new(
        settings: &Settings,
        around: Surroundings,
        ports: &mut Bus,
        mmio: &mut Bus,
    ) -> Result<Self, PlatformError> {
        let mut builder = Builder::new(&around, ports, mmio)?;
        builder.interrupt_controllers()?;
        builder.timers()?;
        let uart = builder.serial_port(around.serial)?;
        let power = builder.power()?;
        builder.test_devices(settings)?;
        Ok(Self {
            cpus: builder.cpus,
            interrupts: builder.controller,
            timers: builder.timers,
            uart,
            power,
            reset_register: shared(ResetRegister::new(around.events)),
        })
    }
}

/// A device behind its lock.
fn shared<D>(device: D) -> Shared<D> {
    Arc::new(Mutex::new(device))
}

struct Builder<'a> {
    clock: Arc<dyn Clock>,
    rearm: Arc<dyn Rearm>,
    events: Arc<dyn MachineEvents>,
    kvm_clock: Option<Arc<KvmClock>>,
    ports: &'a mut Bus,
    mmio: &'a mut Bus,
    cpus: Vec<CpuInterrupts>,
    controller: InterruptController,
    timers: TimerWheel,
}

impl<'a> Builder<'a> {
    fn new(
        around: &Surroundings,
        ports: &'a mut Bus,
        mmio: &'a mut Bus,
    ) -> Result<Self, PlatformError> {
        let count = around.kickers.len();
        if !(1..=255).contains(&count) {
            return Err(PlatformError::Cpus(count));
        }
        let new_lapic = |(id, kicker): (u32, &Arc<dyn Kicker>)| {
            let (clock, rearm) = (Arc::clone(&around.clock), Arc::clone(&around.rearm));
            Arc::new(Lapic::new(id, Arc::clone(kicker), clock, rearm))
        };
        let lapics: Vec<_> = (0..).zip(&around.kickers).map(new_lapic).collect();
        let interrupts = Arc::new(Interrupts::new(ApicBus(lapics.clone())));
        let mut timers = TimerWheel::new();
        let mut cpus = Vec::new();
        for (id, lapic) in (0..).zip(lapics) {
            timers.insert(shared(LapicTimer(Arc::clone(&lapic))));
            let (interrupts, machine_checks) = (Arc::clone(&interrupts), Arc::default());
            cpus.push(CpuInterrupts { id, lapic, interrupts, machine_checks });
        }
        Ok(Self {
            clock: Arc::clone(&around.clock),
            rearm: Arc::clone(&around.rearm),
            events: Arc::clone(&around.events),
            kvm_clock: around.kvm_clock.clone(),
            ports,
            mmio,
            cpus,
            controller: InterruptController { interrupts },
            timers,
        })
    }

    fn timed<D: Timed + 'static>(&mut self, device: D) -> Shared<D> {
        let device = shared(device);
        self.timers.insert(device.clone());
        device
    }

    fn interrupt_controllers(&mut self) -> Result<(), PlatformError> {
        let interrupts = &self.controller.interrupts;
        let pic = |slave| shared(PicPorts { interrupts: Arc::clone(interrupts), slave });
        self.ports.insert(pic::MASTER, 2, pic(false))?;
        self.ports.insert(pic::SLAVE, 2, pic(true))?;
        self.ports.insert(pic::ELCR, 2, shared(ElcrPorts(Arc::clone(interrupts))))?;
        let ioapic = shared(IoApicDevice(Arc::clone(interrupts)));
        self.mmio.insert(ioapic::BASE, ioapic::LEN, ioapic)?;
        Ok(())
    }

    fn timers(&mut self) -> Result<(), PlatformError> {
        let legacy = |irq| -> Result<_, NoSuchGsi> {
            Ok(Arc::new(LegacyLine::new(self.controller.isa_line(irq)?)))
        };
        let lines = [legacy(0)?, legacy(RTC_IRQ)?];
        let time = || (Arc::clone(&self.clock), Arc::clone(&self.rearm));
        let (clock, rearm) = time();
        let pit = Pit::new(clock, rearm, lines[0].clone());
        let (clock, rearm) = time();
        let rtc = Rtc::new(clock, rearm, lines[1].clone(), self.kvm_clock.clone());
        let (clock, rearm) = time();
        let hpet = Hpet::new(clock, rearm, self.all_lines()?, lines);

        let pit = self.timed(pit);
        self.ports.insert(pit::BASE, 4, pit.clone())?;
        self.ports.insert(pit::PORT_B, 1, shared(PortB { pit }))?;
        let rtc = self.timed(rtc);
        self.ports.insert(rtc::BASE, 2, rtc)?;
        let hpet = self.timed(hpet);
        self.mmio.insert(hpet::BASE, hpet::LEN, hpet)?;
        Ok(())
    }

    /// A wire into each GSI.
    fn all_lines(&self) -> Result<Vec<Arc<dyn bus::InterruptLine>>, NoSuchGsi> {
        (0..ioapic::PINS as u32).map(|gsi| self.controller.line(gsi)).collect()
    }

    fn serial_port(
        &mut self,
        output: Box<dyn SerialOutput>,
    ) -> Result<Shared<Uart>, PlatformError> {
        let uart = shared(Uart::new(self.controller.isa_line(uart::COM1_IRQ)?, output));
        self.ports.insert(uart::COM1, uart::LEN, uart.clone())?;
        Ok(uart)
    }

    fn power(&mut self) -> Result<Shared<PowerManagement>, PlatformError> {
        let sci = self.controller.line(power::SCI_GSI)?;
        let (clock, rearm) = (Arc::clone(&self.clock), Arc::clone(&self.rearm));
        let power = PowerManagement::new(clock, rearm, sci, Arc::clone(&self.events));
        let power = self.timed(power);
        self.ports.insert(power::PM1A_EVENT, power::LEN, power.clone())?;

        let controller = shared(I8042::new(Arc::clone(&self.events)));
        for (port, command) in [(i8042::DATA, false), (i8042::COMMAND, true)] {
            let device = I8042Port { controller: controller.clone(), command };
            self.ports.insert(port, 1, shared(device))?;
        }
        let port_a = PortA::new(Arc::clone(&self.events));
        self.ports.insert(i8042::PORT_A, 1, shared(port_a))?;
        Ok(power)
    }

    fn test_devices(&mut self, settings: &Settings) -> Result<(), PlatformError> {
        if let Some(port) = settings.debug_exit {
            let device = shared(DebugExit(Arc::clone(&self.events)));
            self.ports.insert(port.into(), testdev::EXIT_LEN, device)?;
        }
        if settings.fw_cfg {
            let device = shared(FwCfg::new(settings.ram, self.cpus.len() as u16));
            self.ports.insert(fw_cfg::BASE, 2, device)?;
        }
        if settings.test_devices {
            self.ports.insert(testdev::ECHO, testdev::ECHO_LEN, shared(Echo::default()))?;
            let lines = self.all_lines()?;
            self.ports.insert(testdev::LINES, lines.len() as u64, shared(TestLines(lines)))?;
            self.mmio.insert(testdev::MEMORY, testdev::MEMORY_LEN, shared(TestMemory::new()))?;
        }
        Ok(())
    }
}
