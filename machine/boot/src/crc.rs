//! The CRC-32 at the end of a bzImage (Documentation/arch/x86/boot.rst, "The Image Checksum").
//!
//! Linux 2.6.26 to 6.14 have one. Signing the file for secure boot changes two fields of its PE header and appends
//! the signature: the sum is that of the file before.

use crate::bytes;
use crc32fast::Hasher;

/// Bytes of the sum.
const LEN: usize = 4;
/// The first version without a sum.
const DROPPED: (u32, u32) = (6, 15);
/// Offset of the PE header's offset (PE format, "MS-DOS stub").
const PE_OFFSET: usize = 0x3c;
/// Fields that signing changes, from the PE header on: where they are, and their bytes. The second is for PE32+.
const SIGNED: [(usize, usize); 2] = [(24 + 64, 4), (24 + 112 + 4 * 8, 8)];

/// Whether the sum at the end of `image`, a bzImage without what may follow it, is not that of its bytes. False for a
/// kernel of a version that has none.
pub(crate) fn differs(image: &[u8]) -> bool {
    let has_sum = version(image).is_some_and(|v| v < DROPPED);
    let wrong = |(summed, stored): (&[u8], &[u8; LEN])| {
        // The sum is stored without its last step, the complement.
        !sum(summed) != u32::from_le_bytes(*stored)
    };
    has_sum && image.split_last_chunk().is_some_and(wrong)
}

/// Version of the kernel as its text says: the first two numbers.
fn version(image: &[u8]) -> Option<(u32, u32)> {
    let at = bytes::u16(image, 0x20e).filter(|at| *at != 0)?;
    let text = image.get(usize::from(at) + 0x200..)?;
    let text: String = text.iter().take(16).map(|b| char::from(*b)).collect();
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// CRC-32 of the bytes, with what signing changes taken as the zeros it was.
fn sum(summed: &[u8]) -> u32 {
    let (mut crc, mut at) = (Hasher::new(), 0);
    for (start, len) in signed(summed) {
        crc.update(&summed[at..start]);
        crc.update(&[0; 8][..len]);
        at = start + len;
    }
    crc.update(&summed[at..]);
    crc.finalize()
}

/// Where the fields that signing changes lie; none in a file that is no EFI program.
fn signed(image: &[u8]) -> impl Iterator<Item = (usize, usize)> {
    let pe = bytes::u32(image, PE_OFFSET).map(|at| at as usize);
    let pe =
        pe.filter(|at| image.starts_with(b"MZ") && bytes::array(image, *at) == Some(*b"PE\0\0"));
    let fields = pe.into_iter().flat_map(|pe| SIGNED.map(|(at, len)| (pe + at, len)));
    fields.filter(|(at, len)| at + len <= image.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An EFI program of this version with its sum, signed or not.
    fn kernel(version: &str, signed: bool) -> Vec<u8> {
        let mut image = vec![0x5a; 0x400];
        image[..2].copy_from_slice(b"MZ");
        image[PE_OFFSET..][..4].copy_from_slice(&0x80_u32.to_le_bytes());
        image[0x80..0x84].copy_from_slice(b"PE\0\0");
        SIGNED.iter().for_each(|(at, len)| image[0x80 + at..][..*len].fill(0));
        image[0x20e..0x210].copy_from_slice(&0x100_u16.to_le_bytes());
        image[0x300..][..version.len()].copy_from_slice(version.as_bytes());
        let mut crc = Hasher::new();
        crc.update(&image);
        image.extend((!crc.finalize()).to_le_bytes());
        if signed {
            SIGNED.iter().for_each(|(at, len)| image[0x80 + at..][..*len].fill(7));
        }
        image
    }

    #[test]
    fn a_changed_byte_is_found_in_signed_kernels_too() {
        for signed in [false, true] {
            let mut image = kernel("6.1.0-41-amd64 (", signed);
            assert!(!differs(&image));
            image[0x200] ^= 1;
            assert!(differs(&image));
        }
    }

    #[test]
    fn kernels_without_a_sum_are_taken_as_they_are() {
        for version in ["6.15.0", "7.2-amd64", "no version"] {
            let mut image = kernel(version, false);
            image[0x200] ^= 1;
            assert!(!differs(&image), "{version}");
        }
    }
}
