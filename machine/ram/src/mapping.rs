//! The mapping of the memory object, and the only code that dereferences it.
//!
//! Bytes of guest RAM change under us at any moment: other vCPUs, devices and other processes
//! write them. So no reference to them is ever made; they are read and written through raw
//! pointers, words by single instructions. Guest and host are the same kind of CPU, so the guest
//! gets the memory ordering and atomicity it expects without asking for it.
//!
// UNSAFETY: shared memory that other processes write cannot be expressed in safe Rust. Each
// access asserts that it lies inside the mapping, which lives as long as any `Ram`.
#![allow(unsafe_code)]

use std::arch::{
    asm,
    x86_64::{_MM_HINT_T0, _mm_prefetch},
};
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::sync::{
    Arc,
    atomic::{AtomicU8, AtomicU64},
};

use host::{Access, MemoryObject, Piece, Seal};

use crate::RamError;

/// Bytes of a line of the caches.
const LINE: usize = 64;

/// Owns a memory object and its mapping.
pub(crate) struct Mapping {
    object: Box<dyn MemoryObject>,
    mapped: Arc<host::Mapping>,
}

impl Mapping {
    /// Creates and maps a zeroed object of `len` bytes, which is not zero.
    pub(crate) fn new(len: u64) -> Result<Self, RamError> {
        Self::with_seal(len, Seal::Seals)
    }

    fn with_seal(len: u64, seal: Seal) -> Result<Self, RamError> {
        let host = |step| move |error| RamError::Host { len, step, error };
        let object = host::current().object(crate::OBJECT, len).map_err(host("take memory"))?;
        let mapped = object.map_large().map_err(host("map"))?.into();
        object.seal(seal).map_err(host("seal"))?;
        Ok(Self { object, mapped })
    }

    /// Maps a memory object of another process's, if it is sealed against shrinking.
    pub(crate) fn of_another(passed: OwnedFd, access: Access) -> Result<Self, RamError> {
        let host = |step| move |error| RamError::Host { len: 0, step, error };
        let object = host::current().adopt(passed).map_err(host("take what was passed"))?;
        if object.is_empty() {
            return Err(RamError::BadSize { len: 0 });
        }
        let all = Piece { offset: 0, len: object.len() as usize };
        let mapped = match access {
            Access::Write => object.map_large(),
            access => object.map(&[all], access),
        };
        Ok(Self { mapped: mapped.map_err(host("map"))?.into(), object })
    }

    pub(crate) fn object(&self) -> &dyn MemoryObject {
        &*self.object
    }

    /// The mapping itself, for whoever keeps it longer than this lives.
    pub(crate) fn mapped(&self) -> &Arc<host::Mapping> {
        &self.mapped
    }

    /// Its bytes.
    #[inline]
    pub(crate) fn len(&self) -> u64 {
        self.mapped.len() as u64
    }

    /// A view of a part, good while `self` lives: whoever keeps one keeps the mapping too.
    pub(crate) fn view(&self, offset: u64, len: u64) -> View {
        let fits = len <= self.len() && offset <= self.len() - len;
        assert!(fits, "a view outside RAM");
        // SAFETY: just checked to be inside the mapping.
        View { base: unsafe { self.mapped.base().add(offset as usize) }, len }
    }
}

impl Mapping {
    /// A byte that others may change at any moment. Of a mapping that may not be written, it can be loaded only.
    #[inline]
    fn byte(&self, at: u64) -> &AtomicU8 {
        assert!(at < self.len(), "a page outside RAM");
        // SAFETY: inside the mapping, which lives as long as `self`; bytes are always valid.
        unsafe { AtomicU8::from_ptr(self.mapped.base().as_ptr().add(at as usize)) }
    }

    /// A word that others may change at any moment, at a multiple of eight.
    pub(crate) fn word(&self, at: u64) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at < self.len(), "a word outside the mapping");
        // SAFETY: inside the mapping, whose length is whole pages, aligned, and living as long as `self`.
        unsafe { AtomicU64::from_ptr(self.mapped.base().as_ptr().add(at as usize).cast()) }
    }
}

