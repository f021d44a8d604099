//! The PVH protocol, as Xen's start_info.h promises it to a kernel.

use crate::images::{self, PHYSICAL, PVH_ENTRY};
use crate::memory::{load, try_load};
use boot::{BootProtocol, Error, Module};
use x86::{control::cr0, reg, seg};

#[test]
fn start_info_leads_to_everything() {
    let module = Module { data: b"initrd", cmdline: "its line" };
    let machine = load(&images::elf64(), &[module], BootProtocol::Auto);
    assert_eq!(machine.loaded.protocol, BootProtocol::Pvh);
    machine.assert_kernel_at(PHYSICAL);
    machine.assert_disjoint();

    let info = machine.loaded.vcpu.gpr[reg::RBX];
    assert_eq!([0, 4, 8, 12].map(|at| machine.u32(info + at)), [0x336e_c578, 1, 0, 1]);
    assert_eq!(machine.string(machine.u64(info + 24)), "console=ttyS0");
    assert_eq!(machine.u64(info + 32), machine.loaded.rsdp);
    let entry = machine.u64(info + 16);
    assert_eq!(machine.bytes(machine.u64(entry), machine.u64(entry + 8) as usize), b"initrd");
    assert_eq!(machine.string(machine.u64(entry + 16)), "its line");
    let (map, count) = (machine.u64(info + 40), machine.u32(info + 48));
    assert_eq!(count, 5);
    let second = [0, 8].map(|at| machine.u64(map + 24 + at));
    assert_eq!((second, machine.u32(map + 24 + 16)), ([0x9_fc00, 0x400], 2));
}

#[test]
fn the_cpu_starts_in_protected_mode() {
    let packed = images::bzimage(&images::zstd(&images::elf64()));
    for kernel in [images::elf64(), packed] {
        let vcpu = load(&kernel, &[], BootProtocol::Pvh).loaded.vcpu;
        assert_eq!((vcpu.rip, vcpu.code_bits()), (PVH_ENTRY.into(), 32));
        assert_eq!((vcpu.cr0 & !cr0::ET, vcpu.cr4, vcpu.efer), (cr0::PE, 0, 0));
        assert!(vcpu.seg.iter().all(|s| s.base == 0 && s.limit == u32::MAX && s.present()));
        assert_eq!((vcpu.cpl(), vcpu.tr.limit), (0, 0x67));
        assert_eq!(vcpu.seg[seg::CS].kind(), 0xb);
    }
}

#[test]
fn a_kernel_without_the_note_has_no_pvh_entry() {
    let result = try_load(&images::elf32(), &[], BootProtocol::Pvh);
    let protocol = BootProtocol::Pvh;
    assert!(
        matches!(result.err(), Some(Error::WrongProtocol { protocol: p, .. }) if p == protocol)
    );
}
