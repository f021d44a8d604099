# program: Firefox's JavaScript engine
# does: both compilers, WebAssembly in guarded gigabytes, threads that share memory, its collector
# needs: js102
# version: js102 --version
# memory: 2G
# seconds: 120
cat > a.js <<'C'
function fib(n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
print("fib", fib(27));
let sum = 0;
for (let i = 0; i < 3e6; i++) sum = (sum * 31 + i) % 4294967291;
print("loop", sum);
const kept = [];
for (let i = 0; i < 5e5; i++) kept.push({ i, text: "n" + i });
gc();
print("kept", kept.reduce((all, one) => all + one.i + one.text.length, 0));
print("text", "a1b22c333".replace(/(\d+)/g, all => `<${all.length}>`), [..."héllo"].reverse().join(""));
const bytes = new Uint8Array([0,97,115,109,1,0,0,0,1,7,1,96,2,127,127,1,127,3,2,1,0,7,7,1,3,109,117,108,0,0,10,9,1,7,0,32,0,32,1,108,11]);
const mul = new WebAssembly.Instance(new WebAssembly.Module(bytes)).exports.mul;
let x = 1;
for (let i = 1; i < 1e6; i++) x = mul(x, i | 1);
print("wasm", x);
const memory = new WebAssembly.Memory({ initial: 1, maximum: 16 });
new Uint32Array(memory.buffer)[5] = 7;
memory.grow(3);
print("grown", memory.buffer.byteLength, new Uint32Array(memory.buffer)[5]);
try { (function deep() { deep(); })(); } catch (e) { print(e.name); }
function* steps() { for (let i = 0; i < 4; i++) yield i * i; }
print("steps", [...steps()].join(), 2n ** 200n);
C
js102 a.js
echo "$?"
echo 'without compilers:'
js102 --no-ion --no-baseline a.js | sha256sum
