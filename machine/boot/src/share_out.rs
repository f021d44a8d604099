//! Work that the host's CPUs share.

use std::{
    num::NonZero,
    sync::{Mutex, PoisonError},
    thread,
};

/// Does `work` to each piece. There is a thread for each of the host's CPUs, but no more threads than half the pieces. Each
/// thread works with something of its own, which it gets by `begin`.
pub(crate) fn share_out<T: Send, S>(
    pieces: impl ExactSizeIterator<Item = T> + Send,
    begin: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, T) + Sync,
) {
    let most = pieces.len() / 2;
    let pieces = Mutex::new(pieces);
    let do_some = || {
        // What is locked is an iterator, which a panic leaves as it was.
        let next = || pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
        let mut own = begin();
        while let Some(piece) = next() {
            work(&mut own, piece);
        }
    };
    thread::scope(|scope| {
        let others = thread::available_parallelism().map_or(1, NonZero::get) - 1;
        for _ in 0..others.min(most) {
            // Who is not there leaves more to the others.
            let _ = thread::Builder::new().spawn_scoped(scope, do_some);
        }
        do_some();
    });
}
