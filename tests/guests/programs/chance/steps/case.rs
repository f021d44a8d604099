//! The oracle's cases: a few instructions of any form, with all registers and memory. The host has made
//! them; `src/chance/cases.rs` writes what is read here.

use crate::{
    cpu::{self, LEGACY_FPU, Open, STATUS, State},
    random::Random,
    sys::{self, MMAP, MUNMAP, sys},
    trace::{digest, note},
    world::World,
};

/// The file, from somewhere on.
struct Reader(&'static [u8]);

impl Reader {
    fn bytes(&mut self, len: usize) -> &'static [u8] {
        let (taken, rest) = self.0.split_at(len);
        self.0 = rest;
        taken
    }

    fn word(&mut self) -> u64 {
        let bytes = self.bytes(8);
        bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
    }
}

/// A window of memory: address, bytes, offset in the image, protection.
type Window = [u64; 4];
const MOST_WINDOWS: usize = 8;

/// Runs one of the cases.
pub fn run(random: &mut Random, world: &World) {
    let mut file = Reader(world.cases);
    let mut windows: [Window; MOST_WINDOWS] = [[0; 4]; MOST_WINDOWS];
    let count = file.word() as usize;
    windows[..count].iter_mut().for_each(|window| *window = core::array::from_fn(|_| file.word()));
    let (images, image_len) = (file.word(), file.word() as usize);
    let images = file.bytes(images as usize * image_len);
    let cases = file.word();
    if cases == 0 {
        note!("no cases\n");
        return;
    }
    let chosen = random.below(cases);
    let start = Reader(&file.0[8 * chosen as usize..]).word() as usize;
    note!("case {chosen} ");
    run_case(Reader(&world.cases[start..]), &windows[..count], images, image_len);
}

fn run_case(mut case: Reader, windows: &[Window], images: &[u8], image_len: usize) {
    let background = case.word() as usize * image_len;
    let filler = case.word() as u8;
    for &[base, len, offset, bits] in windows {
        let flags = sys::MAP_PRIVATE | sys::MAP_FIXED | sys::MAP_ANONYMOUS;
        sys!(MMAP, base, len, 3, flags, usize::MAX, 0);
        // SAFETY: just mapped, away from this program's image.
        let memory = unsafe { core::slice::from_raw_parts_mut(base as *mut u8, len as usize) };
        if bits & 4 != 0 {
            memory.fill(filler);
        } else {
            memory.copy_from_slice(&images[background + offset as usize..][..len as usize]);
        }
    }
    for _ in 0..case.word() {
        let (at, len) = (case.word(), case.word() as usize);
        patch(windows, at, case.bytes(len));
    }
    for &[base, len, _, bits] in windows {
        sys!(sys::MPROTECT, base, len, bits);
    }
    let (state, open, end) = registers(&mut case);
    let mut stop = cpu::run(&state, None);
    // Where steps before it have mapped memory it goes on for longer than it did for the oracle.
    let flags = if stop.context.rip == end { open.flags } else { STATUS };
    stop.note(Open { flags, ..open });
    for &[base, len, _, bits] in windows {
        if bits & 2 != 0 {
            // SAFETY: the window was mapped above; the case cannot unmap it.
            let bytes = unsafe { core::slice::from_raw_parts(base as *const u8, len as usize) };
            note!(" {base:x}={:x}", digest(bytes));
        }
        sys!(MUNMAP, base, len);
    }
    note!("\n");
}

/// Writes bytes at an offset of the image.
fn patch(windows: &[Window], at: u64, bytes: &[u8]) {
    for (&byte, at) in bytes.iter().zip(at..) {
        if let Some([base, _, offset, _]) =
            windows.iter().find(|w| (w[2]..w[2] + w[1]).contains(&at))
        {
            // SAFETY: inside a window, which is still writable.
            unsafe { ((base + at - offset) as *mut u8).write(byte) };
        }
    }
}

/// Registers of a case, what is open of them in the end, and where that is.
fn registers(file: &mut Reader) -> (State, Open, u64) {
    let mut state = State::at(0);
    for register in cpu::ORDER {
        state.set(register, file.word());
    }
    state.context.rip = file.word();
    state.context.eflags = file.word();
    (state.fs_base, state.gs_base) = (file.word(), file.word());
    let bits = file.word();
    if bits == 32 {
        state.context.cs = cpu::CODE32;
        state.data = cpu::DATA;
    }
    state.fpu.bytes[..LEGACY_FPU].copy_from_slice(&file.bytes(LEGACY_FPU)[..LEGACY_FPU]);
    state.fpu.bytes[576..832].copy_from_slice(file.bytes(256));
    let open = Open { flags: file.word(), upper_halves: file.word() as u16, x87: false };
    (state, open, file.word())
}
