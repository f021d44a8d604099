//! The console of a running machine for whoever attaches: `ring3 console NAME`.
//!
//! The machine's output goes to its own standard output, as ever, and to viewers; who attaches first sees the last
//! of what was printed. A viewer that does not read is left behind. What viewers type reaches the guest.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, Read, Write},
    net::Shutdown,
    os::{
        fd::AsFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc::channel},
    thread,
    time::Duration,
};

use super::{
    ControlListener, Target,
    client::find,
    clients::{self, ClientLimit, Leaves},
    folder, server,
};
use crate::{
    console::{End, RawTerminal, read_stdin, start, watch_signals},
    failure::Failure,
    outcome::Outcome,
};

/// Bytes of past output a new viewer sees.
const PAST: usize = 16 << 10;

/// How long a viewer may keep others waiting.
const PATIENCE: Duration = Duration::from_millis(200);

const VIEWERS: ClientLimit = ClientLimit { name: "viewer", most: 32, leaves: Leaves::Newest };

/// The writer of a console.
#[derive(Clone)]
pub struct Screen(Arc<Mutex<State>>);

struct State {
    /// Where output goes besides; none, or no more.
    own: Option<Box<dyn Write + Send>>,
    /// Why it takes no more, if not because its reader has gone.
    failure: Option<io::Error>,
    past: VecDeque<u8>,
    viewers: Vec<(u64, UnixStream)>,
    next: u64,
}

impl Screen {
    /// A screen that also writes to `own`.
    pub fn new(own: Option<Box<dyn Write + Send>>) -> Self {
        let (past, viewers) = (VecDeque::new(), Vec::new());
        Self(Arc::new(Mutex::new(State { own, failure: None, past, viewers, next: 0 })))
    }

    /// Why standard output has not got all that was printed; nothing if nobody is there to read it.
    pub fn failure(&self) -> Option<String> {
        // Whoever has it waits for a reader, so that nothing has failed.
        let state = self.0.try_lock().ok()?;
        let failure = state.failure.as_ref()?;
        Some(format!("standard output: {failure}; not all that the guest printed is there"))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shows everything to a viewer from now on; its number.
    fn add(&self, viewer: &UnixStream) -> io::Result<u64> {
        let mut viewer = viewer.try_clone()?;
        viewer.set_write_timeout(Some(PATIENCE))?;
        let mut state = self.lock();
        viewer.write_all(state.past.make_contiguous())?;
        state.next += 1;
        let number = state.next;
        state.viewers.push((number, viewer));
        Ok(number)
    }

    /// A viewer has left.
    fn remove(&self, number: u64) {
        self.lock().viewers.retain(|(known, _)| *known != number);
    }
}

impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.lock();
        state.past.extend(bytes);
        let old = state.past.len().saturating_sub(PAST);
        state.past.drain(..old);
        state.viewers.retain_mut(|(_, viewer)| {
            let seen = viewer.write_all(bytes).is_ok();
            if !seen {
                // Whoever listens to it stops. One that has left needs no hanging up.
                let _ = viewer.shutdown(Shutdown::Both);
            }
            seen
        });
        let written = state.own.as_mut().map(|own| own.write_all(bytes).and_then(|()| own.flush()));
        if let Some(Err(error)) = written {
            // A closed pipe swallows the rest.
            state.own = None;
            state.failure = Some(error).filter(|error| error.kind() != io::ErrorKind::BrokenPipe);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Lets viewers attach to `screen`; what they type goes to `input`.
///
/// # Errors
/// The socket cannot be made.
pub fn serve(
    screen: Screen,
    input: impl Fn(&[u8]) + Clone + Send + 'static,
) -> io::Result<ControlListener> {
    let path = socket_of(std::process::id())?;
    let listener = server::bind(&path)?;
    let viewers = move || show_to_all(&listener, screen, input);
    thread::Builder::new().name("viewers".into()).spawn(viewers)?;
    Ok(ControlListener::new(path))
}

fn show_to_all(
    listener: &UnixListener,
    screen: Screen,
    input: impl Fn(&[u8]) + Clone + Send + 'static,
) {
    clients::serve_all(listener, VIEWERS, move |viewer| {
        // A viewer that fails has failed by itself.
        if let Ok(number) = screen.add(viewer) {
            listen_to(viewer, &input);
            screen.remove(number);
        }
    });
}

fn listen_to(viewer: &UnixStream, input: impl Fn(&[u8])) {
    let mut buffer = [0; 4096];
    let mut reader = viewer;
    while let Ok(count @ 1..) = reader.read(&mut buffer) {
        input(&buffer[..count]);
    }
}

fn socket_of(pid: u32) -> io::Result<PathBuf> {
    Ok(folder()?.join(format!("{pid}.console")))
}

/// What ends `ring3 console`.
enum Event {
    /// The user, or a signal.
    User(End),
    /// The machine has ended.
    Over,
    /// What the machine prints cannot be shown.
    Mute(io::Error),
}

impl From<End> for Event {
    fn from(end: End) -> Self {
        Self::User(end)
    }
}

/// `ring3 console`: until the machine ends, or the user leaves by Ctrl-A X. The machine goes on.
pub fn console(target: &Target) -> Result<u8, Failure> {
    let machine = find(target)?;
    let wrong = |error: io::Error| Failure::host(format!("console of {}: {error}", machine.name));
    let path = socket_of(machine.pid).map_err(wrong)?;
    if !path.exists() {
        let problem =
            "it has none that others can see: one of `ring3 exec` keeps it to itself (-v shows it)";
        return Err(Failure::usage(format!("console of {}: {problem}", machine.name)));
    }
    let stream = UnixStream::connect(path).map_err(wrong)?;
    let (mut output, keyboard) = (stream.try_clone().map_err(wrong)?, stream);
    // Not by way of std's buffer, which keeps prompts to itself.
    let screen = io::stdout().as_fd().try_clone_to_owned().map_err(wrong)?;
    let (sender, events) = channel();
    watch_signals(sender.clone())?;
    let terminal = RawTerminal::enter()?;
    let push = move |bytes: &[u8]| {
        // What a machine that has ended does not hear is not missed.
        let _ = (&keyboard).write_all(bytes);
    };
    read_stdin(&terminal, push, sender.clone())?;
    start("show", move || {
        let shown = show(&mut output, &mut File::from(screen));
        // Nobody listening means the user has left anyway.
        let _ = sender.send(shown.map_or_else(Event::Mute, |()| Event::Over));
    })?;
    let event = events.recv();
    drop(terminal);
    match event {
        Ok(Event::User(End::Signal(number))) => Ok(Outcome::Signal(number).code()),
        Ok(Event::Mute(error)) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::host(format!("standard output: {error}")))
        }
        _ => Ok(0),
    }
}

