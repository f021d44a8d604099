//! Between the architectural state and the vCPU page that guest code runs with.
//!
//! What comes back is believed as far as guest code could have made it itself: any registers, either
//! privilege level, and the flat segments that SYSCALL, SYSRET and IRET load.

use engine::Board;
use wedge_abi::{AREAS, Base, NOWHERE, VcpuPage, area_of, walks};
use x86::{
    Segment, Vcpu,
    control::{cr0, cr4, efer},
    flags,
    fpu::{FpuState, MXCSR_INIT, xstate},
    narrow::{USER_CS_32, USER_CS_64, USER_DS, own_segment, wide},
    reg, seg,
    segment::{attr, kind},
};
use x86_interp::Cpu;

/// Flags user code can change without the kernel.
const USER_FLAGS: u64 = flags::STATUS | flags::TF | flags::DF | flags::NT | flags::AC | flags::ID;
/// Flags translated code keeps in the host's RFLAGS.
const IN_HOST: u64 = flags::STATUS | flags::DF | flags::ID;
/// Last byte of the page-fault gate.
const IDT_USED: u16 = 14 * 16 + 15;
/// Last byte of RSP0.
const TSS_USED: u32 = 11;
/// In a selector: of the LDT.
const LOCAL: u16 = 4;
/// What a data segment register can hold on the host as well as in the guest: nothing, Linux's data
/// segment, and its code segments.
const HOST_SELECTORS: [u16; 7] = [0, 1, 2, 3, 0x2b, 0x23, 0x33];
/// The data segment registers but SS.
const DATA: [usize; 4] = [seg::DS, seg::ES, seg::FS, seg::GS];
/// DR7: some breakpoint is enabled.
const BREAKPOINTS: u64 = 0xff;

/// What to run with.
pub fn load(vcpu: &Vcpu, base: Base, page: &mut VcpuPage) {
    page.regs.gpr = vcpu.gpr;
    page.regs.rip = vcpu.rip;
    page.regs.cpl = vcpu.cpl().into();
    page.regs.rflags = vcpu.rflags & USER_FLAGS | flags::IF | flags::FIXED;
    page.block.host_flags = vcpu.rflags & IN_HOST;
    page.regs.interrupt_flag = vcpu.rflags & flags::IF;
    page.regs.ac = vcpu.rflags & flags::AC;
    page.regs.fs_base = vcpu.seg[seg::FS].base;
    page.regs.gs_base = vcpu.seg[seg::GS].base;
    page.regs.kernel_gs_base = vcpu.kernel_gs_base;
    page.block.bias = base.bias();
    page.block.percpu = wedge_abi::percpu(page.regs.gs_base, page.block.bias);
    if !vcpu.long_mode() {
        page.block.bias = base.narrow_bias();
        page.block.percpu = narrow_own(vcpu);
    }
    page.run.compatibility = (vcpu.cpl() == 3 && !vcpu.is_64bit()).into();
    (page.run.alone, page.run.user_translated) = (0, 0);
    (page.system.sysenter_cs, page.system.sysenter_esp) = (vcpu.sysenter_cs, vcpu.sysenter_esp);
    (page.system.sysenter_eip, page.system.idt_limit) = (vcpu.sysenter_eip, vcpu.idtr.limit.into());
    (page.system.lstar, page.system.sfmask, page.system.star) =
        (vcpu.lstar, vcpu.sfmask, vcpu.star);
    let known = |gva: u64| if vcpu.long_mode() { gva } else { wide(gva) };
    page.system.gdt = known(vcpu.gdtr.base);
    page.system.gdt_limit = vcpu.gdtr.limit.into();
    page.system.tsc_aux = vcpu.tsc_aux & 0xffff_ffff;
    (page.regs.cr2, page.regs.cr3) = (vcpu.cr2, vcpu.cr3);
    page.run.walks = walks(vcpu);
    page.run.pcids = vcpu.cr4 & cr4::PCIDE;
    page.system.idt = if vcpu.idtr.limit >= IDT_USED { known(vcpu.idtr.base) } else { 0 };
    page.system.tss = if vcpu.tr.limit >= TSS_USED { known(vcpu.tr.base) } else { 0 };
    selectors(vcpu, page);
    load_vectors(&vcpu.fpu, &mut page.vectors.0);
}

