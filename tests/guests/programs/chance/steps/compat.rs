//! 32-bit code, and segments of all kinds.

use super::code;
use crate::{
    asm::Asm,
    cpu::{self, Open, RAX, RSP, State},
    random::Random,
    sys::*,
    trace::note,
    world::{self, PAGE, World},
};

/// Upper halves of registers are undefined after 32-bit code, and R8 to R15 are.
const OPEN: Open = Open { flags: 0, upper_halves: u16::MAX, x87: false };

const PIECES: [&[u8]; 37] = [
    &[0x90],
    &[0x43],
    &[0x06, 0x07],
    &[0x1e, 0x1f],
    &[0x9c, 0x58],
    &[0x9c, 0x9d],
    &[0xd6],
    &[0xce],
    &[0xcc],
    &[0x62, 0x07],
    &[0xc4, 0x07],
    &[0xc5, 0x07],
    &[0x8e, 0xd8],
    &[0x8e, 0xe0],
    &[0x8e, 0xe8],
    &[0x8c, 0xd8],
    &[0x8c, 0xc9],
    &[0xb8, 158, 0, 0, 0, 0xcd, 0x80],
    &[0xb8, 0xff, 0xff, 0, 0, 0xcd, 0x80],
    &[0x89, 0x07],
    &[0x8b, 0x07],
    &[0xf3, 0xa4],
    &[0x66, 0x50, 0x66, 0x58],
    &[0xe8, 0, 0, 0, 0, 0x58],
    &[0xcf],
    &[0xcb],
    &[0x0f, 0x0b],
    &[0x31, 0xc9, 0xf7, 0xf1],
    &[0xc8, 8, 0, 1, 0xc9],
    &[0x64, 0xa1, 0, 0, 0, 0],
    &[0x65, 0x8b, 0x07],
    &[0xd9, 0xe8, 0xd9, 0x1f],
    &[0x0f, 0x11, 0x07],
    &[0xf4],
    &[0x67, 0x8b, 0x07],
    &[0x0f, 0xa2, 0x31, 0xc0, 0x31, 0xdb, 0x31, 0xc9, 0x31, 0xd2],
    &[0xc5, 0xf8, 0x77],
];

/// Of them those whose alignment only AMD's CPUs check. They check it before pages, too.
const UNALIGNED: [&[u8]; 8] = [
    &[0x06, 0x07],
    &[0x1e, 0x1f],
    &[0x8e, 0xd8],
    &[0x8e, 0xe0],
    &[0x8e, 0xe8],
    &[0xd9, 0xe8, 0xd9, 0x1f],
    &[0x0f, 0x11, 0x07],
    &[0x66, 0x50, 0x66, 0x58],
];

/// Runs random 32-bit code. It is entered by a return from a signal handler or by a far return.
pub fn run(random: &mut Random, world: &World) {
    world::clear_code();
    let mut asm = Asm::new();
    let far = random.chance(40);
    if far {
        // push 0x23; push RBP; retfq
        asm.add(&[0x6a, 0x23, 0x55, 0x48, 0xcb]);
    }
    let entry = asm.len() as u64;
    let mut checks = true;
    (0..1 + random.below(7)).for_each(|_| {
        let piece = random.pick(&PIECES);
        checks &= !UNALIGNED.contains(&piece);
        asm.add(piece);
    });
    if random.chance(40) {
        // ljmp 0x33:next; inc rax; ud2
        let next = world::code() + asm.len() as u64 + 7;
        asm.add(&[0xea]).add(&(next as u32).to_le_bytes()).add(&[0x33, 0, 0x48, 0xff, 0xc0]);
    }
    asm.add(&[0x0f, 0x0b]);
    world::put_code(world::code(), asm.bytes());
    let mut state = State::at(world::code());
    registers(random, world, &mut state);
    if far {
        state.set(cpu::RBP, world::code() + entry);
    } else {
        state.context.cs = cpu::CODE32;
    }
    let own_stack = (code::scratch()..code::scratch() + PAGE * 2).contains(&state.context.registers[RSP]);
    if random.chance(10) && checks && own_stack {
        state.context.eflags |= 0x40000;
    }
    state.data = random.pick(&[cpu::DATA, cpu::DATA, cpu::DATA, 0]);
    let mut stop = cpu::run(&state, None);
    // Makers differ in which of the words on the stack IRET reads first.
    if stop.context.trap == 14 && stop.context.rip != stop.address && opcode(&stop) == IRET {
        let top = stop.context.registers[RSP];
        (stop.address, stop.context.cr2) = (top, top);
    }
    stop.note(OPEN);
}

const IRET: u8 = 0xcf;

/// The byte that the code has stopped at, if it lies in this program's image.
fn opcode(stop: &cpu::Stop) -> u8 {
    let inside = (world::code()..world::code() + 4096).contains(&stop.context.rip);
    // SAFETY: the image can be read.
    if inside { unsafe { (stop.context.rip as *const u8).read_volatile() } } else { 0 }
}

