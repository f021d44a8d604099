# program: uftrace
# does: patches function entries as the program runs
# needs: uftrace gcc
# version: uftrace --version
# seconds: 60
cat > a.c <<'C'
__attribute__((noinline)) int leaf(int n) { return n * 3 + 1; }
__attribute__((noinline)) int branch(int n) { int s = 0; for (int i = 0; i < n; i++) s += leaf(i); return s; }
int main(void) { return branch(5) & 0; }
C
gcc -O1 -pg a.c -o a
uftrace -F main --no-pager --no-event -f none ./a 2>&1 | grep -o -E '[a-z]+\(\)[ ;{]*'