/// Copies until the machine ends, or the output takes no more. Not by `io::copy`: it has the kernel splice, which keeps a pipe locked, unread,
/// for as long as it waits for more.
fn show(from: &mut UnixStream, to: &mut File) -> io::Result<()> {
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        to.write_all(&buffer[..count])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn viewer(screen: &Screen) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        screen.add(&theirs).expect("added");
        ours
    }

    #[test]
    fn a_thousand_viewers_leave_nothing_behind() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).expect("bound");
        let screen = Screen::new(None);
        let shown = screen.clone();
        thread::spawn(move || show_to_all(&listener, shown, |_: &[u8]| {}));
        clients::tests::besiege(&path, VIEWERS.name, || {
            screen.clone().write_all(b"shown").expect("the machine goes on");
        });
        assert!(screen.lock().viewers.is_empty());
    }

    /// Nothing is written to it that would tell that it has left.
    #[test]
    fn a_viewer_of_a_silent_guest_leaves_nothing_behind() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).expect("bound");
        let (mut screen, start) = (Screen::new(None), Instant::now());
        let shown = screen.clone();
        thread::spawn(move || show_to_all(&listener, shown, |_: &[u8]| {}));
        screen.write_all(b"shown").expect("written");
        let viewer = UnixStream::connect(&path).expect("connected");
        assert_eq!(read(&viewer, 5), b"shown");
        assert_eq!(screen.lock().viewers.len(), 1);
        drop(viewer);
        while !screen.lock().viewers.is_empty() {
            assert!(start.elapsed() < Duration::from_secs(20), "it is still there");
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn read(mut viewer: &UnixStream, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        viewer.read_exact(&mut bytes).expect("read");
        bytes
    }

    #[test]
    fn viewers_see_what_was_and_what_comes() {
        let mut screen = Screen::new(None);
        screen.write_all(b"before ").expect("written");
        let first = viewer(&screen);
        screen.write_all(b"after").expect("written");
        let second = viewer(&screen);
        assert_eq!(read(&first, 12), b"before after");
        assert_eq!(read(&second, 12), b"before after");
    }

    #[test]
    fn a_full_disk_is_told_of_and_a_reader_that_went_is_not() {
        let full = File::options().write(true).open("/dev/full").expect("the host has it");
        let (reader, gone) = io::pipe().expect("a pipe");
        drop(reader);
        let outputs: [Box<dyn Write + Send>; 2] = [Box::new(full), Box::new(gone)];
        let failures = outputs.map(|output| {
            let mut screen = Screen::new(Some(output));
            screen.write_all(b"lost").expect("the machine goes on");
            screen.failure()
        });
        assert!(failures[0].as_ref().is_some_and(|told| told.contains("No space left")));
        assert_eq!(failures[1], None);
    }

    #[test]
    fn only_the_last_of_the_past_is_kept() {
        let mut screen = Screen::new(None);
        screen.write_all(&[b'x'; PAST]).expect("written");
        screen.write_all(b"end").expect("written");
        let late = viewer(&screen);
        drop(screen);
        let bytes = read(&late, PAST);
        assert_eq!(bytes[PAST - 3..], *b"end");
    }

    #[test]
    fn a_viewer_that_does_not_read_is_left_behind() {
        let mut screen = Screen::new(None);
        let _sleeper = viewer(&screen);
        let gone = viewer(&screen);
        drop(gone);
        for _ in 0..200 {
            screen.write_all(&[b'x'; 16 << 10]).expect("the machine goes on");
        }
        assert!(screen.lock().viewers.is_empty());
    }
}
