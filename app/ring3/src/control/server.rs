//! The machine's side: a thread takes clients, others serve them and ask the main thread.

use std::{
    fs,
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::mpsc::{Receiver, SyncSender, channel, sync_channel},
    thread,
    time::Duration,
};

use super::{
    ControlOrder, Reply, Request, Stats, Status,
    clients::{self, ClientLimit, Leaves},
    folder,
    handed::{self, Hand},
};
use crate::spawner;

/// The longest line a client may send.
const MAX_LINE: u64 = 4096;
/// How long a client may be silent.
const PATIENCE: Duration = Duration::from_secs(5);
const CLIENTS: ClientLimit =
    ClientLimit { name: "control-client", most: 16, leaves: Leaves::Oldest };

/// An order and where its answer goes.
#[derive(Debug)]
pub struct Asked {
    /// The order.
    pub order: ControlOrder,
    reply: SyncSender<Status>,
    /// Disconnected once the client has been sent the answer.
    written: Receiver<()>,
}

impl Asked {
    /// Answers. A client that has left needs no answer.
    pub fn answer(&self, status: Status) {
        let _ = self.reply.send(status);
    }

    /// Waits until the client has its answer, or does not take it.
    pub fn wait(&self) {
        let _ = self.written.recv_timeout(PATIENCE);
    }
}

/// The socket; removed when dropped, or when this process ends otherwise.
pub struct ControlListener(PathBuf);

impl ControlListener {
    pub(super) fn new(path: PathBuf) -> Self {
        spawner::remove_at_end(path.clone());
        Self(path)
    }
}

impl Drop for ControlListener {
    fn drop(&mut self) {
        // A socket left behind is noticed by the next client.
        let _ = spawner::remove(self.0.clone());
    }
}

/// Listens for orders, each of which is given to `ask`; false from it means that there is nobody to ask any more. Connections
/// that are for more than a line are given to `hand`.
///
/// # Errors
/// The socket cannot be made.
pub fn listen(
    ask: impl Fn(Asked) -> bool + Clone + Send + 'static,
    hand: Hand,
) -> io::Result<ControlListener> {
    let path = folder()?.join(format!("{}.sock", std::process::id()));
    let listener = bind(&path)?;
    thread::Builder::new().name("control".into()).spawn(move || serve_all(&listener, ask, hand))?;
    Ok(ControlListener::new(path))
}

/// A socket that is listened on as soon as it has this name. One that is there and not listened on yet would be taken for one left
/// behind, and removed.
///
/// # Errors
/// The socket cannot be made.
pub(super) fn bind(path: &Path) -> io::Result<UnixListener> {
    let mut early = path.as_os_str().to_owned();
    early.push(".new");
    // Of a process that had our number and did not end well. So is what has the name itself.
    let _ = fs::remove_file(&early);
    let listener = UnixListener::bind(&early)?;
    fs::rename(&early, path)?;
    Ok(listener)
}

fn serve_all(
    listener: &UnixListener,
    ask: impl Fn(Asked) -> bool + Clone + Send + 'static,
    hand: Hand,
) {
    clients::serve_all(listener, CLIENTS, move |client| {
        // A client that fails has failed by itself.
        let _ = serve(client, &ask, &hand);
    });
}

fn serve(client: &UnixStream, ask: &impl Fn(Asked) -> bool, hand: &Hand) -> io::Result<()> {
    client.set_read_timeout(Some(PATIENCE))?;
    client.set_write_timeout(Some(PATIENCE))?;
    let mut lines = BufReader::new(client);
    loop {
        let mut line = String::new();
        if lines.by_ref().take(MAX_LINE).read_line(&mut line)? == 0 {
            return Ok(());
        }
        let (_writing, written) = channel();
        let reply = answer(&line, written, ask);
        let mut text = serde_json::to_string(&reply)?;
        text.push('\n');
        let mut writer = client;
        writer.write_all(text.as_bytes())?;
        if let (Reply::Status(_), Some(order)) = (reply, handed::order_of(&line)) {
            return hand.take(order, client);
        }
        if !line.ends_with('\n') {
            return Ok(());
        }
    }
}

