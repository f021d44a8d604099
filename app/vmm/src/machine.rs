//! Builds a machine: every part, and the wires between them.

use std::{
    sync::{Arc, Mutex},
    thread,
};

use bus::{Bus, InterruptLine, Kicker, MsiSink, Rearm, Shared};
use chipset::{
    CpuInterrupts, KvmClock, MachineEvent, MachineEvents, Platform, Settings, Surroundings,
    TimerWheel, Uart,
};
use engine::{Board, BoardParts, Control, Crowd, LocalApic, RunCommand, Seat, VcpuRequests};
use pci::{MmioWindow, PciHost};
use ram::Ram;
use virtio::{Doorbell, Execution, Rng, VirtioDevice, VirtioError, VirtioPci};
use x86::{Fault, Vcpu, cpuid, kvm, msr, paging::PHYS_BITS, paravirt};

use crate::{
    Attachment, ConsoleInput, Description, Ended, EngineOptions, Error, GuestClock, Host,
    Inspector, MessageFilter, RunningMachine,
    console::ConsoleOutlet,
    events::Events,
    inspector,
    panic::PanicDevice,
    paravirt::{Others, Paravirt},
    running,
    timer::Alarm,
};

/// Port of the debug exit device, as in QEMU's isa-debug-exit for kvm-unit-tests.
const DEBUG_EXIT_PORT: u16 = 0xf4;
/// The first I/O APIC input of PCI's INTx wires.
const PCI_GSI: u32 = 16;

/// What of KVM's interface a guest is offered if nobody says, where its vCPUs outnumber the host's CPUs and elsewhere.
const OFFERED: [u32; 2] = [paravirt::ALL, paravirt::feature::EOI];

/// What a device has done when the machine has come to rest.
pub(crate) type Release = Box<dyn FnOnce() + Send>;

/// A machine that has not run yet.
pub struct Machine {
    /// The first one boots, the others wait to be started.
    pub(crate) vcpus: Vec<VcpuParts>,
    pub(crate) engine: EngineOptions,
    pub(crate) parts: MachineParts,
    pub(crate) timers: TimerWheel,
    pub(crate) alarm: Arc<Alarm>,
    pub(crate) events: Arc<Events>,
    pub(crate) control: Control,
    pub(crate) outlet: ConsoleOutlet,
    pub(crate) releases: Vec<Release>,
    ram: Ram,
    uart: Shared<Uart>,
}

/// What the [`Board`]s of all vCPUs have in common.
#[derive(Clone)]
pub(crate) struct MachineParts {
    ports: Bus,
    mmio: Bus,
    cpuid: Arc<cpuid::Model>,
    pub(crate) clock: Arc<dyn host::Clock>,
    entropy: Arc<dyn host::Entropy>,
}

/// What is a vCPU's own.
pub(crate) struct VcpuParts {
    /// Its number, which is its APIC identifier.
    pub(crate) number: u32,
    pub(crate) state: Vcpu,
    /// Its handle of guest RAM.
    ram: Ram,
    pub(crate) apic: Arc<dyn LocalApic>,
    pub(crate) requests: Arc<VcpuRequests>,
    /// Where vCPUs outnumber the host's CPUs.
    pub(crate) seat: Option<Seat>,
}

