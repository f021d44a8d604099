//! The decoded-block cache.
//!
//! Blocks are keyed by where their first byte lies in RAM and by the code size, never by linear
//! address, so one copy serves every address space. A block lies within one page; its page is
//! marked in RAM, and any write to it makes the page stale, upon which all its blocks are dropped
//! before anything else runs. A guest can have code at every byte of its memory, so there is a limit: beyond it all blocks are
//! dropped. A small cache in front maps linear addresses to blocks; it is
//! valid for one generation, which ends with every TLB flush.

use crate::{
    cpu::Cpu,
    decode,
    memory::Place,
    op::Op,
    system::System,
    tlb::{Right, View},
};
use contract::GuestRam;
use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
    rc::Rc,
};
use x86::{Fault, seg};

const NEAR_SLOTS: usize = 8192;
/// What all blocks together may weigh: some 40 MiB.
const MAX_WEIGHT: usize = 1 << 19;

/// Straight-line instructions; only the last one surely ends it, others may leave early.
pub(crate) struct Block<S: System> {
    pub ops: Box<[Op<S>]>,
}

impl<S: System> Block<S> {
    /// Its instructions, and two for what is kept of it besides.
    fn weight(&self) -> usize {
        self.ops.len() + 2
    }
}

struct Near<S: System> {
    linear: u64,
    stamp: u32,
    block: Option<Rc<Block<S>>>,
}

type Page<S> = HashMap<u32, Rc<Block<S>>, BuildHasherDefault<Mix>>;

pub(crate) struct BlockCache<S: System> {
    /// By RAM offset of the page, then by offset in the page and code size.
    pages: HashMap<u64, Page<S>, BuildHasherDefault<Mix>>,
    /// Of all blocks.
    weight: usize,
    near: Box<[Near<S>]>,
    generation: u32,
}

/// A cheap hash for small integers.
#[derive(Default)]
pub(crate) struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64((*byte).into());
        }
    }
    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }
    fn write_u32(&mut self, value: u32) {
        self.write_u64(value.into());
    }
}

impl<S: System> BlockCache<S> {
    pub fn new() -> Self {
        let near = || Near { linear: 0, stamp: 0, block: None };
        Self {
            pages: HashMap::default(),
            weight: 0,
            near: (0..NEAR_SLOTS).map(|_| near()).collect(),
            generation: 1,
        }
    }

    /// Linear addresses may mean something else now.
    pub fn forget_addresses(&mut self) {
        self.generation += 1;
        if self.generation == 1 << 28 {
            self.generation = 1;
            for near in &mut self.near {
                near.block = None;
            }
        }
    }

    /// The RAM page at `offset` was written.
    pub fn drop_page(&mut self, offset: u64) {
        let gone = self.pages.remove(&offset).into_iter().flatten();
        self.weight -= gone.map(|(_, block)| block.weight()).sum::<usize>();
        self.forget_addresses();
    }

    /// Enters a block, making room for it by dropping all if need be.
    fn enter(&mut self, page: u64, key: u32, block: Rc<Block<S>>) {
        if self.weight + block.weight() > MAX_WEIGHT {
            self.pages.clear();
            self.near.iter_mut().for_each(|near| near.block = None);
            self.weight = 0;
        }
        self.weight += block.weight();
        self.pages.entry(page).or_default().insert(key, block);
    }
}

impl<S: System> Cpu<S> {
    /// Decoded instructions that are kept, with two for each block of them: never more than half a million.
    pub fn kept_code(&self) -> usize {
        self.blocks.weight
    }

