//! Code that runs on any registers, anywhere.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::{
    asm::Asm,
    cpu::{self, Open, RCX, RDI, RSI, RSP, STATUS, State, Stop},
    random::Random,
    sys::{self, MMAP, MPROTECT, PWRITE, sys},
    trace::{digest, note},
    world::{self, PAGE, World},
};

const ADD_1000_RDI_READ: [u8; 10] = [0x48, 0x8b, 0x07, 0xf3, 0xa4, 0x0f, 0x0b, 0x90, 0x90, 0x90];

/// The digest of a page, or the signal that reading it raised.
pub fn read_page(page: u64) -> Result<u64, (i32, i32)> {
    // mov rax, [rdi]; rep movsb; ud2: from RSI to RDI.
    static mut COPY: [u8; PAGE as usize] = [0; PAGE as usize];
    world::put_code(world::code(), &ADD_1000_RDI_READ);
    let mut state = State::at(world::code());
    state.set(RSI, page);
    state.set(RDI, (&raw mut COPY) as u64);
    state.set(RCX, PAGE);
    let stop = cpu::run(&state, None);
    if stop.signal != 4 {
        return Err((stop.signal, stop.code));
    }
    // SAFETY: nothing refers to it but this function, which is not entered twice.
    Ok(digest(unsafe { &*(&raw const COPY) }))
}

/// Registers that mostly point to places.
pub fn registers(random: &mut Random, world: &World, state: &mut State) {
    for register in 0..16 {
        let value = match random.below(10) {
            0 => random.value(),
            1 => random.below(64),
            _ => world.address(random),
        };
        state.set(register, value);
    }
    let most = if random.chance(80) { 70 } else { 6000 };
    state.set(RCX, random.below(most));
    if random.chance(10) {
        state.set(RCX, random.value());
    }
    let (fs, gs) = (random.below(64), world.address(random));
    (state.fs_base, state.gs_base) = (fs, if random.chance(50) { gs } else { 0 });
    state.context.eflags =
        0x202 | random.bits() & 0x8d5 | if random.chance(10) { 0x400 } else { 0 };
    vectors(random, state);
}

/// Vector and x87 registers of any content.
pub fn vectors(random: &mut Random, state: &mut State) {
    for at in (160..416).chain(576..832) {
        state.fpu.bytes[at] = random.bits() as u8;
    }
    if random.chance(30) {
        state.fpu.bytes[4] = random.bits() as u8;
        (0..8).for_each(|i| {
            (0..10).for_each(|j| state.fpu.bytes[32 + 16 * i + j] = random.bits() as u8)
        });
    }
}

/// Where code is put: in the image or at a place, at any distance from a page's end.
pub fn put(random: &mut Random, world: &World, bytes: &[u8]) -> u64 {
    let len = bytes.len() as u64;
    let offset = match random.below(4) {
        0 => PAGE - random.below(len.min(32)),
        1 => random.below(2 * PAGE - len),
        _ => 0,
    };
    if random.chance(50) {
        world::clear_code();
        let at = world::code() + offset;
        world::put_code(at, bytes);
        return at;
    }
    let page = world.page(random);
    // Not 4, execute only: see `PROTECTIONS` in `memory.rs`.
    let bits = random.pick(&[5_u64, 7, 5, 7]);
    let mapped = if random.chance(85) { 2 } else { 1 };
    let flags = sys::MAP_PRIVATE | sys::MAP_FIXED | sys::MAP_ANONYMOUS;
    if sys!(MMAP, page, mapped * PAGE, 3, flags, usize::MAX, 0) < 0 {
        world::clear_code();
        world::put_code(world::code(), bytes);
        return world::code();
    }
    let fill = [0x0f_u8, 0x0b];
    for at in 0..mapped * PAGE / 2 {
        // SAFETY: the pages have just been mapped.
        unsafe { ((page + 2 * at) as *mut [u8; 2]).write(fill) };
    }
    let count = len.min((mapped * PAGE).saturating_sub(offset));
    if random.chance(50) {
        world::put_code(page + offset, &bytes[..count as usize]);
        sys!(MPROTECT, page, mapped * PAGE, bits);
    } else {
        sys!(MPROTECT, page, mapped * PAGE, bits);
        sys!(PWRITE, world.memory, bytes.as_ptr(), count, page + offset);
    }
    note!("code {:x} {mapped} {bits} ", page + offset);
    page + offset
}

