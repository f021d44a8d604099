//! The process of user code, where that has one of its own (`stub/src/user.rs`): what it consists of, and its
//! start.
//!
//! It has the program's pages, and of ours the blob, a page that it shares with its wedge, one that says what
//! it is to do, the table of patched calls and their stubs. Before it has all of its filters it makes the
//! descriptor by which the wedge hears of it, and sends that to the wedge, by a socket that both then close.
//! The monitor never has it.
// UNSAFETY: becomes another process.
#![allow(unsafe_code)]

use crate::{
    child::{self, Parts, R, RW, RX, fixed},
    memory::{MemoryObject, field},
    process::{self, PAGE},
    starter::{self, Process},
};
use frame::{
    ALT_STACK, ALT_STACK_LEN, AREA_LEN, BLOB, Base, HAND_OVER, JOURNAL, Journal, MAX_SITES,
    SIGNAL_STACK_FLAGS, SITES, SITES_LEN, STUB_LEN, STUBS, USER_PAGE, USER_START, UserPage,
};
use std::{
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
};

/// What a wedge shares with the process of its user code: descriptors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shared {
    pub(crate) page: i32,
    pub(crate) journal: i32,
    /// Where the one sends, or the other receives, what the wedge hears by.
    pub(crate) socket: i32,
}

/// Both sides' of it, for as long as they are started.
pub(crate) struct Apart {
    page: MemoryObject<UserPage>,
    journal: MemoryObject<Journal>,
    sockets: [UnixStream; 2],
}

impl Apart {
    pub(crate) fn new() -> io::Result<Self> {
        let page = MemoryObject::new("ring3-user", size_of::<UserPage>())?;
        let journal = MemoryObject::new("ring3-journal", size_of::<Journal>())?;
        Ok(Self { page, journal, sockets: UnixStream::pair()?.into() })
    }

    /// What the wedge has of it.
    pub(crate) fn of_kernel(&self) -> Shared {
        self.shared(0)
    }

    fn shared(&self, side: usize) -> Shared {
        let socket = self.sockets[side].as_raw_fd();
        Shared { page: self.page.fd(), journal: self.journal.fd(), socket }
    }

    /// Starts the process, beside a wedge of these parts.
    pub(crate) fn start(&self, wedge: &Parts, told: &frame::Setup) -> io::Result<Process> {
        let start = [told.user_secret, told.blob_end, told.user_dispatch];
        self.page.set(field!(UserPage, start), start);
        let stack = [wedge.base.at(ALT_STACK as u64), SIGNAL_STACK_FLAGS, ALT_STACK_LEN as u64];
        self.journal.set(field!(Journal, signal_stack), stack);
        let parts = UserParts {
            base: wedge.base,
            ram: wedge.ram,
            stubs: wedge.stubs,
            sites: wedge.sites,
            shared: self.shared(1),
        };
        starter::start_as(parts.told(), |image| become_user(image, &parts))
    }
}

/// What the process consists of, but for the blob.
pub(crate) struct UserParts {
    base: Base,
    /// With its length in bytes.
    ram: (i32, usize),
    stubs: i32,
    sites: i32,
    shared: Shared,
}

/// Tells the words of such a process from a wedge's.
const USER: u64 = u64::MAX;
/// How many descriptors it is given.
const DESCRIPTORS: usize = 6;

impl UserParts {
    fn told(&self) -> ([u64; 3], Vec<i32>) {
        let Self { base, ram, stubs, sites, shared: Shared { page, journal, socket } } = *self;
        (
            [ram.1 as u64, USER, base.entry().into()],
            vec![ram.0, stubs, sites, page, journal, socket],
        )
    }

    /// What was told; `None` if it cannot be that.
    pub(crate) fn of(words: &[u64], descriptors: &[OwnedFd]) -> Option<Self> {
        let &[len, USER, entry] = words else { return None };
        let descriptors: &[OwnedFd; DESCRIPTORS] = descriptors.first_chunk()?;
        let [ram, stubs, sites, page, journal, socket] =
            descriptors.each_ref().map(|fd| fd.as_raw_fd());
        let ram = (ram, usize::try_from(len).ok().filter(|len| *len <= frame::RAM_MAX)?);
        let base = Base::of_entry(u16::try_from(entry).ok()?);
        Some(Self { base, ram, stubs, sites, shared: Shared { page, journal, socket } })
    }
}

