//! What can go wrong, as the scenario file has it.

use std::time::Duration;

use serde::{Deserialize, Deserializer, de};

use crate::{MachineCheck, MemoryError, Target, schedule::Op};

/// What goes wrong with a disk.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DiskAction {
    /// Reads fail.
    ReadError,
    /// Writes fail.
    WriteError,
    /// Writes fail for want of space.
    Full,
    /// Requests are answered later by this much.
    #[serde(deserialize_with = "duration")]
    Latency(Duration),
    /// Requests are never answered.
    Hang,
    /// Writes are acknowledged and dropped.
    Lost,
    /// Only the first sectors of a write are written; all is acknowledged.
    Torn,
    /// Writes go this many sectors further.
    Misdirected(i64),
    /// This many bits are flipped in what is read or written.
    Corrupt(u32),
    /// What is read is garbage.
    Garbage,
    /// Flushes are acknowledged and not done.
    IgnoredFlush,
    /// From then on every request fails.
    Gone,
    /// The power goes: what was not flushed may be there or not, sector by sector. Nothing is answered any more.
    PowerCut,
}

impl DiskAction {
    /// The requests it can strike.
    pub(crate) fn ops(&self) -> &'static [Op] {
        match self {
            Self::ReadError | Self::Garbage => &[Op::Read],
            Self::WriteError | Self::Full | Self::Lost | Self::Torn | Self::Misdirected(_) => {
                &[Op::Write]
            }
            Self::Corrupt(_) => &[Op::Read, Op::Write],
            Self::IgnoredFlush => &[Op::Flush],
            Self::Latency(_) | Self::Hang | Self::Gone | Self::PowerCut => {
                &[Op::Read, Op::Write, Op::Flush, Op::Discard]
            }
        }
    }

    pub(crate) fn problem(&self) -> Option<&'static str> {
        match self {
            Self::Misdirected(0) => Some("misdirected = 0 is where the write belongs"),
            Self::Corrupt(0) => Some("corrupt = 0 flips no bit"),
            _ => None,
        }
    }
}

/// What goes wrong with a network.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum NetAction {
    /// Frames are lost.
    Loss,
    /// Frames arrive later.
    Delay {
        /// By at least this much.
        #[serde(deserialize_with = "duration")]
        by: Duration,
        /// And up to this much more.
        #[serde(default, deserialize_with = "duration")]
        jitter: Duration,
    },
    /// Frames arrive twice.
    Duplicate,
    /// Frames are overtaken by the next one.
    Reorder,
    /// This many bits of a frame are flipped, behind its Ethernet header.
    Corrupt(u32),
    /// No more than so many bits a second pass; what waits longer than a second is lost.
    Rate(u64),
}

impl NetAction {
    pub(crate) fn problem(&self) -> Option<&'static str> {
        match self {
            Self::Corrupt(0) => Some("corrupt = 0 flips no bit"),
            Self::Rate(0) => Some("rate = 0 lets nothing pass: write do = \"loss\""),
            _ => None,
        }
    }
}

/// What a disk or a network interface says to its driver against virtio's rules (virtio 1.2, 2.7.8 and 5.2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProtocolAction {
    /// The used ring's index is so many requests ahead, until the next one is given back.
    UsedIndex(u16),
    /// A request is given back with this number in place of its own chain's (virtio 1.2, 2.7.8).
    UsedId(u32),
    /// A request is given back as if the device had written so many bytes.
    UsedLength(u32),
    /// The status of a disk's request.
    Status(u8),
    /// The driver is interrupted before there is anything for it.
    Spurious,
}

impl ProtocolAction {
    /// Whether a scenario's `do` names one of these.
    pub(crate) fn is_such(action: &toml::Value) -> bool {
        let keys = ["used-index", "used-id", "used-length", "status"];
        action.as_str() == Some("spurious") || keys.iter().any(|key| action.get(key).is_some())
    }

