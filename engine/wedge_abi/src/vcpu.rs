//! The vCPU page: the state of a vCPU while guest code runs.

use crate::{BellState, Bells, Claims, Shares, areas::AREAS};

/// The vCPU page.
#[repr(C, align(4096))]
#[derive(Clone, Debug, Default)]
pub struct VcpuPage {
    /// Architectural registers that guest code and the wedge change.
    pub regs: Registers,
    /// How guest code runs, and what it is doing.
    pub run: RunControl,
    /// What translated code uses.
    pub block: BlockState,
    /// Why guest code has stopped.
    pub exit: ExitState,
    /// Registers and tables that only the kernel changes, by interpreted instructions.
    pub system: SystemState,
    /// Page faults and invalidations under way.
    pub paging: PagingState,
    /// Interrupts that the wedge takes.
    pub bells: BellState,
    /// What the wedge has done without the monitor.
    pub counters: Counters,
    /// Memory that programs must not have.
    pub claims: Claims,
    /// x87, SSE and AVX state in the standard XSAVE layout; in the CPU while guest code runs.
    pub vectors: Vectors,
    /// What only the monitor writes. It does not read this back.
    pub told: MonitorData,
    /// See [`Shares`].
    pub shares: Shares,
}

/// Architectural registers. While translated code runs, general registers and flags are in the host's.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Registers {
    /// General registers in encoding order.
    pub gpr: [u64; 16],
    /// GVA of the next instruction.
    pub rip: u64,
    /// User code's RFLAGS. In translated code: see [`BlockState::host_flags`].
    pub rflags: u64,
    /// Virtual RFLAGS.IF: zero or `flags::IF`.
    pub interrupt_flag: u64,
    /// Virtual RFLAGS.AC: zero or `flags::AC`.
    pub ac: u64,
    /// Current privilege level, 0 or 3.
    pub cpl: u64,
    /// CR2.
    pub cr2: u64,
    /// CR3.
    pub cr3: u64,
    /// The guest's FS base.
    pub fs_base: u64,
    /// The guest's GS base.
    pub gs_base: u64,
    /// The GS base that SWAPGS exchanges.
    pub kernel_gs_base: u64,
    /// Selectors.
    pub cs: u64,
    /// See `cs`.
    pub ss: u64,
    /// See `cs`.
    pub ds: u64,
    /// See `cs`.
    pub es: u64,
    /// See `cs`.
    pub fs: u64,
    /// See `cs`.
    pub gs: u64,
}

/// How guest code runs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunControl {
    /// See [`crate::go`].
    pub go: u64,
    /// See [`crate::mode`].
    pub mode: u64,
    /// A kick arrived while the wedge did its own work.
    pub kicked: u64,
    /// Not zero: an interrupt waits for the virtual IF.
    pub pending: u64,
    /// PAUSEs of translated code until one is interpreted; zero for never.
    pub pauses: u64,
    /// Where user code at [`Registers::rip`] goes on: elsewhere if a patch is in its place.
    pub user_rip: u64,
    /// Not zero: user code is run translated, or was when it stopped.
    pub user_translated: u64,
    /// Not zero: user code is 32-bit code, or was when it stopped.
    pub compatibility: u64,
    /// The wedge may do SYSCALL, SYSRET and IRET itself.
    pub fast: u64,
    /// How the wedge may walk the guest's page tables, one of [`walks`].
    pub walks: u64,
    /// Not zero: translations have process-context identifiers.
    pub pcids: u64,
    /// Not zero: the monitor is told of each exit of translated code, even of what the wedge could do.
    pub alone: u64,
    /// At this GVA or beyond a 32-bit kernel has neither translated code nor a large page that is mapped in pieces. For 64-bit kernels
    /// this is the largest number.
    pub plain_from: u64,
    /// Not zero: what a 32-bit kernel maps only for a moment is looked up, without mappings of the host's.
    pub seeks_fleeting: u64,
}

/// How a wedge may walk the guest's page tables: the values of [`RunControl::walks`]. It may only if EFER.NXE and CR0.WP are set, and
/// takes that for granted.
pub mod walks {
    /// Not at all.
    pub const NONE: u64 = 0;
    /// They have four levels.
    pub const FOUR_LEVELS: u64 = 1;
    /// They are a 32-bit guest's, with PAE and global pages. Only to answer faults of translated code.
    pub const PAE: u64 = 2;
}

/// What translated code keeps in memory: spilled registers, constants, the host's state around it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockState {
    /// Guest registers that a translated sequence put aside, in order of use.
    pub spill: [u64; 4],
    /// Where the next entry or indirect jump goes, a host address in the code cache.
    pub jump: u64,
    /// The status flags, DF and ID as translated code starts and ends with them.
    pub host_flags: u64,
    /// What GS base is in translated code: the bias from GVA to HVA.
    pub bias: u64,
    /// What FS base is in translated code, see [`crate::percpu()`].
    pub percpu: u64,
    /// [`crate::NOWHERE`].
    pub nowhere: u64,
    /// The bits of an address that are the index into [`crate::REGIONS`].
    pub region_mask: u64,
    /// Those of them that an address of the user's can have.
    pub user_region_mask: u64,
    /// [`crate::COPY_INDEX`].
    pub copy_index: u64,
    /// `LOOKUP_INDEX`, `LOOKUP_READS` and `LOOKUP_WRITES`.
    pub lookup_masks: [u64; 3],
    /// Stack pointer of whoever entered translated code.
    pub host_rsp: u64,
    /// Top of this is where translated code may push, when RSP is not the guest's.
    pub stack: [u64; 8],
}

