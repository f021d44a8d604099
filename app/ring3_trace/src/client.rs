//! A service's side of the socket.

use std::{
    collections::{BTreeMap, VecDeque},
    env, fs,
    io::{self, BufRead, BufReader, Write},
    os::unix::{fs::MetadataExt, net::UnixStream},
    path::PathBuf,
};

use serde::Deserialize;

use crate::{Answer, Event, Line, Lines, Order, Request, bytes, hex, kernel_text::UnknownFile};

/// Why a service has no answer.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// There is no such machine of this user's.
    #[error("no machine is called {0}")]
    NoMachine(String),
    /// The connection.
    #[error("the machine's connection: {0}")]
    Connection(#[from] io::Error),
    /// What came is not what the protocol has.
    #[error("the machine said {0}")]
    Protocol(String),
    /// The machine does not do what was asked.
    #[error("{0}")]
    Refused(String),
    /// The kernel's file is none that can be compared with memory.
    #[error(transparent)]
    Kernel(#[from] UnknownFile),
    /// The machine has ended.
    #[error("the machine has ended")]
    Ended,
}

/// A connection to a machine.
pub struct Service {
    lines: Lines,
    /// What came while an answer was waited for.
    waiting: VecDeque<Line>,
    lost: u64,
    probes: usize,
}

/// How a machine answers at first.
#[derive(Deserialize)]
struct Status {
    name: String,
    pid: u32,
}

impl Service {
    /// Connects to a machine of this user, meant by its name or its process's number, and asks for events.
    ///
    /// # Errors
    /// There is no such machine, or it refuses the request, with the reason.
    pub fn connect(machine: &str, request: &Request) -> Result<Self, Problem> {
        let mut reader = find(machine)?;
        let order = serde_json::to_string(request).map_err(io::Error::other)?;
        reader.get_mut().write_all(b"{\"command\":\"trace\"}\n")?;
        // The machine's answer comes before the connection is for more than a line.
        reader.read_line(&mut String::new())?;
        reader.get_mut().write_all(format!("{order}\n").as_bytes())?;
        let lines = Lines::new(reader, request.ring.is_some())?;
        let mut service = Self { lines, waiting: VecDeque::new(), lost: 0, probes: 0 };
        match service.receive_of_socket()? {
            Line::Started { probes } => service.probes = probes,
            Line::Error(problem) => return Err(Problem::Refused(problem)),
            other => return Err(Problem::Protocol(format!("{other:?}"))),
        }
        Ok(service)
    }

    /// The next event; `None` once the machine has ended. An event that [`Event::stands`] is to be followed by [`Service::go`].
    ///
    /// # Errors
    /// The connection fails, or the machine says why there will be no more.
    pub fn next_event(&mut self) -> Result<Option<Event>, Problem> {
        loop {
            let line = match self.waiting.pop_front() {
                Some(line) => line,
                None => match self.receive() {
                    Ok(line) => line,
                    Err(Problem::Ended) => return Ok(None),
                    Err(problem) => return Err(problem),
                },
            };
            match line {
                Line::Event(event) => return Ok(Some(event)),
                Line::Lost(count) => self.lost += count,
                Line::Error(problem) => return Err(Problem::Refused(problem)),
                other => return Err(Problem::Protocol(format!("{other:?}"))),
            }
        }
    }

    /// Events that were dropped so far, because they came faster than this service took them.
    pub fn lost(&self) -> u64 {
        self.lost + self.lines.lost()
    }

    /// Points in the kernel that this service has probes at.
    pub fn probes(&self) -> usize {
        self.probes
    }

    /// Has the machine do something.
    ///
    /// # Errors
    /// It refuses, or the connection fails.
    pub fn order(&mut self, order: &Order) -> Result<Answer, Problem> {
        let text = serde_json::to_string(order).map_err(io::Error::other)?;
        self.lines.connection().write_all(format!("{text}\n").as_bytes())?;
        loop {
            match self.receive_of_socket()? {
                Line::Answer(Answer::Refused(why)) => return Err(Problem::Refused(why)),
                Line::Answer(answer) => return Ok(answer),
                // The ring is looked at before the next event is waited for.
                Line::Wake => {}
                other => self.waiting.push_back(other),
            }
        }
    }

    /// A vCPU goes on.
    ///
    /// # Errors
    /// As for [`Service::order`].
    pub fn go(&mut self, vcpu: usize) -> Result<(), Problem> {
        self.order(&Order::Go { vcpu }).map(drop)
    }

    /// The function at whose entry a vCPU stands returns this and is not executed; the vCPU goes on.
    ///
    /// # Errors
    /// As for [`Service::order`].
    pub fn reply(&mut self, vcpu: usize, value: i64) -> Result<(), Problem> {
        self.order(&Order::Reply { vcpu, value })?;
        self.go(vcpu)
    }

    /// A place of `break:` at which vCPUs stand is another one from now on, at this address.
    ///
    /// # Errors
    /// As for [`Service::order`].
    pub fn move_break(&mut self, from: &str, to: &str) -> Result<u64, Problem> {
        match self.order(&Order::Move { from: from.to_owned(), to: to.to_owned() })? {
            Answer::Address(address) => Ok(address),
            other => Err(Problem::Protocol(format!("{other:?}"))),
        }
    }

    /// Reads guest memory; less than `len` bytes where there is no more. Without a vCPU by the kernel's page tables.
    ///
    /// # Errors
    /// As for [`Service::order`].
    pub fn read(&mut self, vcpu: Option<usize>, gva: u64, len: usize) -> Result<Vec<u8>, Problem> {
        match self.order(&Order::Read { vcpu, gva, len })? {
            Answer::Bytes(digits) => bytes(&digits).ok_or(Problem::Protocol(digits)),
            other => Err(Problem::Protocol(format!("{other:?}"))),
        }
    }

    /// Writes guest memory.
    ///
    /// # Errors
    /// As for [`Service::order`].
    pub fn write(&mut self, vcpu: Option<usize>, gva: u64, data: &[u8]) -> Result<(), Problem> {
        self.order(&Order::Write { vcpu, gva, bytes: hex(data) }).map(drop)
    }

    /// The registers of a vCPU that stands, by name.
    ///
    /// # Errors
    /// As for [`Service::order`].
    pub fn registers(&mut self, vcpu: usize) -> Result<BTreeMap<String, u64>, Problem> {
        self.values(&Order::Registers { vcpu })
    }

    /// Symbols of the kernel that begin so, and their addresses.
    ///
    /// # Errors
    /// As for [`Service::order`].
    pub fn symbols(&mut self, prefix: &str) -> Result<BTreeMap<String, u64>, Problem> {
        self.values(&Order::Symbols { prefix: prefix.to_owned() })
    }

    /// The address of a symbol of the kernel.
    ///
    /// # Errors
    /// As for [`Service::order`].
    pub fn symbol(&mut self, name: &str) -> Result<u64, Problem> {
        match self.order(&Order::Symbol { name: name.to_owned() })? {
            Answer::Address(address) => Ok(address),
            other => Err(Problem::Protocol(format!("{other:?}"))),
        }
    }

    fn values(&mut self, order: &Order) -> Result<BTreeMap<String, u64>, Problem> {
        match self.order(order)? {
            Answer::Values(values) => Ok(values),
            other => Err(Problem::Protocol(format!("{other:?}"))),
        }
    }

    fn receive(&mut self) -> Result<Line, Problem> {
        self.lines.next(|| Ok(()))?.ok_or(Problem::Ended)
    }

    fn receive_of_socket(&mut self) -> Result<Line, Problem> {
        self.lines.next_of_socket()?.ok_or(Problem::Ended)
    }
}

/// The folder in which this user's machines have their sockets.
fn folder() -> io::Result<PathBuf> {
    let runtime = env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty());
    Ok(match runtime {
        Some(runtime) => PathBuf::from(runtime).join("ring3"),
        None => env::temp_dir().join(format!("ring3-{}", fs::metadata("/proc/self")?.uid())),
    })
}

fn find(machine: &str) -> Result<BufReader<UnixStream>, Problem> {
    let Ok(entries) = fs::read_dir(folder()?) else {
        return Err(Problem::NoMachine(machine.to_owned()));
    };
    for entry in entries.flatten().filter(|entry| entry.path().extension() == Some("sock".as_ref()))
    {
        // One that does not answer has just ended.
        let Ok((status, reader)) = ask(entry.path()) else { continue };
        if status.name == machine || status.pid.to_string() == machine {
            return Ok(reader);
        }
    }
    Err(Problem::NoMachine(machine.to_owned()))
}

fn ask(path: PathBuf) -> io::Result<(Status, BufReader<UnixStream>)> {
    let mut stream = UnixStream::connect(path)?;
    stream.write_all(b"{\"command\":\"status\"}\n")?;
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    Ok((serde_json::from_str(&line)?, reader))
}
