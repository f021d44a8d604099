# program: Unicorn, QEMU's translator as a library
# does: translates code of three processors
# needs: python3 unicorn.py
# version: python3 -c 'import unicorn; print(unicorn.__version__)'
# memory: 3G
# seconds: 60
cat > a.py <<'C'
from unicorn import *
from unicorn.x86_const import *
from unicorn.arm64_const import *
u = Uc(UC_ARCH_X86, UC_MODE_64); u.mem_map(0x1000, 0x1000); u.mem_write(0x1000, bytes.fromhex("48ffc04801c34883f80a75f4"))
u.emu_start(0x1000, 0x100c); print(u.reg_read(UC_X86_REG_RAX), u.reg_read(UC_X86_REG_RBX))
a = Uc(UC_ARCH_ARM64, UC_MODE_ARM); a.mem_map(0x1000, 0x1000); a.mem_write(0x1000, bytes.fromhex("000080d2 00040091 1f2800f1 c1ffff54".replace(" ", "")))
a.emu_start(0x1000, 0x1010); print(a.reg_read(UC_ARM64_REG_X0))
try: u.mem_map(0x10000, 0x1000, UC_PROT_READ); u.mem_write(0x1000, bytes.fromhex("c70425000001000100 0000".replace(" ", ""))); u.emu_start(0x1000, 0x100b)
except UcError as e: print(e)
C
python3 a.py
