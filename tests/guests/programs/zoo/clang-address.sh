# program: clang's sanitizers: address and undefined
# does: a run without an error, and one with
# needs: clang
# version: clang --version | head -n 1
# seconds: 60
cat > a.c <<'C'
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv) { int *a = calloc(10, 4); printf("%d\n", a[8 + argc]); }
C
clang -g -O1 -fsanitize=address,undefined a.c -o a
for word in "" x; do
    ./a $word > out 2> log
    echo "status $?"
    cat out
    grep SUMMARY log | sed 's/([^)]*)//g; s/ \/.*\/a\.c/ a.c/'
done
