# program: Frida, an instrumenter
# does: enters a running program, counts the calls of a function, changes one
# needs: python3 frida.py cc
# version: python3 -c 'import frida; print(frida.__version__)'
# memory: 1G
# seconds: 120
cat > a.c <<'C'
#include <stdio.h>
#include <unistd.h>
__attribute__((noinline)) int f(int n) { __asm__ volatile(""); return n + 1; }
int main(void) { for (int i = 0; i < 1500; i++) { if (f(i) == 777) { puts("changed"); return 0; } usleep(20000); } puts("unchanged"); return 1; }
C
cc -O1 -rdynamic -no-pie a.c -o a
cat > a.py <<'C'
import frida, subprocess, time
p = subprocess.Popen(["./a"], stdout=subprocess.PIPE, text=True)
time.sleep(0.3)
s = frida.attach(p.pid)
script = s.create_script("""
const at = Process.mainModule.findExportByName('f') || Process.mainModule.findSymbolByName('f'); let n = 0;
Interceptor.attach(at, { onEnter() { n++; }, onLeave(r) { if (n > 3) r.replace(777); } });""")
script.load()
print(p.stdout.read().strip(), p.wait(60))
C
python3 a.py
