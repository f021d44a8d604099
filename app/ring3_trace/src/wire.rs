//! What a service and a machine say to each other.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What is to be traced.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Events, such as `syscall:openat`.
    pub events: Vec<String>,
    /// Threads of this name only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub comm: Option<String>,
    /// This process only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Events only for which this holds ([`crate::filter`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filter: Option<String>,
    /// Wait for a kernel if there is none yet.
    #[serde(default)]
    pub wait: bool,
    /// Whether the vCPU stands at an event.
    #[serde(default)]
    pub stops: Stops,
    /// Events come by a ring of so many bytes that the machine passes ([`crate::ring`]). Not where a vCPU stands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ring: Option<u64>,
    /// What may be done with registers.
    #[serde(default)]
    pub registers: Rights,
    /// What may be done with guest memory.
    #[serde(default)]
    pub memory: Rights,
}

/// Where a vCPU stands until the service lets it go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stops {
    /// Nowhere.
    #[default]
    Never,
    /// Where the event begins: a system call's entry.
    Entry,
    /// Where it has ended: a system call's result is there, and the program has not seen it.
    End,
    /// At both.
    Both,
}

impl Stops {
    /// The vCPU stands where an event begins.
    pub fn at_entry(self) -> bool {
        matches!(self, Self::Entry | Self::Both)
    }

    /// The vCPU stands where an event has ended.
    pub fn at_end(self) -> bool {
        matches!(self, Self::End | Self::Both)
    }
}

/// What may be done with registers or memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rights {
    /// Nothing.
    #[default]
    None,
    /// They are read.
    Read,
    /// They are written, too.
    Write,
}

/// What is sent to the service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Line {
    /// It begins, with so many probes.
    Started {
        /// Points in the kernel.
        probes: usize,
    },
    /// Something has happened.
    Event(Event),
    /// So many events were dropped since the last line.
    Lost(u64),
    /// There are events in the ring, beside which the service sleeps.
    Wake,
    /// It cannot be, or is over.
    Error(String),
    /// To an [`Order`]; they are answered one by one.
    Answer(Answer),
}

/// Something that has happened in the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Nanoseconds since the trace began.
    pub ns: u64,
    /// The vCPU.
    pub vcpu: usize,
    /// The process.
    pub pid: u32,
    /// Its thread.
    pub tid: u32,
    /// The thread's name.
    pub comm: String,
    /// `syscall`, `exec`, `break` and so on.
    pub kind: String,
    /// Which.
    pub name: String,
    /// Its arguments.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub arguments: String,
    /// The same as numbers, where a vCPU stands.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub values: Vec<u64>,
    /// What came of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<String>,
    /// Nanoseconds it took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub took: Option<u64>,
    /// The vCPU stands until it is let go.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stands: bool,
}

/// What a service asks of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Order {
    /// A vCPU that stands goes on.
    Go {
        /// Which.
        vcpu: usize,
    },
    /// Guest memory, by the page tables of a vCPU that stands, or by the kernel's.
    Read {
        /// Whose page tables.
        #[serde(default)]
        vcpu: Option<usize>,
        /// First byte (GVA).
        gva: u64,
        /// Bytes, 64 KiB at the most.
        len: usize,
    },
    /// Guest memory is changed: all of it, or nothing.
    Write {
        /// Whose page tables.
        #[serde(default)]
        vcpu: Option<usize>,
        /// First byte (GVA).
        gva: u64,
        /// The bytes, two hexadecimal digits each.
        bytes: String,
    },
    /// Registers of a vCPU that stands.
    Registers {
        /// Which vCPU.
        vcpu: usize,
    },
    /// General registers, RIP or RFLAGS of a vCPU that stands are changed.
    Set {
        /// Which vCPU.
        vcpu: usize,
        /// By name.
        registers: BTreeMap<String, u64>,
    },
    /// An argument of the system call at whose entry a vCPU stands is changed.
    Argument {
        /// Which vCPU.
        vcpu: usize,
        /// Which argument, from 0 on.
        number: usize,
        /// What it is now.
        value: u64,
    },
    /// The function at whose entry a vCPU stands is not executed: it returns this, as if it had been.
    Reply {
        /// Which vCPU.
        vcpu: usize,
        /// Its result; an error of a system call is negative.
        value: i64,
    },
    /// A place of `break:` at which vCPUs stand is another one from now on.
    Move {
        /// The place: `SYMBOL`, `SYMBOL+OFFSET` or `0xADDRESS`.
        from: String,
        /// The other one.
        to: String,
    },
    /// Where a symbol of the kernel is.
    Symbol {
        /// The symbol.
        name: String,
    },
    /// The symbols of the kernel that begin so.
    Symbols {
        /// How they begin.
        prefix: String,
    },
}

/// What a machine says to an [`Order`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// It is done.
    Done,
    /// Memory, two hexadecimal digits a byte; less than was asked for where there is no more.
    Bytes(String),
    /// Registers, or symbols and their addresses.
    Values(BTreeMap<String, u64>),
    /// An address.
    Address(u64),
    /// It is not done; why.
    Refused(String),
}

/// Bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes of hexadecimal digits; `None` if they are something else.
pub fn bytes(digits: &str) -> Option<Vec<u8>> {
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    if !rest.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let byte = |pair: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    pairs.iter().map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_lines_that_people_can_type() {
        let order = |text| serde_json::from_str::<Order>(text);
        assert_eq!(order(r#"{"go": {"vcpu": 1}}"#).expect("right"), Order::Go { vcpu: 1 });
        let read = order(r#"{"read": {"gva": 4096, "len": 8}}"#).expect("right");
        assert_eq!(read, Order::Read { vcpu: None, gva: 4096, len: 8 });
        assert!(order(r#"{"go": {}}"#).is_err() && order(r#"{"fly": {}}"#).is_err());
        assert!(order(r#"{"go": {"vcpu": 1, "fast": true}}"#).is_err());
    }

    #[test]
    fn bytes_are_digits_and_back() {
        assert_eq!(bytes(&hex(&[0, 0xab, 0xff])), Some(vec![0, 0xab, 0xff]));
        assert!(bytes("abc").is_none() && bytes("zz").is_none() && bytes("+1").is_none());
        assert!(bytes("é1").is_none());
    }

    #[test]
    fn a_request_without_rights_has_none() {
        let request: Request = serde_json::from_str(r#"{"events": ["exec"]}"#).expect("enough");
        assert_eq!((request.registers, request.memory), (Rights::None, Rights::None));
        assert_eq!(request.stops, Stops::Never);
        assert!(serde_json::from_str::<Request>(r#"{"events": [], "root": true}"#).is_err());
    }
}
