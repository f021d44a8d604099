# program: bpftrace
# does: says what is missing: neither kernel has trace points for it here
# needs: bpftrace
# version: bpftrace --version
# seconds: 120
timeout 60 bpftrace -e 'BEGIN { printf("begins\n"); } tracepoint:syscalls:sys_enter_getppid { @n = count(); } END { printf("ends\n"); }' -c '/usr/bin/getent passwd 0' > out 2> log
echo "status $?"
grep -E 'begins|ends|root' out
grep -h ERROR log | grep -v MEMLOCK | head -n 1 | sed 's/[0-9][0-9]*/N/g'