/// Code in the image, whatever comes behind it being UD2.
pub fn put_low(bytes: &[u8]) -> u64 {
    world::clear_code();
    world::put_code(world::code(), bytes);
    world::code()
}

static LEFT: AtomicU32 = AtomicU32::new(0);
/// Flags that [`each_step`] does not note.
static UNNOTED: AtomicU64 = AtomicU64::new(0);

/// RFLAGS.AF, which shifts leave undefined: CPUs and the interpreter, which runs code that is single-stepped or written,
/// differ.
const AUXILIARY: u64 = 0x10;
/// RFLAGS.RF: between iterations of REP it is set on Intel's CPUs, and on AMD's only behind a fault.
const RESUME: u64 = 0x10000;
const GENERAL_PROTECTION: u64 = 13;
const PAGE_FAULT: u64 = 14;
/// In a page fault's error code: of an instruction.
const FETCH: u64 = 16;

/// Pages below are such as hosts map for nobody: engines interpret what uses them.
const LOWEST: u64 = 0x1_0000;
/// [`mend`] has mapped such a page.
static LOW: AtomicBool = AtomicBool::new(false);

/// Maps what was missing, a few times.
fn mend(stop: &mut Stop) -> bool {
    let wanted = stop.signal == 11 && stop.context.trap == 14 && stop.context.error & 16 == 0;
    if !wanted || LEFT.fetch_sub(1, Ordering::Relaxed) == 0 {
        LEFT.store(0, Ordering::Relaxed);
        return false;
    }
    stop.note_signal();
    let page = stop.address & !(PAGE - 1);
    LOW.fetch_or(page < LOWEST, Ordering::Relaxed);
    let result = if stop.code == 2 {
        sys!(MPROTECT, page, PAGE, 7)
    } else {
        let flags = sys::MAP_PRIVATE | sys::MAP_FIXED | sys::MAP_ANONYMOUS;
        sys!(MMAP, page, PAGE, 3, flags, usize::MAX, 0)
    };
    note!(" mended {page:x} = {result:x}\n");
    result >= 0
}

/// Instructions that use memory.
pub fn exec(random: &mut Random, world: &World) {
    let mut asm = Asm::new();
    (0..1 + random.below(8)).for_each(|_| {
        asm.memory(random);
    });
    asm.add(&[0x0f, 0x0b]);
    let mut state = State::at(put(random, world, asm.bytes()));
    registers(random, world, &mut state);
    LEFT.store(random.below(5) as u32, Ordering::Relaxed);
    LOW.store(false, Ordering::Relaxed);
    let hook: Option<cpu::Hook> = if random.chance(50) { Some(mend) } else { None };
    let mut stop = cpu::run(&state, hook);
    // What is interpreted has its own values of flags that are not defined, and finds another byte of a page first.
    let low = LOW.load(Ordering::Relaxed);
    if low {
        stop.address &= !(PAGE - 1);
        stop.context.cr2 &= !(PAGE - 1);
    }
    stop.note(Open { flags: if low { STATUS } else { AUXILIARY }, ..Open::default() });
    if stop.context.trap == GENERAL_PROTECTION {
        // A call to where there are no addresses: makers differ in whether they store where it would have returned to.
        let nothing = 0_u64;
        sys!(PWRITE, world.memory, &raw const nothing, 8, stop.context.registers[RSP].wrapping_sub(8));
    }
}