impl Machine {
    /// Builds the machine and puts the kernel into its memory.
    ///
    /// # Errors
    /// The description asks for something that cannot be, or the host fails; see [`Error`].
    pub fn build(description: &Description, host: Host) -> Result<Self, Error> {
        let ram = Ram::new(description.memory)?;
        let first = load(&ram, description)?;
        let requests: Arc<[_]> =
            (0..description.cpus.max(1)).map(|_| Arc::new(VcpuRequests::default())).collect();
        let kickers = || requests.iter().map(|one| Arc::clone(one) as Arc<dyn Kicker>).collect();
        let control = Control::of_all(Arc::clone(&requests));
        let events = Arc::new(Events::default());
        events.control(control.clone());
        let alarm = Arc::new(Alarm::default());
        let outlet = ConsoleOutlet::start(host.console).map_err(Error::Thread)?;
        let (mut ports, mut mmio) = (Bus::new(), Bus::new());
        let exact = description.clock == GuestClock::Exact;
        let kvm_clock =
            exact.then(|| Arc::new(KvmClock::new(ram.clone(), Arc::clone(&host.clock))));
        let around = Surroundings {
            clock: Arc::clone(&host.clock),
            rearm: Arc::clone(&alarm) as Arc<dyn Rearm>,
            kickers: kickers(),
            events: Arc::clone(&events) as Arc<dyn chipset::MachineEvents>,
            serial: outlet.sink(),
            kvm_clock: kvm_clock.clone(),
        };
        let settings = Settings {
            ram: description.memory,
            debug_exit: Some(DEBUG_EXIT_PORT),
            test_devices: description.test_devices,
            fw_cfg: true,
        };
        let platform = Platform::new(&settings, around, &mut ports, &mut mmio).map_err(assembly)?;
        let pci = pci_host(&platform, host.messages, &ram, &mut ports, &mut mmio)?;
        let rng = Box::new(Rng::new(Arc::clone(&host.entropy)));
        add_device(&pci, &ram, rng, Execution::Inline)?;
        if let Some(tell) = host.on_panic {
            pci.add(pci.reserve()?, PanicDevice::new(tell)?)?;
        }
        let releases = host.attachments.into_iter().map(|device| attach(&pci, &ram, device));
        let releases = releases.collect::<Result<_, _>>()?;
        let host_cpus = thread::available_parallelism().map_or(1, usize::from);
        let crowd = (requests.len() > host_cpus).then(|| Crowd::new(host_cpus, &requests));
        let paravirt = description.paravirt.unwrap_or(OFFERED[usize::from(crowd.is_none())]);
        let others = Others::new(&requests);
        let memory = &ram;
        let own = ram.for_vcpus(kickers()).into_iter().zip(platform.cpus).zip(requests.iter());
        let vcpus = own.map(|((ram, interrupts), requests)| {
            let (number, kvm_clock) = (interrupts.apic_id(), kvm_clock.clone());
            let events = Arc::clone(&events);
            let seat = crowd.as_ref().map(|crowd| crowd.seat(number as usize));
            let (known, whole) = (interrupts.clone(), memory.clone());
            let paravirt = Paravirt::new(paravirt, known, others.clone(), seat.clone(), whole);
            VcpuParts {
                number,
                state: if number == 0 { first.clone() } else { Vcpu::before_start_up() },
                ram,
                apic: Arc::new(Apic { interrupts, kvm_clock, paravirt, events }),
                seat,
                requests: Arc::clone(requests),
            }
        });
        let vcpus = vcpus.collect();
        let clock_features = if exact { kvm::CLOCK_FEATURES } else { 0 };
        let settings = cpuid::Settings {
            tsc_hz: host.clock.tsc_hz(),
            cpus: description.cpus,
            kvm_features: clock_features | paravirt,
        };
        let parts = MachineParts {
            ports,
            mmio,
            cpuid: Arc::new(cpuid::Model::new(host.cpuid, settings)),
            clock: host.clock,
            entropy: host.entropy,
        };
        let (timers, uart) = (platform.timers, platform.uart);
        let engine = description.engine;
        Ok(Self {
            vcpus,
            engine,
            parts,
            timers,
            alarm,
            events,
            control,
            outlet,
            releases,
            ram,
            uart,
        })
    }

    /// Where the guest's input goes.
    pub fn console_input(&self) -> ConsoleInput {
        ConsoleInput::new(Arc::clone(&self.uart))
    }

    /// Its memory, as nobody's of its vCPUs.
    pub fn ram(&self) -> &Ram {
        &self.ram
    }

    /// Has the machine stand still from its start until [`RunningMachine::pause`] lets it go.
    pub fn hold(&self) {
        self.control.order(RunCommand::Pause);
    }

    /// How to look into it, from any thread, before it runs and while it does.
    pub fn inspector(&self) -> Inspector {
        let handle = |vcpu: &VcpuParts| inspector::VcpuHandle {
            requests: Arc::clone(&vcpu.requests),
            apic: Arc::clone(&vcpu.apic),
        };
        let handles = self.vcpus.iter().map(handle).collect();
        Inspector::new(self.ram.clone(), handles, self.control.clone())
    }

    /// Runs the machine. `on_end` is called once, on a vCPU's thread, when it has ended.
    ///
    /// # Errors
    /// The host gives no thread, or cannot execute the guest's vector instructions.
    pub fn start(
        self,
        on_end: impl FnOnce(Ended) + Send + 'static,
    ) -> Result<RunningMachine, Error> {
        running::start(self, on_end)
    }
}

