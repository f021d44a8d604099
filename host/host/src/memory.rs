//! Memory objects: memory that has a life of its own, and that several processes can map.

use std::{
    any::Any,
    fmt, io,
    os::fd::{BorrowedFd, OwnedFd},
    ptr::NonNull,
};

/// Makes memory objects.
pub trait Memory: Sync {
    /// A new object of `len` bytes, which are zero. Its length never changes. The name is for people who look
    /// at the host.
    ///
    /// # Errors
    /// The host has no memory, or `len` is not whole pages.
    fn object(&self, name: &str, len: u64) -> io::Result<Box<dyn MemoryObject>>;

    /// An object that another process has passed on.
    ///
    /// # Errors
    /// It is none, or whoever made it can shorten it.
    fn adopt(&self, passed: OwnedFd) -> io::Result<Box<dyn MemoryObject>>;

    /// So for one that whoever made it can shorten: an access beyond its end is then the end of this process.
    ///
    /// # Errors
    /// It is none.
    fn adopt_shrinkable(&self, passed: OwnedFd) -> io::Result<Box<dyn MemoryObject>>;

    /// Every running thread of this process has executed a full fence when this returns: true. False where the
    /// host cannot have them do so.
    fn fence_all_threads(&self) -> bool;
}

/// A memory object. Other processes may map it, too, and write it at any time.
pub trait MemoryObject: fmt::Debug + Send + Sync {
    /// Its bytes.
    fn len(&self) -> u64;

    /// It has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forbids what the seal names, for as long as the memory object exists.
    ///
    /// # Errors
    /// The host refuses, or it has been sealed already.
    fn seal(&self, seal: Seal) -> io::Result<()>;

    /// Maps pieces one behind the other, where the host likes.
    ///
    /// # Errors
    /// The host refuses, or a piece is not whole pages.
    fn map(&self, pieces: &[Piece], access: Access) -> io::Result<Mapping>;

    /// Maps all of it to be read and written, by large pages if the host has any.
    ///
    /// # Errors
    /// The host refuses.
    fn map_large(&self) -> io::Result<Mapping>;

    /// Writes bytes without a mapping. That is faster for pages that nobody has touched yet: they need not be emptied
    /// and mapped first.
    ///
    /// # Errors
    /// The host refuses, or the object ends before the bytes do. Some of them may have been written.
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// What another process can be passed; `None` where the host has no way to.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
}

/// What can be made impossible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seal {
    /// To seal anything else.
    Seals,
    /// That, and to make a further mapping that writes. Those there are go on.
    Writers,
}

/// What a mapping may be used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// To be read.
    Read,
    /// To be read and written.
    Write,
    /// To be read and executed.
    Execute,
}

/// Pages of a memory object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where they begin, in bytes.
    pub offset: u64,
    /// Bytes.
    pub len: usize,
}

/// A mapping in this process; it ends with this value.
pub struct Mapping {
    at: NonNull<u8>,
    len: usize,
    /// Undoes it.
    _owner: Box<dyn Any + Send + Sync>,
}

// UNSAFETY: an address that is only handed out.
#[allow(unsafe_code)]
mod thread_safety {
    use super::Mapping;

    // SAFETY: an address and a length, valid in every thread; whoever dereferences says why that is sound.
    unsafe impl Send for Mapping {}
    // SAFETY: as above.
    unsafe impl Sync for Mapping {}
}

impl Mapping {
    /// For hosts: `len` bytes at `at` stay mapped until `owner` is dropped.
    pub fn new(at: NonNull<u8>, len: usize, owner: Box<dyn Any + Send + Sync>) -> Self {
        Self { at, len, _owner: owner }
    }

    /// Where it begins.
    #[inline]
    pub fn base(&self) -> NonNull<u8> {
        self.at
    }

    /// Its bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// It has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping").field("at", &self.at).field("len", &self.len).finish()
    }
}
