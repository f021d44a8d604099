// What the CPU does with bytes at the end of a page that has nothing behind it: a line for each sequence, of the signal and how far
// from the instruction its address is.
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, MOST = 4000 };

static sigjmp_buf back;
static volatile int number;
static volatile unsigned long address;
static char *const first = (char *)0x40000000;
static int count;
static unsigned char lengths[MOST];

static void on_signal(int signal, siginfo_t *info, void *context) {
    (void)context;
    number = signal;
    address = (unsigned long)info->si_addr;
    siglongjmp(back, 1);
}

// Puts a sequence at the end of a page of its own.
static void put(const unsigned char *bytes, int length) {
    memcpy(first + 2 * PAGE * count + PAGE - length, bytes, length);
    lengths[count++] = length;
}

static void run(int at) {
    char *code = first + 2 * PAGE * at + PAGE - lengths[at];
    if (!sigsetjmp(back, 1)) __asm__ volatile("xor %%eax, %%eax\n jmp *%0" : : "b"(code) : "rax", "memory");
    for (int i = 0; i < lengths[at]; i++) printf("%02x ", (unsigned char)code[i]);
    printf("signal %d at %ld\n", number, (long)(address - (unsigned long)code));
}

int main(void) {
    static const unsigned char prefixes[] = {0, 0x66, 0xf2, 0xf3};
    static const unsigned char undefined[][3] = {{0x82, 0xc0, 0}, {0xd9, 0x0c, 0}, {0xdb, 0x24, 0}, {0xff, 0x3c, 0}, {0xfe, 0x14, 0},
        {0xc6, 0xc8, 0}, {0x0f, 0x71, 0xc0}, {0x0f, 0xba, 0xc0}, {0x0f, 0x38, 0x0f}, {0x0f, 0x3a, 0x00}};
    for (int i = 0; i < MOST; i++)
        mmap(first + 2 * PAGE * i, PAGE, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    for (unsigned prefix = 0; prefix < sizeof prefixes; prefix++)
        for (int opcode = 0; opcode < 256; opcode++) {
            unsigned char bytes[] = {prefixes[prefix], 0x0f, opcode};
            // Neither system calls nor what reads the clock or the CPU's name.
            if (opcode == 0x05 || opcode == 0x34 || opcode == 0x31 || opcode == 0xa2) continue;
            put(bytes + !prefix, 3 - !prefix);
        }
    for (unsigned i = 0; i < sizeof undefined / 3; i++)
        for (int length = 1; length <= 3; length++) put(undefined[i], length);
    stack_t stack = {.ss_sp = mmap(0, 1 << 16, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), .ss_size = 1 << 16};
    sigaltstack(&stack, 0);
    struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    int signals[] = {SIGILL, SIGTRAP, SIGBUS, SIGFPE, SIGSEGV};
    for (int i = 0; i < 5; i++) sigaction(signals[i], &action, 0);
    for (int i = 0; i < count; i++) mprotect(first + 2 * PAGE * i, PAGE, 5);
    for (int i = 0; i < count; i++) run(i);
}
