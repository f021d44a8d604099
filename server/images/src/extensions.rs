//! A look at a qcow2 image's header extensions before imago reads them: it panics at a table of feature names that is cut off
//! (imago 0.2.6).

use std::{
    fs::File,
    io::{self, Error, Read},
    path::Path,
};

use crate::QCOW2_MAGIC;

/// Bytes of a header of version 2, and where a later one says how many it has.
const SHORT: usize = 72;
const LENGTH: usize = 100;
/// The extension that names features, and bytes of a name's entry (QEMU's docs/interop/qcow2.rst, "Feature name table").
const FEATURE_NAMES: u32 = 0x6803_f857;
const ENTRY: usize = 48;
const END: u32 = 0;
/// Extensions lie in the first cluster, which has 2 MiB at most.
const MOST: u64 = 2 << 20;

/// Refuses an image whose extensions would not be survived. One that is no qcow2 image has none.
///
/// # Errors
/// It says what is wrong, or the file cannot be read.
pub(crate) fn check(path: &Path) -> io::Result<()> {
    let (mut head, mut file) = (Vec::new(), File::open(path)?.take(MOST));
    file.by_ref().take(QCOW2_MAGIC.len() as u64).read_to_end(&mut head)?;
    if head != QCOW2_MAGIC {
        return Ok(());
    }
    file.read_to_end(&mut head)?;
    of_header(&head)
}

fn of_header(head: &[u8]) -> io::Result<()> {
    let length = match field(head, 4) {
        Some(2) => SHORT,
        _ => field(head, LENGTH).unwrap_or_default() as usize,
    };
    let mut at = length;
    while let (Some(kind), Some(len)) = (field(head, at), field(head, at.saturating_add(4))) {
        let len = len as usize;
        if kind == END {
            break;
        }
        if kind == FEATURE_NAMES && !len.is_multiple_of(ENTRY) {
            return Err(Error::other("its table of feature names is cut off"));
        }
        at = at.saturating_add(8).saturating_add(len.next_multiple_of(8));
    }
    Ok(())
}

/// A field of four bytes.
fn field(head: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*head.get(at..)?.first_chunk()?))
}
