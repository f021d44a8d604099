//! Starting a wedge and taking turns with it.
// UNSAFETY: forks, maps memory at fixed addresses and shares it with another process.
#![allow(unsafe_code)]

use crate::{
    Exit,
    layout::{
        ALT_STACK, ALT_STACK_LEN, BLOB, KICK, MAX_ORDERS, MONITOR, Order, Registers, SHARED, STACK,
        STACK_LEN, Shared, WEDGE,
    },
};
use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicI32, Ordering},
    },
};

static IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/wedge.bin"));
const PAGE: usize = 4096;
/// The page of Linux's old system-call entries (GVA).
const VSYSCALL: u64 = 0xffff_ffff_ff60_0000;

/// Why a wedge cannot be started or has stopped working.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The host refused something.
    #[error("cannot start a process for guest code: {0}")]
    Start(#[from] io::Error),
    /// The process is gone.
    #[error("a process running guest code ended unexpectedly")]
    Gone,
}

/// Makes guest code come back, from any thread; sticky until the next run.
#[derive(Clone, Debug, Default)]
pub struct Kick(Arc<AtomicI32>);

impl Kick {
    /// Kicks the wedge that runs, if one does.
    pub fn kick(&self) {
        let pid = self.0.load(Ordering::SeqCst);
        if pid > 0 {
            // SAFETY: a child of ours that is not reaped while it is set here.
            unsafe { libc::kill(pid, KICK) };
        }
    }
    /// From now on kicks reach this process (zero: none).
    fn aim(&self, pid: i32) {
        self.0.store(pid, Ordering::SeqCst);
    }
}

/// A wedge process.
#[derive(Debug)]
pub struct Wedge {
    pid: i32,
    shared: *mut Shared,
    orders: Vec<Order>,
    kick: Kick,
}

// SAFETY: the shared pages are used through `&mut self` only.
unsafe impl Send for Wedge {}

impl Wedge {
    /// Starts a wedge over guest RAM.
    ///
    /// # Errors
    /// If the host refuses a process, memory or the sandbox.
    pub fn start(ram: BorrowedFd<'_>, kick: Kick) -> Result<Self, Error> {
        let pages = memory_object("ring3-vcpu", shared_len())?;
        let shared = map_anywhere(&pages, shared_len())?.cast::<Shared>();
        // SAFETY: fresh, zeroed pages of the right size; all-zero is valid.
        prepare(unsafe { &mut *shared }, ram.as_raw_fd());
        let image = image()?;
        // SAFETY: the child only makes plain system calls and then is the blob.
        let pid = unsafe { libc::fork() };
        match pid {
            -1 => Err(io::Error::last_os_error().into()),
            0 => become_wedge(pages.as_raw_fd(), image),
            _ => {
                let mut wedge = Self { pid, shared, orders: Vec::new(), kick };
                wedge.wait()?; // its first trap
                Ok(wedge)
            }
        }
    }

