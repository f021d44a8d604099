//! System calls: their names and arguments as the kernel itself describes them (`struct syscall_metadata`), printed as
//! strace prints them as far as that goes.

use std::collections::HashSet;

use ram::Ram;
use x86::tap::NumberKind;

use super::{TraceError, linux_names, narrow, structures};
use crate::linux::LinuxKernel;

/// What the functions of system calls are called, and their descriptions. Those of 32-bit programs may be others.
const FUNCTIONS: [(&str, Width); 3] = [
    ("__x64_sys_", Width::Full),
    ("__ia32_sys_", Width::Narrow),
    ("__ia32_compat_sys_", Width::Other),
];
const DESCRIPTION: &str = "__syscall_meta__";
/// Where `struct pt_regs` has the arguments of a system call, and where of one of a 32-bit program.
static PLACES: [u64; 6] = [112, 104, 96, 56, 72, 64];
static NARROW_PLACES: [u64; 6] = [40, 88, 96, 104, 112, 32];
/// What stands for all calls that there are not, and where `struct pt_regs` has the number that was asked for.
const NO_CALL: &str = "ni_syscall";
static NUMBER_PLACE: [u64; 6] = [120; 6];
/// Arguments at the most.
const ARGUMENTS: usize = 6;
/// Letters of a text that are shown, as with strace.
const SHOWN: usize = 32;
/// Names that differ between the kernel's functions and its manual.
const OTHER: [(&str, &str); 8] = [
    ("newstat", "stat"),
    ("newfstat", "fstat"),
    ("newlstat", "lstat"),
    ("newuname", "uname"),
    ("umount", "umount2"),
    ("sendfile64", "sendfile"),
    ("fadvise64_64", "fadvise64"),
    ("newfstatat", "newfstatat"),
];

/// How an argument is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ArgumentFormat {
    Signed,
    Unsigned,
    /// With a sign, of 64 bits.
    Long,
    /// Without a sign, of 64 bits.
    Size,
    /// A file descriptor of a folder.
    Folder,
    /// Text that the kernel reads.
    Text,
    /// Bytes that the kernel reads, as many as the next argument says.
    Bytes,
    /// The same that the kernel writes, as many as the result says.
    Filled,
    OpenFlags,
    Mode,
    /// What `structures` knows by this name.
    Known(&'static str),
    Address,
}

/// Whose a system call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    /// A 64-bit program's.
    Full,
    /// A 32-bit program's, with the structures of 64-bit ones.
    Narrow,
    /// A 32-bit program's, with structures of its own.
    Other,
}

impl Width {
    /// The manual's name of the call that this function carries out.
    fn name_of(self, function: &str) -> String {
        match self {
            Self::Full => call_name(function).to_owned(),
            Self::Narrow | Self::Other => narrow::name_of(function),
        }
    }
}

/// A system call.
#[derive(Clone, Debug)]
pub struct Call {
    /// As in the manual.
    pub name: String,
    formats: Vec<ArgumentFormat>,
    /// What the kernel calls its arguments.
    parameters: Vec<String>,
    width: Width,
}

pub use crate::linux::Reader;

/// What of memory an argument's text is made of: its address is the argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArgumentMemory {
    /// So many bytes.
    Bytes(u64),
    /// As many parts as the next argument says: bytes of each, and of all at the most.
    Times(u64, u64),
    /// Text.
    Text,
    /// Addresses of texts, up to zero.
    Texts,
    /// Words up to zero.
    UpToZero,
    /// Addresses and lengths of bytes, as many as the next argument says.
    Vectors,
}

/// The name that a system call has in traces, by that one or by its function's.
pub fn call_name(name: &str) -> &str {
    OTHER.iter().find(|(function, _)| *function == name).map_or(name, |(_, manual)| *manual)
}

