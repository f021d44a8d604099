//! The pages all wedges of a vCPU share: the frame, the code cache and its tables.

use crate::memory::MemoryObject;
use crate::turns::Turns;
use frame::{
    Base, CACHE, CACHE_LEN, CMP_LEN, COPY_INDEX, FRAME_LEN, LOOKUP_INDEX, LOOKUP_READS,
    LOOKUP_WRITES, NO_USER, NOWHERE, POISON, REGION_BITS, REGION_COUNT, REGIONS_LEN, SITE_PAGES,
    SITES_LEN, STUB_LEN, STUB_TAIL, STUBS, TABLES_LEN, Told, UPPER_USER, VcpuPage, keys, region,
    site_page,
};
use host::MemoryObject as Object;
use std::{io, mem::offset_of};

/// Bytes of the vCPU page that wedges change.
const CHANGED_LEN: usize = offset_of!(VcpuPage, told);

type Bytes = MemoryObject<[u8; 0]>;

/// A system call that can be patched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Call {
    /// `mov eax, number; syscall`
    Number(u32),
    /// `syscall; cmp rax, value`
    Compared(u32),
}

/// The pages. The monitor writes them; wedges can write the frame and the turns only.
#[derive(Debug)]
pub struct Pages {
    base: Base,
    frame: MemoryObject<VcpuPage>,
    /// What the monitor works with: [`Pages::publish`] and [`Pages::fetch`] copy it.
    copy: Box<VcpuPage>,
    /// Its last part has changed since it was published.
    told_changed: bool,
    tables: Bytes,
    cache: Bytes,
    regions: Bytes,
    sites: Bytes,
    turns: Turns,
    pub(crate) user_dispatch: bool,
    pub(crate) keeps: bool,
    strict: bool,
}

impl Pages {
    /// Fresh pages for the usual base.
    ///
    /// # Errors
    /// If the host has no memory.
    pub fn new() -> io::Result<Self> {
        Self::with_base(Base::default())
    }

    /// Fresh pages.
    ///
    /// # Errors
    /// If the host has no memory.
    pub fn with_base(base: Base) -> io::Result<Self> {
        let mut pages = Self {
            base,
            frame: MemoryObject::new("ring3-vcpu", FRAME_LEN)?,
            copy: Box::default(),
            told_changed: true,
            tables: MemoryObject::new("ring3-jumps", TABLES_LEN)?,
            cache: MemoryObject::new("ring3-code", CACHE_LEN)?,
            regions: MemoryObject::new("ring3-regions", REGIONS_LEN)?,
            sites: MemoryObject::new("ring3-sites", SITES_LEN)?,
            turns: Turns::new()?,
            user_dispatch: false,
            keeps: true,
            strict: false,
        };
        for object in [&pages.tables, &pages.cache, &pages.regions, &pages.sites] {
            object.seal()?;
        }
        let frame = pages.frame();
        frame.block.bias = base.bias();
        frame.block.nowhere = NOWHERE;
        frame.block.region_mask = (REGION_COUNT as u64 - 1) << REGION_BITS;
        frame.block.copy_index = COPY_INDEX;
        frame.system.vector_mask = 7;
        frame.block.lookup_masks = [LOOKUP_INDEX, LOOKUP_READS, LOOKUP_WRITES];
        for at in 0..REGION_COUNT {
            match bias_of(base, (at as u64) << REGION_BITS) {
                0 => {} // as it is
                bias => pages.set_region(at, bias),
            }
        }
        Ok(pages)
    }

    /// Takes the reserved part elsewhere. What has been translated is gone, and there must be no wedges.
    ///
    /// # Errors
    /// If the host has no memory; then nothing has changed.
    pub fn move_to(&mut self, base: Base) -> io::Result<()> {
        let mut new = Self::with_base(base)?;
        *new.frame() = self.frame().clone();
        new.frame().block.bias = base.bias();
        new.told_changed = true;
        new.turns = self.turns.clone();
        (new.user_dispatch, new.keeps) = (self.user_dispatch, self.keeps);
        new.strict = self.strict;
        *self = new;
        Ok(())
    }

    /// Where the reserved part lies.
    pub fn base(&self) -> Base {
        self.base
    }

    /// The monitor's copy of the vCPU page: what it was when guest code last stopped, and what guest code
    /// goes on with. Nobody else writes it.
    pub fn frame(&mut self) -> &mut VcpuPage {
        &mut self.copy
    }

    /// The part of it that only the monitor writes, to be changed.
    pub fn told(&mut self) -> &mut Told {
        self.told_changed = true;
        &mut self.copy.told
    }

    /// Guest code is about to run: wedges get the vCPU page as the monitor has it.
    pub fn publish(&mut self) {
        let all = std::mem::take(&mut self.told_changed);
        self.frame.copy_out(&self.copy, if all { size_of::<VcpuPage>() } else { CHANGED_LEN });
    }

    /// Guest code has stopped: takes from the vCPU page what wedges change.
    pub fn fetch(&mut self) {
        self.frame.copy_in(&mut self.copy, CHANGED_LEN);
    }