impl MachineParts {
    /// The machine as a vCPU sees it; made on the vCPU's thread.
    pub(crate) fn board(self, vcpu: &VcpuParts) -> Result<Board, Error> {
        let vector_unit =
            native::HostVectorUnit::new().map_err(|error| Error::VectorUnit(error.to_string()))?;
        Ok(Board::new(BoardParts {
            ram: vcpu.ram.clone(),
            ports: self.ports,
            mmio: self.mmio,
            apic: Arc::clone(&vcpu.apic),
            apic_id: vcpu.number,
            cpuid: self.cpuid,
            clock: self.clock,
            entropy: self.entropy,
            vector_unit: Box::new(vector_unit),
            requests: Arc::clone(&vcpu.requests),
        }))
    }
}

fn assembly(error: impl ToString) -> Error {
    Error::Assembly(error.to_string())
}

fn load(ram: &Ram, description: &Description) -> Result<Vcpu, Error> {
    let modules = description.modules.iter();
    let modules: Vec<_> =
        modules.map(|file| boot::Module { data: &file.data, cmdline: &file.cmdline }).collect();
    let request = boot::BootRequest {
        kernel: &description.kernel,
        modules: &modules,
        cmdline: &description.cmdline,
        cpus: description.cpus,
        protocol: description.protocol,
    };
    let loaded = boot::load(ram, &request)?;
    tracing::info!(protocol = %loaded.protocol, entry = loaded.vcpu.rip, "kernel loaded");
    for placed in &loaded.placed {
        tracing::debug!(
            what = placed.what,
            "at {:#x}..{:#x}",
            placed.range.start,
            placed.range.end
        );
    }
    Ok(loaded.vcpu)
}

fn pci_host(
    platform: &Platform,
    messages: Option<MessageFilter>,
    ram: &Ram,
    ports: &mut Bus,
    mmio: &mut Bus,
) -> Result<PciHost, Error> {
    let mut lines: Vec<Arc<dyn InterruptLine>> = Vec::new();
    for gsi in PCI_GSI..PCI_GSI + 8 {
        let line = platform.interrupts.pci_line(gsi, pci::wire_irq(gsi));
        lines.push(line.map_err(assembly)?);
    }
    let lines = lines.try_into().map_err(|_| assembly("eight INTx wires"))?;
    let controllers: Arc<dyn MsiSink> = Arc::new(platform.interrupts.clone());
    let messages = match messages {
        Some(filter) => filter(controllers),
        None => controllers,
    };
    let host = PciHost::new(lines, messages);
    let config = host.config_ports().with_reset_control(Arc::clone(&platform.reset_register));
    ports.insert(pci::CONFIG_PORTS, 8, Arc::new(Mutex::new(config))).map_err(assembly)?;
    let ecam = Arc::new(Mutex::new(host.ecam()));
    mmio.insert(pci::ECAM_BASE, pci::ECAM_SIZE, ecam).map_err(assembly)?;
    let window = Arc::new(Mutex::new(host.window()));
    mmio.insert(pci::WINDOW_BASE, pci::WINDOW_SIZE, window).map_err(assembly)?;
    // What is not RAM is PCI's: systems that do not know the window move BARs up there.
    let above = ram::HIGH_BASE + ram.high_len();
    let window = Arc::new(Mutex::new(MmioWindow::new(host.clone(), above)));
    mmio.insert(above, (1 << PHYS_BITS) - above, window).map_err(assembly)?;
    Ok(host)
}

/// Adds a device and has it connected; returns how it is released.
fn attach(pci: &PciHost, ram: &Ram, attachment: Attachment) -> Result<Release, Error> {
    let doorbell = add_device(pci, ram, attachment.device, attachment.execution)?;
    (attachment.connect)(doorbell);
    Ok(attachment.release)
}

fn add_device(
    pci: &PciHost,
    ram: &Ram,
    device: Box<dyn VirtioDevice>,
    execution: Execution,
) -> Result<Doorbell, Error> {
    let slot = pci.reserve()?;
    let (msi, line) = (slot.msi(), slot.line());
    let function = VirtioPci::new(device, ram.clone(), msi, line, execution);
    let function = function.map_err(|error| match error {
        VirtioError::Worker(error) => Error::Thread(error),
        error => assembly(error),
    })?;
    let doorbell = function.doorbell();
    pci.add(slot, function)?;
    Ok(doorbell)
}

