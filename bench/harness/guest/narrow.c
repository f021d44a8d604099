/* Rows of 32-bit code. A 32-bit program does them, which is part of this one's file (../narrow), and goes on
 * from batch to batch: its start is not measured. */
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"

extern const char narrow_start[], narrow_end[];
__asm__(".pushsection .rodata\nnarrow_start: .incbin \"" NARROW "\"\nnarrow_end: .popsection");

static pid_t child = -1;
static int line = -1;

static const char *start(const char *path)
{
    int both[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, both) == 0, "no socket");
    child = fork();
    if (child == 0) {
        dup2(both[1], 0), dup2(both[1], 1), close(both[0]), close(both[1]);
        execl(path, path, NULL);
        _exit(1);
    }
    close(both[1]);
    line = both[0];
    CHECK(child > 0, "cannot start a process");
    return NULL;
}

static const char *narrow_setup(void)
{
    const char *path = scratch_file("narrow");
    const size_t length = (size_t)(narrow_end - narrow_start);
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0755);
    CHECK(file >= 0 && write(file, narrow_start, length) == (ssize_t)length, "cannot write a scratch file");
    CHECK(fchmod(file, 0755) == 0 && close(file) == 0, "cannot make a program");
    return start(path);
}

static void narrow_teardown(void)
{
    close(line);
    waitpid(child, NULL, 0);
    unlink(scratch_file("narrow"));
}

static const char *narrow_run(char row, uint64_t n)
{
    const uint32_t request[2] = { (uint32_t)row, (uint32_t)n };
    uint32_t right = 0;
    CHECK(send(line, request, sizeof request, MSG_NOSIGNAL) == sizeof request, "the kernel starts no 32-bit programs");
    CHECK(read(line, &right, sizeof right) == sizeof right, "the 32-bit program has ended");
    CHECK(right == n, "a wrong result of 32-bit code");
    return NULL;
}

static const char *fib_run(uint64_t n)
{
    return narrow_run('f', n);
}

static const char *division_run(uint64_t n)
{
    return narrow_run('d', n);
}

static const char *quick_run(uint64_t n)
{
    return narrow_run('q', n);
}

static const char *interrupt_run(uint64_t n)
{
    return narrow_run('i', n);
}

const struct row narrow_rows[] = {
    { "fib32", "32-bit code", "fib(27)", fib_run, narrow_setup, narrow_teardown },
    { "div32", "32-bit code", "100,000 divisions", division_run, narrow_setup, narrow_teardown },
    { "getppid32", "32-bit code", "getppid by way of the vDSO", quick_run, narrow_setup, narrow_teardown },
    { "int80", "32-bit code", "getppid by INT 0x80", interrupt_run, narrow_setup, narrow_teardown },
    ROWS_END,
};
