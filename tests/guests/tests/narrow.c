// A 32-bit program without a C library that does what differs for 32-bit code, and prints what it sees. The host's output is
// what a guest's must be.

typedef unsigned u32;
typedef unsigned long long u64;

static int call(int n, u32 a, u32 b, u32 c, u32 d, u32 e) {
    int result;
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(n), "b"(a), "c"(b), "d"(c), "S"(d), "D"(e) : "memory");
    return result;
}

enum { EXIT = 1, FORK = 2, WRITE = 4, WAITPID = 7, GETPID = 20, OLD_MMAP = 90, MUNMAP = 91, CLONE = 120, MPROTECT = 125,
       MODIFY_LDT = 123, YIELD = 158, SIGACTION = 174, SIGALTSTACK = 186, MMAP = 192, GETTID = 224, SET_THREAD_AREA = 243 };

static void text(const char *s) {
    u32 n = 0;
    while (s[n]) n++;
    call(WRITE, 1, (u32)s, n, 0, 0);
}

static void number(u32 x) {
    char digits[12], *at = digits + 11;
    *at = 0;
    do *--at = "0123456789abcdef"[x & 15]; while (x >>= 4);
    *--at = ' ';
    text(at);
}

static void line(const char *name, u32 x) { text(name); number(x); text("\n"); }

// What comes back by a signal, and where from.
u32 saved_esp, saved_ebp, signals;
void attempt(void (*code)(void));
void recovered(void);
__asm__(".text\nattempt: push %ebx; push %esi; push %edi; push %ebp\n"
        "mov 20(%esp), %eax; mov %esp, saved_esp\n"
        "mov $0x11111111, %ebx; mov $0x22222222, %ecx; mov $0x33333333, %edx; mov $0x44444444, %esi\n"
        "mov $0x55555555, %edi; mov $0x66666666, %ebp; test %ebx, %ebx; call *%eax\n"
        "recovered: mov saved_esp, %esp; cld; pop %ebp; pop %edi; pop %esi; pop %ebx; ret");

static void on_signal(int signal, u32 *info, u32 *context) {
    u32 *m = context + 5;
    text("  signal"); number(signal); number(info[2]); number(m[12]);
    if (signal != 31) number(m[13]);
    if (m[14] < 0xf0000000) { number(info[3]); number(m[14]); number(m[7] < 0x1000 ? m[7] : saved_esp - m[7]); } // not in the vDSO
    for (int n = 4; n <= 11; n++) if (n != 7) number(m[n]);
    number(m[0] & 0xffff); number(m[1] & 0xffff); number(m[2] & 0xffff); number(m[3] & 0xffff);
    number(m[15] & 0xffff); number(m[16] & 0xed5); number(m[18] & 0xffff);
    text("\n");
    m[16] &= ~0x100u;
    m[18] = 0x2b;
    signals++;
    m[14] = (u32)recovered;
}

static void handle(int signal) {
    struct { void *handler; u32 flags, restorer, mask[2]; } action = {on_signal, 0x48000004, 0, {0, 0}};
    call(SIGACTION, signal, (u32)&action, 0, 8, 0);
}

#define CODE(name, lines) void name(void); __asm__(#name ": " lines "; ret");
CODE(null_read, "mov 0x10, %eax")
CODE(null_write, "mov $1, %eax; mov %eax, 0x20")
CODE(null_call, "xor %eax, %eax; call *%eax")
CODE(failed_call, "mov $-14, %eax; xor %ecx, %ecx; jmp *%ecx")
CODE(high_read, "mov 0xfffff000, %eax")
CODE(divide, "xor %eax, %eax; xor %edx, %edx; div %eax")
CODE(breakpoint, "int3")
CODE(overflow, "mov $0x7fffffff, %eax; inc %eax; into")
CODE(bounds, "push $5; push $1; mov $9, %eax; bound %eax, (%esp)")
CODE(undefined, "ud2")
CODE(privileged, "hlt")
CODE(port, "in %dx, %al")
CODE(other_interrupt, "int $0x2e")
CODE(syscall_32, "mov $0xfff, %eax; syscall")
CODE(enter_nowhere, "mov $20, %eax; mov $0x10, %ebp; sysenter")
CODE(kernel_segment, "mov $0x18, %eax; mov %eax, %ds")
CODE(empty_segment, "mov $0x73, %eax; mov %eax, %fs")
CODE(null_segment, "xor %eax, %eax; mov %eax, %fs; mov %fs:0, %eax")
CODE(bad_far, "ljmp $0x1b, $0")
CODE(stack_segment, "mov $0x63, %eax; mov %eax, %ss; mov %ss:8, %ecx; ud2")
CODE(stack_call, "mov $0x63, %eax; mov %eax, %ss; xor %esp, %esp; mov $20, %eax; int $0x80; xor %eax, %eax; mov (%esp), %ecx; mov %ss, %edx; hlt")
CODE(step, "pushf; orl $0x100, (%esp); popf; nop; nop")
CODE(step_call, "mov $0xfff, %eax; pushf; orl $0x100, (%esp); popf; int $0x80; nop")
CODE(misaligned, "pushf; orl $0x40000, (%esp); popf; mov 1(%esp), %eax")
CODE(float_divide, "push $0x37b; fldcw (%esp); fldz; fld1; fdivp; fwait")

