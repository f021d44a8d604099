//! What is kept of each block, in order of host addresses, because space is handed out upwards.
//!
//! A booted kernel has a hundred thousand blocks with a million marks: all of it is packed. Blocks, marks and
//! jumps lie in a vector each, those of a block end where the next one's begin, and what marks have to undo is
//! one of a few hundred combinations. Nothing is taken out before all is.

mod kept;

use super::{Key, Source, Variant};
use crate::{
    Link,
    block::Block,
    recover::{Fixes, Mark},
};
use rustc_hash::FxHashMap;
use std::ops::Range;

/// Which block, or which jump, in the order they were made.
pub(super) type Number = u32;

/// No jump.
pub(super) const NONE: Number = Number::MAX;

struct Placed {
    guest: u64,
    /// RAM page numbers of its bytes.
    pages: [u32; 2],
    first_mark: Number,
    first_jump: Number,
    /// The first of the jumps that lead here.
    incoming: Number,
    guest_len: u16,
    len: u16,
    /// Offset of the code that jumps from the same page enter: behind the gate (`emit/gate.rs`), or the gate itself if it asks for two
    /// pages. In a block without a gate, offset of the code behind the landing (`emit/landing.rs`); zero if there is none.
    body: u16,
    variant: Variant,
    state: State,
    /// Writes to pages of code before it was made.
    writes: u64,
}

/// What has become of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// It was there from the start ([`super::kept`]), and has not been asked for.
    Asleep,
    Live,
    Dropped,
}

/// A mark in six bytes.
struct Packed {
    host: u16,
    guest: u16,
    /// Index of the mark's [`Kind`] among those that have occurred.
    kind: u16,
}

/// `boundary`, `undoes` and `fixes` of a mark.
type Kind = (bool, bool, Fixes);

/// A direct jump of a block.
pub(super) struct Jump {
    /// Where it leads.
    pub target: u64,
    /// Its block.
    pub from: Number,
    /// The next one in the list it is in.
    pub next: Number,
    /// It has led to a block of its group from the start ([`super::kept`]).
    pub kept: bool,
    displacement: u16,
    variant: Variant,
}

/// Blocks there is address space for from the start.
const BLOCKS: usize = 1 << 17;
/// Blocks, marks and jumps there may be, with which the records take some 50 MiB at the most: a guest can have its code be in the
/// smallest of pieces. A kernel that has booted has half of them.
const MAX_BLOCKS: usize = 3 << 16;
const MAX_MARKS: usize = 10 * MAX_BLOCKS;
const MAX_JUMPS: usize = 2 * MAX_BLOCKS;

/// All blocks.
pub(super) struct BlockRecords {
    /// Bytes before the gate, in blocks that have a gate (`emit/gate.rs`).
    head: u64,
    /// Host addresses.
    starts: Vec<u64>,
    blocks: Vec<Placed>,
    marks: Vec<Packed>,
    pub jumps: Vec<Jump>,
    kinds: Vec<Kind>,
    kind_of: FxHashMap<Kind, u16>,
}

impl BlockRecords {
    /// No blocks. Vectors that grow leave as much behind as they hold, so these have space for a kernel; what
    /// is not used of it is no memory.
    pub fn new(head: u64) -> Self {
        Self {
            head,
            starts: Vec::with_capacity(BLOCKS),
            blocks: Vec::with_capacity(BLOCKS),
            marks: Vec::with_capacity(10 * BLOCKS),
            jumps: Vec::with_capacity(2 * BLOCKS),
            kinds: Vec::new(),
            kind_of: FxHashMap::default(),
        }
    }

    /// Forgets all blocks.
    pub fn clear(&mut self) {
        self.starts.clear();
        self.blocks.clear();
        self.marks.clear();
        self.jumps.clear();
        self.kinds.clear();
        self.kind_of.clear();
    }

    /// A block can be entered.
    pub fn have_room(&self, block: &Block) -> bool {
        let short = |len: usize| len <= usize::from(u16::MAX);
        let kinds = short(self.kinds.len() + block.marks.len());
        let marks = self.marks.len() + block.marks.len() <= MAX_MARKS;
        let jumps = self.jumps.len() + block.links.len() <= MAX_JUMPS;
        kinds && marks && jumps && self.blocks.len() < MAX_BLOCKS && short(block.code.len())
    }

    /// Enters a block, which there is room for.
    pub fn enter(
        &mut self,
        block: &Block,
        variant: Variant,
        pages: [u64; 2],
        writes: u64,
    ) -> Number {
        let number = self.blocks.len() as Number;
        let placed = Placed {
            guest: block.guest,
            pages: page_numbers(pages),
            first_mark: self.marks.len() as Number,
            first_jump: self.jumps.len() as Number,
            incoming: NONE,
            guest_len: block.guest_len as u16,
            len: block.code.len() as u16,
            body: if variant.page().is_none() || pages[0] == pages[1] {
                block.body as u16
            } else {
                self.head as u16
            },
            variant,
            state: State::Live,
            writes,
        };
        self.starts.push(block.host);
        self.blocks.push(placed);
        for mark in &block.marks {
            let kind = self.kind(mark);
            self.marks.push(Packed { host: mark.host as u16, guest: mark.guest as u16, kind });
        }
        self.jumps
            .extend(block.links.iter().map(|link| Jump::new(number, (block.guest, variant), link)));
        number
    }

    fn kind(&mut self, mark: &Mark) -> u16 {
        let kind = (mark.boundary, mark.undoes, mark.fixes);
        *self.kind_of.entry(kind).or_insert_with(|| {
            self.kinds.push(kind);
            (self.kinds.len() - 1) as u16
        })
    }

    /// HVA of a block's first byte.
    pub fn host(&self, number: Number) -> u64 {
        self.starts[number as usize]
    }

