/* A program may have memory anywhere below 2^47, and whatever lies there while it runs under a monitor, it has to get its
   own: what it reads and writes, what the kernel reads and writes for it, and what it executes.
   Arguments: how many random places, their seed, and whether to sweep (1). */
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE 4096ul
#define TOP 0x7ffffffff000ul
#define GIB (1ul << 30)
/* Below, words of the engine's can be read where the program has nothing (CAVEATS.md). */
#define LOW 0x200000ul
#define RIGHTS (PROT_READ | PROT_WRITE)
#define FLAGS (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

static int ends[2], bad, tried, taken;
static sigjmp_buf back;

static void caught(int signal) { siglongjmp(back, signal); }

static unsigned long word(unsigned long at) { return (at ^ 0x1234567) * 0x9e3779b97f4a7c15ul; }

static void expect(int good, const char *what, unsigned long at) {
    if (good) return;
    if (bad++ < 20) printf("%#lx: %s\n", at, what), fflush(stdout);
}

/* Reading it is a SIGSEGV. */
static int faults(unsigned long at) {
    if (sigsetjmp(back, 1)) return 1;
    *(volatile char *)at;
    return 0;
}

static void own_accesses(unsigned long at, unsigned long len) {
    volatile unsigned long *words = (unsigned long *)at;
    for (unsigned long n = 0; n < len / 8; n += 64) expect(words[n] == 0, "it is not empty", at + n * 8);
    for (unsigned long n = 0; n < len / 8; n += 8) words[n] = word(at + n);
    for (unsigned long n = 0; n < len / 8; n += 8) expect(words[n] == word(at + n), "it is not what was written", at + n * 8);
}

/* Out of the memory and into it by the kernel, across its pages. */
static void kernels_accesses(unsigned long at, unsigned long len) {
    static char bytes[3 * PAGE], want[3 * PAGE];
    memcpy(want, (void *)at, len);
    expect(write(ends[1], (void *)at, len) == (long)len, "write", at);
    expect(read(ends[0], bytes, len) == (long)len, "read", at);
    expect(memcmp(bytes, want, len) == 0, "the kernel has read something else", at);
    for (unsigned long n = 0; n < len; n++) want[n] = (char)(word(at + n) >> 40);
    expect(write(ends[1], want, len) == (long)len, "write", at);
    expect(read(ends[0], (void *)at, len) == (long)len, "read", at);
    expect(memcmp((void *)at, want, len) == 0, "the kernel has written something else", at);
    /* A word that the kernel gets and puts by itself. */
    struct iovec *vector = (struct iovec *)(at + PAGE - sizeof *vector);
    *vector = (struct iovec){(void *)at, 16};
    expect(writev(ends[1], vector, 1) == 16 && read(ends[0], (void *)at, 16) == 16, "writev", at);
    expect(pipe((int *)(at + PAGE - 4)) == 0, "pipe", at);
    close(*(int *)(at + PAGE - 4));
    close(*(int *)(at + PAGE));
}

static void execution(unsigned long at, unsigned long len) {
    unsigned char code[] = {0xb8, 0, 0, 0, 0, 0xc3};
    int number = (int)word(at);
    memcpy(code + 1, &number, 4);
    /* One that lies across the border as well. */
    unsigned long starts[] = {at + 64, at + PAGE - 3};
    for (int n = 0; n < 2; n++) memcpy((void *)starts[n], code, sizeof code);
    expect(mprotect((void *)at, len, PROT_READ | PROT_EXEC) == 0, "mprotect", at);
    for (int n = 0; n < 2; n++) {
        int got = 0, signal = sigsetjmp(back, 1);
        if (!signal) got = ((int (*)(void))starts[n])();
        expect(!signal, "a signal", starts[n]);
        expect(signal || got == number, "other code", starts[n]);
    }
}

