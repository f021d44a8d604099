//! The memory the two processes share: one memfd with the image, a control page and the signal
//! stack. The runner's process maps it wherever the kernel likes, the native process at fixed
//! addresses (see [`Part`]).
//!
//! Ownership is handed over by the control page's `turn` word: whoever has the turn may touch the
//! memory, the other waits on the word as a futex. Acquire and release on `turn` order the rest.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::frame::FRAME_LEN;
use crate::layout::{IMAGE_LEN, PAGE};

/// Where the control page lies in the native process. Nothing else is ever mapped there, and no
/// case knows the address.
pub const CONTROL: u64 = 0x2a5c_9e31_7000;
/// The signal stack, after the control page.
pub const SIGNAL_STACK: u64 = CONTROL + PAGE;
/// Bytes of the signal stack: a frame with every AVX-512 register takes 3 KiB.
pub const SIGNAL_STACK_LEN: u64 = 8 * PAGE;
/// Offset of the control page in the memfd.
pub const CONTROL_OFFSET: u64 = IMAGE_LEN as u64;
/// Bytes of the memfd.
pub const LEN: u64 = CONTROL_OFFSET + PAGE + SIGNAL_STACK_LEN;

/// The runner's turn.
pub const TURN_RUNNER: u32 = 0;
/// The native process's turn.
pub const TURN_CHILD: u32 = 1;

/// The control page. The assembly knows these offsets.
#[repr(C)]
pub struct Control {
    /// Whose turn it is.
    pub turn: AtomicU32,
    /// Out: number of the signal that ended the case.
    pub signal: u32,
    /// Out: address of the `ucontext_t`.
    pub frame: u64,
    /// In and out: base of FS.
    pub fs_base: u64,
    /// In and out: base of GS.
    pub gs_base: u64,
    /// In: the flags at the `rt_sigreturn`, for those a frame does not hold.
    pub flags: u64,
    /// In and out: DS, ES, FS, GS.
    pub selectors: [u16; 4],
}

/// What [`Control`] gives out.
pub struct Report {
    /// Number of the signal that ended the case.
    pub signal: i32,
    /// Address of the `ucontext_t`.
    pub frame: u64,
    /// Base of FS.
    pub fs_base: u64,
    /// Base of GS.
    pub gs_base: u64,
    /// DS, ES, FS, GS.
    pub selectors: [u16; 4],
}

const _: () = assert!(std::mem::offset_of!(Control, signal) == 4);
const _: () = assert!(std::mem::offset_of!(Control, frame) == 8);
const _: () = assert!(std::mem::offset_of!(Control, fs_base) == 16);
const _: () = assert!(std::mem::offset_of!(Control, gs_base) == 24);
const _: () = assert!(std::mem::offset_of!(Control, flags) == 32);
const _: () = assert!(std::mem::offset_of!(Control, selectors) == 40);

/// The runner's view of the shared memory.
pub struct Shared {
    file: OwnedFd,
    base: *mut u8,
}

// SAFETY: the mapping belongs to the value and is not tied to a thread.
unsafe impl Send for Shared {}

impl Shared {
    /// Makes the memfd and maps it.
    pub fn new() -> io::Result<Self> {
        // SAFETY: plain system calls; the descriptor is ours alone.
        let file = unsafe {
            let fd = libc::memfd_create(c"oracle".as_ptr(), libc::MFD_CLOEXEC);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd)
        };
        // SAFETY: a new shared mapping of a file we just sized.
        let base = unsafe {
            if libc::ftruncate(file.as_raw_fd(), LEN as libc::off_t) != 0 {
                return Err(io::Error::last_os_error());
            }
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let fd = file.as_raw_fd();
            libc::mmap(std::ptr::null_mut(), LEN as usize, access, libc::MAP_SHARED, fd, 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { file, base: base.cast() })
    }

    /// The memfd.
    pub fn fd(&self) -> i32 {
        self.file.as_raw_fd()
    }

    fn control(&self) -> *mut Control {
        self.base.wrapping_add(CONTROL_OFFSET as usize).cast()
    }

    fn turn(&self) -> &AtomicU32 {
        // SAFETY: the control page is mapped as long as self, and `turn` is only used atomically.
        unsafe { &(*self.control()).turn }
    }

