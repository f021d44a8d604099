/* Compilers at run time keep tables beside the code they make, in pages that may be written and executed, and
   programs have constants in their text. Small numbers look like instructions that the engine changes before they
   run: 0f 02, 0f 03 and 0f a2 among them. The program must read what it has written. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define LEN 4096
#define PAGES 64

static unsigned random_word = 1;

static unsigned char small(int below) {
    random_word = random_word * 1664525u + 1013904223u;
    return (random_word >> 16) % below;
}

/* mov eax, 5; ret, and numbers behind it. */
static void fill(unsigned char *page, int below) {
    static const unsigned char code[] = {0xb8, 5, 0, 0, 0, 0xc3};
    for (int n = 0; n < LEN; n++) page[n] = small(below);
    memcpy(page, code, sizeof code);
    for (int n = 256; n + 2 < LEN; n += 64) {
        page[n] = 0x0f;
        page[n + 1] = (unsigned char[]){0x02, 0x03, 0xa2}[n / 64 % 3];
    }
}

static int run(unsigned char *page) { return ((int (*)(void))page)() == 5; }

/* Written, executed and read, with or without the right to write meanwhile. */
static int is_kept(int below, int locked) {
    static unsigned char copy[LEN];
    int all = PROT_READ | PROT_WRITE | PROT_EXEC, good = 1;
    for (int n = 0; n < PAGES; n++) {
        unsigned char *page = mmap(0, LEN, all, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (page == MAP_FAILED) return 0;
        fill(page, below);
        memcpy(copy, page, LEN);
        if (locked) mprotect(page, LEN, PROT_READ | PROT_EXEC);
        good &= run(page) && memcmp(page, copy, LEN) == 0;
        munmap(page, LEN);
    }
    return good;
}

int main(void) {
    int good = is_kept(32, 0) && is_kept(256, 0) && is_kept(32, 1) && is_kept(256, 1);
    puts(good ? "what was written is read" : "there is something else");
    return !good;
}
