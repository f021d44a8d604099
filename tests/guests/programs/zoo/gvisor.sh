# program: gVisor, without privileges
# does: runs programs over its own kernel, by systrap and by ptrace: forks, breakpoints, files
# needs: runsc python3
# version: runsc --version | head -n 1 | sed 's/.*VERSION.*/built by go install/'
# memory: 1G
# seconds: 300
cat > a.py <<'C'
import ctypes, mmap, os, signal
trapped = []
signal.signal(signal.SIGTRAP, lambda number, frame: trapped.append(number))
for code in b"\xcc\xc3", b"\xcd\x03\xc3":
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(code)
    ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
print("trapped", len(trapped))
children = [os.fork() or os._exit(n) for n in range(20)]
print("children", sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
open("/tmp/file", "w").write("kept\n" * 1000)
print("file", len(open("/tmp/file").read()))
C
# CGO_ENABLED=0 go install gvisor.dev/gvisor/runsc@VERSION makes it, of the Go proxy. It writes to its
# output at places of its own, which a pipe does not have.
for how in --platform=systrap --platform=ptrace; do
    { runsc --rootless --network=none $how do sh -c "cat /proc/version; python3 $PWD/a.py; exit 7" 2> log
      echo "status $?"; } | cat
done