    pub(crate) fn problem(self, on: Target) -> Option<&'static str> {
        match self {
            Self::UsedIndex(0) => Some("used-index = 0 is where it belongs"),
            Self::Status(_) if !matches!(on, Target::Disk(_)) => Some("status: disks have one"),
            Self::Status(0..=2) => Some("status: 0 to 2 mean something; 3 to 255 do not"),
            _ => None,
        }
    }
}

/// What goes wrong with message-signalled interrupts, which PCI devices send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InterruptAction {
    /// They never arrive.
    Lost,
    /// They arrive twice.
    Duplicate,
}

/// What goes wrong with the machine: not because of a request, but at a time.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MachineAction {
    /// The power goes.
    PowerCut,
    /// The machine is reset.
    Reset,
    /// The vCPU stands still for this long.
    #[serde(deserialize_with = "duration")]
    Pause(Duration),
    /// The vCPU stands still for good.
    Stuck,
    /// A network's link is down for this long.
    #[serde(deserialize_with = "duration")]
    LinkDown(Duration),
    /// It is down for good.
    Unplugged,
    /// The driver of a disk or network is told that its configuration has changed, which is not so.
    ConfigChange,
    /// Bits of memory are flipped.
    Flip(Flip),
    /// A bit of memory is set to a value again and again.
    StuckBit(StuckBit),
    /// A bit of a general register is flipped.
    Register(Bit),
    /// The next instruction of this name has a wrong result: a bit of it is flipped.
    WrongResult(String),
    /// The CPU tells of an error of the hardware.
    MachineCheck(MachineCheck),
    /// ECC finds memory wrong.
    MemoryError(MemoryError),
    /// The clock is set ahead by this much.
    #[serde(deserialize_with = "duration")]
    Step(Duration),
    /// The clock goes faster by so many millionths, or slower.
    Drift(i64),
    /// The clock stands still for this long.
    #[serde(deserialize_with = "duration")]
    Stop(Duration),
    /// The vCPU is sent an interrupt with this vector.
    Spurious(u8),
}

/// Which bits of memory are flipped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Flip {
    /// So many, anywhere.
    Random(u32),
    /// This one.
    At(Place),
    /// So many, anywhere in what a process has in memory.
    Of {
        /// The process's name in the guest.
        process: String,
        /// How many.
        bits: u32,
    },
}

/// Bits of memory as a scenario has them: a number, or a table. An untagged enum would name neither a wrong key nor what is missing.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FlipTable {
    address: Option<u64>,
    symbol: Option<String>,
    process: Option<String>,
    bit: Option<u8>,
    bits: Option<u32>,
}

impl<'de> Deserialize<'de> for Flip {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let said = toml::Value::deserialize(from)?;
        let flip = match said {
            toml::Value::Integer(count) => {
                u32::try_from(count).map(Self::Random).map_err(|error| error.to_string())
            }
            table => FlipTable::deserialize(table)
                .map_err(|error| error.message().to_owned())
                .and_then(FlipTable::flip),
        };
        flip.map_err(de::Error::custom)
    }
}

impl FlipTable {
    fn flip(self) -> Result<Flip, String> {
        let Self { address, symbol, process, bit, bits } = self;
        match (process, bit, bits) {
            (Some(process), None, Some(bits)) if address.is_none() && symbol.is_none() => {
                Ok(Flip::Of { process, bits })
            }
            (Some(_), ..) if address.is_none() && symbol.is_none() => {
                Err("say bits = N: so many of the process's".to_owned())
            }
            (None, Some(bit), None) => Ok(Flip::At(Place { address, symbol, bit })),
            (None, ..) => Err("say bit = 0 to 7".to_owned()),
            _ => Err("say address, symbol or process".to_owned()),
        }
    }
}

/// A bit of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Guest-physical address of its byte.
    pub address: Option<u64>,
    /// Or the symbol of the guest's kernel that is there.
    pub symbol: Option<String>,
    /// Its number in the byte.
    pub bit: u8,
}

