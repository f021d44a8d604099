//! A hostile kernel: attacks everything that a kernel can reach of its machine, at random and repeatably, from ring 0 and from ring 3.
//!
//! Its command line is `SEED COUNT`; with seed 0 it breaks one rule of virtio COUNT times. It says `hostile: N actions, faults [...]` (how many of each kind of attack were refused) now and then, and at the end `hostile: done`, and leaves by the debug
//! exit port. What it attacks may cost it its own memory (a device is told to write there): then it ends by a triple fault, as it
//! should. It never asks for a reset or power-off.

#![no_std]
#![no_main]

use core::{
    arch::{asm, global_asm},
    fmt::{self, Write},
    panic::PanicInfo,
    ptr,
};

global_asm!(include_str!("entry.s"));

unsafe extern "C" {
    fn guard(attack: extern "C" fn(*mut State), state: *mut State) -> u64;
    fn enter_user(registers: *const u64, flags: u64);
    static mut steps: i64;
    static mut sandbox_table: [u64; 512];
    static mut sandbox_directory: [u64; 512];
    static mut sandbox_pointers: [u64; 512];
    static mut user_page: [u8; 8192];
}

/// Memory that devices may be told to use, and its bytes.
const SCRATCH: u64 = 0x100_0000;
const SCRATCH_LEN: u64 = 0x10_0000;
/// Where the kernel sees memory and devices.
const DIRECT: u64 = 0xffff_8880_0000_0000;
/// Where the sandbox is, in either half.
const SANDBOXES: [u64; 2] = [1 << 39, 0xffff_9600_0000_0000];
/// RFLAGS of user code: it can be interrupted, with or without a trap behind each instruction.
const USER_FLAGS: [u64; 2] = [0x202, 0x302];
const EXIT_PORT: u16 = 0xf4;
const DONE: u8 = 0x10;
const SERIAL: u16 = 0x3f8;

/// Where devices are, in GPAs: APICs, HPET, the beginning and the end of PCI's configuration space, and where nothing is.
const DEVICES: [u64; 7] =
    [0xfec0_0000, 0xfee0_0000, 0xfed0_0000, 0xe000_0000, 0xefff_f000, 0xfff0_0000, 0xff00_0000];

#[repr(C)]
struct State {
    random: u64,
    /// Windows of PCI functions.
    windows: [u64; 64],
    count: usize,
    /// Virtio functions.
    functions: [Function; 32],
    found: usize,
}

/// Where the registers of a virtio function are.
#[derive(Clone, Copy)]
#[repr(C)]
struct Function {
    common: u64,
    notify: u64,
    multiplier: u32,
}

impl State {
    fn next(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 11) % end
    }

    /// Numbers that borders are at, and any; memory that is meant to be written is scratch.
    fn value(&mut self) -> u64 {
        match self.below(8) {
            0 => 0,
            1 => u64::MAX,
            2 => 1 << self.below(64),
            3 => self.below(16),
            4 => SCRATCH + self.below(SCRATCH_LEN),
            5 => self.device(),
            6 => self.next() >> self.below(32),
            _ => self.next() | 1 << 31,
        }
    }

    /// An address of a device's register.
    fn device(&mut self) -> u64 {
        let which = self.below((DEVICES.len() + self.count) as u64) as usize;
        let base = if which < DEVICES.len() { DEVICES[which] } else { self.windows[which - DEVICES.len()] };
        let mask = [0xff, 0xfff, 0x3fff][self.below(3) as usize];
        base + (self.next() & mask)
    }

    fn scratch(&mut self) -> u64 {
        SCRATCH + self.below(SCRATCH_LEN - 64)
    }
}

struct Serial;

impl Write for Serial {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // Attacks may have set it up otherwise.
        [(3, 3), (1, 0), (4, 3)].iter().for_each(|(register, value)| out8(SERIAL + register, *value));
        text.bytes().for_each(|byte| out8(SERIAL, byte));
        Ok(())
    }
}