/// Accesses of all sizes with the alignment check on.
pub fn align(random: &mut Random, world: &World) {
    let pieces: [&[u8]; 9] = [
        &[0x8b, 0x07],
        &[0x48, 0x8b, 0x07],
        &[0x66, 0x8b, 0x07],
        &[0x8a, 0x07],
        &[0x89, 0x07],
        &[0x48, 0x01, 0x07],
        &[0xf0, 0x0f, 0xc1, 0x07],
        &[0xff, 0x07],
        &[0x0f, 0xb7, 0x07],
    ];
    let mut asm = Asm::new();
    (0..1 + random.below(4)).for_each(|_| {
        asm.add(random.pick(&pieces));
    });
    asm.add(&[0x0f, 0x0b]);
    let mut state = State::at(put(random, world, asm.bytes()));
    registers(random, world, &mut state);
    state.set(RDI, scratch() + 64 + random.below(16));
    state.context.eflags |= 0x40000;
    cpu::run(&state, None).note(Open::default());
}

/// What a CPU refuses, or does otherwise than to go on.
const REFUSED: [&[u8]; 74] = [
    &[0x0f, 0x0b],
    &[0x0f, 0xff, 0xc0],
    &[0x0f, 0xb9, 0xc0],
    &[0xf4],
    &[0xfa],
    &[0xfb],
    &[0xe4, 0x10],
    &[0xec],
    &[0xee],
    &[0xe7, 0x80],
    &[0x6c],
    &[0x6e],
    &[0xf3, 0x6d],
    &[0x0f, 0x32],
    &[0x0f, 0x30],
    &[0x0f, 0x20, 0xc0],
    &[0x0f, 0x22, 0xd8],
    &[0x0f, 0x22, 0xc0],
    &[0x0f, 0x21, 0xf8],
    &[0x0f, 0x23, 0xf8],
    &[0x0f, 0x06],
    &[0x0f, 0x08],
    &[0x0f, 0x09],
    &[0x0f, 0x01, 0x10],
    &[0x0f, 0x01, 0x18],
    &[0x0f, 0x00, 0xd8],
    &[0x0f, 0x00, 0xd0],
    &[0x0f, 0x01, 0x38],
    &[0x0f, 0x01, 0xf8],
    &[0x0f, 0x07],
    &[0x0f, 0x35],
    &[0x0f, 0x33],
    &[0x0f, 0x01, 0xd1],
    &[0xcc],
    &[0xce],
    &[0x06],
    &[0x9a],
    &[0x82, 0xc0, 1],
    &[0xd6],
    &[0x60],
    &[0x27],
    &[0xf0, 0x90],
    &[0xf0, 0x89, 0xc8],
    &[0xf0, 0xff, 0x30],
    &[0xc5, 0xfc, 0xff],
    // Nothing that is undefined by its first bytes: at a page's end makers differ in whether they look further.
    &[0xf0, 0x0f, 0x1f, 0xc0],
    &[0x48, 0x31, 0xc9, 0x48, 0xf7, 0xf9],
    &[0x31, 0xc9, 0xf6, 0xf1],
    &[0x31, 0xd2, 0xb9, 1, 0, 0, 0, 0x48, 0xf7, 0xf1],
    &[0xb8, 0, 0, 0, 0x80, 0x99, 0x83, 0xc9, 0xff, 0xf7, 0xf9],
    &[0xff, 0xe0],
    &[0xff, 0xd0],
    &[0x50, 0xc3],
    &[0x48, 0xcf],
    &[0xcf],
    &[0x48, 0xcb],
    &[0xcb],
    &[0xca, 8, 0],
    &[0xff, 0x28],
    &[0x48, 0xff, 0x28],
    &[0xff, 0x18],
    &[0x31, 0xc0, 0x8e, 0xd0],
    &[0x8e, 0xd8],
    &[0x8e, 0xe0],
    &[0x8e, 0xe8],
    &[0x8e, 0xc0],
    &[0x8e, 0xd0],
    &[0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x90],
    &[
        0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x66, 0x66,
        0x90,
    ],
    &[0x0f, 0x05],
    &[0xcd, 0x80],
    &[0x9d],
    &[0xd9, 0x1c, 0x24, 0x9b],
    &[0x0f, 0xae, 0x10],
];

