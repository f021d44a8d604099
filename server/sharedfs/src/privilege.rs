//! Requests that would make files which give whoever opens or runs them on the host more than they have: device nodes, and programs
//! that run with the rights of their owner or with capabilities.
//!
//! As an ordinary user a server makes nothing that the user could not make. As root it would make root's programs, so such requests are
//! refused unless the folder is shared with them allowed. The bits mean something else on a folder, and stay possible there.

use fuse_backend_rs::abi::fuse_abi::Opcode;

/// "Operation not permitted".
pub(crate) const EPERM: i32 = 1;

const IN_HEADER: usize = 40;
/// Set-user-ID and set-group-ID.
const SPECIAL: u32 = 0o6000;
const SETUID: u32 = 0o4000;
const KIND: u32 = 0o170_000;
const FOLDER: u32 = 0o040_000;
const CHARACTERS: u32 = 0o020_000;
const BLOCKS: u32 = 0o060_000;
/// SETATTR changes the mode.
const SETS_MODE: u32 = 1;
const CAPABILITIES: &[u8] = b"security.capability\0";

/// Whether a request would make such a file; `kind_of` asks what the file of a node is.
pub(crate) fn is_wanted(request: &[u8], kind_of: impl FnOnce(u64) -> u32) -> bool {
    let word = |at: usize| word(request, IN_HEADER + at);
    let opcode = self::word(request, 4);
    let is = |known: Opcode| opcode == known as u32;
    if is(Opcode::Mknod) {
        word(0) & SPECIAL != 0 || is_device(word(0), word(4))
    } else if is(Opcode::Create) {
        word(4) & SPECIAL != 0
    } else if is(Opcode::Setattr) {
        let mode = if word(0) & SETS_MODE != 0 { word(68) } else { 0 };
        let node = u64::from(self::word(request, 20)) << 32 | u64::from(self::word(request, 16));
        mode & SETUID != 0 || mode & SPECIAL != 0 && kind_of(node) != FOLDER
    } else if is(Opcode::Setxattr) {
        // The name is behind a structure that has grown since.
        [8, 16].iter().any(|at| {
            request.get(IN_HEADER + at..).is_some_and(|name| name.starts_with(CAPABILITIES))
        })
    } else {
        false
    }
}

/// Device number zero is none: an overlay's mark that something is gone.
fn is_device(mode: u32, number: u32) -> bool {
    mode & KIND == BLOCKS || mode & KIND == CHARACTERS && number != 0
}

/// A FUSE_GETATTR request for a node, as bytes.
pub(crate) fn question(node: u64) -> [u8; QUESTION] {
    let mut bytes = [0; QUESTION];
    bytes[..4].copy_from_slice(&(QUESTION as u32).to_le_bytes());
    bytes[4..8].copy_from_slice(&(Opcode::Getattr as u32).to_le_bytes());
    bytes[16..24].copy_from_slice(&node.to_le_bytes());
    bytes
}

const QUESTION: usize = IN_HEADER + 16;
/// Bytes of the answer: a header, a validity of 16 and the attributes.
pub(crate) const ANSWER: usize = 16 + 16 + 88;

/// What kind of file the answer says it is; nothing known for an error.
pub(crate) fn kind_in(answer: &[u8]) -> u32 {
    // ino 8, size 8, blocks 8, times 36, mode.
    if word(answer, 4) == 0 { word(answer, 16 + 16 + 60) & KIND } else { 0 }
}

/// All ones beyond the end.
fn word(request: &[u8], at: usize) -> u32 {
    let bytes = request.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
    bytes.map_or(u32::MAX, u32::from_le_bytes)
}
