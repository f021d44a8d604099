//! Blocks of a kernel's code that an earlier machine with the same kernel has run, translated.
//!
//! A block that is not there costs a turn of the monitor, and its translation. A kernel starts in the same way each time.
//! So a machine notes which blocks it makes ([`KnownBlocks::to_note`]), and somebody translates them for later machines
//! ([`translate_noted`]). These have them all from the start, asleep ([`jit::cache::kept`]), and wake those of a page
//! together. As it starts, a kernel writes to its own code, and what it runs in a page before that is not what it runs
//! behind it: a block is known with the number of times that the blocks of its page had been dropped.
//!
//! What is known may be wrong: a block wakes only where the guest has the bytes that it was made from. Who notes is not
//! trusted: what is noted are bytes of the guest's, and no translation.

use crate::code::{CodeKind, layout};
use jit::{
    Layout,
    cache::kept::{Keeper, Kept, MadeBlock},
};
use std::{
    io,
    sync::{Mutex, PoisonError},
    thread::{self, JoinHandle},
};
use wedge_abi::Base;

/// The kernel's text, its modules and its packet filters lie from here on (Linux, x86_64/mm.rst).
const START: u64 = 0xffff_ffff_0000_0000;
/// The most blocks that are noted: as many as two starts of a kernel of Debian's make.
const MOST: usize = 1 << 17;
/// The most bytes of instructions of a block.
const LONGEST: usize = 1 << 10;
/// Bytes of a noted block before those of its instructions.
const HEAD: usize = 15;

/// Blocks of kernel code that a machine knows, or that it notes for later machines.
#[derive(Debug, Default)]
pub struct KnownBlocks {
    /// The thread that reads the known blocks, until the kernel's code takes them.
    known: Mutex<Option<JoinHandle<Option<Kept>>>>,
    /// The blocks that the machine has made, if it notes them.
    noted: Option<Mutex<Noted>>,
}

#[derive(Debug, Default)]
struct Noted {
    blocks: usize,
    bytes: Vec<u8>,
}

impl KnownBlocks {
    /// For a machine that knows no blocks, and notes those that it makes.
    #[must_use]
    pub fn to_note() -> Self {
        Self { known: Mutex::default(), noted: Some(Mutex::default()) }
    }

    /// For a machine that begins with what [`translate_noted`] has made for machines of one vCPU or of `several`. A thread
    /// reads these blocks while the machine is built.
    ///
    /// # Errors
    /// The host gives no thread.
    pub fn reading<B: AsRef<[u8]> + Send + 'static>(
        several: bool,
        read: impl FnOnce() -> Option<B> + Send + 'static,
    ) -> io::Result<Self> {
        let parse = move || Kept::parse(&usual_layout(several), read()?);
        let thread = thread::Builder::new().name("known-blocks".to_owned()).spawn(parse)?;
        Ok(Self { known: Mutex::new(Some(thread)), noted: None })
    }

    /// The blocks that have been noted, in the order in which they were made, for [`translate_noted`].
    #[must_use]
    pub fn noted(&self) -> Vec<u8> {
        let noted = self.noted.as_ref().map(|noted| noted.lock());
        noted.map_or_else(Vec::new, |noted| {
            noted.unwrap_or_else(PoisonError::into_inner).bytes.clone()
        })
    }

    /// Takes the known blocks out, if they are for this layout. Only the first caller gets them.
    pub(crate) fn take(&self, layout: &Layout) -> Option<Kept> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        known.join().ok().flatten().filter(|kept| kept.is_for(layout))
    }

    /// Blocks that the machine makes are to be noted.
    pub(crate) fn are_noted(&self) -> bool {
        self.noted.is_some()
    }

    /// Notes a block that has been made.
    pub(crate) fn note(&self, made: &MadeBlock<'_>) {
        let Some(noted) = self.noted.as_ref().filter(|_| made.guest >= START) else { return };
        let mut noted = noted.lock().unwrap_or_else(PoisonError::into_inner);
        if noted.blocks < MOST {
            noted.blocks += 1;
            noted.bytes.extend(encoded_head(made));
            noted.bytes.extend_from_slice(made.bytes);
        }
    }
}

