# The benchmark's own program, file by file, linked and started. The 32-bit program in it is built elsewhere: here it is empty.
PATH=/usr/bin:/bin
export PATH
objects=""
narrow=/tmp/bench-$$-narrow
: > $narrow
for source in /bench/source/*.c; do
    object=/tmp/bench-$$-${source##*/}.o
    gcc -std=gnu11 -O2 -DNARROW="\"$narrow\"" -c -o "$object" "$source" || exit 1
    objects="$objects $object"
done
gcc -static -o /tmp/bench-$$ $objects -lm || exit 1
/tmp/bench-$$ true
code=$?
/bin/busybox rm -f $narrow $objects /tmp/bench-$$
exit $code
