//! User code in a process of its own: what the wedge, which has the kernel's memory, does about it.
//!
//! The process ([`crate::user`]) stands still inside the host's kernel whenever the wedge does anything: it
//! has made a call that waits for an answer ([`HAND_OVER`]), and the host says where. So nobody changes what
//! the wedge reads of it, and what it has mapped is known. Whatever this process maps of the user's is noted
//! in a journal, which that one carries out before user code goes on. With the answer it is told the secret
//! that its host calls need.
//!
//! What its page says is the program's word, and taken as far as a program could have set its own registers.

use crate::{
    assist, die,
    filter::{NOTIFICATION_RECEIVE, NOTIFICATION_SEND},
    frame, here,
    host::{self, IOCTL, call, load_vectors},
    reach, run, shared,
    signal::{self, Context, GENERAL_PROTECTION, SIGSEGV},
    turns, user,
};
use core::arch::asm;
use frame::{
    HAND_OVER, JOURNAL, Journal, KICK, LISTENER_FD, MAX_JOURNAL, REGIONS, Reason, Shared,
    USER_PAGE, UserPage, VcpuPage, event, region,
};
use x86::flags::{AC, DF, FIXED, ID, IF, NT, STATUS, TF};

const INTERRUPTED: i64 = -4;
const GONE: i64 = -2;
const NO_SUCH_CALL: u64 = -38_i64 as u64;
const NO_MEMORY: i64 = -12;
/// So often may a hand-over be gone before the process is. Each kick that comes to the process while it waits leaves
/// one: on a busy host thousands, as this process waits for a CPU and others kick. Of a process that has ended all are
/// gone, each at once, so that is known in half a second.
const MAX_GONE: u32 = 1 << 20;
/// RFLAGS that user code can change: the status flags, TF, DF, NT, AC, ID.
const USER_FLAGS: u64 = STATUS | TF | DF | NT | AC | ID;
/// What the host lets a data segment register hold.
const SELECTORS: [u64; 7] = [0, 1, 2, 3, 0x2b, 0x23, 0x33];
/// The host's selector of 32-bit user code, and that of 64-bit code.
const CS_32: u64 = 0x23;
const CS_64: u64 = 0x33;
/// In an XSAVE area: MXCSR, and the header.
const MXCSR: usize = 24;
const HEADER: usize = 512;
const SAVED: u64 = 7;
/// Indices into the context of a signal.
const RIP: usize = 16;
const FLAGS: usize = 17;
const SELECTOR: usize = 18;
const TRAP: usize = 20;

fn page() -> &'static mut UserPage {
    // SAFETY: mapped before this process began. The one that shares it stands still.
    unsafe { &mut *(here(USER_PAGE) as *mut UserPage) }
}

fn journal() -> &'static mut Journal {
    // SAFETY: as for the page.
    unsafe { &mut *(here(JOURNAL) as *mut Journal) }
}

/// Memory has been unmapped or protected here, or bytes written.
pub fn have_done(order: [u64; 6]) {
    let s = shared();
    if s.setup.user_secret != 0 {
        note(s, order);
    }
}

/// Memory has been mapped here: the other process is to have what is the user's.
pub fn have_mapped(order: [u64; 6]) {
    let s = shared();
    let [_, at, ..] = order;
    // SAFETY: the table has an entry for every region.
    if s.setup.user_secret != 0 && unsafe { *(reach(REGIONS) as *const u64).add(region(at)) } == 0 {
        note(s, order);
    }
}

fn note(s: &mut Shared, order: [u64; 6]) {
    if s.user.journal_count as usize >= MAX_JOURNAL {
        let done = hand(s, false) == event::DONE;
        s.user.failed |= u64::from(!done);
    }
    if let Some(entry) = journal().orders.get_mut(s.user.journal_count as usize) {
        *entry = order;
        s.user.journal_count += 1;
    }
}

