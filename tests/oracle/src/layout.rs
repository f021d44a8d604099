//! The memory a test case sees: a few windows at fixed addresses, the same on both sides.
//!
//! All windows are slices of one *image*, a byte string with the pages in the order of [`WINDOWS`].
//! Between and around windows nothing is mapped, so an access that leaves one faults. The low
//! windows lie below 2 GiB, where absolute, RIP-relative and 32-bit addresses reach them.

/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// A run of mapped pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// What case files and reports call it.
    pub name: &'static str,
    /// First address (GVA, and the same address in the native process).
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Byte offset of the window in the image.
    pub offset: u64,
    /// Stores are allowed.
    pub writable: bool,
    /// Execution is allowed.
    pub executable: bool,
}

impl Window {
    /// The address after the last.
    pub const fn end(&self) -> u64 {
        self.base + self.len
    }
}

const fn window(name: &'static str, base: u64, pages: u64, first: u64) -> Window {
    let (len, offset) = (pages * PAGE, first * PAGE);
    Window { name, base, len, offset, writable: true, executable: false }
}

/// Where most operands lie.
pub const DATA: Window = window("data", 0x1000_0000, 2, 0);
/// Read-only, directly after [`DATA`].
pub const RODATA: Window = Window { writable: false, ..window("rodata", 0x1000_2000, 1, 2) };
/// Where RSP starts.
pub const STACK: Window = window("stack", 0x1001_0000, 2, 3);
/// Above 4 GiB.
pub const HIGH: Window = window("high", 0x1234_5678_9000, 1, 5);
/// The instructions; filled with HLT, which ends a case wherever it is reached.
pub const CODE: Window =
    Window { writable: false, executable: true, ..window("code", 0x1002_0000, 2, 6) };

/// Every window, in image order.
pub const WINDOWS: [Window; 5] = [DATA, RODATA, STACK, HIGH, CODE];
/// Bytes of the image.
pub const IMAGE_LEN: usize = (8 * PAGE) as usize;
/// HLT: faults in user mode, wherever a jump lands in [`CODE`].
pub const HLT: u8 = 0xf4;

/// The image offset of `address`, if a window holds it.
pub fn image_offset(address: u64) -> Option<usize> {
    let window = WINDOWS.iter().find(|w| (w.base..w.end()).contains(&address))?;
    Some((window.offset + address - window.base) as usize)
}

/// The address of the byte at `offset` of the image, if it is in the image.
pub fn address(offset: usize) -> Option<u64> {
    let offset = offset as u64;
    let window = WINDOWS.iter().find(|w| (w.offset..w.offset + w.len).contains(&offset))?;
    Some(window.base + offset - window.offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_tile_the_image() {
        let mut next = 0;
        for window in WINDOWS {
            assert_eq!(window.offset, next, "{}", window.name);
            next += window.len;
        }
        assert_eq!(next as usize, IMAGE_LEN);
    }

    #[test]
    fn addresses_and_offsets_are_inverse() {
        for offset in (0..IMAGE_LEN).step_by(1021) {
            assert_eq!(address(offset).and_then(image_offset), Some(offset));
        }
        assert_eq!(image_offset(DATA.base - 1), None);
        assert_eq!(image_offset(RODATA.end()), None);
        assert_eq!(address(IMAGE_LEN), None);
    }
}
