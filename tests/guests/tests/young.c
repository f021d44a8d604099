/* Processes that end soon, one after the other: each changes its copy of everything, code too, and nobody else's. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096
#define PAGES 48
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
