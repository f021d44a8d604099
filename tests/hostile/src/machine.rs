//! A machine that runs, with a guest that does nothing but count, for those who look into it.

use std::{io, sync::Arc};

use host_linux::{LinuxClock, LinuxEntropy, cpu};
use vmm::{
    BootProtocol, CpuidResult, Description, EngineKind, EngineOptions, FlushCounts, GuestClock,
    Host, Inspector, Machine, RunningMachine,
};

/// Bytes of guest RAM.
pub(crate) const RAM: u64 = 8 << 20;
/// Where the guest's code is (GPA).
const CODE: u32 = 0x40_0000;
/// INC EAX, INC ECX, a jump back.
const COUNT: [u8; 6] = [0xff, 0xc0, 0xff, 0xc1, 0xeb, 0xfa];

/// The machine, which stops when it is dropped.
pub(crate) struct Counting {
    pub(crate) inspector: Inspector,
    running: Option<RunningMachine>,
}

impl Counting {
    pub(crate) fn new() -> Self {
        let kernel = [&header()[..], &COUNT].concat();
        let engine = EngineOptions { kind: EngineKind::Interpreter, ..EngineOptions::default() };
        let description = Description {
            kernel,
            unpacked: None,
            modules: Vec::new(),
            cmdline: String::new(),
            protocol: BootProtocol::Auto,
            memory: RAM,
            cpus: 1,
            engine,
            test_devices: false,
            clock: GuestClock::Rtc,
            paravirt: None,
        };
        let machine = Machine::build(&description, host()).expect("a machine");
        let inspector = machine.inspector();
        let running = machine.start(|_| {}).expect("it runs");
        Self { inspector, running: Some(running) }
    }

    /// Whether its vCPU answers. Debuggers may have ended it, or had its guest end it.
    pub(crate) fn lives(&self) -> bool {
        self.inspector.run_on_vcpu(0, |_| ()).is_some()
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        let patience = std::time::Duration::from_secs(5);
        drop(self.running.take().and_then(|running| running.finish(patience)));
    }
}

fn host() -> Host {
    fn host_cpuid(leaf: u32, subleaf: u32) -> CpuidResult {
        let found = cpu::cpuid(leaf, subleaf);
        CpuidResult { eax: found.eax, ebx: found.ebx, ecx: found.ecx, edx: found.edx }
    }
    Host {
        clock: Arc::new(LinuxClock::new()),
        entropy: Arc::new(LinuxEntropy),
        cpuid: host_cpuid,
        console: Box::new(io::sink()),
        attachments: Vec::new(),
        messages: None,
        known_blocks: Arc::default(),
        flush_counts: FlushCounts::default(),
        turns: Vec::new(),
        on_panic: None,
    }
}

/// A multiboot header with the addresses of what follows it.
fn header() -> Vec<u8> {
    let (magic, flags, end) = (0x1bad_b002_u32, 1_u32 << 16, CODE + 32 + COUNT.len() as u32);
    let words = [magic, flags, 0_u32.wrapping_sub(magic + flags), CODE, CODE, end, end, CODE + 32];
    words.map(u32::to_le_bytes).concat()
}
