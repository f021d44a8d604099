//! Loads and stores of all kinds at what a program must not reach. The engine translates programs that have just begun, and makes each
//! kind in a way of its own.

use crate::{BUS, Needs, Outcome, SEGV, Signal, asm, mmap};
use core::ptr;
use wedge_abi::{BIAS, RAM, VCPU_PAGE};

/// Bytes of memory of the program's own that instructions access beside.
const OWN_LEN: usize = 1 << 16;
/// The GiB from which Debian's kernels map all memory (HVA), without KASLR.
const DIRECT_MAP: u64 = 0xffff_8880_0000_0000u64.wrapping_add(BIAS);
const GIB: u64 = 1 << 30;
/// Makes an address non-canonical.
const BEYOND: u64 = 1 << 62;

/// An access at the first argument. The second is memory of the program's own.
type Way = fn(u64, u64);

/// A few instructions with the place in RDI and memory of the program's own in RSI.
macro_rules! way {
    ($($line:literal),*) => {
        |at, own| {
            // SAFETY: the attempt; whatever it does, it does to this process.
            unsafe {
                asm!("push rbx", "push rbp", "mov r15, rsp", $($line,)* "mov rsp, r15", "pop rbp", "pop rbx",
                    inout("rdi") at => _, inout("rsi") own => _, out("rax") _, out("rcx") _, out("rdx") _,
                    out("r8") _, out("r11") _, out("r15") _, out("xmm0") _, out("st(0)") _, out("st(1)") _,
                    out("st(2)") _, out("st(3)") _, out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _)
            }
        }
    };
}

const PLAIN: [(&str, Way); 26] = [
    ("load", way!("mov rax, [rdi]")),
    ("store", way!("mov [rdi], rax")),
    ("load by an index", way!("mov rax, rdi", "sub rax, rsi", "mov rax, [rsi + rax]")),
    ("load of a half", way!("movzx eax, word ptr [rdi]")),
    ("exchange", way!("lock xadd [rdi], rax")),
    ("exchange of two words", way!("mov rbx, rax", "lock cmpxchg16b [rdi]")),
    ("vector load", way!("movups xmm0, [rdi]")),
    ("vector store", way!("movups [rdi], xmm0")),
    ("load past FS", way!("mov rax, fs:[0]", "sub rdi, rax", "mov rax, fs:[rdi]")),
    ("store past FS", way!("mov rax, fs:[0]", "sub rdi, rax", "mov fs:[rdi], rax")),
    ("x87 load", way!("fld qword ptr [rdi]")),
    ("x87 store", way!("fldz", "fstp qword ptr [rdi]")),
    ("x87 state", way!("fnstenv [rdi]")),
    ("vector state", way!("fxsave64 [rdi]")),
    ("extended state", way!("and rdi, -64", "mov eax, 3", "xor edx, edx", "xsave64 [rdi]")),
    ("load of extended state", way!("and rdi, -64", "xor eax, eax", "xor edx, edx", "xrstor64 [rdi]")),
    ("bit far off", way!("sub rdi, rsi", "shl rdi, 3", "bt [rsi], rdi")),
    ("set bit far off", way!("sub rdi, rsi", "shl rdi, 3", "bts [rsi], rdi")),
    ("string load", way!("xchg rsi, rdi", "lodsq")),
    ("string store", way!("stosq")),
    ("repeated store", way!("mov ecx, 3", "rep stosq")),
    ("copy to it", way!("mov ecx, 24", "rep movsb")),
    ("copy from it", way!("xchg rsi, rdi", "mov ecx, 24", "rep movsb")),
    ("push of a word there", way!("push qword ptr [rdi]")),
    ("call by a word there", way!("call qword ptr [rdi]")),
    ("jump by a word there", way!("jmp qword ptr [rdi]")),
];

