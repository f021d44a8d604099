//! Which host calls a wedge has: a seccomp filter, as a function of the secret and the blob's length.
//!
//! Guest code may come to own its wedge: the guest's kernel reaches the window by addresses of its own, user
//! code does where there are no protection keys, and both can jump to the blob's host calls. So the secret
//! only keeps honest code from being made a tool. What protects the host is that whatever passes, with any
//! arguments, concerns this process and guest RAM alone: `mmap` maps RAM (it is the only descriptor the
//! process has) or memory without content, over what is there and not where the host likes; `mprotect` and
//! `munmap` change what this process sees; `futex` waits and wakes; `sigreturn` loads registers; `sigaltstack`
//! says where this process's signals are written; `ioctl`
//! waits for the process of user code and lets it go on, if there is one; `set_thread_area` gives this process
//! a data segment below 4 GiB, where 32-bit user code runs. The process of user code has [`HAND_OVER`], which
//! another filter of its makes wait for the wedge. Anything else is a SIGSYS.
//! `docs/isolation.md` goes through them.
//!
//! Pure, so that tests can ask the very program that is installed (`engine/stub/src/filter_tests.rs`).

use core::mem::offset_of;
use wedge_abi::{HAND_OVER, JOURNAL, Journal, LISTENER_FD, RAM_FD};

pub const MMAP: u64 = 9;
/// The host call of this name.
pub const MPROTECT: u64 = 10;
/// The host call of this name.
pub const MUNMAP: u64 = 11;
pub const SIGRETURN: u64 = 15;
pub const IOCTL: u64 = 16;
pub const FUTEX: u64 = 202;
/// The host call of this name.
pub const PKEY_MPROTECT: u64 = 329;

pub const SIGPROCMASK: u64 = 14;
pub const SIGALTSTACK: u64 = 131;

/// SIG_SETMASK.
pub const SETMASK: u64 = 2;
/// What the two calls for its signals must say in their first and second argument, low halves: user code's
/// process has the stack and the empty mask in a page that it cannot write.
const STACK_AT: u64 = (JOURNAL + offset_of!(Journal, signal_stack)) as u64;
const MASK_AT: u64 = (JOURNAL + offset_of!(Journal, mask)) as u64;

/// What `mmap` may be asked for, each with MAP_FIXED.
pub const MAP_SHARED: u64 = 0x11;
/// For a copy of a page, which is to be changed.
pub const MAP_PRIVATE: u64 = 0x12;
/// Memory without content, that is read soon.
pub const MAP_EMPTY: u64 = 0x32 | MAP_POPULATE;
/// To be added to any of them.
pub const MAP_POPULATE: u64 = 0x8000;
/// The highest of `FUTEX_WAIT` and `FUTEX_WAKE`.
const FUTEX_WAKE: u32 = 1;

/// What `ioctl` may be asked for, of the descriptor that is the process of user code: to wait until it stops,
/// and to let it go on.
pub const NOTIFICATION_RECEIVE: u64 = 0xc050_2100;
pub const NOTIFICATION_SEND: u64 = 0xc018_2101;

/// An instruction of classic BPF, as the host takes it.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Bpf {
    pub code: u16,
    pub yes: u8,
    pub no: u8,
    pub k: u32,
}

pub const LOAD: u16 = 0x20;
pub const EQUAL: u16 = 0x15;
pub const ABOVE: u16 = 0x25;
pub const AT_LEAST: u16 = 0x35;
pub const RETURN: u16 = 6;
pub const ALLOW: u32 = 0x7fff_0000;
pub const TRAP: u32 = 0x0003_0000;
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
const AUDIT_ARCH_I386: u32 = 0x4000_0003;
/// The 32-bit call of this name; there is none in 64-bit form.
pub const SET_THREAD_AREA: u32 = 243;

/// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
const POINTER: u32 = 8;
const fn argument(n: u32) -> u32 {
    16 + 8 * n
}
const HIGH: u32 = 4;

/// Where a jump can lead, in [`Bpf::yes`] and [`Bpf::no`] of [`PROGRAM`].
const NEXT: u8 = 0;
const TO_FUTEX: u8 = 0xf0;
const TO_SECRET: u8 = 0xf1;
const TO_MMAP: u8 = 0xf2;
const TO_ALLOW: u8 = 0xf3;
const TO_TRAP: u8 = 0xf4;
const TO_IOCTL: u8 = 0xf5;
const TO_STACK: u8 = 0xf6;
const TO_MASK: u8 = 0xf7;
const TO_NARROW: u8 = 0xf8;
/// Where those are, in the same order.
const PLACES: [u8; 9] = [23, 25, 29, LEN as u8 - 2, LEN as u8 - 1, 18, 42, 50, 60];

/// What an instruction compares with.
#[derive(Clone, Copy)]
enum Value {
    Plain,
    SecretHigh,
    SecretLow,
    Window,
    BlobEnd,
    /// A number that only the process of user code has.
    OfUser,
    /// A number that a wedge has that runs 32-bit user code.
    OfNarrow,
}
use Value::{BlobEnd, OfNarrow, OfUser, Plain, SecretHigh, SecretLow, Window};

