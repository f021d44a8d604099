# program: LuaJIT
# does: compiles loops, tables and strings, and gives the same as its interpreter
# needs: luajit
# version: luajit -v
# seconds: 60
cat > a.lua <<'C'
local function fib(n) return n < 2 and n or fib(n - 1) + fib(n - 2) end
local t, s = {}, 0
for i = 1, 2000000 do s = (s * 31 + i) % 4294967291 end
for i = 1, 20000 do t[#t + 1] = tostring(i * 7 % 1000) end
table.sort(t)
print(fib(27), s, #table.concat(t), t[1], t[#t], math.sin(1e5))
local ffi = require "ffi"
ffi.cdef "int abs(int); double sqrt(double);"
local x = 0
for i = 1, 1000000 do x = x + ffi.C.abs(-i) end
print(x, ffi.C.sqrt(2), jit.status())
C
luajit a.lua | sed 's/true.*/true/'
luajit -joff a.lua | sed 's/false.*/false/'