impl Mapping {
    /// Compare-and-swap of bytes that begin at the end of one page and go on at the start of another: the pages are mapped one behind
    /// the other for it, so that it is one instruction, too. On a host that has no room for that it is a load and a store.
    pub(crate) fn cas_split(
        &self,
        [offset, second]: [u64; 2],
        size: usize,
        old: u64,
        new: u64,
    ) -> u64 {
        let within = (offset % crate::PAGE) as usize;
        let here = crate::PAGE as usize - within;
        assert!(here < size && size <= 8, "bytes of two pages");
        let page = |offset| Piece { offset, len: crate::PAGE as usize };
        let pair = [page(offset - within as u64), page(second)];
        if let Ok(pair) = self.object.map(&pair, Access::Write) {
            // SAFETY: two pages from the pair's base on are mapped, and `within + size` is in the second.
            let at = unsafe { pair.base().as_ptr().add(within) };
            // SAFETY: as above, and the pair is mapped until it has been done.
            return unsafe { compare_and_swap(at, size, old, new) };
        }
        let (mut bytes, view) = ([0; 8], self.view(0, self.len()));
        view.read(offset, &mut bytes[..here]);
        view.read(second, &mut bytes[here..size]);
        let found = u64::from_le_bytes(bytes);
        if found == old {
            let bytes = new.to_le_bytes();
            view.write(offset, &bytes[..here]);
            view.write(second, &bytes[here..size]);
        }
        found
    }
}

/// One byte a page, in memory that other processes can map too.
pub(crate) struct Marks(Mapping);

impl Marks {
    /// Zeroed marks for so many pages, which are not none.
    pub(crate) fn new(pages: u64) -> Result<Self, RamError> {
        let len = pages.next_multiple_of(crate::PAGE);
        // Engines in other processes look at them; what they write there would be believed here.
        Ok(Self(Mapping::with_seal(len, Seal::Writers)?))
    }

    /// Another process's marks, of at least so many pages. They can be looked at only.
    pub(crate) fn of_another(passed: OwnedFd, pages: u64) -> Result<Self, RamError> {
        let mapping = Mapping::of_another(passed, Access::Read)?;
        if mapping.len() < pages {
            Err(RamError::BadSize { len: mapping.len() })
        } else {
            Ok(Self(mapping))
        }
    }

    /// The mark of a page.
    #[inline]
    pub(crate) fn get(&self, page: u64) -> &AtomicU8 {
        self.0.byte(page)
    }

    pub(crate) fn object(&self) -> &dyn MemoryObject {
        self.0.object()
    }
}

/// What other processes say they have written: a byte a page, and one that says whether to look at them.
pub(crate) struct Notes(Mapping);

impl Notes {
    /// None noted, of so many pages.
    pub(crate) fn new(pages: u64) -> Result<Self, RamError> {
        let len = pages.next_multiple_of(crate::PAGE) + crate::PAGE;
        Ok(Self(Mapping::new(len)?))
    }

    /// Where another process wants to be told, of at least so many pages.
    pub(crate) fn of_another(passed: OwnedFd, pages: u64) -> Result<Self, RamError> {
        let notes = Self(Mapping::of_another(passed, Access::Write)?);
        if notes.pages() < pages {
            Err(RamError::BadSize { len: notes.0.len() })
        } else {
            Ok(notes)
        }
    }

    /// Whether there is anything to look at.
    #[inline]
    pub(crate) fn state(&self) -> &AtomicU8 {
        self.0.byte(0)
    }

    /// The note of a page.
    pub(crate) fn page(&self, page: u64) -> &AtomicU8 {
        self.0.byte(crate::PAGE + page)
    }

    /// How many pages there can be notes of.
    pub(crate) fn pages(&self) -> u64 {
        self.0.len().saturating_sub(crate::PAGE)
    }

    pub(crate) fn object(&self) -> &dyn MemoryObject {
        self.0.object()
    }
}

/// Where the mapping is. Kept next to an `Arc` of its [`Mapping`].
#[derive(Clone, Copy)]
pub(crate) struct View {
    base: NonNull<u8>,
    /// At least a page.
    len: u64,
}

