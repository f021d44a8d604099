/* One thread gets memory by calls in which the kernel lets others run; the other makes calls that return zero, with
   registers that would mean 127 TiB of memory at zero if they were those of the first one's. Between its calls the
   first one computes. Argument: how often. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#define LEN (32ul << 20)

static volatile int done;

static void *yields(void *nothing) {
    for (long len = 0x7f0000000000; !done; len -= 4096) {
        long result = SYS_sched_yield;
        asm volatile("syscall" : "+a"(result) : "d"(3l), "S"(len), "D"(0l) : "rcx", "r11", "memory");
    }
    return nothing;
}

int main(int count, char **arguments) {
    int times = count > 1 ? atoi(arguments[1]) : 20, bad = 0;
    pthread_t other;
    if (pthread_create(&other, NULL, yields, NULL)) return 2;
    for (int n = 0; n < times; n++) {
        void *memory = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        bad += memory == MAP_FAILED || munmap(memory, LEN);
        for (volatile int work = 0; work < 1000000; work++) {}
    }
    done = 1;
    pthread_join(other, NULL);
    printf("%d failed\n", bad);
    return bad != 0;
}
