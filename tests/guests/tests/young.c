#define _GNU_SOURCE
/* Processes that end soon, one after the other: each changes its copy of everything, code too, and nobody else's. */
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#define PAGE 4096
#define PAGES 48
#define SLOTS 6
#define LOW 0x5a

static __thread int own = 1;
static int global = 1;
static char *heap;
static unsigned char *code;

static void fail(const char *what)
{
    printf("wrong: %s\n", what);
    fflush(stdout);
    _exit(1);
}

static void check(int right, const char *what)
{
    if (!right)
        fail(what);
}

/* mov eax, imm32; ret: at the start of the first page, and across the border of both. */
static int inside(void) { return ((int (*)(void))code)(); }
static int across(void) { return ((int (*)(void))(code + PAGE - 2))(); }

static void protect(int how) { check(mprotect(code, 2 * PAGE, how) == 0, "mprotect"); }

/* Changes the instruction in the first page, or the end of the other one, which is in the second. */
static void change(int first, int value)
{
    unsigned char *number = first ? code + 1 : code + PAGE - 1;
    protect(PROT_READ | PROT_WRITE);
    memcpy(number + 1, &value, 3);
    protect(PROT_READ | PROT_EXEC);
}

static void make_code(void)
{
    code = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(code != MAP_FAILED, "mmap");
    for (int at = 0; at <= PAGE - 2; at += PAGE - 2) {
        code[at] = 0xb8;
        code[at + 1] = LOW;
        memset(code + at + 2, 0, 3);
        code[at + 5] = 0xc3;
    }
    protect(PROT_READ | PROT_EXEC);
}

/* Pages of a file that is mapped anywhere, in any order: what lies where, call and pop; lea; a load; and a jump to the next page. */
static int file;

static void make_file(void)
{
    static const unsigned char where[] = {0xe8, 0, 0, 0, 0, 0x58, 0xc3};
    static const unsigned char beside[] = {0x48, 0x8d, 0x05, 0, 0, 0, 0, 0xc3};
    static const unsigned char load[] = {0x8b, 0x05, 0x1a, 0, 0, 0, 0xc3};
    static const unsigned char next[] = {0xe9, 0xcb, 0x0f, 0, 0};
    file = memfd_create("code", 0);
    for (int number = 0; number < SLOTS; number++) {
        unsigned char page[PAGE] = {0};
        memcpy(page, where, sizeof where);
        memcpy(page + 16, beside, sizeof beside);
        memcpy(page + 32, load, sizeof load);
        memcpy(page + 48, next, sizeof next);
        memcpy(page + 64, &number, sizeof number);
        check(write(file, page, PAGE) == PAGE, "a file of code");
    }
}

static void check_slot(unsigned char *at, int number, int has_next)
{
    check(((unsigned char *(*)(void))at)() == at + 5, "where code is");
    check(((unsigned char *(*)(void))(at + 16))() == at + 23, "where data is");
    check(((int (*)(void))(at + 32))() == number, "which code it is");
    if (has_next)
        check(((unsigned char *(*)(void))(at + 48))() == at + PAGE + 5, "where code leads");
}

/* The same pages at addresses of this process's own, at others of the same process, and then others at the same ones. */
static void be_elsewhere(int round)
{
    unsigned char *at = mmap(NULL, (SLOTS + round % 7) * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(at != MAP_FAILED, "mmap");
    at += round % 7 * PAGE;
    for (int turn = 0; turn < 3; turn++) {
        int number[SLOTS];
        for (int slot = 0; slot < SLOTS; slot++) {
            number[slot] = (slot * (1 + (round + turn) % 4) + round) % SLOTS;
            void *page = mmap(at + slot * PAGE, PAGE, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_FIXED, file,
                              number[slot] * PAGE);
            check(page == at + slot * PAGE, "mmap of a page");
        }
        for (int slot = 0; slot < 2 * SLOTS; slot++)
            check_slot(at + slot % SLOTS * PAGE, number[slot % SLOTS], slot % SLOTS + 1 < SLOTS);
    }
}

static sigjmp_buf back;
static volatile unsigned long call_at, fault_at;

static void note_fault(int signal, siginfo_t *info, void *context)
{
    fault_at = ((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
    (void)signal, (void)info;
    siglongjmp(back, 1);
}

/* A call to what is no address: the fault is at the call, or there. */
static void go_nowhere(unsigned long where)
{
    struct sigaction action = {.sa_sigaction = note_fault, .sa_flags = SA_SIGINFO};
    unsigned long here;
    check(sigaction(SIGSEGV, &action, NULL) == 0, "sigaction");
    if (sigsetjmp(back, 1) == 0) {
        __asm__ volatile("lea 1f(%%rip), %0; mov %0, %1; 1: call *%2" : "=&r"(here), "=m"(call_at) : "r"(where) : "memory");
        fail("a call to nowhere");
    }
    check(fault_at == call_at || fault_at == where, "where a call to nowhere fails");
}

static void check_all(int inside_is, int across_is, int value)
{
    check(inside() == (inside_is << 8 | LOW), "code");
    check(across() == (across_is << 8 | LOW), "code across pages");
    check(global == value && own == value, "variables");
    for (int page = 0; page < PAGES; page++)
        check(heap[page * PAGE + value % PAGE] == (char)value, "the heap");
}

static void set_all(int value)
{
    global = own = value;
    for (int page = 0; page < PAGES; page++)
        heap[page * PAGE + value % PAGE] = (char)value;
}

static void child(int round, char *self)
{
    char stack[3 * PAGE];
    /* Bound late, so the loader keeps the vectors with the operand. */
    check(ldexp(round + 0.5, 3) == 8 * round + 4, "vectors");
    memset(stack, round, sizeof stack);
    check_all(1, 2, 1);
    be_elsewhere(round);
    go_nowhere(1UL << 62 | (unsigned long)(round % 4) << 34 | 1UL << 33 | round);
    set_all(round);
    int first = round % 2;
    change(first, round);
    check_all(first ? round : 1, first ? 2 : round, round);
    if (fork() == 0) {
        check_all(first ? round : 1, first ? 2 : round, round);
        change(!first, round);
        check_all(round, round, round);
        _exit(0);
    }
    int status;
    check(wait(&status) > 0 && status == 0, "a grandchild");
    check_all(first ? round : 1, first ? 2 : round, round);
    check(stack[round] == (char)round, "the stack");
    if (round % 3 == 0)
        execl(self, self, NULL);
    _exit(0);
}

int main(int argc, char **argv)
{
    heap = calloc(PAGES, PAGE);
    make_code();
    check(inside() == LOW && across() == LOW, "fresh code");
    if (argc == 1)
        return 0;
    make_file();
    change(1, 1);
    change(0, 2);
    set_all(1);
    int rounds = atoi(argv[1]);
    for (int round = 2; round < rounds + 2; round++) {
        fflush(stdout);
        if (fork() == 0)
            child(round, argv[0]);
        int status;
        check(wait(&status) > 0 && status == 0, "a child");
        check_all(1, 2, 1);
    }
    printf("young %d\n", rounds);
    return 0;
}
