#!/bin/sh
# Files: what commands that read and write many files take natively and in `ring3 exec`, in turns.
#
#     sh bench/files.sh [ROUNDS]
#
# RING3 names the program (target/release/ring3), OPTIONS what `exec` gets (such as --fresh), RUN what both run under
# (such as "chrt -r 5"), ROWS the rows to run (such as "ls find"; all but those of FURTHER by default). The first column of times is the first run of a command in a guest, when nothing is in its caches;
# the others are the best of the later runs. Reading is of the host's root, writing of a folder that is shared for writing.
# That folder is in TMPDIR (/var/tmp). ext4 passes over inodes that were freed in the last minutes, so what makes and removes trees gets
# slower there, natively too, the more often it is run: TMPDIR=/dev/shm shows what is ring3's.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
ring3=${RING3:-$here/target/release/ring3}
rounds=${1:-3}
work=$(mktemp -d "${TMPDIR:-/var/tmp}/ring3-files.XXXXXX")
trap 'rm -rf "$work"' EXIT INT TERM
cd "$work"

mkdir tree
cp -r /usr/include/linux tree/
tar cf tree.tar tree
git init -q project
cp -r tree project/
(cd project && git add . && git -c user.name=x -c user.email=x@x commit -qm files)
printf '#include <stdio.h>\n#include <linux/fs.h>\nint main(void) { return puts("hello") < 0; }\n' > hello.c
cat > commits.py <<'P'
import os, sqlite3
if os.path.exists('commits.db'):
    os.remove('commits.db')
base = sqlite3.connect('commits.db')
base.execute('create table t(a)')
for i in range(300):
    base.execute('insert into t values(?)', (i,))
    base.commit()
P

# A name, and a command that leaves things as they were.
cat > rows <<'R'
ls|ls -l /usr/bin
find|find /usr/share/doc -type f
grep|grep -r xyzzy /usr/include/linux /usr/share/perl || true
tar|tar cf - /usr/include/c++ | cat
gitstatus|cd project && git status
copy|cp -r /usr/include/linux /tmp/ring3-copy && rm -r /tmp/ring3-copy
untar|mkdir u && tar xf tree.tar -C u && rm -r u
git|mkdir g && cp -r tree g/ && cd g && git init -q && git add . && git -c user.name=x -c user.email=x@x commit -qm files && git status && cd .. && rm -rf g
sqlite|python3 commits.py
remove|mkdir r && cp -r tree r/ && rm -r r
many|tar xf many.tar && rm -r many
du|du -s /usr/share
cargo|cd crate && cargo build -q --offline && rm -r target
gitmany|cd bigproject && git status
build|for i in 1 2 3 4 5 6 7 8 9 10 11 12; do gcc -c hello.c -o h$i.o; done; ar rc h.a h*.o && rm h*.o h.a
R
FURTHER="many du cargo gitmany"
if [ -n "${ROWS:-}" ]; then
    for row in $ROWS; do grep "^$row|" rows; done > chosen
else
    grep -Ev "^($(echo "$FURTHER" | tr ' ' '|'))\|" rows > chosen
fi
mv chosen rows

wants() { grep -q "^$1|" rows; }
# As many files as `npm ci` makes of a small web application, most of them small.
if wants many; then
    python3 -c '
import os
sizes = [100, 500, 1500, 3000, 8000]
for folder in range(400):
    path = f"many/package{folder // 20}/folder{folder}"
    os.makedirs(path)
    for file in range(50):
        with open(f"{path}/file{file}.js", "w") as made:
            made.write("x" * sizes[(folder * 7 + file) % 5])'
    tar cf many.tar many
    rm -r many
fi
if wants cargo; then
    cargo init -q --vcs none --lib --name small crate
    for i in $(seq 40); do
        echo "pub fn f$i(x: &str) -> Vec<String> { x.split(\"-$i\").map(str::to_owned).collect() }" > "crate/src/m$i.rs"
        echo "pub mod m$i;"
    done > crate/src/lib.rs
fi
if wants gitmany; then
    git init -q bigproject
    python3 -c '
import os
for folder in range(1000):
    os.makedirs(f"bigproject/f{folder}")
    for file in range(100):
        with open(f"bigproject/f{folder}/{file}", "w") as made:
            made.write(f"{folder} {file}")'
    (cd bigproject && git add . && git -c user.name=x -c user.email=x@x commit -qm files)
fi
cat > run.sh <<'S'
# Runs each row three times; prints its name and the times in tenths of a ms.
while IFS='|' read -r name command; do
    times=
    for run in 1 2 3; do
        start=$(date +%s%N)
        (eval "$command") > /dev/null 2> errors < /dev/null || { echo "$name failed: $(cat errors)" >&2; exit 1; }
        times="$times $((($(date +%s%N) - start) / 100000))"
    done
    echo "$name$times"
done < rows
S
# Commands have bars in them, so only the first one ends a name.
for round in $(seq "$rounds"); do
    ${RUN:-} sh run.sh | sed 's/^/native /' >> results
    # shellcheck disable=SC2086
    ${RUN:-} "$ring3" exec ${OPTIONS:-} -- sh run.sh | sed 's/^/guest /' >> results
done
awk '
    { low = $4 < $5 ? $4 : $5 }
    $1 == "native" { if (!($2 in native)) { order[++rows] = $2; native[$2] = low } if (low < native[$2]) native[$2] = low }
    $1 == "guest" { if (!($2 in warm) || low < warm[$2]) warm[$2] = low; if (!($2 in cold) || $3 < cold[$2]) cold[$2] = $3 }
    END {
        print "| row | native, ms | cold, ms | warm, ms | cold, times | warm, times |"
        print "|---|---|---|---|---|---|"
        for (i = 1; i <= rows; i++) {
            row = order[i]
            printf "| %s | %.1f | %.1f | %.1f | %.1f | %.1f |\n", row, native[row] / 10, cold[row] / 10, warm[row] / 10, cold[row] / native[row], warm[row] / native[row]
        }
    }' results
