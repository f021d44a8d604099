//! VMCOREINFO: what a Linux kernel says of itself, in a note it keeps for the dump of its own crash.
//!
//! The note lies at the beginning of a page, anywhere in RAM, and is shorter than a page.

use std::collections::BTreeMap;

use ram::{PAGE, Ram};

use crate::backing::Backing;

/// Name of the note with its zero, padded to words.
const NAME: &[u8; 12] = b"VMCOREINFO\0\0";
/// Bytes of the note's head and name.
const HEAD: usize = 24;
/// Bytes looked at at a time.
const PIECE: u64 = 1 << 20;
/// How the text begins.
const START: &[u8] = b"OSRELEASE=";

/// What the kernel says: lines of `KEY=VALUE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmCoreInfo {
    text: String,
    values: BTreeMap<String, String>,
}

impl VmCoreInfo {
    /// Looks for it in a machine's memory, as far as the guest has touched it.
    pub fn find(ram: &Ram) -> Option<Self> {
        let backing = Backing::new(ram).ok()?;
        let mut bytes = vec![0; PIECE as usize];
        let mut from = 0;
        while let Some((start, end)) = backing.touched(from) {
            for at in (start / PAGE * PAGE..end).step_by(PIECE as usize) {
                let piece = &mut bytes[..PIECE.min(ram.len() - at) as usize];
                backing.read(at, piece).ok()?;
                let found = piece.chunks(PAGE as usize).find_map(Self::of_page);
                if found.is_some() {
                    return found;
                }
            }
            from = end;
        }
        None
    }

    /// The note in a page, if there is one.
    fn of_page(page: &[u8]) -> Option<Self> {
        let (head, text) = page.split_at_checked(HEAD)?;
        let (sizes, name) = head.split_at(12);
        if name != NAME || sizes[..4] != [11, 0, 0, 0] {
            return None;
        }
        let len = u32::from_le_bytes(sizes[4..8].try_into().ok()?) as usize;
        Self::of_text(&text[..len.min(text.len())])
    }

    pub(crate) fn of_text(text: &[u8]) -> Option<Self> {
        let text = text.split(|byte| *byte == 0).next().filter(|text| text.starts_with(START))?;
        let text = String::from_utf8(text.to_vec()).ok()?;
        let pairs = text.lines().filter_map(|line| line.split_once('='));
        let values = pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        Some(Self { text, values })
    }

    /// All of it.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// `uname -r`.
    pub fn release(&self) -> &str {
        self.values.get("OSRELEASE").map_or("", String::as_str)
    }

    /// The GVA of a symbol.
    pub fn symbol(&self, name: &str) -> Option<u64> {
        self.hex(&format!("SYMBOL({name})"))
    }

    /// A hexadecimal number.
    pub fn hex(&self, key: &str) -> Option<u64> {
        u64::from_str_radix(self.values.get(key)?.trim_start_matches("0x"), 16).ok()
    }

    /// A decimal number.
    pub fn number(&self, name: &str) -> Option<i64> {
        self.values.get(&format!("NUMBER({name})"))?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &[u8] =
        b"OSRELEASE=6.1.0-1\nSYMBOL(_stext)=ffffffff81000000\nNUMBER(phys_base)=-1024\nKERNELOFFSET=1e00000\n\0";

    fn put(ram: &Ram, gpa: u64, len: u32, text: &[u8]) {
        let head = [&11u32.to_le_bytes()[..], &len.to_le_bytes(), &[0; 4], NAME, text].concat();
        ram.write_gpa(gpa, &head).expect("inside");
    }

    #[test]
    fn the_note_is_found_and_read() {
        let ram = Ram::new(1 << 20).expect("memory");
        assert_eq!(VmCoreInfo::find(&ram), None);
        put(&ram, 0x3000, 4, b"none");
        put(&ram, 0x8000, TEXT.len() as u32, TEXT);
        let found = VmCoreInfo::find(&ram).expect("there is one");
        assert_eq!(found.release(), "6.1.0-1");
        assert_eq!(found.symbol("_stext"), Some(0xffff_ffff_8100_0000));
        assert_eq!(found.hex("KERNELOFFSET"), Some(0x1e0_0000));
        assert_eq!(found.number("phys_base"), Some(-1024));
    }

    #[test]
    fn a_note_that_lies_about_its_length_is_no_way_out_of_ram() {
        let ram = Ram::new(1 << 20).expect("memory");
        put(&ram, (1 << 20) - PAGE, u32::MAX, TEXT);
        assert!(VmCoreInfo::find(&ram).is_some(), "what is in its page is read");
    }
}
