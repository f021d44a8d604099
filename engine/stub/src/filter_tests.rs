//! The filter that wedges install, asked what it lets through.

extern crate std;

use crate::filter::{
    ABOVE, ALLOW, AT_LEAST, Bpf, EQUAL, FUTEX, IOCTL, LOAD, MAP_EMPTY, MAP_POPULATE, MAP_PRIVATE,
    MAP_SHARED, MMAP, MPROTECT, MUNMAP, NOTIFICATION_RECEIVE, NOTIFICATION_SEND, PKEY_MPROTECT,
    Program, RETURN, SET_THREAD_AREA, SETMASK, SIGALTSTACK, SIGPROCMASK, SIGRETURN, write,
    write_for_user,
};
use core::mem::offset_of;
use std::vec::Vec;
use wedge_abi::{BLOB, HAND_OVER, JOURNAL, Journal, LISTENER_FD, RAM_FD};

const SECRET: u64 = 0x0123_4567_89ab_cdef;
const BLOB_END: u64 = BLOB as u64 + 0x4000;
const X86_64: u32 = 0xc000_003e;
const I386: u32 = 0x4000_0003;

/// `struct seccomp_data`.
#[derive(Clone, Copy)]
struct Call {
    number: u32,
    arch: u32,
    pointer: u64,
    arguments: [u64; 6],
}

impl Call {
    /// As the blob makes it.
    fn new(number: u64, mut arguments: [u64; 6]) -> Self {
        if number == MMAP {
            arguments[4] |= SECRET & !0xffff_ffff;
            arguments[2] |= SECRET << 32;
        } else {
            arguments[5] = SECRET;
        }
        Self { number: number as u32, arch: X86_64, pointer: BLOB as u64 + 0x1000, arguments }
    }

    fn word(&self, offset: u32) -> u32 {
        let half = |value: u64| (value >> (offset % 8 * 8)) as u32;
        match offset {
            0 => self.number,
            4 => self.arch,
            8 | 12 => half(self.pointer),
            _ => half(self.arguments[(offset as usize - 16) / 8]),
        }
    }

    fn passes(&self) -> bool {
        self.passes_one(|program, secret, end| write(program, secret, end, false))
    }

    /// Where 32-bit user code runs.
    fn passes_for_narrow(&self) -> bool {
        self.passes_one(|program, secret, end| write(program, secret, end, true))
    }

    /// In a process of user code.
    fn passes_for_user(&self) -> bool {
        self.passes_one(write_for_user)
    }

    fn passes_one(&self, write: fn(&mut Program, u64, u64)) -> bool {
        let none = Bpf { code: RETURN, yes: 0, no: 0, k: 0 };
        let mut program: Program = [none; _];
        write(&mut program, SECRET, BLOB_END);
        run(&program, self) == ALLOW
    }
}

/// What the host does with a filter.
fn run(program: &[Bpf], call: &Call) -> u32 {
    let (mut at, mut value) = (0, 0);
    loop {
        let Bpf { code, yes, no, k } = program[at];
        let taken = match code {
            LOAD => {
                value = call.word(k);
                at += 1;
                continue;
            }
            EQUAL => value == k,
            ABOVE => value > k,
            AT_LEAST => value >= k,
            RETURN => return k,
            _ => panic!("instruction {code:#x}"),
        };
        at += 1 + usize::from(if taken { yes } else { no });
    }
}

/// The flags that the blob maps with.
const MAPS: [u64; 4] =
    [MAP_SHARED, MAP_SHARED | MAP_POPULATE, MAP_PRIVATE | MAP_POPULATE, MAP_EMPTY];

