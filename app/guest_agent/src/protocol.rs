//! What host and agent say to each other.
//!
//! The request travels in the first root file system, as records of `key value NUL`; values are C
//! strings already. Everything later is messages of five bytes on the control connection, a kind and
//! a number; a failure is followed by as many bytes of text.

/// Where the request is in the first root file system.
pub const REQUEST_FILE: &str = "/request";
/// Where the names of the modules are, in the order to load them.
pub const MODULE_ORDER: &str = "/modules/order";

/// The host's ports: control, and the command's standard streams.
pub const CONTROL: u32 = 1024;
/// Standard input.
pub const STDIN: u32 = 1025;
/// Standard output, or all output if there is a terminal.
pub const STDOUT: u32 = 1026;
/// Standard error.
pub const STDERR: u32 = 1027;

/// Where the host tells of its changes to the first further folder. Each next folder has the next port.
pub const CHANGES: u32 = 1040;

/// The tag of the host's root file system.
pub const ROOT_TAG: &str = "ring3-root";

/// What a control message is; its number is in parentheses.
pub mod message {
    /// To the agent: send the command this signal.
    pub const SIGNAL: u8 = b'S';
    /// To the agent: the terminal's size (rows << 16 | columns).
    pub const WINDOW: u8 = b'W';
    /// To the agent: what time it is (kHz of the time-stamp counter; [`Time`](super::Time) follows). The first message of all, and later now and then.
    pub const TIME: u8 = b'T';
    /// From the agent: the command has been sent this signal.
    pub const SENT: u8 = b'A';
    /// From the agent: the command runs (0).
    pub const STARTED: u8 = b'R';
    /// From the agent: the command exited (status).
    pub const EXITED: u8 = b'E';
    /// From the agent: the command was killed (signal).
    pub const KILLED: u8 = b'K';
    /// From the agent: there is no such command (bytes of text that follows).
    pub const NOT_FOUND: u8 = b'N';
    /// From the agent: the command may not be run (bytes of text that follows).
    pub const NOT_RUN: u8 = b'X';
    /// From the agent: the guest could not be set up (bytes of text that follows).
    pub const FAILED: u8 = b'F';
}

/// Bytes of a message.
pub const MESSAGE: usize = 5;

/// A message as bytes.
pub fn encode(kind: u8, number: u32) -> [u8; MESSAGE] {
    let [a, b, c, d] = number.to_le_bytes();
    [kind, a, b, c, d]
}

/// A message's kind and number.
pub fn decode([kind, a, b, c, d]: [u8; MESSAGE]) -> (u8, u32) {
    (kind, u32::from_le_bytes([a, b, c, d]))
}

/// A moment: the host's clock and the time-stamp counter, which host and guest share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Time {
    /// Ticks of the counter in a millisecond.
    pub khz: u32,
    /// The counter.
    pub tsc: u64,
    /// Nanoseconds since 1970.
    pub wall_ns: u64,
}

impl Time {
    /// Bytes that follow the message.
    pub const BYTES: usize = 16;

    /// The message with what follows.
    pub fn encode(&self) -> Vec<u8> {
        let head = encode(message::TIME, self.khz);
        [&head[..], &self.tsc.to_le_bytes(), &self.wall_ns.to_le_bytes()].concat()
    }

    /// From the message's number and what follows.
    pub fn decode(khz: u32, bytes: [u8; Self::BYTES]) -> Self {
        let both = u128::from_le_bytes(bytes);
        Self { khz, tsc: both as u64, wall_ns: (both >> 64) as u64 }
    }
}

/// A standard stream that the command has without the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stream {
    /// 0, 1 or 2.
    pub number: u8,
    /// How to open it (0 to read, 1 to write, 2 both), and what; closed if there is nothing.
    pub opened: Option<(u8, String)>,
}

impl Stream {
    fn encode(&self) -> String {
        match &self.opened {
            Some((access, path)) => format!("{} {access} {path}", self.number),
            None => self.number.to_string(),
        }
    }

    fn decode(text: &str) -> Option<Self> {
        let mut words = text.splitn(3, ' ');
        let number = words.next()?.parse().ok()?;
        let opened = match words.next() {
            Some(access) => Some((access.parse().ok()?, words.next()?.to_owned())),
            None => None,
        };
        Some(Self { number, opened })
    }
}

/// A resource limit of the command (`setrlimit`). All ones mean no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Linux's number of what is limited.
    pub resource: u32,
    /// The limit.
    pub current: u64,
    /// How far the command may raise it.
    pub maximum: u64,
}

impl Limit {
    fn encode(&self) -> String {
        format!("{} {} {}", self.resource, self.current, self.maximum)
    }

    fn decode(text: &str) -> Option<Self> {
        let (resource, both) = text.split_once(' ')?;
        let (current, maximum) = both.split_once(' ')?;
        let (current, maximum) = (current.parse().ok()?, maximum.parse().ok()?);
        Some(Self { resource: resource.parse().ok()?, current, maximum })
    }
}