fn out8(port: u16, value: u8) {
    // SAFETY: ports are devices', not memory.
    unsafe { asm!("out dx, al", in("dx") port, in("al") value) };
}

fn out32(port: u16, value: u32) {
    // SAFETY: as above.
    unsafe { asm!("out dx, eax", in("dx") port, in("eax") value) };
}

fn in32(port: u16) -> u32 {
    let value;
    // SAFETY: as above.
    unsafe { asm!("in eax, dx", in("dx") port, out("eax") value) };
    value
}

fn config(address: u32) -> u32 {
    out32(0xcf8, address | 1 << 31);
    in32(0xcfc)
}

fn set_config(address: u32, value: u32) {
    out32(0xcf8, address | 1 << 31);
    out32(0xcfc, value);
}

/// Finds what PCI functions have for windows, and lets them be masters.
fn find_windows(state: &mut State) {
    for device in 1..32_u32 {
        let function = device << 11;
        if config(function) == u32::MAX {
            continue;
        }
        for bar in (0x10..0x28).step_by(4) {
            let value = config(function | bar);
            let base = u64::from(value & !0xf);
            if value & 1 == 0 && base != 0 && state.count < state.windows.len() {
                state.windows[state.count] = base;
                state.count += 1;
            }
        }
        set_config(function | 4, 7);
        find_virtio(state, function);
    }
}

/// Finds the registers of a virtio function (virtio 1.2 section 4.1.4).
fn find_virtio(state: &mut State, function: u32) {
    let (mut found, mut at) = (Function { common: 0, notify: 0, multiplier: 0 }, config(function | 0x34) & 0xfc);
    while at != 0 {
        let head = config(function | at);
        if head & 0xff == 9 {
            let bar = config(function | at + 4) & 0xff;
            let base = u64::from(config(function | 0x10 + bar * 4) & !0xf);
            let place = base + u64::from(config(function | at + 8));
            match head >> 24 {
                1 => found.common = place,
                2 => (found.notify, found.multiplier) = (place, config(function | at + 16)),
                _ => {}
            }
        }
        at = head >> 8 & 0xfc;
    }
    if found.common != 0 && state.found < state.functions.len() {
        state.functions[state.found] = found;
        state.found += 1;
    }
}

/// Sets a device up as a driver does, with one queue: its features, its size if one is given, and the addresses of its three parts.
///
/// # Safety
/// The device may write to the parts.
unsafe fn begin(common: u64, features: u64, size: Option<u64>, parts: [u64; 3]) {
    let at = |offset| DIRECT + common + offset;
    // SAFETY: registers of a device; the rest is the caller's.
    unsafe {
        let put8 = |offset, value: u64| ptr::write_volatile(at(offset) as *mut u8, value as u8);
        let put16 = |offset, value: u64| ptr::write_volatile(at(offset) as *mut u16, value as u16);
        let put32 = |offset, value: u64| ptr::write_volatile(at(offset) as *mut u32, value as u32);
        [0, 1, 3].iter().for_each(|status| put8(20, *status));
        for (select, features) in [(0, features), (1, 1)] {
            put32(8, select);
            put32(12, features);
        }
        put8(20, 0xb);
        size.into_iter().for_each(|size| put16(24, size));
        for (offset, address) in [32, 40, 48].into_iter().zip(parts) {
            put32(offset, address);
            put32(offset + 4, address >> 32);
        }
        put16(28, 1);
        put8(20, 0xf);
    }
}

/// Breaks a rule of virtio `count` times, with one device after the other: the queue's parts are where there is no memory.
fn flood(state: &State, count: u64) {
    const NOWHERE: u64 = 1 << 40;
    for number in 0..count {
        let Function { common, .. } = state.functions[number as usize % state.found.max(1)];
        if common != 0 {
            // SAFETY: nothing is there to be written.
            unsafe { begin(common, 0, None, [NOWHERE; 3]) };
        }
    }
}

