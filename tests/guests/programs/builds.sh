# What developers do all day, in a shared folder: a repository, a C program, a Rust crate and a package of npm's.
set -eu

git init -q project
cd project
git config user.name somebody
git config user.email somebody@example.org
for n in $(seq 200); do mkdir -p "d$((n % 10))"; echo "file $n" > "d$((n % 10))/$n"; done
git add .
git commit -qm first
echo changed >> d1/1
rm d2/2
echo new > new
test "$(git status --short | tr '\n' ' ')" = ' M d1/1  D d2/2 ?? new '
git stash -q -u
git checkout -q -b other
git stash pop -q
git add -A
git commit -qm second
test "$(git diff --stat HEAD~1 | tail -1)" = ' 3 files changed, 2 insertions(+), 1 deletion(-)'
git fsck --strict
cd ..

mkdir c
for n in $(seq 20); do echo "int f$n(int x) { return x + $n; }" > "c/f$n.c"; done
{ seq 20 | sed 's/.*/int f&(int);/'; echo 'int main(void) { return f1(f2(f20(19))); }'; } > c/main.c
printf 'program: $(patsubst %%.c,%%.o,$(wildcard *.c))\n\tcc -o $@ $^\n' > c/Makefile
make -s -C c
status=0
c/program || status=$?
test "$status" = 42

mkdir -p crate/src
printf '[package]\nname = "hello"\nversion = "0.1.0"\nedition = "2021"\n[workspace]\n' > crate/Cargo.toml
for n in $(seq 20); do echo "pub fn f(x: u64) -> u64 { x * $n }" > "crate/src/m$n.rs"; done
{ seq 20 | sed 's/.*/mod m&;/'; echo 'fn main() { println!("{}", m6::f(m7::f(1))); }'; } > crate/src/main.rs
cd crate
"$CARGO" build -q --offline 2> /dev/null
test "$(target/debug/hello)" = 42
echo 'pub fn f(x: u64) -> u64 { x * 5 }' > src/m6.rs
"$CARGO" build -q --offline 2> /dev/null
test "$(target/debug/hello)" = 35
cd ..

if command -v npm > /dev/null; then
    mkdir -p npm/dependency npm/app
    echo '{"name": "dependency", "version": "1.0.0", "main": "index.js"}' > npm/dependency/package.json
    echo 'module.exports = n => n * 7' > npm/dependency/index.js
    echo '{"name": "app", "version": "1.0.0", "scripts": {"start": "node start.js"}}' > npm/app/package.json
    echo 'console.log(require("dependency")(6))' > npm/app/start.js
    cd npm/app
    npm install --offline --silent ../dependency > /dev/null
    test "$(npm run -s start)" = 42
    cd ../..
else
    echo without npm >&2
fi
echo all built
