/* Rows of one system call or signal each. */
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"

static int zero = -1, null = -1;
static volatile sig_atomic_t signals;

static const char *devices_setup(void)
{
    zero = open("/dev/zero", O_RDONLY);
    null = open("/dev/null", O_WRONLY);
    CHECK(zero >= 0 && null >= 0, "cannot open /dev/zero and /dev/null");
    return NULL;
}

static void devices_teardown(void)
{
    close(zero), close(null);
}

static const char *getppid_run(uint64_t n)
{
    const long parent = getppid();
    for (uint64_t i = 0; i < n; i++)
        CHECK(syscall(SYS_getppid) == parent, "another parent");
    return NULL;
}

static const char *read_run(uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        char byte = 1;
        CHECK(read(zero, &byte, 1) == 1 && byte == 0, "did not read a zero");
    }
    return NULL;
}

static const char *write_run(uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        CHECK(write(null, "x", 1) == 1, "did not write a byte");
    return NULL;
}

static const char *file_setup(void)
{
    int file = open(scratch_file("some"), O_RDWR | O_CREAT | O_TRUNC, 0644);
    CHECK(file >= 0 && write(file, "12345", 5) == 5, "cannot write a scratch file");
    close(file);
    return NULL;
}

static void file_teardown(void)
{
    unlink(scratch_file("some"));
}

static const char *stat_run(uint64_t n)
{
    const char *path = scratch_file("some");
    for (uint64_t i = 0; i < n; i++) {
        struct stat status;
        CHECK(stat(path, &status) == 0 && status.st_size == 5, "wrong size of a file");
    }
    return NULL;
}

static const char *open_run(uint64_t n)
{
    const char *path = scratch_file("some");
    for (uint64_t i = 0; i < n; i++) {
        int file = open(path, O_RDONLY);
        CHECK(file >= 0 && close(file) == 0, "cannot open and close a file");
    }
    return NULL;
}

static const char *clock_run(uint64_t n)
{
    struct timespec last, now;
    clock_gettime(CLOCK_MONOTONIC, &last);
    for (uint64_t i = 0; i < n; i++) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        int back = now.tv_sec < last.tv_sec || (now.tv_sec == last.tv_sec && now.tv_nsec < last.tv_nsec);
        CHECK(!back, "the clock went back");
        last = now;
    }
    return NULL;
}

static void on_signal(int number)
{
    (void)number;
    signals++;
}

static const char *signal_setup(void)
{
    struct sigaction action = { .sa_handler = on_signal };
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0, "cannot catch a signal");
    return NULL;
}

static void signal_teardown(void)
{
    signal(SIGUSR1, SIG_DFL);
}

static const char *signal_run(uint64_t n)
{
    const pid_t self = getpid();
    for (uint64_t i = 0; i < n; i++) {
        signals = 0;
        CHECK(kill(self, SIGUSR1) == 0 && signals == 1, "the signal did not arrive once");
    }
    return NULL;
}

const struct row call_rows[] = {
    { "getppid", "system calls", "getppid", getppid_run, NULL, NULL },
    { "read1", "system calls", "read of 1 byte from /dev/zero", read_run, devices_setup, devices_teardown },
    { "write1", "system calls", "write of 1 byte to /dev/null", write_run, devices_setup, devices_teardown },
    { "stat", "system calls", "stat of a file in memory", stat_run, file_setup, file_teardown },
    { "open", "system calls", "open and close of a file in memory", open_run, file_setup, file_teardown },
    { "clock", "system calls", "clock_gettime (no system call where the vDSO can tell)", clock_run, NULL, NULL },
    { "signal", "system calls", "signal to self, caught", signal_run, signal_setup, signal_teardown },
    ROWS_END,
};
