//! A child under ptrace: memory, registers, single steps, breakpoints in code and in debug registers.

use super::code;
use crate::{
    asm::Asm,
    cpu,
    random::Random,
    sys::{self, *},
    trace::{digest, note},
    world::{self, PAGE, World},
};

const TRACEME: usize = 0;
const PEEKTEXT: usize = 1;
const PEEKUSER: usize = 3;
const POKETEXT: usize = 4;
const POKEUSER: usize = 6;
const CONT: usize = 7;
const PTRACE_KILL: usize = 8;
const SINGLESTEP: usize = 9;
const GETREGS: usize = 12;
const SETREGS: usize = 13;
const GETFPREGS: usize = 14;
const SETFPREGS: usize = 15;
const SYSCALL: usize = 24;
const GETSIGINFO: usize = 0x4202;
const GETREGSET: usize = 0x4204;
/// Where struct user has the debug registers.
const DEBUG: usize = 848;
/// struct user_regs_struct: RIP, flags, RSP, RAX, ORIG_RAX.
/// RFLAGS.RF. Between iterations of REP it is set on Intel's CPUs, and on AMD's only behind a fault.
const RESUME: u64 = 0x10000;
const ALIGNMENT_CHECK: u64 = 0x40000;
/// `movups [rdi], xmm0`
const MOVUPS: [u8; 3] = [0x0f, 0x11, 0x07];
const RIP: usize = 16;
const FLAGS: usize = 18;
const USER_RSP: usize = 19;
const USER_RAX: usize = 10;
const ORIG_RAX: usize = 15;

struct Tracee {
    process: isize,
    status: u32,
}

impl Tracee {
    fn ask(&self, what: usize, address: usize, data: usize) -> isize {
        sys!(PTRACE, what, self.process, address, data)
    }

    fn registers(&self) -> [u64; 27] {
        let mut registers = [0_u64; 27];
        self.ask(GETREGS, 0, registers.as_mut_ptr() as usize);
        registers
    }

    /// Lets it go on until it stops; false if it has ended.
    fn goes_on(&mut self, how: usize, signal: u32) -> bool {
        let result = self.ask(how, 0, signal as usize);
        if result < 0 {
            note!("refused {result}\n");
            return false;
        }
        self.waits()
    }

    fn waits(&mut self) -> bool {
        sys!(WAIT4, self.process, &raw mut self.status, 0x4000_0000, 0);
        self.status & 0xff == 0x7f
    }

    /// What it is doing.
    fn note(&self) {
        let r = self.registers();
        let mut info = [0_i32; 32];
        let result = self.ask(GETSIGINFO, 0, info.as_mut_ptr() as usize);
        note!(
            " {:x} rip={:x} fl={:x} rsp={:x}",
            self.status,
            r[RIP],
            r[FLAGS] & !RESUME,
            r[USER_RSP]
        );
        if r[ORIG_RAX] != u64::MAX {
            note!(" ax={:x} orig={:x}", r[USER_RAX], r[ORIG_RAX]);
        }
        note!(" info {result} {} {}", info[0], info[2]);
        // The sender's process and user are there otherwise.
        if (1..=4).contains(&info[2]) && info[0] != 17 {
            note!(" at {:x}", u64::from(info[4] as u32) | u64::from(info[5] as u32) << 32);
        }
    }
}

/// Pieces of the child's code; each but the last comes back to the next.
fn program(random: &mut Random) -> Asm {
    let pieces: [&[u8]; 16] = [
        &[0x90],
        &[0x48, 0xff, 0xc3],
        &[0x48, 0x89, 0x07],
        &[0x48, 0x8b, 0x07],
        &[0x88, 0x47, 0x03],
        &[0x9c, 0x58],
        &[0xb9, 3, 0, 0, 0, 0xf3, 0xa4],
        &[0x50, 0x58],
        &[0xe8, 0, 0, 0, 0, 0x58],
        &[0xb8, 24, 0, 0, 0, 0x0f, 0x05],
        &[0xcc],
        &[0xb8, 0xe7, 0x03, 0, 0, 0x0f, 0x05],
        &[0x0f, 0xb6, 0x47, 0x07],
        &[0x66, 0x89, 0x47, 0x06],
        &MOVUPS,
        &[0xf0, 0x48, 0xff, 0x07],
    ];
    let mut asm = Asm::new();
    (0..3 + random.below(8)).for_each(|_| {
        asm.add(random.pick(&pieces));
    });
    // mov eax, 231; xor edi, edi; syscall
    asm.add(&[0x31, 0xff]).system_call(EXIT_GROUP as u32).add(&[0x0f, 0x0b]);
    asm
}