/// A bit of memory that has a value whatever is written.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StuckBit {
    /// Guest-physical address of its byte.
    pub address: Option<u64>,
    /// Or the symbol of the guest's kernel that is there.
    pub symbol: Option<String>,
    /// Its number in the byte.
    pub bit: u8,
    /// The value.
    pub value: u8,
}

/// A bit of a register.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bit {
    /// The register; any, if not given.
    pub name: Option<String>,
    /// The bit; any, if not given.
    pub bit: Option<u8>,
}

/// General registers, by the numbers that processors give them.
pub const REGISTERS: [&str; 16] = [
    "rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13",
    "r14", "r15",
];

impl StuckBit {
    /// Where it is.
    pub fn place(&self) -> Place {
        let Self { address, symbol, bit, .. } = self.clone();
        Place { address, symbol, bit }
    }
}

impl Place {
    fn problem(&self) -> Option<&'static str> {
        match (self.address, &self.symbol) {
            (Some(_), None) | (None, Some(_)) if self.bit < 8 => None,
            (Some(_), None) | (None, Some(_)) => Some("a byte has the bits 0 to 7"),
            _ => Some("say address = 0x..., or symbol = \"...\""),
        }
    }
}

impl MachineAction {
    /// Whether a scenario's `do` names what happens to a device as a whole, not to its requests.
    pub(crate) fn is_of_device(action: &toml::Value) -> bool {
        let is_word = matches!(action.as_str(), Some("unplugged" | "config-change"));
        is_word || action.get("link-down").is_some()
    }

    pub(crate) fn problem(&self, on: Target) -> Option<&'static str> {
        let belongs = match self {
            Self::PowerCut | Self::Reset | Self::Pause(_) | Self::Stuck => on == Target::Machine,
            Self::LinkDown(_) | Self::Unplugged => matches!(on, Target::Net(_)),
            Self::ConfigChange => matches!(on, Target::Disk(_) | Target::Net(_)),
            Self::Register(_) | Self::WrongResult(_) | Self::MachineCheck(_) => {
                on == Target::Machine
            }
            Self::Flip(_) | Self::StuckBit(_) | Self::MemoryError(_) => on == Target::Ram,
            Self::Step(_) | Self::Drift(_) | Self::Stop(_) => on == Target::Clock,
            Self::Spurious(_) => on == Target::Interrupts,
        };
        match self {
            _ if !belongs => Some(
                "do: the machine has power-cut, reset, pause, stuck, register, wrong-result and machine-check; ram has flip, \
                 stuck-bit and memory-error; \
                 clock has step, drift and stop; interrupts have lost, duplicate and spurious; networks have link-down and \
                 unplugged; disks and networks have config-change",
            ),
            Self::Flip(Flip::Random(0) | Flip::Of { bits: 0, .. }) => Some("flip = 0 flips no bit"),
            Self::Flip(Flip::At(place)) => place.problem(),
            Self::StuckBit(StuckBit { value: 2.., .. }) => Some("a bit has the values 0 and 1"),
            Self::StuckBit(stuck) => stuck.place().problem(),
            Self::MachineCheck(check) => check.problem(),
            Self::MemoryError(error) => error.problem(),
            Self::Register(Bit { bit: Some(64..), .. }) => Some("a register has the bits 0 to 63"),
            Self::Register(Bit { name: Some(name), .. }) if !REGISTERS.contains(&&**name) => {
                Some("register: rax to r15 are the general registers")
            }
            Self::Drift(-999_999..=1_000_000) => None,
            Self::Drift(_) => Some("drift: millionths, more than -1000000, at most 1000000"),
            Self::Spurious(0..16) => Some("spurious: the vectors of interrupts are 16 to 255"),
            _ => None,
        }
    }
}

pub(crate) fn duration<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(from)?;
    humantime::parse_duration(&text)
        .map_err(|_| de::Error::custom(format!("`{text}` is not a time such as 50ms or 2s")))
}

pub(crate) fn some_duration<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<Duration>, D::Error> {
    duration(from).map(Some)
}