/// An instruction that the CPU refuses, among some that it does not.
pub fn refuse(random: &mut Random, world: &World) {
    let mut asm = Asm::new();
    let nops: [&[u8]; 5] =
        [&[0x90], &[0x48, 0xff, 0xc3], &[0x0f, 0x1f, 0x44, 0, 0], &[0xfd], &[0xfc]];
    (0..random.below(4)).for_each(|_| {
        asm.add(random.pick(&nops));
    });
    asm.add(random.pick(&REFUSED)).add(&[0x0f, 0x0b]);
    let mut state = State::at(put(random, world, asm.bytes()));
    registers(random, world, &mut state);
    if random.chance(40) {
        let odd =
            random.pick(&[0x23, 0x2b, 0x33, 3, 0, 0x53, 0x7b, 0x1000, 0x8000_0000_0000, 0xfff8, 7]);
        // Intel's CPUs store where a CALL to no address would have returned to, AMD's do not.
        let calls = asm.bytes().windows(2).any(|two| two == [0xff, 0xd0]);
        state.set(cpu::RAX, if calls { odd & 0xffff } else { odd });
    }
    // No system call by chance but those that do not exist.
    let bytes = asm.bytes();
    if bytes.windows(2).any(|two| two == [0x0f, 0x05] || two == [0xcd, 0x80]) {
        state.set(cpu::RAX, random.pick(&[1000, 0xffff_ffff, 2000]));
    }
    let mut stop = cpu::run(&state, None);
    // Makers read the words of an IRET's stack in another order, and an engine may interpret any instruction.
    if bytes.contains(&0xcf) && stop.context.trap == PAGE_FAULT && stop.context.error & FETCH == 0 {
        (stop.address, stop.context.cr2) = (0, 0);
    }
    stop.note(Open::default());
}

/// Exceptions of x87 and SSE, unmasked by chance.
pub fn floats(random: &mut Random, world: &World) {
    let operations: [&[u8]; 16] = [
        &[0xd9, 0xe8, 0xd9, 0xee, 0xde, 0xf9],
        &[0xd9, 0xfa],
        &[0xde, 0xc1],
        &[0xd9, 0xf2],
        &[0xde, 0xf1],
        &[0xd9, 0xe4],
        &[0x0f, 0x5e, 0xc1],
        &[0x66, 0x0f, 0x5e, 0xc1],
        &[0xf2, 0x0f, 0x51, 0xc1],
        &[0xf3, 0x0f, 0x59, 0xc2],
        &[0x0f, 0x5b, 0xc3],
        &[0xf2, 0x48, 0x0f, 0x2d, 0xc2],
        &[0xc5, 0xf4, 0x58, 0xc2],
        &[0xc5, 0xf5, 0x59, 0xd0],
        &[0xdb, 0xe3],
        &[0xd9, 0xc9],
    ];
    let mut asm = Asm::new();
    (0..1 + random.below(5)).for_each(|_| {
        asm.add(random.pick(&operations));
    });
    // FWAIT, at which x87 exceptions come.
    asm.add(random.pick(&[&[0x9b][..], &[]])).add(&[0x0f, 0x0b]);
    let mut state = State::at(put(random, world, asm.bytes()));
    vectors(random, &mut state);
    // Single steps of precision cannot be told from others.
    let mxcsr = 0x1000 | (random.bits() as u32 & 0x0780) | (random.bits() as u32 & 0xe000);
    state.fpu.bytes[24..28].copy_from_slice(&mxcsr.to_le_bytes());
    let control = 0x0340 | random.bits() as u16 & 0x0c1f | 0x20;
    state.fpu.bytes[0..2].copy_from_slice(&control.to_le_bytes());
    state.fpu.bytes[4] = random.bits() as u8;
    cpu::run(&state, None).note(Open::default());
}

/// Lines noted of one run.
const MOST_STEPS: u32 = 60;

fn each_step(stop: &mut Stop) -> bool {
    let more = stop.signal == 5 && LEFT.fetch_sub(1, Ordering::Relaxed) > 1;
    if more {
        let c = &stop.context;
        note!(
            "step {} rip={:x} fl={:x} rsp={:x} a={:x}\n",
            stop.code,
            c.rip,
            c.eflags & !(RESUME | AUXILIARY | UNNOTED.load(Ordering::Relaxed)),
            c.registers[RSP],
            stop.address
        );
    }
    more
}

