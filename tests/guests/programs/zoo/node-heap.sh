# program: Node.js with a large heap
# does: keeps half a gigabyte of objects, compiles WebAssembly, has worker threads
# needs: node
# version: node --version
# memory: 3G
# seconds: 200
cat > a.js <<'C'
const { Worker, isMainThread, parentPort } = require('worker_threads');
if (!isMainThread) { let s = 0; for (let i = 0; i < 1e6; i++) s = (s * 31 + i) % 4294967291; parentPort.postMessage(s); }
else {
  const kept = [];
  for (let i = 0; i < 3e6; i++) kept.push({ i, text: 'n' + i });
  let sum = 0; for (const k of kept) sum += k.i + k.text.length;
  console.log(sum, process.memoryUsage().heapUsed > 2e8);
  const bytes = new Uint8Array([0,97,115,109,1,0,0,0,1,7,1,96,2,127,127,1,127,3,2,1,0,7,7,1,3,109,117,108,0,0,10,9,1,7,0,32,0,32,1,108,11]);
  WebAssembly.instantiate(bytes).then(m => { let x = 1; for (let i = 1; i < 1e6; i++) x = m.instance.exports.mul(x, i | 1); console.log(x); });
  for (let i = 0; i < 2; i++) new Worker(__filename).on('message', m => console.log('worker', m));
}
C
node --max-old-space-size=2048 a.js | sort
