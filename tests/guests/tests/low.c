/* There are words of the engine's own in low memory, where few programs have any: where one has, none of those
   words may be seen, by the program or by the kernel for it. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
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
        good &= id == getpid();
    }
    return good;
}

static int words_are_ours(void) {
    int good = 1;
    for (unsigned long at = WORDS; at < WORDS + WORDS_LEN; at += 72)
        good &= *(volatile unsigned long *)at == word(at / 4096 * 4096 + at % 4096 / 8);
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

/* A program has asked for nothing to be seen there. */
static int nothing_is_seen(void) {
    int status;
    if (!fork()) {
        int good = calls();
        char *page = mmap((void *)(WORDS + 4096), 4096, PROT_NONE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (page == MAP_FAILED || !good || !calls()) _exit(1);
        (void)*(volatile char *)page;
        _exit(0);
    }
    return wait(&status) > 0 && WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
}

int main(void) {
    int good = calls(), ends[2];
    good &= others_table_faults() && nothing_is_seen();
    char *memory = mmap((void *)START, LEN, PROT_READ | PROT_WRITE,
                        MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || pipe(ends)) return 2;
    for (unsigned long at = START; at < START + LEN; at += 4096) {
        volatile unsigned long *page = (unsigned long *)at;
        good &= page[1] == 0;
        for (int n = 0; n < 512; n++) page[n] = word(at + n);
        for (int n = 0; n < 512; n++) good &= page[n] == word(at + n);
    }
    good &= calls();
    for (unsigned long at = START; at < START + LEN; at += 4096) {
        char back[4096];
        good &= write(ends[1], (void *)at, 4096) == 4096 && read(ends[0], back, 4096) == 4096;
        good &= memcmp(back, (void *)at, 4096) == 0;
    }
    good &= crowd();
    munmap(memory, LEN);
    good &= calls();
    puts(good ? "the memory is the program's" : "there is something else");
    return !good;
}