static struct { const char *name; void (*code)(void); } cases[] = {
    {"null read", null_read}, {"null write", null_write}, {"null call", null_call}, {"failed call", failed_call},
    {"high read", high_read}, {"divide", divide}, {"breakpoint", breakpoint}, {"overflow", overflow},
    {"bounds", bounds}, {"undefined", undefined}, {"privileged", privileged}, {"port", port},
    {"int 2e", other_interrupt}, {"syscall", syscall_32}, {"sysenter nowhere", enter_nowhere},
    {"kernel segment", kernel_segment}, {"empty segment", empty_segment}, {"null segment", null_segment},
    {"bad far jump", bad_far}, {"stack segment", stack_segment}, {"call there", stack_call}, {"step", step}, {"step over a call", step_call}, {"misaligned", misaligned},
    {"float", float_divide},
};

// Registers across a system call.
u32 seen[8];
void kept(void);
__asm__("kept: pushal; mov $1, %ebx; mov $2, %ecx; mov $3, %edx; mov $4, %esi; mov $5, %edi; mov $6, %ebp\n"
        "mov $0xfff, %eax; int $0x80\n"
        "mov %eax, seen; mov %ebx, seen+4; mov %ecx, seen+8; mov %edx, seen+12; mov %esi, seen+16; mov %edi, seen+20\n"
        "mov %ebp, seen+24; popal; ret");

// By way of the vDSO.
u32 vsyscall;
static int quick(int n, u32 a) {
    int result;
    __asm__ volatile("call *vsyscall" : "=a"(result) : "a"(n), "b"(a) : "memory", "ecx", "edx");
    return result;
}

struct area { u32 entry, base, limit, flags; };
static int set_area(u32 entry, void *base, u32 limit, u32 flags) {
    struct area area = {entry, (u32)base, limit, flags};
    int result = call(SET_THREAD_AREA, (u32)&area, 0, 0, 0, 0);
    return result ? result : (int)area.entry;
}
static u32 by_gs(u32 selector, u32 offset) {
    u32 found;
    __asm__ volatile("mov %1, %%gs; mov %%gs:(%2), %0" : "=r"(found) : "r"(selector), "r"(offset));
    return found;
}
static u32 from_gs(u32 offset) {
    u32 found;
    __asm__ volatile("mov %%gs:(%1), %0" : "=r"(found) : "r"(offset));
    return found;
}
u32 words[3][8] = {{1, 2, 3, 4, 5, 6, 7, 8}, {11, 12, 13, 14, 15, 16, 17, 18}, {21, 22, 23, 24, 25, 26, 27, 28}};
CODE(beyond, "mov $0x73, %eax; mov %eax, %gs; mov %gs:16, %eax; mov %gs:13, %eax")

// 64-bit code of a 32-bit program: both kinds of system call there, too.
u32 wide(void);
__asm__("wide: push %ebx; push %esi; push %edi; push %ebp; lcall $0x33, $1f; pop %ebp; pop %edi; pop %esi; pop %ebx; ret\n"
        ".code64\n1: mov $39, %eax; syscall; mov %eax, %r12d; mov $20, %eax; int $0x80; sub %eax, %r12d\n"
        "mov $0x123456789abcdef0, %r8; lea (%r8, %r12), %r8; shr $32, %r8; mov %r8d, %eax; lretl\n.code32");

// Threads that share one address space and have a segment each.
volatile u32 arrived, wrong, turn;
u32 blocks[4][64];
char stacks[4][16384] __attribute__((aligned(16)));
static void thread(u32 n) {
    for (u32 round = 0; round < 300; round++) {
        if (from_gs(0) != n || from_gs(252) != ~n) wrong++;
        if (by_gs(0x63, 0) != n) wrong++;
        if (round % 3 == 0) call(YIELD, 0, 0, 0, 0, 0);
    }
    __sync_fetch_and_add(&arrived, 1);
    for (;;) call(EXIT, 0, 0, 0, 0, 0);
}
static void threads(void) {
    for (u32 n = 0; n < 4; n++) {
        struct area area = {12, (u32)blocks[n], 0xfffff, 0x51};
        blocks[n][0] = n;
        blocks[n][63] = ~n;
        u32 *top = (u32 *)(stacks[n] + 16384 - 64);
        top[0] = (u32)thread;
        top[1] = n;
        // VM, FS, FILES, SIGHAND, THREAD, SYSVSEM, SETTLS
        int child = CLONE;
        __asm__ volatile("int $0x80; test %%eax, %%eax; jnz 1f; pop %%eax; call *%%eax; hlt; 1:"
                         : "+a"(child) : "b"(0xd0f00), "c"(top), "S"(&area) : "memory");
        if (child < 0) line("clone", child);
    }
    for (u32 n = 0; n < 100000 && arrived < 4; n++) call(YIELD, 0, 0, 0, 0, 0);
    line("threads", arrived);
    line("wrong", wrong);
}

