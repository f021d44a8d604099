# File system suites of others' making, in the current folder, each for about SECONDS_EACH.
# fsx and pjdfstest are cargo's (`cargo install fsx pjdfstest`), stress-ng Debian's; SUITES is where they are.
PATH=$SUITES:$PATH
failed=
suite() {
    name=$1
    shift
    if ! command -v "$name" > /dev/null; then
        echo "$name: not installed"
        failed=1
    elif "$@" > "$name.log" 2>&1; then
        echo "$name: passed"
    else
        echo "$name: failed with $?"
        tail -n 40 "$name.log"
        failed=1
    fi
}
run_fsx() {
    end=$(($(date +%s) + SECONDS_EACH))
    seed=1
    while [ "$(date +%s)" -lt "$end" ]; do
        fsx -N 2000 -S $seed fsx.data || return 1
        seed=$((seed + 1))
    done
}
printf '[features]\nposix_fallocate = {}\n[settings]\nnaptime = 0.03\n[dummy_auth]\n' > pjdfstest.toml
printf 'entries = [["nobody", "nogroup"], ["daemon", "daemon"]]\n' >> pjdfstest.toml
suite fsx run_fsx
suite pjdfstest pjdfstest -c pjdfstest.toml -p .
suite stress-ng stress-ng --class filesystem --sequential 1 --timeout "$((SECONDS_EACH / 60 + 1))s" \
    --verify --temp-path .
[ -z "$failed" ] && echo "all suites passed"