impl Call {
    /// Arguments that lead to memory, by number: what is there at the call's beginning, or what it leaves there at its end.
    pub fn pieces(&self, at_end: bool) -> impl Iterator<Item = (usize, ArgumentMemory)> {
        let piece = move |format: &ArgumentFormat| match format {
            ArgumentFormat::Text if !at_end => Some(ArgumentMemory::Text),
            ArgumentFormat::Bytes if !at_end => Some(ArgumentMemory::Times(1, SHOWN as u64)),
            ArgumentFormat::Filled if at_end => Some(ArgumentMemory::Bytes(SHOWN as u64)),
            ArgumentFormat::Known(name) => structures::piece(name, at_end),
            _ => None,
        };
        self.formats.iter().enumerate().filter_map(move |(n, format)| Some((n, piece(format)?)))
    }

    /// A system call and the addresses of its functions, of which 32-bit programs have others.
    pub fn find(
        kernel: &LinuxKernel,
        ram: &Ram,
        name: &str,
    ) -> Result<Vec<(u64, Self)>, TraceError> {
        let all = functions(kernel);
        let named =
            all.filter(|(function, _, width)| *function == name || width.name_of(function) == name);
        let made = named.map(|(function, at, width)| (at, Self::new(kernel, ram, function, width)));
        let found = first_of_each(made);
        if found.is_empty() { Err(TraceError::Call(name.to_owned())) } else { Ok(found) }
    }

    /// All there are.
    pub fn all(kernel: &LinuxKernel, ram: &Ram) -> Vec<(u64, Self)> {
        let all = functions(kernel);
        first_of_each(all.map(|(name, at, width)| (at, Self::new(kernel, ram, name, width))))
    }

    fn new(kernel: &LinuxKernel, ram: &Ram, function: &str, width: Width) -> Self {
        let (name, full) = (width.name_of(function), call_name(function));
        if function == NO_CALL {
            let (formats, parameters) = (vec![ArgumentFormat::Signed], vec!["nr".to_owned()]);
            return Self { name, formats, parameters, width };
        }
        let described = kernel.symbols.find(&format!("{DESCRIPTION}{function}"));
        let described = described.and_then(|at| described_as(kernel, ram, at, full));
        // A kernel that does not say has all that registers can hold.
        let unknown = || (vec![ArgumentFormat::Address; ARGUMENTS], Vec::new());
        let (mut formats, parameters) = described.unwrap_or_else(unknown);
        if width == Width::Other {
            let known =
                formats.iter_mut().filter(|format| matches!(format, ArgumentFormat::Known(_)));
            known.for_each(|format| *format = ArgumentFormat::Address);
        }
        Self { name, formats, parameters, width }
    }