// SAFETY: as for `Mapping`.
unsafe impl Send for View {}
// SAFETY: as for `Mapping`.
unsafe impl Sync for View {}

/// A load and a store of one size, each one instruction whatever the alignment. Written as such
/// because that is the contract: the CPU's own MOV is atomic where the guest may rely on it, and
/// the language has no unaligned access to memory that others write.
macro_rules! access {
    ($load:ident, $store:ident, $word:ty, $register:ident, $mov_load:literal, $mov_store:literal) => {
        #[inline]
        pub(crate) fn $load(self, offset: u64) -> $word {
            self.check(offset, size_of::<$word>());
            let value;
            // SAFETY: the bytes are inside the mapping; nothing else is touched.
            unsafe {
                asm!(
                    $mov_load,
                    value = lateout($register) value,
                    base = in(reg) self.base.as_ptr(),
                    offset = in(reg) offset,
                    options(nostack, preserves_flags, readonly),
                );
            }
            value
        }

        #[inline]
        pub(crate) fn $store(self, offset: u64, value: $word) {
            self.check(offset, size_of::<$word>());
            // SAFETY: the bytes are inside the mapping; nothing else is touched.
            unsafe {
                asm!(
                    $mov_store,
                    value = in($register) value,
                    base = in(reg) self.base.as_ptr(),
                    offset = in(reg) offset,
                    options(nostack, preserves_flags),
                );
            }
        }
    };
}

/// Compare-and-swap of one size. Written as such because the language has no unaligned atomics.
macro_rules! cas {
    ($at:ident, $old:ident, $new:ident, $word:ty, $register:ident, $accumulator:tt, $cmpxchg:literal) => {{
        let found: $word;
        // SAFETY: the caller's: the bytes at `at` are inside a mapping; nothing else is touched.
        unsafe {
            asm!(
                $cmpxchg,
                at = in(reg) $at,
                new = in($register) $new as $word,
                inout($accumulator) $old as $word => found,
                options(nostack),
            );
        }
        found as u64
    }};
}

/// One locked instruction whatever the alignment, as the guest's own is: each excludes all others, those of code that runs directly too.
///
/// # Safety
/// `at` is valid for reads and writes of `size` bytes, and belongs to memory that is only accessed by raw pointers.
unsafe fn compare_and_swap(at: *mut u8, size: usize, old: u64, new: u64) -> u64 {
    match size {
        1 => cas!(at, old, new, u8, reg_byte, "al", "lock cmpxchg byte ptr [{at}], {new}"),
        2 => cas!(at, old, new, u16, reg, "ax", "lock cmpxchg word ptr [{at}], {new:x}"),
        4 => cas!(at, old, new, u32, reg, "eax", "lock cmpxchg dword ptr [{at}], {new:e}"),
        8 => cas!(at, old, new, u64, reg, "rax", "lock cmpxchg qword ptr [{at}], {new}"),
        _ => panic!("compare-and-swap of {size} bytes"),
    }
}

impl View {
    /// The bounds check of every access, of 1 to 16 bytes.
    #[inline]
    fn check(self, offset: u64, size: usize) {
        assert!(offset <= self.len - size as u64, "offset outside guest RAM");
    }

    /// The host address of `SIZE` bytes at `offset`.
    #[inline]
    fn at<const SIZE: usize>(self, offset: u64) -> *mut u8 {
        self.check(offset, SIZE);
        // SAFETY: just checked to be inside the mapping.
        unsafe { self.base.as_ptr().add(offset as usize) }
    }

    /// The host address of `len` bytes at `offset`.
    fn span(self, offset: u64, len: usize) -> *mut u8 {
        let fits = (len as u64) <= self.len && offset <= self.len - len as u64;
        assert!(fits, "range outside guest RAM");
        // SAFETY: just checked to be inside the mapping (or one past it for an empty range).
        unsafe { self.base.as_ptr().add(offset as usize) }
    }

