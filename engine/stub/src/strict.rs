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
    assist,
    context::{Context, Next, kicked},
    die,
    filter::{NOTIFICATION_RECEIVE, NOTIFICATION_SEND},
    here,
    host::{self, IOCTL, Secret, call, load_vectors},
    reach,
    signal::{self, GENERAL_PROTECTION, SIGSEGV, SignalFrame},
    user,
};
use core::{arch::asm, sync::atomic::Ordering};
use wedge_abi::{
    HAND_OVER, JOURNAL, Journal, KICK, LISTENER_FD, MAX_JOURNAL, REGIONS, Reason, USER_PAGE,
    UserPage, VcpuPage, event, region,
};
use x86::flags::{AC, DF, FIXED, ID, IF, NT, STATUS, TF};

const INTERRUPTED: i64 = -4;
const GONE: i64 = -2;
const NO_SUCH_CALL: u64 = -38_i64 as u64;
const NO_MEMORY: i64 = -12;
/// Words of `struct seccomp_notif`. `struct seccomp_notif_resp` is shorter.
const WORDS: usize = 10;
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

/// What this process shares with that of user code. That one uses it from a hand-over ([`hand`]) until it hands over
/// itself, and so nothing is lent out across one.
#[derive(Debug)]
pub struct UserSide(());

impl UserSide {
    /// There is no such process.
    #[cfg(not(freestanding))]
    pub(crate) const NONE: Self = Self(());

    /// This process's.
    ///
    /// # Safety
    /// There is no other, and the other process stands still.
    pub(crate) unsafe fn here() -> Self {
        Self(())
    }

    fn page(&mut self) -> &mut UserPage {
        // SAFETY: mapped before this process began, if user code has a process, and else nobody asks. The other process
        // stands still, and whoever has this has it alone.
        unsafe { &mut *(here(USER_PAGE) as *mut UserPage) }
    }

    fn journal(&mut self) -> &mut Journal {
        // SAFETY: as for the page.
        unsafe { &mut *(here(JOURNAL) as *mut Journal) }
    }
}

/// A kick has come.
fn is_kicked() -> bool {
    kicked().load(Ordering::Relaxed) != 0
}

/// Memory has been unmapped here, or bytes written.
pub fn have_done(cx: &mut Context<'_>, order: [u64; 6]) {
    if cx.shared.setup.user_secret != 0 {
        note(cx, order);
    }
}

/// Memory has been mapped here, or given other rights: the other process is to have what is the user's, and has nothing of the
/// kernel's.
pub fn have_changed(cx: &mut Context<'_>, order: [u64; 6]) {
    let [_, at, ..] = order;
    // SAFETY: the table has an entry for every region.
    let owner = || unsafe { crate::word(reach(REGIONS) + region(at) * 8) };
    if cx.shared.setup.user_secret != 0 && owner() == 0 {
        note(cx, order);
    }
}

fn note(cx: &mut Context<'_>, order: [u64; 6]) {
    if cx.shared.user.journal_count as usize >= MAX_JOURNAL {
        let done = hand(cx, false) == event::DONE;
        cx.shared.user.failed |= u64::from(!done);
    }
    let at = cx.shared.user.journal_count as usize;
    if let Some(entry) = cx.user.journal().orders.get_mut(at) {
        *entry = order;
        cx.shared.user.journal_count += 1;
    }
}

/// Runs user code as the vCPU page says until it comes back, or a kick comes first.
pub fn enter(cx: &mut Context<'_>) -> Next {
    if is_kicked() {
        return Next::Exit(Reason::Kicked);
    }
    show(cx.vcpu, cx.user.page());
    cx.vcpu.counters.user_entries += 1;
    loop {
        if core::mem::take(&mut cx.shared.user.failed) != 0 {
            return failed(cx);
        }
        let event = hand(cx, true);
        forget_interrupted(cx.user.page());
        return match event {
            event::CALL => patched_call(cx),
            event::SIGNAL => came_by_signal(cx),
            // A kick that the monitor has heard of is over.
            event::KICKED if !is_kicked() => continue,
            event::KICKED => Next::Exit(Reason::Kicked),
            event::NOTHING => {
                jumped(cx.user.page());
                came_by_signal(cx)
            }
            _ => failed(cx),
        };
    }
}

/// What user code is to run with. The vector registers are in the CPU, and stay there.
fn show(vcpu: &VcpuPage, p: &mut UserPage) {
    p.gpr = vcpu.regs.gpr;
    (p.rip, p.rflags) = (vcpu.run.user_rip, vcpu.regs.rflags);
    (p.fs_base, p.gs_base) = (canonical(vcpu.regs.fs_base), canonical(vcpu.regs.gs_base));
    p.selectors = [vcpu.regs.ds, vcpu.regs.es, vcpu.regs.fs, vcpu.regs.gs];
    clear_header(&mut p.vectors.0, 0);
    // SAFETY: the area is made for that.
    unsafe { host::store_vectors(p.vectors.0.as_mut_ptr()) };
}

/// Lets the process go on, to do its orders and, with `enter`, user code, until it hands over again; why it
/// did.
fn hand(cx: &mut Context<'_>, enter: bool) -> u64 {
    if cx.shared.user.handed == 0 {
        receive(cx);
    }
    loop {
        answer(cx, enter);
        receive(cx);
        let p = cx.user.page();
        match (p.event, p.kicked) {
            // The answer has not arrived, for a kick came first: everything is still to be done.
            (event::NOTHING, 1) if enter => return event::KICKED,
            (event::NOTHING, _) if !enter => {}
            (event, _) => {
                cx.shared.user.journal_count = 0;
                return event;
            }
        }
    }
}