const LEN: usize = 73;
/// A filter.
pub type Program = [Bpf; LEN];
/// The filter of any wedge: without what differs between them, and jumps by their purpose.
const PROGRAM: [(Bpf, Value); LEN] = [
    load(ARCH),
    (op(EQUAL, NEXT, TO_NARROW, AUDIT_ARCH_X86_64), Plain),
    load(POINTER + HIGH),
    (want(0).0, Window),
    load(POINTER), // the window starts at a multiple of 4 GiB, with the blob
    (op(AT_LEAST, TO_TRAP, NEXT, 0), BlobEnd),
    load(NUMBER),
    case(MMAP, TO_MMAP),
    case(FUTEX, TO_FUTEX),
    case(IOCTL, TO_IOCTL),
    (case(HAND_OVER, TO_ALLOW).0, OfUser),
    (case(SIGALTSTACK, TO_STACK).0, OfUser),
    (case(SIGPROCMASK, TO_MASK).0, OfUser),
    case(SIGALTSTACK, TO_SECRET),
    case(MPROTECT, TO_SECRET),
    case(PKEY_MPROTECT, TO_SECRET),
    case(MUNMAP, TO_SECRET),
    (op(EQUAL, TO_SECRET, TO_TRAP, SIGRETURN as u32), Plain),
    load(argument(0)), // ioctl: the descriptor
    want(LISTENER_FD as u32),
    load(argument(1)), // what is asked for
    case(NOTIFICATION_RECEIVE, TO_SECRET),
    (op(EQUAL, TO_SECRET, TO_TRAP, NOTIFICATION_SEND as u32), Plain),
    load(argument(1)), // futex: the operation
    (op(ABOVE, TO_TRAP, TO_SECRET, FUTEX_WAKE), Plain),
    load(argument(5) + HIGH), // the secret
    (want(0).0, SecretHigh),
    load(argument(5)),
    (op(EQUAL, TO_ALLOW, TO_TRAP, 0), SecretLow),
    load(argument(4) + HIGH), // mmap: the secret's halves, in the descriptor and the protection
    (want(0).0, SecretHigh),
    load(argument(2) + HIGH),
    (want(0).0, SecretLow),
    load(argument(4)), // the descriptor
    want(RAM_FD as u32),
    load(argument(3) + HIGH), // the flags
    want(0),
    load(argument(3)),
    case(MAP_SHARED, TO_ALLOW),
    case(MAP_SHARED | MAP_POPULATE, TO_ALLOW),
    case(MAP_EMPTY, TO_ALLOW),
    (op(EQUAL, TO_ALLOW, TO_TRAP, (MAP_PRIVATE | MAP_POPULATE) as u32), Plain),
    load(argument(0) + HIGH), // sigaltstack: the stack, and nowhere for the old one
    (want(0).0, Window),
    load(argument(0)),
    want(STACK_AT as u32),
    load(argument(1) + HIGH),
    want(0),
    load(argument(1)),
    (op(EQUAL, TO_ALLOW, TO_TRAP, 0), Plain),
    load(argument(0)), // rt_sigprocmask: SIG_SETMASK, no signal, and nowhere for the old ones
    want(SETMASK as u32),
    load(argument(1) + HIGH),
    (want(0).0, Window),
    load(argument(1)),
    want(MASK_AT as u32),
    load(argument(2) + HIGH),
    want(0),
    load(argument(2)),
    (op(EQUAL, TO_ALLOW, TO_TRAP, 0), Plain),
    want(AUDIT_ARCH_I386), // from here on INT 0x80, from the blob, too
    load(POINTER + HIGH),
    (want(0).0, Window),
    load(POINTER),
    (op(AT_LEAST, TO_TRAP, NEXT, 0), BlobEnd),
    load(NUMBER),
    (want(SET_THREAD_AREA).0, OfNarrow),
    load(argument(3)), // the secret
    (want(0).0, SecretLow),
    load(argument(4)),
    (op(EQUAL, TO_ALLOW, TO_TRAP, 0), SecretHigh),
    (op(RETURN, NEXT, NEXT, ALLOW), Plain),
    (op(RETURN, NEXT, NEXT, TRAP), Plain),
];

const fn op(code: u16, yes: u8, no: u8, k: u32) -> Bpf {
    Bpf { code, yes, no, k }
}

const fn load(at: u32) -> (Bpf, Value) {
    (op(LOAD, NEXT, NEXT, at), Plain)
}

const fn want(value: u32) -> (Bpf, Value) {
    (op(EQUAL, NEXT, TO_TRAP, value), Plain)
}

const fn case(value: u64, to: u8) -> (Bpf, Value) {
    (op(EQUAL, to, NEXT, value as u32), Plain)
}

/// Writes the filter of a wedge whose text ends at `blob_end` (HVA), instruction by instruction: there
/// is no memcpy in the blob. With `narrow`, 32-bit user code is to run there.
pub fn write(program: &mut Program, secret: u64, blob_end: u64, narrow: bool) {
    write_for(program, secret, blob_end, [false, narrow]);
}

/// Writes the filter of a process of user code: it has the two calls for its signals besides.
pub fn write_for_user(program: &mut Program, secret: u64, blob_end: u64) {
    write_for(program, secret, blob_end, [true, false]);
}

fn write_for(program: &mut Program, secret: u64, blob_end: u64, [user, narrow]: [bool; 2]) {
    for (at, (to, (op, value))) in program.iter_mut().zip(&PROGRAM).enumerate() {
        let k = match value {
            Plain => op.k,
            OfUser if user => op.k,
            OfNarrow if narrow => op.k,
            OfNarrow => u32::MAX,  // no call
            OfUser => MMAP as u32, // has been looked for
            SecretHigh => (secret >> 32) as u32,
            SecretLow => secret as u32,
            Window => (blob_end >> 32) as u32,
            BlobEnd => blob_end as u32,
        };
        *to = Bpf { code: op.code, yes: distance(op.yes, at), no: distance(op.no, at), k };
    }
}

/// How far a jump from the instruction at `at` goes.
fn distance(jump: u8, at: usize) -> u8 {
    let place = PLACES.get(jump.wrapping_sub(TO_FUTEX) as usize);
    place.map_or(jump, |place| place - at as u8 - 1)
}
