//! What a disk would lose with its power: sectors written since the last flush.
//!
//! The backend below holds the newest contents. This keeps the older ones, so that a power cut can bring any of them back.

use std::{collections::BTreeMap, io};

use fastrand::Rng;
use virtio::{BlockBackend, SECTOR};

type Sector = [u8; SECTOR as usize];

/// Older versions kept at most: 64 MiB. A real cache that is full writes to the disk by itself; so does this one.
const MOST: usize = (64 << 20) / SECTOR as usize;

/// Older contents of sectors that were written since the last flush, oldest first.
#[derive(Default)]
pub(crate) struct WriteCache {
    older: BTreeMap<u64, Vec<Sector>>,
    kept: usize,
}

/// What a power cut did.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Sectors written since the last flush.
    pub(crate) unflushed: u64,
    /// Sectors of these that show older contents now.
    pub(crate) reverted: u64,
}

impl WriteCache {
    /// Keeps what the range holds now, because it is about to be written.
    ///
    /// # Errors
    /// The backend cannot read it.
    pub(crate) fn keep(
        &mut self,
        backend: &mut dyn BlockBackend,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        if self.kept + (len / SECTOR) as usize > MOST {
            backend.flush()?;
            self.flushed();
        }
        let mut data = vec![0; len as usize];
        backend.read_at(offset, &mut data)?;
        let (sectors, _) = data.as_chunks();
        for (sector, content) in (offset / SECTOR..).zip(sectors) {
            self.older.entry(sector).or_default().push(*content);
            self.kept += 1;
        }
        Ok(())
    }

    /// All that was written is on the disk.
    pub(crate) fn flushed(&mut self) {
        *self = Self::default();
    }

    /// Cuts the power: each sector is left with one of the contents it has had since the last flush. A disk promises no
    /// more (virtio 1.2 section 5.2.6.2). A sector is never a mixture of two contents.
    ///
    /// # Errors
    /// The backend cannot write.
    pub(crate) fn cut(
        &mut self,
        backend: &mut dyn BlockBackend,
        random: &mut Rng,
    ) -> io::Result<Cut> {
        let unflushed = self.older.len() as u64;
        let mut reverted = 0;
        for (sector, versions) in &self.older {
            // One more than there are older versions: the newest is there already.
            if let Some(content) = versions.get(random.usize(..=versions.len())) {
                backend.write_at(sector * SECTOR, content)?;
                reverted += 1;
            }
        }
        backend.flush()?;
        self.flushed();
        Ok(Cut { unflushed, reverted })
    }
}