    /// HVA at which a jump enters a block: behind the gate if the jump comes from the block's page.
    pub fn entry(&self, jump: Number, to: Number) -> u64 {
        let variant = self.blocks[to as usize].variant;
        if self.jumps[jump as usize].variant == variant { self.body(to) } else { self.front(to) }
    }

    /// HVA at which others enter a block: at its gate, but behind its landing or what is before the gate.
    pub fn front(&self, number: Number) -> u64 {
        let has_gate = self.blocks[number as usize].variant.page().is_some();
        if has_gate { self.host(number) + self.head } else { self.body(number) }
    }

    /// HVA of a block's landing; `None` if the block has none.
    pub fn landing(&self, number: Number) -> Option<u64> {
        let block = &self.blocks[number as usize];
        (block.variant.page().is_none() && block.body != 0).then(|| self.host(number))
    }

    /// HVA of what is behind the gate or the landing.
    fn body(&self, number: Number) -> u64 {
        self.host(number) + u64::from(self.blocks[number as usize].body)
    }

    /// What a block is asked for by.
    pub fn key(&self, number: Number) -> Key {
        let block = &self.blocks[number as usize];
        (block.guest, block.variant)
    }

    /// All of a block's bytes are of one page.
    pub fn is_of_one_page(&self, number: Number) -> bool {
        let [first, second] = self.blocks[number as usize].pages;
        first == second
    }

    /// A block has not been dropped.
    pub fn is_live(&self, number: Number) -> bool {
        self.blocks[number as usize].state == State::Live
    }

    /// A block that was there from the start has not been asked for.
    pub fn is_asleep(&self, number: Number) -> bool {
        self.blocks[number as usize].state == State::Asleep
    }

    /// Has a block be live that was asleep.
    pub fn wake(&mut self, number: Number, pages: [u64; 2], writes: u64) {
        let block = &mut self.blocks[number as usize];
        block.pages = page_numbers(pages);
        (block.state, block.writes) = (State::Live, writes);
    }

    /// How many writes to pages of code there had been before a block was made.
    pub fn writes(&self, number: Number) -> u64 {
        self.blocks[number as usize].writes
    }

    /// Notes that a block is dropped; false if it was already.
    pub fn drop(&mut self, number: Number) -> bool {
        let state = &mut self.blocks[number as usize].state;
        let was_live = *state == State::Live;
        if was_live {
            *state = State::Dropped;
        }
        was_live
    }

    /// The block that an HVA lies in, if it has not been dropped.
    pub fn live_at(&self, hva: u64) -> Option<Number> {
        self.at(hva).filter(|number| self.is_live(*number))
    }

    /// The block that an HVA lies in, whether it has been dropped or not.
    pub fn at(&self, hva: u64) -> Option<Number> {
        let number = self.starts.partition_point(|start| *start <= hva).checked_sub(1)?;
        let block = &self.blocks[number];
        let inside = hva < self.starts[number] + u64::from(block.len);
        inside.then_some(number as Number)
    }

    /// The mark that covers a host offset in a block.
    pub fn mark(&self, number: Number, offset: u32) -> Option<Mark> {
        let next = self.blocks.get(number as usize + 1).map(|block| block.first_mark as usize);
        let first = self.blocks[number as usize].first_mark as usize;
        let marks = &self.marks[first..next.unwrap_or(self.marks.len())];
        let after = marks.partition_point(|mark| u32::from(mark.host) <= offset);
        let mark = &marks[after.checked_sub(1)?];
        let (boundary, undoes, fixes) = self.kinds[usize::from(mark.kind)];
        Some(Mark { host: mark.host.into(), guest: mark.guest.into(), boundary, fixes, undoes })
    }

    /// A block's own jumps.
    pub fn jumps_of(&self, number: Number) -> Range<Number> {
        let next = self.blocks.get(number as usize + 1).map(|block| block.first_jump);
        self.blocks[number as usize].first_jump..next.unwrap_or(self.jumps.len() as Number)
    }

    /// The first of the jumps that lead to a block.
    pub fn incoming(&mut self, number: Number) -> &mut Number {
        &mut self.blocks[number as usize].incoming
    }

    /// HVA of each block that is or was live, and what it was made from.
    pub fn all(&self) -> impl Iterator<Item = (u64, Source)> {
        let all = (0..self.blocks.len() as Number).filter(|number| !self.is_asleep(*number));
        all.map(|number| (self.host(number), self.source(number)))
    }

    /// What a block was made from.
    pub fn source(&self, number: Number) -> Source {
        let block = &self.blocks[number as usize];
        Source {
            guest: block.guest,
            guest_len: block.guest_len.into(),
            host_len: block.len.into(),
            pages: block.pages.map(|page| u64::from(page) << 12),
        }
    }
}

/// The page numbers of RAM offsets.
fn page_numbers(pages: [u64; 2]) -> [u32; 2] {
    pages.map(|offset| (offset >> 12) as u32)
}

impl Jump {
    /// A jump of the block with this key. A block with a gate goes on to blocks of its own page, and in another page to the newest
    /// block, whose gate asks.
    fn new(from: Number, (guest, own): Key, link: &Link) -> Self {
        let near = link.target >> 12 == guest >> 12;
        let variant = match own.page() {
            None => link.ac.into(),
            Some(_) if near => own,
            Some(_) => Variant::ANY,
        };
        Self {
            target: link.target,
            from,
            next: NONE,
            kept: false,
            displacement: link.displacement as u16,
            variant,
        }
    }

    /// What it leads to.
    pub fn key(&self) -> Key {
        (self.target, self.variant)
    }

    /// Offset of its displacement in its block.
    pub fn site(&self) -> u64 {
        self.displacement.into()
    }
}