/// Why guest code has stopped.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExitState {
    /// A [`crate::BlockExit`]: why translated code exits.
    pub kind: u64,
    /// A [`crate::Reason`]: why the monitor is needed. It decodes both into a [`crate::WedgeExit`].
    pub reason: u64,
    /// Detail of the exit.
    pub info: u64,
    /// Address of the operand of what the wedge is to do, GVA.
    pub operand: u64,
    /// GVA of the instruction behind it.
    pub next: u64,
    /// The host's PC that a signal interrupted in translated code.
    pub pc: u64,
    /// Signal that ended guest code.
    pub signal: u64,
    /// Its `si_code`.
    pub code: u64,
    /// Its `si_addr` or `si_call_addr`.
    pub address: u64,
    /// CPU exception, for signals that are one.
    pub trap: u64,
    /// Its error code.
    pub error: u64,
}

/// What the kernel has set up for system calls and exceptions.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SystemState {
    /// SYSCALL's target.
    pub lstar: u64,
    /// RFLAGS bits it clears.
    pub sfmask: u64,
    /// IA32_STAR.
    pub star: u64,
    /// The GVA of the guest's GDT, as `x86::narrow::wide` gives that of a 32-bit guest.
    pub gdt: u64,
    /// Its limit, bytes minus one.
    pub gdt_limit: u64,
    /// Its descriptors of thread-local segments, as far as the host can have the same; zero for others.
    pub areas: [u64; AREAS],
    /// The guest's IDT: GVA, zero if it is not the usual one.
    pub idt: u64,
    /// The limit of the guest's IDT, bytes minus one.
    pub idt_limit: u64,
    /// [`ExitState::info`] of call-outs of RDMSR if no interrupt from 0x80 to 0x9f is in service; else nothing's.
    pub none_in_service: u64,
    /// IA32_SYSENTER_CS.
    pub sysenter_cs: u64,
    /// IA32_SYSENTER_ESP.
    pub sysenter_esp: u64,
    /// IA32_SYSENTER_EIP.
    pub sysenter_eip: u64,
    /// The guest's 64-bit TSS: GVA, zero if it is not the usual one.
    pub tss: u64,
    /// TSC_AUX.
    pub tsc_aux: u64,
    /// The vector components the guest knows.
    pub vector_mask: u64,
}

/// Page faults and invalidations under way.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagingState {
    /// The page fault last delivered to the guest's kernel: RIP, GVA, access and CR3.
    pub faulted: [u64; 4],
    /// A user page that INVLPG has dropped but that is still mapped: zero before user code runs, and before
    /// kernel code can reach the user's memory.
    pub deferred: u64,
    /// How many faults of a 32-bit kernel there have been in pages whose translations the kernel had dropped by INVLPG.
    pub fleeting: u64,
}

/// What the wedge has done without the monitor.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Entered user code.
    pub user_entries: u64,
    /// System calls taken to translated code.
    pub system_calls: u64,
    /// Returns to user code.
    pub returns: u64,
    /// Interrupt returns inside the kernel.
    pub kernel_returns: u64,
    /// Data segment registers loaded for 32-bit kernels.
    pub segments: u64,
    /// System calls from patched sites.
    pub patched_system_calls: u64,
    /// Address spaces selected.
    pub hand_overs: u64,
    /// Pages mapped.
    pub mapped: u64,
    /// Pages whose mapping was still there, and got its rights back or others.
    pub shown: u64,
    /// Page faults delivered to the guest's kernel.
    pub faults: u64,
    /// INVLPGs done.
    pub invalidations: u64,
    /// CPUIDs of user code answered.
    pub cpuids: u64,
    /// Look-ups filled.
    pub lookups: u64,
    /// Doorbells rung.
    pub rung: u64,
    /// Interrupts of their answers taken.
    pub interrupts: u64,
}

/// What the monitor tells wedges.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MonitorData {
    /// What CPUID has answered.
    pub cpuid: CpuidCache,
    /// What doorbells do.
    pub bells: Bells,
    /// Not zero: programs' code is translated for places ([`crate::place`]).
    pub placed: u64,
    /// What a page of translated user code is verified by: another number whenever all translations are dropped.
    pub code_generation: u64,
}

/// What CPUID answers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cpuid {
    /// EAX and ECX before it.
    pub asked: [u32; 2],
    /// EAX, EBX, ECX and EDX behind it.
    pub registers: [u32; 4],
}

/// Answers of CPUID that are kept.
pub const MAX_CPUID: usize = 64;

/// What CPUID has answered, as far as is known.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CpuidCache {
    /// The answers.
    pub answers: [Cpuid; MAX_CPUID],
    /// How many there are.
    pub count: u64,
}

/// An XSAVE area.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vectors(pub [u8; 832]);

impl Default for Vectors {
    fn default() -> Self {
        Self([0; 832])
    }
}

impl Default for CpuidCache {
    fn default() -> Self {
        Self { answers: [Cpuid::default(); MAX_CPUID], count: 0 }
    }
}

impl Default for MonitorData {
    fn default() -> Self {
        let (cpuid, bells) = Default::default();
        Self { cpuid, bells, placed: 0, code_generation: 0 }
    }
}
