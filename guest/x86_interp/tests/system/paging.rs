//! Page faults of every kind, and when cached translations go.

use crate::lab::*;
use iced_x86::code_asm::*;
use x86::{
    control::{cr0, cr4},
    exception::pf,
    flags, reg, vector,
};
use x86_interp::GuestRam;

const NX: u64 = 1 << 63;

#[derive(Clone, Copy, Debug)]
enum Kind {
    Read,
    Write,
    Fetch,
}

/// Touches PAGE with the given entry; the error code, or `None` if it is allowed.
fn touch(user: bool, kind: Kind, entry: u64, prepare: impl FnOnce(&mut Lab)) -> Option<u64> {
    let mut lab = Lab::new();
    lab.sys.ram.store8(PAGE, 0xf4); // a HLT
    let write = |a: &mut CodeAssembler| match kind {
        Kind::Read => a.mov(al, byte_ptr(PAGE)),
        Kind::Write => a.mov(byte_ptr(PAGE), cl),
        Kind::Fetch => a.mov(rax, PAGE).and_then(|()| a.jmp(rax)),
    };
    lab.v().gpr[reg::RCX] = 0xf4;
    if user {
        lab.user(write)
    } else {
        lab.kernel(write)
    };
    lab.page(PAGE, entry);
    prepare(&mut lab);
    lab.cpu.state_changed();
    lab.run();
    let halted = lab.v().rip - 1;
    if halted != HANDLERS + u64::from(vector::PF) * 16 {
        return None;
    }
    assert_eq!(lab.v().cr2, PAGE);
    Some(lab.words(1)[0])
}

fn expect(user: bool, kind: Kind, entry: u64, code: Option<u32>) {
    let found = touch(user, kind, entry, |_| {});
    assert_eq!(found, code.map(u64::from), "user {user} {kind:?} {entry:#x}");
}

#[test]
fn user_accesses() {
    use Kind::*;
    let (p, w, u, f) = (pf::PRESENT, pf::WRITE, pf::USER, pf::FETCH);
    expect(true, Read, 0, Some(u));
    expect(true, Write, 0, Some(u | w));
    expect(true, Fetch, 0, Some(u | f));
    expect(true, Read, PAGE | 3, Some(u | p));
    expect(true, Read, PAGE | 5, None);
    expect(true, Write, PAGE | 5, Some(u | w | p));
    expect(true, Write, PAGE | 7, None);
    expect(true, Fetch, PAGE | 7 | NX, Some(u | f | p));
    expect(true, Read, PAGE | 7 | NX, None);
    expect(true, Read, PAGE | 7 | 1 << 50, Some(u | p | pf::RESERVED));
}

#[test]
fn supervisor_accesses() {
    use Kind::*;
    let (p, w, f) = (pf::PRESENT, pf::WRITE, pf::FETCH);
    expect(false, Read, 0, Some(0));
    expect(false, Write, PAGE | 1, Some(w | p));
    expect(false, Write, PAGE | 5, Some(w | p));
    expect(false, Fetch, PAGE | 1 | NX, Some(f | p));
    expect(false, Fetch, PAGE | 7, None);
    let lenient = touch(false, Write, PAGE | 1, |lab| lab.v().cr0 &= !cr0::WP);
    assert_eq!(lenient, None, "without CR0.WP");
}

#[test]
fn smep_and_smap() {
    use Kind::*;
    let set = |bits: u64| move |lab: &mut Lab| lab.v().cr4 |= bits;
    let fetch = touch(false, Fetch, PAGE | 7, set(cr4::SMEP));
    assert_eq!(fetch, Some((pf::PRESENT | pf::FETCH).into()));
    assert_eq!(touch(false, Fetch, PAGE | 3, set(cr4::SMEP)), None);
    assert_eq!(touch(false, Read, PAGE | 7, set(cr4::SMAP)), Some(pf::PRESENT.into()));
    let write = touch(false, Write, PAGE | 7, set(cr4::SMAP));
    assert_eq!(write, Some((pf::PRESENT | pf::WRITE).into()));
    let allowed = touch(false, Read, PAGE | 7, |lab| {
        lab.v().cr4 |= cr4::SMAP;
        lab.v().rflags |= flags::AC;
    });
    assert_eq!(allowed, None, "RFLAGS.AC overrides");
    assert_eq!(touch(true, Read, PAGE | 7, set(cr4::SMAP | cr4::SMEP)), None);
}