/// Traces a child that runs a few instructions.
pub fn trace(random: &mut Random, world: &World) {
    let asm = program(random);
    world::clear_code();
    let start = world::code() + random.pick(&[0, PAGE - 9, 77]);
    world::put_code(start, asm.bytes());
    let target = code::scratch() + 256 + random.below(8);
    let mut tracee = Tracee { process: begin(start, target), status: 0 };
    let mut alive = tracee.waits();
    for _ in 0..2 + random.below(14) {
        if !alive {
            break;
        }
        alive = act(random, world, &mut tracee, start, target);
        note!("\n");
    }
    if alive {
        tracee.ask(PTRACE_KILL, 0, 0);
        sys!(KILL, tracee.process, 9);
        tracee.waits();
    }
    note!("ends {:x}\n", tracee.status);
}

/// Starts the child, which stops at once.
fn begin(start: u64, target: u64) -> isize {
    let child = sys!(FORK);
    if child != 0 {
        return child;
    }
    let default = [0_u64; 4];
    cpu::FAULTS.iter().for_each(|&signal| {
        sys!(RT_SIGACTION, signal, default.as_ptr(), 0, 8);
    });
    let limit = [0_u64; 2];
    sys!(SETRLIMIT, 4, limit.as_ptr());
    sys!(PTRACE, TRACEME, 0, 0, 0);
    sys!(KILL, sys!(GETPID), 19);
    let mut state = cpu::State::at(start);
    code::stack(&mut state);
    state.set(cpu::RDI, target);
    state.set(cpu::RSI, code::scratch());
    state.set(cpu::RCX, 3);
    cpu::run(&state, None);
    sys::exit(1)
}

/// Does one thing with the child; false if it has ended.
fn act(random: &mut Random, world: &World, tracee: &mut Tracee, start: u64, target: u64) -> bool {
    // Before the code is reached there are steps of this program's own.
    let inside = (start..start + 512).contains(&tracee.registers()[RIP]);
    if !inside {
        return arrive(tracee, start);
    }
    match random.below(12) {
        0..=3 => {
            note!("step");
            let alive = tracee.goes_on(SINGLESTEP, 0);
            if alive {
                tracee.note()
            }
            return alive;
        }
        4 => {
            note!("syscall");
            let alive = tracee.goes_on(SYSCALL, 0);
            if alive {
                tracee.note()
            }
            return alive;
        }
        5 => {
            note!("go on");
            let alive = tracee.goes_on(CONT, random.pick(&[0, 0, 0, 5]));
            if alive {
                tracee.note()
            }
            return alive;
        }
        6 => {
            let at = if random.chance(50) { world.address(random) } else { target };
            let mut word = 0_u64;
            let result = tracee.ask(PEEKTEXT, at as usize, (&raw mut word) as usize);
            note!("peek {at:x} {result} {word:x}");
        }
        7 => {
            let at = if random.chance(50) { world.address(random) } else { target };
            note!("poke {at:x} {}", tracee.ask(POKETEXT, at as usize, random.bits() as usize));
        }
        8 => breakpoint(random, tracee),
        9 => watch(random, tracee, start, target),
        10 => vectors(random, tracee),
        _ => set_registers(random, tracee, start),
    }
    true
}

/// Goes to where the child's code begins.
fn arrive(tracee: &mut Tracee, start: u64) -> bool {
    let address = tracee.ask(POKEUSER, DEBUG, start as usize);
    let control = tracee.ask(POKEUSER, DEBUG + 7 * 8, 1);
    note!("arrive {address} {control}");
    let alive = tracee.goes_on(CONT, 0);
    tracee.ask(POKEUSER, DEBUG + 7 * 8, 0);
    if alive {
        tracee.note();
    }
    alive
}

/// An INT3 in front of the child, and back.
fn breakpoint(random: &mut Random, tracee: &mut Tracee) {
    let at = tracee.registers()[RIP] as usize + random.below(3) as usize;
    let mut word = 0_u64;
    tracee.ask(PEEKTEXT, at, (&raw mut word) as usize);
    note!(
        "breakpoint {at:x} {word:x} {}",
        tracee.ask(POKETEXT, at, (word & !0xff | 0xcc) as usize)
    );
    if random.chance(60) && tracee.goes_on(CONT, 0) {
        tracee.note();
        note!(" back {}", tracee.ask(POKETEXT, at, word as usize));
        let mut registers = tracee.registers();
        if registers[RIP] == at as u64 + 1 {
            registers[RIP] = at as u64;
            note!(" {}", tracee.ask(SETREGS, 0, registers.as_ptr() as usize));
        }
    }
}