fn honest() -> Vec<Call> {
    let map = |flags| Call::new(MMAP, [0x40_0000, 4096, 3, flags, RAM_FD, 0x1000]);
    let maps = MAPS.map(map);
    let others = [
        Call::new(MPROTECT, [0x40_0000, 4096, 5, 0, 0, 0]),
        Call::new(PKEY_MPROTECT, [0x40_0000, 4096, 3, 1, 0, 0]),
        Call::new(MUNMAP, [0x40_0000, 4096, 0, 0, 0, 0]),
        Call::new(FUTEX, [BLOB as u64, 0, 1, 0, 0, 0]),
        Call::new(FUTEX, [BLOB as u64, 1, 1, 0, 0, 0]),
        Call::new(SIGRETURN, [0; 6]),
    ];
    maps.into_iter().chain(others).collect()
}

#[test]
fn what_the_blob_needs_passes() {
    assert!(honest().iter().all(Call::passes));
    assert!(own_stack().passes());
}

/// Has the host put signals of a wedge on a stack again.
fn own_stack() -> Call {
    Call::new(SIGALTSTACK, [0x40_0000, 0, 0, 0, 0, 0])
}

/// `set_thread_area` as the blob makes it.
fn narrow() -> Call {
    let [low, high] = [SECRET & 0xffff_ffff, SECRET >> 32];
    let call = Call::new(SET_THREAD_AREA.into(), [0; 6]);
    Call { arch: I386, arguments: [0x16_f000, 0, 0, low, high, 0], ..call }
}

#[test]
fn one_32_bit_call_passes_where_it_is_needed() {
    let call = narrow();
    assert!(call.passes_for_narrow() && !call.passes() && !call.passes_for_user());
    assert!(honest().iter().all(Call::passes_for_narrow));
    for pointer in [0, 0x40_0000, BLOB as u64 - 1, BLOB_END, BLOB as u64 + (1 << 32)] {
        assert!(!Call { pointer, ..call }.passes_for_narrow(), "from {pointer:#x}");
    }
    for at in [3, 4] {
        for bit in [0, 31] {
            let mut other = call;
            other.arguments[at] ^= 1 << bit;
            assert!(!other.passes_for_narrow(), "bit {bit} of argument {at}");
        }
    }
    for number in (0..600).filter(|number| *number != SET_THREAD_AREA) {
        assert!(!Call { number, ..call }.passes_for_narrow(), "{number}");
    }
    assert!(!Call { arch: X86_64, ..call }.passes_for_narrow());
}

#[test]
fn only_the_blob_calls() {
    for call in honest() {
        for pointer in [0, 0x40_0000, BLOB as u64 - 1, BLOB_END, BLOB as u64 + (1 << 32)] {
            assert!(!Call { pointer, ..call }.passes(), "{} from {pointer:#x}", call.number);
        }
        assert!(!Call { arch: I386, ..call }.passes_for_narrow());
        assert!(!Call { number: call.number | 0x4000_0000, ..call }.passes(), "x32");
    }
}

#[test]
fn nothing_passes_without_the_secret() {
    for call in honest().into_iter().chain([own_stack()]) {
        for bit in 0..64 {
            let mut call = call;
            match (call.number == MMAP as u32, bit) {
                (false, _) => call.arguments[5] ^= 1 << bit,
                (true, 0..32) => call.arguments[2] ^= 1 << (bit + 32),
                (true, _) => call.arguments[4] ^= 1 << bit,
            }
            assert!(!call.passes(), "{}, bit {bit}", call.number);
        }
    }
}

/// Guest code that has the secret: only these calls, whatever the arguments.
#[test]
fn the_secret_opens_seven_calls_with_these_arguments() {
    let open = [MMAP, MPROTECT, PKEY_MPROTECT, MUNMAP, FUTEX, SIGRETURN, SIGALTSTACK];
    let arguments = [0x40_0000, 0, 3, MAP_SHARED, RAM_FD, 0];
    for number in 0..2000 {
        let passes = Call::new(number, arguments).passes();
        assert_eq!(passes, open.contains(&number), "call {number}");
    }
}