#[test]
fn stac_and_clac_open_and_close() {
    let mut lab = Lab::new();
    lab.v().cr4 |= cr4::SMAP;
    lab.kernel(|a| {
        a.stac()?;
        a.mov(cl, byte_ptr(PAGE))?;
        a.clac()?;
        a.mov(cl, byte_ptr(PAGE))
    });
    lab.faults(vector::PF, pf::PRESENT.into());
    assert_eq!(lab.coded_frame().1.rip, KERNEL + 3 + 7 + 3);
    let mut lab = Lab::new();
    lab.user(|a| a.stac());
    assert_eq!(lab.lands(), vector::UD);
}

#[test]
fn implicit_accesses_ignore_ac_and_the_level() {
    // The GDT lies in a supervisor page; a user program loads DS all the same.
    let mut lab = Lab::new();
    lab.v().cr4 |= cr4::SMAP;
    lab.user(|a| a.mov(eax, 0x23).and_then(|()| a.mov(ds, eax)).and_then(|()| a.int(0x40)));
    lab.gate(0x40, INTERRUPT_GATE | DPL3, 0);
    assert_eq!(lab.lands(), 0x40);
    // And under SMAP a GDT in a user page is out of reach.
    let mut lab = Lab::new();
    lab.v().cr4 |= cr4::SMAP;
    lab.v().gdtr.base = PAGE;
    lab.v().rflags |= flags::AC;
    lab.v().idtr.limit = 0;
    lab.kernel(|a| a.mov(eax, 0x10).and_then(|()| a.mov(ds, eax)));
    lab.run();
    assert_eq!(lab.v().cr2, PAGE + 0x10);
}

#[test]
fn accessed_and_dirty_bits() {
    let mut lab = Lab::new();
    let entry = PT + (PAGE - USER) / 4096 * 8;
    lab.kernel(|a| {
        a.mov(al, byte_ptr(PAGE))?;
        a.mov(rbx, qword_ptr(entry))?;
        a.mov(byte_ptr(PAGE), al)?;
        a.mov(rcx, qword_ptr(entry))
    });
    lab.finishes();
    assert_eq!(lab.gpr(reg::RBX) & 0x60, 0x20);
    assert_eq!(lab.gpr(reg::RCX) & 0x60, 0x60);
}

/// Reads PAGE, remaps it to the next page, runs `flush`, reads again.
fn remapped(flush: impl FnOnce(&mut CodeAssembler) -> Result<(), iced_x86::IcedError>) -> u64 {
    let mut lab = Lab::new();
    lab.sys.ram.store8(PAGE, 1);
    lab.sys.ram.store8(PAGE + 0x1000, 2);
    let entry = PT + (PAGE - USER) / 4096 * 8;
    lab.v().gpr[reg::RBX] = PAGE;
    lab.kernel(|a| {
        a.movzx(eax, byte_ptr(rbx))?;
        a.mov(rcx, PAGE + 0x1000 + 7)?;
        a.mov(qword_ptr(entry), rcx)?;
        flush(a)?;
        a.movzx(edx, byte_ptr(rbx))
    });
    lab.finishes();
    lab.gpr(reg::RDX)
}

#[test]
fn flushes_take_effect() {
    assert_eq!(remapped(|a| a.invlpg(byte_ptr(rbx))), 2);
    assert_eq!(remapped(|a| a.mov(rsi, cr3).and_then(|()| a.mov(cr3, rsi))), 2);
    let toggle = |a: &mut CodeAssembler| {
        a.mov(rsi, cr4)?;
        a.xor(rsi, cr4::PGE as i32)?;
        a.mov(cr4, rsi)
    };
    assert_eq!(remapped(toggle), 2);
    let descriptor = PAGE + 0x2000;
    for kind in 0..4u64 {
        let invpcid = |a: &mut CodeAssembler| {
            a.mov(qword_ptr(descriptor), 0)?;
            a.mov(qword_ptr(descriptor + 8), rbx)?;
            a.mov(rsi, kind)?;
            a.invpcid(rsi, xmmword_ptr(descriptor))
        };
        assert_eq!(remapped(invpcid), 2, "INVPCID type {kind}");
    }
}

