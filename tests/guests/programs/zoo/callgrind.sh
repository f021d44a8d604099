# program: valgrind, callgrind
# does: counts the instructions of a function
# needs: valgrind cc
# version: valgrind --version
# seconds: 120
cat > a.c <<'C'
#include <stdio.h>
__attribute__((noinline)) unsigned work(unsigned n) {
    unsigned x = 1;
    for (unsigned i = 0; i < n; i++) x = x * 1664525 + 1013904223 + (x >> 7);
    return x;
}
int main(void) { printf("%u\n", work(100000)); }
C
cc -g -O1 a.c -o a
valgrind --tool=callgrind --toggle-collect=work --callgrind-out-file=profile ./a 2> log
echo "status $?"
sed -n 's/.*Collected : /collected /p' log
grep -c fn= profile
