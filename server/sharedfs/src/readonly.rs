//! Which requests leave a folder as it is. Those not known to are refused.

use fuse_backend_rs::abi::fuse_abi::Opcode;

/// "Read-only file system", "function not implemented".
const EROFS: i32 = 30;
const ENOSYS: i32 = 38;
const IN_HEADER: usize = 40;
/// Access mode, O_CREAT, O_TRUNC and O_APPEND of open flags.
const WRITING: u32 = 0o3 | 0o100 | 0o1000 | 0o2000;

const READING: [Opcode; 20] = [
    Opcode::Lookup,
    Opcode::Forget,
    Opcode::Getattr,
    Opcode::Readlink,
    Opcode::Read,
    Opcode::Statfs,
    Opcode::Release,
    Opcode::Fsync,
    Opcode::Getxattr,
    Opcode::Listxattr,
    Opcode::Flush,
    Opcode::Init,
    Opcode::Opendir,
    Opcode::Readdir,
    Opcode::Releasedir,
    Opcode::Access,
    Opcode::Destroy,
    Opcode::BatchForget,
    Opcode::Readdirplus,
    Opcode::Lseek,
];

const CHANGING: [Opcode; 16] = [
    Opcode::Setattr,
    Opcode::Symlink,
    Opcode::Mknod,
    Opcode::Mkdir,
    Opcode::Unlink,
    Opcode::Rmdir,
    Opcode::Rename,
    Opcode::Link,
    Opcode::Open,
    Opcode::Write,
    Opcode::Setxattr,
    Opcode::Removexattr,
    Opcode::Create,
    Opcode::Fallocate,
    Opcode::Rename2,
    Opcode::CopyFileRange,
];

/// Whether a request only reads.
pub(crate) fn may_pass(request: &[u8]) -> bool {
    let opcode = word(request, 4);
    match opcode {
        _ if opcode == Opcode::Open as u32 => word(request, IN_HEADER) & WRITING == 0,
        _ => is_one_of(&READING, opcode),
    }
}

/// The error for a request that may not pass: "read-only" for a change, and "not implemented" for what this server does not know.
/// Linux asks newer questions first (STATX since 6.6), and an older one when it is told that the new one is not implemented.
pub(crate) fn error_of(request: &[u8]) -> i32 {
    if is_one_of(&CHANGING, word(request, 4)) { EROFS } else { ENOSYS }
}

fn is_one_of(some: &[Opcode], opcode: u32) -> bool {
    some.iter().any(|&one| one as u32 == opcode)
}

/// All ones beyond the end: no opcode, and flags that write.
fn word(request: &[u8], at: usize) -> u32 {
    let bytes = request.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
    bytes.map_or(u32::MAX, u32::from_le_bytes)
}