/* Two pages, with the border between them at this address. */
static void look(unsigned long border) {
    unsigned long at = border - PAGE, len = 2 * PAGE;
    if (at < 0x10000 || at >= TOP - len) return;
    if (mmap((void *)at, len, RIGHTS, FLAGS | MAP_FIXED_NOREPLACE, -1, 0) != (void *)at) {
        taken++;
        return;
    }
    tried++;
    own_accesses(at, len);
    kernels_accesses(at, len);
    execution(at, len);
    expect(munmap((void *)at, len) == 0, "munmap", at);
    if (at >= LOW) expect(faults(at), "it is still there", at);
    /* The kernel is the first who touches it. */
    if (mmap((void *)at, len, RIGHTS, FLAGS | MAP_FIXED_NOREPLACE, -1, 0) != (void *)at) return;
    kernels_accesses(at, len);
    munmap((void *)at, len);
}

/* Near everything that engines, kernels and libraries like. */
static void chosen(void) {
    look(0x11000), look(0x60000), look(0x61000), look(0x70000), look(0x160000), look(1ul << 31), look(1ul << 32);
    for (unsigned long gib = 1; gib < 1ul << 17; gib += gib / 8 + 1) look(gib * GIB);
    for (unsigned long slot = 1; slot < 256; slot++) look(slot << 39);
    for (unsigned long slot = 128; slot < 256; slot++) {
        unsigned long window = (slot << 39) + 0x4000000000;
        look(window), look(window + 0x101000), look(window + 0x200000), look(window + 0x301000);
        look(window + 0x380000), look(window + 0x390000), look(window + 0x400000), look(window + 0x401000);
        look(window + 0x10001000), look(window + 0x20001000), look(window + 0x40001000);
        look((slot << 39) + 0x7fc01000), look((slot << 39) + 0x4800000000), look((slot << 39) + 0x4810000000);
        /* Where the top of a kernel's addresses would be, a GiB at a time. */
        for (unsigned long gib = 1; gib < 5; gib++) look((slot << 39) - gib * GIB + 0x1000000);
    }
    for (unsigned long gib = 0; gib < 16; gib++) look(0x68000000000 + gib * GIB / 4 + 0x1000000);
    for (unsigned long at = TOP - 64 * GIB; at < TOP; at += GIB / 2 + PAGE) look(at);
}

static unsigned long state;
static unsigned long chance(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

/* A mapping of 1.9 TiB without reservation, one page touched in every 32 MiB. */
static void sweep(void) {
    unsigned long len = 19ul << 40, step = 32ul << 20;
    len /= 10, len &= -step;
    char *memory = mmap(NULL, len, RIGHTS, FLAGS, -1, 0);
    if (memory == MAP_FAILED) { perror("1.9 TiB"), bad++; return; }
    madvise(memory, len, MADV_NOHUGEPAGE);
    for (unsigned long at = 0; at < len; at += step) {
        volatile unsigned long *words = (unsigned long *)(memory + at);
        expect(*words == 0, "it is not empty", (unsigned long)words);
        *words = word(at);
    }
    for (unsigned long at = 0; at < len; at += step)
        expect(*(unsigned long *)(memory + at) == word(at), "it is not what was written", (unsigned long)memory + at);
    munmap(memory, len);
}

int main(int count, char **arguments) {
    unsigned long places = count > 1 ? strtoul(arguments[1], 0, 0) : 1000;
    state = (count > 2 ? strtoul(arguments[2], 0, 0) : 1) * 0x9e3779b97f4a7c15ul | 1;
    struct sigaction action = {.sa_handler = caught, .sa_flags = SA_NODEFER};
    int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE};
    for (int n = 0; n < 5; n++) sigaction(signals[n], &action, NULL);
    if (pipe(ends)) return 2;
    chosen();
    for (unsigned long n = 0; n < places; n++) look(chance() % (TOP / PAGE) * PAGE);
    if (count > 3 && atoi(arguments[3])) sweep();
    printf("%d places tried, %d taken, %d wrong\n", tried, taken, bad);
    return bad != 0;
}