static u32 fib(u32 n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }

static u32 decimal(void) {
    u32 x;
    __asm__("mov $0x97654399, %%eax; add $0x38, %%al; daa; sub $0x19, %%al; das; aaa; aas; aam; aad; push %%ds; pop %%es\n"
            "pushal; popal; mov $0x23, %%edx; arpl %%dx, %%ax; cwtl; lahf; sahf; .byte 0xd6" : "=a"(x) : : "edx", "cc");
    return x;
}

static void processes(void) {
    u32 sum = 0;
    int status;
    for (u32 n = 0; n < 20; n++) {
        int child = call(FORK, 0, 0, 0, 0, 0);
        if (!child) {
            words[0][0] += n;
            call(EXIT, words[0][0] & 0x7f, 0, 0, 0, 0);
        }
        call(WAITPID, child, (u32)&status, 0, 0, 0);
        sum += status >> 8;
    }
    line("children", sum);
}

// Segments that change all the time, in a program whose memory is where ring3 has a table of its own.
static void near(void) {
    u32 page[6] = {0x180000, 4096, 3, 0x32, -1, 0}, wrong_words = 0; // private, fixed, anonymous
    if (call(OLD_MMAP, (u32)page, 0, 0, 0, 0) != 0x180000) return;
    *(volatile u32 *)0x180000 = 1;
    for (u32 n = 0; n < 500; n++) {
        set_area(n ? 12 : -1, words[n & 1], 0xfffff, 0x51);
        for (u32 again = 0; again < 10000; again++) wrong_words += by_gs(0x63, 4) != words[n & 1][1];
    }
    line("near", *(volatile u32 *)0x180000);
    line("wrong", wrong_words);
}

// With "calls", so many system calls of each kind are made, and nothing else.
static int same(const char *a, const char *b) { while (*a && *a == *b) a++, b++; return *a == *b; }

void begin(u32 *stack) {
    char **arguments = (char **)(stack + 1);
    u32 *at = stack + 1;
    while (*at++);
    while (*at++);
    for (; at[0]; at += 2) if (at[0] == 32) vsyscall = at[1];
    if (stack[0] > 1 && same(arguments[1], "calls")) {
        for (u32 n = 0; n < 50000; n++) quick(GETPID, 0);
        for (u32 n = 0; n < 50000; n++) call(GETPID, 0, 0, 0, 0, 0);
        call(EXIT, 0, 0, 0, 0, 0);
    }
    if (stack[0] > 1 && same(arguments[1], "near")) {
        near();
        call(EXIT, 0, 0, 0, 0, 0);
    }
    static char alternate[16384];
    u32 stack_of_signals[3] = {(u32)alternate, 0, sizeof alternate};
    call(SIGALTSTACK, (u32)stack_of_signals, 0, 0, 0, 0);
    for (int signal = 1; signal < 9; signal++) handle(signal);
    handle(11); handle(31);
    line("fib", fib(24));
    line("decimal", decimal());
    kept();
    for (int n = 0; n < 7; n++) line("kept", seen[n]);
    line("vsyscall", quick(GETPID, 0) == call(GETPID, 0, 0, 0, 0, 0));
    line("close", quick(6, 99));
    line("area", set_area(-1, words[0], 0xfffff, 0x51));
    line("by gs", by_gs(0x63, 4));
    line("area", set_area(13, words[1], 0xfffff, 0x51));
    line("by gs", by_gs(0x6b, 8));
    line("by gs", by_gs(0x63, 8));
    line("area", set_area(12, words[2], 0xfffff, 0x51));
    line("by gs", by_gs(0x63, 8));
    line("area", set_area(14, words[1], 16, 0x41));
    text("beyond\n");
    attempt(beyond);
    line("area", set_area(14, words[1], 0, 0x28));
    line("by gs", by_gs(0x63, 0));
    for (u32 n = 0; n < sizeof cases / sizeof *cases; n++) {
        text(cases[n].name);
        text("\n");
        attempt(cases[n].code);
    }
    line("wide", wide());
    line("by gs", from_gs(4));
    processes();
    threads();
    for (u32 n = 0; n < 300; n++) { quick(YIELD, 0); call(YIELD, 0, 0, 0, 0, 0); }
    line("by gs", by_gs(0x63, 12));
    for (u32 n = 0; n < 200; n++) kept();
    for (int n = 0; n < 7; n++) line("still kept", seen[n]);
    line("wide", wide());
    line("signals", signals);
    for (;;) call(252, 0, 0, 0, 0, 0);
}
__asm__(".globl _start\n_start: mov %esp, %eax; and $-16, %esp; sub $12, %esp; push %eax; call begin");