    /// Puts the image. The runner has the turn.
    pub fn write_image(&mut self, image: &[u8; IMAGE_LEN]) {
        // SAFETY: the image is the start of the mapping; the child sleeps.
        unsafe { std::ptr::copy_nonoverlapping(image.as_ptr(), self.base, IMAGE_LEN) }
    }

    /// Takes the image. The runner has the turn.
    pub fn read_image(&self, image: &mut [u8; IMAGE_LEN]) {
        // SAFETY: as in `write_image`.
        unsafe { std::ptr::copy_nonoverlapping(self.base, image.as_mut_ptr(), IMAGE_LEN) }
    }

    /// Sets what [`Control`] takes in.
    pub fn write_control(
        &mut self,
        (fs_base, gs_base): (u64, u64),
        flags: u64,
        selectors: [u16; 4],
    ) {
        // SAFETY: the control page is mapped, the child sleeps.
        unsafe {
            (*self.control()).fs_base = fs_base;
            (*self.control()).gs_base = gs_base;
            (*self.control()).flags = flags;
            (*self.control()).selectors = selectors;
        }
    }

    /// What the native process says of the case that has ended.
    pub fn read_control(&self) -> Report {
        // SAFETY: as in `write_control`.
        let control = unsafe { &*self.control() };
        Report {
            signal: control.signal as i32,
            frame: control.frame,
            fs_base: control.fs_base,
            gs_base: control.gs_base,
            selectors: control.selectors,
        }
    }

    /// Offset in the mapping of a frame at `address` of the native process, if it lies in the
    /// signal stack.
    fn frame_offset(address: u64) -> Option<usize> {
        let offset = address.checked_sub(CONTROL)?;
        let end = offset.checked_add(FRAME_LEN as u64)?;
        let in_stack = offset >= PAGE && end <= PAGE + SIGNAL_STACK_LEN;
        in_stack.then_some((CONTROL_OFFSET + offset) as usize)
    }

    /// Copies the frame at `address`, an address of the native process.
    pub fn read_frame(&self, address: u64) -> Option<Box<[u8; FRAME_LEN]>> {
        let offset = Self::frame_offset(address)?;
        let mut bytes = Box::new([0; FRAME_LEN]);
        // SAFETY: `frame_offset` has checked the range; the child sleeps.
        unsafe {
            let from = self.base.add(offset);
            std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), FRAME_LEN);
        }
        Some(bytes)
    }

    /// Puts a frame back to `address`, where it came from.
    pub fn write_frame(&mut self, address: u64, bytes: &[u8; FRAME_LEN]) {
        let Some(offset) = Self::frame_offset(address) else { return };
        // SAFETY: as in `read_frame`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.add(offset), FRAME_LEN) }
    }

    /// Gives the turn to the native process.
    pub fn give_turn(&self) {
        self.turn().store(TURN_CHILD, Ordering::Release);
        self.futex(libc::FUTEX_WAKE, 1, None);
    }

    /// Leaves the turn to a native process that is about to be made.
    pub fn reset_turn(&self) {
        self.turn().store(TURN_CHILD, Ordering::Release);
    }

    /// Waits for the turn; false if `limit` passed first.
    pub fn wait_turn(&self, limit: Duration) -> bool {
        let start = Instant::now();
        while self.turn().load(Ordering::Acquire) != TURN_RUNNER {
            if start.elapsed() > limit {
                return false;
            }
            self.futex(libc::FUTEX_WAIT, TURN_CHILD, Some(limit));
        }
        true
    }

    fn futex(&self, operation: i32, value: u32, limit: Option<Duration>) {
        let timeout = limit.map(|limit| libc::timespec {
            tv_sec: limit.as_secs() as libc::time_t,
            tv_nsec: limit.subsec_nanos().into(),
        });
        let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the word is mapped; FUTEX_WAIT and FUTEX_WAKE touch nothing else.
        unsafe { libc::syscall(libc::SYS_futex, self.turn().as_ptr(), operation, value, timeout) };
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nobody has a reference into it.
        unsafe { libc::munmap(self.base.cast(), LEN as usize) };
    }
}
