//! What a program has seen, as text. It lies in memory that all processes of the program share.

use core::{
    fmt,
    sync::atomic::{AtomicUsize, Ordering},
};

use crate::sys::{self, MMAP, sys};

const LEN: usize = 1 << 20;

#[repr(C, align(4096))]
struct Shared {
    len: AtomicUsize,
    text: [u8; LEN],
}

static mut SHARED: Shared = Shared { len: AtomicUsize::new(0), text: [0; LEN] };

fn shared() -> *mut Shared {
    &raw mut SHARED
}

/// Makes the text's memory one that children share.
pub fn set_up() {
    let flags = sys::MAP_SHARED | sys::MAP_FIXED | sys::MAP_ANONYMOUS;
    let result = sys!(MMAP, shared(), size_of::<Shared>(), 3, flags, usize::MAX, 0);
    if result < 0 {
        sys::exit(8);
    }
}

fn len() -> &'static AtomicUsize {
    // SAFETY: the static is never moved, and its length is an atomic.
    unsafe { &(*shared()).len }
}

/// Forgets all of it.
pub fn clear() {
    len().store(0, Ordering::SeqCst);
}

/// All of it.
pub fn text() -> &'static [u8] {
    let count = len().load(Ordering::SeqCst).min(LEN);
    // SAFETY: the first `count` bytes have been written, and nobody writes while they are read: the writers
    // have ended.
    unsafe { core::slice::from_raw_parts((&raw const (*shared()).text).cast::<u8>(), count) }
}

pub struct Writer;

impl fmt::Write for Writer {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for &byte in text.as_bytes() {
            let at = len().fetch_add(1, Ordering::SeqCst);
            if at < LEN {
                // SAFETY: inside the array; each byte has one writer.
                unsafe { (&raw mut (*shared()).text).cast::<u8>().add(at).write(byte) };
            }
        }
        Ok(())
    }
}

/// Notes something.
macro_rules! note {
    ($($part:tt)*) => {{
        use core::fmt::Write;
        let _ = write!($crate::trace::Writer, $($part)*);
    }};
}
pub(crate) use note;

/// FNV-1a, for what is too long to be noted.
pub fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, &byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}