/// A queue as a driver sets it up, but for what is not as it should be.
extern "C" fn virtio(state: *mut State) {
    // SAFETY: as in `ports`.
    let state = unsafe { &mut *state };
    if state.found == 0 {
        return;
    }
    let Function { common, notify, multiplier } = state.functions[state.below(state.found as u64) as usize];
    let queue = state.below(4);
    let place = |state: &mut State| match state.below(16) {
        0 => state.value(),
        _ => SCRATCH + (state.below(8) << 12),
    };
    let parts = [place(state), place(state), place(state)];
    // SAFETY: registers of a device, and scratch memory.
    unsafe {
        ptr::write_volatile((DIRECT + common + 22) as *mut u16, queue as u16);
        if state.below(8) == 0 {
            let features = state.next() & state.next();
            let size = if state.below(4) == 0 { Some(state.value()) } else { None };
            begin(common, features, size, parts);
        }
        for descriptor in 0..state.below(16) {
            let at = DIRECT + SCRATCH + (state.below(8) << 12) + descriptor * 16;
            let address = if state.below(4) == 0 { state.value() } else { state.scratch() };
            let length = if state.below(4) == 0 { state.value() } else { state.below(2000) };
            ptr::write_volatile(at as *mut u64, address);
            let rest = length as u32 as u64 | state.below(8) << 32 | state.below(20) << 48;
            ptr::write_volatile((at + 8) as *mut u64, rest);
        }
        let ring = (DIRECT + SCRATCH + (state.below(8) << 12)) as *mut u16;
        ptr::write_volatile(ring.add(1), state.below(40) as u16);
        (2..18).for_each(|at| ptr::write_volatile(ring.add(at), state.below(20) as u16));
        let offset = u64::from(ptr::read_volatile((DIRECT + common + 30) as *const u16)) * u64::from(multiplier);
        ptr::write_volatile((DIRECT + notify + offset) as *mut u16, queue as u16);
    }
}

/// Ports that end the machine, and what is written there: an attack that asks for it would only end itself.
fn ends_the_machine(port: u16) -> bool {
    (port..=port.saturating_add(3)).any(|port| matches!(port, 0x60..=0x64 | 0x92 | 0xcf8..=0xcff | 0xf0..=0xf8 | 0x500..=0x6ff | 0xb000..=0xb0ff))
}

extern "C" fn ports(state: *mut State) {
    // SAFETY: `guard` is given the one there is.
    let state = unsafe { &mut *state };
    const USUAL: [u16; 16] = [
        0x20, 0x21, 0x40, 0x43, 0x61, 0x70, 0x71, 0xa0, 0xa1, 0x3f8, 0x3fb, 0x3fc, 0x4d0, 0x510, 0x511, 0xe0,
    ];
    let port = match state.below(2) {
        0 => USUAL[state.below(16) as usize] + state.below(2) as u16,
        _ => state.next() as u16,
    };
    let value = state.value();
    // SAFETY: as in `out8`; strings go to and from scratch memory.
    unsafe {
        match state.below(8) {
            0 => asm!("in al, dx", in("dx") port, out("al") _),
            1 => asm!("in ax, dx", in("dx") port, out("ax") _),
            2 => asm!("in eax, dx", in("dx") port, out("eax") _),
            3 => asm!("rep insb", in("dx") port, inout("rdi") DIRECT + state.scratch() => _, inout("rcx") 17_u64 => _),
            _ if ends_the_machine(port) => {}
            4 => asm!("out dx, al", in("dx") port, in("al") value as u8),
            5 => asm!("out dx, ax", in("dx") port, in("ax") value as u16),
            6 => asm!("out dx, eax", in("dx") port, in("eax") value as u32),
            _ => asm!("rep outsb", in("dx") port, inout("rsi") DIRECT + state.scratch() => _, inout("rcx") 17_u64 => _),
        }
    }
}