/// A secret.
pub(crate) fn secret() -> u64 {
    let mut secret = [0; 8];
    // SAFETY: fills eight bytes of ours.
    unsafe { libc::getrandom(secret.as_mut_ptr().cast(), 8, 0) };
    u64::from_le_bytes(secret)
}

/// A child that cannot become what it is to be.
pub(crate) fn give_up() -> ! {
    // SAFETY: ends this process, and nothing else.
    unsafe { libc::_exit(115) }
}

/// The child: maps what it has of the window and becomes the blob's other side. Returns only if the host has
/// no notifications.
pub(crate) fn become_user(image: i32, parts: &UserParts) -> io::Error {
    let UserParts { base, ram, stubs, sites, shared } = *parts;
    let here = |usual: usize| base.at(usual as u64) as usize;
    // SAFETY: this process is about to be nothing but the window.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        child::forget_handlers();
        child::forget_rseq();
        let image_len = process::image_len();
        fixed(here(BLOB), image_len, RX, image);
        fixed(SITES, SITES_LEN - AREA_LEN, R, sites);
        fixed(here(STUBS), MAX_SITES * STUB_LEN, RX, stubs);
        fixed(here(USER_PAGE), PAGE, RW, shared.page);
        fixed(here(JOURNAL), PAGE, R, shared.journal);
        fixed(here(ALT_STACK), ALT_STACK_LEN, RW, -1);
        match listener() {
            Ok(listener) if send(shared.socket, listener) => {}
            Ok(_) => give_up(),
            Err(error) => return error,
        }
        child::close(ram, None);
        std::arch::asm!("jmp {}", in(reg) here(BLOB) + USER_START, options(noreturn))
    }
}

/// From now on a hand-over of this process waits for an answer, which whoever has this descriptor gives. A
/// signal does not end the wait once it has been heard of.
fn listener() -> io::Result<i32> {
    let op =
        |code: u32, yes: u8, k: u32| libc::sock_filter { code: code as u16, jt: yes, jf: 0, k };
    let filter = [
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        op(libc::BPF_JMP | libc::BPF_JEQ, 1, HAND_OVER as u32),
        op(libc::BPF_RET, 0, libc::SECCOMP_RET_ALLOW),
        op(libc::BPF_RET, 0, libc::SECCOMP_RET_USER_NOTIF),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER
        | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
        | libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;
    // SAFETY: the host copies the program.
    let listener = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program)
    };
    if listener < 0 { Err(io::Error::last_os_error()) } else { Ok(listener as i32) }
}

/// Room for a descriptor in a control message.
#[repr(C, align(8))]
struct Control([u8; 32]);

/// A message of one byte; the caller's until it has been sent or received.
fn message(byte: &mut libc::iovec, control: &mut Control) -> libc::msghdr {
    // SAFETY: plain data, for which zero is a value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (byte, 1);
    message.msg_control = control.0.as_mut_ptr().cast();
    // SAFETY: computes a number.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(4) } as usize;
    message
}

/// Sends a descriptor.
fn send(socket: i32, descriptor: i32) -> bool {
    let mut byte = [0_u8];
    let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let mut control = Control([0; 32]);
    let message = message(&mut part, &mut control);
    // SAFETY: the room for the control message is as long as it says.
    unsafe {
        let head = libc::CMSG_FIRSTHDR(&raw const message);
        (*head).cmsg_level = libc::SOL_SOCKET;
        (*head).cmsg_type = libc::SCM_RIGHTS;
        (*head).cmsg_len = libc::CMSG_LEN(4) as usize;
        libc::CMSG_DATA(head).cast::<i32>().write_unaligned(descriptor);
        libc::sendmsg(socket, &raw const message, libc::MSG_NOSIGNAL) == 1
    }
}

/// Waits for a descriptor; there is none if the other side has ended.
pub(crate) fn receive(socket: i32) -> Option<i32> {
    let mut byte = [0_u8];
    let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let mut control = Control([0; 32]);
    let mut message = message(&mut part, &mut control);
    // SAFETY: as in `send`; the host has written the control message.
    unsafe {
        if libc::recvmsg(socket, &raw mut message, libc::MSG_CMSG_CLOEXEC) != 1 {
            return None;
        }
        let head = libc::CMSG_FIRSTHDR(&raw const message);
        let sent = !head.is_null() && (*head).cmsg_type == libc::SCM_RIGHTS;
        sent.then(|| libc::CMSG_DATA(head).cast::<i32>().read_unaligned())
    }
}
