/* Programs linked to fixed addresses have their heaps in the low gigabyte, compilers among them. There are
   words of the engine's own there: none of them may be seen, by the program or by the kernel for it. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define START 0x4000000ul
#define LEN 0x2000000ul

static unsigned long word(unsigned long at) { return at * 0x9e3779b97f4a7c15ul; }

/* Often enough for it to be worth something to the engine. */
static int calls(void) {
    int good = 1;
    for (int n = 0; n < 1000; n++) {
        long id;
        __asm__ volatile("mov $39, %%eax; syscall" : "=a"(id) : : "rcx", "r11", "memory");
        good &= id == getpid();
    }
    return good;
}

int main(void) {
    int good = calls(), ends[2];
    char *memory = mmap((void *)START, LEN, PROT_READ | PROT_WRITE,
                        MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || pipe(ends)) return 2;
    for (unsigned long at = START; at < START + LEN; at += 4096) {
        volatile unsigned long *page = (unsigned long *)at;
        good &= page[1] == 0;
        for (int n = 0; n < 512; n++) page[n] = word(at + n);
        for (int n = 0; n < 512; n++) good &= page[n] == word(at + n);
    }
    good &= calls();
    for (unsigned long at = START; at < START + LEN; at += 4096) {
        char back[4096];
        good &= write(ends[1], (void *)at, 4096) == 4096 && read(ends[0], back, 4096) == 4096;
        good &= memcmp(back, (void *)at, 4096) == 0;
    }
    munmap(memory, LEN);
    good &= calls();
    puts(good ? "the memory is the program's" : "there is something else");
    return !good;
}
