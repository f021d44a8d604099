//! What wedges execute of ours, and by what it is found: memory that the monitor writes.
//!
//! The kernel's translated code and the patched system calls are a machine's: all wedges of all of its vCPUs map
//! them. One vCPU may write them while others execute them. So what is written while it may be looked at is
//! written a word at a time.

use crate::memory::MemoryObject;
use host::MemoryObject as Object;
use std::io;
use wedge_abi::{
    AREA_LEN, Base, CACHE, CMP_LEN, KERNEL_CODE_OBJECT, MAX_SITES, PLAIN_PAGES, SITE_PAGES,
    SITES_LEN, STUB_LEN, STUB_TAIL, STUBS, TABLES_LEN, USER_CACHE, USER_CACHE_LEN, USER_TABLES,
    keys, plain_slot, site_page,
};

type Bytes = MemoryObject<[u8; 0]>;

/// A system call that can be patched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SiteCall {
    /// `mov eax, number; syscall`
    Number(u32),
    /// `syscall; cmp rax, value`
    Compared(u32),
}

/// The translated code of a level, and its jump tables.
#[derive(Debug)]
pub struct CodeArea {
    tables: Bytes,
    cache: Bytes,
    /// HVA of the code.
    at: u64,
}

impl CodeArea {
    /// For the kernel's code, nothing yet.
    ///
    /// # Errors
    /// If the host has no memory.
    pub fn of_kernel(base: Base) -> io::Result<Self> {
        let tables = MemoryObject::new("ring3-jumps", USER_TABLES)?;
        tables.seal()?;
        Self::new(tables, (KERNEL_CODE_OBJECT, USER_CACHE - CACHE), base.at(CACHE as u64))
    }

    /// For translated user code, nothing yet. Wedges change the tables, too, of which the monitor reads nothing.
    ///
    /// # Errors
    /// If the host has no memory.
    pub fn of_user(base: Base) -> io::Result<Self> {
        let at = base.at(USER_CACHE as u64);
        let tables = MemoryObject::new("ring3-user-jumps", TABLES_LEN - USER_TABLES)?;
        Self::new(tables, ("ring3-user-code", USER_CACHE_LEN), at)
    }

    fn new(tables: Bytes, (name, len): (&'static str, usize), at: u64) -> io::Result<Self> {
        let cache = MemoryObject::new(name, len)?;
        cache.seal()?;
        Ok(Self { tables, cache, at })
    }

    /// Writes code at an offset. Nobody may be executing what is there.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        self.cache.write(offset as usize, bytes);
    }

    /// Writes the displacement of a jump at an offset, which lies in one aligned word, all of it at once.
    pub fn write_jump(&self, offset: u64, distance: [u8; 4]) {
        self.cache.write_part(offset as usize, distance);
    }

    /// The byte at an offset, zero beyond the end.
    pub fn byte(&self, offset: u64) -> u8 {
        self.cache.byte(offset as usize)
    }

    /// The byte at an HVA, if it is in the code.
    pub fn byte_at(&self, hva: u64) -> Option<u8> {
        hva.checked_sub(self.at).filter(|at| *at < self.cache.len() as u64).map(|at| self.byte(at))
    }

    /// Writes a word at an offset into the tables, after all that was written before.
    pub fn write_table(&self, offset: u64, value: u64) {
        self.tables.write_word(offset as usize, value);
    }

    /// The word at an offset in the tables.
    pub fn table_word(&self, offset: u64) -> u64 {
        self.tables.read_word(offset as usize)
    }

    /// The page of user code at `gva` may hold patched system calls. Said in the kernel's tables.
    pub fn note_site(&self, gva: u64) {
        let (word, bit) = site_page(gva);
        self.tables.add_bits(SITE_PAGES + word * 8, 1 << bit);
    }

    /// A page of code with this [`wedge_abi::print`] need not be changed before user code executes it, whatever
    /// its address. Said in the kernel's tables.
    pub fn note_plain(&self, print: u64) {
        self.tables.write_word(PLAIN_PAGES + plain_slot(print) * 8, print);
    }

