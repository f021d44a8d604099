//! Small kernels of every kind, built field by field from the formats' descriptions.

use std::io::Write;

/// Physical and virtual address of the code of the kernels made here.
pub const PHYSICAL: u64 = 0x100_0000;
pub const VIRTUAL: u64 = 0xffff_ffff_8100_0000;
/// The code: recognisable bytes.
pub const CODE: [u8; 64] = [0xf4; 64];
/// Bytes of memory behind the code that must be zero.
pub const BSS: u64 = 0x3000;
/// PVH entry point.
pub const PVH_ENTRY: u32 = PHYSICAL as u32 + 0x20;

/// Writes a field into a file that is long enough.
pub fn put(file: &mut [u8], offset: usize, field: &[u8]) {
    file[offset..offset + field.len()].copy_from_slice(field);
}

/// An ELF64 kernel for x86-64 with one loadable segment and a PVH note.
pub fn elf64() -> Vec<u8> {
    let mut file = vec![0; 0x200];
    put(&mut file, 0, b"\x7fELF\x02\x01\x01");
    put(&mut file, 16, &[2, 0, 62, 0, 1]);
    put(&mut file, 24, &PHYSICAL.to_le_bytes());
    put(&mut file, 32, &64_u64.to_le_bytes());
    put(&mut file, 52, &[64, 0, 56, 0, 2, 0, 64]);
    let load = program_header64(1, 0x180, VIRTUAL, CODE.len() as u64, CODE.len() as u64 + BSS);
    put(&mut file, 64, &load);
    put(&mut file, 64 + 56, &program_header64(4, 0x100, 0, 20, 20));
    put(&mut file, 0x100, &[4_u32, 4, 18].map(u32::to_le_bytes).concat());
    put(&mut file, 0x10c, b"Xen\0");
    put(&mut file, 0x110, &PVH_ENTRY.to_le_bytes());
    put(&mut file, 0x180, &CODE);
    file
}

fn program_header64(kind: u32, offset: u64, virt: u64, filled: u64, len: u64) -> Vec<u8> {
    let mut header = [kind, 5].map(u32::to_le_bytes).concat();
    header.extend([offset, virt, PHYSICAL, filled, len, 4].map(u64::to_le_bytes).concat());
    header
}

/// An ELF32 kernel for i386 with one loadable segment, no note.
pub fn elf32() -> Vec<u8> {
    let mut file = vec![0; 0x200];
    put(&mut file, 0, b"\x7fELF\x01\x01\x01");
    put(&mut file, 16, &[2, 0, 3, 0, 1]);
    let (at, len) = (PHYSICAL as u32, CODE.len() as u32);
    put(&mut file, 24, &at.to_le_bytes());
    put(&mut file, 28, &52_u32.to_le_bytes());
    put(&mut file, 40, &[52, 0, 32, 0, 1, 0, 40]);
    let load = [1, 0x180, at, at, len, len + BSS as u32, 7, 4];
    put(&mut file, 52, &load.map(u32::to_le_bytes).concat());
    put(&mut file, 0x180, &CODE);
    file
}

/// The ELF32 kernel with a multiboot header.
pub fn multiboot_elf() -> Vec<u8> {
    let mut file = elf32();
    put(&mut file, 0x100, &multiboot_header(0b11));
    file
}

/// A multiboot kernel without a file format, described by its header's addresses: 16 bytes of
/// something else, then the header as the first bytes to load.
pub fn multiboot_flat() -> Vec<u8> {
    let at = PHYSICAL as u32;
    let mut file = vec![0xee; 16];
    file.extend(multiboot_header(1 << 16));
    let end = at + 32 + CODE.len() as u32;
    file.extend([at, at, end, end + BSS as u32, at + 32].map(u32::to_le_bytes).concat());
    file.extend(CODE);
    file
}

fn multiboot_header(flags: u32) -> Vec<u8> {
    let magic = 0x1bad_b002_u32;
    [magic, flags, 0_u32.wrapping_sub(magic + flags)].map(u32::to_le_bytes).concat()
}

