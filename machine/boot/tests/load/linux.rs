//! The Linux protocol, as Documentation/arch/x86/boot.rst promises it to a kernel.

use crate::images::{self, PHYSICAL, put};
use crate::memory::{LoadedMachine, RAM, load, try_load, try_load_kept};
use boot::{
    BootProtocol, Error, Module,
    unpacked::{PIECE, Unpacked, is_of_use},
};
use std::io;
use x86::control::{cr0, cr4, efer};
use x86::{Segment, Vcpu, flags, reg, seg};

fn zero_page(machine: &LoadedMachine) -> u64 {
    machine.loaded.vcpu.gpr[reg::RSI]
}

/// The descriptor of a selector, from the table the register points to.
fn descriptor(machine: &LoadedMachine, selector: u16) -> Segment {
    let raw = machine.u64(machine.loaded.vcpu.gdtr.base + u64::from(selector));
    Segment::from_descriptor(selector, raw)
}

/// Translates by the tables in RAM, which must map by 2 MiB pages.
fn translate(machine: &LoadedMachine, address: u64) -> u64 {
    const PRESENT: u64 = 1;
    const LARGE: u64 = 1 << 7;
    let table = |entry: u64| entry & 0x000f_ffff_ffff_f000;
    let index = |shift: u32| 8 * ((address >> shift) & 511);
    let pointers = machine.u64(machine.loaded.vcpu.cr3 + index(39));
    let directory = machine.u64(table(pointers) + index(30));
    let page = machine.u64(table(directory) + index(21));
    assert!(pointers & directory & page & PRESENT != 0 && page & LARGE != 0);
    table(page) | address & 0x1f_ffff
}

fn assert_64bit_entry(machine: &LoadedMachine) {
    let vcpu: &Vcpu = &machine.loaded.vcpu;
    assert_eq!(vcpu.code_bits(), 64);
    assert_eq!(vcpu.cr0 & (cr0::PE | cr0::PG), cr0::PE | cr0::PG);
    assert_eq!((vcpu.cr4, vcpu.efer), (cr4::PAE, efer::LME | efer::LMA));
    assert_eq!(vcpu.rflags & flags::IF, 0);
    assert_eq!((vcpu.seg[seg::CS].selector, vcpu.seg[seg::DS].selector), (0x10, 0x18));
    assert_eq!(descriptor(machine, 0x10), vcpu.seg[seg::CS]);
    assert_eq!(descriptor(machine, 0x18), vcpu.seg[seg::SS]);
    for address in [0, PHYSICAL + 5, 0xbfff_ffff, 0xfee0_0000, 0xffff_ffff] {
        assert_eq!(translate(machine, address), address);
    }
}

#[test]
fn every_payload_format_is_unpacked() {
    for (format, pack) in images::FORMATS {
        let kernel = images::bzimage(&pack(&images::elf64()));
        let machine = load(&kernel, &[], BootProtocol::Auto);
        assert_eq!(machine.loaded.protocol, BootProtocol::Linux, "{format}");
        assert_eq!(machine.loaded.vcpu.rip, PHYSICAL);
        machine.assert_kernel_at(PHYSICAL);
        machine.assert_disjoint();
        assert_64bit_entry(&machine);
    }
}

#[test]
fn the_zero_page_tells_the_kernel_about_its_machine() {
    let kernel = images::bzimage(&images::gzip(&images::elf64()));
    let machine = load(&kernel, &[], BootProtocol::Linux);
    let page = zero_page(&machine);
    assert_eq!(machine.bytes(page + 0x1f1, 0x1f), kernel[0x1f1..0x210]);
    assert_eq!(machine.bytes(page + 0x258, 8), PHYSICAL.to_le_bytes());
    assert_eq!(machine.bytes(page + 0x26c, 0x64), [0; 0x64], "nothing after the header");
    assert_eq!(machine.bytes(page + 0x210, 1), [0xff], "type of loader");
    assert_eq!(machine.u64(page + 0x70), machine.loaded.rsdp);
    assert_eq!(machine.bytes(machine.loaded.rsdp, 8), *b"RSD PTR ");
    let cmdline = u64::from(machine.u32(page + 0x228));
    assert_eq!(machine.string(cmdline), "console=ttyS0");
    assert_eq!((machine.u32(page + 0x218), machine.u32(page + 0x21c)), (0, 0), "no initrd");
}

#[test]
fn the_memory_map_covers_ram_and_nothing_else() {
    let machine = load(&images::elf64(), &[], BootProtocol::Linux);
    let page = zero_page(&machine);
    let count = machine.bytes(page + 0x1e8, 1)[0];
    let entry = |i: u8| {
        let at = page + 0x2d0 + 20 * u64::from(i);
        (machine.u64(at), machine.u64(at + 8), machine.u32(at + 16))
    };
    let map: Vec<_> = (0..count).map(entry).collect();
    let expected = [
        (0, 0x9_fc00, 1),
        (0x9_fc00, 0x400, 2),
        (0xe_0000, 0x2_0000, 2),
        (0x10_0000, RAM - 0x10_0000, 1),
        (0xe000_0000, 0x10_0000, 2),
    ];
    assert_eq!(map, expected);
}