    /// Where its arguments are in `struct pt_regs`.
    pub fn places(&self) -> &'static [u64; ARGUMENTS] {
        match self.width {
            _ if self.name == NO_CALL => &NUMBER_PLACE,
            Width::Full => &PLACES,
            Width::Narrow | Width::Other => &NARROW_PLACES,
        }
    }

    /// What of a register is an argument.
    pub fn mask(&self) -> u64 {
        if self.width == Width::Full { u64::MAX } else { u32::MAX.into() }
    }

    /// Which argument is called so; `path` is the first that is text.
    pub fn parameter(&self, name: &str) -> Option<usize> {
        let named = self.parameters.iter().position(|known| known == name);
        let path = || self.formats.iter().position(|format| *format == ArgumentFormat::Text);
        let numbered =
            || name.strip_prefix("arg")?.parse().ok().filter(|n| *n < self.formats.len());
        named.or_else(|| if name == "path" { path() } else { None }).or_else(numbered)
    }

    /// How many arguments it has.
    pub fn count(&self) -> usize {
        self.formats.len()
    }

    /// An argument as a number, with the sign that its type has.
    pub fn number(&self, n: usize, value: u64) -> i128 {
        match self.formats.get(n) {
            Some(ArgumentFormat::Signed | ArgumentFormat::Folder) => (value as i32).into(),
            Some(ArgumentFormat::Long) => (value as i64).into(),
            Some(ArgumentFormat::Unsigned | ArgumentFormat::OpenFlags | ArgumentFormat::Mode) => {
                (value as u32).into()
            }
            _ => value.into(),
        }
    }

    /// What of an argument is a number; `None` if it is text, or may be.
    pub fn number_kind(&self, n: usize) -> Option<NumberKind> {
        use ArgumentFormat::{Folder, Long, Mode, OpenFlags, Signed, Text, Unsigned};
        Some(match self.formats.get(n)? {
            Text => return None,
            Signed | Folder => NumberKind::Signed32,
            Unsigned | OpenFlags | Mode => NumberKind::Unsigned32,
            _ if self.width != Width::Full => NumberKind::Unsigned32,
            Long => NumberKind::Signed64,
            _ => NumberKind::Unsigned64,
        })
    }

    /// An argument is the address of text.
    pub fn is_text(&self, n: usize) -> bool {
        self.formats.get(n) == Some(&ArgumentFormat::Text)
    }

    /// An argument as text, if it is.
    pub fn text(&self, n: usize, value: u64, read: Reader<'_>) -> Option<String> {
        let bytes = self.is_text(n).then(|| terminated(value, read)).flatten()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// It does not return to who has made it.
    pub fn is_last(&self) -> bool {
        matches!(self.name.as_str(), "exit" | "exit_group")
    }

    /// Its thread has other registers afterwards, and so other arguments.
    pub fn gives_registers(&self) -> bool {
        matches!(self.name.as_str(), "execve" | "execveat" | "rt_sigreturn" | "sigreturn")
    }

    /// Its arguments, some of which can only be told when it has ended with a `result`.
    pub fn arguments(
        &self,
        values: &[u64; ARGUMENTS],
        result: Option<i64>,
        read: Reader<'_>,
    ) -> String {
        let creates = values.iter().zip(&self.formats).any(|(value, format)| {
            *format == ArgumentFormat::OpenFlags && linux_names::creates(*value)
        });
        // open has a mode only if it makes a file.
        let opens = self.formats.contains(&ArgumentFormat::OpenFlags);
        let shown = self
            .formats
            .iter()
            .enumerate()
            .filter(|(_, format)| **format != ArgumentFormat::Mode || !opens || creates);
        let shown = shown.map(|(n, format)| {
            let next = values.get(n + 1).copied().unwrap_or_default();
            show(*format, values[n], next, result, read)
        });
        shown.collect::<Vec<_>>().join(", ")
    }
}

/// The functions of all system calls: their names without what these begin with, their addresses, and whose calls they are.
fn functions(kernel: &LinuxKernel) -> impl Iterator<Item = (&str, u64, Width)> {
    let all = FUNCTIONS.iter().flat_map(|(prefix, width)| {
        let found = kernel.symbols.starting(prefix);
        found.map(|(name, at)| (&name[prefix.len()..], at, *width))
    });
    all.filter(|(name, ..)| !name.contains('.'))
}

/// One call at each address: those without arguments are one function under two names, for programs of both widths.
fn first_of_each(calls: impl Iterator<Item = (u64, Call)>) -> Vec<(u64, Call)> {
    let mut seen = HashSet::new();
    calls.filter(|(address, _)| seen.insert(*address)).collect()
}

/// What the kernel says of a system call's arguments.
fn described_as(
    kernel: &LinuxKernel,
    ram: &Ram,
    at: u64,
    name: &str,
) -> Option<(Vec<ArgumentFormat>, Vec<String>)> {
    // A byte since 6.19, a word before.
    let count = (kernel.word(ram, at + 8)? >> 32 & 0xff) as usize;
    let (types, names) = (kernel.word(ram, at + 16)?, kernel.word(ram, at + 24)?);
    let text = |list: u64, n: usize| kernel.text(ram, kernel.word(ram, list + 8 * n as u64)?);
    let argument = |n| {
        let parameter = text(names, n)?;
        Some((format(name, &text(types, n)?, &parameter), parameter))
    };
    (0..count.min(ARGUMENTS)).map(argument).collect()
}