    /// Wedges started from now on get user code's system calls by syscall user dispatch.
    ///
    /// # Errors
    /// If the host has none.
    pub fn use_dispatch(&mut self) -> io::Result<()> {
        if !host::current().facts().user_dispatch {
            return Err(io::Error::other(
                "the host has no syscall user dispatch (Linux 5.11 and later do); leave out --system-calls dispatch",
            ));
        }
        self.user_dispatch = true;
        Ok(())
    }

    /// Wedges started from now on unmap what the guest's page tables do not say any more, rather than close
    /// it.
    pub fn unmap_flushed(&mut self) {
        self.keeps = false;
    }

    /// Wedges started from now on have their user code run in a process of its own. Where there are
    /// protection keys these do the same.
    pub fn keep_user_apart(&mut self) {
        self.strict = !crate::keys();
    }

    pub(crate) fn is_strict(&self) -> bool {
        self.strict
    }

    /// Whose turn it is.
    pub fn turns(&self) -> &Turns {
        &self.turns
    }

    /// Writes code at an offset into the cache.
    pub fn write_code(&mut self, offset: u64, bytes: &[u8]) {
        self.cache.write(offset as usize, bytes);
    }

    /// The byte at an offset into the cache, zero beyond its end.
    pub fn code_byte(&self, offset: u64) -> u8 {
        self.cache.byte(offset as usize)
    }

    /// Writes a word at an offset into the tables.
    pub fn write_table(&mut self, offset: u64, value: u64) {
        self.tables.write(offset as usize, &value.to_le_bytes());
    }

    /// The page of user code at `gva` may hold patched system calls.
    pub fn note_site(&mut self, gva: u64) {
        let (word, bit) = site_page(gva);
        let at = SITE_PAGES + word * 8 + bit as usize / 8;
        self.tables.write(at, &[self.tables.byte(at) | 1 << (bit % 8)]);
    }

    /// From now on kernel memory may lie in the region of an HVA, where user addresses would.
    pub fn give_to_kernel(&mut self, hva: u64) {
        self.set_region(region(hva), POISON);
    }

    fn set_region(&mut self, region: usize, bias: u64) {
        self.regions.write(region * 8, &bias.to_le_bytes());
    }

    /// Makes the stub of a patched system call that ends at `back` (GVA) and goes on at `entry` (HVA): with
    /// the number it loads, or with the compare that follows it. False, and no stub, if it would have bytes
    /// that open protection keys: most of them are the program's choice, which can jump to any.
    pub fn make_stub(&mut self, index: usize, call: Call, back: u64, entry: u64) -> bool {
        let offset = STUBS - CACHE + index * STUB_LEN;
        let at = self.base.at((CACHE + offset) as u64);
        let mut code = match call {
            Call::Number(number) => [&[0xb8], &number.to_le_bytes()[..]].concat(),
            Call::Compared(_) => vec![0x0f, 0x1f, 0x44, 0, 0], // nop
        };
        code.extend([0x48, 0xb9]);
        code.extend(back.to_le_bytes());
        code.push(0xe9);
        let distance = entry.wrapping_sub(at + code.len() as u64 + 4) as u32;
        code.extend(distance.to_le_bytes());
        if let Call::Compared(with) = call {
            code.resize(STUB_TAIL, 0xcc);
            code.extend([0x48, 0x3d]);
            code.extend(with.to_le_bytes());
            code.extend([0xff, 0x25, 0, 0, 0, 0]); // jmp [rip]
            code.extend((back + CMP_LEN).to_le_bytes());
        }
        if keys::find(&code).is_some() {
            return false;
        }
        self.cache.write(offset, &code);
        self.sites.write(index * 8, &at.to_le_bytes());
        true
    }

    /// The table of biases, as translated code and wedges map it.
    pub fn regions(&self) -> &dyn Object {
        self.regions.object()
    }

    /// The indirect-jump tables, as wedges map them.
    pub fn tables(&self) -> &dyn Object {
        self.tables.object()
    }

    pub(crate) fn sites(&self) -> &dyn Object {
        self.sites.object()
    }
    pub(crate) fn vcpu_page(&self) -> &dyn Object {
        self.frame.object()
    }
    pub(crate) fn cache(&self) -> &dyn Object {
        self.cache.object()
    }
}

/// What translated code adds to the addresses (48 bits) of a region while no kernel memory lies where
/// user addresses would.
fn bias_of(base: Base, address: u64) -> u64 {
    let kernel = base.kernel_start() & ((1 << 48) - 1);
    let reserved = base.at(NO_USER)..base.at(UPPER_USER);
    match address {
        _ if address >= kernel => base.bias(),
        _ if address >> 47 != 0 || reserved.contains(&address) => POISON,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program chooses where its calls are, and what it compares their results with.
    #[test]
    fn stubs_do_not_open_keys() {
        let mut pages = Pages::new().expect("the host has memory");
        let mut stub = |call, back| pages.make_stub(0, call, back, frame::BLOB as u64);
        assert!(stub(Call::Number(39), 0x40_010f));
        assert!(!stub(Call::Number(39), 0x1000_c3ef_010f));
        assert!(!stub(Call::Compared(0xfff), 0x1000_c3ef_010f - CMP_LEN));
        assert!(!stub(Call::Compared(0xc3ef_010f), 0x40_010f));
        assert!(!stub(Call::Compared(0xc32f_ae0f), 0x40_010f));
    }
}