/// Code with the trap flag set.
pub fn single(random: &mut Random, world: &World) {
    let pieces: [&[u8]; 22] = [
        &[0x90],
        &[0x48, 0xff, 0xc3],
        &[0x9c, 0x58],
        &[0xb9, 3, 0, 0, 0, 0xf3, 0xa4],
        &[0x8c, 0xd0, 0x8e, 0xd0, 0x90],
        &[0xeb, 0x00],
        &[0xe8, 0, 0, 0, 0, 0x58],
        &[0xb8, 24, 0, 0, 0, 0x0f, 0x05],
        &[0xb8, 0xff, 0xff, 0, 0, 0xcd, 0x80],
        &[0xcc],
        // What the maker of the CPU and the clock leave in registers is no address.
        &[0x31, 0xc0, 0x31, 0xc9, 0x0f, 0xa2, 0x31, 0xc0, 0x31, 0xdb, 0x31, 0xc9, 0x31, 0xd2],
        &[0x0f, 0x31, 0x31, 0xc0, 0x31, 0xd2],
        &[0x9c, 0x9d],
        &[0x50, 0x58],
        &[0xc5, 0xf8, 0x77],
        &[0xd9, 0xe8],
        &[0xb9, 2, 0, 0, 0, 0xf3, 0xab],
        &[0xb9, 3, 0, 0, 0, 0xe2, 0xfe],
        &[0x9b],
        &[0x31, 0xc9, 0x0f, 0x01, 0xd0, 0x31, 0xc0],
        &[0xf3, 0x0f, 0xae, 0xc0],
        &[0x9c, 0x81, 0x24, 0x24, 0xff, 0xfe, 0xff, 0xff, 0x9d],
    ];
    let mut asm = Asm::new();
    (0..2 + random.below(8)).for_each(|_| {
        asm.add(random.pick(&pieces));
    });
    if random.chance(30) {
        // mov ecx, 3: a system call has left an address there, and REP would write over this program.
        asm.add(&[0xb9, 3, 0, 0, 0]).memory(random);
    }
    asm.add(&[0x90, 0x0f, 0x0b]);
    // What CPUID is replaced by can be read, a known difference; in the image nobody reads it.
    let cpuid = asm.bytes().windows(2).any(|two| two == [0x0f, 0xa2]);
    let at = if cpuid { put_low(asm.bytes()) } else { put(random, world, asm.bytes()) };
    let mut state = State::at(at);
    stack(&mut state);
    let scratch = scratch();
    state.set(RSI, scratch);
    state.set(RDI, scratch + 64);
    state.set(RCX, random.below(4));
    state.set(cpu::RAX, 5);
    state.context.eflags |= 0x100;
    LEFT.store(MOST_STEPS, Ordering::Relaxed);
    UNNOTED.store(if compares(asm.bytes()) { STATUS } else { 0 }, Ordering::Relaxed);
    let mut stop = cpu::run(&state, Some(each_step));
    // What CPUID and the clock leave behind.
    [cpu::RDX, cpu::RBX, cpu::RCX, cpu::RAX]
        .iter()
        .for_each(|&register| stop.context.registers[register] = 0);
    // A store of MMX that faults has begun to leave the x87 state on Intel's CPUs, and not on AMD's.
    let x87 = stop.context.trap == PAGE_FAULT;
    stop.note(Open { flags: RESUME | AUXILIARY, x87, ..Open::default() });
}

/// There is a REP CMPS or SCAS: makers differ in the flags between its iterations.
fn compares(code: &[u8]) -> bool {
    code.windows(2).any(|two| matches!(two, [0xf2 | 0xf3, 0xa6 | 0xa7 | 0xae | 0xaf]))
}

#[repr(C, align(4096))]
struct Scratch([u8; 8192]);
static mut SCRATCH: Scratch = Scratch([0; 8192]);

