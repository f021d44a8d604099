//! What is left of a space's mappings after a flush: what the page tables still say.
//!
//! A TLB may load a translation again as soon as it has been flushed, so a mapping that would be made again
//! now may as well stay; after a fork, and after the flushes of everything with which Linux changes its own
//! memory, most would. What is compared is all that went into the mapping: the page, the rights, the dirty
//! bit before writing, whose it is, whether it is global; and, of large pages, that flushes of their parts
//! still find them.
//!
//! What the page tables do not say is *closed*, if it shows a page of RAM: the mapping stays, without rights.
//! A child that has been forked has none of its program's text in its page tables at first, and will have the
//! same there, at the same addresses, as soon as it runs it; to give rights back costs a third of a mapping,
//! and little more for sixteen pages than for one. What is closed and not shown again by the next comparison
//! is unmapped. Pages that the running process has given back are unmapped at once, because other pages usually
//! take their place.
//!
//! A child's page tables say of no page that it has been accessed. A CPU may load such translations as soon
//! as they are there, and sets the bit then; so is done once, when a child first runs, with those pages that
//! are mapped here already. If none of them are in the page tables it is another program that has come, and
//! nothing of what is mapped will be of use.

use super::{
    COUNTS, Pressure, Space,
    revalidation::{Revalidation, SAMPLE},
    youth::FEW,
};
use crate::process::Process;
use ram::Ram;
use std::time::Instant;
use wedge::Error;
use x86::{
    control::{cr0, efer},
    paging::{self, Roots, WalkMemory},
};

/// To drop more of the kernel's mappings than so many one by one is not worth it: a kernel that has none global.
const MANY: usize = 256;

/// Who the page tables belong to that a space is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// The process that runs here. Pages that its page tables lack by now were given back, and are unlikely to return.
    Running,
    /// The process it was of, or another of the same program.
    Same,
    /// One that has just been forked from such a process, and has not run: none of its pages has been used.
    Newborn,
    /// Another, or nobody knows.
    Other,
}

/// A sample ([`Revalidation::sample`]) of a newborn process: enough pages are present, and none has been used.
const fn is_newborn((present, used): (usize, usize)) -> bool {
    used == 0 && present >= SAMPLE.1
}

impl<W: Process> Space<W> {
    /// Parks it: nothing runs here until its page table is loaded again, and then what is mapped is compared
    /// with that. With `all` there was a flush of everything: the global mappings, too.
    pub fn park(&mut self, all: bool) {
        self.pcid = None;
        self.mapper.wedge().publish(None);
        self.stale |= all;
    }

    /// Drops what is not what the page tables say now, after all flushes while it was parked.
    pub fn come_back(&mut self, ram: &Ram, roots: Roots) -> Result<(), Error> {
        let owner = match self.sample(ram, roots) {
            sample if is_newborn(sample) => Owner::Newborn,
            // Another of the same program shares its text with this one, and may share more.
            (present, _) if present >= SAMPLE.1 => Owner::Same,
            // The page of the top table may have come to be another's.
            (present, _) if present != 0 && self.root == roots.top() => Owner::Same,
            _ => Owner::Other,
        };
        if owner != Owner::Same {
            self.pressure = Pressure::default();
        }
        let owner = if self.mapper.wedge().keeps() { owner } else { Owner::Same };
        if std::mem::take(&mut self.stale) {
            return self.compare_all(ram, roots, owner);
        }
        self.compare(ram, roots, owner)
    }

    /// Checks that what is mapped is right by these page tables, whose version says so, and changes nothing. A kernel takes pages back
    /// first and counts that later. So a difference is an error only once the kernel has not counted it for [`COUNTS`].
    ///
    /// # Errors
    /// [`Error::Miscounted`] if the page tables do not say all of it any more.
    pub(crate) fn check(&mut self, ram: &Ram, roots: Roots) -> Result<(), Error> {
        let Some(page) = self.against(ram, roots).first_stale() else {
            self.doubted = None;
            return Ok(());
        };
        match self.doubted.get_or_insert_with(Instant::now).elapsed() > COUNTS {
            true => Err(Error::Miscounted(page)),
            false => Ok(()),
        }
    }

    /// The owner of the current space after a flush. A new child may have its predecessor's top page table and process-context
    /// identifier, and then gets the same space without parking.
    fn running(&self, ram: &Ram, roots: Roots) -> Owner {
        let newborn = self.mapper.wedge().keeps() && is_newborn(self.sample(ram, roots));
        if newborn { Owner::Newborn } else { Owner::Running }
    }

    fn sample(&self, ram: &Ram, roots: Roots) -> (usize, usize) {
        self.against(ram, roots).sample()
    }

