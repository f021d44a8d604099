//! One process answers a call of another, by the host's notifications (`seccomp_unotify(2)`): the target makes a
//! descriptor and sends it to its supervisor, by a socket.
// UNSAFETY: plain system calls on structures of the stack.
#![allow(unsafe_code)]

use std::{io, os::fd::RawFd};

/// From now on a call with this number waits for an answer, which whoever has this descriptor gives. A
/// signal does not end the wait once it has been heard of.
pub(crate) fn listener(call: u32) -> io::Result<RawFd> {
    let op =
        |code: u32, yes: u8, k: u32| libc::sock_filter { code: code as u16, jt: yes, jf: 0, k };
    let filter = [
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0),
        op(libc::BPF_JMP | libc::BPF_JEQ, 1, call),
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
pub(crate) fn send(socket: RawFd, descriptor: RawFd) -> bool {
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
pub(crate) fn receive(socket: RawFd) -> Option<RawFd> {
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