/// Memory for whatever code writes; its content is nothing to rely on.
pub fn scratch() -> u64 {
    (&raw mut SCRATCH) as u64
}

/// A stack in this program's image.
pub fn stack(state: &mut State) {
    state.set(RSP, scratch() + 6144);
}

/// Code that changes the code it is part of, or another view of it.
pub fn change(random: &mut Random, world: &World) {
    rewrite(random, world, false);
}

/// The same with a system call, made so often that an engine may want to make it faster.
pub fn hot(random: &mut Random, world: &World) {
    rewrite(random, world, true);
}

/// INT 3 and INT n, of two bytes where there are shorter ones, and with prefixes. Not INT1: some hosts that are virtual
/// machines leave RIP at it, where CPUs leave it behind. `tests/traps.rs` compares it with INT3.
pub fn interrupt(random: &mut Random, world: &World) {
    let numbers = [3, 4, 0x80, 1, 0, 0x20, 14, 0xff];
    let forms: [&[u8]; 4] = [&[], &[0x66], &[0x48], &[0xf3]];
    let mut asm = Asm::new();
    (0..1 + random.below(3)).for_each(|_| {
        asm.add(&[0x90]).add(random.pick(&forms)).add(&random.pick(&[
            [0xcc_u8, 0x90],
            [0xcd, random.clone().pick(&numbers)],
        ]));
    });
    asm.add(&[0x0f, 0x0b]);
    let mut state = State::at(put(random, world, asm.bytes()));
    registers(random, world, &mut state);
    state.set(cpu::RAX, 1000);
    LEFT.store(4, Ordering::Relaxed);
    let hook: Option<cpu::Hook> = if random.chance(50) { Some(each_step) } else { None };
    cpu::run(&state, hook).note(Open::default());
}

fn rewrite(random: &mut Random, world: &World, calls: bool) {
    // mov ecx, n; L: mov [rdi], al (the immediate of the next ADD); add ebx, imm8; inc eax; (padding) loop L; ud2
    let mut asm = Asm::new();
    let count = 2 + random.below(60) as u8;
    asm.add(&[0xb9, count, 0, 0, 0]);
    let top = asm.len();
    asm.add(&[0x88, 0x07]);
    (0..random.below(20)).for_each(|_| {
        asm.add(&[0x90]);
    });
    let target = asm.len() + 2;
    asm.add(&[0x83, 0xc3, 0x00, 0x48, 0xff, 0xc0]);
    if calls {
        // push rcx; push rax; sched_yield; pop rax; pop rcx.
        asm.add(&[0x51, 0x50]).system_call(24).add(&[0x58, 0x59]);
    }
    let back = top as i32 - (asm.len() + 2) as i32;
    asm.add(&[0xe2, back as u8, 0x0f, 0x0b]);
    let (execute, write) = views(random, world);
    let offset = random.pick(&[0, 100, PAGE - 8, PAGE - target as u64, PAGE - target as u64 - 1]);
    world::put_code(write + offset, asm.bytes());
    let mut state = State::at(execute + offset);
    stack(&mut state);
    state.set(RDI, write + offset + target as u64);
    cpu::run(&state, None).note(Open { upper_halves: 1 << 11, ..Open::default() });
}

/// Two pages of one memory, to execute and to write; maybe the same.
fn views(random: &mut Random, world: &World) -> (u64, u64) {
    let page = world.places[0] + random.below(2) * PAGE;
    let other = world.places[1] + random.below(2) * PAGE;
    let private = sys::MAP_PRIVATE | sys::MAP_FIXED | sys::MAP_ANONYMOUS;
    match random.below(3) {
        0 => {
            sys!(MMAP, page, 2 * PAGE, 7, private, usize::MAX, 0);
            (page, page)
        }
        1 => (world::code(), world::code()),
        _ => {
            let shared = sys::MAP_SHARED | sys::MAP_FIXED;
            sys!(MMAP, page, 2 * PAGE, 5, shared, world.file, 0);
            sys!(MMAP, other, 2 * PAGE, 3, shared, world.file, 0);
            (page, other)
        }
    }
}