    /// Whether the process with these page tables has certainly run: of the pages that are mapped here, it has used more than a program
    /// has that was just loaded.
    pub(super) fn has_run(&self, ram: &Ram, roots: Roots) -> bool {
        self.sample(ram, roots).1 > FEW
    }

    /// What is mapped, compared with page tables.
    fn against<'a>(&'a self, ram: &'a Ram, roots: Roots) -> Revalidation<'a> {
        Revalidation::new(&self.mapper, ram, roots)
    }

    /// Pages of a process with these page tables are probably where they were mapped here: it is the same
    /// program at the same addresses, as a child is that has been forked.
    pub fn fits(&self, ram: &Ram, roots: Roots) -> bool {
        self.mapper.wedge().keeps() && self.sample(ram, roots).0 >= SAMPLE.1
    }

    /// So of a process that has not run since it was forked. `None` if it has run: that is so of each space then.
    pub fn fits_newborn(&self, ram: &Ram, roots: Roots) -> Option<bool> {
        match self.sample(ram, roots) {
            (_, 1..) => None,
            sample => Some(self.mapper.wedge().keeps() && is_newborn(sample)),
        }
    }

    /// Whether this space's process has certainly ended: the process's top page table has no user entry left. An ended process
    /// is not recognized once another process uses the page of that table.
    pub fn is_left_behind(&self, ram: &Ram) -> bool {
        let mut memory = ram;
        (0..self.entries_of_programs as u64)
            .all(|entry| memory.read_u64(self.root + entry * 8) & paging::P == 0)
    }

    /// Drops every mapping that is not global and not what the page tables say now.
    pub fn revalidate(&mut self, ram: &Ram, roots: Roots) -> Result<(), Error> {
        let owner = self.running(ram, roots);
        self.compare(ram, roots, owner)
    }

    fn compare(&mut self, ram: &Ram, roots: Roots, owner: Owner) -> Result<(), Error> {
        self.mapper.forget_program();
        self.revalidate_local(ram, roots)?;
        // While there are such pages, each INVLPG is the monitor's to do.
        if self.mapper.mappings().has_user_large() || owner == Owner::Other {
            return self.mapper.clear_user();
        }
        self.revalidate_large(ram, roots, false)?;
        self.revalidate_user(ram, roots, owner)
    }

    /// Drops every mapping that is not what the page tables say now, the global ones included.
    pub fn revalidate_all(&mut self, ram: &Ram, roots: Roots) -> Result<(), Error> {
        let owner = self.running(ram, roots);
        self.compare_all(ram, roots, owner)
    }

    fn compare_all(&mut self, ram: &Ram, roots: Roots, owner: Owner) -> Result<(), Error> {
        let modes = efer::LMA | efer::NXE;
        if roots.cr0 & cr0::PG == 0 || roots.efer & modes != modes {
            return self.clear_all(); // what is compared means something else there
        }
        self.revalidate_large(ram, roots, true)?;
        self.revalidate_kernel(ram, roots)?;
        self.compare(ram, roots, owner)
    }

    /// Drops large pages, the kernel's global ones or the user's, that are not what the page tables say now.
    fn revalidate_large(&mut self, ram: &Ram, roots: Roots, kernel: bool) -> Result<(), Error> {
        let gone = self.against(ram, roots).stale_large(kernel);
        self.mapper.drop_ranges(&gone)
    }

    fn revalidate_kernel(&mut self, ram: &Ram, roots: Roots) -> Result<(), Error> {
        let gone = self.against(ram, roots).stale_kernel();
        self.mapper.unmap_kernel_pages(&gone)
    }

    /// Drops the kernel's mappings that are not global, and not what the page tables say now.
    fn revalidate_local(&mut self, ram: &Ram, roots: Roots) -> Result<(), Error> {
        let gone = self.against(ram, roots).stale_local();
        if gone.len() > MANY {
            return self.clear_all();
        }
        self.mapper.drop_ranges(&gone)
    }

    fn revalidate_user(&mut self, ram: &Ram, roots: Roots, owner: Owner) -> Result<(), Error> {
        let mut seen = self.mapper.take_seen();
        let compared = self.against(ram, roots);
        let changes = match owner {
            Owner::Newborn => compared.newborn(),
            Owner::Running => compared.dropping().user(&mut seen),
            Owner::Same | Owner::Other => compared.user(&mut seen),
        };
        self.mapper.put_seen(seen);
        self.mapper.close_to_writes(&changes.read_only)?;
        self.mapper.close(&changes.closed)?;
        self.mapper.unmap_pages(&changes.gone)?;
        changes
            .moved
            .iter()
            .try_for_each(|(hva, offset, protection)| self.mapper.remap(*hva, *offset, *protection))
    }
}
