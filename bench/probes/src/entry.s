# Entering probe guests and the ways back, as small assembly because the point is what each step costs.
# Signal frame: rdx = ucontext at handler entry; offsets below are those of the x86-64 ABI.

.set UC_R8, 40
.set UC_R9, 48
.set UC_R10, 56
.set UC_R12, 72
.set UC_R13, 80
.set UC_R14, 88
.set UC_R15, 96
.set UC_RDI, 104
.set UC_RSI, 112
.set UC_RBP, 120
.set UC_RBX, 128
.set UC_RDX, 136
.set UC_RAX, 144
.set UC_RCX, 152
.set UC_RSP, 160
.set UC_RIP, 168
.set UC_FLAGS, 176
.set UC_FPSTATE, 224
.set EXIT, 0xdead
.set DENY, 0x55555554

# Leave the guest for the Rust code that called probe_enter if the guest's eax asks for it.
.macro exit_if_asked
    cmp dword ptr [rdx + UC_RAX], EXIT
    je probe_leave
.endm

# Open every protection key; rdx survives in r8. The kernel starts handlers with only key 0 open.
.macro keys_open
    mov r8, rdx
    xor eax, eax
    xor ecx, ecx
    xor edx, edx
    wrpkru
    mov rdx, r8
.endm

.macro keys_deny
    mov r8, rdx
    mov eax, DENY
    xor ecx, ecx
    xor edx, edx
    wrpkru
    mov rdx, r8
.endm

# Give the vector registers back: \mask of x87 1, SSE 2, AVX 4, AVX-512 0xe0, PKRU 0x200.
.macro vectors_back mask
    mov r9, rdx
    mov rdi, [rdx + UC_FPSTATE]
    mov eax, \mask
    xor edx, edx
    xrstor64 [rdi]
    mov rdx, r9
.endm

# The same, only what was in use: the live registers are in their initial state already.
.macro vectors_back_used
    mov r9, rdx
    mov rdi, [rdx + UC_FPSTATE]
    mov eax, [rdi + 512]
    and eax, 0xe5
    or eax, 2
    xor edx, edx
    xrstor64 [rdi]
    mov rdx, r9
.endm

.macro low_registers_back
    mov r8, [rdx + UC_R8]
    mov r9, [rdx + UC_R9]
    mov r10, [rdx + UC_R10]
    mov r12, [rdx + UC_R12]
    mov r13, [rdx + UC_R13]
    mov r14, [rdx + UC_R14]
    mov r15, [rdx + UC_R15]
    mov rdi, [rdx + UC_RDI]
    mov rsi, [rdx + UC_RSI]
    mov rbp, [rdx + UC_RBP]
    mov rbx, [rdx + UC_RBX]
.endm

# What SYSRET leaves: rcx = rip, r11 = rflags. No memory is needed for the jump.
.macro resume_like_sysret
    low_registers_back
    mov rcx, [rdx + UC_RIP]
    mov r11, [rdx + UC_FLAGS]
    push r11
    popfq
    mov rsp, [rdx + UC_RSP]
    mov rdx, [rdx + UC_RDX]
    mov eax, 7
    jmp rcx
.endm

# Everything at once, rcx and r11 included: IRETQ is allowed from ring 3 to ring 3.
.macro resume_like_iret
    low_registers_back
    push 0x2b
    push [rdx + UC_RSP]
    push [rdx + UC_FLAGS]
    push 0x33
    push [rdx + UC_RIP]
    mov r11, [rdx + 64]
    mov rcx, [rdx + UC_RCX]
    mov rdx, [rdx + UC_RDX]
    mov eax, 7
    iretq
.endm

# The same without IRETQ: the target passes through memory the guest may see. Not for TF or 32-bit code.
.macro resume_like_iret_by_jump
    mov rax, [rdx + UC_RIP]
    mov [rip + PROBE_TARGET], rax
    low_registers_back
    push [rdx + UC_FLAGS]
    mov r11, [rdx + 64]
    mov rcx, [rdx + UC_RCX]
    mov eax, 7
    popfq
    mov rsp, [rdx + UC_RSP]
    mov rdx, [rdx + UC_RDX]
    jmp [rip + PROBE_TARGET]
.endm

.macro handler name
    .globl \name
    .p2align 6
    \name:
.endm

.text
handler h_sigreturn
    exit_if_asked
    mov qword ptr [rdx + UC_RAX], 7
    ret

handler h_sysret
    exit_if_asked
    resume_like_sysret