/// Register of the local APIC that sends interrupts: its offset in the page, and its MSR.
const COMMAND: u64 = 0x300;
const COMMAND_MSR: u32 = msr::X2APIC + 0x30;
/// What is sent is not for one CPU by its identifier: a shorthand, or a logical destination.
const NOT_ONE: u64 = 3 << 18 | 1 << 11;

/// The chipset's local APIC as the engine wants it, and the clock that is refreshed along with it.
struct Apic {
    interrupts: CpuInterrupts,
    kvm_clock: Option<Arc<KvmClock>>,
    paravirt: Paravirt,
    events: Arc<Events>,
}

impl Apic {
    /// The clock, and the number of this CPU in it.
    fn clock(&self) -> Option<(&KvmClock, usize)> {
        Some((self.kvm_clock.as_deref()?, self.interrupts.apic_id() as usize))
    }
}

impl LocalApic for Apic {
    fn pending(&self) -> u32 {
        self.interrupts.pending()
    }
    fn acknowledge(&self) -> Option<u8> {
        if let Some(clock) = &self.kvm_clock {
            clock.refresh();
        }
        self.paravirt.acknowledge()
    }
    fn take_nmi(&self) -> bool {
        self.interrupts.take_nmi()
    }
    fn nmi_ended(&self) {
        self.interrupts.nmi_ended();
    }
    /// The one that boots would begin at the reset vector, in firmware, which would start the machine anew.
    fn take_init(&self) -> bool {
        let taken = self.interrupts.take_init();
        if taken {
            self.paravirt.reset();
        }
        let boots = self.interrupts.apic_id() == 0;
        if taken && boots {
            self.events.raise(MachineEvent::Reset);
        }
        taken && !boots
    }
    fn take_start_up(&self) -> Option<u8> {
        self.interrupts.take_start_up()
    }
    fn enabled(&self) -> bool {
        self.interrupts.apic_enabled()
    }
    fn cr8(&self) -> u8 {
        self.interrupts.cr8()
    }
    fn set_cr8(&self, value: u8) {
        self.interrupts.set_cr8(value);
    }
    fn msr_read(&self, index: u32) -> Result<u64, Fault> {
        let known = self.clock().and_then(|(clock, cpu)| clock.msr_read(cpu, index));
        let known = known.or_else(|| self.paravirt.msr_read(index));
        known.map_or_else(
            || {
                self.paravirt.settle_eoi_for_read(index);
                self.interrupts.msr_read(index)
            },
            Ok,
        )
    }
    fn msr_write(&self, index: u32, value: u64) -> Result<(), Fault> {
        if let Some((clock, cpu)) = self.clock()
            && clock.msr_write(cpu, index, value)
        {
            return Ok(());
        }
        if let Some(done) = self.paravirt.msr_write(index, value) {
            return done;
        }
        self.paravirt.settle_eoi();
        self.interrupts.msr_write(index, value)?;
        if index == COMMAND_MSR {
            let one = value & NOT_ONE == 0;
            self.paravirt.has_sent(one.then_some((value >> 32) as usize));
        }
        Ok(())
    }
    fn hypercall(&self, kernel: bool, number: u64, arguments: [u64; 4]) -> Option<u64> {
        self.paravirt.hypercall(kernel, number, arguments)
    }
    fn take_unhalt(&self) -> bool {
        self.paravirt.take_unhalt()
    }
    fn has_spun(&self) {
        self.paravirt.has_spun();
    }
    fn set_preempted(&self) {
        self.paravirt.set_preempted();
    }
    fn note_stolen(&self, ns: u64) {
        self.paravirt.note_stolen(ns);
    }
    fn set_running(&self) -> bool {
        self.paravirt.set_running()
    }
    fn mmio_read(&self, gpa: u64, data: &mut [u8]) -> bool {
        let ours = self.interrupts.claims(gpa);
        if ours {
            self.paravirt.settle_eoi();
            self.interrupts.mmio_read(gpa, data);
        }
        ours
    }
    fn mmio_write(&self, gpa: u64, data: &[u8]) -> bool {
        let ours = self.interrupts.claims(gpa);
        if ours {
            self.paravirt.settle_eoi();
            self.interrupts.mmio_write(gpa, data);
            if gpa & 0xfff == COMMAND {
                self.paravirt.has_sent(None);
            }
        }
        ours
    }
}
