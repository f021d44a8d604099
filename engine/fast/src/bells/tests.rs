use super::*;
use crate::{
    Fast, Modes, Options,
    test_machine::{MODES, QuietApic, board_with, kernel_state, map},
};
use bus::{Bus, Device};
use engine::{Engine, VcpuRequests};
use iced_x86::{IcedError, code_asm::*};
use ram::Ram;
use std::{
    fs::File,
    os::unix::fs::FileExt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};
use x86::{TableRegister, seg};
use x86_interp::{Exit, GuestRam};

const CODE: (u64, u64) = (0xffff_ffff_8100_0000, 0x4_0000);
const DATA: (u64, u64) = (0xffff_ffff_8200_0000, 0x5_0000);
const STACK: (u64, u64) = (0xffff_ffff_8200_1000, 0x5_1000);
/// There is no RAM.
const DEVICE: (u64, u64) = (0xffff_ffff_8300_0000, 0xfe00_0000);
/// Enough for the host to give the server a CPU of its own meanwhile.
const TIMES: u32 = 10_000;
/// Offsets in the kernel's data: interrupts taken, the byte that tells their end, requests offered and given back, and tables.
const TAKEN: u64 = 0x10;
const END: u64 = 0x20;
const OFFERED: u64 = 0x30;
const USED: u64 = 0x32;
const IDT: u64 = 0x400;
const GDT: u64 = 0x800;
const KERNEL_CS: u16 = 0x10;
const VECTOR: u8 = 0x31;
const QUEUE: usize = 1;

/// One guest at a time: each has a server that looks.
static ALONE: Mutex<()> = Mutex::new(());

/// How the kernel rings.
#[derive(Clone, Copy)]
struct Ringer {
    /// With interrupts enabled.
    open: bool,
    /// Its handler tells the end of an interrupt by the byte.
    ends: bool,
}
const USUAL: Ringer = Ringer { open: true, ends: true };

/// Rings so often. RBX counts what was done behind each ring.
fn kernel(ringer: Ringer) -> Result<Vec<u8>, IcedError> {
    let mut a = CodeAssembler::new(64)?;
    let (mut one, mut handler, mut skip) = (a.create_label(), a.create_label(), a.create_label());
    a.jmp(skip)?;
    a.set_label(&mut handler)?;
    a.push(rax)?;
    a.mov(rax, DATA.0)?;
    a.inc(dword_ptr(rax + TAKEN))?;
    if ringer.ends {
        a.mov(byte_ptr(rax + END), 0)?;
    }
    a.pop(rax)?;
    a.iretq()?;
    a.set_label(&mut skip)?;
    a.mov(rax, DATA.0)?;
    a.mov(byte_ptr(rax + END), 0)?;
    // The stack is mapped now.
    a.push(rax)?;
    a.pop(rax)?;
    if ringer.open {
        a.sti()?;
    }
    a.mov(rsi, DEVICE.0)?;
    a.mov(ecx, TIMES)?;
    a.set_label(&mut one)?;
    a.mov(word_ptr(rsi + 4), di)?;
    a.inc(ebx)?;
    a.dec(ecx)?;
    a.jne(one)?;
    a.cli()?;
    a.hlt()?;
    a.assemble(CODE.0)
}

/// What waits, in the order of the kernel's code: behind its first jump.
const HANDLER: u64 = CODE.0 + 2;

/// Counts what reaches it.
struct Rung {
    bell: bus::Bell,
    stores: Arc<AtomicU32>,
}

impl Device for Rung {
    fn read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(0);
    }
    fn write(&mut self, _: u64, _: &[u8]) {
        self.stores.fetch_add(1, Ordering::SeqCst);
    }
    fn bell(&mut self, offset: u64) -> Option<bus::Bell> {
        (offset == 4).then_some(self.bell)
    }
}

/// A word of the device's page, by the memory object.
struct Word(File, u64);

