// Prints the time-stamp counter and nanoseconds since 1970 at the same moment: the pair, out of many, read in the least time.
#include <stdio.h>
#include <time.h>
#include <x86intrin.h>

int main(void) {
    unsigned long long least = -1, tsc = 0, ns = 0;
    for (int i = 0; i < 1000; i++) {
        struct timespec now;
        unsigned long long before = __rdtsc();
        clock_gettime(CLOCK_REALTIME, &now);
        unsigned long long width = __rdtsc() - before;
        if (width >= least) continue;
        least = width;
        tsc = before + width / 2;
        ns = now.tv_sec * 1000000000ull + now.tv_nsec;
    }
    printf("%llu %llu\n", tsc, ns);
}