/// The base of the segment that the code of a 32-bit guest finds its CPU's or its thread's own memory by.
fn narrow_own(vcpu: &Vcpu) -> u64 {
    let own = &vcpu.seg[own_segment(vcpu.cpl())];
    if own.present() { own.base & 0xffff_ffff } else { NOWHERE }
}

fn selectors(vcpu: &Vcpu, page: &mut VcpuPage) {
    let selector = |segment: usize| u64::from(vcpu.seg[segment].selector);
    (page.regs.es, page.regs.cs, page.regs.ss) =
        (selector(seg::ES), selector(seg::CS), selector(seg::SS));
    (page.regs.ds, page.regs.fs, page.regs.gs) =
        (selector(seg::DS), selector(seg::FS), selector(seg::GS));
}

/// The wedge may go between user and kernel code by itself; it runs `narrow` user code, too, or does not.
pub fn may_cross(vcpu: &Vcpu, narrow: bool) -> bool {
    vcpu.efer & efer::SCE != 0
        && vcpu.cr0 & (cr0::TS | cr0::EM) == 0
        && vcpu.cr4 & cr4::TSD == 0
        && vcpu.dr[7] & BREAKPOINTS == 0
        && vcpu.rflags & flags::IOPL == 0
        && !vcpu.nmi_blocked
        && plain_data(vcpu)
        && (narrow || !has_loaded_area(vcpu))
}

/// The wedge may go between a 32-bit kernel and its programs by itself.
pub fn may_cross_narrow(vcpu: &Vcpu) -> bool {
    !vcpu.long_mode()
        && vcpu.cr0 & (cr0::TS | cr0::EM) == 0
        && vcpu.cr4 & (cr4::OSFXSR | cr4::TSD) == cr4::OSFXSR
        && vcpu.dr[7] & BREAKPOINTS == 0
        && vcpu.rflags & flags::IOPL == 0
        && !vcpu.nmi_blocked
        && vcpu.tr.attr & (attr::P | attr::S | attr::TYPE) == attr::P | u16::from(kind::TSS_BUSY)
}

/// How the wedge can walk the guest's page tables.
fn walks(vcpu: &Vcpu) -> u64 {
    const PAE: u64 = cr4::PAE | cr4::PGE;
    let protects = vcpu.efer & efer::NXE != 0 && vcpu.cr0 & cr0::WP != 0;
    match protects {
        true if vcpu.long_mode() => walks::FOUR_LEVELS,
        true if vcpu.cr0 & cr0::PG != 0 && vcpu.cr4 & PAE == PAE => walks::PAE,
        _ => walks::NONE,
    }
}

/// User code with this state, and with these thread-local segments, can run on the CPU: what the CPU would show it of its segments is what
/// the guest has put there, and it may read the counter, as it may on the host.
pub fn runs_directly(vcpu: &Vcpu, areas: &[u64; AREAS]) -> bool {
    let table = |segment: usize| vcpu.seg[segment].selector & LOCAL == 0;
    let there = |segment: &usize| match area_of(vcpu.seg[*segment].selector.into()) {
        Some(at) => areas[at] != 0,
        None => true,
    };
    vcpu.cr4 & cr4::TSD == 0
        && table(seg::CS)
        && table(seg::SS)
        && area_of(vcpu.seg[seg::SS].selector.into()).is_none()
        && plain_data(vcpu)
        && DATA.iter().all(there)
}

/// User code with this state is 32-bit code, or has loaded a thread-local segment.
pub fn has_areas(vcpu: &Vcpu) -> bool {
    !vcpu.is_64bit() || has_loaded_area(vcpu)
}

