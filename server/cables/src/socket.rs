//! Two machines given the same path have a cable between them: the first listens, the second connects.
//!
//! The one that listens takes the next when the other leaves. QEMU can be at either end
//! (`-netdev stream,id=n,server=off,addr.type=unix,addr.path=PATH`).

use std::{
    fs::{self, File},
    io::{self, ErrorKind},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use crate::{CableError, Ready, Sender, Wire, inbox::Inbox, stream};

/// How long the other end may leave a frame unread before the connection is given up.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long to wait where the host does not give what it takes.
const BREATH: Duration = Duration::from_millis(100);

/// The other end, while there is one.
type Peer = Arc<Mutex<Option<Arc<UnixStream>>>>;

fn lock(peer: &Peer) -> MutexGuard<'_, Option<Arc<UnixStream>>> {
    peer.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Socket {
    peer: Peer,
    /// To be removed at the end.
    path: Option<PathBuf>,
}

impl Sender for Socket {
    fn send(&mut self, frame: &[u8]) {
        let Some(peer) = lock(&self.peer).clone() else { return };
        if let Err(error) = stream::send(&peer, frame) {
            tracing::warn!(%error, "the cable's other end");
            stream::hang_up(&peer);
            lock(&self.peer).take_if(|now| Arc::ptr_eq(now, &peer));
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        lock(&self.peer).take().inspect(|peer| stream::hang_up(peer));
        // Whoever comes next does without it.
        let _ = self.path.take().map(fs::remove_file);
    }
}

/// A cable to the other machine that is given `path`.
///
/// # Errors
/// There can be no socket at that path, or what is there is none.
pub fn socket(path: &Path) -> Result<Ready, CableError> {
    let peer = Peer::default();
    let listener =
        match meet(path).map_err(|source| CableError::Socket { path: path.into(), source })? {
            End::Connected(stream) => {
                *lock(&peer) = Some(prepared(stream)?);
                None
            }
            End::Listening(listener) => Some(listener),
        };
    let path = listener.is_some().then(|| path.to_owned());
    Ok(Ready(Box::new(move || start(listener, Socket { peer, path }))))
}

fn start(listener: Option<UnixListener>, socket: Socket) -> Result<Wire, CableError> {
    let inbox = Arc::new(Inbox::default());
    let (there, frames) = (Arc::clone(&socket.peer), Arc::clone(&inbox));
    thread::Builder::new().name("cable".into()).spawn(move || serve(listener, &there, &frames))?;
    Ok(Wire { sender: Box::new(socket), inbox })
}

/// Which end of a cable we are.
enum End {
    Connected(UnixStream),
    Listening(UnixListener),
}

/// Connects to whoever listens, or listens. Two that come at once take turns: to the second the first would else look as if it
/// had been killed, after it has made its socket and before it listens.
fn meet(path: &Path) -> io::Result<End> {
    let turn = folder_of(path)?;
    // Given back when it is closed.
    turn.lock()?;
    match UnixStream::connect(path) {
        Ok(stream) => Ok(End::Connected(stream)),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            UnixListener::bind(path).map(End::Listening)
        }
        // Left behind by a machine that was killed.
        Err(error) if error.kind() == ErrorKind::ConnectionRefused && is_socket(path) => {
            fs::remove_file(path)?;
            UnixListener::bind(path).map(End::Listening)
        }
        Err(error) => Err(error),
    }
}

/// Listens at `path`, in place of who was killed there, too; what is no socket stays.
///
/// # Errors
/// Somebody listens there, something else lies there, or there can be no socket.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    let taken = || io::Error::other("something listens or lies there; give another name");
    match meet(path) {
        Ok(End::Listening(listener)) => Ok(listener),
        Ok(End::Connected(_)) => Err(taken()),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Err(taken()),
        Err(error) => Err(error),
    }
}

/// Removes a socket at which nobody listens any more: whoever made it could not.
pub fn forget(path: &Path) {
    // What stays behind is replaced by the next machine that is given the path.
    let _turn = folder_of(path).and_then(|folder| folder.lock().map(|()| folder));
    let refused = |error: io::Error| error.kind() == ErrorKind::ConnectionRefused;
    if is_socket(path) && UnixStream::connect(path).is_err_and(refused) {
        let _ = fs::remove_file(path);
    }
}

fn folder_of(path: &Path) -> io::Result<File> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))
}

fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    path.symlink_metadata().is_ok_and(|metadata| metadata.file_type().is_socket())
}

pub(crate) fn prepared(stream: UnixStream) -> Result<Arc<UnixStream>, CableError> {
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(Arc::new(stream))
}

/// Receives from the peer there is, or from one after the other.
fn serve(listener: Option<UnixListener>, peer: &Peer, inbox: &Inbox) {
    let Some(listener) = listener else { return receive(peer, inbox) };
    for stream in listener.incoming() {
        if inbox.is_closed() {
            return;
        }
        // Where the host has no descriptors left, asking again at once would not help.
        let Ok(stream) = stream else {
            thread::sleep(BREATH);
            continue;
        };
        match prepared(stream) {
            Ok(stream) => {
                *lock(peer) = Some(stream);
                receive(peer, inbox);
            }
            Err(error) => tracing::warn!(%error, "the cable's other end"),
        }
    }
}

fn receive(peer: &Peer, inbox: &Inbox) {
    let Some(stream) = lock(peer).clone() else { return };
    if let Err(error) = stream::receive(&stream, inbox) {
        tracing::warn!(%error, "the cable's other end");
    }
    stream::hang_up(&stream);
    lock(peer).take_if(|now| Arc::ptr_eq(now, &stream));
}