/// What the agent is to run, and in which surroundings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AgentRequest {
    /// The command and its arguments.
    pub arguments: Vec<Vec<u8>>,
    /// The command's environment, as `NAME=value`.
    pub environment: Vec<Vec<u8>>,
    /// The command's working directory.
    pub directory: Vec<u8>,
    /// The command's user.
    pub user: u32,
    /// The command's groups, the first one first.
    pub groups: Vec<u32>,
    /// Further folders: tag and where to mount it.
    pub shares: Vec<(Vec<u8>, Vec<u8>)>,
    /// Rows and columns of the command's terminal, if the command has one.
    pub terminal: Option<(u16, u16)>,
    /// The command's standard error has a connection even where the command has a terminal.
    pub errors: bool,
    /// Standard streams that need no connection.
    pub streams: Vec<Stream>,
    /// Permissions that files of the command's do not get (`umask`).
    pub umask: u32,
    /// Signals that the command ignores from its start: signal N is bit N - 1.
    pub ignored: u64,
    /// The command's resource limits. What is not named here has the limit that the guest's kernel gives.
    pub limits: Vec<Limit>,
    /// There is a network to be set up.
    pub network: bool,
    /// There are virtual CPUs that the kernel has left off.
    pub cpus: bool,
    /// The folder with all of the kernel's modules; empty if there is none.
    pub modules: Vec<u8>,
}

impl AgentRequest {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut put = |key: &str, value: &[u8]| {
            bytes.extend_from_slice(key.as_bytes());
            bytes.push(b' ');
            bytes.extend_from_slice(value);
            bytes.push(0);
        };
        self.arguments.iter().for_each(|argument| put("argument", argument));
        self.environment.iter().for_each(|variable| put("environment", variable));
        put("directory", &self.directory);
        put("user", self.user.to_string().as_bytes());
        self.groups.iter().for_each(|group| put("group", group.to_string().as_bytes()));
        for (tag, path) in &self.shares {
            put("tag", tag);
            put("mount", path);
        }
        if let Some((rows, columns)) = self.terminal {
            put("rows", rows.to_string().as_bytes());
            put("columns", columns.to_string().as_bytes());
        }
        self.streams.iter().for_each(|stream| put("stream", stream.encode().as_bytes()));
        put("umask", self.umask.to_string().as_bytes());
        put("ignored", self.ignored.to_string().as_bytes());
        self.limits.iter().for_each(|limit| put("limit", limit.encode().as_bytes()));
        if self.errors {
            put("errors", b"");
        }
        if self.network {
            put("network", b"");
        }
        if self.cpus {
            put("cpus", b"");
        }
        if !self.modules.is_empty() {
            put("modules", &self.modules);
        }
        bytes
    }

    /// From bytes; `None` if they are damaged.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut request = Self::default();
        for record in bytes.split_inclusive(|&byte| byte == 0) {
            let record = record.strip_suffix(&[0])?;
            let space = record.iter().position(|&byte| byte == b' ')?;
            let (key, value) = (record.get(..space)?, record.get(space + 1..)?);
            request.record(key, value)?;
        }
        Some(request)
    }

    fn record(&mut self, key: &[u8], value: &[u8]) -> Option<()> {
        let text = std::str::from_utf8(value);
        match key {
            b"argument" => self.arguments.push(value.to_vec()),
            b"environment" => self.environment.push(value.to_vec()),
            b"directory" => self.directory = value.to_vec(),
            b"user" => self.user = text.ok()?.parse().ok()?,
            b"group" => self.groups.push(text.ok()?.parse().ok()?),
            b"tag" => self.shares.push((value.to_vec(), Vec::new())),
            b"mount" => self.shares.last_mut()?.1 = value.to_vec(),
            b"rows" => self.terminal = Some((text.ok()?.parse().ok()?, 0)),
            b"columns" => self.terminal.as_mut()?.1 = text.ok()?.parse().ok()?,
            b"stream" => self.streams.push(Stream::decode(text.ok()?)?),
            b"umask" => self.umask = text.ok()?.parse().ok()?,
            b"ignored" => self.ignored = text.ok()?.parse().ok()?,
            b"limit" => self.limits.push(Limit::decode(text.ok()?)?),
            b"errors" => self.errors = true,
            b"network" => self.network = true,
            b"cpus" => self.cpus = true,
            b"modules" => self.modules = value.to_vec(),
            _ => return None,
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_survives_the_journey() {
        let request = AgentRequest {
            arguments: vec![b"printf".to_vec(), b"a b\n".to_vec(), Vec::new(), vec![0xff]],
            environment: vec![b"A=b=c".to_vec()],
            directory: b"/some where".to_vec(),
            user: 1000,
            groups: vec![1000, 27],
            shares: vec![(b"tag".to_vec(), b"/path".to_vec())],
            terminal: Some((24, 80)),
            errors: true,
            streams: vec![
                Stream { number: 0, opened: None },
                Stream { number: 1, opened: Some((1, "/dev/full".to_owned())) },
            ],
            umask: 0o77,
            ignored: 1 << 63,
            limits: vec![Limit { resource: 7, current: 1024, maximum: u64::MAX }],
            network: true,
            cpus: true,
            modules: b"/cache/lib/modules/6.1".to_vec(),
        };
        assert_eq!(AgentRequest::decode(&request.encode()), Some(request));
    }

    #[test]
    fn damage_is_seen() {
        for bytes in [
            &b"argument x"[..],
            b"argument\0",
            b"user x\0",
            b"mount /x\0",
            b"stream 1 1\0",
            b"limit 7 1024\0",
            b"huh 1\0",
        ] {
            assert_eq!(AgentRequest::decode(bytes), None);
        }
    }

    #[test]
    fn times() {
        let time = Time { khz: 2_400_000, tsc: u64::MAX - 1, wall_ns: 1 << 60 };
        let bytes = time.encode();
        let (head, rest) = bytes.split_first_chunk().expect("a message");
        assert_eq!(decode(*head), (message::TIME, time.khz));
        assert_eq!(Time::decode(time.khz, rest.try_into().expect("the rest")), time);
    }

    #[test]
    fn messages() {
        assert_eq!(decode(encode(message::EXITED, 0x0102_0304)), (message::EXITED, 0x0102_0304));
    }
}
