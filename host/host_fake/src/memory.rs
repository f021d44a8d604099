//! Memory objects on the heap. There is nobody to pass them to.

use std::{
    io::{self, ErrorKind},
    os::fd::{BorrowedFd, OwnedFd},
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
};

use host::{Access, Mapping, MemoryObject, Piece, Seal};

const PAGE: usize = 4096;

#[repr(C, align(4096))]
struct Page([AtomicU8; PAGE]);

struct Object {
    pages: Arc<[Page]>,
    sealed: AtomicBool,
    writers_sealed: AtomicBool,
}

impl std::fmt::Debug for Object {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} pages of the heap", self.pages.len())
    }
}

pub(crate) fn object(len: u64) -> io::Result<Box<dyn MemoryObject>> {
    if len == 0 || !len.is_multiple_of(PAGE as u64) {
        return Err(ErrorKind::InvalidInput.into());
    }
    let page = |_| Page([const { AtomicU8::new(0) }; PAGE]);
    let pages = (0..len / PAGE as u64).map(page).collect();
    let [sealed, writers_sealed] = [AtomicBool::new(false), AtomicBool::new(false)];
    Ok(Box::new(Object { pages, sealed, writers_sealed }))
}

pub(crate) fn adopt(_: OwnedFd) -> io::Result<Box<dyn MemoryObject>> {
    Err(ErrorKind::Unsupported.into())
}

impl MemoryObject for Object {
    fn len(&self) -> u64 {
        (self.pages.len() * PAGE) as u64
    }

    fn seal(&self, seal: Seal) -> io::Result<()> {
        if self.sealed.swap(true, Ordering::SeqCst) {
            return Err(ErrorKind::PermissionDenied.into());
        }
        self.writers_sealed.store(seal == Seal::Writers, Ordering::SeqCst);
        Ok(())
    }

    /// Pieces that follow one another in the object only, and nothing is executed.
    fn map(&self, pieces: &[Piece], access: Access) -> io::Result<Mapping> {
        let Some(first) = pieces.first() else { return Err(ErrorKind::InvalidInput.into()) };
        if access == Access::Write && self.writers_sealed.load(Ordering::SeqCst) {
            return Err(ErrorKind::PermissionDenied.into());
        }
        let follow = |pair: &[Piece]| pair[0].offset + pair[0].len as u64 == pair[1].offset;
        if access == Access::Execute || !pieces.windows(2).all(follow) {
            return Err(ErrorKind::Unsupported.into());
        }
        let len = pieces.iter().map(|piece| piece.len).sum::<usize>();
        let (from, count) = (first.offset as usize / PAGE, len / PAGE);
        let whole = first.offset.is_multiple_of(PAGE as u64) && len.is_multiple_of(PAGE);
        let pages = self.pages.get(from..from + count).filter(|_| whole && len > 0);
        let pages = pages.ok_or(ErrorKind::InvalidInput)?;
        let at = NonNull::from(pages).cast::<u8>();
        Ok(Mapping::new(at, len, Box::new(Arc::clone(&self.pages))))
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let all = self.pages.iter().flat_map(|page| &page.0).skip(offset as usize);
        if offset + bytes.len() as u64 > self.len() {
            return Err(ErrorKind::WriteZero.into());
        }
        all.zip(bytes).for_each(|(place, byte)| place.store(*byte, Ordering::Relaxed));
        Ok(())
    }

    fn map_large(&self) -> io::Result<Mapping> {
        self.map(&[Piece { offset: 0, len: self.len() as usize }], Access::Write)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_begin_where_they_should() {
        let object = object(3 * PAGE as u64).expect("memory");
        let all = object.map_large().expect("mapped");
        let second = [Piece { offset: PAGE as u64, len: PAGE }];
        let second = object.map(&second, Access::Read).expect("mapped");
        assert_eq!(second.base().addr().get(), all.base().addr().get() + PAGE);
        assert_eq!((all.len(), second.len()), (3 * PAGE, PAGE));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let object = object(2 * PAGE as u64).expect("memory");
        let piece = |page: usize, len| Piece { offset: (page * PAGE) as u64, len };
        let mapped = |pieces: &[Piece]| object.map(pieces, Access::Read).is_ok();
        assert!(mapped(&[piece(0, PAGE), piece(1, PAGE)]));
        assert!(!mapped(&[piece(1, PAGE), piece(0, PAGE)]), "not on the heap");
        assert!(!mapped(&[piece(1, 2 * PAGE)]) && !mapped(&[piece(0, 100)]) && !mapped(&[]));
        object.seal(Seal::Writers).expect("sealed");
        assert!(object.seal(Seal::Seals).is_err() && object.map_large().is_err());
        assert!(mapped(&[piece(0, PAGE)]));
    }
}