fn format(call: &str, of_type: &str, name: &str) -> ArgumentFormat {
    if let Some(known) = structures::of(call, name) {
        return ArgumentFormat::Known(known);
    }
    let of_type = of_type.replace(" *", "*");
    match (of_type.as_str(), name) {
        ("const char*", "buf") if matches!(call, "write" | "pwrite64") => ArgumentFormat::Bytes,
        ("char*", "buf") if matches!(call, "read" | "pread64") => ArgumentFormat::Filled,
        ("const char*", _) => ArgumentFormat::Text,
        (_, "dfd" | "olddfd" | "newdfd") => ArgumentFormat::Folder,
        (_, "flags") if matches!(call, "open" | "openat") => ArgumentFormat::OpenFlags,
        ("umode_t", _) | ("int", "mask") => ArgumentFormat::Mode,
        ("int" | "pid_t" | "clockid_t" | "key_t", _) => ArgumentFormat::Signed,
        ("long" | "off_t" | "loff_t" | "ssize_t", _) => ArgumentFormat::Long,
        ("unsigned int" | "u32" | "uid_t" | "gid_t", _) => ArgumentFormat::Unsigned,
        ("size_t", _) | ("unsigned long", "len" | "length") => ArgumentFormat::Size,
        ("unsigned long", "fd") => ArgumentFormat::Signed,
        _ => ArgumentFormat::Address,
    }
}

fn show(
    format: ArgumentFormat,
    value: u64,
    next: u64,
    result: Option<i64>,
    read: Reader<'_>,
) -> String {
    match format {
        ArgumentFormat::Folder if value as i32 == -100 => "AT_FDCWD".to_owned(),
        ArgumentFormat::Signed | ArgumentFormat::Folder => (value as i32).to_string(),
        ArgumentFormat::Unsigned => (value as u32).to_string(),
        ArgumentFormat::Long => (value as i64).to_string(),
        ArgumentFormat::Size => value.to_string(),
        ArgumentFormat::OpenFlags => linux_names::open_flags(value),
        ArgumentFormat::Mode => format!("{:#05o}", value & 0o7777).replacen("0o", "0", 1),
        ArgumentFormat::Text => text(value, read).unwrap_or_else(|| address(value)),
        ArgumentFormat::Bytes => bytes(value, next, read).unwrap_or_else(|| address(value)),
        ArgumentFormat::Filled => {
            let filled = result.and_then(|count| u64::try_from(count).ok());
            let shown = filled.and_then(|count| bytes(value, count, read));
            shown.unwrap_or_else(|| address(value))
        }
        ArgumentFormat::Known(name) => {
            let known = structures::show(name, [value, next], result, read);
            known.unwrap_or_else(|| address(value))
        }
        ArgumentFormat::Address => address(value),
    }
}

fn address(value: u64) -> String {
    if value == 0 { "NULL".to_owned() } else { format!("{value:#x}") }
}

/// Text that ends with a zero; `None` if it is not all there.
pub fn text(gva: u64, read: Reader<'_>) -> Option<String> {
    terminated(gva, read).map(|bytes| quoted(&bytes))
}

pub fn terminated(gva: u64, read: Reader<'_>) -> Option<Vec<u8>> {
    const MOST: usize = 4096;
    let mut bytes = vec![0; MOST];
    let count = read(gva, &mut bytes);
    let end = bytes[..count].iter().position(|byte| *byte == 0)?;
    bytes.truncate(end);
    Some(bytes)
}

pub fn bytes(gva: u64, len: u64, read: Reader<'_>) -> Option<String> {
    let shown = len.min(SHOWN as u64) as usize;
    let mut bytes = vec![0; shown];
    let whole = read(gva, &mut bytes) == shown;
    let more = if len > shown as u64 { "..." } else { "" };
    whole.then(|| format!("{}{more}", quoted(&bytes)))
}

