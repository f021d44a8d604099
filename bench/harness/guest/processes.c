/* Rows of several processes: context switches, pipes, fork and exec. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"

enum { PIPE_BLOCK = 64 * 1024 };

static int to[2], from[2];
static pid_t partner;
static size_t array_size;
static cpu_set_t allowed;

/* Both processes on one CPU, so that every hop is a context switch wherever the row runs. */
static void pin(void)
{
    cpu_set_t one;
    int cpu = sched_getcpu();
    CPU_ZERO(&one);
    CPU_SET(cpu < 0 ? 0 : cpu, &one);
    sched_getaffinity(0, sizeof allowed, &allowed);
    sched_setaffinity(0, sizeof one, &one);
}

/* What a process has in the cache when it is switched to. */
static uint64_t touch(uint64_t *array)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < array_size / sizeof *array; i++)
        sum += array[i];
    HIDE(sum);
    return sum;
}

static uint64_t *new_array(void)
{
    uint64_t *array = malloc(array_size + 1);
    if (array)
        for (size_t i = 0; i < array_size / sizeof *array; i++)
            array[i] = 1;
    return array;
}

static uint64_t *array;

/* Answers every byte with its successor, until there are no more. */
static void answer(void)
{
    unsigned char byte;
    uint64_t *own = new_array();
    close(to[1]), close(from[0]);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (own && read(to[0], &byte, 1) == 1) {
        if (touch(own) != array_size / sizeof *own)
            break;
        byte++;
        if (write(from[1], &byte, 1) != 1)
            break;
    }
    _exit(0);
}

static const char *partner_setup(size_t size)
{
    array_size = size;
    array = new_array();
    pin();
    CHECK(array && pipe(to) == 0 && pipe(from) == 0, "cannot make pipes");
    partner = fork();
    CHECK(partner >= 0, "cannot fork");
    if (partner == 0)
        answer();
    close(to[0]), close(from[1]);
    return NULL;
}

static const char *trip_setup(void) { return partner_setup(0); }
static const char *ctx16_setup(void) { return partner_setup(16 << 10); }
static const char *ctx64_setup(void) { return partner_setup(64 << 10); }
static const char *ctx1m_setup(void) { return partner_setup(1 << 20); }

static void partner_teardown(void)
{
    close(to[1]), close(from[0]);
    waitpid(partner, NULL, 0);
    sched_setaffinity(0, sizeof allowed, &allowed);
    free(array);
}

static const char *trip_run(uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        unsigned char sent = (unsigned char)i, got;
        CHECK(touch(array) == array_size / sizeof *array, "wrong sum");
        CHECK(write(to[1], &sent, 1) == 1 && read(from[0], &got, 1) == 1, "the other process is gone");
        CHECK(got == (unsigned char)(sent + 1), "wrong answer");
    }
    return NULL;
}

static char *block;

static const char *pipe64_setup(void)
{
    block = malloc(PIPE_BLOCK);
    CHECK(block && pipe2(to, 0) == 0, "cannot make a pipe");
    CHECK(fcntl(to[1], F_GETPIPE_SZ) >= PIPE_BLOCK, "the pipe is too small");
    return NULL;
}

static void pipe64_teardown(void)
{
    close(to[0]), close(to[1]);
    free(block);
}

static const char *pipe64_run(uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        memset(block, (int)i, 64);
        CHECK(write(to[1], block, PIPE_BLOCK) == PIPE_BLOCK, "wrote less");
        block[0]++;
        for (ssize_t got = 0, part; got < PIPE_BLOCK; got += part) {
            part = read(to[0], block + got, (size_t)(PIPE_BLOCK - got));
            CHECK(part > 0, "read less");
        }
        CHECK(block[0] == (char)i && block[63] == (char)i, "read something else");
    }
    return NULL;
}

static const char *wait_for(pid_t child, int code)
{
    int status;
    CHECK(child > 0, "cannot make a process");
    CHECK(waitpid(child, &status, 0) == child, "lost a child");
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == code, "wrong exit code of a child");
    return NULL;
}