/// Loads and stores of every size.
fn touch(state: &mut State, at: u64) {
    let value = state.value();
    // SAFETY: callers give addresses of devices, of scratch memory or of the sandbox; what faults ends the attack.
    unsafe {
        match state.below(9) {
            0 => drop(ptr::read_volatile(at as *const u8)),
            1 => drop(ptr::read_volatile((at & !1) as *const u16)),
            2 => drop(ptr::read_volatile((at & !3) as *const u32)),
            3 => drop(ptr::read_volatile((at & !7) as *const u64)),
            4 => ptr::write_volatile(at as *mut u8, value as u8),
            5 => ptr::write_volatile((at & !3) as *mut u32, value as u32),
            6 => ptr::write_volatile((at & !7) as *mut u64, value),
            7 => asm!("lock xadd [{0}], {1}", in(reg) at, inout(reg) value => _),
            _ => asm!("movups [{0}], xmm0", in(reg) at),
        }
    }
}

extern "C" fn mmio(state: *mut State) {
    // SAFETY: as in `ports`.
    let state = unsafe { &mut *state };
    let at = DIRECT + state.device();
    touch(state, at);
}

extern "C" fn pci(state: *mut State) {
    // SAFETY: as in `ports`.
    let state = unsafe { &mut *state };
    let address = (state.below(8) << 11 | state.below(64) << 2) as u32;
    // Windows stay where they are, so that they can be attacked.
    let register = address & 0xfc;
    if state.below(2) == 0 || (0x10..0x28).contains(&register) || register == 4 {
        config(address);
    } else {
        set_config(address, state.value() as u32);
    }
}

/// Rings, descriptors and whatever devices have been told is there.
extern "C" fn scribble(state: *mut State) {
    // SAFETY: as in `ports`.
    let state = unsafe { &mut *state };
    for _ in 0..16 {
        let (at, value) = (DIRECT + state.scratch() & !7, state.value());
        // SAFETY: scratch memory is nobody's.
        unsafe { ptr::write_volatile(at as *mut u64, value) };
    }
}

extern "C" fn tables(state: *mut State) {
    // SAFETY: as in `ports`.
    let state = unsafe { &mut *state };
    let frame = match state.below(4) {
        0 => state.scratch(),
        1 => state.device(),
        2 => state.next() | 1 << 40,
        _ => 1 << (28 + state.below(24)),
    };
    let entry = frame & !0xfff | state.next() & 0x8000_0000_0000_0fff;
    let (table, index) = (state.below(16), state.below(8) as usize);
    // SAFETY: only the sandbox's tables, which nothing else is reached by.
    unsafe {
        match table {
            0 => sandbox_pointers[index + 1] = entry,
            1 => sandbox_directory[index + 1] = entry,
            _ => sandbox_table[index] = entry,
        }
    }
    let shift = [30, 21, 12][table.min(2) as usize];
    let index = if table < 2 { index + 1 } else { index };
    let at = SANDBOXES[state.below(2) as usize] + ((index as u64) << shift) + state.below(4090);
    // SAFETY: translations are thrown away, or not, which is the point.
    unsafe {
        match state.below(6) {
            0 => {}
            1 => asm!("mov rax, cr3", "mov cr3, rax", out("rax") _),
            2 => asm!("mov rax, cr4", "xor rax, 0x80", "mov cr4, rax", "xor rax, 0x80", "mov cr4, rax", out("rax") _),
            _ => asm!("invlpg [{0}]", in(reg) at),
        }
        if state.below(8) == 0 {
            // Code in devices, in scratch memory and nowhere.
            let code: extern "C" fn() = core::mem::transmute(at as *const ());
            steps = 0;
            asm!("pushfq", "or dword ptr [rsp], 0x100", "popfq", "call {0}", in(reg) code, clobber_abi("C"));
        }
    }
    touch(state, at);
}

