//! `ring3 trace`: the machine sends events, the client shows them.

use std::{
    ffi::OsString,
    io::{self, BufRead, BufReader, BufWriter, Read, Write},
    net::Shutdown,
    os::{fd::BorrowedFd, unix::net::UnixStream},
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, sync_channel},
    },
    thread,
};

use clap::{Args, ValueEnum};
use inspect::trace::{Line, Orders, Request, TraceOutput};
use ring3_trace::{
    Lines,
    filter::{Filter, FilterError},
};
use vmm::Inspector;

use super::{
    ControlOrder, Target,
    shown::{self, Shown},
    watched,
};
use crate::{failure::Failure, output};

/// Bytes of a line of a client's, at the most: what it writes to memory is in one.
const MOST_LINE: u64 = 256 << 10;
/// Bytes of the ring by which events come.
const RING: u64 = 4 << 20;

/// How events are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TraceFormat {
    /// A line each, system calls as strace prints them
    Text,
    /// A JSON object each
    Json,
    /// How much time each thread spent in what, at the end: for flame graphs
    Folded,
    /// A file for ui.perfetto.dev or chrome://tracing
    Perfetto,
    /// A file for trace-cmd and KernelShark
    TraceDat,
}

/// What to trace, and how to show it.
#[derive(Debug, Args)]
pub struct TraceArguments {
    /// A running machine
    #[arg(required_unless_present = "command", conflicts_with = "command")]
    pub machine: Option<String>,
    /// What: syscall[:NAME], exec, exit, fork, switch, signal, irq, exception, break:SYMBOL[+OFFSET], return:SYMBOL,
    /// watch:SYMBOL[+OFFSET][:BYTES], port, mmio, msr, vector, engine, virtio; repeated, or with commas
    #[arg(
        short = 'e',
        long = "event",
        value_name = "EVENTS",
        value_delimiter = ',',
        required = true
    )]
    pub events: Vec<String>,
    /// Only threads of this name
    #[arg(long, value_name = "NAME")]
    pub comm: Option<String>,
    /// Only the process with this number in the guest
    #[arg(long, value_name = "N")]
    pub pid: Option<u32>,
    /// Only events for which this holds, such as: ret < 0 and path ~ "/etc/*"
    ///
    /// Names are those of arguments as the kernel has them (fd, filename, flags, ...), path (the first that is text),
    /// ret, dur, comm, pid, tid, cpu, arg0 to arg5; a kind of event, or syscall:openat, stands by itself. Comparisons
    /// are == != < <= > >=, & (has one of the bits), ~ and !~ (patterns with * and ?); and, or, not, parentheses.
    /// Numbers may be times (1ms), errors (ret == -ENOENT) and flags of open (flags & O_CREAT).
    #[arg(long, value_name = "EXPRESSION")]
    pub filter: Option<String>,
    /// Where to write; standard output if not given, or standard error with a command
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// How to show events
    #[arg(long, value_enum, default_value_t = TraceFormat::Text)]
    pub format: TraceFormat,
    /// Start this machine, and trace it from its kernel's start on: exec -- make test
    #[arg(last = true, value_name = "COMMAND OF RING3")]
    pub command: Vec<OsString>,
}

/// The machine's side: the client's first line says what is wanted, the others are orders, each of which is answered.
pub(super) fn serve(inspector: &Inspector, client: &UnixStream) -> io::Result<()> {
    let mut reader = BufReader::new(client.try_clone()?);
    let mut line = String::new();
    reader.by_ref().take(MOST_LINE).read_line(&mut line)?;
    let output = Arc::new(Mutex::new(ClientOutput(BufWriter::new(client.try_clone()?))));
    let refused = |problem: String| tell(&output, &Line::Error(problem));
    let request: Request = match serde_json::from_str(&line) {
        Ok(request) => request,
        Err(problem) => return refused(format!("not a request: {problem}")),
    };
    let gone = Arc::new(AtomicBool::new(false));
    let (sender, orders) = sync_channel(1);
    let (noted, answers) = (Arc::clone(&gone), Arc::clone(&output));
    let obey = move || {
        // Whatever ends this, the client has gone.
        let _ = obey(&orders, reader, &answers);
        noted.store(true, Ordering::SeqCst);
    };
    thread::Builder::new().name("watcher".into()).spawn(obey)?;
    let begins = |orders| drop(sender.send(orders));
    let is_gone = || gone.load(Ordering::SeqCst);
    let served = inspect::trace::serve(inspector, &request, &output, begins, is_gone);
    // What was refused is told, too.
    let flushed = output.lock().unwrap_or_else(PoisonError::into_inner).flush();
    // The thread above waits for this.
    let _ = client.shutdown(Shutdown::Both);
    served.and(flushed)
}

