//! Builds a machine: every part, and the wires between them.

use std::{sync::Arc, thread};

use bus::{Bus, Kicker, Rearm, Shared};
use chipset::{CpuInterrupts, KvmClock, Platform, Settings, Surroundings, TimerWheel, Uart};
use engine::{Board, BoardParts, Control, CpuPermit, CpuPool, LocalApic, RunCommand, VcpuRequests};
use ram::Ram;
use x86::{Vcpu, cpuid, kvm, paravirt};

use crate::{
    ConsoleInput, Description, Ended, EngineOptions, Error, FlushCounts, GuestClock, Host,
    Inspector, KnownBlocks, RunningMachine,
    apic::Apic,
    console::ConsoleOutlet,
    devices::{AddedDevices, DeviceBackends, LoggedDevice, Release, add_devices, pci_host},
    events::Events,
    inspector,
    paravirt::{Others, Paravirt},
    running,
    timer::Alarm,
};

/// Port of the debug exit device, as in QEMU's isa-debug-exit for kvm-unit-tests.
const DEBUG_EXIT_PORT: u16 = 0xf4;

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
    pub(crate) known_blocks: Arc<KnownBlocks>,
    pub(crate) flush_counts: FlushCounts,
    /// This process ends when the machine has ended.
    pub(crate) is_last: bool,
    devices: Arc<[LoggedDevice]>,
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
    pub(crate) interrupts: CpuInterrupts,
    pub(crate) requests: Arc<VcpuRequests>,
    /// Set if vCPUs outnumber the host's CPUs.
    pub(crate) permit: Option<CpuPermit>,
    /// The locks by which the vCPU takes turns with the vCPUs of other machines; without locks it takes none.
    pub(crate) turns: Option<Box<dyn host::Locks>>,
}

