//! System calls: their names and arguments as the kernel itself describes them (`struct syscall_metadata`), printed as
//! strace prints them as far as that goes.

use ram::Ram;

use super::{TraceError, linux_names, structures};
use crate::linux::LinuxKernel;

/// What the functions of system calls are called, and their descriptions.
const FUNCTION: &str = "__x64_sys_";
const DESCRIPTION: &str = "__syscall_meta__";
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

/// A system call.
#[derive(Clone, Debug)]
pub struct Call {
    /// As in the manual.
    pub name: String,
    formats: Vec<ArgumentFormat>,
    /// What the kernel calls its arguments.
    parameters: Vec<String>,
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

    /// A system call and the address of its function.
    pub fn find(kernel: &LinuxKernel, ram: &Ram, name: &str) -> Result<(u64, Self), TraceError> {
        let other = OTHER.iter().find(|(_, manual)| *manual == name).map(|(function, _)| *function);
        let found = [Some(name), other].into_iter().flatten().find_map(|function| {
            let address = kernel.symbols.find(&format!("{FUNCTION}{function}"))?;
            Some((address, Self::new(kernel, ram, function)))
        });
        found.ok_or_else(|| TraceError::Call(name.to_owned()))
    }

    /// All there are.
    pub fn all(kernel: &LinuxKernel, ram: &Ram) -> Vec<(u64, Self)> {
        let functions: Vec<_> = kernel.symbols.starting(FUNCTION).collect();
        let plain = functions.into_iter().filter(|(name, _)| !name.contains('.'));
        plain.map(|(name, at)| (at, Self::new(kernel, ram, &name[FUNCTION.len()..]))).collect()
    }

    fn new(kernel: &LinuxKernel, ram: &Ram, function: &str) -> Self {
        let manual = OTHER.iter().find(|(known, _)| *known == function).map(|(_, manual)| *manual);
        let name = manual.unwrap_or(function).to_owned();
        let described = kernel.symbols.find(&format!("{DESCRIPTION}{function}"));
        let described = described.and_then(|at| described_as(kernel, ram, at, &name));
        // A kernel that does not say has all that registers can hold.
        let unknown = || (vec![ArgumentFormat::Address; ARGUMENTS], Vec::new());
        let (formats, parameters) = described.unwrap_or_else(unknown);
        Self { name, formats, parameters }
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

    /// An argument as text, if it is.
    pub fn text(&self, n: usize, value: u64, read: Reader<'_>) -> Option<String> {
        let is_text = self.formats.get(n) == Some(&ArgumentFormat::Text);
        let bytes = is_text.then(|| terminated(value, read)).flatten()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// It does not return to who has made it.
    pub fn is_last(&self) -> bool {
        matches!(self.name.as_str(), "exit" | "exit_group")
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

/// What the kernel says of a system call's arguments.
fn described_as(
    kernel: &LinuxKernel,
    ram: &Ram,
    at: u64,
    name: &str,
) -> Option<(Vec<ArgumentFormat>, Vec<String>)> {
    let count = (kernel.word(ram, at + 8)? >> 32) as usize;
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
        ("umode_t", _) => ArgumentFormat::Mode,
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
    const ADDRESSES: [&str; 4] = ["mmap", "brk", "mremap", "shmat"];
    match value {
        -4095..0 => linux_names::error(-value as i32),
        _ if ADDRESSES.contains(&call) => format!("{value:#x}"),
        _ => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(name: &str, formats: &[ArgumentFormat]) -> Call {
        Call { name: name.to_owned(), formats: formats.to_vec(), parameters: Vec::new() }
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
    fn results_are_numbers_addresses_or_errors() {
        assert_eq!(result("read", 5), "5");
        assert_eq!(result("mmap", 0x7000), "0x7000");
        assert_eq!(result("openat", -2), "-1 ENOENT (No such file or directory)");
        assert_eq!(result("read", -512), "? ERESTARTSYS");
    }
}
