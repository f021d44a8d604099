//! The complete architectural state of one virtual CPU.
//!
//! One explicit `repr(C)` structure, so that it can live in a page shared by the processes that
//! take turns at running it, be saved in a snapshot, and be compared field by field in tests.

use crate::{Segment, TableRegister, control, flags, fpu::FpuState, segment::attr};

/// Indices into [`Vcpu::gpr`], in encoding order.
pub mod reg {
    /// RAX.
    pub const RAX: usize = 0;
    /// RCX.
    pub const RCX: usize = 1;
    /// RDX.
    pub const RDX: usize = 2;
    /// RBX.
    pub const RBX: usize = 3;
    /// RSP.
    pub const RSP: usize = 4;
    /// RBP.
    pub const RBP: usize = 5;
    /// RSI.
    pub const RSI: usize = 6;
    /// RDI.
    pub const RDI: usize = 7;
    /// R8.
    pub const R8: usize = 8;
    /// R11.
    pub const R11: usize = 11;
}

/// Indices into [`Vcpu::seg`], in encoding order.
pub mod seg {
    /// ES.
    pub const ES: usize = 0;
    /// CS.
    pub const CS: usize = 1;
    /// SS.
    pub const SS: usize = 2;
    /// DS.
    pub const DS: usize = 3;
    /// FS.
    pub const FS: usize = 4;
    /// GS.
    pub const GS: usize = 5;
}

/// What the CPU is doing between instructions (SDM 8.10, "activity state").
#[repr(u8)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activity {
    /// Executing instructions.
    #[default]
    Running,
    /// HLT (or MWAIT): until an interrupt.
    Halted,
    /// Triple fault: until reset.
    Shutdown,
    /// An application processor before its start-up IPI.
    WaitForSipi,
}

/// Memory type range registers (SDM 11.11).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mtrr {
    /// IA32_MTRR_DEF_TYPE.
    pub default_type: u64,
    /// The eleven fixed-range registers, by rising address.
    pub fixed: [u64; 11],
    /// Base and mask of each variable range.
    pub variable: [[u64; 2]; Mtrr::VARIABLE],
}

impl Mtrr {
    /// Number of variable ranges.
    pub const VARIABLE: usize = 8;
}

impl Default for Mtrr {
    /// What firmware leaves: enabled, write-back, with the VGA window uncacheable.
    fn default() -> Self {
        let mut fixed = [0x0606_0606_0606_0606; 11];
        fixed[2] = 0;
        Self { default_type: 0xc06, fixed, variable: [[0; 2]; Self::VARIABLE] }
    }
}

/// All registers of one CPU.
#[repr(C, align(64))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vcpu {
    /// General registers, indexed by [`reg`].
    pub gpr: [u64; 16],
    /// Instruction pointer (an offset into CS).
    pub rip: u64,
    /// RFLAGS; bit 1 always set.
    pub rflags: u64,
    /// ES, CS, SS, DS, FS, GS. The current privilege level is the DPL of SS.
    pub seg: [Segment; 6],
    /// Local descriptor table.
    pub ldtr: Segment,
    /// Task state segment.
    pub tr: Segment,
    /// Global descriptor table.
    pub gdtr: TableRegister,
    /// Interrupt descriptor table.
    pub idtr: TableRegister,
    /// CR0, see [`control::cr0`].
    pub cr0: u64,
    /// Page-fault address (GVA).
    pub cr2: u64,
    /// Page-table root (GPA) and PCID.
    pub cr3: u64,
    /// CR4, see [`control::cr4`].
    pub cr4: u64,
    /// Extended control register 0.
    pub xcr0: u64,
    /// EFER, see [`control::efer`].
    pub efer: u64,
    /// SYSCALL selectors.
    pub star: u64,
    /// 64-bit SYSCALL target.
    pub lstar: u64,
    /// Compatibility-mode SYSCALL target.
    pub cstar: u64,
    /// RFLAGS bits SYSCALL clears.
    pub sfmask: u64,
    /// The GS base SWAPGS exchanges.
    pub kernel_gs_base: u64,
    /// SYSENTER CS.
    pub sysenter_cs: u64,
    /// SYSENTER ESP.
    pub sysenter_esp: u64,
    /// SYSENTER EIP.
    pub sysenter_eip: u64,
    /// Page attribute table.
    pub pat: u64,
    /// TSC_AUX, what RDTSCP and RDPID return.
    pub tsc_aux: u64,
    /// IA32_MISC_ENABLE.
    pub misc_enable: u64,
    /// IA32_SPEC_CTRL as last written.
    pub spec_ctrl: u64,
    /// IA32_TSC_ADJUST: what RDTSC adds to the machine's time-stamp counter.
    pub tsc_adjust: u64,
    /// Memory types by physical range; stored for the guest, without effect.
    pub mtrr: Mtrr,
    /// DR0..DR7 (4 and 5 unused).
    pub dr: [u64; 8],
    /// Activity state.
    pub activity: Activity,
    /// Interrupts are blocked for one instruction (after STI or a load of SS).
    pub interrupt_shadow: bool,
    /// NMIs are blocked until IRET.
    pub nmi_blocked: bool,
    #[doc(hidden)]
    pub pad: [u8; 5],
    /// Vector and floating-point state.
    pub fpu: FpuState,
}

