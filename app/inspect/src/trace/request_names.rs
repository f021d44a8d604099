//! What requests of virtio devices are called, by their first bytes (virtio 1.2 chapter 5, and FUSE's header).

use vmm::{
    RequestNote,
    device_id::{BLOCK, CONSOLE, FS, NET, RNG, VSOCK},
};

use super::linux_names;

/// What each type of device is called.
const DEVICES: [(u16, &str); 6] = [
    (NET, "net"),
    (BLOCK, "block"),
    (CONSOLE, "console"),
    (RNG, "rng"),
    (VSOCK, "vsock"),
    (FS, "fs"),
];

const BLOCK_REQUESTS: [(u32, &str); 7] = [
    (0, "read"),
    (1, "write"),
    (4, "flush"),
    (8, "get-id"),
    (11, "discard"),
    (13, "write-zeroes"),
    (14, "secure-erase"),
];
/// Of these the header has a sector.
const AT_SECTOR: [u32; 2] = [0, 1];
const BLOCK_STATUS: [&str; 3] = ["OK", "IOERR", "UNSUPP"];
const VSOCK_OPERATIONS: [&str; 8] = [
    "invalid",
    "request",
    "response",
    "reset",
    "shutdown",
    "data",
    "credit-update",
    "credit-request",
];
/// FUSE's opcodes, from 1 on.
const FUSE: &str = "lookup forget getattr setattr readlink symlink - mknod mkdir unlink rmdir rename link open read write statfs \
    release - fsync setxattr getxattr listxattr removexattr flush init opendir readdir releasedir fsyncdir getlk setlk setlkw \
    access create interrupt bmap destroy ioctl poll notify-reply batch-forget fallocate readdirplus rename2 lseek \
    copy-file-range setupmapping removemapping syncfs tmpfile statx";

/// A request in words.
pub struct RequestWords {
    pub name: String,
    /// What is particular to its kind, with a comma before each.
    pub arguments: String,
    pub result: String,
}

/// A request's names. What was taken before anybody looked has no kind.
pub fn named(device_type: u16, begin: Option<&RequestNote>, end: &RequestNote) -> RequestWords {
    let device = DEVICES.iter().find(|(known, _)| *known == device_type);
    let device =
        device.map_or_else(|| format!("type-{device_type}"), |(_, name)| (*name).to_owned());
    let kind = begin.map_or_else(|| "?".to_owned(), |begin| kind(device_type, begin));
    let arguments = begin.map(|begin| arguments(device_type, begin)).unwrap_or_default();
    let status = status(device_type, end).map(|status| format!(", {status}")).unwrap_or_default();
    let name = if kind.is_empty() { device } else { format!("{device}:{kind}") };
    RequestWords { name, arguments, result: format!("{}{status}", end.writable) }
}

/// The sector that a disk's request begins at.
pub fn sector(device_type: u16, begin: &RequestNote) -> Option<u64> {
    let is_at_sector = device_type == BLOCK && AT_SECTOR.contains(&word(begin, 0)?);
    is_at_sector.then(|| quad(begin, 8)).flatten()
}

fn kind(device_type: u16, begin: &RequestNote) -> String {
    let text =
        |found: Option<&str>, number: u32| found.map_or_else(|| number.to_string(), str::to_owned);
    let numbered = match device_type {
        BLOCK => word(begin, 0).map(|number| {
            let found = BLOCK_REQUESTS.iter().find(|(known, _)| *known == number);
            text(found.map(|(_, name)| *name), number)
        }),
        FS => word(begin, 4).map(|opcode| text(fuse(opcode), opcode)),
        VSOCK if begin.readable != 0 => word(begin, 28).map(|word| {
            let operation = word >> 16;
            text(VSOCK_OPERATIONS.get(operation as usize).copied(), operation)
        }),
        NET | CONSOLE | VSOCK => Some(direction(begin).to_owned()),
        _ => Some(String::new()),
    };
    numbered.unwrap_or_else(|| "?".to_owned())
}

/// Where a request has no kind but whether something goes out or comes in.
fn direction(begin: &RequestNote) -> &'static str {
    match (begin.readable, begin.writable) {
        (0, _) => "receive",
        (_, 0) => "send",
        _ => "control",
    }
}

fn fuse(opcode: u32) -> Option<&'static str> {
    let n = usize::try_from(opcode).ok()?.checked_sub(1)?;
    FUSE.split_whitespace().nth(n).filter(|name| *name != "-")
}

