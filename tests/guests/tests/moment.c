// Prints the time-stamp counter and nanoseconds since 1970 at the same moment: the pair, out of many, read in the least time. The
// clock is the system's, or that of the device which is named (Documentation/driver-api/ptp.rst).
#include <fcntl.h>
#include <stdio.h>
#include <time.h>
#include <x86intrin.h>

static clockid_t clock_of(const char *device) {
    int file = open(device, O_RDONLY);
    return file < 0 ? -1 : (clockid_t)(~(unsigned)file << 3 | 3);
}

int main(int count, char **words) {
    clockid_t clock = count > 1 ? clock_of(words[1]) : CLOCK_REALTIME;
    unsigned long long least = -1, tsc = 0, ns = 0;
    for (int i = 0; i < 1000; i++) {
        struct timespec now;
        unsigned long long before = __rdtsc();
        if (clock_gettime(clock, &now)) {
            perror("clock_gettime");
            return 1;
        }
        unsigned long long width = __rdtsc() - before;
        if (width >= least) continue;
        least = width;
        tsc = before + width / 2;
        ns = now.tv_sec * 1000000000ull + now.tv_nsec;
    }
    printf("%llu %llu\n", tsc, ns);
}