    /// Changes the mappings before guest code runs the next time.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn order(&mut self, order: Order) -> Result<(), Error> {
        self.orders.push(order);
        // A failure leaves something unmapped, which shows as a fault.
        if self.orders.len() == MAX_ORDERS { self.flush().map(drop) } else { Ok(()) }
    }

    /// Registers guest code starts with, and those it stopped with.
    pub fn registers(&mut self) -> &mut Registers {
        // SAFETY: it is our turn whenever no method runs.
        unsafe { &mut (*self.shared).registers }
    }

    /// Guest code is about to run here: kicks reach it from now on.
    pub fn aim_kicks(&self) {
        self.kick.aim(self.pid);
    }

    /// Runs guest code until it stops; `None` if the orders could not all be carried out (too many
    /// mappings, no memory), in which case no guest code has run.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn run(&mut self) -> Result<Option<Exit>, Error> {
        let done = self.hand_over(true)?;
        // SAFETY: it is our turn again.
        Ok(done.then(|| exit(unsafe { &*self.shared })))
    }

    /// Carries out what has been ordered, without running guest code, and tells whether it worked.
    fn flush(&mut self) -> Result<bool, Error> {
        self.hand_over(false)
    }

    fn hand_over(&mut self, resume: bool) -> Result<bool, Error> {
        // SAFETY: it is our turn.
        let shared = unsafe { &mut *self.shared };
        for (to, from) in shared.orders.iter_mut().zip(&self.orders) {
            *to = *from;
        }
        shared.order_count = self.orders.len() as u64;
        shared.resume = resume.into();
        self.orders.clear();
        self.take_turns()?;
        // SAFETY: it is our turn again.
        Ok(unsafe { (*self.shared).failed } == 0)
    }

    fn take_turns(&mut self) -> Result<(), Error> {
        // SAFETY: the word is in the shared pages.
        let turn = unsafe { &(*self.shared).turn };
        turn.store(WEDGE, Ordering::SeqCst);
        futex(turn.as_ptr(), libc::FUTEX_WAKE, 1, false);
        self.wait()
    }

    /// Waits for our turn; a dead process is noticed within a second.
    fn wait(&mut self) -> Result<(), Error> {
        // SAFETY: as above.
        let turn = unsafe { &(*self.shared).turn };
        let first = turn.as_ptr();
        while turn.load(Ordering::SeqCst) != MONITOR || !self.started() {
            futex(first, libc::FUTEX_WAIT, turn.load(Ordering::SeqCst), true);
            let mut status = 0;
            // SAFETY: our own child.
            if unsafe { libc::waitpid(self.pid, &raw mut status, libc::WNOHANG) } == self.pid {
                self.pid = 0;
                self.kick.aim(0);
                return Err(Error::Gone);
            }
        }
        Ok(())
    }

    /// The wedge has trapped at least once.
    fn started(&self) -> bool {
        // SAFETY: a word the wedge sets before it ever gives us a turn.
        unsafe { (*self.shared).signal != 0 }
    }
}

impl Drop for Wedge {
    fn drop(&mut self) {
        // SAFETY: our own child and our own mapping.
        unsafe {
            if self.pid > 0 {
                self.kick.aim(0);
                libc::kill(self.pid, libc::SIGKILL);
                libc::waitpid(self.pid, ptr::null_mut(), 0);
            }
            libc::munmap(self.shared.cast(), shared_len());
        }
    }
}

fn exit(s: &Shared) -> Exit {
    let vector = (s.trap & 0x1f) as u8;
    match s.signal as i32 {
        KICK => Exit::Kicked,
        libc::SIGSYS if s.address & !0xfff == VSYSCALL => Exit::Vsyscall { address: s.address },
        libc::SIGSYS => Exit::SystemCall,
        libc::SIGSEGV if s.trap == 14 => {
            Exit::PageFault { address: s.address, error: s.error as u32 }
        }
        libc::SIGTRAP if s.trap == 1 => Exit::Step,
        _ => Exit::Trap { vector },
    }
}

fn shared_len() -> usize {
    size_of::<Shared>().next_multiple_of(PAGE)
}

fn prepare(shared: &mut Shared, ram: i32) {
    let mut secret = [0; 8];
    // SAFETY: fills eight bytes of ours.
    unsafe { libc::getrandom(secret.as_mut_ptr().cast(), 8, 0) };
    shared.secret = u64::from_le_bytes(secret);
    shared.ram = ram as u64;
    shared.blob_end = (BLOB + IMAGE.len()) as u64;
    shared.pkru_offset = pkru_offset();
    shared.keys = u64::from(shared.pkru_offset != 0);
}

/// Offset of PKRU in the standard XSAVE layout, zero if the host does not use protection keys.
fn pkru_offset() -> u64 {
    use std::arch::x86_64::__cpuid_count;
    let (keys, offset) = (__cpuid_count(7, 0).ecx >> 4 & 1, __cpuid_count(13, 9).ebx);
    if keys == 1 { offset.into() } else { 0 }
}

