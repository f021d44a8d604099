/*
 * A program with more scattered pages than its process may have mappings, each of which says which it is: read and
 * written in random order, by a fork, behind a handler of faults, across pages, by string instructions, under locks,
 * and made anew. Ends with "scattered N" for N rounds.
 */
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096ul
static uint64_t pages = 8192, state = 88172645463325252u;
static unsigned char *memory;
static uint32_t *order, *content;
static volatile sig_atomic_t faults;
static sigjmp_buf back;

static uint64_t next(void)
{
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

static void fail(const char *what, uint64_t page)
{
    printf("WRONG %s at page %lu\n", what, (unsigned long)page);
    fflush(stdout);
    _exit(1);
}

/* Each page has its word at a place of its own. */
static uint32_t *word(uint64_t page) { return (uint32_t *)(memory + page * PAGE + (page * 64 & (PAGE - 64))); }

static void check(const char *what, uint64_t page)
{
    if (*word(page) != content[page])
        fail(what, page);
}

static void reads_and_writes(int count)
{
    for (int i = 0; i < count; i++) {
        uint64_t page = next() % pages;
        check("a read", page);
        switch (next() % 4) {
        case 0: *word(page) = content[page] = (uint32_t)next(); break;
        case 1: *word(page) += 3, content[page] += 3; break;
        case 2: __sync_fetch_and_add(word(page), 5), content[page] += 5; break;
        }
    }
}

/* Across two pages, by moves and by string instructions of any length. */
static void across(int count)
{
    for (int i = 0; i < count; i++) {
        uint64_t page = next() % (pages - 4);
        unsigned char *end = memory + (page + 1) * PAGE - 4;
        uint64_t value = next(), kept, found;
        memcpy(&kept, end, 8);
        *(volatile uint64_t __attribute__((aligned(1))) *)end = value;
        found = *(volatile uint64_t __attribute__((aligned(1))) *)end;
        if (found != value)
            fail("an access across pages", page);
        memcpy(end, &kept, 8);
        unsigned char copy[2 * PAGE];
        unsigned char *from = memory + page * PAGE + 100, *to = copy;
        uint64_t length = 2 * PAGE - 200;
        __asm__ volatile("rep movsb" : "+S"(from), "+D"(to), "+c"(length) : : "memory");
        if (memcmp(copy, memory + page * PAGE + 100, 2 * PAGE - 200))
            fail("a copy", page);
    }
}

static void on_fault(int signal, siginfo_t *info, void *context)
{
    (void)signal, (void)context;
    uint64_t page = ((uintptr_t)info->si_addr - (uintptr_t)memory) / PAGE;
    if (page >= pages)
        fail("the address of a fault", page);
    faults++;
    if (faults % 2)
        mprotect(memory + page * PAGE, PAGE, PROT_READ | PROT_WRITE);
    else
        siglongjmp(back, 1);
}

/* Pages that may be read only, or not at all, fault at the instruction, and go on once they may. */
static void protections(int count)
{
    struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO };
    sigaction(SIGSEGV, &action, NULL);
    for (int i = 0; i < count; i++) {
        uint64_t page = next() % pages;
        int before = faults;
        check("before mprotect", page);
        mprotect(memory + page * PAGE, PAGE, next() % 2 ? PROT_READ : PROT_NONE);
        if (!sigsetjmp(back, 1)) {
            *(volatile uint32_t *)word(page) = content[page] + 1;
            content[page]++;
        }
        if (faults != before + 1)
            fail("no fault", page);
        mprotect(memory + page * PAGE, PAGE, PROT_READ | PROT_WRITE);
        check("after mprotect", page);
    }
}

/* A child writes what its parent does not see, and sees what the parent had. */
static void forks(int count)
{
    for (int i = 0; i < count; i++) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            reads_and_writes(20000);
            for (uint64_t page = 0; page < pages; page += 3)
                check("in a child", page);
            _exit(7);
        }
        reads_and_writes(5000);
        int status;
        if (waitpid(child, &status, 0) != child || status != 7 << 8)
            fail("a child", 0);
    }
}

/* Pages are given back, moved and made anew. */
static void anew(int count)
{
    for (int i = 0; i < count; i++) {
        uint64_t page = next() % (pages - 64), length = 1 + next() % 64;
        madvise(memory + page * PAGE, length * PAGE, MADV_DONTNEED);
        for (uint64_t at = page; at < page + length; at++) {
            if (*word(at) != 0)
                fail("a page that was given back", at);
            if (next() % 2)
                *word(at) = content[at] = (uint32_t)next();
            else
                content[at] = 0;
        }
    }
}

/* Code in the midst of the data, written again and again. */
static void code(int count)
{
    unsigned char *text = memory + (pages / 2) * PAGE;
    uint32_t kept = *word(pages / 2);
    mprotect(text, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC);
    for (int i = 0; i < count; i++) {
        unsigned char body[] = { 0xb8, i, i >> 8, 0, 0, 0xc3 };
        memcpy(text, body, sizeof body);
        if (((int (*)(void))text)() != (i & 0xffff))
            fail("code that was written", pages / 2);
    }
    mprotect(text, PAGE, PROT_READ | PROT_WRITE);
    *word(pages / 2) = kept;
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 2;
    memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    madvise(memory, pages * PAGE, MADV_NOHUGEPAGE);
    order = malloc(pages * sizeof *order), content = calloc(pages, sizeof *content);
    for (uint64_t i = 0; i < pages; i++)
        order[i] = (uint32_t)i;
    for (uint64_t i = pages - 1; i > 0; i--) {
        uint64_t j = next() % (i + 1);
        uint32_t other = order[j];
        order[j] = order[i], order[i] = other;
    }
    for (uint64_t i = 0; i < pages; i++)
        *word(order[i]) = content[order[i]] = order[i] + 1;
    for (int round = 0; round < rounds; round++) {
        reads_and_writes(100000);
        across(100);
        protections(50);
        anew(50);
        code(50);
        forks(2);
    }
    for (uint64_t page = 0; page < pages; page++)
        check("at the end", page);
    printf("scattered %d\n", rounds);
    return 0;
}
