//! Where the block of a guest address is: the tables that the monitor keeps of translated code.
//!
//! Blocks of programs are found by page of RAM, since translations of all programs are kept. Most are for places ([`wedge_abi::place`])
//! and not for addresses. A block's gate asks whether the page may be executed ([`wedge_abi::Lookups::verify`]). Who was not let in
//! comes here, for the block that the page tables mean.

use crate::{
    Context, here, lookup,
    mmu::{self, Access, Walk},
    word,
};
use core::sync::atomic::{AtomicU64, Ordering};
use wedge_abi::{
    BlockExit, COMPUTED, CROSSES, DEEP, DEEP_REACH, FAULTS, FRONT_LEN, FaultState, HEAD_LEN,
    KERNEL_FAULTS, KernelFaultState, TABLE_SLOTS, TABLES, TextPage, USER_TABLES, VERSION_REACH,
    VERSIONS, VcpuPage, deep_slot, fault_slot, kernel_key, placed_key, version_key, version_slot,
    versioned, walks,
};

/// The first address (GVA) at which user code cannot be.
pub const USER_END: u64 = 0x7fff_ffff_f000;

/// HVA of the kernel's block for a guest address, zero if the tables do not know it.
pub fn find(guest: u64, ac: bool) -> u64 {
    BlockTables(here(TABLES)).search(kernel_key(guest, ac))
}

/// HVA of a block of a program's code at a guest address, zero if the tables do not know any. Its gate asks whether the block is of
/// the page that is at the address now.
pub fn find_user(cx: &Context<'_>, guest: u64) -> u64 {
    let found =
        if guest >= USER_END { 0 } else { BlockTables(here(TABLES + USER_TABLES)).first(guest) };
    if cx.vcpu.told.placed == 0 || found == 0 {
        return found;
    }
    let block = found.wrapping_add(FRONT_LEN);
    // SAFETY: what the table leads to has its place before it, in the code cache.
    let place = unsafe { word(block.wrapping_sub(HEAD_LEN) as usize) };
    if lookup::table().resolve(place) == guest { block } else { 0 }
}

/// Turns places into addresses where translated user code has left by its exit.
pub fn resolve_places(vcpu: &mut VcpuPage) {
    let lookups = lookup::table();
    vcpu.exit.next = lookups.resolve(vcpu.exit.next);
    // A computed jump leads to an address, which may look like a place.
    if vcpu.exit.kind == BlockExit::Miss as u64 && vcpu.exit.info == COMPUTED {
        vcpu.exit.info = 0;
    } else {
        vcpu.regs.rip = lookups.resolve(vcpu.regs.rip);
    }
}

const FETCH: Access = Access { write: false, fetch: true, user: true };

/// What a program finds at an address that it goes to.
pub enum UserBlock {
    /// A block, by its HVA. Its page may be executed from now on, and jumps find it.
    Found(u64),
    /// The guest takes a page fault with this P bit.
    Fault(u64),
    /// The monitor is to decide.
    Unknown,
}

/// The block at a guest address that the page tables of the program that runs lead to.
pub fn verified_user(cx: &mut Context<'_>, guest: u64) -> UserBlock {
    if cx.vcpu.run.walks == walks::NONE || guest >= USER_END {
        return UserBlock::Unknown;
    }
    let leaf = match mmu::walk(cx, guest, FETCH) {
        Walk::Found(leaf) => leaf,
        Walk::Fault(present) => return UserBlock::Fault(present),
        Walk::Unknown => return UserBlock::Unknown,
    };
    let tables = BlockTables(here(TABLES + USER_TABLES));
    let Some(page) = tables.text_page(cx, guest, leaf.offset) else { return UserBlock::Unknown };
    let found = tables.search(versioned(page.place | guest & 0xfff, page.index.into()));
    let (block, crosses) = (found & !CROSSES, found & CROSSES != 0);
    if block == 0 || crosses && !verify_behind(cx, tables, guest, page) {
        return UserBlock::Unknown;
    }
    if !lookup::table().verify(page, guest, cx.vcpu.told.code_generation) {
        return UserBlock::Unknown;
    }
    let before_gate = if cx.vcpu.told.placed != 0 { FRONT_LEN } else { 0 };
    tables.publish(guest, block.wrapping_sub(before_gate));
    UserBlock::Found(block)
}