extern "C" fn registers(state: *mut State) {
    // SAFETY: as in `ports`.
    let state = unsafe { &mut *state };
    const KNOWN: [u32; 24] = [
        0x10, 0x1b, 0x3a, 0x8b, 0xfe, 0x174, 0x175, 0x176, 0x179, 0x1a0, 0x200, 0x250, 0x277, 0x2ff, 0x6e0, 0x808,
        0x830, 0xda0, 0xc000_0081, 0xc000_0082, 0xc000_0084, 0xc000_0100, 0xc000_0101, 0xc000_0102,
    ];
    let index = match state.below(4) {
        0 => state.value() as u32,
        _ => KNOWN[state.below(24) as usize],
    };
    let value = state.value();
    // SAFETY: what a register changes is put right by `rearm` or does not matter; what is refused ends the attack. EFER stays.
    unsafe {
        if state.below(2) == 0 || index == 0xc000_0080 {
            asm!("rdmsr", in("ecx") index, out("eax") _, out("edx") _);
        } else {
            asm!("wrmsr", in("ecx") index, in("eax") value as u32, in("edx") (value >> 32) as u32);
        }
    }
}

extern "C" fn system(state: *mut State) {
    // SAFETY: as in `ports`.
    let state = unsafe { &mut *state };
    let (value, selector) = (state.value(), state.value() as u16);
    // SAFETY: what survives an instruction is put right by `recover`, and the others end in an exception.
    unsafe {
        match state.below(20) {
            0 => asm!("mov ds, {0:e}", in(reg) u32::from(selector)),
            1 => asm!("mov es, {0:e}", in(reg) u32::from(selector)),
            2 => asm!("mov fs, {0:e}", in(reg) u32::from(selector)),
            3 => asm!("mov gs, {0:e}", in(reg) u32::from(selector)),
            4 => asm!("lldt {0:x}", in(reg) selector),
            5 => asm!("ltr {0:x}", in(reg) selector),
            6 => asm!("mov dr7, {0}", in(reg) value & !0x3ff),
            7 => asm!("mov dr0, {0}", in(reg) value),
            8 => asm!("mov cr8, {0}", in(reg) value),
            9 => asm!("mov cr4, {0}", in(reg) value | 0x20),
            10 => asm!("mov cr0, {0}", in(reg) value | 0x8000_0001),
            11 => asm!("xsetbv", in("ecx") value as u32, in("eax") value as u32, in("edx") 0),
            12 => asm!("int 0x80"),
            13 => asm!("lar eax, {0:e}", in(reg) u32::from(selector), out("eax") _),
            14 => asm!("wbinvd", "clts"),
            15 => asm!("cpuid", "mov rbx, {0}", in(reg) state.next(), inout("eax") value as u32 => _,
                inout("ecx") (value >> 32) as u32 => _, out("edx") _),
            16 => asm!("fxrstor64 [{0}]", in(reg) DIRECT + SCRATCH),
            17 => asm!("invpcid {0}, [{1}]", in(reg) value & 3, in(reg) DIRECT + SCRATCH),
            18 => asm!("sti", "nop", "nop", "cli"),
            _ => asm!("push 0x23", "push {0}", "push 0x302", "push {1}", "push {0}", "iretq",
                in(reg) value, in(reg) u64::from(selector)),
        }
    }
}

/// Bytes by chance in ring 3, some steps of them; and some that are no chance.
extern "C" fn user(state: *mut State) {
    // SAFETY: as in `ports`.
    let state = unsafe { &mut *state };
    const STARTS: [&[u8]; 8] =
        [&[0x0f, 5], &[0x0f, 0x34], &[0xcd, 0x80], &[0x0f, 0xa2], &[0xf4], &[0xec], &[0x0f, 0x32], &[0xcf]];
    let start = state.below(16) as usize;
    let start = STARTS.get(start).copied().unwrap_or_default();
    let mut numbers = [0; 9];
    numbers.iter_mut().for_each(|number| *number = state.value());
    // SAFETY: the page is the user's alone, and `recover` takes the kernel's back.
    unsafe {
        for at in 0..64 {
            user_page[at] = start.get(at).copied().unwrap_or_else(|| state.next() as u8);
        }
        steps = 32;
        enter_user(numbers.as_ptr(), USER_FLAGS[state.below(2) as usize]);
    }
}

