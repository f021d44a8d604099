# program: gdb
# does: breakpoints, hardware watchpoints and breakpoints, single steps, a signal, a changed variable
# needs: gdb cc
# version: gdb --version | head -n 1
# seconds: 120
cat > a.c <<'C'
#include <signal.h>
#include <stdio.h>
int watched, other;
static void on(int s) { other = s; }
__attribute__((noinline)) int step(int n) { watched += n; return watched; }
int main(void) {
    signal(SIGUSR1, on);
    for (int i = 0; i < 4; i++) step(i);
    raise(SIGUSR1);
    printf("%d %d\n", watched, other);
    return watched;
}
C
cc -g -O0 -no-pie a.c -o a
gdb -nx -batch -ex 'set disable-randomization off' -ex 'break main' -ex run -ex 'watch watched' -ex continue -ex continue -ex 'info watchpoints' \
    -ex 'delete' -ex 'hbreak step' -ex continue -ex 'stepi' -ex 'stepi' -ex 'print n' -ex 'bt' -ex 'delete' \
    -ex 'rwatch other' -ex 'handle SIGUSR1 nostop noprint' -ex continue -ex 'set var watched = 42' -ex 'delete' -ex continue ./a 2>&1 |
    grep -v -E 'debuginfod|libthread|warning|Using host|^\[' | sed 's/0x[0-9a-f]*/ADDRESS/g; s/process [0-9]*/process/'
