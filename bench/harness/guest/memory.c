/* Rows that are bound by memory: latency of dependent loads, and the C library's block operations. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "bench.h"

#define BLOCK ((size_t)64 << 20)
enum { NODES = 32 * 1024 * 1024 / 64, HOPS = 4096 };

struct node {
    struct node *next;
    uint32_t position; /* how many hops from the first node */
    char pad[52];
};

static struct node *nodes, *here;
static char *source, *target;

static void *map(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* Links all nodes in one cycle, in an order no prefetcher foresees. */
static const char *chase_setup(void)
{
    uint32_t *order = malloc(NODES * sizeof *order);
    uint64_t state = 7;
    nodes = map(NODES * sizeof *nodes);
    CHECK(order && nodes, "no memory");
    for (uint32_t i = 0; i < NODES; i++)
        order[i] = i;
    for (uint32_t i = NODES - 1; i > 0; i--) {
        uint32_t j = (uint32_t)(next_random(&state) % (i + 1)), other = order[j];
        order[j] = order[i], order[i] = other;
    }
    for (uint32_t i = 0; i < NODES; i++) {
        nodes[order[i]].next = &nodes[order[(i + 1) % NODES]];
        nodes[order[i]].position = i;
    }
    here = &nodes[order[0]];
    free(order);
    return NULL;
}

static const char *chase_run(uint64_t n)
{
    struct node *node = here;
    uint64_t expected = (node->position + n * HOPS) % NODES;
    for (uint64_t i = 0; i < n * HOPS; i++)
        node = node->next;
    here = node;
    CHECK(node->position == expected, "arrived at another node");
    return NULL;
}

static void chase_teardown(void)
{
    munmap(nodes, NODES * sizeof *nodes);
}

static const char *blocks_setup(void)
{
    source = map(BLOCK), target = map(BLOCK);
    CHECK(source && target, "no memory");
    for (size_t i = 0; i < BLOCK; i += 8)
        *(uint64_t *)(source + i) = i;
    memset(target, 0, BLOCK);
    return NULL;
}

static void blocks_teardown(void)
{
    munmap(source, BLOCK), munmap(target, BLOCK);
}

static const char *memset_run(uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        memset(target, (int)(i & 0x7f) + 1, BLOCK);
        HIDE(target);
    }
    char last = (char)(((n - 1) & 0x7f) + 1);
    for (size_t at = 0; at < BLOCK; at += 4093)
        CHECK(target[at] == last, "a byte was not set");
    return NULL;
}

static const char *memcpy_run(uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        *(uint64_t *)source = i;
        memcpy(target, source, BLOCK);
        HIDE(target);
    }
    CHECK(*(uint64_t *)target == n - 1, "the first bytes were not copied");
    for (size_t at = 4096; at < BLOCK; at += 4096)
        CHECK(*(uint64_t *)(target + at) == at, "a byte was not copied");
    return NULL;
}

static uint64_t sum(const char *bytes)
{
    const uint64_t *words = (const uint64_t *)bytes, *end = (const uint64_t *)(bytes + BLOCK);
    uint64_t a = 0, b = 0, c = 0, d = 0;
    for (; words < end; words += 4)
        a += words[0], b += words[1], c += words[2], d += words[3];
    return a + b + c + d;
}

static const char *read_run(uint64_t n)
{
    const uint64_t words = BLOCK / 8, expected = words * (words - 1) / 2 * 8;
    *(uint64_t *)source = 0;
    for (uint64_t i = 0; i < n; i++)
        CHECK(sum(source) == expected, "wrong sum");
    return NULL;
}

const struct row memory_rows[] = {
    { "chase", "memory", "4,096 dependent loads, at random in 32 MB", chase_run, chase_setup, chase_teardown },
    { "memset", "memory", "memset of 64 MB", memset_run, blocks_setup, blocks_teardown },
    { "memcpy", "memory", "memcpy of 64 MB", memcpy_run, blocks_setup, blocks_teardown },
    { "memread", "memory", "sum of 64 MB", read_run, blocks_setup, blocks_teardown },
    ROWS_END,
};