impl Machine {
    /// Builds the machine and puts the kernel into its memory.
    ///
    /// # Errors
    /// The description asks for something that cannot be, or the host fails; see [`Error`].
    pub fn build(description: &Description, host: Host) -> Result<Self, Error> {
        let ram = Ram::new(description.memory)?;
        let boots = load(&ram, description)?;
        let requests: Arc<[_]> =
            (0..description.cpus.max(1)).map(|_| Arc::new(VcpuRequests::default())).collect();
        let control = Control::of_all(Arc::clone(&requests));
        let events = Arc::new(Events::default());
        events.control(control.clone());
        let alarm = Arc::new(Alarm::default());
        let outlet = ConsoleOutlet::start(host.console).map_err(Error::Thread)?;
        let [mut ports, mut mmio] = [Bus::new(), Bus::new()];
        let kvm_clock = (description.clock != GuestClock::Rtc)
            .then(|| Arc::new(KvmClock::new(ram.clone(), Arc::clone(&host.clock))));
        let around = Surroundings {
            clock: Arc::clone(&host.clock),
            rearm: Arc::clone(&alarm) as Arc<dyn Rearm>,
            kickers: kickers(&requests),
            events: Arc::clone(&events) as Arc<dyn chipset::MachineEvents>,
            serial: outlet.sink(),
            kvm_clock: kvm_clock.clone().filter(|_| description.clock == GuestClock::Exact),
        };
        let mut platform =
            Platform::new(&chipset_settings(description), around, &mut ports, &mut mmio)
                .map_err(assembly)?;
        let pci = pci_host(&platform, host.messages, &ram, [&mut ports, &mut mmio])?;
        let entropy = Arc::clone(&host.entropy);
        let backends =
            DeviceBackends { entropy, on_panic: host.on_panic, attachments: host.attachments };
        let AddedDevices { logged, releases } = add_devices(&pci, &ram, backends)?;
        let make = VcpuMaker::new(description, boots, &ram, &requests, kvm_clock, &events);
        let vcpus = make.all(std::mem::take(&mut platform.cpus), host.turns);
        let cpuid = cpuid_settings(description, host.clock.tsc_hz(), make.paravirt);
        let parts = MachineParts {
            ports,
            mmio,
            cpuid: Arc::new(cpuid::Model::new(host.cpuid, cpuid)),
            clock: host.clock,
            entropy: host.entropy,
        };
        let Platform { timers, uart, .. } = platform;
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
            known_blocks: host.known_blocks,
            flush_counts: host.flush_counts,
            is_last: false,
            devices: logged.into(),
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

    /// The process ends when the machine has. So nobody takes the machine apart: that takes a while, and the host does what is
    /// needed of it when the process ends.
    #[must_use]
    pub fn last_of_process(self) -> Self {
        Self { is_last: true, ..self }
    }

    /// How to look into it, from any thread, before it runs and while it does.
    pub fn inspector(&self) -> Inspector {
        let handle = |vcpu: &VcpuParts| inspector::VcpuHandle {
            requests: Arc::clone(&vcpu.requests),
            apic: Arc::clone(&vcpu.apic),
            interrupts: vcpu.interrupts.clone(),
        };
        let handles = self.vcpus.iter().map(handle).collect();
        let devices = Arc::clone(&self.devices);
        Inspector::new(self.ram.clone(), handles, devices, self.control.clone())
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

/// Makes the vCPUs of a machine.
struct VcpuMaker<'a> {
    /// The initial state of the vCPU that boots the machine.
    boots: Vcpu,
    ram: &'a Ram,
    requests: &'a Arc<[Arc<VcpuRequests>]>,
    kvm_clock: Option<Arc<KvmClock>>,
    events: &'a Arc<Events>,
    /// The features of KVM's interface that the guest is offered.
    paravirt: u64,
    /// Set if vCPUs outnumber the host's CPUs.
    pool: Option<Arc<CpuPool>>,
    others: Others,
}

impl<'a> VcpuMaker<'a> {
    fn new(
        description: &Description,
        boots: Vcpu,
        ram: &'a Ram,
        requests: &'a Arc<[Arc<VcpuRequests>]>,
        kvm_clock: Option<Arc<KvmClock>>,
        events: &'a Arc<Events>,
    ) -> Self {
        let host_cpus = thread::available_parallelism().map_or(1, usize::from);
        let pool = (requests.len() > host_cpus).then(|| CpuPool::new(host_cpus, requests));
        let paravirt = description.paravirt.unwrap_or(offered(requests.len(), pool.is_some()));
        let others = Others::new(requests);
        Self { boots, ram, requests, kvm_clock, events, paravirt, pool, others }
    }

    fn all(&self, cpus: Vec<CpuInterrupts>, turns: Vec<Box<dyn host::Locks>>) -> Vec<VcpuParts> {
        let handles = self.ram.for_vcpus(kickers(self.requests));
        let mut turns = turns.into_iter();
        let own = handles.into_iter().zip(cpus).zip(self.requests.iter());
        own.map(|((ram, interrupts), requests)| VcpuParts {
            turns: turns.next(),
            ..self.one(ram, interrupts, requests)
        })
        .collect()
    }

    fn one(&self, ram: Ram, interrupts: CpuInterrupts, requests: &Arc<VcpuRequests>) -> VcpuParts {
        let number = interrupts.apic_id();
        let permit = self.pool.as_ref().map(|pool| pool.permit(number as usize));
        let paravirt = Paravirt::new(
            self.paravirt,
            interrupts.clone(),
            self.others.clone(),
            permit.clone(),
            self.ram.clone(),
        );
        let (kvm_clock, events) = (self.kvm_clock.clone(), Arc::clone(self.events));
        let apic =
            Apic { interrupts: interrupts.clone(), kvm_clock, paravirt, events, ram: ram.clone() };
        VcpuParts {
            number,
            state: if number == 0 { self.boots.clone() } else { Vcpu::before_start_up() },
            ram,
            interrupts,
            apic: Arc::new(apic),
            permit,
            turns: None,
            requests: Arc::clone(requests),
        }
    }
}

/// The bits of [`paravirt::feature`] that a guest is offered where the machine's description names none. `outnumber` says that its vCPUs
/// outnumber the host's CPUs. A single vCPU is not `DEDICATED`: only devices wake that vCPU, so it would look for work in vain before it halts.
fn offered(vcpus: usize, outnumber: bool) -> u64 {
    match (vcpus, outnumber) {
        (_, true) => paravirt::ALL,
        (..=1, _) => paravirt::feature::EOI,
        _ => paravirt::feature::EOI | paravirt::feature::DEDICATED,
    }
}

fn kickers(requests: &[Arc<VcpuRequests>]) -> Vec<Arc<dyn Kicker>> {
    requests.iter().map(|one| Arc::clone(one) as Arc<dyn Kicker>).collect()
}

fn chipset_settings(description: &Description) -> Settings {
    Settings {
        ram: description.memory,
        debug_exit: Some(DEBUG_EXIT_PORT),
        test_devices: description.test_devices,
        fw_cfg: true,
    }
}

fn cpuid_settings(description: &Description, tsc_hz: u64, paravirt: u64) -> cpuid::Settings {
    let clock = if description.clock == GuestClock::Rtc { 0 } else { kvm::CLOCK_FEATURES };
    cpuid::Settings { tsc_hz, cpus: description.cpus, kvm_features: clock | paravirt }
}

pub(crate) fn assembly(error: impl ToString) -> Error {
    Error::Assembly(error.to_string())
}

fn load(ram: &Ram, description: &Description) -> Result<Vcpu, Error> {
    let modules = description.modules.iter();
    let modules: Vec<_> =
        modules.map(|file| boot::Module { data: &file.data, cmdline: &file.cmdline }).collect();
    let request = boot::BootRequest {
        kernel: &description.kernel,
        unpacked: description.unpacked.as_deref(),
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
