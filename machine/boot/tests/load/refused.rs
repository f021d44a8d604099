//! Files that cannot be booted, and the error each must get.

use crate::images::{self, put};
use crate::memory::try_load;
use boot::{BootProtocol, BootRequest, Error};
use ram::Ram;

fn error(kernel: &[u8], protocol: BootProtocol) -> Error {
    try_load(kernel, &[], protocol).err().expect("the kernel is refused")
}

/// The file with one field changed.
fn with(mut file: Vec<u8>, offset: usize, field: &[u8]) -> Vec<u8> {
    put(&mut file, offset, field);
    file
}

#[test]
fn files_that_are_no_kernels() {
    assert!(matches!(error(b"", BootProtocol::Auto), Error::EmptyKernel));
    let found = |file: &[u8]| error(file, BootProtocol::Auto).to_string();
    assert!(found(b"070701and so on").contains("cpio"));
    assert!(found(b"QFI\xfb").contains("qcow2"));
    assert!(found(b"hello").contains("do not know"));
    assert!(found(&images::gzip(b"070701")).contains("cpio"));
    let arm = with(vec![0; 64], 0x38, b"ARM\x64");
    assert!(matches!(error(&arm, BootProtocol::Auto), Error::WrongArchitecture { .. }));
}

#[test]
fn kernels_for_other_cpus() {
    let arm = with(images::elf64(), 18, &183_u16.to_le_bytes());
    let big_endian = with(images::elf64(), 5, &[2]);
    for kernel in [arm, big_endian] {
        assert!(matches!(error(&kernel, BootProtocol::Auto), Error::WrongArchitecture { .. }));
    }
}

#[test]
fn a_32_bit_kernel_where_a_64_bit_one_was_asked_for() {
    let kernel = images::bzimage_without_payload(false);
    assert!(matches!(error(&kernel, BootProtocol::Linux), Error::ThirtyTwoBitOnly));
    let vmlinux = error(&images::elf32(), BootProtocol::Auto);
    assert!(matches!(vmlinux, Error::WrongProtocol { .. }));
}

#[test]
fn bzimages_too_old() {
    let old = with(images::bzimage(&images::CODE), 0x206, &[1, 2]);
    assert!(matches!(error(&old, BootProtocol::Auto), Error::ProtocolTooOld { .. }));
    assert!(error(&old, BootProtocol::Auto).to_string().contains("2.01"));
    let zimage = with(images::bzimage(&images::CODE), 0x211, &[0]);
    assert!(matches!(error(&zimage, BootProtocol::Auto), Error::ProtocolTooOld { .. }));
}

#[test]
fn truncated_files() {
    let bzimage = images::bzimage(&images::gzip(&images::elf64()));
    let elf = images::elf64();
    for cut in [&bzimage[..0x207], &bzimage[..1024], &bzimage[..bzimage.len() - 16], &elf[..0x190]]
    {
        assert!(matches!(error(cut, BootProtocol::Auto), Error::Truncated { .. }), "{}", cut.len());
    }
    let flat = images::multiboot_flat();
    for len in [40, flat.len() - 1] {
        assert!(matches!(error(&flat[..len], BootProtocol::Auto), Error::Truncated { .. }));
    }
}

#[test]
fn a_damaged_payload() {
    for (format, pack) in images::FORMATS {
        let mut payload = pack(&images::elf64());
        let middle = payload.len() / 2;
        payload[middle..middle + 8].fill(0xff);
        let wrong_size = with(pack(&images::elf64()), payload.len() - 4, &[9, 0, 0, 0]);
        for payload in [payload, wrong_size] {
            let error = error(&images::bzimage(&payload), BootProtocol::Auto);
            assert!(matches!(error, Error::Decompress { .. }), "{format}: {error}");
            assert!(error.to_string().contains(format));
        }
    }
}

#[test]
fn a_payload_that_unpacks_to_more_than_it_says() {
    let lie = with(images::lz4(&vec![0; 1 << 20]), 0, &0x184c_2102_u32.to_le_bytes());
    let size = lie.len() - 4;
    let payload = with(lie, size, &0x1000_u32.to_le_bytes());
    assert!(matches!(
        error(&images::bzimage(&payload), BootProtocol::Auto),
        Error::Decompress { .. }
    ));
}

#[test]
fn segments_over_what_is_not_theirs() {
    for physical in [0_u64, 0x9_f000, 0xa_0000, 0xe_0000, 0xc000_0000, 1 << 32, u64::MAX - 8] {
        let kernel = with(images::elf64(), 64 + 24, &physical.to_le_bytes());
        let error = error(&kernel, BootProtocol::Linux);
        assert!(matches!(error, Error::NoRoomAt { .. }), "{physical:#x}: {error}");
    }
    let too_long = with(images::elf64(), 64 + 40, &(1_u64 << 40).to_le_bytes());
    assert!(matches!(error(&too_long, BootProtocol::Linux), Error::NoRoomAt { .. }));
}

#[test]
fn elf_files_that_make_no_sense() {
    let object_file = with(images::elf64(), 16, &[1]);
    let no_segment = with(images::elf64(), 64, &[0]);
    let larger_in_file = with(images::elf64(), 64 + 40, &[1, 0, 0, 0, 0, 0, 0, 0]);
    let entry_outside = with(images::elf64(), 24, &[0; 8]);
    for kernel in [object_file, no_segment, larger_in_file, entry_outside] {
        assert!(matches!(error(&kernel, BootProtocol::Linux), Error::Malformed { .. }));
    }
}

#[test]
fn requests_that_make_no_sense() {
    let kernel = images::bzimage(&images::gzip(&images::elf64()));
    let ram = Ram::new(64 << 20).expect("RAM");
    let protocol = BootProtocol::Auto;
    let good = BootRequest {
        kernel: &kernel,
        unpacked: None,
        modules: &[],
        cmdline: "",
        cpus: 1,
        protocol,
    };
    let refused = |request| boot::load(&ram, &request).err();
    assert!(refused(good).is_none());
    assert!(matches!(refused(BootRequest { cpus: 0, ..good }), Some(Error::CpuCount(0))));
    assert!(matches!(refused(BootRequest { cpus: 5000, ..good }), Some(Error::CpuCount(_))));
    let nul = BootRequest { cmdline: "a\0b", ..good };
    assert!(matches!(refused(nul), Some(Error::CommandLineNul(_))));
    let long = "x".repeat(2048);
    let too_long = BootRequest { cmdline: &long, ..good };
    assert!(matches!(refused(too_long), Some(Error::CommandLineTooLong { max: 2047, .. })));
    let tiny = Ram::new(1 << 20).expect("RAM");
    assert!(matches!(boot::load(&tiny, &good).err(), Some(Error::RamTooSmall { .. })));
}

#[test]
fn every_protocol_has_a_name() {
    for name in ["auto", "linux", "bzimage", "pvh", "multiboot"] {
        assert_eq!(name.parse::<BootProtocol>().expect("a protocol").to_string(), name);
    }
    assert!("bios".parse::<BootProtocol>().is_err());
}