#[test]
fn the_memory_map_goes_on_above_4_gib() {
    let ram = ram::Ram::new(5 << 30).expect("RAM nobody touches");
    let map = boot::memory_map(&ram);
    let ram_above_1_mib: Vec<_> = map
        .into_iter()
        .filter(|e| e.kind == boot::MemoryKind::Ram && e.range.start >= 0x10_0000)
        .map(|e| e.range)
        .collect();
    assert_eq!(ram_above_1_mib, [0x10_0000..0xc000_0000, 1 << 32..6 << 30]);
}

#[test]
fn modules_become_one_initrd_high_in_memory() {
    let kernel = images::bzimage(&images::lz4(&images::elf64()));
    let modules = [&[1_u8; 4099][..], &[2; 10]].map(|data| Module { data, cmdline: "" });
    let machine = load(&kernel, &modules, BootProtocol::Auto);
    let page = zero_page(&machine);
    let (start, len) = (machine.u32(page + 0x218), machine.u32(page + 0x21c));
    assert_eq!((u64::from(start), len), (RAM - 0x2000, 4100 + 12));
    let initrd = machine.bytes(start.into(), len as usize);
    assert_eq!(initrd[4090..], [&[1_u8; 9][..], &[0], &[2; 10], &[0, 0]].concat());
    machine.assert_disjoint();
}

#[test]
fn the_initrd_stays_below_the_kernels_limit() {
    let mut kernel = images::bzimage(&images::lz4(&images::elf64()));
    put(&mut kernel, 0x22c, &0x1ff_ffff_u32.to_le_bytes());
    let module = Module { data: &[7; 100], cmdline: "" };
    let machine = load(&kernel, &[module], BootProtocol::Auto);
    assert_eq!(machine.u32(zero_page(&machine) + 0x218), 0x1ff_f000);
}

#[test]
fn an_initrd_too_large_is_refused() {
    let kernel = images::bzimage(&images::lz4(&images::elf64()));
    let data = vec![0; RAM as usize - (PHYSICAL as usize)];
    let result = try_load(&kernel, &[Module { data: &data, cmdline: "" }], BootProtocol::Auto);
    assert!(matches!(result.err(), Some(Error::DoesNotFit { what: "initrd", .. })));
}

#[test]
fn a_vmlinux_gets_a_setup_header_of_its_own() {
    let machine = load(&images::elf64(), &[], BootProtocol::Linux);
    let page = zero_page(&machine);
    assert_eq!(machine.bytes(page + 0x1fe, 2), [0x55, 0xaa]);
    assert_eq!(machine.bytes(page + 0x202, 6), *b"HdrS\x0f\x02");
    machine.assert_kernel_at(PHYSICAL);
    assert_64bit_entry(&machine);
}

#[test]
fn an_image_without_payload_runs_as_it_is() {
    let kernel = images::bzimage_without_payload(true);
    for protocol in [BootProtocol::Auto, BootProtocol::Linux, BootProtocol::BzImage] {
        let machine = load(&kernel, &[], protocol);
        assert_eq!(machine.loaded.protocol, BootProtocol::BzImage);
        assert_eq!(machine.loaded.vcpu.rip, 0x10_0200);
        assert_eq!(machine.bytes(0x10_0000, kernel.len() - 1024), kernel[1024..]);
        assert_eq!(machine.u32(zero_page(&machine) + 0x214), 0x10_0000, "code32_start");
        assert_64bit_entry(&machine);
    }
}

#[test]
fn a_32_bit_image_is_entered_in_32_bit_mode() {
    let machine = load(&images::bzimage_without_payload(false), &[], BootProtocol::Auto);
    let vcpu = &machine.loaded.vcpu;
    assert_eq!((vcpu.rip, vcpu.code_bits()), (0x10_0000, 32));
    assert_eq!((vcpu.cr0 & cr0::PG, vcpu.efer, vcpu.cr4), (0, 0, 0));
    assert_eq!([vcpu.gpr[reg::RBX], vcpu.gpr[reg::RBP], vcpu.gpr[reg::RDI]], [0; 3]);
    assert_eq!(descriptor(&machine, 0x10), vcpu.seg[seg::CS]);
}

#[test]
fn a_payload_we_cannot_unpack_is_left_to_the_image_itself() {
    let kernel = images::bzimage(b"BZh9 and so on");
    let machine = load(&kernel, &[], BootProtocol::Auto);
    assert_eq!(machine.loaded.protocol, BootProtocol::BzImage);
    assert_eq!(machine.loaded.vcpu.rip, PHYSICAL + 0x200);
    let result = try_load(&kernel, &[], BootProtocol::Linux);
    assert!(matches!(result.err(), Some(Error::UnsupportedCompression("bzip2"))));
}

