//! Memory objects: memory that several processes map.
//!
//! Another process may write such memory at any time, and a hostile one does. So nobody here has a reference
//! into it, but to what is atomic ([`Atomic`]): contents are copied in and out, field by field ([`Field`]) or
//! as a whole.
// UNSAFETY: copies from and to memory that other processes write.
#![allow(unsafe_code)]

use std::{
    io,
    marker::PhantomData,
    ptr::{self, NonNull},
    sync::atomic::{AtomicU64, Ordering},
};

use host::{Mapping, Seal};

/// Data of which any bytes are a value.
///
/// # Safety
/// That they are, and that it has no padding.
pub(crate) unsafe trait Plain: Copy {}
// SAFETY: numbers.
unsafe impl Plain for u8 {}
// SAFETY: numbers.
unsafe impl Plain for u64 {}
// SAFETY: numbers.
unsafe impl Plain for i64 {}
// SAFETY: numbers, one behind the other.
unsafe impl Plain for wedge_abi::RawChange {}
// SAFETY: numbers, one behind the other.
unsafe impl Plain for wedge_abi::Setup {}
// SAFETY: as each of them.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// Structures whose parts are all atomic.
///
/// # Safety
/// That they are.
pub(crate) unsafe trait Atomic {}
// SAFETY: atomic words.
unsafe impl Atomic for wedge_abi::TurnsPage {}
// SAFETY: atomic words.
unsafe impl Atomic for wedge_abi::Lookups {}

/// A field of a shared structure: where it lies, and what it is.
pub(crate) struct Field<T, F> {
    offset: usize,
    of: PhantomData<fn(&T) -> &F>,
}

impl<T, F: Plain> Field<T, F> {
    /// By [`field!`] alone: the function only says which type the field at this offset has.
    pub const fn new(offset: usize, _: fn(&T) -> &F) -> Self {
        Self { offset, of: PhantomData }
    }
}

impl<T, F: Plain, const N: usize> Field<T, [F; N]> {
    /// One of an array; `None` beyond its end.
    pub fn at(&self, index: usize) -> Option<Field<T, F>> {
        let offset = self.offset + index * size_of::<F>();
        (index < N).then_some(Field { offset, of: PhantomData })
    }
}

/// A field of a shared structure by its path.
macro_rules! field {
    ($of:ty, $($path:tt)+) => {
        $crate::memory::Field::new(std::mem::offset_of!($of, $($path)+), |of: &$of| &of.$($path)+)
    };
}
pub(crate) use field;

/// A zeroed memory object of at least a `T`, mapped writable here for as long as it lives.
#[derive(Debug)]
pub(crate) struct MemoryObject<T> {
    object: Box<dyn host::MemoryObject>,
    mapping: Mapping,
    kind: PhantomData<fn() -> T>,
}

impl<T> MemoryObject<T> {
    /// A new object of `len` bytes, rounded up to whole pages.
    pub fn new(name: &str, len: usize) -> io::Result<Self> {
        let len = len.max(size_of::<T>()).next_multiple_of(4096);
        let object = host::current().object(name, len as u64)?;
        let all = host::Piece { offset: 0, len };
        let mapping = object.map(&[all], host::Access::Write)?;
        Ok(Self { object, mapping, kind: PhantomData })
    }

    /// From now on nobody can make a mapping that writes it, nor make one writable. Writes by this mapping go on.
    pub fn seal(&self) -> io::Result<()> {
        self.object.seal(Seal::Writers)
    }

    /// The object, for processes that are to map it.
    pub fn object(&self) -> &dyn host::MemoryObject {
        &*self.object
    }

    fn at(&self) -> NonNull<u8> {
        self.mapping.base()
    }

    /// What a field has now.
    pub fn get<F: Plain>(&self, field: Field<T, F>) -> F {
        // SAFETY: inside the mapping, aligned as in a `T` at a page's start; any bytes are a value. Others
        // may write it meanwhile: then it is some value.
        unsafe { self.at().as_ptr().add(field.offset).cast::<F>().read_volatile() }
    }

    /// Gives a field a value.
    pub fn set<F: Plain>(&self, field: Field<T, F>, value: F) {
        // SAFETY: as for `get`.
        unsafe { self.at().as_ptr().add(field.offset).cast::<F>().write_volatile(value) }
    }

