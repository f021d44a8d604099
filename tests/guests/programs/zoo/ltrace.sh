# program: ltrace
# does: breakpoints at each call of a library
# needs: ltrace cc
# version: ltrace --version | head -n 1
# seconds: 60
cat > a.c <<'C'
#include <stdlib.h>
#include <string.h>
int main(void) { char *p = malloc(10); strcpy(p, "abc"); int n = strlen(p); free(p); return n + abs(-4); }
C
cc -O0 -fno-builtin -no-pie -z lazy a.c -o a
ltrace -b ./a 2>&1 | sed 's/0x[0-9a-f]*/ADDRESS/g; s/  */ /g'
