//! The bricks: single instructions and host calls, so that sums can be checked.

use crate::host;
use crate::measure::price;
use crate::report::row;

/// Prices a loop of one instruction sequence; the empty loop is about half a nanosecond.
macro_rules! loop_of {
    ($name:literal, [$($line:literal),+] $(, $operand:tt)*) => {
        row($name, price(31, 1000, || {
            // SAFETY: the sequence restores what it changes; clobbers are declared.
            unsafe {
                std::arch::asm!(
                    "mov r12d, 1000", "2:", $($line,)+ "dec r12d", "jnz 2b",
                    in("rdi") IMAGE, in("rsi") IMAGE + 8192,
                    out("r12") _, clobber_abi("sysv64"),
                );
            }
        }))
    };
}

const IMAGE: usize = 0x4200_0000;

/// Prints the price list.
pub fn run() {
    host::map_anon(IMAGE, 4 * host::PAGE, host::RW);
    loop_of!("empty loop", ["nop"]);
    loop_of!("rdpkru", ["xor ecx, ecx", "rdpkru"]);
    loop_of!("rdpkru, wrpkru", ["xor ecx, ecx", "rdpkru", "wrpkru"]);
    loop_of!("rdfsbase", ["rdfsbase rax"]);
    loop_of!("rdfsbase, wrfsbase", ["rdfsbase rax", "wrfsbase rax"]);
    loop_of!("rdgsbase, wrgsbase", ["rdgsbase rax", "wrgsbase rax"]);
    loop_of!("pushfq, popfq", ["pushfq", "popfq"]);
    loop_of!("pushfq, pop", ["pushfq", "pop rax"]);
    loop_of!(
        "seto/lahf, add/sahf (arithmetic flags only)",
        ["seto al", "lahf", "add al, 127", "sahf"]
    );
    loop_of!(
        "iretq to the next instruction",
        [
            "mov r8, rsp",
            "mov eax, ss",
            "push rax",
            "push r8",
            "pushfq",
            "mov eax, cs",
            "push rax",
            "lea rax, [rip+3f]",
            "push rax",
            "iretq",
            "3:"
        ]
    );
    loop_of!("call, ret", ["call 3f", "jmp 4f", "3: ret", "4:"]);
    loop_of!("jump through a register, always the same", ["lea rax, [rip+3f]", "jmp rax", "3:"]);
    loop_of!("xgetbv 1 (what is in use)", ["mov ecx, 1", "xgetbv"]);
    vectors();
    calls();
}

/// XSAVE and XRSTOR, with clean and with dirty registers.
fn vectors() {
    loop_of!(
        "xsave 0xe7 + xrstor 0xe7, clean",
        ["mov eax, 0xe7", "xor edx, edx", "xsave64 [rdi]", "xrstor64 [rdi]"]
    );
    loop_of!(
        "xsave 0xe7 + xrstor 0xe7, zmm0 zmm17 k1 dirty",
        [
            "vpternlogd zmm0, zmm0, zmm0, 0xff",
            "vpternlogd zmm17, zmm17, zmm17, 0xff",
            "kxnorq k1, k1, k1",
            "mov eax, 0xe7",
            "xor edx, edx",
            "xsave64 [rdi]",
            "xrstor64 [rdi]"
        ]
    );
    loop_of!("xrstor 0xe7, dirty image", ["mov eax, 0xe7", "xor edx, edx", "xrstor64 [rdi]"]);
    loop_of!("xrstor 0x7, dirty image", ["mov eax, 0x7", "xor edx, edx", "xrstor64 [rdi]"]);
    loop_of!("xrstor 0x3, dirty image", ["mov eax, 0x3", "xor edx, edx", "xrstor64 [rdi]"]);
    loop_of!("xrstor 0x2, dirty image", ["mov eax, 0x2", "xor edx, edx", "xrstor64 [rdi]"]);
    loop_of!("xsavec 0xe7 dirty", ["mov eax, 0xe7", "xor edx, edx", "xsavec64 [rsi]"]);
    loop_of!("vzeroall", ["vzeroall"]);
    loop_of!(
        "xrstor 0xe7, clean image",
        [
            "vzeroall",
            "mov qword ptr [rdi + 512], 0",
            "mov eax, 0xe7",
            "xor edx, edx",
            "xrstor64 [rdi]"
        ]
    );
}

/// Host calls by bare `syscall`.
fn calls() {
    loop_of!("host call: getpid", ["mov eax, 39", "syscall"]);
    loop_of!(
        "host call: sigaltstack (what SS_AUTODISARM asks for again)",
        ["push rdi", "xor edi, edi", "xor esi, esi", "mov eax, 131", "syscall", "pop rdi"]
    );
    host::trap_calls_from(0, 4096);
    loop_of!("host call: getpid under the instruction-pointer filter", ["mov eax, 39", "syscall"]);
}