impl Word {
    fn get(&self) -> u32 {
        let mut bytes = [0; 4];
        self.0.read_exact_at(&mut bytes, self.1).expect("it is there");
        u32::from_ne_bytes(bytes)
    }
    fn set(&self, value: u32) {
        self.0.write_all_at(&value.to_ne_bytes(), self.1).expect("it is there");
    }
}

struct Machine {
    _alone: MutexGuard<'static, ()>,
    fast: Fast,
    stores: Arc<AtomicU32>,
    apic: Arc<QuietApic>,
    server: Server,
}

/// What a server does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Serving {
    Sleeps,
    /// It says that it looks, and answers nothing.
    IsDeaf,
    Answers,
    /// It says that nobody is to be told.
    Hushes,
    /// The server has answered, and another vCPU is about to take the answer.
    AnswersAnother,
}

/// Says something to whoever waits for an answer, while it has something to say.
struct Server {
    watched: Word,
    queue: Word,
    says: Arc<AtomicU32>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn new(watched: Word, queue: impl Fn() -> Word) -> Self {
        let (says, over): (Arc<AtomicU32>, Arc<AtomicBool>) = Default::default();
        let (said, is_over) = (Arc::clone(&says), Arc::clone(&over));
        let (queue, served) = (queue(), queue());
        let serve = move || {
            while !is_over.load(Ordering::Relaxed) {
                match said.load(Ordering::Relaxed) {
                    0 => thread::sleep(Duration::from_millis(1)),
                    said if served.get() == words::LOOKING => served.set(said),
                    _ => {}
                }
            }
        };
        Self { watched, queue, says, over, thread: Some(thread::spawn(serve)) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.thread.take().into_iter().for_each(|thread| thread.join().expect("ended"));
    }
}

fn memory(ringer: Ringer) -> Ram {
    let ram = Ram::new(2 << 20).expect("memory");
    map(&ram, &[(CODE, 0), (DATA, 0), (STACK, 0), (DEVICE, 0)]);
    ram.write(CODE.1, &kernel(ringer).expect("encodable"));
    ram.store64(DATA.1 + GDT + u64::from(KERNEL_CS), 0x00af_9a00_0000_ffff);
    ram.store64(DATA.1 + GDT + u64::from(KERNEL_CS) + 8, 0x00cf_9200_0000_ffff);
    let gate = DATA.1 + IDT + u64::from(VECTOR) * 16;
    let low = HANDLER & 0xffff | u64::from(KERNEL_CS) << 16 | 0x8e << 40;
    ram.store64(gate, low | (HANDLER >> 16 & 0xffff) << 48);
    ram.store64(gate + 8, HANDLER >> 32);
    // One request is awaited.
    ram.write(DATA.1 + OFFERED, &[5, 0, 4, 0]);
    ram
}

fn machine(ringer: Ringer, above: u8, options: Options) -> Machine {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let ram = memory(ringer);
    let page = ram.take_words().expect("a page");
    let file = || {
        let object = ram.object().descriptor().expect("a descriptor");
        File::from(object.try_clone_to_owned().expect("another"))
    };
    let word = |number: usize| Word(file(), page + (number * words::STEP) as u64);
    // Before the engine: it chooses a CPU for this thread.
    let server = Server::new(word(words::WATCHED), || word(words::FIRST_QUEUE + QUEUE));
    let (offered, used) = (DATA.1 + OFFERED, DATA.1 + USED);
    let message = (0xfee0_0000, VECTOR.into());
    let bell = bus::Bell { words: page, queue: QUEUE, offered, used, message };
    let stores = Arc::new(AtomicU32::new(0));
    let device = Arc::new(Mutex::new(Rung { bell, stores: Arc::clone(&stores) }));
    let mut mmio = Bus::new();
    mmio.insert(DEVICE.1, 0x1000, device).expect("room");
    let apic = Arc::new(QuietApic { direct: Some((DATA.1 + END, above)), ..QuietApic::default() });
    let requests = Arc::new(VcpuRequests::default());
    let board = board_with(ram, Arc::clone(&requests), Arc::clone(&apic) as _, mmio);
    let mut start = kernel_state(CODE.0, STACK.0 + 0x800);
    (start.seg[seg::CS].selector, start.seg[seg::SS].selector) = (KERNEL_CS, KERNEL_CS + 8);
    start.gdtr = TableRegister { base: DATA.0 + GDT, limit: 0x3f, ..Default::default() };
    start.idtr = TableRegister { base: DATA.0 + IDT, limit: 0x3ff, ..Default::default() };
    let owners = (&crate::Machine::new(1), &crate::Placement::default());
    let modes = Modes { options, ..MODES };
    let fast = Fast::new(start, board, &requests, modes, owners).expect("an engine");
    Machine { _alone, fast, stores, apic, server }
}

impl Machine {
    /// Runs the guest to its end, beside a server. Returns how many interrupts the guest has taken, and how many stores have reached the
    /// device. All others were rung by wedges.
    fn run(&mut self, serving: Serving) -> (u32, u32) {
        let says = match serving {
            Serving::Answers => words::ANSWERED,
            Serving::Hushes => words::SILENT,
            _ => 0,
        };
        self.server.says.store(says, Ordering::Relaxed);
        self.server.watched.set((serving != Serving::Sleeps).into());
        if serving == Serving::AnswersAnother {
            self.server.queue.set(words::ANSWERED);
        }
        let ended = self.fast.run(u64::MAX);
        self.server.says.store(0, Ordering::Relaxed);
        assert_eq!(ended, Exit::Halted, "{:?}", self.fast.failure());
        assert_eq!(self.fast.vcpu().gpr[x86::reg::RBX], u64::from(TIMES), "each ring was one");
        assert_eq!(self.fast.vcpu().gpr[x86::reg::RSP], STACK.0 + 0x800);
        let taken = self.fast.ram().load64(DATA.1 + TAKEN) as u32;
        assert_eq!(self.fast.pages.vcpu_page().counters.interrupts, u64::from(taken));
        let told = self.apic.took.lock().expect("no panic");
        assert!(told.iter().all(|vector| *vector == VECTOR));
        assert_eq!(told.is_empty(), taken == 0, "the local APIC hears of it");
        let stores = self.stores.load(Ordering::SeqCst);
        let rung = self.fast.pages.vcpu_page().counters.rung as u32;
        assert_eq!((rung + stores) % TIMES, 0, "{rung} and {stores}: each once");
        (taken, stores)
    }
}

/// What a machine comes to. On a thread of its own, since engines bind their threads to a CPU, and servers must be elsewhere.
fn comes_to(ringer: Ringer, above: u8, options: Options, serving: Serving) -> (u32, u32) {
    let run = move || machine(ringer, above, options).run(serving);
    thread::spawn(run).join().expect("it ends")
}

/// What a machine with a server comes to at last: the host may leave that no CPU for a while.
fn comes_at_last(ringer: Ringer, is_it: impl Fn(u32, u32) -> bool) {
    let tries = (0..20).map(|_| comes_to(ringer, 1, MODES.options, Serving::Answers));
    let mut seen = Vec::new();
    let found = tries.inspect(|found| seen.push(*found)).any(|found| is_it(found.0, found.1));
    assert!(found, "{seen:?}");
}

#[test]
fn a_wedge_rings_and_takes_the_interrupts_of_answers() {
    comes_at_last(USUAL, |taken, stores| taken > TIMES / 2 && stores < TIMES / 2);
}

#[test]
fn what_is_not_ordinary_is_the_monitors() {
    let closed = Ringer { open: false, ..USUAL };
    let off = Options { leave_bells: true, ..MODES.options };
    for (what, (ringer, above, options), serving) in [
        ("the server sleeps", (USUAL, 1, MODES.options), Serving::Sleeps),
        ("interrupts are disabled", (closed, 1, MODES.options), Serving::Answers),
        ("the class is closed", (USUAL, 3, MODES.options), Serving::Answers),
        ("it is turned off", (USUAL, 1, off), Serving::Answers),
    ] {
        assert_eq!(comes_to(ringer, above, options, serving), (0, TIMES), "{what}");
    }
    let endless = Ringer { ends: false, ..USUAL };
    // The end of the first is not told.
    comes_at_last(endless, |taken, stores| {
        assert!(taken < 2, "{taken} interrupts");
        taken == 1 && stores > TIMES / 2
    });
}

#[test]
fn a_wedge_goes_on_when_the_server_says_that_nobody_is_to_be_told() {
    // A wedge that is not told waits for its patience each time, and has the monitor ring after that.
    let is_it = |(taken, stores): (u32, u32)| taken == 0 && stores < TIMES / 4;
    let found = (0..20).any(|_| is_it(comes_to(USUAL, 1, MODES.options, Serving::Hushes)));
    assert!(found);
}

#[test]
fn a_wedge_leaves_an_answer_to_another_vcpu_that_waits_for_it() {
    let mut machine = machine(USUAL, 1, MODES.options);
    let (taken, stores) = machine.run(Serving::AnswersAnother);
    assert_eq!(taken, 0);
    assert!(stores < TIMES / 2, "{stores} rung by the monitor");
    assert_eq!(machine.server.queue.get(), words::ANSWERED, "it is there still");
}

/// It knows where the server should be.
#[test]
fn after_an_answer_that_is_late_the_monitor_rings() {
    let (taken, stores) = comes_to(USUAL, 1, MODES.options, Serving::IsDeaf);
    assert_eq!(taken, 0);
    assert!((TIMES / 2..TIMES / 2 + 50).contains(&stores), "{stores} of {TIMES}");
}

#[test]
fn a_doorbell_that_may_have_changed_is_rung_by_the_monitor() {
    let mut machine = machine(USUAL, 1, MODES.options);
    let (_, before) = machine.run(Serving::Answers);
    let (start, ram) = (kernel_state(CODE.0, STACK.0 + 0x800), machine.fast.board.ram().clone());
    let mut again = machine.fast.vcpu().clone();
    (again.rip, again.gpr) = (CODE.0, start.gpr);
    machine.fast.set_vcpu(again);
    machine.fast.unhalt();
    ram.change_bells();
    let (_, stores) = machine.run(Serving::Answers);
    assert!(stores > before, "at least the first");
    let told = machine.fast.pages.vcpu_page().told.bells;
    assert_eq!(told.epoch, ram.bells_epoch(), "and then it is known anew");
    assert_eq!((told.bells[0].gpa, told.bells[1].gpa), (DEVICE.1 + 4, 0));
}

#[test]
fn only_plain_stores_of_16_bits_ring() {
    let ram = memory(USUAL);
    let requests = Arc::new(VcpuRequests::default());
    let board = crate::test_machine::board(ram.clone(), requests);
    let vcpu = kernel_state(CODE.0, STACK.0);
    let ring_of = |assemble: fn(&mut CodeAssembler) -> Result<(), IcedError>| {
        let mut a = CodeAssembler::new(64).expect("64 bits");
        assemble(&mut a).expect("an instruction");
        ram.write(CODE.1, &a.assemble(CODE.0).expect("encodable"));
        ring(&board, &vcpu, CODE.0)
    };
    let plain = Ring { rip: CODE.0, len: 4, base: 6, displacement: 4 };
    assert_eq!(ring_of(|a| a.mov(word_ptr(rsi + 4), di)), Some(plain));
    let below = ring_of(|a| a.mov(word_ptr(r12 - 2), ax)).expect("it rings");
    assert_eq!((below.base, below.displacement), (12, 2_u64.wrapping_neg()));
    assert_eq!(ring_of(|a| a.mov(dword_ptr(rsi), edi)), None);
    assert_eq!(ring_of(|a| a.mov(di, word_ptr(rsi))), None);
    assert_eq!(ring_of(|a| a.mov(word_ptr(rsi + rax), di)), None);
    assert_eq!(ring_of(|a| a.mov(word_ptr(rsi).gs(), di)), None);
    assert_eq!(ring_of(|a| a.mov(word_ptr(0x1000), di)), None);
    assert_eq!(ring_of(|a| a.lock().add(word_ptr(rsi), di)), None);
}