/// A bzImage of protocol 2.15 around a payload as it lies in the file; 64-bit entry, relocatable,
/// preferring [`PHYSICAL`].
pub fn bzimage(payload: &[u8]) -> Vec<u8> {
    const SETUP: usize = 1024;
    const PAYLOAD: usize = 0x300;
    let mut file = vec![0; SETUP + PAYLOAD];
    put(&mut file, 0x1f1, &[1]);
    put(&mut file, 0x1fe, &[0x55, 0xaa, 0xeb, 0x6a]);
    put(&mut file, 0x202, b"HdrS\x0f\x02");
    put(&mut file, 0x211, &[1]);
    put(&mut file, 0x22c, &0x7fff_ffff_u32.to_le_bytes());
    put(&mut file, 0x230, &0x20_0000_u32.to_le_bytes());
    put(&mut file, 0x234, &[1]);
    put(&mut file, 0x236, &[1]);
    put(&mut file, 0x238, &2047_u32.to_le_bytes());
    put(&mut file, 0x248, &(PAYLOAD as u32).to_le_bytes());
    put(&mut file, 0x24c, &(payload.len() as u32).to_le_bytes());
    put(&mut file, 0x258, &PHYSICAL.to_le_bytes());
    put(&mut file, 0x260, &0x20_0000_u32.to_le_bytes());
    file.extend(payload);
    file.resize(file.len().next_multiple_of(16), 0);
    let units = (file.len() - SETUP) as u32 / 16;
    put(&mut file, 0x1f4, &units.to_le_bytes());
    file
}

/// Packs a payload.
type Pack = fn(&[u8]) -> Vec<u8>;

/// How the payload of a bzImage may be packed.
pub const FORMATS: [(&str, Pack); 5] =
    [("gzip", gzip), ("lz4", lz4), ("zstd", zstd), ("xz", xz), ("lzma", lzma)];

pub fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(data).expect("memory takes all");
    encoder.finish().expect("memory takes all")
}

/// Legacy frame in two blocks, then the size.
pub fn lz4(data: &[u8]) -> Vec<u8> {
    let mut packed = 0x184c_2102_u32.to_le_bytes().to_vec();
    let (first, second) = data.split_at(data.len() / 2);
    for block in [first, second].map(lz4_flex::block::compress) {
        packed.extend((block.len() as u32).to_le_bytes());
        packed.extend(block);
    }
    with_size(packed, data)
}

pub fn zstd(data: &[u8]) -> Vec<u8> {
    let level = ruzstd::encoding::CompressionLevel::Fastest;
    with_size(ruzstd::encoding::compress_to_vec(data, level), data)
}

pub fn xz(data: &[u8]) -> Vec<u8> {
    let options = lzma_rust2::XzOptions::with_preset(1);
    let mut writer = lzma_rust2::XzWriter::new(Vec::new(), options).expect("valid options");
    writer.write_all(data).expect("memory takes all");
    with_size(writer.finish().expect("memory takes all"), data)
}

pub fn lzma(data: &[u8]) -> Vec<u8> {
    let options = lzma_rust2::LzmaOptions::with_preset(1);
    let mut writer =
        lzma_rust2::LzmaWriter::new_use_header(Vec::new(), &options, None).expect("valid options");
    writer.write_all(data).expect("memory takes all");
    with_size(writer.finish().expect("memory takes all"), data)
}

/// Appends the unpacked size, as the kernel's build does.
fn with_size(mut packed: Vec<u8>, data: &[u8]) -> Vec<u8> {
    packed.extend((data.len() as u32).to_le_bytes());
    packed
}

/// A bzImage like memtest86+: no payload, fixed at 1 MiB, no 64-bit entry unless asked.
pub fn bzimage_without_payload(is_64bit: bool) -> Vec<u8> {
    let mut file = bzimage(&CODE);
    put(&mut file, 0x206, &[0x0c, 0x02]);
    put(&mut file, 0x234, &[0]);
    put(&mut file, 0x236, &[u8::from(is_64bit)]);
    put(&mut file, 0x248, &[0; 8]);
    file
}