/// Verifies the page behind that of a block, if there is code of that page. False if both of the block's pages had been verified:
/// then the block is of another second page, and the monitor makes the block anew.
fn verify_behind(cx: &mut Context<'_>, tables: BlockTables, guest: u64, first: TextPage) -> bool {
    let behind = (guest | 0xfff) + 1;
    let Walk::Found(leaf) = mmu::walk(cx, behind, FETCH) else { return false };
    let Some(second) = tables.text_page(cx, behind, leaf.offset) else { return false };
    let (lookups, generation) = (lookup::table(), cx.vcpu.told.code_generation);
    let verified = |page: TextPage| lookups.is_verified(page.index as usize, generation);
    if verified(first) && verified(second) {
        return false;
    }
    // The first page says where the text is.
    lookups.verify(first, guest, generation) && lookups.verify(second, behind, generation)
}

/// The state of the program whose translation has faulted at a host PC, at the start of the instruction; `None` if the monitor
/// has not told.
pub fn fault_state(pc: u64) -> Option<FaultState> {
    let state = state_at(USER_TABLES + FAULTS, pc).map(FaultState::from_word)?;
    Some(FaultState { rip: lookup::table().resolve(state.rip), ..state })
}

/// The state of the kernel whose translation has faulted at a host PC, at the start of the instruction; `None` if the monitor has
/// not told.
pub fn kernel_fault_state(pc: u64) -> Option<KernelFaultState> {
    state_at(KERNEL_FAULTS, pc).map(KernelFaultState::from_word)
}

/// The word for the fault at a host PC, from the table of faults at this offset; `None` if the table has none for that PC.
fn state_at(table: usize, pc: u64) -> Option<u64> {
    // SAFETY: the table has a slot for each PC.
    let [key, state] = unsafe { BlockTables(here(TABLES)).slot(table + fault_slot(pc) * 16) };
    let is_known = key.load(Ordering::Acquire) == pc;
    is_known.then(|| state.load(Ordering::Acquire))
}

/// Tables of blocks by guest address, mapped for good, by their HVA: the searched one ([`DEEP`]), and before it the program's one with keys.
#[derive(Clone, Copy)]
struct BlockTables(usize);

impl BlockTables {
    /// HVA of the block for a guest address in the table with keys; zero for none.
    fn first(self, guest: u64) -> u64 {
        // SAFETY: a slot of the first table.
        let [key, block] = unsafe { self.slot((guest as usize & (TABLE_SLOTS - 1)) * 16) };
        if key.load(Ordering::Acquire).wrapping_add(guest) == 0 {
            block.load(Ordering::Acquire)
        } else {
            0
        }
    }

    /// Has jumps of programs find a block.
    fn publish(self, guest: u64, to: u64) {
        // SAFETY: a slot of the first table, of which this thread has the turn.
        let [key, block] = unsafe { self.slot((guest as usize & (TABLE_SLOTS - 1)) * 16) };
        key.store(u64::from(guest & 0xffff == 0), Ordering::Release);
        block.store(to, Ordering::Release);
        key.store(guest.wrapping_neg(), Ordering::Release);
    }

    /// The page of user code at a guest address that lies at an offset in RAM, if there is code of it.
    fn text_page(self, cx: &Context<'_>, guest: u64, offset: u64) -> Option<TextPage> {
        if cx.vcpu.told.placed != 0 {
            return match self.version(placed_key(offset)) {
                0 => None,
                word => Some(TextPage::from_word(word)),
            };
        }
        let index = self.version(version_key(guest, offset)) as u32;
        let page = TextPage { place: guest & !0xfff, index };
        if index == 0 { None } else { Some(page) }
    }

    /// What is known of a page of user code, zero if nothing is.
    fn version(self, wanted: u64) -> u64 {
        for n in 0..VERSION_REACH {
            // SAFETY: the table has `VERSION_REACH` slots behind the last at which a search begins.
            let [key, index] = unsafe { self.slot(VERSIONS + (version_slot(wanted) + n) * 16) };
            if key.load(Ordering::Acquire) == wanted {
                return index.load(Ordering::Acquire);
            }
        }
        0
    }

    /// HVA of the block for a key in the table behind the others; zero for none.
    fn search(self, guest: u64) -> u64 {
        for n in 0..DEEP_REACH {
            // SAFETY: the table has `DEEP_REACH` slots behind the last at which a search begins.
            let [key, block] = unsafe { self.slot(DEEP + (deep_slot(guest) + n) * 16) };
            if key.load(Ordering::Acquire) == guest {
                return block.load(Ordering::Acquire);
            }
        }
        0
    }

    /// A slot, by its offset: a key and an HVA. Another vCPU may be changing them: who reads a key first has a value that was
    /// or is its own.
    ///
    /// # Safety
    /// There is one at the offset.
    unsafe fn slot(self, at: usize) -> [&'static AtomicU64; 2] {
        let word = |at: usize| (self.0 + at) as *const AtomicU64;
        // SAFETY: as asked of the caller.
        unsafe { [&*word(at), &*word(at + 8)] }
    }
}