/// Registers that 32-bit code can use.
fn registers(random: &mut Random, world: &World, state: &mut State) {
    for register in cpu::ORDER {
        state.set(register, random.value() & 0xffff_ffff);
    }
    code::stack(state);
    let data = code::scratch() + 512;
    state.set(cpu::RDI, data);
    state.set(cpu::RSI, data + 64);
    state.set(cpu::RCX, random.below(20));
    if random.chance(40) {
        state.set(RAX, random.pick(&[0x23, 0x2b, 0x33, 0, 3, 0x7b, 0x1000, 7, 0xf, 0x63]));
    }
    if random.chance(10) {
        state.set(RSP, world.address(random) & 0xffff_ffff);
    }
    code::vectors(random, state);
}

/// struct user_desc.
fn descriptor(random: &mut Random, entry: u32, base: u32) -> [u32; 4] {
    let limit = random.pick(&[0xfffff_u32, 0xfff, 0x10, 0, 0xfffff]);
    // 32 bits, contents (data, expand-down, code, conforming), read-only, in pages, not present, usable.
    let contents = random.pick(&[0_u32, 0, 0, 1, 2, 3]);
    // A kernel may be made without those of 16 bits.
    let rest = 1 | contents << 1 | u32::from(random.chance(20)) << 3;
    let rest =
        rest | u32::from(random.chance(60)) << 4 | u32::from(random.chance(10)) << 5 | 1 << 6;
    [entry, base, limit, rest]
}

/// The system call of 32-bit programs, which 64-bit ones do not have.
fn set_thread_area(descriptor: &[u32; 4]) -> i32 {
    // The call takes an address below 4 GiB.
    static mut COPY: [u32; 4] = [0; 4];
    let result: u32;
    // SAFETY: nothing else uses the copy.
    unsafe {
        (&raw mut COPY).write(*descriptor);
        core::arch::asm!("push rbx", "mov ebx, {0:e}", "int 0x80", "pop rbx", in(reg) (&raw const COPY) as u64,
            inlateout("eax") 243 => result, out("r8") _, out("r9") _, out("r10") _, out("r11") _);
    }
    result as i32
}

/// Descriptors of a program's own, and what selectors of them do.
pub fn segments(random: &mut Random, world: &World) {
    let base = (code::scratch() as u32).wrapping_sub(random.pick(&[0, 0, 0x100, 0x1000]));
    let wanted = descriptor(random, random.clone().below(4) as u32, base);
    let written = sys!(MODIFY_LDT, 1, wanted.as_ptr(), 16);
    note!("descriptor {wanted:x?} {written} ");
    let mut thread = descriptor(random, 12, base);
    thread[3] &= !6;
    note!("thread area {} ", set_thread_area(&thread));
    let selectors = [wanted[0] as u16 * 8 + 7, wanted[0] as u16 * 8 + 7, 12 * 8 + 3, 0x2b, 0x1f];
    let selector = random.pick(&selectors);
    world::clear_code();
    let pieces: [&[u8]; 14] = [
        &[0x8e, 0xd8],
        &[0x8e, 0xc0],
        &[0x8e, 0xe0],
        &[0x8e, 0xe8],
        &[0x64, 0x8b, 0x1f],
        &[0x65, 0x89, 0x1f],
        &[0x65, 0x8a, 0x5f, 0x10],
        &[0x8c, 0xe3],
        &[0x0f, 0x03, 0xd0],
        &[0x0f, 0x02, 0xd8],
        &[0x0f, 0x00, 0xe0],
        &[0x0f, 0x00, 0xe8],
        &[0x9c, 0x5b],
        &[0x8e, 0xd0],
    ];
    // VERR and VERW, LAR and LSL in some pages, answer for the host; see CAVEATS.md.
    let usable: [usize; 10] = [0, 1, 2, 3, 4, 5, 6, 7, 12, 13];
    let mut asm = Asm::new();
    (0..1 + random.below(6)).for_each(|_| {
        asm.add(pieces[random.pick(&usable)]);
    });
    asm.add(&[0x0f, 0x0b]);
    world::put_code(world::code(), asm.bytes());
    let mut state = State::at(world::code());
    registers(random, world, &mut state);
    state.set(RAX, selector.into());
    state.set(cpu::RDI, random.pick(&[0, 0x100, 0xff8, 0x1000, 0x18]));
    if random.chance(40) {
        state.context.cs = cpu::CODE32;
    }
    // A kernel may lose the error code of a return to a stack segment in the LDT.
    if random.chance(10) && selector & 4 == 0 {
        state.context.ss = selector;
    }
    let open = if state.context.cs == cpu::CODE32 { OPEN } else { Open::default() };
    cpu::run(&state, None).note(open);
}