fn encoded_head(made: &MadeBlock<'_>) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..8].copy_from_slice(&made.guest.to_le_bytes());
    head[8..10].copy_from_slice(&made.times.to_le_bytes());
    head[10..12].copy_from_slice(&(made.len as u16).to_le_bytes());
    head[12..14].copy_from_slice(&(made.bytes.len() as u16).to_le_bytes());
    head[14] = u8::from(made.ac) | u8::from(made.landing) << 1;
    head
}

/// The first of the noted blocks, and the rest; `None` if it is not as a machine notes them.
fn decoded(noted: &[u8]) -> Option<(MadeBlock<'_>, &[u8])> {
    let (head, rest) = noted.split_first_chunk::<HEAD>()?;
    let [guest @ .., a, b, c, d, e, f, how] = head;
    let [times, len, read] = [[*a, *b], [*c, *d], [*e, *f]].map(u16::from_le_bytes);
    let (len, read) = (usize::from(len), usize::from(read));
    let (bytes, rest) = rest.split_at_checked(read)?;
    let (ac, landing) = (how & 1 != 0, how & 2 != 0);
    let made = MadeBlock { guest: u64::from_le_bytes(*guest), ac, times, landing, len, bytes };
    (made.guest >= START && len <= read && read <= LONGEST).then_some((made, rest))
}

/// Where the code of a kernel lies whose host programs do not need other places ([`crate::place`]).
fn usual_layout(several: bool) -> Layout {
    layout(CodeKind::kernel(several), Base::default())
}

/// Translates the blocks that a machine has noted, for machines of one vCPU or of `several`. Later machines read the result by
/// [`KnownBlocks::reading`]. `noted` may be any bytes: those that describe no blocks end the list.
#[must_use]
pub fn translate_noted(several: bool, mut noted: &[u8]) -> Vec<u8> {
    let mut keeper = Keeper::new(usual_layout(several));
    let mut all = Vec::new();
    while let Some((made, rest)) = decoded(noted).filter(|_| all.len() < MOST) {
        noted = rest;
        all.push(made);
    }
    all.sort_by_key(MadeBlock::rank);
    all.dedup_by_key(|made| made.rank());
    for made in &all {
        // What cannot be translated is interpreted, if a guest comes there.
        let _ = keeper.add(made);
    }
    keeper.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RET: &[u8] = &[0xc3];

    fn made(guest: u64, bytes: &[u8]) -> MadeBlock<'_> {
        MadeBlock { guest, ac: false, times: 0, landing: false, len: bytes.len(), bytes }
    }

    fn translated(noted: &[u8]) -> Option<Kept> {
        Kept::parse(&usual_layout(false), translate_noted(false, noted))
    }

    #[test]
    fn what_is_noted_is_read_as_it_was() {
        let noting = KnownBlocks::to_note();
        let all = [
            MadeBlock { landing: true, ..made(START, &[0xc2, 8, 0]) },
            MadeBlock { ac: true, times: 7, ..made(u64::MAX, RET) },
        ];
        all.iter().for_each(|made| noting.note(made));
        noting.note(&made(0xffff_8880_0000_0000, RET));
        let noted = noting.noted();
        let (first, rest) = decoded(&noted).expect("a block");
        let (second, rest) = decoded(rest).expect("another block");
        assert_eq!(([first, second], rest.len()), (all, 0), "and none of elsewhere");
        KnownBlocks::default().note(&all[0]);
    }

    /// A machine that was taken over notes what it likes.
    #[test]
    fn whatever_is_noted_does_no_harm() {
        let noting = KnownBlocks::to_note();
        let long = [0x90; LONGEST + 1];
        for bytes in [RET, &[], &[0x0f], &[0x0f, 0x01, 0xef], &long, &long[1..]] {
            noting.note(&made(START, bytes));
            noting.note(&MadeBlock { times: 1, ..made(u64::MAX, bytes) });
            noting.note(&MadeBlock { len: 0, times: 2, ..made(START, bytes) });
        }
        let noted = noting.noted();
        for len in 0..noted.len() {
            assert!(translated(&noted[..len]).is_some(), "{len} bytes");
        }
        for at in 0..HEAD {
            let mut changed = noted.clone();
            changed[at] ^= 0xff;
            assert!(translated(&changed).is_some(), "changed at {at}");
        }
    }
}
