#define _GNU_SOURCE
/* Memory in large pages, of which more lie 1 GiB apart than an engine may have places for. Each keeps what the program wrote, whatever else
   it does. Then 256 MiB stay mapped while the program gives back other memory. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rounds.h"

#define PAGE 4096UL
#define LARGE (2UL << 20)
#define APART (1UL << 30)
#define PAGES 12
/* Words of each that are looked at, each in a page of its own. */
#define WORDS 16
#define WORD(page, word) ((uint64_t *)((page) + (word) * (LARGE / WORDS)))

static char *pages[PAGES];
static uint64_t expected[PAGES][WORDS];

/* Memory that is there when it is touched, from an address on that a large page can have. */
static char *reserve(size_t len, int rights)
{
    char *memory = mmap(NULL, len + LARGE, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    check(memory != MAP_FAILED, "mmap", 0);
    return (char *)(((uintptr_t)memory + LARGE - 1) & ~(LARGE - 1));
}

static void change(int page, int word, uint64_t value)
{
    *WORD(pages[page], word) = expected[page][word] = value;
}

static int is_right(int page)
{
    for (int word = 0; word < WORDS; word++)
        if (*WORD(pages[page], word) != expected[page][word])
            return 0;
    return 1;
}

/* A child has copies of its own. */
static void fork_one(int page, int round)
{
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        for (int word = 0; word < WORDS; word++)
            *WORD(pages[page], word) = ~0UL;
        for (int other = 0; other < PAGES; other++)
            if (other != page && !is_right(other))
                _exit(1);
        _exit(0);
    }
    waitpid(child, &status, 0);
    check(status == 0, "a child's memory", round);
}

static void give_back(int page, int word)
{
    if (word == 0) {
        madvise(pages[page], LARGE, MADV_DONTNEED);
        memset(expected[page], 0, sizeof expected[page]);
    } else {
        madvise(WORD(pages[page], word), PAGE, MADV_DONTNEED);
        expected[page][word] = 0;
    }
}

static void step(int round)
{
    int page = below(PAGES), word = below(WORDS);
    switch (below(20)) {
    case 0:
        give_back(page, word);
        break;
    case 1:
        mprotect(pages[page], LARGE, PROT_READ);
        check(is_right(page), "what is only read", round);
        mprotect(pages[page], LARGE, PROT_READ | PROT_WRITE);
        break;
    case 2:
        fork_one(page, round);
        break;
    default:
        change(page, word, seed);
    }
    check(is_right(page) && is_right(below(PAGES)), "memory", round);
}

static unsigned long huge_kib(void)
{
    char line[256];
    unsigned long kib = 0;
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    while (file && fgets(line, sizeof line, file))
        sscanf(line, "AnonHugePages: %lu", &kib);
    return kib;
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 3000;
    char *memory = reserve(PAGES * APART, PROT_NONE);
    for (int page = 0; page < PAGES; page++) {
        pages[page] = memory + page * APART;
        mprotect(pages[page], LARGE, PROT_READ | PROT_WRITE);
        madvise(pages[page], LARGE, MADV_HUGEPAGE);
    }
    for (int round = 0; round < rounds; round++)
        step(round);
    size_t len = 128 * LARGE;
    char *much = reserve(len, PROT_READ | PROT_WRITE);
    madvise(much, len, MADV_HUGEPAGE);
    memset(much, 7, len);
    check(huge_kib() > 200 << 10, "there are no large pages", 0);
    for (int round = 0; round < 200; round++) {
        char *other = mmap(NULL, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memset(other, 1, 64 * PAGE);
        munmap(other, 64 * PAGE);
        for (unsigned long at = 0; at < len; at += LARGE)
            check(much[at + below(LARGE)] == 7, "much memory", round);
    }
    printf("%d rounds\n", rounds);
    return 0;
}