#[test]
fn a_relocatable_image_moves_where_there_is_room() {
    let mut kernel = images::bzimage(b"no known format");
    put(&mut kernel, 0x258, &(RAM - 0x1000).to_le_bytes());
    let machine = load(&kernel, &[], BootProtocol::Auto);
    assert_eq!(machine.loaded.vcpu.rip, 0x20_0200, "lowest multiple of its alignment");
    put(&mut kernel, 0x234, &[0]);
    put(&mut kernel, 0x260, &(RAM as u32).to_le_bytes());
    let result = try_load(&kernel, &[], BootProtocol::Auto);
    assert!(matches!(result.err(), Some(Error::NoRoomAt { start: 0x10_0000, .. })));
}

/// What a kernel was unpacked to. Of some of its pieces it says that they are damaged.
#[derive(Debug)]
struct Kept {
    kernel: Vec<u8>,
    damaged: fn(u64) -> bool,
}

impl Unpacked for Kept {
    fn size(&self) -> u64 {
        self.kernel.len() as u64
    }

    fn read(&self, number: u64, into: &mut [u8]) -> io::Result<()> {
        into.copy_from_slice(&self.kernel[number as usize * PIECE..][..into.len()]);
        if (self.damaged)(number) { Err(io::ErrorKind::InvalidData.into()) } else { Ok(()) }
    }
}

/// An ELF kernel whose code begins in one piece and ends in the next.
fn across_pieces() -> Vec<u8> {
    let mut kernel = images::elf64();
    let at = PIECE - images::CODE.len() / 2;
    put(&mut kernel, 64 + 8, &(at as u64).to_le_bytes());
    kernel.resize(at, 0);
    kernel.extend(images::CODE);
    kernel
}

#[test]
fn a_kernel_that_was_kept_unpacked_is_loaded_as_its_image_is() {
    let kernel = across_pieces();
    let image = images::bzimage(&images::lz4(&kernel));
    let (protocol, modules) = (BootProtocol::Auto, &[]);
    let direct = load(&image, modules, protocol);
    for damaged in [|_| false, |number| number == 0, |number| number == 1] {
        let kept = Kept { kernel: kernel.clone(), damaged };
        let kept = try_load_kept(&image, Some(&kept), modules, protocol).expect("it loads");
        kept.assert_kernel_at(PHYSICAL);
        assert_eq!(kept.loaded.placed, direct.loaded.placed);
        assert_eq!(format!("{:?}", kept.loaded.vcpu), format!("{:?}", direct.loaded.vcpu));
    }
}

#[test]
fn a_32bit_kernel_is_unpacked_and_entered_in_32_bit_mode() {
    let kernel = images::bzimage(&images::lz4(&images::elf32()));
    for protocol in [BootProtocol::Auto, BootProtocol::Linux] {
        let machine = load(&kernel, &[], protocol);
        let vcpu = &machine.loaded.vcpu;
        assert_eq!(machine.loaded.protocol, BootProtocol::Linux);
        assert_eq!((vcpu.code_bits(), vcpu.rip), (32, PHYSICAL));
        assert_eq!(vcpu.cr0 & (cr0::PE | cr0::PG), cr0::PE);
        assert_eq!(
            machine.u64(zero_page(&machine) + 0x200) >> 16 & 0xffff_ffff,
            u64::from(u32::from_le_bytes(*b"HdrS"))
        );
        machine.assert_kernel_at(PHYSICAL);
    }
}

/// The bzImage of a 32-bit kernel is unpacked each time, even if somebody has kept what the image unpacks to.
#[test]
fn a_32bit_kernel_that_was_kept_is_not_used() {
    let image = images::bzimage(&images::lz4(&images::elf32()));
    let kept = Kept { kernel: images::elf32(), damaged: |_| false };
    let (protocol, modules) = (BootProtocol::Auto, &[]);
    let direct = load(&image, modules, protocol);
    let kept = try_load_kept(&image, Some(&kept), modules, protocol).expect("it loads");
    assert_eq!(kept.loaded.protocol, BootProtocol::Linux);
    assert_eq!(kept.loaded.placed, direct.loaded.placed);
}

#[test]
fn only_bzimages_of_64bit_kernels_are_kept() {
    let wide = images::bzimage(&images::lz4(&images::elf64()));
    let mut narrow = wide.clone();
    put(&mut narrow, 0x236, &[0]);
    assert!(is_of_use(&wide));
    for other in [&narrow[..], &images::elf64(), &wide[..0x300], b""] {
        assert!(!is_of_use(other));
    }
}

/// The image is damaged, and nobody looks at it: what it unpacked to is whole.
#[test]
fn an_image_is_not_unpacked_if_it_was_before() {
    let mut image = images::bzimage(&images::lz4(&images::elf64()));
    image[1024 + 0x300 + 8..].fill(0xff);
    let kept = Kept { kernel: images::elf64(), damaged: |_| false };
    let load = |kept| try_load_kept(&image, kept, &[], BootProtocol::Linux);
    assert!(load(None).is_err());
    load(Some(&kept)).expect("it loads").assert_kernel_at(PHYSICAL);
}