#[test]
fn invlpg_drops_every_piece_of_a_large_page() {
    let mut lab = Lab::new();
    lab.sys.ram.store8(0x40_3000, 1);
    lab.sys.ram.store8(0xa0_3000, 2);
    lab.kernel(|a| {
        a.mov(al, byte_ptr(0x40_3000))?;
        a.mov(ecx, 0xa0_0087u32)?;
        a.mov(qword_ptr(PD + 16), rcx)?;
        a.invlpg(byte_ptr(0x40_0000))?;
        a.movzx(edx, byte_ptr(0x40_3000))
    });
    lab.finishes();
    assert_eq!(lab.gpr(reg::RDX), 2);
}

#[test]
fn invpcid_checks_its_operands() {
    for (kind, low, address, cr4_bits) in [
        (4u64, 0, 0, cr4::PCIDE),
        (0, 0, 1 << 63, cr4::PCIDE),
        (1, 1 << 12, 0, cr4::PCIDE),
        (1, 5, 0, 0),
    ] {
        let mut lab = Lab::new();
        lab.v().cr4 |= cr4_bits;
        lab.sys.ram.store64(PAGE, low);
        lab.sys.ram.store64(PAGE + 8, address);
        lab.kernel(|a| a.mov(rsi, kind).and_then(|()| a.invpcid(rsi, xmmword_ptr(PAGE))));
        lab.faults(vector::GP, 0);
    }
}

#[test]
fn alignment_checks_are_for_users_only() {
    let mut lab = Lab::new();
    lab.v().cr0 |= cr0::AM;
    lab.v().rflags |= flags::AC;
    lab.user(|a| a.mov(ecx, dword_ptr(PAGE)).and_then(|()| a.mov(ecx, dword_ptr(PAGE + 1))));
    lab.faults(vector::AC, 0);
    assert_eq!(lab.coded_frame().1.rip, USER + 7);
    let mut lab = Lab::new();
    lab.v().cr0 |= cr0::AM;
    lab.v().rflags |= flags::AC;
    lab.kernel(|a| a.mov(eax, dword_ptr(PAGE + 1)));
    lab.finishes();
}

#[test]
fn a_store_across_pages_is_all_or_nothing() {
    let mut lab = Lab::new();
    lab.page(PAGE + 0x1000, 0);
    lab.sys.ram.store32(PAGE + 0xffc, 0x1111_1111);
    lab.kernel(|a| a.mov(qword_ptr(PAGE + 0xffc), rax));
    lab.faults(vector::PF, pf::WRITE.into());
    assert_eq!(lab.v().cr2, PAGE + 0x1000, "the page at fault");
    assert_eq!(lab.sys.ram.load32(PAGE + 0xffc), 0x1111_1111);
}

/// Whoever answers for what is not RAM may drop it; the ROM stays as it is, and can be read.
#[test]
fn stores_to_rom_do_not_reach_it() {
    let mut lab = Lab::new();
    lab.sys.ram.store32(PAGE, 0x1111_1111);
    lab.sys.ram.rom.set(Some(PAGE));
    lab.v().gpr[reg::RCX] = 0x2222_2222;
    lab.kernel(|a| {
        a.mov(dword_ptr(PAGE), ecx)?;
        a.lock().add(dword_ptr(PAGE), ecx)?;
        a.mov(eax, dword_ptr(PAGE))
    });
    lab.finishes();
    assert_eq!(lab.gpr(reg::RAX), 0x1111_1111);
    assert_eq!(lab.sys.ram.load32(PAGE), 0x1111_1111);
}
