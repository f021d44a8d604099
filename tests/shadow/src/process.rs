//! The process of the model: a table of mappings. Memory is the fake host's (`host_fake`): nothing here asks Linux.
//!
//! It answers the wedge's host calls with the host's own laws (a fixed mapping replaces what was there,
//! a file page shows the file) and refuses some, as a host does that runs out of mappings.
// UNSAFETY: says where the wedge's code finds RAM, marks and regions, and reads them there.
#![allow(unsafe_code)]

use crate::tables::RAM_LEN;
use host::{Access, Mapping as Window, MemoryObject, Piece};
use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    io, ptr,
};
use stub::model::{MAP_EMPTY, MAP_PRIVATE, MPROTECT, MUNMAP, Model, PKEY_MPROTECT};
use wedge::Pages;
use wedge_abi::{LOOKUPS, Lookups, MARKS, RAM, REGIONS, SITES, Shared, TABLES};

pub const PAGE: u64 = 4096;
const NO_MEMORY: i64 = -12;

/// What is mapped at a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Offset in RAM.
    pub offset: u64,
    /// As mmap takes it.
    pub protection: u64,
    /// Closed to user code.
    pub key: bool,
    /// What a copy has been made from, a private one or the one that processes share.
    pub copy: Option<Vec<u8>>,
}

/// The mappings of a process, by HVA of the page.
pub type Mappings = BTreeMap<u64, Mapping>;

thread_local! {
    static CURRENT: RefCell<Mappings> = const { RefCell::new(BTreeMap::new()) };
    /// Wedges that start look for what opens protection keys.
    static SEARCHING: Cell<bool> = const { Cell::new(false) };
    static KEEPING: Cell<bool> = const { Cell::new(false) };
    /// What the wedge's code reads, but for look-ups: each with its usual address.
    static WINDOWS: RefCell<[Option<(usize, Window)>; 4]> = const { RefCell::new([const { None }; 4]) };
    /// The look-ups of the process that ran last.
    static SHOWN: Cell<*const Lookups> = const { Cell::new(ptr::null()) };
    /// Mappings until one is refused.
    static UNTIL_REFUSAL: Cell<u64> = const { Cell::new(u64::MAX) };
}

/// What the wedge's code takes for its process.
static MODEL: Model = Model { call, map, poke, shown, user_word, reach };

/// Runs `inside` as code of the process with these mappings.
pub fn enter<T>(maps: &mut Mappings, inside: impl FnOnce() -> T) -> T {
    stub::model::install(&MODEL);
    CURRENT.with_borrow_mut(|current| std::mem::swap(current, maps));
    let result = inside();
    CURRENT.with_borrow_mut(|current| std::mem::swap(current, maps));
    result
}

/// Has wedges that are started look for what opens protection keys.
pub fn search(searching: bool) {
    SEARCHING.set(searching);
}

/// Has wedges that are started keep what has been flushed, closed.
pub fn keep(keeping: bool) {
    KEEPING.set(keeping);
}

/// Has the host refuse the mapping after so many.
pub fn refuse_after(mappings: u64) {
    UNTIL_REFUSAL.set(mappings);
}

/// What is mapped at an HVA in the process that runs.
pub fn mapping(hva: u64) -> Option<Mapping> {
    CURRENT.with_borrow(|maps| maps.get(&(hva & !(PAGE - 1))).cloned())
}

/// Looks at every mapping of the process that runs.
pub fn each(mut look: impl FnMut(u64, &Mapping)) {
    CURRENT.with_borrow(|maps| maps.iter().for_each(|(hva, mapping)| look(*hva, mapping)));
}

/// The wedge's host call: maps RAM.
fn map(at: u64, len: u64, protection: u64, flags: u64, offset: u64) -> i64 {
    let left = UNTIL_REFUSAL.get();
    UNTIL_REFUSAL.set(if left == 0 { u64::MAX } else { left - 1 });
    if left == 0 {
        return NO_MEMORY;
    }
    let (private, empty) = (flags & 0xf == MAP_PRIVATE & 0xf, flags == MAP_EMPTY);
    for n in (0..len).step_by(PAGE as usize) {
        let offset = if empty { offset } else { offset + n };
        let content = || if empty { vec![0; PAGE as usize] } else { ram_page(offset) };
        let shared_copy = !empty && offset >= RAM_LEN;
        let copy = (private || shared_copy).then(content);
        let offset = if shared_copy { offset - RAM_LEN } else { offset };
        let page = Mapping { offset, protection: protection & 7, key: false, copy };
        CURRENT.with_borrow_mut(|maps| maps.insert(at + n, page));
    }
    at as i64
}