fn arguments(device_type: u16, begin: &RequestNote) -> String {
    let node = (device_type == FS).then(|| quad(begin, 16)).flatten();
    let sector = sector(device_type, begin).map(|sector| format!(", sector {sector}"));
    sector.or_else(|| node.map(|node| format!(", node {node}"))).unwrap_or_default()
}

/// What the device says came of it, if it says so.
fn status(device_type: u16, end: &RequestNote) -> Option<String> {
    match device_type {
        BLOCK if end.writable != 0 => {
            let known = BLOCK_STATUS.get(usize::from(end.last));
            Some(known.map_or_else(|| end.last.to_string(), |name| (*name).to_owned()))
        }
        // The answer's length, then an error with its sign.
        FS if end.writable >= 16 => {
            let error = word(end, 4)? as i32;
            (error != 0).then(|| linux_names::error(error.wrapping_neg()))
        }
        _ => None,
    }
}

fn word(note: &RequestNote, at: usize) -> Option<u32> {
    let bytes = note.bytes.get(..note.len.into())?.get(at..)?.first_chunk()?;
    Some(u32::from_le_bytes(*bytes))
}

fn quad(note: &RequestNote, at: usize) -> Option<u64> {
    let bytes = note.bytes.get(..note.len.into())?.get(at..)?.first_chunk()?;
    Some(u64::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(readable: u32, writable: u32, first: &[u8]) -> RequestNote {
        let mut bytes = [0; 32];
        bytes[..first.len()].copy_from_slice(first);
        RequestNote { readable, writable, bytes, len: first.len() as u8, ..RequestNote::default() }
    }

    fn words(device_type: u16, begin: &RequestNote, end: &RequestNote) -> [String; 3] {
        let RequestWords { name, arguments, result } = named(device_type, Some(begin), end);
        [name, arguments, result]
    }

    #[test]
    fn requests_of_a_disk_have_kinds_sectors_and_status() {
        let read = note(16, 4097, &[&[0; 8][..], &2048_u64.to_le_bytes()].concat());
        let failed = RequestNote { last: 1, ..note(16, 4097, &[]) };
        let said = words(BLOCK, &read, &failed);
        assert_eq!(said, ["block:read", ", sector 2048", "4097, IOERR"]);
        let flush = note(16, 1, &[4, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(words(BLOCK, &flush, &note(16, 1, &[])), ["block:flush", "", "1, OK"]);
        assert_eq!(words(BLOCK, &note(2, 1, &[4, 0]), &note(2, 1, &[]))[0], "block:?", "too short");
        assert_eq!(named(BLOCK, None, &note(16, 1, &[])).name, "block:?");
    }

    #[test]
    fn requests_of_a_folder_are_named_as_fuse_does() {
        let header = |opcode: u32| {
            [
                &40_u32.to_le_bytes()[..],
                &opcode.to_le_bytes(),
                &7_u64.to_le_bytes(),
                &3_u64.to_le_bytes(),
            ]
            .concat()
        };
        let answer =
            |error: i32| note(40, 16, &[&16_u32.to_le_bytes()[..], &error.to_le_bytes()].concat());
        let said = words(FS, &note(40, 144, &header(1)), &answer(-2));
        let [name, arguments, result] = said;
        assert_eq!((&*name, &*arguments), ("fs:lookup", ", node 3"));
        assert!(result.starts_with("16, -1 ENOENT"), "{result}");
        for (opcode, name) in [
            (14, "open"),
            (15, "read"),
            (26, "init"),
            (38, "destroy"),
            (44, "readdirplus"),
            (52, "statx"),
        ] {
            assert_eq!(fuse(opcode), Some(name));
        }
        assert_eq!([fuse(0), fuse(7), fuse(1000)], [None; 3]);
    }

    #[test]
    fn other_requests_are_known_by_their_direction() {
        let end = note(0, 60, &[]);
        assert_eq!(words(NET, &note(0, 1526, &[]), &end)[0], "net:receive");
        assert_eq!(words(NET, &note(54, 0, &[0; 12]), &end)[0], "net:send");
        assert_eq!(words(NET, &note(4, 1, &[4, 0]), &end)[0], "net:control");
        assert_eq!(words(RNG, &note(0, 64, &[]), &end)[0], "rng");
        let mut packet = [0; 32];
        packet[30] = 5;
        assert_eq!(words(VSOCK, &note(44, 0, &packet), &end)[0], "vsock:data");
        assert_eq!(words(99, &note(1, 1, &[0]), &end)[0], "type-99");
    }
}
