/*
 * Rows of memory whose pages lie anywhere: 4 KB pages that were touched in random order, so that no two neighbours have
 * neighbouring frames. What they cost, by how much of it there is, is a curve; it should be flat.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"

#define PAGE ((size_t)4096)
#define MB ((size_t)1 << 20)
#define LARGE ((size_t)2 << 20)
enum { READS = 4096, READERS = 4 };

static char *memory;
static uint64_t pages, place;
static int file = -1;

/* A page knows which it is, at a place of its own, so that not all use the same lines of the cache. */
static uint64_t *word(uint64_t page) { return (uint64_t *)(memory + page * PAGE + (page * 64 & (PAGE - 64))); }

/* The pages of a fixed random order. */
static uint64_t nth(uint64_t i)
{
    i *= 0x9e3779b97f4a7c15;
    return ((i ^ i >> 31) * 0xbf58476d1ce4e5b9 >> 20) & (pages - 1);
}

/* Touches all pages, in random order. */
static const char *touch(void)
{
    uint64_t state = 5;
    uint32_t *order = malloc(pages * sizeof *order);
    CHECK(order, "no memory");
    for (uint32_t i = 0; i < pages; i++)
        order[i] = i;
    for (uint32_t i = (uint32_t)pages - 1; i > 0; i--) {
        uint32_t j = (uint32_t)(next_random(&state) % (i + 1)), other = order[j];
        order[j] = order[i], order[i] = other;
    }
    for (uint64_t i = 0; i < pages; i++)
        *word(order[i]) = order[i] + 1;
    free(order);
    return NULL;
}

static const char *setup(size_t size, int flags)
{
    pages = size / PAGE;
    place = 0;
    memory = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, file, 0);
    CHECK(memory != MAP_FAILED, "no memory");
    madvise(memory, size, MADV_NOHUGEPAGE);
    return touch();
}

/* The next pages of a random order. */
static const char *read_pages(uint64_t n)
{
    for (uint64_t i = 0; i < n * READS; i++) {
        uint64_t page = nth(place++);
        CHECK(*word(page) == page + 1, "a page shows what is another's");
    }
    return NULL;
}

/* The rows are of what goes on for long: a machine may need some time until it knows how many pages are in use. */
static const char *settled(const char *wrong) { return wrong ? wrong : read_pages(4 * pages / READS); }

static const char *private(size_t megabytes) { return setup(megabytes * MB, MAP_PRIVATE | MAP_ANONYMOUS); }
static const char *setup64(void) { return settled(private(64)); }
static const char *setup128(void) { return settled(private(128)); }
static const char *setup256(void) { return settled(private(256)); }
static const char *setup512(void) { return settled(private(512)); }
static const char *pool_setup(void) { return settled(setup(512 * MB, MAP_SHARED | MAP_ANONYMOUS)); }

/* Large pages instead of scattered ones. */
static const char *huge_setup(void)
{
    size_t size = 512 * MB;
    pages = size / PAGE;
    place = 0;
    char *start = mmap(NULL, size + LARGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(start != MAP_FAILED, "no memory");
    memory = (char *)(((uintptr_t)start + LARGE - 1) & ~(LARGE - 1));
    CHECK(madvise(memory, size, MADV_HUGEPAGE) == 0, "there are no large pages");
    return settled(touch());
}

static const char *file_setup(void)
{
    file = open(scratch_file("scatter"), O_RDWR | O_CREAT | O_TRUNC, 0644);
    CHECK(file >= 0 && ftruncate(file, 256 * MB) == 0, "cannot make a scratch file");
    return settled(setup(256 * MB, MAP_SHARED));
}

static void teardown(void)
{
    munmap(memory, pages * PAGE);
    if (file >= 0) {
        close(file);
        unlink(scratch_file("scatter"));
    }
    file = -1;
}

/* Each of several processes reads its own pages of the pool. */
static const char *pool_run(uint64_t n)
{
    pid_t readers[READERS];
    for (int i = 0; i < READERS; i++) {
        readers[i] = fork();
        CHECK(readers[i] >= 0, "cannot fork");
        place += n * READS;
        if (readers[i] == 0)
            _exit(read_pages(n) ? 1 : TRUE_CODE);
    }
    for (int i = 0; i < READERS; i++) {
        int status;
        CHECK(waitpid(readers[i], &status, 0) == readers[i], "lost a reader");
        CHECK(status == TRUE_CODE << 8, "a page shows what is another's");
    }
    return NULL;
}

/* First touch, of 16 MB. */
static const char *touch_run(uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        const char *wrong = private(16);
        CHECK(!wrong, wrong);
        teardown();
    }
    return NULL;
}

/*
 * What is given back makes the kernel flush the whole TLB, and nothing of the scattered memory has changed: it must not
 * matter how much of it there is.
 */
static const char *give_back(uint64_t n, int reads)
{
    const size_t size = 256 << 10;
    for (uint64_t i = 0; i < n; i++) {
        char *more = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(more != MAP_FAILED, "no memory");
        for (size_t at = 0; at < size; at += PAGE)
            more[at] = 1;
        CHECK(munmap(more, size) == 0, "cannot unmap");
        for (int read = 0; read < reads; read++) {
            uint64_t page = nth(place++);
            CHECK(*word(page) == page + 1, "a page shows what is another's");
        }
    }
    return NULL;
}

static const char *giveback_run(uint64_t n) { return give_back(n, 1); }
static const char *givehuge_run(uint64_t n) { return give_back(n, 64); }

#define SCATTERED "scattered memory"
#define CURVE(size) \
    { "scatter" #size, SCATTERED, "4,096 reads at random of " #size " MB in pages of 4 KB touched at random", read_pages, setup##size, teardown }

const struct row scatter_rows[] = {
    CURVE(64),
    CURVE(128),
    CURVE(256),
    CURVE(512),
    { "sharedpool", SCATTERED, "the same of 512 MB of shared memory", read_pages, pool_setup, teardown },
    { "sharedpool4", SCATTERED, "the same, four processes, each forked and reading as much", pool_run, pool_setup, teardown },
    { "mapfile", SCATTERED, "the same of a file of 256 MB in memory, mapped", read_pages, file_setup, teardown },
    { "giveback", SCATTERED, "256 KB mapped, touched and unmapped, beside 64 MB of such pages", giveback_run, setup64, teardown },
    { "givehuge", SCATTERED, "the same beside 512 MB in large pages, of which 64 are read", givehuge_run, huge_setup, teardown },
    { "firsttouch", SCATTERED, "first touch of 16 MB at random, in pages of 4 KB", touch_run, NULL, NULL },
    ROWS_END,
};
