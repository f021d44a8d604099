/* Processes that take turns, more than Linux has identifiers of address spaces. Each looks at all of its memory when its turn comes:
 * what it, its child or its neighbour has done to that meanwhile must be there, and nothing else.
 *
 * circle PROCESSES ROUNDS */
#define _GNU_SOURCE
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 48, FILED = 16, MOST = 64, DEEDS = 11 };
#define MEMORY ((char *)0x7e0000000000)
#define FILES (MEMORY + 0x10000000)

/* What is in each process's pages: zero for nothing, or a number. Whether they may be written. */
static struct Known {
    uint64_t number[PAGES];
    char read_only[PAGES];
    pid_t pid;
} *known;
static struct Known *own;
static int self, processes;
static sigjmp_buf back;

static uint64_t *page(int n) { return (uint64_t *)(MEMORY + (long)n * PAGE); }

static void fail(const char *what, int n) {
    printf("process %d: %s, page %d: %lx, not %lx\n", self, what, n, n < PAGES ? page(n)[3] : 0, n < PAGES ? own->number[n] : 0);
    fflush(stdout);
    kill(0, SIGKILL);
}
static void caught(int signal) { (void)signal; siglongjmp(back, 1); }

static int can_write(int n, uint64_t number) {
    if (sigsetjmp(back, 1))
        return 0;
    *(volatile uint64_t *)(page(n) + 3) = number;
    return 1;
}
static void look(const char *when) {
    for (int n = 0; n < PAGES; n++)
        if (page(n)[3] != own->number[n])
            fail(when, n);
    for (int n = 0; n < FILED; n++)
        if (*(uint64_t *)(FILES + n * PAGE) != (uint64_t)n + 1)
            fail("the file", PAGES + n);
}
static void put(int n, uint64_t number) {
    if (own->read_only[n]) {
        if (can_write(n, number))
            fail("written, and read only", n);
        if (mprotect(page(n), PAGE, PROT_READ | PROT_WRITE))
            fail("mprotect", n);
        own->read_only[n] = 0;
    }
    if (!can_write(n, number))
        fail("cannot be written", n);
    own->number[n] = number;
}
/* A child has the memory as it was, and the parent's stays as it is. */
static void in_a_child(uint64_t number, int n, int neighbour) {
    pid_t child = fork();
    if (child == 0) {
        look("in a child");
        if (!own->read_only[n] && can_write(n, ~number) && page(n)[3] != ~number)
            fail("the child's own", n);
        _exit(0);
    }
    if (neighbour >= 0) { /* while memory is shared with a child, another process writes it */
        struct Known *other = &known[neighbour];
        struct iovec from = { &number, 8 }, to = { page(n) + 3, 8 };
        if (!other->read_only[n] && process_vm_writev(other->pid, &from, 1, &to, 1, 0) == 8)
            other->number[n] = number;
    }
    int status;
    if (waitpid(child, &status, 0) != child || status)
        fail("a child has ended so", n);
    look("after a child");
}
static void to_neighbour(int advice, int neighbour) {
    int file = syscall(SYS_pidfd_open, known[neighbour].pid, 0);
    struct iovec all[2] = { { FILES, FILED * PAGE }, { MEMORY, PAGES * PAGE } };
    syscall(SYS_process_madvise, file, all, 2, advice, 0);
    close(file);
}
static void compact(void) {
    int file = open("/proc/sys/vm/compact_memory", O_WRONLY);
    if (file >= 0 && write(file, "1", 1) == 1)
        close(file);
}
static void act(uint64_t turn) {
    int n = turn * 7 % PAGES, next = (self + 1) % processes, far = (self + processes / 2) % processes;
    uint64_t number = turn << 8 | (self + 1);
    switch ((turn + self) % DEEDS) {
    case 0: case 1:
        for (int k = 0; k < 6; k++)
            put((n + k) % PAGES, number + ((uint64_t)k << 56));
        return;
    case 2: /* until its next turn at least */
        if (mprotect(page(n), PAGE, PROT_READ))
            fail("mprotect", n);
        own->read_only[n] = 1;
        return;
    case 3:
        if (mmap(page(n), PAGE, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != page(n))
            fail("mmap", n);
        own->number[n] = own->read_only[n] = 0;
        return;
    case 4:
        if (madvise(page(n), PAGE, MADV_DONTNEED))
            fail("madvise", n);
        own->number[n] = 0;
        return;
    case 5: { /* one page takes another one's place */
        int to = (n + 1) % PAGES;
        if (mremap(page(n), PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, page(to)) == MAP_FAILED)
            fail("mremap", n);
        own->number[to] = own->number[n];
        own->read_only[to] = own->read_only[n];
        if (mmap(page(n), PAGE, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != page(n))
            fail("mmap", n);
        own->number[n] = own->read_only[n] = 0;
        return;
    }
    case 6:
        return in_a_child(number, n, -1);
    case 7:
        return in_a_child(number, n, next);
    case 8: { /* pages of another process that it does not run to see */
        struct Known *other = &known[far];
        struct iovec from = { &number, 8 }, to = { page(n) + 3, 8 };
        if (!other->read_only[n] && process_vm_writev(other->pid, &from, 1, &to, 1, 0) == 8)
            other->number[n] = number;
        return;
    }
    case 9:
        return to_neighbour(MADV_PAGEOUT, far);
    case 10:
        if (turn % 64 == 0)
            compact();
        return to_neighbour(25 /* MADV_COLLAPSE */, next);
    }
}

int main(int count, char **words) {
    processes = count > 1 ? atoi(words[1]) : 24;
    long rounds = count > 2 ? atol(words[2]) : 1000;
    int ring[MOST][2], file = open("circle.data", O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (processes < 2 || processes > MOST || file < 0)
        return 2;
    for (uint64_t n = 0; n < FILED; n++) {
        uint64_t number = n + 1;
        if (pwrite(file, &number, 8, n * PAGE) != 8)
            return 2;
    }
    if (ftruncate(file, FILED * PAGE))
        return 2;
    known = mmap(NULL, sizeof *known * MOST, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int n = 0; n < processes; n++)
        if (pipe(ring[n]))
            return 2;
    signal(SIGSEGV, caught);
    for (self = 0; self < processes; self++) {
        own = &known[self];
        if ((own->pid = fork()) == 0)
            break;
    }
    if (self == processes) {
        uint64_t turn = 0;
        if (write(ring[0][1], &turn, 8) != 8)
            return 2;
        for (int ended = 0; ended < processes; ended++) {
            int status;
            if (wait(&status) < 0 || status)
                return printf("a process has ended with %x\n", status), 1;
        }
        printf("%ld rounds of %d\n", rounds, processes);
        return 0;
    }
    own->pid = getpid();
    mmap(MEMORY, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mmap(FILES, FILED * PAGE, PROT_READ, MAP_FIXED | MAP_PRIVATE, file, 0);
    for (long round = 0; round < rounds; round++) {
        uint64_t turn;
        if (read(ring[self][0], &turn, 8) != 8)
            return 3;
        look("at its turn");
        act(turn / processes);
        turn++;
        if (write(ring[(self + 1) % processes][1], &turn, 8) != 8)
            return 4;
    }
    return 0;
}
