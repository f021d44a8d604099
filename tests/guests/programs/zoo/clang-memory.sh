# program: clang's sanitizer: memory
# does: finds a branch on memory nobody wrote
# needs: clang
# version: clang --version | head -n 1
# seconds: 60
cat > a.c <<'C'
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv) {
    int *a = malloc(40);
    if (argc > 1) a[5] = 1;
    if (a[5]) puts("one");
    return 0;
}
C
clang -g -O0 -fsanitize=memory a.c -o a
for word in "" x; do
    ./a $word > out 2> log
    echo "status $?"
    cat out
    grep SUMMARY log | sed 's/([^)]*)//g; s/ \/.*\/a\.c/ a.c/'
done
