# program: valgrind, memcheck
# does: names an invalid read and a leak, with their lines
# needs: valgrind cc
# version: valgrind --version
# seconds: 120
cat > a.c <<'C'
#include <stdio.h>
#include <stdlib.h>
int main(void) {
    int *a = malloc(40);
    a[9] = 1;
    printf("%d\n", a[10] > 5 ? 1 : 2);
    char *lost = malloc(33);
    lost = NULL;
    free(a);
    return 0;
}
C
cc -g -O0 a.c -o a
valgrind --leak-check=full --error-exitcode=9 ./a > out 2> log
echo "status $?"
cat out
sed -n 's/^==[0-9]*== *//; s/0x[0-9A-Fa-f]*/ADDRESS/g; /Invalid\|alloc.d\|a\.c:\|lost:\|ERROR SUMMARY/p' log