fn memory_object(name: &str, len: usize) -> io::Result<OwnedFd> {
    let name = std::ffi::CString::new(name).unwrap_or_default();
    // SAFETY: plain system calls; the descriptor is ours.
    unsafe {
        let fd = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 || libc::ftruncate(fd, len as i64) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// The blob as a memory object, made once.
fn image() -> io::Result<i32> {
    static OBJECT: OnceLock<OwnedFd> = OnceLock::new();
    if let Some(fd) = OBJECT.get() {
        return Ok(fd.as_raw_fd());
    }
    let fd = memory_object("ring3-wedge", IMAGE.len().next_multiple_of(PAGE))?;
    // SAFETY: writes the slice.
    let wrote = unsafe { libc::pwrite(fd.as_raw_fd(), IMAGE.as_ptr().cast(), IMAGE.len(), 0) };
    if wrote != IMAGE.len() as isize {
        return Err(io::Error::last_os_error());
    }
    Ok(OBJECT.get_or_init(|| fd).as_raw_fd())
}

fn map_anywhere(fd: &OwnedFd, len: usize) -> io::Result<*mut libc::c_void> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fresh mapping where the host likes.
    let at = unsafe {
        libc::mmap(ptr::null_mut(), len, protection, libc::MAP_SHARED, fd.as_raw_fd(), 0)
    };
    if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(at) }
}

fn futex(word: *mut u32, operation: i32, value: u32, timed: bool) {
    let second = libc::timespec { tv_sec: 1, tv_nsec: 0 };
    let timeout = if timed { &raw const second } else { ptr::null() };
    // SAFETY: the word stays mapped; waking and waiting touch nothing else.
    unsafe { libc::syscall(libc::SYS_futex, word, operation, value, timeout) };
}

/// The child: maps the window and becomes the blob. Only plain system calls.
fn become_wedge(shared: i32, image: i32) -> ! {
    const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
    const RX: i32 = libc::PROT_READ | libc::PROT_EXEC;
    let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: this process is about to be nothing but the window.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        forget_rseq();
        let fixed = |at: usize, len: usize, protection, flags, fd| {
            let flags = flags | libc::MAP_FIXED_NOREPLACE;
            if libc::mmap(at as *mut _, len, protection, flags, fd, 0) != at as *mut _ {
                libc::_exit(111);
            }
        };
        fixed(BLOB, IMAGE.len().next_multiple_of(PAGE), RX, libc::MAP_SHARED, image);
        fixed(SHARED, shared_len(), RW, libc::MAP_SHARED, shared);
        fixed(STACK, STACK_LEN, RW, anonymous, -1);
        fixed(ALT_STACK, ALT_STACK_LEN, RW, anonymous, -1);
        if pkru_offset() != 0 {
            let key = libc::syscall(libc::SYS_pkey_alloc, 0, 0);
            for (at, len) in
                [(SHARED, shared_len()), (STACK, STACK_LEN), (ALT_STACK, ALT_STACK_LEN)]
            {
                if libc::syscall(libc::SYS_pkey_mprotect, at, len, RW, key) != 0 {
                    libc::_exit(112);
                }
            }
        }
        std::arch::asm!("jmp {}", in(reg) BLOB, options(noreturn))
    }
}

/// Unregisters glibc's rseq area: it is about to be unmapped, and the kernel writes it.
///
/// # Safety
/// In a thread that runs no more of the C library.
unsafe fn forget_rseq() {
    unsafe extern "C" {
        static __rseq_offset: isize;
        static __rseq_size: u32;
    }
    // SAFETY: the area is the one glibc registered for this thread; 0x53053053 is its signature.
    unsafe {
        let thread: usize;
        std::arch::asm!("rdfsbase {}", out(reg) thread, options(nomem, nostack));
        let area = thread.wrapping_add_signed(__rseq_offset);
        libc::syscall(libc::SYS_rseq, area, 32.max(__rseq_size), 1, 0x5305_3053u32);
    }
}