/// A client's connection.
struct ClientOutput(BufWriter<UnixStream>);

impl Write for ClientOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl TraceOutput for ClientOutput {
    fn pass_with(&mut self, descriptor: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<()> {
        self.0.flush()?;
        let (first, rest) = bytes.split_at(bytes.len().min(1));
        ring3_trace::pass(self.0.get_ref(), first, descriptor)?;
        self.0.write_all(rest)
    }
}

/// Answers orders until the client goes. They wait until the trace has begun.
fn obey(
    begun: &Receiver<Orders>,
    mut reader: BufReader<UnixStream>,
    output: &Mutex<ClientOutput>,
) -> io::Result<()> {
    let mut orders = None;
    loop {
        let mut line = String::new();
        if reader.by_ref().take(MOST_LINE).read_line(&mut line)? == 0 || !line.ends_with('\n') {
            return Ok(());
        }
        // Without orders there is no trace, and the client hears why.
        let Some(orders) = orders.get_or_insert_with(|| begun.recv().ok()) else { return Ok(()) };
        tell(output, &Line::Answer(orders.obey(&line)))?;
    }
}

fn tell(output: &Mutex<ClientOutput>, line: &Line) -> io::Result<()> {
    let mut output = output.lock().unwrap_or_else(PoisonError::into_inner);
    let text = serde_json::to_string(line)?;
    output.write_all(text.as_bytes())?;
    output.write_all(b"\n")?;
    output.flush()
}

/// `ring3 trace`.
pub fn trace(arguments: &TraceArguments) -> Result<u8, Failure> {
    if let Some(filter) = &arguments.filter {
        Filter::new(filter).map_err(|wrong| no_filter(filter, &wrong))?;
    }
    let output = watched::output(arguments.output.as_deref(), arguments.machine.as_deref())?;
    let mut shown = shown::new(arguments.format, Box::new(BufWriter::new(output)));
    let follow = |target: &Target, wait| follow(arguments, target, wait, &mut *shown);
    watched::watch(arguments.machine.as_deref(), &arguments.command, "trace", follow)
}

fn nothing_traced() -> Failure {
    Failure::host("the machine ended before it could be traced")
}

/// Points at what is wrong.
fn no_filter(filter: &str, wrong: &FilterError) -> Failure {
    let place = " ".repeat(wrong.column);
    Failure::usage(format!("--filter, {wrong}\n  {filter}\n  {place}^"))
}

/// Shows what the machine sends until it ends, or a signal asks for an end.
fn follow(
    arguments: &TraceArguments,
    target: &Target,
    wait: bool,
    shown: &mut dyn Shown,
) -> Result<(), Failure> {
    let TraceArguments { events, comm, pid, filter, .. } = arguments;
    let (comm, filter) = (comm.clone(), filter.clone());
    let (events, ring) = (events.clone(), Some(RING));
    let request = Request { events, comm, pid: *pid, filter, wait, ring, ..Request::default() };
    let machine = watched::ask(target, ControlOrder::Trace, &request, wait)?;
    let told = show(machine, shown);
    let finished = shown.finish();
    finished.map_err(|error| Failure::host(format!("machine {}: {error}", target.machine)))?;
    told
}

fn show(machine: BufReader<UnixStream>, shown: &mut dyn Shown) -> Result<(), Failure> {
    let output = |error: io::Error| Failure::host(format!("output: {error}"));
    // The connection ends with the machine, however that ends.
    let Ok(mut lines) = Lines::new(machine, true) else { return Err(nothing_traced()) };
    let (mut lost, mut started, mut flushed) = (0, false, Ok(()));
    loop {
        let line = lines.next(|| {
            flushed = shown.flush();
            Ok(())
        });
        std::mem::replace(&mut flushed, Ok(())).map_err(output)?;
        match line {
            Ok(Some(Line::Event(event))) => shown.show(&event).map_err(output)?,
            Ok(Some(Line::Lost(count))) => lost += count,
            Ok(Some(Line::Started { probes })) => {
                started = true;
                tracing::debug!(probes, "trace begins");
            }
            Ok(Some(Line::Error(problem))) => return Err(Failure::host(problem)),
            Ok(Some(Line::Answer(_) | Line::Wake)) => {} // nothing was asked
            Ok(None) | Err(_) => break,
        }
    }
    lost += lines.lost();
    if !started {
        return Err(nothing_traced());
    }
    if lost != 0 {
        output::complain(&format!("{lost} events were lost: more came than could be written"));
    }
    Ok(())
}