    access!(
        load8,
        store8,
        u8,
        reg_byte,
        "mov {value}, byte ptr [{base} + {offset}]",
        "mov byte ptr [{base} + {offset}], {value}"
    );
    access!(
        load16,
        store16,
        u16,
        reg,
        "movzx {value:e}, word ptr [{base} + {offset}]",
        "mov word ptr [{base} + {offset}], {value:x}"
    );
    access!(
        load32,
        store32,
        u32,
        reg,
        "mov {value:e}, dword ptr [{base} + {offset}]",
        "mov dword ptr [{base} + {offset}], {value:e}"
    );
    access!(
        load64,
        store64,
        u64,
        reg,
        "mov {value}, qword ptr [{base} + {offset}]",
        "mov qword ptr [{base} + {offset}], {value}"
    );

    /// Up to eight bytes of a power of two are loaded at once.
    pub(crate) fn read(self, offset: u64, data: &mut [u8]) {
        match data.len() {
            2 => return data.copy_from_slice(&self.load16(offset).to_le_bytes()),
            4 => return data.copy_from_slice(&self.load32(offset).to_le_bytes()),
            8 => return data.copy_from_slice(&self.load64(offset).to_le_bytes()),
            _ => {}
        }
        let from = self.span(offset, data.len());
        // SAFETY: `from` is valid for the length; `data` is ours alone and cannot overlap.
        unsafe { ptr::copy_nonoverlapping(from, data.as_mut_ptr(), data.len()) };
    }

    /// Has the CPU load `len` bytes of RAM, from `offset` on, into its caches.
    pub(crate) fn prefetch(self, offset: u64, len: usize) {
        let from = self.span(offset, len);
        for line in (0..len).step_by(LINE) {
            // SAFETY: SSE is part of every x86-64 CPU, and a prefetch changes nothing that a program could see.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(line).cast()) };
        }
    }

    /// Up to eight bytes of a power of two are stored at once.
    pub(crate) fn write(self, offset: u64, data: &[u8]) {
        match *data {
            [a, b] => return self.store16(offset, u16::from_le_bytes([a, b])),
            [a, b, c, d] => return self.store32(offset, u32::from_le_bytes([a, b, c, d])),
            [a, b, c, d, e, f, g, h] => {
                return self.store64(offset, u64::from_le_bytes([a, b, c, d, e, f, g, h]));
            }
            _ => {}
        }
        let to = self.span(offset, data.len());
        // SAFETY: `to` is valid for the length, and a Rust slice cannot overlap guest RAM.
        unsafe { ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) };
    }

    pub(crate) fn cas(self, offset: u64, size: usize, old: u64, new: u64) -> u64 {
        // SAFETY: `span` has checked that the bytes are inside the mapping.
        unsafe { compare_and_swap(self.span(offset, size), size, old, new) }
    }

    pub(crate) fn cas128(self, offset: u64, old: u128, new: u128) -> u128 {
        assert!(offset.is_multiple_of(16), "unaligned 16-byte compare-and-swap");
        assert!(is_x86_feature_detected!("cmpxchg16b"), "every 64-bit CPU since 2006 has it");
        let at = self.at::<16>(offset).cast();
        // SAFETY: `at` is inside the mapping and aligned, and the CPU has the instruction.
        unsafe { swap_16_bytes(at, old, new) }
    }
}

/// CMPXCHG16B. The library's intrinsic becomes a call to libatomic in unoptimized builds.
///
/// # Safety
/// `at` is valid for reads and writes of 16 bytes and aligned to them; the CPU has the instruction.
unsafe fn swap_16_bytes(at: *mut u128, old: u128, new: u128) -> u128 {
    let (low, high): (u64, u64);
    // SAFETY: the caller's; RBX, which the compiler keeps to itself, is restored.
    unsafe {
        std::arch::asm!(
            "xchg {new_low}, rbx",
            "lock cmpxchg16b xmmword ptr [rdi]",
            "mov rbx, {new_low}",
            new_low = inout(reg) new as u64 => _,
            in("rcx") (new >> 64) as u64,
            inout("rax") old as u64 => low,
            inout("rdx") (old >> 64) as u64 => high,
            in("rdi") at,
            options(nostack),
        );
    }
    u128::from(high) << 64 | u128::from(low)
}
