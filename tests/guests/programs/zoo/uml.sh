# program: user-mode Linux
# does: boots to a shell on the host's files
# needs: linux.uml
# version: linux.uml --version
# seconds: 120
# fails: the host's CPU has AMX, for whose registers UML of 6.1 has no room; a guest's has none
cat > init <<'C'
#!/bin/sh
mount -t proc proc /proc
echo "kernel $(cut -d' ' -f3 /proc/version)"
grep -c . /proc/self/maps > /dev/null && echo maps
i=0; while [ $i -lt 50 ]; do (exit 3); i=$((i + $? / 3)); done; echo "forked $i"
echo done > /tmp/x; cat /tmp/x
echo o > /proc/sysrq-trigger; sleep 9
C
chmod +x init
TMPDIR=$PWD timeout 100 linux.uml mem=96M rootfstype=hostfs rootflags=/ rw quiet con=null con0=fd:0,fd:1 \
    init="$PWD/init" < /dev/null 2> log | tr -d '\r' | grep -E '^(kernel|maps|forked|done)'