/// A debug register.
fn watch(random: &mut Random, tracee: &mut Tracee, start: u64, target: u64) {
    let number = random.below(4) as usize;
    // On execution, on writes, on reads and writes; of one, two, eight, four bytes.
    let (kind, len) = (random.pick(&[0_usize, 1, 3, 1, 3]), random.below(4) as usize);
    let at = if kind == 0 {
        start + random.below(24)
    } else {
        target & !7 | random.pick(&[0, 0, 4, 6, 3])
    };
    let address = tracee.ask(POKEUSER, DEBUG + number * 8, at as usize);
    if kind == 0 {
        let mut registers = tracee.registers();
        registers[FLAGS] &= !RESUME;
        tracee.ask(SETREGS, 0, registers.as_ptr() as usize);
    }
    let control = 1 << (2 * number) | (kind | len << 2) << (16 + 4 * number);
    let enabled = tracee.ask(POKEUSER, DEBUG + 7 * 8, control);
    note!("watch {number} {kind} {len} {at:x} {address} {enabled}");
    if random.chance(70) && tracee.goes_on(CONT, 0) {
        tracee.note();
    }
    let mut status = 0_u64;
    let result = tracee.ask(PEEKUSER, DEBUG + 6 * 8, (&raw mut status) as usize);
    note!(" dr6 {result} {status:x}");
    tracee.ask(POKEUSER, DEBUG + 6 * 8, 0);
}

/// Vector registers, in two formats.
fn vectors(random: &mut Random, tracee: &mut Tracee) {
    let mut legacy = [0_u8; 512];
    let result = tracee.ask(GETFPREGS, 0, legacy.as_mut_ptr() as usize);
    legacy[160 + random.below(256) as usize] ^= 1 << random.below(8);
    note!(
        "vectors {result} {:x} {}",
        digest(&legacy[160..416]),
        tracee.ask(SETFPREGS, 0, legacy.as_ptr() as usize)
    );
    let mut fpu = cpu::Fpu::new();
    let mut all = [0_u8; 4096];
    let vector = [all.as_mut_ptr() as usize, all.len()];
    let result = tracee.ask(GETREGSET, 0x202, vector.as_ptr() as usize);
    fpu.bytes[..cpu::FPU_LEN].copy_from_slice(&all[..cpu::FPU_LEN]);
    fpu.settle();
    note!(" {result} {:x}", digest(&fpu.bytes));
}

/// The child's code, which is this program's too, has MOVUPS.
fn stores_vectors(start: u64) -> bool {
    // SAFETY: longer than the code, and inside the image.
    let code = unsafe { core::slice::from_raw_parts(start as *const u8, 256) };
    code.windows(MOVUPS.len()).any(|bytes| bytes == MOVUPS)
}

/// General registers and flags.
fn set_registers(random: &mut Random, tracee: &mut Tracee, start: u64) {
    let mut registers = tracee.registers();
    match random.below(4) {
        // RBX, R8 to R15.
        0 => registers[random.pick(&[5_usize, 6, 7, 8, 9, 0, 1])] = random.value(),
        1 => registers[FLAGS] ^= random.bits() & 0x0dd5,
        2 => registers[FLAGS] ^= 1 << random.below(22),
        _ => {
            registers[random.pick(&[17_usize, 20, 23, 24, 21, 22])] =
                random.pick(&[0, 0x2b, 0x33, 0x1000, u64::MAX, 3])
        }
    }
    if stores_vectors(start) {
        // Makers differ in whether the alignment check is for vectors, too.
        registers[FLAGS] &= !ALIGNMENT_CHECK;
    }
    note!("set {}", tracee.ask(SETREGS, 0, registers.as_ptr() as usize));
    let r = tracee.registers();
    note!(
        " fl={:x} cs={:x} ss={:x} fs={:x} gs={:x} ds={:x}",
        // As for single steps: RF between iterations of REP.
        r[FLAGS] & !0x10000,
        r[17],
        r[20],
        r[21],
        r[22],
        r[23]
    );
}