    /// The block at RIP.
    #[inline]
    pub(crate) fn fetch(&mut self, sys: &mut S) -> Result<Rc<Block<S>>, Fault> {
        let bits = self.vcpu.code_bits();
        let linear = if bits == 64 { self.vcpu.rip } else { self.linear_rip()? };
        let user = matches!(self.view, View::User | View::UserAligned);
        let stamp = self.blocks.generation << 4 | bits >> 4 << 1 | u32::from(user);
        let near = &self.blocks.near[near_slot(linear)];
        if near.linear == linear
            && near.stamp == stamp
            && let Some(block) = &near.block
        {
            return Ok(block.clone());
        }
        let Some(block) = self.find(sys, linear, bits)? else {
            return self.decode_uncached(sys, linear, bits);
        };
        let slot = &mut self.blocks.near[near_slot(linear)];
        *slot = Near { linear, stamp, block: Some(block.clone()) };
        Ok(block)
    }

    /// CS base plus RIP, checked against the limit: legacy modes.
    #[cold]
    fn linear_rip(&self) -> Result<u64, Fault> {
        self.check_target(self.vcpu.rip)?;
        Ok(self.vcpu.seg[seg::CS].base.wrapping_add(self.vcpu.rip) & 0xffff_ffff)
    }

    /// Finds or makes the block at a linear address; `None` if it cannot be cached.
    fn find(&mut self, sys: &mut S, linear: u64, bits: u32) -> Result<Option<Rc<Block<S>>>, Fault> {
        let place = self.translate(sys, self.fetch_view(), linear, Right::Execute)?;
        let (Place::Ram(offset) | Place::Rom(offset) | Place::Code(offset)) = place else {
            return Ok(None);
        };
        let page = offset & !0xfff;
        let key = (offset as u32 & 0xfff) << 8 | bits;
        if let Some(block) = self.blocks.pages.get(&page).and_then(|p| p.get(&key)) {
            return Ok(Some(block.clone()));
        }
        while sys.ram().mark_code(page) {
            self.close_page(page);
            // While it waited for others, this vCPU counted as one that writes nothing.
            if !sys.ram().has_stale_code() {
                break;
            }
            // The page itself may be among the stale ones: then it has no mark any more.
            self.hear_of_code(sys);
        }
        let mut bytes = [0; decode::WINDOW];
        let len = decode::WINDOW.min(4096 - (offset & 0xfff) as usize);
        sys.ram().read(offset, &mut bytes[..len]);
        let ops = decode::block(sys, &bytes[..len], bits);
        if ops.is_empty() {
            return Ok(None);
        }
        self.counters.blocks_decoded += 1;
        let block = Rc::new(Block { ops: ops.into_boxed_slice() });
        self.blocks.enter(page, key, block.clone());
        Ok(Some(block))
    }

    /// One instruction that crosses a page or does not lie in RAM.
    #[cold]
    fn decode_uncached(
        &mut self,
        sys: &mut S,
        linear: u64,
        bits: u32,
    ) -> Result<Rc<Block<S>>, Fault> {
        let mut bytes = [0; 15];
        let mut have = 0;
        while have < bytes.len() {
            let at = linear.wrapping_add(have as u64);
            let place = match self.translate(sys, self.fetch_view(), at, Right::Execute) {
                Ok(place) => place,
                Err(fault) => match decode::complete(&bytes[..have], bits) {
                    true => break,
                    false => return Err(fault),
                },
            };
            let part = (4096 - (at & 0xfff) as usize).min(bytes.len() - have);
            match place {
                Place::Ram(o) | Place::Code(o) | Place::Rom(o) => {
                    sys.ram().read(o, &mut bytes[have..have + part]);
                }
                Place::Mmio(_) => bytes[have..have + part].fill(0xff),
            }
            have += part;
        }
        let op = decode::one(sys, &bytes[..have], bits);
        Ok(Rc::new(Block { ops: Box::new([op]) }))
    }

    /// Fetches do not know SMAP or alignment checks.
    fn fetch_view(&self) -> View {
        match self.view {
            View::SupervisorAc => View::Supervisor,
            View::UserAligned => View::User,
            view => view,
        }
    }
}

fn near_slot(linear: u64) -> usize {
    (linear ^ (linear >> 13)) as usize & (NEAR_SLOTS - 1)
}
