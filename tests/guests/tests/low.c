/* There are words of the engine's own in low memory, where few programs have any: where one has, none of those
   words may be seen, by the program or by the kernel for it. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define START 0x10000ul
#define LEN 0x200000ul
/* Where those words are. */
#define WORDS 0x160000ul
#define WORDS_LEN 0x10000ul
/* More than a kernel has address-space identifiers for. */
#define CROWD 12
#define ROUNDS 20

static unsigned long word(unsigned long at) { return at * 0x9e3779b97f4a7c15ul; }

/* Often enough for it to be worth something to the engine; at times beginning with the SYSCALL itself, as the
   kernel does when it starts a call over. */
static int calls(void) {
    int good = 1;
    for (int n = 0; n < 1000; n++) {
        long id, direct = n % 10 == 9;
        __asm__ volatile("mov $39, %%eax; test %1, %1; jnz 1f; mov $39, %%eax; 1: syscall"
                         : "=&a"(id) : "r"(direct) : "rcx", "r11", "memory");
        if (id == getpid()) continue;
        printf("call %d: getpid() is %ld\n", n, id);
        good = 0;
    }
    return good;
}

static int words_are_ours(void) {
    int good = 1;
    for (unsigned long at = WORDS; at < WORDS + WORDS_LEN; at += 72) {
        unsigned long seen = *(volatile unsigned long *)at;
        if (seen == word(at / 4096 * 4096 + at % 4096 / 8)) continue;
        printf("at %#lx: %#lx\n", at, seen);
        good = 0;
    }
    fflush(stdout);
    return good;
}

/* One process after the other looks there, at nothing else that is near. */
static int crowd(void) {
    int ring[CROWD][2], good = 1;
    for (int n = 0; n < CROWD; n++) good &= pipe(ring[n]) == 0;
    for (int n = 0; n < CROWD; n++) {
        if (fork()) continue;
        char token;
        for (int round = 0; round < ROUNDS; round++) {
            good &= read(ring[n][0], &token, 1) == 1 && words_are_ours();
            good &= write(ring[(n + 1) % CROWD][1], &token, 1) == 1;
        }
        _exit(!good);
    }
    good &= write(ring[0][1], "", 1) == 1;
    for (int n = 0, status; n < CROWD; n++) good &= wait(&status) > 0 && status == 0;
    return good;
}

/* gVisor has a table there, as the engine has elsewhere, and counts on a fault as long as nothing is. */
static int others_table_faults(void) {
    int status;
    if (!fork()) {
        (void)*(volatile char *)0x60000ul;
        _exit(0);
    }
    return wait(&status) > 0 && WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
}

/* A program asks for nothing to be seen there, and looks. */
static void look_where_nothing_may_be_seen(void) {
    char *page = mmap((void *)(WORDS + 4096), 4096, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED || !calls()) _exit(1);
    (void)*(volatile char *)page;
    _exit(0);
}

static int nothing_is_seen(void) {
    int status;
    if (!fork()) {
        if (!calls()) _exit(1);
        look_where_nothing_may_be_seen();
    }
    return wait(&status) > 0 && WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
}

/* The same where another program runs, and calls, between each call of the first one and its next instruction. */
static int nothing_is_seen_after_a_pause(void) {
    int status, child = fork();
    if (!child) {
        if (!calls() || ptrace(PTRACE_TRACEME, 0, 0, 0)) _exit(1);
        raise(SIGSTOP);
        mmap((void *)(WORDS + 4096), 4096, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        (void)*(volatile char *)(WORDS + 4096);
        _exit(0);
    }
    while (waitpid(child, &status, 0) == child && WIFSTOPPED(status)) {
        if (WSTOPSIG(status) == SIGSEGV) return !kill(child, SIGKILL) && waitpid(child, &status, 0) == child;
        ptrace(PTRACE_SYSCALL, child, 0, 0);
    }
    return 0;
}

static int wrong;

static void expect(int good, const char *what) {
    if (!good) wrong = 1, printf("there is something else: %s\n", what);
}

static void pages_keep_what_is_written(void) {
    int zero = 1, kept = 1;
    for (unsigned long at = START; at < START + LEN; at += 4096) {
        volatile unsigned long *page = (unsigned long *)at;
        zero &= page[1] == 0;
        for (int n = 0; n < 512; n++) page[n] = word(at + n);
        for (int n = 0; n < 512; n++) kept &= page[n] == word(at + n);
    }
    expect(zero, "in new pages");
    expect(kept, "where it was written");
}

static void the_kernel_sees_the_same(int ends[2]) {
    int whole = 1, same = 1;
    for (unsigned long at = START; at < START + LEN; at += 4096) {
        char back[4096];
        whole &= write(ends[1], (void *)at, 4096) == 4096 && read(ends[0], back, 4096) == 4096;
        same &= memcmp(back, (void *)at, 4096) == 0;
    }
    expect(whole, "a page is not written whole");
    expect(same, "in what the kernel read");
}

int main(void) {
    int ends[2];
    /* Before any other has been seen to have memory there. */
    expect(nothing_is_seen_after_a_pause(), "where nothing may be seen after a pause, no fault");
    expect(calls(), "calls, before memory is there");
    expect(others_table_faults(), "where nothing is, no fault");
    expect(nothing_is_seen(), "where nothing may be seen, no fault");
    char *memory = mmap((void *)START, LEN, PROT_READ | PROT_WRITE,
                        MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || pipe(ends)) return 2;
    pages_keep_what_is_written();
    expect(calls(), "calls, with memory");
    the_kernel_sees_the_same(ends);
    expect(crowd(), "in one of many processes");
    munmap(memory, LEN);
    expect(calls(), "calls, after memory");
    if (!wrong) puts("the memory is the program's");
    return wrong;
}
