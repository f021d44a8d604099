//! A machine for this crate's tests: RAM, page tables and one CPU, without devices.

use crate::{Modes, Options, Scattered, Switches, User};
use engine::{Board, BoardParts, LocalApic, VcpuRequests};
use host_fake::{FakeClock, FakeEntropy};
use iced_x86::{IcedError, code_asm::CodeAssembler};
use ram::Ram;
use std::sync::{Arc, Mutex};
use x86::{
    Fault, Segment, Vcpu,
    control::{cr0, cr4, efer},
    cpuid::{CpuidResult, Model, Settings},
    fpu::xstate,
    paging::{ADDRESS, P, RW, US},
    reg, seg,
    segment::attr,
};
use x86_interp::GuestRam;

/// How code is run where a test says nothing else.
pub const MODES: Modes = Modes { user: User::Direct, kernel_translated: true, options: OPTIONS };
/// The same, as to options.
pub const OPTIONS: Options = Options {
    lock_step: None,
    user_dispatch: false,
    unpatched: false,
    traced: false,
    unmap_flushed: false,
    scattered: Scattered::Lookup,
    young_directly: false,
    fixed_programs: false,
    copies_apart: false,
    interpret_narrow: false,
    interpret_narrow_guests: false,
    map_fleeting: false,
    translations_apart: false,
    search_jumps: false,
    most_mappings: None,
    strict: false,
    leave_bells: false,
    switches: Switches::Counted,
    without_keys: false,
};
/// The same, with user code in processes of its own, as where there are no keys.
pub const STRICT: Modes =
    Modes { options: Options { strict: true, without_keys: true, ..OPTIONS }, ..MODES };
/// GPA of the uppermost page table; the others follow.
const ROOT: u64 = 0x1000;
const PAGE: u64 = 4096;

/// A local APIC from which nothing comes.
#[derive(Default)]
pub struct QuietApic {
    /// What [`LocalApic::direct`] says.
    pub direct: Option<(u64, u8)>,
    /// Vectors that the vCPU has taken by itself.
    pub took: Mutex<Vec<u8>>,
}

impl LocalApic for QuietApic {
    fn direct(&self) -> Option<(u64, u8)> {
        self.direct
    }
    fn took(&self, vector: u8) {
        self.took.lock().expect("no panic").push(vector);
    }
    fn vector_of(&self, (_, data): (u64, u32)) -> Option<u8> {
        Some(data as u8)
    }
    fn pending(&self) -> u32 {
        0
    }
    fn acknowledge(&self) -> Option<u8> {
        None
    }
    fn take_nmi(&self) -> bool {
        false
    }
    fn nmi_ended(&self) {}
    fn take_init(&self) -> bool {
        false
    }
    fn take_start_up(&self) -> Option<u8> {
        None
    }
    fn enabled(&self) -> bool {
        false
    }
    fn cr8(&self) -> u8 {
        0
    }
    fn set_cr8(&self, _: u8) {}
    fn msr_read(&self, _: u32) -> Result<u64, Fault> {
        Err(Fault::gp(0))
    }
    fn msr_write(&self, _: u32, _: u64) -> Result<(), Fault> {
        Err(Fault::gp(0))
    }
    fn mmio_read(&self, _: u64, _: &mut [u8]) -> bool {
        false
    }
    fn mmio_write(&self, _: u64, _: &[u8]) -> bool {
        false
    }
}

/// A board without devices.
pub fn board(ram: Ram, requests: Arc<VcpuRequests>) -> Board {
    board_with(ram, requests, Arc::new(QuietApic::default()), bus::Bus::new())
}

/// A board with this local APIC, and these devices.
pub fn board_with(
    ram: Ram,
    requests: Arc<VcpuRequests>,
    apic: Arc<dyn LocalApic>,
    mmio: bus::Bus,
) -> Board {
    Board::new(BoardParts {
        ram,
        ports: bus::Bus::new(),
        mmio,
        apic,
        apic_id: 0,
        cpuid: Arc::new(Model::new(
            |_, _| CpuidResult::default(),
            Settings { tsc_hz: 1_000_000_000, cpus: 1, kvm_features: 0 },
        )),
        clock: Arc::new(FakeClock::default()),
        entropy: Arc::new(FakeEntropy::new(1)),
        vector_unit: Box::new(native::HostVectorUnit::new().expect("executable memory")),
        requests,
    })
}

/// Page tables for pages: their GVA, their GPA, and [`US`] if they are the user's.
pub fn map(ram: &Ram, pages: &[((u64, u64), u64)]) {
    let mut last = ROOT;
    for ((gva, gpa), rights) in pages {
        let mut table = ROOT;
        for shift in [39, 30, 21] {
            let slot = table + (gva >> shift & 0x1ff) * 8;
            if ram.load64(slot) == 0 {
                last += PAGE;
                ram.store64(slot, last | P | RW | US);
            }
            table = ram.load64(slot) & ADDRESS;
        }
        ram.store64(table + (gva >> 12 & 0x1ff) * 8, gpa | P | RW | rights);
    }
}

/// A kernel at this RIP with this stack, over the page tables of [`map`].
pub fn kernel_state(rip: u64, stack: u64) -> Vcpu {
    let mut v = Vcpu {
        rip,
        cr0: cr0::PE | cr0::MP | cr0::ET | cr0::NE | cr0::WP | cr0::AM | cr0::PG,
        cr3: ROOT,
        cr4: cr4::PAE | cr4::OSFXSR | cr4::OSXMMEXCPT | cr4::OSXSAVE | cr4::FSGSBASE | cr4::SMAP,
        efer: efer::SCE | efer::LME | efer::LMA | efer::NXE,
        xcr0: xstate::SUPPORTED,
        ..Vcpu::default()
    };
    v.gpr[reg::RSP] = stack;
    v.seg[seg::CS].attr |= attr::L;
    for segment in [seg::CS, seg::SS] {
        v.seg[segment].attr &= !(3 << attr::DPL_SHIFT);
    }
    v
}

/// A 32-bit kernel at this RIP, with PAE paging over this top page table (GPA), and flat segments of these selectors: for code and for data.
pub fn narrow_kernel_state(rip: u64, top: u64, [cs, ds]: [u16; 2]) -> Vcpu {
    let flat = |selector: u16, attr: u16| Segment { selector, attr, limit: u32::MAX, base: 0 };
    let data = attr::P | attr::S | attr::G | attr::DB | attr::RW | attr::ACCESSED;
    let mut seg = [flat(ds, data); 6];
    seg[seg::CS] = flat(cs, data | attr::CODE);
    Vcpu {
        rip,
        cr0: cr0::PE | cr0::MP | cr0::ET | cr0::NE | cr0::WP | cr0::PG,
        cr3: top,
        cr4: cr4::PAE | cr4::PGE | cr4::OSFXSR,
        efer: efer::NXE,
        xcr0: xstate::SUPPORTED,
        seg,
        ..Vcpu::default()
    }
}

/// 32-bit code that is to lie at a GVA.
pub fn narrow_code(
    at: u64,
    emit: impl FnOnce(&mut CodeAssembler) -> Result<(), IcedError>,
) -> Vec<u8> {
    let mut a = CodeAssembler::new(32).expect("32 bits");
    emit(&mut a).expect("encodable");
    a.assemble(at).expect("encodable")
}
