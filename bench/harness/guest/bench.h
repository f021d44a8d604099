/* What every row of the benchmark is: a name, and n repetitions of one operation that check their own result. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* Runs the operation n times. NULL, or what was wrong with a result. */
typedef const char *run_fn(uint64_t n);

struct row {
    const char *name;  /* one word, as on the command line */
    const char *group; /* what it stresses */
    const char *about; /* what one operation is */
    run_fn *run;
    const char *(*setup)(void);   /* before the first batch; may be NULL */
    void (*teardown)(void); /* after the last; may be NULL */
};

extern const struct row compute_rows[], memory_rows[], call_rows[], process_rows[], crowd_rows[], fault_rows[],
    file_rows[], scatter_rows[], narrow_rows[], two_rows[], program_rows[];

/* A directory in memory (tmpfs), and this program, for rows that need files or start programs. */
extern const char *scratch, *self_path, *shell_path;

/* Root directory of other programs, where there are any. */
extern const char *userland;

/* A scratch file's path; the buffer is overwritten by the next call. */
const char *scratch_file(const char *name);

/* The next number of a fixed sequence (xorshift64). */
static inline uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* What a started program ends with, so that a failure to start it cannot pass for success. */
enum { TRUE_CODE = 42 };

/* Keeps the compiler from knowing a value, or from dropping the work that made it. */
#define HIDE(value) __asm__ volatile("" : "+r"(value) : : "memory")
#define ROWS_END { NULL, NULL, NULL, NULL, NULL, NULL }
#define CHECK(condition, message) do { if (!(condition)) return message; } while (0)