/// Runs user code as the frame says until it comes back; returns, with zero, only if a kick came first.
pub fn enter(f: &mut VcpuPage, s: &mut Shared) -> u64 {
    if f.run.kicked != 0 {
        return 0;
    }
    let p = page();
    show(f, p);
    f.counters.user_entries += 1;
    loop {
        if core::mem::take(&mut s.user.failed) != 0 {
            failed(s);
        }
        let event = hand(s, true);
        forget_interrupted(p);
        match event {
            event::CALL => {
                take_registers(f, p);
                run::restart(patched_call)
            }
            event::SIGNAL => run::restart(came_by_signal),
            // A kick that the monitor has heard of is over.
            event::KICKED if f.run.kicked == 0 => {}
            event::KICKED => return 0,
            event::NOTHING => {
                jumped(p);
                run::restart(came_by_signal)
            }
            _ => failed(s),
        }
    }
}

/// What user code is to run with. The vector registers are in the CPU, and stay there.
fn show(f: &VcpuPage, p: &mut UserPage) {
    p.gpr = f.regs.gpr;
    (p.rip, p.rflags) = (f.run.user_rip, f.regs.rflags);
    (p.fs_base, p.gs_base) = (canonical(f.regs.fs_base), canonical(f.regs.gs_base));
    p.selectors = [f.regs.ds, f.regs.es, f.regs.fs, f.regs.gs];
    clear_header(&mut p.vectors.0, 0);
    host::store_vectors(p.vectors.0.as_mut_ptr());
}

/// Lets the process go on, to do its orders and, with `enter`, user code, until it hands over again; why it
/// did.
fn hand(s: &mut Shared, enter: bool) -> u64 {
    if s.user.handed == 0 {
        receive(s);
    }
    loop {
        answer(s, enter);
        receive(s);
        let p = page();
        match (p.event, p.kicked) {
            // The answer has not arrived, for a kick came first: everything is still to be done.
            (event::NOTHING, 1) if enter => return event::KICKED,
            (event::NOTHING, _) if !enter => {}
            (event, _) => {
                s.user.journal_count = 0;
                return event;
            }
        }
    }
}

/// Answers the process's call.
fn answer(s: &mut Shared, enter: bool) {
    let j = journal();
    (j.enter, j.count) = (enter.into(), s.user.journal_count);
    let p = page();
    (p.kicked, p.event) = (0, event::NOTHING);
    while !send(s.user.handed, s.setup.user_secret, 0) {
        receive(s);
    }
}

/// Waits for a hand-over by the instruction that is for it. Others are no calls.
fn receive(s: &mut Shared) {
    let mut gone = 0;
    loop {
        let mut request = [0_u64; 10];
        match call(IOCTL, LISTENER_FD, NOTIFICATION_RECEIVE, request.as_mut_ptr() as u64, 0, 0) {
            0 => {
                let [id, _, number, pointer, ..] = request;
                if number & 0xffff_ffff == HAND_OVER && pointer == user::user_told() {
                    s.user.handed = id;
                    return;
                }
                send(id, 0, NO_SUCH_CALL);
            }
            INTERRUPTED => {}
            GONE if gone < MAX_GONE => gone += 1,
            _ => die(),
        }
    }
}

/// Answers a call; false if nobody waits for that any more.
fn send(id: u64, value: u64, error: u64) -> bool {
    let response = [id, value, error & 0xffff_ffff];
    loop {
        match call(IOCTL, LISTENER_FD, NOTIFICATION_SEND, response.as_ptr() as u64, 0, 0) {
            0 => return true,
            INTERRUPTED => {}
            GONE => return false,
            _ => die(),
        }
    }
}

/// The process could not do as it was told, or says so: the monitor has everything mapped anew.
fn failed(s: &mut Shared) -> ! {
    s.orders.failed = NO_MEMORY;
    turns::exit(Reason::Kicked)
}

extern "C" fn patched_call() -> ! {
    let f = frame();
    f.counters.patched_system_calls += 1;
    assist::system_call(f)
}

