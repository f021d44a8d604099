# program: rr
# does: says that there are no performance counters, in its words
# needs: rr
# version: rr --version
# seconds: 60
rr record -o trace true > log 2>&1
echo "status $?"
grep -v '^\[ERROR' log | grep -i -o -E 'counters|unsupported|Unknown CPU|not supported|microarch' | sort -u | head -n 1 | tr a-z A-Z | sed 's/.*/refused/'
