/*
 * Rows of whole programs, from Debian: each is a script in a root directory of its own, which ends with TRUE_CODE if
 * what it made was right.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"
#include "programs.h"

/* Devices that programs ask for, and have where a kernel fills `dev`; elsewhere the host's are mounted there. */
static const char *const devices[] = { "null", "urandom", "zero" };

static void bind_device(const char *name)
{
    char from[100], to[4096];
    snprintf(from, sizeof from, "/dev/%s", name);
    snprintf(to, sizeof to, "%s/dev/%s", userland, name);
    mount(from, to, NULL, MS_BIND, NULL);
}

/* In a name space of its own, so that nobody else sees them and they end with the program. */
static void bind_devices(void)
{
    char path[4096];
    struct stat status;
    snprintf(path, sizeof path, "%s/dev/null", userland);
    if (stat(path, &status) != 0 || S_ISCHR(status.st_mode))
        return;
    if (unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0)
        return;
    mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL);
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++)
        bind_device(devices[i]);
}

/* A user may change the root directory in a user namespace of his own. */
static int enter(void)
{
    if (chroot(userland) != 0 && (unshare(CLONE_NEWUSER) != 0 || chroot(userland) != 0))
        return -1;
    return chdir("/");
}

pid_t start_program(const char *script, const char *argument, bool with_devices)
{
    char *const arguments[] = { "sh", (char *)script, (char *)argument, NULL };
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (with_devices)
            bind_devices();
        if (enter() == 0)
            execve("/bin/busybox", arguments, environ);
        _exit(127);
    }
    return child;
}

const char *program_verdict(int status)
{
    static char wrong[100];
    if (WIFSIGNALED(status))
        snprintf(wrong, sizeof wrong, "a program was killed by signal %d", WTERMSIG(status));
    else if (WEXITSTATUS(status) == 127)
        return "cannot enter or start the programs' root";
    else
        snprintf(wrong, sizeof wrong, "a program failed with %d, or its result is wrong", WEXITSTATUS(status));
    return status == TRUE_CODE << 8 ? NULL : wrong;
}

static const char *run_with(const char *script, const char *argument, bool with_devices, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        int status;
        pid_t child = start_program(script, argument, with_devices);
        CHECK(child > 0 && waitpid(child, &status, 0) == child, "cannot start a program");
        const char *wrong = program_verdict(status);
        CHECK(!wrong, wrong);
    }
    return NULL;
}

static const char *run(const char *script, uint64_t n) { return run_with(script, NULL, false, n); }
static const char *fio(const char *part, uint64_t n) { return run_with("/bench/fio.sh", part, true, n); }

static const char *setup(void)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/bench", userland);
    CHECK(access(path, R_OK) == 0, "there are no programs");
    return NULL;
}

/* A disk whose content fio can verify. */
static const char *disk_setup(void)
{
    const char *wrong = setup();
    CHECK(!wrong, wrong);
    CHECK(getenv("BENCH_DISK"), "there is no disk to write to");
    return fio("prepare", 1);
}

static void disk_teardown(void) { fio("clean", 1); }

static const char *python_start(uint64_t n) { return run("/bench/python-start.sh", n); }
static const char *python_import(uint64_t n) { return run("/bench/python-import.sh", n); }
static const char *dynamic_exec(uint64_t n) { return run("/bench/dynexec.sh", n); }
static const char *bash_fork(uint64_t n) { return run("/bench/bashfork.sh", n); }
static const char *perl_start(uint64_t n) { return run("/bench/perl-start.sh", n); }
static const char *gcc_hello(uint64_t n) { return run("/bench/gcc-hello.sh", n); }
static const char *python(uint64_t n) { return run("/bench/python.sh", n); }
static const char *node_alloc(uint64_t n) { return run("/bench/node-alloc.sh", n); }
static const char *sqlite(uint64_t n) { return run("/bench/sqlite.sh", n); }
static const char *gzip(uint64_t n) { return run("/bench/gzip.sh", n); }
static const char *zstd(uint64_t n) { return run("/bench/zstd.sh", n); }
static const char *go(uint64_t n) { return run("/bench/go.sh", n); }
static const char *povray(uint64_t n) { return run("/bench/povray.sh", n); }
static const char *compile(uint64_t n) { return run("/bench/compile.sh", n); }
static const char *make_lua(uint64_t n) { return run_with("/bench/lua.sh", "1", false, n); }
static const char *make_lua_parallel(uint64_t n) { return run_with("/bench/lua.sh", "4", false, n); }
const char *make_lua_on_two(uint64_t n)
{
    const char *wrong = setup();
    return wrong ? wrong : run_with("/bench/lua.sh", "2", false, n);
}
static const char *disk_random(uint64_t n) { return fio("random", n); }
static const char *disk_sequential(uint64_t n) { return fio("sequential", n); }

const struct row program_rows[] = {
    { "dynexec", "programs", "100 x /bin/true, dynamically linked, from bash", dynamic_exec, setup, NULL },
    { "bashfork", "programs", "100 x (:) in bash", bash_fork, setup, NULL },
    { "perlstart", "programs", "20 x perl -e 1 from bash", perl_start, setup, NULL },
    { "gcchello", "programs", "gcc -O2 of one small file, linked and started", gcc_hello, setup, NULL },
    { "pyimport", "programs", "start of Python 3.11, import json and re", python_import, setup, NULL },
    { "pystart", "programs", "start of Python 3.11", python_start, setup, NULL },
    { "python", "programs", "Python 3.11: a tree, queens, dictionaries and strings", python, setup, NULL },
    { "nodealloc", "programs", "start of Node 18, and three million objects", node_alloc, setup, NULL },
    { "sqlite", "programs", "SQLite in memory: 20,000 rows inserted, indexed, joined and changed", sqlite, setup, NULL },
    { "gzip", "programs", "gzip of a library and back, 900 KB", gzip, setup, NULL },
    { "zstd", "programs", "zstd of a library and back, 1.9 MB", zstd, setup, NULL },
    { "go", "programs", "a Go program: goroutines, channels, maps, allocation", go, setup, NULL },
    { "povray", "programs", "POV-Ray: a scene of mirrors and glass, 160 by 120 points", povray, setup, NULL },
    { "compile", "programs", "gcc -O2 of this benchmark's program, 13 files, linked and started", compile, setup, NULL },
    { "lua", "programs", "make of Lua 5.4, one job", make_lua, setup, NULL },
    { "lua4", "programs", "make of Lua 5.4, four jobs on one CPU", make_lua_parallel, setup, NULL },
    { "diskrand", "programs", "fio: 4,096 reads of 4 KB at random of a disk, each verified", disk_random, disk_setup, disk_teardown },
    { "diskseq", "programs", "fio: 64 MB of a disk written in order, read back and verified", disk_sequential, disk_setup, disk_teardown },
    ROWS_END,
};
