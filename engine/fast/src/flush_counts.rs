//! Where the guest's kernel counts its flushes, found once it pays.
//!
//! With more processes than Linux has PCIDs each switch is a flush, after which a space would have to be compared with page
//! tables. Linux knows by its own count whether anything has been taken back ([`SpaceVersion`]). Where the count is, the kernel's symbols
//! and types say; to read them takes as long as some thousands of such switches, so it is done after so many.
//!
//! Another kernel may come to run, by kexec, and its count is elsewhere. Each begins without process-context identifiers, so a vCPU
//! without them means that nobody knows any more where the count is.

use crate::slots::Selection;
use ram::Ram;
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};
use wedge_abi::SpaceVersion;
use x86::{
    Vcpu,
    control::cr4,
    paging::{Roots, WalkMemory},
};

/// After so many switches that took a comparison, the kernel is searched for its counts.
const SWITCHES: u64 = 4096;

/// Says where a kernel has its counts.
type Finder = dyn Fn(&Ram, RunningKernel) -> Option<u64> + Send + Sync;

/// The kernel that a vCPU runs.
#[derive(Clone, Copy, Debug)]
pub struct RunningKernel {
    /// Page tables. They are those of a process, which may end.
    pub roots: Roots,
    /// Value of the entry, in the top page table, that maps the kernel's image. The tables that it leads to stay when the process ends.
    pub image: u64,
    /// The entry of system calls (GVA).
    pub entry: u64,
}

impl RunningKernel {
    /// Index, in a top page table, of the entry that maps the kernel's image.
    pub const IMAGE: u64 = 511;

    fn of(vcpu: &Vcpu, mut ram: &Ram) -> Self {
        let roots = Roots::from(vcpu);
        let image = WalkMemory::read_u64(&mut ram, roots.top() + Self::IMAGE * 8);
        Self { roots, image, entry: vcpu.lstar }
    }
}

/// Where the kernel counts, if that is known.
#[derive(Default)]
pub struct FlushCounts {
    finder: Option<Arc<Finder>>,
    /// How many of this kernel's switches took a comparison.
    switches: AtomicU64,
    /// This kernel has been searched.
    searched: AtomicBool,
    /// From the GS base; zero if it is not known.
    offset: AtomicU64,
    /// How many kernels have ended. Whoever writes the offset holds it.
    ended: Mutex<u64>,
}

impl FlushCounts {
    /// The counts are to be found by this finder, which runs in a thread of its own. The finder returns where the kernel has
    /// `cpu_tlbstate.ctxs`, relative to GS, or `None` if the kernel does not count so. The finder must not believe what a program may
    /// have written: who is believed can have flushes left out.
    pub fn new(
        finder: impl Fn(&Ram, RunningKernel) -> Option<u64> + Send + Sync + 'static,
    ) -> Self {
        Self { finder: Some(Arc::new(finder)), ..Self::default() }
    }

    /// Where the counts are, relative to GS; zero if that is not known.
    pub(crate) fn offset(&self) -> u64 {
        self.offset.load(Ordering::Relaxed)
    }

    /// A process has come back to its slot under a PCID that others have had, which takes a comparison.
    pub(crate) fn note_switch(&self) {
        self.switches.fetch_add(1, Ordering::Relaxed);
    }

    /// Looks at a vCPU's state. Once there have been enough switches the kernel is searched; and another one may begin on the vCPU.
    pub(crate) fn heed(self: &Arc<Self>, vcpu: &Vcpu, ram: &Ram) {
        if self.switches.load(Ordering::Relaxed) < SWITCHES {
            return;
        }
        if vcpu.cr4 & cr4::PCIDE == 0 {
            let mut ended = self.ended();
            *ended += 1;
            self.offset.store(0, Ordering::Relaxed);
            self.searched.store(false, Ordering::Relaxed);
            self.switches.store(0, Ordering::Relaxed);
        } else if vcpu.cpl() == 0
            && !self.searched.load(Ordering::Relaxed)
            && !self.searched.swap(true, Ordering::Relaxed)
        {
            self.search(ram.clone(), RunningKernel::of(vcpu, ram));
        }
    }

    fn search(self: &Arc<Self>, ram: Ram, kernel: RunningKernel) {
        let Some(finder) = self.finder.clone() else { return };
        let (counts, before) = (Arc::clone(self), *self.ended());
        let search = move || {
            let found = finder(&ram, kernel);
            tracing::debug!("the guest counts its flushes at {found:x?}");
            let ended = counts.ended();
            if let Some(offset) = found.filter(|_| *ended == before) {
                counts.offset.store(offset, Ordering::Relaxed);
            }
        };
        // Without a thread spaces are compared as before.
        let _ = thread::Builder::new().name("flush-counts".to_owned()).spawn(search);
    }