/// With the stack there.
const STACKED: [(&str, Way); 12] = [
    ("push", way!("lea rsp, [rdi + 8]", "push rax")),
    ("push of a constant", way!("lea rsp, [rdi + 8]", "push 5")),
    ("push of a word", way!("lea rsp, [rdi + 8]", "push qword ptr [rsi]")),
    ("push of flags", way!("lea rsp, [rdi + 8]", "pushfq")),
    ("pop", way!("mov rsp, rdi", "pop rax")),
    ("leave", way!("mov rbp, rdi", "leave")),
    ("load beside", way!("lea rsp, [rdi - 16]", "mov rax, [rsp + 16]")),
    ("store beside", way!("lea rsp, [rdi - 16]", "mov [rsp + 16], rax")),
    ("call", way!("lea rsp, [rdi + 8]", "call 2f", "2:")),
    ("call by a register", way!("lea rax, [rip + 2f]", "lea rsp, [rdi + 8]", "call rax", "2:")),
    ("call by a word", way!("lea rax, [rip + 2f]", "mov [rsi], rax", "lea rsp, [rdi + 8]", "call [rsi]", "2:")),
    ("return", way!("mov rsp, rdi", "ret")),
];

/// String instructions that begin in memory of the program's own and go on into the kernel's, upwards and downwards.
const ACROSS: [(&str, bool, Way); 4] = [
    ("store up", true, way!("mov ecx, 0x2000", "rep stosb")),
    ("copy up", true, way!("xchg rsi, rdi", "mov ecx, 0x2000", "rep movsb")),
    ("store down", false, way!("mov ecx, 0x2000", "std", "rep stosb", "cld")),
    ("copy down", false, way!("xchg rsi, rdi", "add rdi, 0x3000", "mov ecx, 0x2000", "std", "rep movsb", "cld")),
];

/// Memory at an address, or anywhere if that is zero.
fn map(at: u64, len: usize) -> u64 {
    let flags = if at == 0 { 0x22 } else { 0x22 | 0x10 };
    // SAFETY: private, anonymous, and where nothing of this process is.
    let got = unsafe { mmap(ptr::with_exposed_provenance_mut(at as usize), len, 3, flags, -1, 0) };
    assert_ne!(got as isize, -1, "no memory");
    got as u64
}

pub fn attempts(o: &mut Outcome) {
    let own = map(0, OWN_LEN);
    let places = [
        ("guest RAM", Needs::Kernel, RAM as u64 + 0x10_0000),
        ("the kernel's memory", Needs::Kernel, DIRECT_MAP + 0x10_0000),
        ("the vCPU page", Needs::Wedge, VCPU_PAGE as u64 + 0x100),
    ];
    for (place, needs, at) in places {
        for (name, way) in PLAIN {
            let goes_on = |at| move || { way(at, own); true };
            o.attempt(&format!("{name}: {place}"), needs, Signal(SEGV), goes_on(at));
            o.attempt(&format!("{name}: {place}, beyond canonical"), needs, Signal(SEGV), goes_on(at ^ BEYOND));
        }
        for (name, way) in STACKED {
            let goes_on = |at| move || { way(at, own); true };
            let needs = if o.closed.contains(&Needs::Stack) { needs } else { Needs::Stack };
            o.attempt(&format!("{name}: {place}"), needs, Signal(SEGV), goes_on(at));
            o.attempt(&format!("{name}: {place}, beyond canonical"), needs, Signal(BUS), goes_on(at ^ BEYOND));
        }
    }
    for (name, upwards, way) in ACROSS {
        let (memory, from) = if upwards {
            (DIRECT_MAP - 0x1_0000, DIRECT_MAP - 0x1000)
        } else {
            (DIRECT_MAP + GIB, DIRECT_MAP + GIB + 0xfff)
        };
        o.attempt(&format!("{name} into the kernel's memory"), Needs::Kernel, Signal(SEGV), || {
            map(memory, 0x1_0000);
            way(from, own);
            true
        });
    }
}