handler h_iret
    exit_if_asked
    resume_like_iret

# To 32-bit code, behind where it was or, for SYSENTER, to the address in ESI.
handler h_iret32
    exit_if_asked
    low_registers_back
    push 0x2b
    push [rdx + UC_RSP]
    push [rdx + UC_FLAGS]
    push 0x23
    push [rdx + UC_RIP]
    mov rcx, [rdx + UC_RCX]
    mov rdx, [rdx + UC_RDX]
    mov eax, 20
    iretq

handler h_iret32_to_esi
    exit_if_asked
    low_registers_back
    mov rbp, [rdx + UC_RSP]
    push 0x2b
    push rbp
    push [rdx + UC_FLAGS]
    push 0x23
    push rsi
    mov rcx, [rdx + UC_RCX]
    mov rdx, [rdx + UC_RDX]
    mov eax, 20
    iretq

handler h_xrstor_sysret
    exit_if_asked
    vectors_back 0xe7
    resume_like_sysret

handler h_xrstor_legacy_sysret
    exit_if_asked
    vectors_back 0x3
    resume_like_sysret

handler h_xrstor_used_sysret
    exit_if_asked
    vectors_back_used
    resume_like_sysret

handler h_xrstor_used_iret
    exit_if_asked
    vectors_back_used
    resume_like_iret

handler h_xrstor_used_jump
    exit_if_asked
    vectors_back_used
    resume_like_iret_by_jump

handler h_keys_xrstor_sysret
    keys_open
    exit_if_asked
    vectors_back_used
    keys_deny
    resume_like_sysret

# XRSTOR with PKRU in its mask closes the keys together with the vectors (frame PKRU = the user's).
handler h_keys_xrstor_pkru_sysret
    keys_open
    exit_if_asked
    vectors_back 0x2e7
    resume_like_sysret

handler h_skip2_sigreturn
    exit_if_asked
    add qword ptr [rdx + UC_RIP], 2
    ret

handler h_skip2_xrstor_used_jump
    exit_if_asked
    add qword ptr [rdx + UC_RIP], 2
    vectors_back_used
    resume_like_iret_by_jump

# Records nothing, resumes nothing: whatever arrived, go home. Rust reads the frame afterwards.
handler h_leave
handler probe_leave
    cmp byte ptr [rip + PROBE_HAS_KEYS], 0
    je 1f
    mov r8, rdx
    xor ecx, ecx
    rdpkru
    mov [rip + PROBE_LAST_KEYS], rax
    xor eax, eax
    xor edx, edx
    wrpkru
    mov rdx, r8
1:
    pushfq
    pop rax
    mov [rip + PROBE_LAST_FLAGS], rax
    mov [rip + PROBE_LAST_CONTEXT], rdx
    mov [rip + PROBE_LAST_SIGNAL], rdi
    mov [rip + PROBE_LAST_INFO], rsi
.globl probe_home
probe_home:
    mov rax, [rip + PROBE_HOST_FS]
    wrfsbase rax
    mov rsp, [rip + PROBE_HOST_RSP]
    popfq
    pop r15
    pop r14
    pop r13
    pop r12
    pop rbp
    pop rbx
    ret

# fn probe_enter(regs: *const Regs): loads the guest's registers and jumps; returns via probe_home.
.globl probe_enter
.p2align 6
probe_enter:
    push rbx
    push rbp
    push r12
    push r13
    push r14
    push r15
    pushfq
    mov [rip + PROBE_HOST_RSP], rsp
    rdfsbase rax
    mov [rip + PROBE_HOST_FS], rax
    mov rax, [rdi + 16*8]
    mov [rip + PROBE_TARGET], rax
    mov rsp, [rdi + 14*8]
    push [rdi + 17*8]
    popfq
    mov rax, [rdi + 0*8]
    mov rbx, [rdi + 1*8]
    mov rcx, [rdi + 2*8]
    mov rdx, [rdi + 3*8]
    mov rsi, [rdi + 4*8]
    mov rbp, [rdi + 6*8]
    mov r8, [rdi + 7*8]
    mov r9, [rdi + 8*8]
    mov r10, [rdi + 9*8]
    mov r11, [rdi + 10*8]
    mov r12, [rdi + 11*8]
    mov r13, [rdi + 12*8]
    mov r14, [rdi + 13*8]
    mov r15, [rdi + 15*8]
    mov rdi, [rdi + 5*8]
    jmp [rip + PROBE_TARGET]
