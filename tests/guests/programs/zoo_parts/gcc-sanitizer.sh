# Finds one error of each of its kinds with the sanitizer of GCC's that $sanitizer names, or does not.
cat > a.c <<'C'
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int shared;
static void *racer(void *p) { for (int i = 0; i < 1000; i++) shared++; return p; }
int main(int argc, char **argv) {
    switch (argv[1][0]) {
    case 'o': { char *a = malloc(10); a[argc + 8] = 1; printf("%d\n", a[9 + argc]); break; }
    case 'f': { char *a = malloc(10); free(a); printf("%d\n", a[argc]); break; }
    case 's': { char a[8]; memset(a, 0, 8); printf("%d\n", a[argc + 7]); break; }
    case 'i': { int a = 0x7fffffff; a += argc; printf("%d\n", a); break; }
    case 'd': { printf("%d\n", 1 << (argc + 40)); break; }
    case 'l': { char *volatile a = malloc(77); a = 0; puts("leaks"); break; }
    // Of two accesses at the same moment ThreadSanitizer may miss either, on the host, too.
    case 'r': { pthread_t t; pthread_create(&t, 0, racer, 0); usleep(20000); racer(0); pthread_join(t, 0); puts("races"); break; }
    default: puts("sound");
    }
}
C
gcc -g -O1 -w -fsanitize=$sanitizer -pthread a.c -o a
for error in n o f s i d l r; do
    timeout 20 ./a $error > out 2> log
    echo "$error: status $?"
    grep -v '[0-9]' out | head -n 1
    grep -E 'SUMMARY|runtime error' log | sed 's/0x[0-9a-f]*/ADDRESS/g; s/[^ ]*libsanitizer[^ ]*/library/; s/([^)]*)//g; s, [^ ]*/a.c, a.c,' | sort | uniq -c | head -n 1 | sed 's/^ *[0-9]* //'
done
