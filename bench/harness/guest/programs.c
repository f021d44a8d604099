/*
 * Rows of whole programs, from Debian: each is a script in a root directory of its own, which ends with TRUE_CODE if
 * what it made was right.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"

/* A user may change the root directory in a user namespace of his own. */
static int enter(void)
{
    if (chroot(userland) != 0 && (unshare(CLONE_NEWUSER) != 0 || chroot(userland) != 0))
        return -1;
    return chdir("/");
}

static pid_t start(const char *script)
{
    char *const arguments[] = { "sh", (char *)script, NULL };
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        if (enter() == 0)
            execve("/bin/busybox", arguments, environ);
        _exit(127);
    }
    return child;
}

/* What is wrong with how a program ended. */
static const char *verdict(int status)
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

static const char *run(const char *script, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        int status;
        pid_t child = start(script);
        CHECK(child > 0 && waitpid(child, &status, 0) == child, "cannot start a program");
        const char *wrong = verdict(status);
        CHECK(!wrong, wrong);
    }
    return NULL;
}

static const char *setup(void)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/bench", userland);
    CHECK(access(path, R_OK) == 0, "there are no programs");
    return NULL;
}

static const char *python_start(uint64_t n) { return run("/bench/python-start.sh", n); }
static const char *python(uint64_t n) { return run("/bench/python.sh", n); }
static const char *sqlite(uint64_t n) { return run("/bench/sqlite.sh", n); }
static const char *gzip(uint64_t n) { return run("/bench/gzip.sh", n); }
static const char *zstd(uint64_t n) { return run("/bench/zstd.sh", n); }
static const char *compile(uint64_t n) { return run("/bench/compile.sh", n); }

const struct row program_rows[] = {
    { "pystart", "programs", "start of Python 3.11", python_start, setup, NULL },
    { "python", "programs", "Python 3.11: a tree, queens, dictionaries and strings", python, setup, NULL },
    { "sqlite", "programs", "SQLite in memory: 20,000 rows inserted, indexed, joined and changed", sqlite, setup, NULL },
    { "gzip", "programs", "gzip of a library and back, 900 KB", gzip, setup, NULL },
    { "zstd", "programs", "zstd of a library and back, 1.9 MB", zstd, setup, NULL },
    { "compile", "programs", "gcc -O2 of this benchmark's program, 11 files, linked and started", compile, setup, NULL },
    ROWS_END,
};
