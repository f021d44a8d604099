# A small program, compiled, linked and started.
PATH=/usr/bin:/bin
export PATH
program=/tmp/hello-$$
printf '#include <stdio.h>\nint main(void) { puts("hello"); return 42; }\n' > $program.c || exit 1
gcc -O2 -o $program $program.c || exit 1
[ "$($program)" = hello ] && $program > /dev/null
code=$?
/bin/busybox rm -f $program $program.c
exit $code
