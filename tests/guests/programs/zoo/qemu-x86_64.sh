# program: qemu-x86_64, user mode
# does: translates a static program with threads and signals
# needs: qemu-x86_64-static cc
# version: qemu-x86_64-static --version | head -n 1
# seconds: 120
cat > a.c <<'C'
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>
static volatile int alarms;
static void on(int s) { alarms++; }
static void *sum(void *p) { long s = 0; for (long i = 0; i < 3000000; i++) s += i ^ (long)p; return (void *)s; }
int main(void) {
    signal(SIGALRM, on);
    pthread_t t[4];
    for (long i = 0; i < 4; i++) pthread_create(&t[i], 0, sum, (void *)i);
    for (int i = 0; i < 4; i++) { void *r; pthread_join(t[i], &r); printf("%ld\n", (long)r); }
    raise(SIGALRM);
    alarm(1);
    while (alarms < 2) pause();
    printf("%d alarms\n", alarms);
}
C
cc -O1 -static -pthread a.c -o a && qemu-x86_64-static ./a