fn quoted(bytes: &[u8]) -> String {
    let mut text = String::from("\"");
    for byte in bytes {
        match byte {
            b'\n' => text.push_str("\\n"),
            b'\t' => text.push_str("\\t"),
            b'\r' => text.push_str("\\r"),
            b'"' | b'\\' => text.extend(['\\', char::from(*byte)]),
            0x20..=0x7e => text.push(char::from(*byte)),
            _ => text.push_str(&format!("\\{byte:o}")),
        }
    }
    text + "\""
}

/// What a system call has returned, as strace prints it.
pub fn result(call: &str, value: i64) -> String {
    const ADDRESSES: [&str; 5] = ["mmap", "mmap2", "brk", "mremap", "shmat"];
    match value {
        -4095..0 => linux_names::error(-value as i32),
        _ if ADDRESSES.contains(&call) => format!("{value:#x}"),
        _ if call == "umask" => format!("0{value:02o}"),
        _ => value.to_string(),
    }
}

#[cfg(test)]
impl Call {
    /// A call that opens something.
    pub fn example() -> Self {
        use ArgumentFormat::{OpenFlags, Signed, Size, Text};
        let parameters = ["fd", "filename", "flags", "size"].map(str::to_owned).to_vec();
        let (name, formats) = ("example".to_owned(), vec![Signed, Text, OpenFlags, Size]);
        Self { name, formats, parameters, width: Width::Full }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(name: &str, formats: &[ArgumentFormat]) -> Call {
        let (parameters, width) = (Vec::new(), Width::Full);
        Call { name: name.to_owned(), formats: formats.to_vec(), parameters, width }
    }

    #[test]
    fn arguments_are_printed_as_strace_prints_them() {
        use ArgumentFormat::{Filled, Folder, Mode, OpenFlags, Signed, Text, Unsigned};
        let memory = b"/etc/\"x\"\n\0";
        let read = |gva: u64, to: &mut [u8]| {
            let from = memory.get(gva as usize - 0x1000..).unwrap_or_default();
            let count = from.len().min(to.len());
            to[..count].copy_from_slice(&from[..count]);
            count
        };
        let open = call("openat", &[Folder, Text, OpenFlags, Mode]);
        let values = [-100i64 as u64, 0x1000, 0o2000000, 0, 0, 0];
        let shown = open.arguments(&values, None, &read);
        assert_eq!(shown, "AT_FDCWD, \"/etc/\\\"x\\\"\\n\", O_RDONLY|O_CLOEXEC");
        let values = [3, 0x1000, 0o101, 0o644, 0, 0];
        assert_eq!(
            open.arguments(&values, None, &read),
            "3, \"/etc/\\\"x\\\"\\n\", O_WRONLY|O_CREAT, 0644"
        );
        let fill = call("read", &[Signed, Filled, Unsigned]);
        let values = [0, 0x1000, 100, 0, 0, 0];
        assert_eq!(fill.arguments(&values, Some(4), &read), "0, \"/etc\", 100");
        assert_eq!(fill.arguments(&values, Some(-9), &read), "0, 0x1000, 100");
        assert_eq!(fill.arguments(&values, Some(100), &read), "0, 0x1000, 100", "not all there");
    }

    #[test]
    fn a_function_under_two_names_is_one_call() {
        let narrow = Call { width: Width::Narrow, ..call("getpid", &[]) };
        let calls = [(1, call("getpid", &[])), (2, call("read", &[])), (1, narrow)];
        let left = first_of_each(calls.into_iter());
        let left: Vec<_> = left.iter().map(|(at, call)| (*at, call.width)).collect();
        assert_eq!(left, [(1, Width::Full), (2, Width::Full)]);
    }

    #[test]
    fn results_are_numbers_addresses_or_errors() {
        assert_eq!(result("read", 5), "5");
        assert_eq!(result("mmap", 0x7000), "0x7000");
        assert_eq!(result("umask", 0o22), "022");
        assert_eq!(result("openat", -2), "-1 ENOENT (No such file or directory)");
        assert_eq!(result("read", -512), "? ERESTARTSYS");
    }
}
