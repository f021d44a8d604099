/* Rows that stay in user code: integer, calls, indirect jumps, floating point, vectors. */
#include <emmintrin.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "sha256.h"

enum { MESSAGE = 64 * 1024, FIB = 27, STEPS = 4000, ORDER = 256, SORTED = 20000 };

static uint8_t message[MESSAGE];

static const char *sha256_setup(void)
{
    for (size_t i = 0; i < MESSAGE; i++)
        message[i] = (uint8_t)(i % 251);
    return NULL;
}

static const char *sha256_run(uint64_t n)
{
    /* SHA-256 of 65536 bytes where byte i is i mod 251 */
    static const char expected[] = "4b640d85ab3ba30fd02c9fc9db4a8928f416322ad27022ea58a65aaee68a4df2";
    char digest[65];
    for (uint64_t i = 0; i < n; i++) {
        sha256_hex(message, MESSAGE, digest);
        CHECK(memcmp(digest, expected, 64) == 0, "wrong digest");
    }
    return NULL;
}

__attribute__((noinline, noclone, optimize("no-optimize-sibling-calls"))) static unsigned fib(unsigned k)
{
    HIDE(k);
    return k < 2 ? k : fib(k - 1) + fib(k - 2);
}

static const char *fib_run(uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        CHECK(fib(FIB) == 196418, "wrong Fibonacci number");
    return NULL;
}

/* A byte-code machine with threaded dispatch: each operation jumps to the next through a table. */
static uint64_t interpret(const uint8_t *code, uint64_t count)
{
    static void *const operations[] = { &&add, &&xor, &&shift, &&count_down, &&end };
    uint64_t a = 1, b = 0;
#define NEXT goto *operations[*code++]
    NEXT;
add:
    a += b + 7;
    NEXT;
xor:
    b ^= a;
    NEXT;
shift:
    a = (a << 3) | (a >> 61);
    NEXT;
count_down:
    if (--count)
        code -= 8;
    NEXT;
end:
    return a ^ b;
#undef NEXT
}

/* The same computation, without a byte code. */
static uint64_t interpret_directly(uint64_t count)
{
    uint64_t a = 1, b = 0;
    do {
        a += b + 7, b ^= a;
        a = (a << 3) | (a >> 61);
        b ^= a, a += b + 7, b ^= a;
        a = (a << 3) | (a >> 61);
    } while (--count);
    return a ^ b;
}

static const char *threaded_run(uint64_t n)
{
    static const uint8_t code[] = { 0, 1, 2, 1, 0, 1, 2, 3, 4 };
    const uint64_t expected = interpret_directly(STEPS);
    const uint8_t *hidden = code;
    HIDE(hidden);
    for (uint64_t i = 0; i < n; i++)
        CHECK(interpret(hidden, STEPS) == expected, "wrong result of the byte code");
    return NULL;
}

struct body {
    double x, y, z, vx, vy, vz, mass;
};

enum { BODIES = 5 };

static void advance(struct body *bodies, double step)
{
    for (int i = 0; i < BODIES; i++)
        for (int j = i + 1; j < BODIES; j++) {
            struct body *a = &bodies[i], *b = &bodies[j];
            double dx = a->x - b->x, dy = a->y - b->y, dz = a->z - b->z;
            double square = dx * dx + dy * dy + dz * dz;
            double force = step / (square * sqrt(square));
            a->vx -= dx * b->mass * force, a->vy -= dy * b->mass * force, a->vz -= dz * b->mass * force;
            b->vx += dx * a->mass * force, b->vy += dy * a->mass * force, b->vz += dz * a->mass * force;
        }
    for (struct body *b = bodies; b < bodies + BODIES; b++)
        b->x += step * b->vx, b->y += step * b->vy, b->z += step * b->vz;
}