static const char *fork_run(uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        pid_t child = fork();
        if (child == 0)
            _exit(TRUE_CODE);
        const char *wrong = wait_for(child, TRUE_CODE);
        CHECK(!wrong, wrong);
    }
    return NULL;
}

/* Of its own, because what is local to it must not live across vfork. */
static pid_t spawn_true(void)
{
    static char *const arguments[] = { "bench", "true", NULL };
    pid_t child = vfork();
    if (child == 0) {
        execve(self_path, arguments, environ);
        _exit(127);
    }
    return child;
}

static const char *vfork_run(uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        const char *wrong = wait_for(spawn_true(), TRUE_CODE);
        CHECK(!wrong, wrong);
    }
    return NULL;
}

static const char *shell_run(uint64_t n)
{
    char command[] = "true; exit 42";
    char *const arguments[] = { "sh", "-c", command, NULL };
    for (uint64_t i = 0; i < n; i++) {
        pid_t child = fork();
        if (child == 0) {
            execve(shell_path, arguments, environ);
            _exit(127);
        }
        const char *wrong = wait_for(child, TRUE_CODE);
        CHECK(!wrong, wrong);
    }
    return NULL;
}

/* A process with memory of its own, whose child uses a part of it. */
#define PAGE ((size_t)4096)
enum { OWNED = 1000, USED = 200 };

static char *owned;

static const char *owner_setup(void)
{
    owned = mmap(NULL, OWNED * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(owned != MAP_FAILED, "no memory");
    madvise(owned, OWNED * PAGE, MADV_NOHUGEPAGE);
    for (size_t i = 0; i < OWNED; i++)
        owned[i * PAGE] = (char)(i | 1);
    return NULL;
}

static void owner_teardown(void) { munmap(owned, OWNED * PAGE); }

/* What the child does with every fifth page. */
static int use_pages(bool write)
{
    for (size_t i = 0; i < OWNED; i += OWNED / USED) {
        if (owned[i * PAGE] != (char)(i | 1))
            return 1;
        if (write)
            owned[i * PAGE + 1] = 1;
    }
    return TRUE_CODE;
}

static const char *owner_run(uint64_t n, bool write)
{
    for (uint64_t i = 0; i < n; i++) {
        pid_t child = fork();
        if (child == 0)
            _exit(use_pages(write));
        const char *wrong = wait_for(child, TRUE_CODE);
        CHECK(!wrong, wrong);
    }
    for (size_t i = 0; i < OWNED; i++)
        CHECK(owned[i * PAGE + 1] == 0, "a child wrote to its parent's page");
    return NULL;
}

static const char *forkread_run(uint64_t n) { return owner_run(n, false); }
static const char *forkwrite_run(uint64_t n) { return owner_run(n, true); }

const struct row process_rows[] = {
    { "pipe", "processes", "round trip of a byte through pipes between two processes on one CPU", trip_run, trip_setup, partner_teardown },
    { "ctx16k", "processes", "the same, each process reading 16 KB at every turn (lat_ctx)", trip_run, ctx16_setup, partner_teardown },
    { "ctx64k", "processes", "the same with 64 KB", trip_run, ctx64_setup, partner_teardown },
    { "ctx1m", "processes", "the same with 1 MB", trip_run, ctx1m_setup, partner_teardown },
    { "pipe64k", "processes", "64 KB through a pipe, written and read by one process", pipe64_run, pipe64_setup, pipe64_teardown },
    { "fork", "processes", "fork, exit and wait", fork_run, NULL, NULL },
    { "forkread", "processes", "fork of a process with 1,000 pages, of which the child reads 200", forkread_run, owner_setup, owner_teardown },
    { "forkwrite", "processes", "the same, the child writes them", forkwrite_run, owner_setup, owner_teardown },
    { "exec", "processes", "vfork, exec of a static program and wait", vfork_run, NULL, NULL },
    { "shell", "processes", "fork, exec of busybox sh -c true and wait", shell_run, NULL, NULL },
    ROWS_END,
};
