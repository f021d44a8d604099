//! What belongs to a machine, and not to one of its vCPUs: translated kernel code, patched system calls, and what is
//! known of pages of programs. (RAM and the marks of its pages are a machine's, too: `ram`.)
//!
//! Translated code contains addresses of the part of a wedge that is reserved. A vCPU may move that elsewhere
//! (`place`). So there is one translation for each base in use, and vCPUs with the same base share it. A translation
//! that is full is left by its vCPUs one after the other, as each comes to need something new; the next that they make
//! is a fresh one. So nobody has to be stopped for space to be used again.

use crate::{
    code::{Code, CodeKind},
    flush_counts::FlushCounts,
    known_blocks::KnownBlocks,
    low::LowPrograms,
    options::{Options, Switches},
    scan_cache::ScanCache,
    sites::Sites,
};
use jit::cache::CodeUser;
use ram::Ram;
use std::{
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak,
        atomic::{AtomicBool, Ordering},
    },
};
use wedge::Common;
use wedge_abi::Base;
use x86::paging::Roots;
use x86_interp::Probes;

/// What the vCPUs of a machine share.
#[derive(Default)]
pub struct Machine {
    several: bool,
    /// Each vCPU has a translation of its own.
    apart: bool,
    /// Computed jumps search, and do not go by landings.
    searches: bool,
    /// Blocks of the kernel that an earlier machine has run, or where those of this machine are noted.
    known: Arc<KnownBlocks>,
    /// Where in its memory the guest's kernel counts the flushes of its TLBs, once that has been found out.
    pub(crate) counts: Arc<FlushCounts>,
    translations: Mutex<Vec<Weak<Translation>>>,
    pub(crate) scans: ScanCache,
    pub(crate) low: LowPrograms,
}

/// Translated kernel code and patched system calls, for wedges with one base.
pub(crate) struct Translation {
    pub common: Arc<Common>,
    pub sites: Sites,
    code: Mutex<Code>,
    /// Several vCPUs may use it.
    pub several: bool,
    /// Nobody is to join it any more.
    closed: AtomicBool,
}

impl Machine {
    /// Of one vCPU, or of several.
    #[must_use]
    pub fn new(vcpus: usize) -> Arc<Self> {
        Arc::new(Self { several: vcpus > 1, ..Self::default() })
    }

    /// A machine of so many vCPUs, run as the options say. `known`: blocks of the kernel that an earlier machine has run, or where
    /// those of this machine are noted. Nobody uses them if each vCPU has a translation of its own. `counts` finds out
    /// where the guest's kernel counts its flushes.
    #[must_use]
    pub fn with(
        vcpus: usize,
        known: Arc<KnownBlocks>,
        counts: FlushCounts,
        options: &Options,
    ) -> Arc<Self> {
        let (apart, searches) = (options.translations_apart, options.search_jumps);
        let known = if apart { Arc::default() } else { known };
        let counts = match options.switches {
            Switches::Compared => Arc::default(),
            Switches::Counted | Switches::Checked => Arc::new(counts),
        };
        Arc::new(Self { several: vcpus > 1, apart, searches, known, counts, ..Self::default() })
    }

    /// The translation for wedges with a base.
    pub(crate) fn translation(&self, base: Base) -> io::Result<Arc<Translation>> {
        if self.apart {
            return self.own_translation(base);
        }
        let mut all = self.translations.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|one| one.strong_count() > 0);
        let open = |one: &Arc<Translation>| {
            one.common.base() == base && !one.closed.load(Ordering::Relaxed)
        };
        if let Some(found) = all.iter().filter_map(Weak::upgrade).find(open) {
            return Ok(found);
        }
        let new = Translation::new(base, self.kind(self.several), Arc::clone(&self.known))?;
        all.push(Arc::downgrade(&new));
        Ok(new)
    }

    /// One for a vCPU that can share none.
    pub(crate) fn own_translation(&self, base: Base) -> io::Result<Arc<Translation>> {
        Translation::new(base, self.kind(false), Arc::clone(&self.known))
    }

    fn kind(&self, several: bool) -> CodeKind {
        CodeKind { landings: !self.searches, ..CodeKind::kernel(several) }
    }
}

impl Translation {
    fn new(base: Base, kind: CodeKind, known: Arc<KnownBlocks>) -> io::Result<Arc<Self>> {
        let common = Arc::new(Common::new(base)?);
        let code = Code::new(Arc::clone(common.code()), base, kind, known);
        let (sites, closed) = Default::default();
        Ok(Arc::new(Self { common, sites, code: Mutex::new(code), closed, several: kind.several }))
    }

    /// The code, for the vCPU whose handle of RAM this is. While it waits for others it counts as one that runs no
    /// guest code: who has the code may be waiting for it to hear that a page holds code.
    pub fn lock(&self, ram: &Ram) -> MutexGuard<'_, Code> {
        match self.code.try_lock() {
            Ok(code) => code,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            Err(TryLockError::WouldBlock) => {
                ram.wait_for(|| self.code.lock().unwrap_or_else(PoisonError::into_inner))
            }
        }
    }

    /// Nobody is to join it any more.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }
}

/// A vCPU's part in a translation.
pub(crate) struct Share {
    pub translation: Arc<Translation>,
    pub user: CodeUser,
    ram: Ram,
    /// It has said that it is outside of translated code.
    resting: bool,
}

impl Share {
    /// Of the vCPU whose handle of RAM this is.
    pub fn new(translation: Arc<Translation>, ram: &Ram) -> Self {
        let user = translation.lock(ram).cache.add_user();
        Self { translation, user, ram: ram.clone(), resting: true }
    }

    /// The code.
    pub fn lock(&self) -> MutexGuard<'_, Code> {
        self.translation.lock(&self.ram)
    }

    /// The vCPU, which has these page tables, is about to run guest code; false if others have other code than it.
    pub fn come_in(&mut self, roots: Roots) -> bool {
        let rested = self.resting;
        let done = !rested || self.lock().come_in(&self.ram, roots, self.user).is_ok();
        self.resting = !done;
        done
    }

    /// The vCPU runs no guest code for a while.
    pub fn rest(&mut self) {
        if !std::mem::replace(&mut self.resting, true) {
            self.lock().cache.rest(self.user);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.rest();
        self.lock().set_probes(self.user, &Probes::default());
    }
}

#[cfg(test)]
mod tests;