fn has_loaded_area(vcpu: &Vcpu) -> bool {
    DATA.iter().any(|segment| area_of(vcpu.seg[*segment].selector.into()).is_some())
}

/// The data segment registers hold what the host lets them hold.
fn plain_data(vcpu: &Vcpu) -> bool {
    DATA.iter().all(|segment| {
        let selector = vcpu.seg[*segment].selector;
        HOST_SELECTORS.contains(&selector) || area_of(selector.into()).is_some()
    })
}

/// What is to run is user code, translated: its addresses are the host's, and the host's FS base is its own.
pub fn load_translated_user(vcpu: &Vcpu, page: &mut VcpuPage) {
    let own = if vcpu.long_mode() { page.regs.fs_base } else { narrow_own(vcpu) };
    (page.block.bias, page.block.percpu, page.run.user_translated) = (0, own, 1);
}

/// It has run, and its flags are where translated code has them.
pub fn from_translated_user(page: &mut VcpuPage) {
    page.regs.rflags = page.block.host_flags & IN_HOST | flags::IF | flags::FIXED;
    page.run.user_translated = 0;
}

/// User code that could run directly can be translated: its flags are such as translated code keeps.
pub fn can_be_translated(vcpu: &Vcpu) -> bool {
    vcpu.rflags & !(IN_HOST | flags::IF | flags::FIXED) == 0
}

/// User code can be translated with look-ups. With DF set it cannot: checks of string instructions look upwards.
pub fn can_look_up(vcpu: &Vcpu) -> bool {
    can_be_translated(vcpu) && vcpu.rflags & flags::DF == 0
}

/// Nothing but user code has run: without protection keys it can write the vCPU page, and is believed no more
/// than user code could have done.
pub fn only_user(page: &mut VcpuPage, vcpu: &Vcpu) {
    page.regs.cpl = 3;
    page.regs.cs = match (page.run.compatibility == 0, vcpu.is_64bit()) {
        (true, true) => vcpu.seg[seg::CS].selector.into(),
        (true, false) => USER_CS_64.into(),
        (false, _) => USER_CS_32.into(),
    };
    if area_of(page.regs.ss).is_none() {
        page.regs.ss = vcpu.seg[seg::SS].selector.into();
    }
    (page.regs.kernel_gs_base, page.regs.cr2) = (vcpu.kernel_gs_base, vcpu.cr2);
}

/// What it came back with.
pub fn store(page: &VcpuPage, cpu: &mut Cpu<Board>, board: &mut Board) {
    let user = page.regs.cpl == 3;
    store_segments(page, cpu, if user { 3 } else { 0 });
    if user && area_of(page.regs.ss).is_some() {
        cpu.adopt_stack_selector(board, page.regs.ss as u16);
    }
    for (segment, selector) in [
        (seg::DS, page.regs.ds),
        (seg::ES, page.regs.es),
        (seg::FS, page.regs.fs),
        (seg::GS, page.regs.gs),
    ] {
        cpu.adopt_selector(board, segment, selector as u16);
    }
    let vcpu = &mut cpu.vcpu;
    match vcpu.long_mode() {
        true => vcpu.gpr = page.regs.gpr,
        // The other registers are the translation's.
        false => vcpu.gpr[..8].copy_from_slice(&page.regs.gpr[..8]),
    }
    vcpu.rip = page.regs.rip;
    vcpu.cr2 = page.regs.cr2;
    vcpu.rflags = flags::FIXED
        | if user {
            page.regs.rflags & USER_FLAGS | vcpu.rflags & flags::IOPL | flags::IF
        } else {
            page.block.host_flags & IN_HOST
                | page.regs.interrupt_flag & flags::IF
                | page.regs.ac & flags::AC
        };
    vcpu.seg[seg::FS].base = page.regs.fs_base;
    vcpu.seg[seg::GS].base = page.regs.gs_base;
    vcpu.kernel_gs_base = page.regs.kernel_gs_base;
    vcpu.interrupt_shadow = false;
    store_vectors(&page.vectors.0, &mut vcpu.fpu);
    cpu.came_back();
}

