# program: ring3 in ring3
# does: runs a command under another kernel again
# version: "${RING3:-ring3}" --version
# memory: 3G
# seconds: 300
"${RING3:-ring3}" exec --memory 512M -- sh -c 'echo inside; exit 3' 2> log
echo "status $?"
grep -o 'is interpreted' log
