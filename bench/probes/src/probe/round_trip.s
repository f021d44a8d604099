# A miniature of the fast path: guest user code, a system call, a kernel entry and exit as the
# translator would emit them, and back. Guest kernel addresses are real ones; gs holds BIAS, fs the
# per-CPU area. Wedge data that must survive with the keys closed lies in key 0 ("departure").


# A push as the translator emits it: no flag changes, the guest's rsp stays a guest address.
.macro kpush what
    mov gs:[rsp - 8], \what
    lea rsp, [rsp - 8]
.endm

.macro kpush_imm what
    mov qword ptr gs:[rsp - 8], \what
    lea rsp, [rsp - 8]
.endm

.macro kpop what
    mov \what, gs:[rsp]
    lea rsp, [rsp + 8]
.endm

# A call pushes the guest's return address; its return is predicted by comparing with the caller's.
.macro kcall target, guest_return
    mov qword ptr gs:[rsp - 8], \guest_return
    lea rsp, [rsp - 8]
    jmp \target
.endm

.macro kret guest_return, to
    mov rcx, gs:[rsp]
    lea rsp, [rsp + 8]
    lea rcx, [rcx - (\guest_return)]
    jrcxz 8f
    ud2
8:  jmp \to
.endm

# entry_SYSCALL_64 of Linux 6.12 without PTI, translated by hand: swapgs, stack switch, pt_regs, a
# dispatch two calls deep, exit-work test, pops, sysret. In: rcx, r11 as SYSCALL leaves them.
.p2align 6
probe_kernel_syscall:
    mov byte ptr [rip + PROBE_SWAPPED], 1
    mov fs:[0x14], rsp
    mov rsp, fs:[0x1c]
    kpush_imm 0x2b
    lea rsp, [rsp - 8]
    mov [rip + PROBE_USER_RAX], r13
    mov r13, fs:[0x14]
    mov gs:[rsp], r13
    mov r13, [rip + PROBE_USER_RAX]
    kpush r11
    kpush_imm 0x33
    kpush rcx
    kpush rax
    kpush rdi
    kpush rsi
    kpush rdx
    kpush rcx
    kpush_imm -38
    kpush r8
    kpush r9
    kpush r10
    kpush r11
    kpush rbx
    kpush rbp
    kpush r12
    kpush r13
    kpush r14
    kpush r15
    xor esi, esi
    xor edx, edx
    xor ecx, ecx
    xor r8d, r8d
    xor r9d, r9d
    xor r10d, r10d
    xor r11d, r11d
    xor ebx, ebx
    xor ebp, ebp
    xor r12d, r12d
    xor r13d, r13d
    xor r14d, r14d
    xor r15d, r15d
    mov rdi, rsp
    movsxd rsi, eax
    kcall 3f, -0x7efff000
2:  # back in entry_SYSCALL_64: may it be SYSRET?
    mov rcx, gs:[rsp + 88]
    mov r11, gs:[rsp + 128]
    cmp rcx, r11
    jne 9f
    kpop r15
    kpop r14
    kpop r13
    kpop r12
    kpop rbp
    kpop rbx
    lea rsp, [rsp + 8]
    kpop r10
    kpop r9
    kpop r8
    kpop rax
    lea rsp, [rsp + 8]
    kpop rdx
    kpop rsi
    kpop rdi
    mov rcx, gs:[rsp + 8]
    mov r11, gs:[rsp + 24]
    mov rsp, gs:[rsp + 32]
    mov byte ptr [rip + PROBE_SWAPPED], 0
    jmp [rip + PROBE_WAY_OUT]
3:  # do_syscall_64
    kpush rbx
    mov rbx, rdi
    mov byte ptr [rip + PROBE_INTERRUPT_FLAG], 1
    mov rax, fs:[0]
    test dword ptr gs:[rax + 8], 0x3f
    jnz 9f
    cmp esi, 470
    jae 9f
    kcall 5f, -0x7effe000
4:  mov gs:[rbx + 80], rax
    mov byte ptr [rip + PROBE_INTERRUPT_FLAG], 0
    cmp byte ptr [rip + PROBE_PENDING], 0
    jne 9f
    mov rax, fs:[0]
    mov rdx, gs:[rax]
    test edx, 0x3f00e
    jnz 9f
    kpop rbx
    kret -0x7efff000, 2b
5:  # sys_getpid, near enough
    mov rax, fs:[0]
    mov eax, gs:[rax + 16]
    kret -0x7effe000, 4b
9:  ud2

# ---- ways in ------------------------------------------------------------------------------------