#[test]
fn only_guest_ram_is_mapped() {
    for fd in (1..64).map(|n| RAM_FD + n).chain([0xffff_ffff]) {
        for flags in MAPS {
            assert!(!Call::new(MMAP, [0, 4096, 3, flags, fd, 0]).passes(), "descriptor {fd}");
        }
    }
    // Without MAP_FIXED the host would choose the place.
    for bit in 0..64 {
        let other = MAP_SHARED ^ 1 << bit;
        let known = MAPS.contains(&other);
        assert_eq!(Call::new(MMAP, [0, 4096, 3, other, RAM_FD, 0]).passes(), known, "{other:#x}");
    }
}

/// The process of user code is heard of and let go on, and nothing else is asked of any descriptor.
#[test]
fn one_descriptor_is_asked_two_things() {
    for fd in 0..8 {
        for request in [NOTIFICATION_RECEIVE, NOTIFICATION_SEND, 0xc018_2103, 0x4008_2104, 0x5401] {
            let known = fd == LISTENER_FD
                && (request == NOTIFICATION_RECEIVE || request == NOTIFICATION_SEND);
            let call = Call::new(IOCTL, [fd, request, 0, 0, 0, 0]);
            assert_eq!(call.passes(), known, "{fd} {request:#x}");
            let guessed = [fd, request, 0, 0, 0, SECRET ^ 1];
            assert!(!Call { arguments: guessed, ..call }.passes());
        }
    }
}

/// It needs no secret. Containers allow it, and were it carried out, it would do nothing.
#[test]
fn the_hand_over_is_from_the_blob() {
    let call = Call { arguments: [0; 6], ..Call::new(HAND_OVER, [0; 6]) };
    assert!(call.passes_for_user() && !call.passes());
    assert!(!Call { pointer: BLOB_END, ..call }.passes_for_user());
    assert!(!Call { arch: I386, ..call }.passes_for_user());
    const SCHED_YIELD: u64 = 24;
    assert_eq!(HAND_OVER, SCHED_YIELD);
}

#[test]
fn futexes_wait_and_wake() {
    for operation in 2..0x200 {
        assert!(!Call::new(FUTEX, [BLOB as u64, operation, 0, 0, 0, 0]).passes(), "{operation}");
    }
}

/// The two calls that need no secret, as the process of user code makes them.
fn for_signals() -> [Call; 2] {
    let at = |offset: usize| (JOURNAL + offset) as u64;
    let (stack, mask) = (at(offset_of!(Journal, signal_stack)), at(offset_of!(Journal, mask)));
    let calls = [(SIGALTSTACK, [stack, 0, 0, 0, 0, 0]), (SIGPROCMASK, [SETMASK, mask, 0, 8, 0, 0])];
    calls.map(|(number, arguments)| Call { arguments, ..Call::new(number, [0; 6]) })
}

#[test]
fn signals_are_prepared_by_user_code_processes_only() {
    for call in for_signals() {
        assert!(call.passes_for_user() && !call.passes());
        for pointer in [0, 0x40_0000, BLOB as u64 - 1, BLOB_END, BLOB as u64 + (1 << 32)] {
            assert!(!Call { pointer, ..call }.passes_for_user(), "from {pointer:#x}");
        }
    }
    assert!(honest().iter().all(Call::passes_for_user));
}

#[test]
fn signals_are_prepared_in_one_way() {
    let matters = |number: u64, argument: usize| match number {
        SIGALTSTACK => argument < 2,
        _ => argument < 3,
    };
    for call in for_signals() {
        for (argument, bit) in (0..6).flat_map(|argument| (0..64).map(move |bit| (argument, bit))) {
            let mut other = call;
            other.arguments[argument] ^= 1 << bit;
            // The host takes the upper half of how the mask is changed for nothing.
            let upper = call.number == SIGPROCMASK as u32 && argument == 0 && bit >= 32;
            let free = !matters(call.number.into(), argument) || upper;
            assert_eq!(other.passes_for_user(), free, "{}: {argument}, bit {bit}", call.number);
        }
    }
}
