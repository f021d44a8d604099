//! Guests of a few bytes: multiboot kernels in 32-bit protected mode, written by hand.

#![allow(dead_code)] // each test program uses its share

use std::{
    io::Write,
    process::{Command, Output, Stdio},
};

use tempfile::NamedTempFile;

/// Where the file, header first, is loaded (GPA).
const BASE: u32 = 0x10_0000;
/// The code follows the header of 32 bytes.
const ENTRY: u32 = BASE + 32;

/// `mov dx, 0x604; mov ax, SLP_EN | 5 << 10; out dx, ax`: ACPI S5.
pub const POWER_OFF: &[u8] = b"\x66\xba\x04\x06\x66\xb8\x00\x34\x66\xef";
/// `mov al, 0x15; out 0xf4, al`: the debug exit port.
pub const DEBUG_EXIT: &[u8] = b"\xb0\x15\xe6\xf4";
/// `mov al, 0xfe; out 0x64, al`: reset by the keyboard controller.
pub const RESET: &[u8] = b"\xb0\xfe\xe6\x64";
/// `mov dword [0xfee00300], 0x4500; jmp .`: INIT by the local APIC to the CPU itself.
pub const INIT: &[u8] = b"\xc7\x05\x00\x03\xe0\xfe\x00\x45\x00\x00\xeb\xfe";
/// `lidt [ENTRY + 8]; int3`, and an empty table behind it.
pub const TRIPLE_FAULT: &[u8] = b"\x0f\x01\x1d\x28\x00\x10\x00\xcc\0\0\0\0\0\0\0\0";
/// `mov eax, NOWHERE; jmp eax`
pub const JUMP_NOWHERE: &[u8] = b"\xb8\0\0\0\x40\xff\xe0";
/// `mov eax, NOWHERE; mov [eax], esp; mov eax, [eax]; out 0xf4, al`
pub const WRITE_NOWHERE: &[u8] = b"\xb8\0\0\0\x40\x89\x20\x8b\x00\xe6\xf4";
/// `jmp .`
pub const SPIN: &[u8] = b"\xeb\xfe";
/// `cli; hlt`
pub const HALT: &[u8] = b"\xfa\xf4";
/// `mov dx, 0x3f8; mov al, 'x'; loop: out dx, al; jmp loop`
pub const CHATTER: &[u8] = b"\x66\xba\xf8\x03\xb0x\xee\xeb\xfd";
/// Sends back what arrives at the serial port, until a `q`:
/// `mov dx, 0x3fd; wait: in al, dx; test al, 1; jz wait; mov dl, 0xf8; in al, dx; out dx, al;
/// mov dl, 0xfd; cmp al, 'q'; jne wait`, then powers off.
pub const ECHO: &[u8] =
    b"\x66\xba\xfd\x03\xec\xa8\x01\x74\xfb\xb2\xf8\xec\xee\xb2\xfd\x3cq\x75\xf1\
\x66\xba\x04\x06\x66\xb8\x00\x34\x66\xef";

/// A file with a kernel that executes `code`.
pub fn kernel(code: &[u8]) -> NamedTempFile {
    const MAGIC: u32 = 0x1bad_b002;
    const ADDRESSES_GIVEN: u32 = 1 << 16;
    let checksum = 0u32.wrapping_sub(MAGIC).wrapping_sub(ADDRESSES_GIVEN);
    let header = [MAGIC, ADDRESSES_GIVEN, checksum, BASE, BASE, 0, 0, ENTRY];
    let mut file = NamedTempFile::new().expect("a file");
    for word in header {
        file.write_all(&word.to_le_bytes()).expect("written");
    }
    file.write_all(code).expect("written");
    file
}

/// Seconds any test machine may run, in case all else fails.
pub const LONG: &str = "20";

/// ring3 about to run `kernel` for at most the given number of seconds.
pub fn ring3(kernel: &NamedTempFile, seconds: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ring3"));
    command.args(["run", "--memory", "16M", "--timeout", seconds, "--kernel"]).arg(kernel.path());
    command.stdin(Stdio::null());
    command
}

/// Runs `code` for at most the given number of seconds, with further options, to its end.
pub fn run(code: &[u8], seconds: &str, options: &[&str]) -> Output {
    let kernel = kernel(code);
    ring3(&kernel, seconds).args(options).output().expect("ring3 starts")
}

/// What ring3 said on standard error.
pub fn messages(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