    /// The byte at an offset, zero beyond the end.
    pub fn byte(&self, offset: usize) -> u8 {
        if offset >= self.len() {
            return 0;
        }
        // SAFETY: inside the mapping.
        unsafe { ptr::read_volatile(self.at().as_ptr().add(offset)) }
    }

    /// Copies bytes from an offset; what lies beyond the end is zero.
    pub fn read(&self, offset: usize, to: &mut [u8]) {
        let len = to.len().min(self.len().saturating_sub(offset));
        // SAFETY: inside the mapping; the bytes are the caller's own.
        unsafe { copy_bytes(self.at().as_ptr().wrapping_add(offset), to.as_mut_ptr(), len) };
        to[len..].fill(0);
    }

    /// Copies bytes to an offset.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset.checked_add(bytes.len()).is_some_and(|end| end <= self.len()));
        // SAFETY: checked above; there are no references into what is not atomic.
        unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), self.at().as_ptr().add(offset), bytes.len());
        }
    }
}

impl<T> MemoryObject<T> {
    /// A word at an offset that is a multiple of eight, as an atomic.
    ///
    /// # Panics
    /// If it is none, or beyond the end.
    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset < self.len());
        // SAFETY: inside the mapping, which is whole pages long, and aligned. Whoever else writes it while others may be
        // looking does so by this function, too.
        unsafe { &*self.at().as_ptr().add(offset).cast() }
    }

    /// Writes a word, after all that was written before.
    pub fn write_word(&self, offset: usize, value: u64) {
        self.word(offset).store(value, Ordering::Release);
    }

    /// The word at an offset.
    pub fn read_word(&self, offset: usize) -> u64 {
        self.word(offset).load(Ordering::Acquire)
    }

    /// Sets bits of a word.
    pub fn add_bits(&self, offset: usize, bits: u64) {
        self.word(offset).fetch_or(bits, Ordering::Release);
    }

    /// Bytes of it, whole pages.
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Writes bytes that lie in one aligned word, all of them at once. The rest of the word must not change meanwhile.
    pub fn write_part(&self, offset: usize, bytes: [u8; 4]) {
        let word = self.word(offset & !7);
        let mut new = word.load(Ordering::Relaxed).to_le_bytes();
        new[offset % 8..][..4].copy_from_slice(&bytes);
        word.store(u64::from_le_bytes(new), Ordering::Release);
    }
}

impl<T: Atomic> MemoryObject<T> {
    /// The contents.
    pub fn all(&self) -> &T {
        // SAFETY: page-aligned, large enough, and all of it is atomic: others may write it at any time.
        unsafe { self.at().cast().as_ref() }
    }
}

/// A structure that is copied as a whole.
///
/// # Safety
/// Any bytes are a value of it, and it is a multiple of eight bytes long.
pub(crate) unsafe trait Copied {}
// SAFETY: numbers, and pages long.
unsafe impl Copied for wedge_abi::VcpuPage {}

impl<T: Copied> MemoryObject<T> {
    /// Copies the first bytes of the contents, a multiple of eight, to those of a copy.
    pub fn copy_in(&self, to: &mut T, len: usize) {
        // SAFETY: any bytes are a value; the copy is exclusively ours.
        unsafe { copy(self.at().as_ptr(), ptr::from_mut(to).cast(), len.min(size_of::<T>())) }
    }

    /// Copies the first bytes of a copy, a multiple of eight, to the contents.
    pub fn copy_out(&self, from: &T, len: usize) {
        // SAFETY: as for `copy_in`.
        unsafe { copy(ptr::from_ref(from).cast(), self.at().as_ptr(), len.min(size_of::<T>())) }
    }
}

/// Copies words. In assembly, since another process may write the memory meanwhile: the compiler need not
/// know.
///
/// # Safety
/// Both ranges are mapped, and nobody in this process has references to them but the caller.
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: as asked of the caller; the direction flag is clear by the ABI.
    unsafe {
        std::arch::asm!("rep movsq", inout("rsi") from => _, inout("rdi") to => _,
            inout("rcx") len / 8 => _, options(nostack, preserves_flags));
    }
}

/// Copies bytes. In assembly, as [`copy`] is.
///
/// # Safety
/// As for [`copy`].
unsafe fn copy_bytes(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: as asked of the caller; the direction flag is clear by the ABI.
    unsafe {
        std::arch::asm!("rep movsb", inout("rsi") from => _, inout("rdi") to => _,
            inout("rcx") len => _, options(nostack, preserves_flags));
    }
}
