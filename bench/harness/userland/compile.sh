# The benchmark's own program, file by file, linked and started.
PATH=/usr/bin:/bin
export PATH
objects=""
for source in /bench/source/*.c; do
    object=/tmp/bench-$$-${source##*/}.o
    gcc -std=gnu11 -O2 -c -o "$object" "$source" || exit 1
    objects="$objects $object"
done
gcc -static -o /tmp/bench-$$ $objects -lm || exit 1
/tmp/bench-$$ true
code=$?
/bin/busybox rm -f $objects /tmp/bench-$$
exit $code