impl Default for Vcpu {
    /// The state after INIT, but for the CS of the reset vector: every boot protocol, and a start-up IPI, sets what
    /// it needs on top of this.
    fn default() -> Self {
        let data = Segment { selector: 0, attr: attr::P | attr::S | 3, limit: 0xffff, base: 0 };
        let mut segs = [data; 6];
        segs[seg::CS].attr |= attr::CODE;
        Self {
            gpr: [0; 16],
            rip: 0,
            rflags: flags::FIXED,
            seg: segs,
            ldtr: Segment { attr: attr::P | 2, limit: 0xffff, ..Segment::default() },
            tr: Segment { attr: attr::P | 11, limit: 0xffff, ..Segment::default() },
            gdtr: TableRegister::default(),
            idtr: TableRegister::default(),
            cr0: control::cr0::ET,
            cr2: 0,
            cr3: 0,
            cr4: 0,
            xcr0: 1,
            efer: 0,
            star: 0,
            lstar: 0,
            cstar: 0,
            sfmask: 0,
            kernel_gs_base: 0,
            sysenter_cs: 0,
            sysenter_esp: 0,
            sysenter_eip: 0,
            pat: 0x0007_0406_0007_0406,
            tsc_aux: 0,
            misc_enable: 1,
            spec_ctrl: 0,
            tsc_adjust: 0,
            mtrr: Mtrr::default(),
            dr: [0, 0, 0, 0, 0, 0, 0xffff_0ff0, 0x400],
            activity: Activity::Running,
            interrupt_shadow: false,
            nmi_blocked: false,
            pad: [0; 5],
            fpu: FpuState::default(),
        }
    }
}

impl Vcpu {
    /// An application processor as it waits for its start-up IPI.
    pub fn before_start_up() -> Self {
        let cr0 = control::cr0::ET | control::cr0::CD | control::cr0::NW;
        let idtr = TableRegister { limit: 0xffff, ..TableRegister::default() };
        Self { cr0, idtr, activity: Activity::WaitForSipi, ..Self::default() }
    }

    /// Current privilege level, 0 to 3.
    #[inline]
    pub const fn cpl(&self) -> u8 {
        self.seg[seg::SS].dpl()
    }
    /// Long mode is active (64-bit or compatibility).
    #[inline]
    pub const fn long_mode(&self) -> bool {
        self.efer & control::efer::LMA != 0
    }
    /// The current code segment is 64-bit.
    #[inline]
    pub const fn is_64bit(&self) -> bool {
        self.long_mode() && self.seg[seg::CS].attr & attr::L != 0
    }
    /// Default code size in bits: 16, 32 or 64.
    #[inline]
    pub const fn code_bits(&self) -> u32 {
        if self.is_64bit() {
            64
        } else if self.seg[seg::CS].attr & attr::DB != 0 {
            32
        } else {
            16
        }
    }
    /// Maskable interrupts can be taken now.
    #[inline]
    pub const fn interruptible(&self) -> bool {
        self.rflags & flags::IF != 0 && !self.interrupt_shadow
    }
}
