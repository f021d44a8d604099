# What a Unix userland does in its first second, each step printing what it proved.
set -e

# Processes: fork and exec, exit codes, many of them.
(exit 7) || echo "child exited with $?"
i=0
while [ $i -lt 50 ]; do /bin/true; i=$((i + 1)); done
echo "50 processes"

# Pipes, and data through them.
echo "pipe: $(dd if=/dev/zero bs=64k count=16 2>/dev/null | wc -c) bytes"
echo "sort: $(printf '3\n1\n2\n' | sort | tr '\n' ' ')"

# Signals: sent, caught, and a process killed by one.
trap 'echo "caught SIGUSR1"' USR1
kill -USR1 $$
sleep 100 &
kill $!
wait $! || echo "killed: $?"

# Memory: files mapped and copied on write, checksums of what went through.
dd if=/dev/urandom of=/tmp/random bs=1M count=4 2>/dev/null
cp /tmp/random /tmp/copy
cmp /tmp/random /tmp/copy && echo "copies are equal"
printf 'ring3' | sha256sum | sed 's/ .*//; s/^/sha256 /'
echo ring3 | gzip | gunzip | sed 's/^/gunzip /'

# Arithmetic, integer and floating.
echo "integer: $((123456789 * 987654321))"
awk 'BEGIN { printf "floating: %.12f\n", 355 / 113 }'

# Time passes at the right speed.
before=$(date +%s)
sleep 2
after=$(date +%s)
echo "slept $((after - before))"
echo "date $(date +%s)"
echo "userland done"
