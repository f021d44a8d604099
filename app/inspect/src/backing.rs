//! The memory object behind RAM, read without touching what the guest has not touched: a hole that is read through a mapping
//! becomes a page of the host's.

use std::{fs::File, io, os::unix::fs::FileExt};

use ram::Ram;
use rustix::{
    fs::{SeekFrom, seek},
    io::Errno,
};

/// The memory object. Bytes are counted as in it: RAM without the hole below 4 GiB.
pub struct Backing {
    file: File,
    len: u64,
}

impl Backing {
    /// That of a machine's RAM.
    ///
    /// # Errors
    /// The host gives no descriptor.
    pub fn new(ram: &Ram) -> io::Result<Self> {
        let file = File::from(ram.descriptors()?[0].try_clone_to_owned()?);
        Ok(Self { file, len: ram.len() })
    }

    /// Reads all that there is room for.
    ///
    /// # Errors
    /// It is not all RAM.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(bytes, offset)
    }

    /// The next range from an offset on that the guest has touched: its first and its last offset, which is not in it.
    pub fn touched(&self, from: u64) -> Option<(u64, u64)> {
        let find = |place| match seek(&self.file, place) {
            Err(Errno::NXIO) => None,
            // Without such a look all of it counts.
            Err(_) => Some(from),
            Ok(found) => Some(found),
        };
        let start = find(SeekFrom::Data(from)).filter(|start| *start < self.len)?;
        let end = seek(&self.file, SeekFrom::Hole(start)).unwrap_or(self.len);
        Some((start, end.clamp(start + 1, self.len)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_touched_is_not_touched_by_a_look_at_it() {
        let ram = Ram::new(8 << 20).expect("memory");
        ram.write_gpa(0x20_0000, &[1]).expect("inside");
        ram.write_gpa(0x7f_f000, &[2]).expect("inside");
        let backing = Backing::new(&ram).expect("a descriptor");
        let mut ranges = Vec::new();
        let mut from = 0;
        while let Some((start, end)) = backing.touched(from) {
            ranges.push((start, end));
            from = end;
        }
        // Hosts with large pages for shared memory have touched more.
        assert!(ranges.iter().any(|(start, end)| (*start..*end).contains(&0x20_0000)));
        assert!(ranges.iter().any(|(start, end)| (*start..*end).contains(&0x7f_f000)));
        let touched =
            |ranges: &[(u64, u64)]| ranges.iter().map(|(start, end)| end - start).sum::<u64>();
        let mut bytes = vec![9; 8 << 20];
        backing.read(0, &mut bytes).expect("all is there");
        assert_eq!((bytes[0], bytes[0x20_0000], bytes[0x7f_f000]), (0, 1, 2));
        let mut after = Vec::new();
        let mut from = 0;
        while let Some((start, end)) = backing.touched(from) {
            after.push((start, end));
            from = end;
        }
        assert_eq!(touched(&after), touched(&ranges), "reading has touched nothing");
    }
}