    /// Counts that are known to be here.
    #[cfg(test)]
    pub(crate) fn at(offset: u64) -> Self {
        Self { offset: offset.into(), ..Self::default() }
    }

    fn ended(&self) -> MutexGuard<'_, u64> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The version of the space that a vCPU's kernel has loaded. `word` reads the kernel's memory.
    pub(crate) fn version(
        &self,
        vcpu: &Vcpu,
        selected: Selection,
        word: impl Fn(u64) -> Option<u64>,
    ) -> Option<SpaceVersion> {
        let bases = [vcpu.seg[x86::seg::GS].base, vcpu.kernel_gs_base];
        let space = (selected.pcid, selected.roots.top());
        let in_kernel = vcpu.cpl() == 0;
        in_kernel.then(|| SpaceVersion::read(space, self.offset(), bases, word)).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::mpsc::channel,
        time::{Duration, Instant},
    };

    fn ram() -> Ram {
        Ram::new(1 << 20).expect("memory")
    }

    /// A kernel that uses process-context identifiers, or one that has just begun.
    fn vcpu(identifiers: bool) -> Vcpu {
        let mut vcpu = Vcpu::before_start_up();
        vcpu.cr4 = if identifiers { cr4::PCIDE } else { 0 };
        vcpu
    }

    fn switch_often(counts: &Arc<FlushCounts>) {
        (0..SWITCHES).for_each(|_| counts.note_switch());
        counts.heed(&vcpu(true), &ram());
    }

    fn wait_for(counts: &FlushCounts, offset: u64) {
        let begin = Instant::now();
        while counts.offset() != offset {
            assert!(begin.elapsed() < Duration::from_secs(10), "{:#x}", counts.offset());
            thread::yield_now();
        }
    }

    #[test]
    fn they_are_searched_for_once_it_pays_and_again_with_another_kernel() {
        let offsets = AtomicU64::new(0x1000);
        let counts =
            Arc::new(FlushCounts::new(move |_, _| Some(offsets.fetch_add(1, Ordering::SeqCst))));
        (1..SWITCHES).for_each(|_| counts.note_switch());
        counts.heed(&vcpu(true), &ram());
        assert!(!counts.searched.load(Ordering::Relaxed), "it is too early");
        counts.note_switch();
        counts.heed(&vcpu(true), &ram());
        wait_for(&counts, 0x1000);
        counts.heed(&vcpu(true), &ram());
        assert_eq!(counts.offset(), 0x1000);
        counts.heed(&vcpu(false), &ram());
        assert_eq!(counts.offset(), 0, "another kernel has begun");
        switch_often(&counts);
        wait_for(&counts, 0x1001);
    }

    #[test]
    fn what_is_found_of_a_kernel_that_has_ended_does_not_count() {
        let (go, wait) = channel::<()>();
        let (wait, (done, ended)) = (Mutex::new(wait), channel::<()>());
        let counts = Arc::new(FlushCounts::new(move |_, _| {
            let _ = wait.lock().expect("one search").recv();
            let _ = done.send(());
            Some(0x1000)
        }));
        switch_often(&counts);
        counts.heed(&vcpu(false), &ram());
        go.send(()).expect("a search");
        ended.recv().expect("a search");
        // The search has its own handle until it has ended.
        while Arc::strong_count(&counts) > 1 {
            thread::yield_now();
        }
        assert_eq!(counts.offset(), 0);
    }

    #[test]
    fn a_version_is_read_where_the_kernel_writes_it() {
        let counts = FlushCounts::at(0x50);
        let mut vcpu = vcpu(true);
        vcpu.seg[x86::seg::GS].base = 0xffff_8880_0000_0000;
        let word = |gva| match gva {
            0xffff_8880_0000_0070 => Some(44),
            0xffff_8880_0000_0078 => Some(5),
            0xffff_8880_0000_0080 => Some(0),
            _ => None,
        };
        let selected =
            |pcid| Selection::uncounted(pcid, Roots { cr3: 0x2000 | pcid, ..Roots::default() });
        let version = |pcid| counts.version(&vcpu, selected(pcid), word);
        assert_eq!(version(3), Some(SpaceVersion { root: 0x2000, owner: 44, flushes: 5 }));
        assert_eq!(version(4), None, "nobody's");
        assert_eq!(FlushCounts::default().version(&vcpu, selected(3), word), None);
    }
}