fn answer(line: &str, written: Receiver<()>, ask: &impl Fn(Asked) -> bool) -> Reply {
    let error = |error: String| Reply::Error { error };
    let request: Request = match serde_json::from_str(line) {
        Ok(request) => request,
        Err(problem) => return error(format!("not a request: {problem}")),
    };
    let (reply, answer) = sync_channel(1);
    if !ask(Asked { order: request.command, reply, written }) {
        return error("the machine has ended".to_owned());
    }
    let mut status = match answer.recv_timeout(PATIENCE) {
        Ok(status) => status,
        Err(problem) => return error(problem.to_string()),
    };
    // Not by the main thread: this looks through the host's processes.
    status.stats = (request.command == ControlOrder::Stats).then(Stats::now).flatten();
    Reply::Status(status)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status() -> Status {
        let (name, state, kernel) = ("a".to_owned(), "running".to_owned(), "k".to_owned());
        Status { name, pid: 1, state, seconds: 1.5, memory: 1 << 30, kernel, stats: None }
    }

    #[test]
    fn lines_are_answered_one_by_one() {
        let (client, server) = UnixStream::pair().expect("a pair");
        thread::spawn(move || {
            let ask = |asked: Asked| {
                assert_eq!(asked.order, ControlOrder::Pause);
                asked.answer(status());
                true
            };
            serve(&server, &ask, &Hand::default())
        });
        let mut writer = &client;
        writer
            .write_all(b"{\"command\": \"pause\"}\n{\"command\": \"fly\"}\nnonsense\n")
            .expect("sent");
        let mut lines = BufReader::new(&client).lines().map(|line| line.expect("a line"));
        let first: Status = serde_json::from_str(&lines.next().expect("one")).expect("a status");
        assert_eq!(first, status());
        assert!(lines.next().expect("two").contains("unknown variant `fly`"));
        assert!(lines.next().expect("three").contains("not a request"));
    }

    /// Who ends the process after the answer would end its sending, too.
    #[test]
    fn an_answer_can_be_waited_for() {
        let (client, server) = UnixStream::pair().expect("a pair");
        let (sender, asked) = channel();
        thread::spawn(move || {
            serve(&server, &|asked: Asked| sender.send(asked).is_ok(), &Hand::default())
        });
        (&client).write_all(b"{\"command\": \"stop\"}\n").expect("sent");
        let asked = asked.recv().expect("asked");
        asked.answer(status());
        asked.wait();
        client.set_nonblocking(true).expect("set");
        let mut line = String::new();
        BufReader::new(&client).read_line(&mut line).expect("it is there already");
        assert!(line.contains("running"), "{line}");
    }

    #[test]
    fn a_thousand_hostile_clients_keep_nobody_waiting_and_leave_nothing_behind() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).expect("bound");
        thread::spawn(move || {
            let ask = |asked: Asked| {
                asked.answer(status());
                true
            };
            serve_all(&listener, ask, Hand::default());
        });
        clients::tests::besiege(&path, CLIENTS.name, || {
            let client = UnixStream::connect(&path).expect("connected");
            client.set_read_timeout(Some(PATIENCE / 2)).expect("set");
            (&client).write_all(b"{\"command\": \"status\"}\n").expect("asked");
            let mut line = String::new();
            BufReader::new(&client).read_line(&mut line).expect("answered");
            assert!(line.contains("running"), "{line}");
        });
    }

    #[test]
    fn a_socket_is_listened_on_as_soon_as_it_is_there() {
        const ROUNDS: usize = 200;
        let folder = tempfile::tempdir().expect("a folder");
        let path = |round: usize| folder.path().join(format!("{round}.sock"));
        let connect = |round: usize| loop {
            match UnixStream::connect(path(round)) {
                Ok(_) => return,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => panic!("{round}: {error}"),
            }
        };
        // All are listened on until the other thread has ended.
        let _kept: Vec<_> = thread::scope(|scope| {
            scope.spawn(|| (0..ROUNDS).for_each(connect));
            (0..ROUNDS).map(|round| bind(&path(round)).expect("bound")).collect()
        });
    }

    #[test]
    fn an_endless_line_is_cut_off() {
        let (client, server) = UnixStream::pair().expect("a pair");
        let served = thread::spawn(move || serve(&server, &|_: Asked| true, &Hand::default()));
        // The server may hang up before it has read everything.
        let _ = (&client).write_all(&[b'x'; 100_000]);
        served.join().expect("no panic").expect("ended");
    }

    fn sound_lines() -> Vec<Vec<u8>> {
        ["status", "stats", "pause", "resume", "stop"]
            .map(|order| format!("{{\"command\": \"{order}\"}}\n").into_bytes())
            .to_vec()
    }

    /// Each line has an answer that is one line of JSON.
    #[test]
    fn any_line_is_answered() {
        fn run(bytes: &[u8]) {
            for line in String::from_utf8_lossy(bytes).lines() {
                let (_writing, written) = channel();
                let reply = answer(line, written, &|asked: Asked| {
                    // What looks through the host's processes takes too long here.
                    asked.answer(status());
                    asked.order != ControlOrder::Stats
                });
                let text = serde_json::to_string(&reply).expect("JSON");
                assert!(!text.contains('\n'), "{text}");
            }
        }
        fuzzer::test(fuzzer::Target { name: "control", seeds: sound_lines, run });
    }
}
