#define _GNU_SOURCE
/* The kernel copies to and from memory that nobody has touched, that is another's too, or that ends on the way: what it has copied is what
   its calls say, whichever page it stopped at. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rounds.h"

#define PAGE 4096
#define PAGES 12
#define LENGTH (PAGES * PAGE)
#define ROUNDS 3000

static unsigned char data[2 * LENGTH];
static unsigned char *fresh(void)
{
    int how = MAP_PRIVATE | MAP_ANONYMOUS;
    unsigned char *memory = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, how, -1, 0);
    check(memory != MAP_FAILED, "mmap", 0);
    return memory;
}

/* Fills from a file. The page `end` may be read only, or is not there. */
static void fill(int file, unsigned char *memory, int round, size_t end)
{
    size_t at = below(PAGE), from = below(LENGTH), len = 1 + below(LENGTH - at);
    size_t most = end * PAGE <= at ? 0 : end * PAGE - at;
    ssize_t expected = len < most ? len : most;
    ssize_t filled = pread(file, memory + at, len, from);
    if (expected == 0)
        check(filled == -1 && errno == EFAULT, "no fault", round);
    else
        check(filled == expected && memcmp(memory + at, data + from, filled) == 0, "what was read", round);
}

/* Fills what a child has, too. */
static void fill_own(int file, unsigned char *memory, int round)
{
    int status, wait[2];
    memset(memory, 1, LENGTH);
    check(pipe(wait) == 0, "pipe", round);
    pid_t child = fork();
    if (child == 0) {
        char byte;
        close(wait[1]);
        int told = read(wait[0], &byte, 1) == 0;
        for (size_t at = 0; at < LENGTH; at++)
            told &= memory[at] == 1;
        _exit(told ? 7 : 8);
    }
    fill(file, memory, round, PAGES);
    close(wait[1]);
    check(waitpid(child, &status, 0) == child && status == 7 << 8, "a child's memory", round);
    close(wait[0]);
}

int main(void)
{
    char name[] = "fresh-XXXXXX";
    int file = mkstemp(name);
    for (size_t at = 0; at < sizeof data; at++)
        data[at] = below(256);
    check(unlink(name) == 0 && write(file, data, sizeof data) == sizeof data, "a file", 0);
    for (int round = 0; round < ROUNDS; round++) {
        unsigned char *memory = fresh();
        size_t end = 1 + below(PAGES - 1);
        switch (round % 4) {
        case 0:
            fill(file, memory, round, PAGES);
            break;
        case 1:
            check(mprotect(memory + end * PAGE, PAGE, PROT_READ) == 0, "mprotect", round);
            fill(file, memory, round, end);
            break;
        case 2:
            check(munmap(memory + end * PAGE, PAGE) == 0, "munmap", round);
            fill(file, memory, round, end);
            break;
        default:
            if (round % 16 == 3)
                fill_own(file, memory, round);
            check(pwrite(file, memory, PAGE, 2 * LENGTH) == PAGE, "pwrite", round);
        }
        munmap(memory, LENGTH);
    }
    printf("%d rounds\n", ROUNDS);
    return 0;
}