/// CS and SS, if the wedge has crossed between user and kernel code.
fn store_segments(page: &VcpuPage, cpu: &mut Cpu<Board>, cpl: u8) {
    let loaded = cpl == 3 && area_of(page.regs.ss).is_some();
    let (cs, ss) = (page.regs.cs as u16, if loaded { USER_DS } else { page.regs.ss as u16 });
    let v = &cpu.vcpu;
    let same = v.cpl() == cpl && v.seg[seg::CS].selector == cs && v.seg[seg::SS].selector == ss;
    if same {
        return;
    }
    let wide = v.long_mode() && (page.run.compatibility == 0 || cpl == 0);
    cpu.set_flat(cs, ss, cpl, wide);
    if ss & !3 == 0 {
        cpu.vcpu.seg[seg::SS] = Segment::null(ss, cpl);
    }
}

fn load_vectors(page: &FpuState, v: &mut [u8; 832]) {
    v[0..2].copy_from_slice(&page.fcw.to_le_bytes());
    v[2..4].copy_from_slice(&page.fsw.to_le_bytes());
    v[4..6].copy_from_slice(&[page.ftw, 0]);
    v[6..8].copy_from_slice(&page.fop.to_le_bytes());
    v[8..16].copy_from_slice(&page.fip.to_le_bytes());
    v[16..24].copy_from_slice(&page.fdp.to_le_bytes());
    v[24..28].copy_from_slice(&page.mxcsr.to_le_bytes());
    v[32..160].copy_from_slice(page.st.as_flattened());
    v[160..416].copy_from_slice(page.xmm.as_flattened());
    v[512..520].copy_from_slice(&xstate::SUPPORTED.to_le_bytes());
    v[520..576].fill(0);
    v[576..832].copy_from_slice(page.ymm_high.as_flattened());
}

/// Components the CPU did not store are in their initial state.
fn store_vectors(v: &[u8; 832], page: &mut FpuState) {
    let present = u64::from_le_bytes(part(v, 512));
    let initial = FpuState::default();
    if present & xstate::X87 != 0 {
        page.fcw = u16::from_le_bytes(part(v, 0));
        page.fsw = u16::from_le_bytes(part(v, 2));
        page.ftw = v[4];
        page.fop = u16::from_le_bytes(part(v, 6));
        page.fip = u64::from_le_bytes(part(v, 8));
        page.fdp = u64::from_le_bytes(part(v, 16));
        fill(&mut page.st, &v[32..160]);
    } else {
        (page.fcw, page.fsw, page.ftw, page.fop) =
            (initial.fcw, initial.fsw, initial.ftw, initial.fop);
        (page.fip, page.fdp, page.st) = (0, 0, initial.st);
    }
    page.mxcsr = u32::from_le_bytes(part(v, 24));
    if page.mxcsr == 0 && present & (xstate::SSE | xstate::AVX) == 0 {
        page.mxcsr = MXCSR_INIT;
    }
    match present & xstate::SSE {
        0 => page.xmm = initial.xmm,
        _ => fill(&mut page.xmm, &v[160..416]),
    }
    match present & xstate::AVX {
        0 => page.ymm_high = initial.ymm_high,
        _ => fill(&mut page.ymm_high, &v[576..832]),
    }
    page.xstate_bv = xstate::SUPPORTED;
}

fn part<const N: usize>(bytes: &[u8; 832], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

fn fill<const N: usize>(registers: &mut [[u8; 16]; N], bytes: &[u8]) {
    for (register, value) in registers.iter_mut().zip(bytes.chunks_exact(16)) {
        register.copy_from_slice(value);
    }
}

/// Rewinds over an instruction that has pushed a return address (a call that went wrong).
pub fn push_back(vcpu: &mut Vcpu, rip: u64) {
    vcpu.gpr[reg::RSP] = vcpu.gpr[reg::RSP].wrapping_sub(8);
    vcpu.rip = rip;
}