/// The wedge's other host calls.
fn call(number: u64, at: u64, len: u64, protection: u64, key: u64, _: u64) -> i64 {
    CURRENT.with_borrow_mut(|maps| match number {
        MPROTECT if at == SITES as u64 => 0, // the table is not guest memory
        MUNMAP => {
            maps.retain(|hva, _| hva.wrapping_sub(at) >= len);
            0
        }
        MPROTECT | PKEY_MPROTECT => {
            if maps.range(at..at + len).count() as u64 != len / PAGE {
                return NO_MEMORY;
            }
            for (_, mapping) in maps.range_mut(at..at + len) {
                mapping.protection = protection;
                mapping.key |= number == PKEY_MPROTECT && key != 0;
            }
            0
        }
        _ => panic!("host call {number}"),
    })
}

/// The wedge's own store into a private copy: what stands there is not the model's concern.
fn poke(address: u64, _: u64, _: u64) -> i64 {
    assert!(mapping(address).is_some_and(|m| m.copy.is_some()), "a poke at {address:#x}");
    0
}

/// Where the bytes of the copy mapped at an HVA are.
fn shown(page: u64) -> u64 {
    CURRENT.with_borrow(|maps| maps[&page].copy.as_ref().expect("a copy").as_ptr() as u64)
}

/// Eight bytes of the user's memory, if it is mapped.
fn user_word(at: u64) -> Option<u64> {
    let page = mapping(at).filter(|page| page.protection != 0)?;
    let bytes = page.copy.unwrap_or_else(|| ram_page(page.offset));
    let word = bytes[(at & (PAGE - 1)) as usize..][..8].try_into().expect("eight bytes");
    Some(u64::from_le_bytes(word))
}

/// Where the wedge's code can reach what it has at an address.
fn reach(usual: usize) -> usize {
    if usual == LOOKUPS {
        return SHOWN.get().addr();
    }
    WINDOWS.with_borrow(|windows| {
        let mut windows = windows.iter().flatten();
        let window = windows.find(|(at, _)| *at == usual);
        window.expect("a window of the wedge's").1.base().as_ptr().expose_provenance()
    })
}

/// A word of the regions' table.
pub fn word(at: u64) -> u64 {
    let at = reach(REGIONS) + (at as usize - REGIONS);
    // SAFETY: `open_windows` has mapped it.
    unsafe { *ptr::with_exposed_provenance::<u64>(at) }
}

fn ram_page(offset: u64) -> Vec<u8> {
    let at = ptr::with_exposed_provenance(reach(RAM) + offset as usize);
    // SAFETY: inside RAM, which is mapped; nobody writes it meanwhile.
    unsafe { std::slice::from_raw_parts(at, PAGE as usize) }.to_vec()
}

/// The look-ups of a process.
pub struct Table(Box<Lookups>);

impl Table {
    /// An empty one.
    pub fn new() -> Self {
        // SAFETY: atomic words, for which zero is a value.
        Self(unsafe { Box::new_zeroed().assume_init() })
    }

    /// As the monitor has it.
    pub fn inside(&self) -> &Lookups {
        &self.0
    }

    /// Shows it to the wedge's code.
    pub fn show(&self) {
        let at = ptr::from_ref(&*self.0);
        at.expose_provenance();
        SHOWN.set(at);
    }
}

/// The shared pages of a wedge that starts.
pub fn fresh_shared(ram: &wedge::WedgeRam<'_>) -> Box<Shared> {
    // SAFETY: plain numbers, for which zero is a value.
    let mut shared: Box<Shared> = unsafe { Box::new_zeroed().assume_init() };
    (shared.setup.key, shared.setup.ram_len, shared.setup.ram_low) = (1, ram.len, ram.low);
    shared.setup.searched = SEARCHING.get().into();
    shared.setup.keeps = KEEPING.get().into();
    shared
}

/// Has the wedge's code find what it reads.
///
/// # Errors
/// If the host refuses.
pub fn open_windows(ram: &ram::Ram, pages: &Pages) -> io::Result<()> {
    let all = |object: &dyn MemoryObject, access| {
        object.map(&[Piece { offset: 0, len: object.len() as usize }], access)
    };
    let windows = [
        (RAM, all(ram.object(), Access::Write)?),
        (MARKS, all(ram.marks(), Access::Read)?),
        (TABLES, all(pages.kernel().tables(), Access::Read)?),
        (REGIONS, all(pages.regions(), Access::Read)?),
    ];
    WINDOWS.set(windows.map(Some));
    Ok(())
}