/// Makes a general protection fault of a hand-over that user code has jumped to.
fn jumped(p: &mut UserPage) {
    p.signal = SIGSEGV;
    p.context[TRAP] = GENERAL_PROTECTION;
}

/// What a patched call has put into the page.
fn take_registers(f: &mut VcpuPage, p: &UserPage) {
    f.regs.gpr = p.gpr;
    f.regs.rip = canonical(p.rip);
    f.regs.rflags = user_flags(p.rflags);
    take_segments(f, p);
    take_vectors(f, p);
    load_vectors(f.vectors.0.as_ptr());
}

extern "C" fn came_by_signal() -> ! {
    let (f, p) = (frame(), page());
    take_segments(f, p);
    take_vectors(f, p);
    let mut context = p.context;
    context[RIP] = canonical(context[RIP]);
    context[FLAGS] = user_flags(context[FLAGS]);
    context[SELECTOR] = if context[SELECTOR] & 0xffff == CS_32 { CS_32 } else { CS_64 };
    let number = if p.signal < 32 { p.signal } else { KICK as u64 };
    let context = Context::of(context, f.vectors.0.as_mut_ptr());
    let info = p.info;
    forget(&mut p.context);
    forget(&mut p.info);
    signal::came_back(f, number, &context, &info)
}

/// What a kick has interrupted was the running program's, and the process may be another's next.
fn forget_interrupted(p: &mut UserPage) {
    if p.back[0] != 0 {
        forget(&mut p.back);
        forget(&mut p.interrupted);
        (0..p.interrupted_vectors.0.len())
            .step_by(8)
            .for_each(|at| set_word(&mut p.interrupted_vectors.0, at, 0));
    }
}

fn forget(words: &mut [u64]) {
    for word in words {
        // SAFETY: a reference. There is no memset in the blob.
        unsafe { core::ptr::write_volatile(word, 0) };
    }
}

fn take_segments(f: &mut VcpuPage, p: &UserPage) {
    let known = |selector: u64| if SELECTORS.contains(&selector) { selector } else { 0 };
    let [ds, es, fs, gs] = p.selectors;
    (f.regs.ds, f.regs.es, f.regs.fs, f.regs.gs) = (known(ds), known(es), known(fs), known(gs));
    (f.regs.fs_base, f.regs.gs_base) = (canonical(p.fs_base), canonical(p.gs_base));
}

/// The vector registers, as an area that can be loaded.
fn take_vectors(f: &mut VcpuPage, p: &UserPage) {
    // SAFETY: copies one area to another.
    unsafe {
        asm!("rep movsq", inout("rsi") p.vectors.0.as_ptr() => _, inout("rdi") f.vectors.0.as_mut_ptr() => _,
            inout("rcx") f.vectors.0.len() / 8 => _);
    }
    let area = &mut f.vectors.0;
    let saved = word(area, HEADER) & SAVED;
    clear_header(area, saved);
    // The upper half is a mask that is not loaded.
    let mxcsr = word(area, MXCSR) & !0xffff_0000;
    set_word(area, MXCSR, mxcsr);
}

/// Says which components an XSAVE area has.
fn clear_header(area: &mut [u8; 832], saved: u64) {
    for n in 0..8 {
        set_word(area, HEADER + n * 8, if n == 0 { saved } else { 0 });
    }
}

fn word(area: &[u8; 832], at: usize) -> u64 {
    // SAFETY: callers stay inside, at multiples of eight, of an area that is aligned.
    unsafe { core::ptr::read_volatile(area.as_ptr().add(at).cast()) }
}

fn set_word(area: &mut [u8; 832], at: usize, value: u64) {
    // SAFETY: as for `word`.
    unsafe { core::ptr::write_volatile(area.as_mut_ptr().add(at).cast(), value) }
}

fn user_flags(flags: u64) -> u64 {
    flags & USER_FLAGS | IF | FIXED
}

fn canonical(address: u64) -> u64 {
    ((address as i64) << 16 >> 16) as u64
}