    /// The jump tables, as wedges map them.
    pub fn tables(&self) -> &dyn Object {
        self.tables.object()
    }

    /// The code, as wedges map it.
    pub(crate) fn cache(&self) -> &dyn Object {
        self.cache.object()
    }
}

/// The stubs of patched system calls, and the table that these jump through.
#[derive(Debug)]
pub struct CallSites {
    base: Base,
    stubs: Bytes,
    table: Bytes,
}

impl CallSites {
    /// None yet.
    ///
    /// # Errors
    /// If the host has no memory.
    pub fn new(base: Base) -> io::Result<Self> {
        let stubs = MemoryObject::new("ring3-stubs", MAX_SITES * STUB_LEN)?;
        let table = MemoryObject::new("ring3-sites", SITES_LEN - AREA_LEN)?;
        stubs.seal()?;
        table.seal()?;
        Ok(Self { base, stubs, table })
    }

    /// Makes the stub of a patched system call that ends at `back` (GVA) and goes on at `entry` (HVA): with
    /// the number it loads, or with the compare that follows it. False, and no stub, if it would have bytes
    /// that open protection keys: most of them are the program's choice, which can jump to any.
    pub fn make(&self, index: usize, call: SiteCall, back: u64, entry: u64) -> bool {
        let offset = index * STUB_LEN;
        let at = self.base.at((STUBS + offset) as u64);
        let mut code = match call {
            SiteCall::Number(number) => [&[0xb8], &number.to_le_bytes()[..]].concat(),
            SiteCall::Compared(_) => vec![0x0f, 0x1f, 0x44, 0, 0], // nop
        };
        code.extend([0x48, 0xb9]);
        code.extend(back.to_le_bytes());
        code.push(0xe9);
        let distance = entry.wrapping_sub(at + code.len() as u64 + 4) as u32;
        code.extend(distance.to_le_bytes());
        if let SiteCall::Compared(with) = call {
            code.resize(STUB_TAIL, 0xcc);
            code.extend([0x48, 0x3d]);
            code.extend(with.to_le_bytes());
            code.extend([0xff, 0x25, 0, 0, 0, 0]); // jmp [rip]
            code.extend((back + CMP_LEN).to_le_bytes());
        }
        if keys::find(&code).is_some() {
            return false;
        }
        self.stubs.write(offset, &code);
        self.table.write_word(index * 8, at);
        true
    }

    pub(crate) fn stubs(&self) -> &dyn Object {
        self.stubs.object()
    }

    pub(crate) fn table(&self) -> &dyn Object {
        self.table.object()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program chooses where its calls are, and what it compares their results with.
    #[test]
    fn stubs_do_not_open_keys() {
        let sites = CallSites::new(Base::default()).expect("the host has memory");
        let stub = |call, back| sites.make(0, call, back, wedge_abi::BLOB as u64);
        assert!(stub(SiteCall::Number(39), 0x40_010f));
        assert!(!stub(SiteCall::Number(39), 0x1000_c3ef_010f));
        assert!(!stub(SiteCall::Compared(0xfff), 0x1000_c3ef_010f - CMP_LEN));
        assert!(!stub(SiteCall::Compared(0xc3ef_010f), 0x40_010f));
        assert!(!stub(SiteCall::Compared(0xc32f_ae0f), 0x40_010f));
    }

    /// Another vCPU may be executing the jump: what is beside it stays as it was at any moment.
    #[test]
    fn a_displacement_is_written_alone() {
        let area = CodeArea::of_kernel(Base::default()).expect("the host has memory");
        area.write(8, &[1; 16]);
        area.write_jump(11, [7; 4]);
        let bytes: Vec<u8> = (8..24).map(|at| area.byte(at)).collect();
        assert_eq!(bytes, [1, 1, 1, 7, 7, 7, 7, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
        assert_eq!(area.byte_at(wedge_abi::CACHE as u64 + 11), Some(7));
        assert_eq!(area.byte_at(USER_CACHE as u64), None);
    }
}
