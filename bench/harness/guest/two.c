/* Rows of two CPUs: what two threads get done at once, and what threads on two CPUs pay to hear of each other. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"
#include "programs.h"

/* Steps of a computation, and what they come to. */
enum { STEPS = 1000000 };
static uint64_t expected;

static cpu_set_t allowed;

static uint64_t compute(void)
{
    uint64_t state = 1;
    for (int i = 0; i < STEPS; i++)
        next_random(&state);
    return state;
}

/* The first CPU that this program may use, or the second. */
static bool go_to(int which)
{
    cpu_set_t one;
    int cpu = 0;
    for (; cpu < CPU_SETSIZE && (!CPU_ISSET(cpu, &allowed) || which-- > 0); cpu++)
        ;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    return cpu < CPU_SETSIZE && sched_setaffinity(0, sizeof one, &one) == 0;
}

static const char *setup(void)
{
    sched_getaffinity(0, sizeof allowed, &allowed);
    CHECK(CPU_COUNT(&allowed) >= 2, "there is one CPU");
    expected = compute();
    return NULL;
}

static void teardown(void) { sched_setaffinity(0, sizeof allowed, &allowed); }

static uint64_t repetitions;

static void *compute_on(void *cpu)
{
    bool right = go_to(cpu != NULL);
    for (uint64_t i = 0; i < repetitions; i++)
        right = compute() == expected && right;
    return right ? &repetitions : NULL;
}

/* So many threads compute at once, each on a CPU of its own. */
static const char *computes(int threads, uint64_t n)
{
    pthread_t started[2];
    bool right = true;
    repetitions = n;
    for (int i = 0; i < threads; i++)
        CHECK(pthread_create(&started[i], NULL, compute_on, i ? &repetitions : NULL) == 0, "cannot start a thread");
    for (int i = 0; i < threads; i++) {
        void *done;
        right = pthread_join(started[i], &done) == 0 && done && right;
    }
    CHECK(right, "a thread computed something else");
    return NULL;
}

static const char *one(uint64_t n) { return computes(1, n); }
static const char *two(uint64_t n) { return computes(2, n); }

/* Whose turn it is: this thread's if even. */
static _Atomic uint32_t turn;
static uint64_t turns;

static void wait_for_turn(uint32_t last)
{
    while (atomic_load(&turn) == last)
        syscall(SYS_futex, &turn, FUTEX_WAIT_PRIVATE, last, NULL, NULL, 0);
}

static void pass_turn(void)
{
    atomic_fetch_add(&turn, 1);
    syscall(SYS_futex, &turn, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static void *take_odd_turns(void *unused)
{
    bool there = go_to(1);
    for (uint64_t i = 0; i < turns; i++) {
        wait_for_turn((uint32_t)(2 * i));
        pass_turn();
    }
    return there ? &turns : unused;
}

static const char *futex_run(uint64_t n)
{
    pthread_t thread;
    void *there;
    turns = n;
    atomic_store(&turn, 0);
    CHECK(go_to(0) && pthread_create(&thread, NULL, take_odd_turns, NULL) == 0, "cannot start a thread");
    for (uint64_t i = 0; i < n; i++) {
        pass_turn();
        wait_for_turn((uint32_t)(2 * i + 1));
    }
    CHECK(pthread_join(thread, &there) == 0 && there, "the thread did not get to its CPU");
    CHECK(atomic_load(&turn) == (uint32_t)(2 * n), "a turn was lost");
    return NULL;
}

static const char *pipe_run(uint64_t n)
{
    int to[2], from[2], status;
    CHECK(pipe(to) == 0 && pipe(from) == 0, "cannot make pipes");
    pid_t child = fork();
    CHECK(child >= 0, "cannot fork");
    unsigned char byte = 0;
    if (child == 0) {
        bool right = go_to(1);
        for (uint64_t i = 0; i < n && right; i++)
            right = read(to[0], &byte, 1) == 1 && byte++ == (unsigned char)i && write(from[1], &byte, 1) == 1;
        _exit(right ? TRUE_CODE : 1);
    }
    bool right = go_to(0);
    close(from[1]);
    for (uint64_t i = 0; i < n && right; i++) {
        byte = (unsigned char)i;
        right = write(to[1], &byte, 1) == 1 && read(from[0], &byte, 1) == 1 && byte == (unsigned char)(i + 1);
    }
    close(to[0]), close(to[1]), close(from[0]);
    right = waitpid(child, &status, 0) == child && status == TRUE_CODE << 8 && right;
    CHECK(right, "a byte was lost or changed");
    return NULL;
}

/* A thread that uses the page, so that its CPU has to be told. */
static _Atomic bool stop;
static char *page;

static void *use_page(void *unused)
{
    bool there = go_to(1);
    while (!atomic_load(&stop)) {
        char byte = page[0];
        HIDE(byte);
    }
    return there ? page : unused;
}

static const char *shootdown_run(uint64_t n)
{
    pthread_t thread;
    void *there;
    page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED, "no memory");
    atomic_store(&stop, false);
    CHECK(go_to(0) && pthread_create(&thread, NULL, use_page, NULL) == 0, "cannot start a thread");
    bool right = true;
    for (uint64_t i = 0; i < n; i++) {
        page[0] = (char)i;
        right = mprotect(page, 4096, PROT_READ) == 0 && mprotect(page, 4096, PROT_READ | PROT_WRITE) == 0 && right;
    }
    right = page[0] == (char)(n - 1) && right;
    atomic_store(&stop, true);
    CHECK(pthread_join(thread, &there) == 0 && there, "the thread did not get to its CPU");
    munmap(page, 4096);
    CHECK(right, "rights were not changed, or a byte was");
    return NULL;
}

const struct row two_rows[] = {
    { "onebusy", "two CPUs", "a thread computes a million steps", one, setup, teardown },
    { "twobusy", "two CPUs", "two threads compute as much each, at once", two, setup, teardown },
    { "futex2", "two CPUs", "a turn to a thread on the other CPU and back, by futex", futex_run, setup, teardown },
    { "pipe2", "two CPUs", "a byte to a process on the other CPU and back, by pipes", pipe_run, setup, teardown },
    { "shootdown", "two CPUs", "a page made read-only, which a thread on the other CPU uses", shootdown_run, setup, teardown },
    { "lua2", "two CPUs", "make of Lua 5.4, two jobs on two CPUs", make_lua_on_two, setup, NULL },
    ROWS_END,
};
