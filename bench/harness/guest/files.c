/* Rows that read a file in memory, as bw_file_rd and bw_mmap_rd do. */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench.h"

#define SIZE ((size_t)16 << 20)
enum { CHUNK = 64 * 1024 };

static int file = -1;
static uint64_t *buffer;
static uint64_t expected, last; /* sum of the file's words, and its last word */

/* Word i of the file is a fixed random sequence's i-th. */
static const char *write_file(void)
{
    uint64_t state = 99;
    expected = 0;
    for (size_t at = 0; at < SIZE; at += CHUNK) {
        for (size_t i = 0; i < CHUNK / 8; i++)
            expected += buffer[i] = next_random(&state);
        CHECK(write(file, buffer, CHUNK) == CHUNK, "cannot write 16 MB of scratch file");
    }
    last = state;
    return NULL;
}

static const char *setup(void)
{
    file = open(scratch_file("big"), O_RDWR | O_CREAT | O_TRUNC, 0644);
    buffer = malloc(CHUNK);
    CHECK(file >= 0 && buffer, "cannot make a scratch file");
    return write_file();
}

static void teardown(void)
{
    close(file);
    free(buffer);
    unlink(scratch_file("big"));
}

static const char *read_run(uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        for (size_t at = 0; at < SIZE; at += CHUNK)
            CHECK(pread(file, buffer, CHUNK, (off_t)at) == CHUNK, "read less");
    CHECK(buffer[CHUNK / 8 - 1] == last, "read something else");
    return NULL;
}

static const char *mapped_run(uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        uint64_t *words = mmap(NULL, SIZE, PROT_READ, MAP_SHARED, file, 0), sum = 0;
        CHECK(words != MAP_FAILED, "cannot map the scratch file");
        for (size_t at = 0; at < SIZE / 8; at++)
            sum += words[at];
        CHECK(sum == expected && munmap(words, SIZE) == 0, "wrong sum");
    }
    return NULL;
}

const struct row file_rows[] = {
    { "fileread", "files", "read of a 16 MB file in memory, 64 KB at a time", read_run, setup, teardown },
    { "filemap", "files", "mmap and sum of a 16 MB file in memory", mapped_run, setup, teardown },
    ROWS_END,
};
