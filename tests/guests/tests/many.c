// More processes than there are address spaces for, all children of one, all waiting for it and then waking again
// and again. Each has to find its stack, where it writes, and the parent's process numbers as they were.
#include <errno.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { GO, OVER };
enum { MOST = 2000 };
static volatile int *shared;

// What is wrong in a child that has this number; the numbers of those before it are in the list.
static int child(int number, const int *list) {
    struct timespec most = { 100, 0 };
    while (!shared[GO] && syscall(SYS_futex, &shared[GO], FUTEX_WAIT, 0, &most, 0, 0) != 0)
        if (errno != EINTR && errno != EAGAIN)
            return 2;
    for (int n = 0; n < 100 && !shared[OVER]; n++)
        usleep(50000);
    for (int n = 0; n < number; n++)
        if (list[n] <= 0)
            return 1;
    return 0;
}

int main(int argc, char **argv) {
    int count = argc > 1 ? atoi(argv[1]) : 0, list[MOST], bad = 0;
    if (count < 1 || count > MOST)
        return 2;
    shared = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (int n = 0; n < count; n++)
        if ((list[n] = fork()) == 0)
            exit(child(n, list));
    usleep(1500000);
    shared[GO] = 1;
    syscall(SYS_futex, &shared[GO], FUTEX_WAKE, count, 0, 0, 0);
    usleep(500000);
    shared[OVER] = 1;
    for (int n = 0; n < count; n++) {
        int status = -1;
        waitpid(list[n], &status, 0);
        bad += status != 0;
    }
    printf("%d of %d went wrong\n", bad, count);
    return bad != 0;
}