const ATTACKS: [extern "C" fn(*mut State); 9] =
    [ports, mmio, pci, virtio, scribble, tables, registers, system, user];

/// The local APIC as it was, with a timer: user code that clears TF must not go on for ever.
extern "C" fn rearm(_: *mut State) {
    let registers: [(u64, u32); 5] =
        [(0xf0, 0x1ff), (0x80, 0), (0x320, 0x40), (0x3e0, 3), (0x380, 2_000_000)];
    // SAFETY: its registers are where the first line puts them.
    unsafe {
        asm!("wrmsr", in("ecx") 0x1b, in("eax") 0xfee0_0000_u32, in("edx") 0);
        asm!("wrmsr", in("ecx") 0x1b, in("eax") 0xfee0_0900_u32, in("edx") 0);
        for (register, value) in registers {
            ptr::write_volatile((DIRECT + 0xfee0_0000 + register) as *mut u32, value);
        }
    }
}

/// Seed and count, from the start information.
fn arguments(info: u64) -> (u64, u64) {
    // SAFETY: the PVH protocol has the command line's address there.
    let mut at = unsafe { DIRECT + *((DIRECT + info + 24) as *const u64) };
    let mut number = || {
        let mut number = 0_u64;
        loop {
            // SAFETY: the line ends with a zero, after which nothing is read.
            let byte = unsafe { *(at as *const u8) };
            if !byte.is_ascii_digit() {
                at += u64::from(byte != 0);
                return number;
            }
            number = number * 10 + u64::from(byte - b'0');
            at += 1;
        }
    };
    (number(), number())
}

#[unsafe(no_mangle)]
extern "C" fn main(info: u64) {
    let (seed, count) = arguments(info);
    const NONE: Function = Function { common: 0, notify: 0, multiplier: 0 };
    let random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut state = State { random, windows: [0; 64], count: 0, functions: [NONE; 32], found: 0 };
    find_windows(&mut state);
    let _ = writeln!(Serial, "hostile: {} windows, {} virtio functions", state.count, state.found);
    let mut faults = [0_u64; ATTACKS.len()];
    let attacks = match seed {
        0 => {
            flood(&state, count);
            0
        }
        _ => count,
    };
    for action in 1..=attacks {
        let kind = state.below(ATTACKS.len() as u64) as usize;
        // SAFETY: this is where attacks end; see each.
        unsafe {
            guard(rearm, &raw mut state);
            faults[kind] += 1 - guard(ATTACKS[kind], &raw mut state);
        }
        if action % 1000 == 0 || action == attacks {
            let _ = writeln!(Serial, "\nhostile: {action} actions, faults {faults:?}");
        }
    }
    let _ = writeln!(Serial, "hostile: done");
    out8(EXIT_PORT, DONE);
}

/// What the compiler calls.
#[unsafe(no_mangle)]
extern "C" fn memset(to: *mut u8, byte: i32, len: usize) -> *mut u8 {
    // SAFETY: the caller's.
    unsafe { asm!("rep stosb", inout("rdi") to => _, inout("rcx") len => _, in("al") byte as u8) };
    to
}

/// As above.
#[unsafe(no_mangle)]
extern "C" fn memcpy(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
    // SAFETY: the caller's.
    unsafe {
        asm!("rep movsb", inout("rdi") to => _, inout("rsi") from => _, inout("rcx") len => _);
    }
    to
}

/// Named by the core library, and never called: a panic ends the program.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

#[panic_handler]
fn panic(_: &PanicInfo<'_>) -> ! {
    let _ = writeln!(Serial, "hostile: panic");
    loop {
        out8(EXIT_PORT, 0x11);
    }
}