/// Answers the process's call.
fn answer(cx: &mut Context<'_>, enter: bool) {
    let j = cx.user.journal();
    (j.enter, j.count) = (enter.into(), cx.shared.user.journal_count);
    let p = cx.user.page();
    (p.kicked, p.event) = (0, event::NOTHING);
    while !send(cx.secret(), cx.shared.user.handed, cx.shared.setup.user_secret, 0) {
        receive(cx);
    }
}

/// Waits for a hand-over by the instruction that is for it. Others are no calls.
fn receive(cx: &mut Context<'_>) {
    let secret = cx.secret();
    let mut gone = 0;
    loop {
        let mut request = [0_u64; WORDS];
        match ask(secret, NOTIFICATION_RECEIVE, &mut request) {
            0 => {
                let [id, _, number, pointer, ..] = request;
                if number & 0xffff_ffff == HAND_OVER && pointer == user::user_told() {
                    cx.shared.user.handed = id;
                    return;
                }
                send(secret, id, 0, NO_SUCH_CALL);
            }
            INTERRUPTED => {}
            GONE if gone < MAX_GONE => gone += 1,
            _ => die(),
        }
    }
}

/// Answers a call; false if nobody waits for that any more.
fn send(secret: Secret, id: u64, value: u64, error: u64) -> bool {
    let mut response = [id, value, error & 0xffff_ffff, 0, 0, 0, 0, 0, 0, 0];
    loop {
        match ask(secret, NOTIFICATION_SEND, &mut response) {
            0 => return true,
            INTERRUPTED => {}
            GONE => return false,
            _ => die(),
        }
    }
}

/// Receives a hand-over, or answers one; the list has room for either's structure.
fn ask(secret: Secret, request: u64, about: &mut [u64; WORDS]) -> i64 {
    // SAFETY: the structure is in the list, which lives until the call is over.
    unsafe { call(secret, [IOCTL, LISTENER_FD, request, about.as_mut_ptr() as u64, 0, 0]) }
}

/// The process could not do as it was told, or says so: the monitor has everything mapped anew.
fn failed(cx: &mut Context<'_>) -> Next {
    cx.shared.orders.failed = NO_MEMORY;
    Next::Exit(Reason::Kicked)
}

fn patched_call(cx: &mut Context<'_>) -> Next {
    take_registers(cx.vcpu, cx.user.page());
    load_vectors(cx.secret(), cx.vcpu.vectors.0.as_ptr());
    cx.vcpu.counters.patched_system_calls += 1;
    assist::system_call(cx)
}

/// Makes a general protection fault of a hand-over that user code has jumped to.
fn jumped(p: &mut UserPage) {
    p.signal = SIGSEGV;
    p.context[TRAP] = GENERAL_PROTECTION;
}

/// What a patched call has put into the page.
fn take_registers(vcpu: &mut VcpuPage, p: &UserPage) {
    vcpu.regs.gpr = p.gpr;
    vcpu.regs.rip = canonical(p.rip);
    vcpu.regs.rflags = user_flags(p.rflags);
    take_segments(vcpu, p);
    take_vectors(vcpu, p);
}

fn came_by_signal(cx: &mut Context<'_>) -> Next {
    let p = cx.user.page();
    take_segments(cx.vcpu, p);
    take_vectors(cx.vcpu, p);
    let mut context = p.context;
    context[RIP] = canonical(context[RIP]);
    context[FLAGS] = user_flags(context[FLAGS]);
    context[SELECTOR] = if context[SELECTOR] & 0xffff == CS_32 { CS_32 } else { CS_64 };
    let number = if p.signal < 32 { p.signal } else { KICK as u64 };
    let context = SignalFrame::of(context, cx.vcpu.vectors.0.as_mut_ptr());
    let info = p.info;
    forget(&mut p.context);
    forget(&mut p.info);
    signal::came_back(cx, number, &context, &info)(cx)
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

fn take_segments(vcpu: &mut VcpuPage, p: &UserPage) {
    let known = |selector: u64| if SELECTORS.contains(&selector) { selector } else { 0 };
    let [ds, es, fs, gs] = p.selectors;
    (vcpu.regs.ds, vcpu.regs.es, vcpu.regs.fs, vcpu.regs.gs) =
        (known(ds), known(es), known(fs), known(gs));
    (vcpu.regs.fs_base, vcpu.regs.gs_base) = (canonical(p.fs_base), canonical(p.gs_base));
}

/// The vector registers, as an area that can be loaded.
fn take_vectors(vcpu: &mut VcpuPage, p: &UserPage) {
    // SAFETY: copies one area to another.
    unsafe {
        asm!("rep movsq", inout("rsi") p.vectors.0.as_ptr() => _, inout("rdi") vcpu.vectors.0.as_mut_ptr() => _,
            inout("rcx") vcpu.vectors.0.len() / 8 => _);
    }
    let area = &mut vcpu.vectors.0;
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

/// Words of an area, by where they begin: multiples of eight inside it.
fn word(area: &[u8; 832], at: usize) -> u64 {
    // SAFETY: inside the area.
    unsafe { core::ptr::read_volatile(area.as_ptr().add(place(at)).cast()) }
}

fn set_word(area: &mut [u8; 832], at: usize, value: u64) {
    // SAFETY: inside the area.
    unsafe { core::ptr::write_volatile(area.as_mut_ptr().add(place(at)).cast(), value) }
}

/// Where a word begins, if it is one.
fn place(at: usize) -> usize {
    if at > 832 - size_of::<u64>() || !at.is_multiple_of(size_of::<u64>()) {
        die();
    }
    at
}

fn user_flags(flags: u64) -> u64 {
    flags & USER_FLAGS | IF | FIXED
}

fn canonical(address: u64) -> u64 {
    ((address as i64) << 16 >> 16) as u64
}