/* Five bodies with made-up orbits; IEEE arithmetic makes the result the same everywhere, to the bit. */
static uint64_t orbits(void)
{
    struct body bodies[BODIES];
    for (int i = 0; i < BODIES; i++) {
        struct body b = { 1.0 + i * 2.5, i * 0.75, 0.125 * i, 0.1 * i, 0.5 - 0.2 * i, 0.05 * i, 10.0 / (1 + i * i) };
        bodies[i] = b;
    }
    for (int i = 0; i < 500; i++)
        advance(bodies, 0.001);
    double sum = 0;
    for (int i = 0; i < BODIES; i++)
        sum += bodies[i].x + 2 * bodies[i].y + 3 * bodies[i].z;
    uint64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    return bits;
}

static const char *nbody_run(uint64_t n)
{
    const uint64_t expected = 0x404905c4649e6e5e; /* Python's doubles agree */
    for (uint64_t i = 0; i < n; i++)
        CHECK(orbits() == expected, "the bodies are elsewhere");
    return NULL;
}

static float left[ORDER][ORDER], right[ORDER][ORDER], product[ORDER][ORDER];

/* Small whole numbers, so that every sum is exact. */
static const char *matmul_setup(void)
{
    for (int i = 0; i < ORDER; i++)
        for (int j = 0; j < ORDER; j++)
            left[i][j] = (float)((i * 3 + j) % 7), right[i][j] = (float)((i + j * 5) % 11);
    return NULL;
}

static void multiply_row(const float *row, float *out)
{
    for (int j = 0; j < ORDER; j += 16) {
        __m128 sum[4] = { _mm_setzero_ps(), _mm_setzero_ps(), _mm_setzero_ps(), _mm_setzero_ps() };
        for (int k = 0; k < ORDER; k++) {
            __m128 factor = _mm_set1_ps(row[k]);
            for (int v = 0; v < 4; v++)
                sum[v] = _mm_add_ps(sum[v], _mm_mul_ps(factor, _mm_loadu_ps(&right[k][j + 4 * v])));
        }
        for (int v = 0; v < 4; v++)
            _mm_storeu_ps(&out[j + 4 * v], sum[v]);
    }
}

static const char *matmul_check(void)
{
    for (int i = 0; i < ORDER; i += 17)
        for (int j = 0; j < ORDER; j += 13) {
            int sum = 0;
            for (int k = 0; k < ORDER; k++)
                sum += (i * 3 + k) % 7 * ((k + j * 5) % 11);
            CHECK(product[i][j] == (float)sum, "wrong product");
        }
    return NULL;
}

static const char *matmul_run(uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        for (int row = 0; row < ORDER; row++)
            multiply_row(left[row], product[row]);
    return matmul_check();
}

static uint64_t unsorted[SORTED], sorted[SORTED];

static const char *qsort_setup(void)
{
    uint64_t state = 42;
    for (int i = 0; i < SORTED; i++)
        unsorted[i] = next_random(&state);
    return NULL;
}

static int compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static const char *qsort_run(uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        memcpy(sorted, unsorted, sizeof sorted);
        qsort(sorted, SORTED, sizeof *sorted, compare);
    }
    uint64_t difference = unsorted[0] - sorted[0];
    for (int i = 1; i < SORTED; i++) {
        CHECK(sorted[i - 1] <= sorted[i], "not sorted");
        difference += unsorted[i] - sorted[i];
    }
    CHECK(difference == 0, "not the numbers that were to be sorted");
    return NULL;
}

const struct row compute_rows[] = {
    { "sha256", "compute", "SHA-256 of 64 KB, scalar C", sha256_run, sha256_setup, NULL },
    { "fib", "compute", "fib(27): 832,000 calls and returns", fib_run, NULL, NULL },
    { "threaded", "compute", "32,000 operations of a threaded interpreter: indirect jumps", threaded_run, NULL, NULL },
    { "nbody", "compute", "500 steps of five bodies, double precision", nbody_run, NULL, NULL },
    { "matmul", "compute", "product of two 256x256 float matrices, SSE", matmul_run, matmul_setup, NULL },
    { "qsort", "compute", "qsort of 20,000 numbers with a callback", qsort_run, qsort_setup, NULL },
    ROWS_END,
};
