//! Multiboot 1, as its specification promises it to a kernel.

use crate::images::{self, CODE, PHYSICAL, put};
use crate::memory::{RAM, load, try_load};
use boot::{BootProtocol, Error, Module};
use x86::{control::cr0, reg};

#[test]
fn the_information_structure_leads_to_everything() {
    let modules = [("dom0 quiet", &b"kernel"[..]), ("", b"initrd")]
        .map(|(cmdline, data)| Module { data, cmdline });
    let machine = load(&images::multiboot_elf(), &modules, BootProtocol::Auto);
    assert_eq!(machine.loaded.protocol, BootProtocol::Multiboot);
    machine.assert_kernel_at(PHYSICAL);
    machine.assert_disjoint();

    let info = machine.loaded.vcpu.gpr[reg::RBX];
    let word = |i: u64| machine.u32(info + 4 * i);
    assert_eq!(word(0), 0b10_0100_1101);
    assert_eq!((word(1), word(2)), (639, (RAM >> 10) as u32 - 1024));
    assert_eq!(machine.string(word(4).into()), "kernel console=ttyS0");
    assert_eq!(machine.string(word(16).into()), "ring3");
    assert_eq!(word(5), 2);
    for (i, module) in modules.iter().enumerate() {
        let entry = u64::from(word(6)) + 16 * i as u64;
        let [start, end, string] = [0, 4, 8].map(|at| machine.u32(entry + at));
        assert_eq!(machine.bytes(start.into(), (end - start) as usize), module.data);
        assert_eq!(machine.string(string.into()), module.cmdline);
        assert!(start.is_multiple_of(4096) && u64::from(start) > PHYSICAL);
    }
    assert_eq!((word(11), machine.u32(u64::from(word(12)))), (5 * 24, 20));
}

#[test]
fn the_cpu_starts_in_protected_mode() {
    let vcpu = load(&images::multiboot_elf(), &[], BootProtocol::Multiboot).loaded.vcpu;
    assert_eq!((vcpu.rip, vcpu.code_bits()), (PHYSICAL, 32));
    assert_eq!(vcpu.gpr[reg::RAX], 0x2bad_b002);
    assert_eq!((vcpu.cr0 & !cr0::ET, vcpu.efer), (cr0::PE, 0));
    assert!(vcpu.seg.iter().all(|s| s.base == 0 && s.limit == u32::MAX));
}

#[test]
fn a_header_with_addresses_needs_no_file_format() {
    let machine = load(&images::multiboot_flat(), &[], BootProtocol::Auto);
    assert_eq!(machine.loaded.vcpu.rip, PHYSICAL + 32);
    assert_eq!(machine.bytes(PHYSICAL + 32, CODE.len()), CODE);
    assert_eq!(machine.u32(PHYSICAL), 0x1bad_b002, "the header is loaded first");
}

#[test]
fn a_virtual_entry_point_is_translated() {
    let mut kernel = images::multiboot_elf();
    put(&mut kernel, 52 + 8, &0xc010_0000_u32.to_le_bytes());
    put(&mut kernel, 24, &0xc010_0010_u32.to_le_bytes());
    assert_eq!(load(&kernel, &[], BootProtocol::Auto).loaded.vcpu.rip, PHYSICAL + 0x10);
}

#[test]
fn requirements_we_do_not_know_are_refused() {
    let mut kernel = images::multiboot_elf();
    let (flags, magic) = (1_u32 << 5, 0x1bad_b002_u32);
    put(&mut kernel, 0x104, &flags.to_le_bytes());
    put(&mut kernel, 0x108, &0_u32.wrapping_sub(magic + flags).to_le_bytes());
    let result = try_load(&kernel, &[], BootProtocol::Auto);
    assert!(matches!(result.err(), Some(Error::WrongProtocol { .. })));
}

#[test]
fn a_compressed_file_is_unpacked_first() {
    let machine = load(&images::gzip(&images::multiboot_elf()), &[], BootProtocol::Auto);
    assert_eq!(machine.loaded.vcpu.rip, PHYSICAL);
}
