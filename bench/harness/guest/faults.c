/* Rows of the memory manager: page faults, mappings, protections. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "bench.h"

#define PAGE ((size_t)4096)
#define HUGE ((size_t)2 << 20)
#define TOUCHED ((size_t)64 << 20)
enum { FAULTS = 4096 };

static char *page;

static char *map(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* Whether the pages hold what was written to them. */
static const char *kept(const char *memory, size_t size)
{
    for (size_t at = 0; at < size; at += 16 * PAGE)
        CHECK(memory[at] == (char)(at / PAGE | 1), "a page was lost");
    return NULL;
}

/* Writes to each page, and learns in the same access that it was empty. */
static const char *write_pages(char *memory, size_t size)
{
    for (size_t at = 0; at < size; at += PAGE) {
        char before = __atomic_exchange_n(&memory[at], (char)(at / PAGE | 1), __ATOMIC_RELAXED);
        CHECK(before == 0, "a fresh page is not empty");
    }
    return kept(memory, size);
}

/* Reads each page and then writes to it. */
static const char *read_and_write_pages(char *memory, size_t size)
{
    for (size_t at = 0; at < size; at += PAGE) {
        CHECK(*(volatile char *)&memory[at] == 0, "a fresh page is not empty");
        memory[at] = (char)(at / PAGE | 1);
    }
    return kept(memory, size);
}

static const char *faults_run(uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        char *memory = map(FAULTS * PAGE);
        CHECK(memory, "no memory");
        madvise(memory, FAULTS * PAGE, MADV_NOHUGEPAGE);
        const char *wrong = write_pages(memory, FAULTS * PAGE);
        CHECK(!wrong, wrong);
        munmap(memory, FAULTS * PAGE);
    }
    return NULL;
}

static const char *huge_pages(uint64_t n, const char *(*pages)(char *, size_t))
{
    for (uint64_t i = 0; i < n; i++) {
        char *memory = map(TOUCHED + HUGE);
        CHECK(memory, "no memory");
        char *aligned = (char *)(((uintptr_t)memory + HUGE - 1) & ~(HUGE - 1));
        madvise(aligned, TOUCHED, MADV_HUGEPAGE);
        const char *wrong = pages(aligned, TOUCHED);
        CHECK(!wrong, wrong);
        munmap(memory, TOUCHED + HUGE);
    }
    return NULL;
}

static const char *touch_run(uint64_t n)
{
    return huge_pages(n, write_pages);
}

static const char *zeropage_run(uint64_t n)
{
    return huge_pages(n, read_and_write_pages);
}

static const char *mmap_run(uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        char *memory = map(16 * PAGE);
        CHECK(memory && munmap(memory, 16 * PAGE) == 0, "cannot map and unmap");
    }
    return NULL;
}

static const char *page_setup(void)
{
    page = map(PAGE);
    CHECK(page, "no memory");
    return NULL;
}

static void page_teardown(void)
{
    munmap(page, PAGE);
}

static const char *mprotect_run(uint64_t n)
{
    volatile char *byte = page;
    for (uint64_t i = 0; i < n; i++) {
        *byte = (char)i;
        CHECK(mprotect(page, PAGE, PROT_READ) == 0 && *byte == (char)i, "a protected page changed");
        CHECK(mprotect(page, PAGE, PROT_READ | PROT_WRITE) == 0, "cannot unprotect");
    }
    return NULL;
}

/* Memory that comes and goes, in the sizes for which the C library asks the kernel. */
static const char *churn_run(uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        for (size_t size = 64 << 10; size <= 16 << 20; size *= 4) {
            char *memory = malloc(size);
            CHECK(memory, "no memory");
            memset(memory, (int)i | 1, size);
            HIDE(memory);
            CHECK(memory[size - 1] == (char)(i | 1), "a byte was lost");
            free(memory);
        }
    return NULL;
}

/* As programs do that show each other pictures or messages. */
static const char *sharechurn_run(uint64_t n)
{
    const size_t size = 1 << 20;
    for (uint64_t i = 0; i < n; i++) {
        char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(memory != MAP_FAILED, "no memory");
        for (size_t at = 0; at < size; at += size / 16) {
            CHECK(memory[at] == 0, "a fresh page is not empty");
            memory[at] = 1;
        }
        CHECK(munmap(memory, size) == 0, "cannot unmap");
    }
    return NULL;
}

const struct row fault_rows[] = {
    { "faults", "memory management", "4,096 page faults of 4 KB, with their mapping", faults_run, NULL, NULL },
    { "touch", "memory management", "write to every page of 64 MB, huge pages allowed", touch_run, NULL, NULL },
    { "zeropage", "memory management", "read, then write, every page of 64 MB, huge pages allowed", zeropage_run, NULL,
      NULL },
    { "mmap", "memory management", "mmap and munmap of 64 KB", mmap_run, NULL, NULL },
    { "mprotect", "memory management", "mprotect twice and touch", mprotect_run, page_setup, page_teardown },
    { "churn", "memory management", "malloc, fill and free of 64 KB, 256 KB, 1 MB, 4 MB and 16 MB", churn_run, NULL, NULL },
    { "sharechurn", "memory management", "1 MB of shared memory mapped, 16 pages touched, unmapped", sharechurn_run, NULL, NULL },
    ROWS_END,
};
