//! An end to waiting for a server's answer. The library that speaks the protocol waits for ever, and where a socket times out it asks again for
//! ever. So a server that is mute for too long is hung up on, which the library takes for the end that it is.

use std::{
    net::Shutdown,
    os::unix::net::UnixStream,
    sync::mpsc::{RecvTimeoutError, channel},
    thread,
    time::Duration,
};

/// Does something with the server at the other end; `None` if that took longer than `patience`: the socket is of no use then.
pub(crate) fn within<T>(
    socket: &UnixStream,
    patience: Duration,
    what: impl FnOnce() -> T,
) -> Option<T> {
    let (done, waiting) = channel::<()>();
    thread::scope(|scope| {
        let watch = thread::Builder::new().name("patience".into()).spawn_scoped(scope, move || {
            let late = waiting.recv_timeout(patience) == Err(RecvTimeoutError::Timeout);
            if late {
                // One that has hung up needs no hanging up.
                let _ = socket.shutdown(Shutdown::Both);
            }
            late
        });
        // On a host that gives no thread nobody watches, and a server that stands still is waited for.
        let outcome = what();
        drop(done);
        // A watch that failed has not hung up.
        let late = watch.ok().and_then(|watch| watch.join().ok()).unwrap_or_default();
        (!late).then_some(outcome)
    })
}

#[cfg(test)]
mod tests {
    use std::{io::Read, time::Instant};

    use super::*;

    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn who_is_mute_is_hung_up_on() {
        let (mut ours, _theirs) = UnixStream::pair().expect("a pair");
        let socket = ours.try_clone().expect("a descriptor");
        let read = within(&socket, SHORT, || ours.read(&mut [0]).expect("an end"));
        assert_eq!(read, None);
    }

    #[test]
    fn who_answers_is_not_waited_for() {
        let (ours, _theirs) = UnixStream::pair().expect("a pair");
        let start = Instant::now();
        assert_eq!(within(&ours, LONG, || 7), Some(7));
        assert!(start.elapsed() < LONG / 2);
    }
}
