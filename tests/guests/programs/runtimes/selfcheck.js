// What a just-in-time compiler relies on: code that is written, run, thrown away and written again;
// memory that faults by design; threads. Prints a digest for each, which any machine must print.
'use strict';
const crypto = require('crypto');
const { Worker, isMainThread, workerData } = require('worker_threads');
const vm = require('vm');

if (!isMainThread) {
  const cells = new Int32Array(workerData);
  for (let n = 0; n < 200000; n++) Atomics.add(cells, n % 8, n);
  return;
}

function digest(value) {
  return crypto.createHash('sha256').update(JSON.stringify(value)).digest('hex').slice(0, 16);
}

function xorshift(seed) {
  let s = seed >>> 0;
  return () => { s ^= s << 13; s >>>= 0; s ^= s >>> 17; s ^= s << 5; s >>>= 0; return s; };
}

function integers() {
  const next = xorshift(1);
  let a = 0, b = 1n;
  for (let n = 0; n < 3000000; n++) a = (Math.imul(a, 31) + next()) | 0;
  for (let n = 0; n < 4000; n++) b = (b * 6364136223846793005n + BigInt(next())) % (1n << 521n);
  return [a, b.toString(36)];
}

function floats() {
  const next = xorshift(2);
  let sum = 0, other = 0;
  for (let n = 0; n < 1000000; n++) {
    const x = next() / 4294967296;
    sum += Math.sqrt(x) * x - x / (1 + x);
    other = Math.fround(other + Math.fround(x) * Math.fround(sum));
  }
  return [sum, other, Math.floor(sum), 0.1 + 0.2, 1e308 * 10, -0 === 0];
}

// The same function with other types: compiled, thrown away, compiled again.
function deoptimised() {
  const add = (x, y) => x + y;
  const seen = [];
  for (const kind of [n => n, n => n + 0.5, n => String(n), n => BigInt(n), n => [n]]) {
    let last;
    for (let n = 0; n < 60000; n++) last = add(kind(n), kind(n + 1));
    seen.push(String(last));
  }
  return seen;
}

function generated() {
  const seen = [];
  for (let n = 0; n < 400; n++) {
    const body = `let s = ${n}; for (let i = 0; i < 3000; i++) s = (s * ${n + 3} + i) % 1000003; return s;`;
    seen.push(new Function(body)());
    seen.push(vm.runInNewContext(`[1, 2, 3].map(x => x * ${n}).join('-')`));
  }
  return seen;
}

function expressions() {
  const text = Array.from({ length: 20000 }, (_, n) => `key${n % 97}=value${n % 89};`).join('');
  const found = [...text.matchAll(/key(\d+)=(value(?:1|2)\d)(?=;)/g)].map(m => m[1] + m[2]);
  return [found.length, digest(found), text.replace(/(\d)(\d)/g, '$2$1').length];
}

function objects() {
  const next = xorshift(3);
  const map = new Map(), array = [];
  for (let n = 0; n < 100000; n++) map.set(`k${next() % 5000}`, { n, list: [n, n + 1] });
  for (let n = 0; n < 100000; n++) array.push(next());
  array.sort((x, y) => x - y);
  const again = JSON.parse(JSON.stringify([...map]));
  return [again.length, digest(again), digest(array)];
}

function recursion() {
  let deepest = 0;
  const down = n => { deepest = n; return down(n + 1) + 1; };
  let caught = 0;
  for (let n = 0; n < 20; n++) {
    try { down(0); } catch (error) { caught += error instanceof RangeError; }
  }
  return [caught, deepest > 1000];
}

// (module (memory 1) (func (export "f") (param i32) (result i32) local.get 0 i32.load))
const MODULE = Uint8Array.from([
  0, 0x61, 0x73, 0x6d, 1, 0, 0, 0, 1, 6, 1, 0x60, 1, 0x7f, 1, 0x7f, 3, 2, 1, 0, 5, 3, 1, 0, 1,
  7, 5, 1, 1, 0x66, 0, 0, 10, 9, 1, 7, 0, 0x20, 0, 0x28, 2, 0, 0x0b]);

// Bounds are checked by guard pages: each access outside is a page fault that V8 handles.
function assembly() {
  const { f } = new WebAssembly.Instance(new WebAssembly.Module(MODULE)).exports;
  let inside = 0, outside = 0;
  for (let n = 0; n < 20000; n++) inside += f((n * 4) % 65532) + 1;
  for (let n = 0; n < 2000; n++) {
    try { f(65536 + n * 4096); } catch (error) { outside += error instanceof WebAssembly.RuntimeError; }
  }
  return [inside, outside];
}

async function threads() {
  const shared = new SharedArrayBuffer(32);
  const workers = Array.from({ length: 4 }, () => new Worker(__filename, { workerData: shared }));
  await Promise.all(workers.map(worker => new Promise((done, failed) => {
    worker.on('exit', done);
    worker.on('error', failed);
  })));
  return [...new Int32Array(shared)];
}

(async () => {
  const checks = { integers, floats, deoptimised, generated, expressions, objects, recursion, assembly, threads };
  for (const [name, check] of Object.entries(checks)) {
    console.log(name, digest(await check()));
  }
})();