# From SIGSYS: the frame's registers become the guest kernel's, vectors stay in the frame.
.macro trap_in
    cmp dword ptr [rdx + UC_RAX], EXIT
    je probe_leave
    mov [rip + PROBE_FRAME], rdx
.endm

.macro bases_in
    rdfsbase rax
    mov [rip + PROBE_USER_FS], rax
    rdgsbase rax
    mov [rip + PROBE_USER_GS], rax
    mov rax, [rip + PROBE_KERNEL_FS]
    wrfsbase rax
    mov rax, [rip + PROBE_BIAS]
    wrgsbase rax
.endm

.macro frame_registers
    low_registers_back
    mov rcx, [rdx + UC_RIP]
    mov r11, [rdx + UC_FLAGS]
    mov rax, [rdx + UC_RAX]
    mov rsp, [rdx + UC_RSP]
    mov rdx, [rdx + UC_RDX]
.endm

handler h_round_keys
    keys_open
    trap_in
    bases_in
    frame_registers
    jmp probe_kernel_syscall

handler h_round_open
    trap_in
    bases_in
    frame_registers
    jmp probe_kernel_syscall

# From a patched site: rcx = return address, the user's stack and red zone untouched. What follows
# the WRPKRU is what any SYSCALL may do, so user code that jumps here gains nothing.
.macro patched_in keys
    mov [rip + PROBE_USER_RCX], rcx
    mov [rip + PROBE_USER_RSP], rsp
    lea rsp, [rip + PROBE_SCRATCH_TOP]
    pushfq
    pop r11
    mov [rip + PROBE_USER_RAX], rax
    mov [rip + PROBE_USER_RDX], rdx
    .if \keys
    xor eax, eax
    xor ecx, ecx
    xor edx, edx
    wrpkru
    .endif
    cld
    bases_in
    mov rcx, [rip + PROBE_USER_RCX]
    mov rax, [rip + PROBE_USER_RAX]
    mov rdx, [rip + PROBE_USER_RDX]
    mov rsp, [rip + PROBE_USER_RSP]
.endm

handler probe_patched_keys
    patched_in 1
    jmp probe_kernel_syscall

handler probe_patched_open
    patched_in 0
    jmp probe_kernel_syscall

# ---- ways out: registers as before SYSRET --------------------------------------------------------

.macro bases_out
    mov rax, [rip + PROBE_USER_FS]
    wrfsbase rax
    mov rax, [rip + PROBE_USER_GS]
    wrgsbase rax
.endm

# Closing check: a jump straight to the WRPKRU with another eax must not reach user code.
.macro keys_out
    xor ecx, ecx
    xor edx, edx
    mov eax, DENY
    wrpkru
    cmp eax, DENY
    jne 9f
.endm

# The vectors wait in the signal frame. The XRSTOR is a gadget too (its mask may name PKRU), so it
# precedes the closing of the keys.
.macro vectors_out
    mov rdx, [rip + PROBE_FRAME]
    mov rcx, [rdx + UC_FPSTATE]
    mov eax, [rcx + 512]
    and eax, 0xe5
    or eax, 2
    xor edx, edx
    xrstor64 [rcx]
.endm

.macro way_out name, vectors, keys
handler \name
    mov [rip + PROBE_USER_RAX], rax
    mov [rip + PROBE_USER_RDX], rdx
    mov [rip + PROBE_USER_RCX], rcx
    mov [rip + PROBE_USER_RSP], rsp
    lea rsp, [rip + PROBE_SCRATCH_TOP]
    push r11
    .if \vectors
    vectors_out
    .endif
    bases_out
    .if \keys
    keys_out
    .endif
    mov rax, [rip + PROBE_USER_RAX]
    mov rdx, [rip + PROBE_USER_RDX]
    mov rcx, [rip + PROBE_USER_RCX]
    popfq
    mov rsp, [rip + PROBE_USER_RSP]
    jmp rcx
9:  ud2
.endm

way_out probe_out_keys, 0, 1
way_out probe_out_open, 0, 0
way_out probe_out_vectors_keys, 1, 1
way_out probe_out_vectors_open, 1, 0

.macro word name
    .globl \name
    \name: .quad 0
.endm

.pushsection .data
.p2align 12
word PROBE_SWAPPED
word PROBE_INTERRUPT_FLAG
word PROBE_PENDING
word PROBE_FRAME
word PROBE_WAY_OUT
word PROBE_USER_FS
word PROBE_USER_GS
word PROBE_KERNEL_FS
word PROBE_BIAS
word PROBE_USER_RAX
word PROBE_USER_RCX
word PROBE_USER_RDX
word PROBE_USER_RSP
.zero 256
PROBE_SCRATCH_TOP:
.zero 8
.popsection
