# program: Wasmtime
# does: compiles and runs WebAssembly, whose memories are guarded by gigabytes of addresses
# needs: python3 wasmtime.py
# version: python3 -c 'from importlib.metadata import version; print(version("wasmtime"))'
# memory: 1G
# seconds: 120
cat > a.py <<'C'
from wasmtime import Store, Module, Instance, Engine, Trap
store = Store()
module = Module(store.engine, '''(module (memory (export "m") 1) (func (export "fib") (param i64) (result i64)
 (if (result i64) (i64.lt_u (local.get 0) (i64.const 2)) (then (local.get 0))
 (else (i64.add (call 0 (i64.sub (local.get 0) (i64.const 1))) (call 0 (i64.sub (local.get 0) (i64.const 2)))))))
 (func (export "peek") (param i32) (result i32) (i32.load (local.get 0)))
 (func (export "div") (param i32) (result i32) (i32.div_s (i32.const 1) (local.get 0))))''')
instances = [Instance(store, module, []) for _ in range(20)]
e = instances[7].exports(store)
print(e["fib"](store, 27), e["peek"](store, 100))
for name, argument in [("peek", 65536), ("peek", -4), ("div", 0)]:
    try: e[name](store, argument)
    except Trap as trap: print(trap.message.split("wasm trap: ")[-1].splitlines()[0])
C
python3 a.py
