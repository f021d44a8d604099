//! A slot per guest address space, so that a context switch changes processes, not mappings.

use crate::shadow::Space;
use ram::Ram;
use wedge::{Error, Kick, Wedge};
use x86_interp::{Flush, Record};

/// Address spaces kept; Linux uses six PCIDs a CPU.
const MAX_SLOTS: usize = 12;

/// The slots, least recently used first.
pub struct Slots {
    ram: Ram,
    kick: Kick,
    spaces: Vec<Space>,
}

impl Slots {
    pub fn new(ram: Ram, kick: Kick) -> Self {
        Self { ram, kick, spaces: Vec::new() }
    }

    /// The slot for an address space.
    pub fn get(&mut self, cr3: u64) -> Result<&mut Space, Error> {
        let space = match self.spaces.iter().position(|space| space.cr3 == cr3) {
            Some(at) => self.spaces.remove(at),
            None => self.take(cr3)?,
        };
        self.spaces.push(space);
        let last = self.spaces.len() - 1;
        Ok(&mut self.spaces[last])
    }

    /// An empty slot: a fresh one, or the least recently used one emptied.
    fn take(&mut self, cr3: u64) -> Result<Space, Error> {
        if self.spaces.len() < MAX_SLOTS {
            let wedge = Wedge::start(self.ram.fd(), self.kick.clone())?;
            return Ok(Space::new(wedge, cr3));
        }
        let mut space = self.spaces.remove(0);
        space.clear()?;
        space.cr3 = cr3;
        Ok(space)
    }

    /// Does what the interpreter has reported. A slot whose process fails shows it when it runs.
    pub fn apply(&mut self, record: &Record) {
        for flush in &record.flushes {
            for space in &mut self.spaces {
                let same = |pcid: u16| space.cr3 & 0xfff == u64::from(pcid);
                let _ = match *flush {
                    Flush::All => space.clear(),
                    Flush::Space { pcid } if same(pcid) => space.clear(),
                    Flush::Page { pcid, linear } if same(pcid) => space.drop_page(linear),
                    _ => Ok(()),
                };
            }
        }
        for page in &record.code_pages {
            for space in &mut self.spaces {
                if space.writable.contains(page) {
                    let _ = space.clear();
                }
            }
        }
    }
}
