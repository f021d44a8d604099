# From the PVH entry to 64-bit mode, and the one way back from whatever an attack has run into.
# What a symbol's address is more than its place in memory, the other way round.
.set LOW, 0x80000000

.section .note.Xen, "a", @note
.align 4
.long 4, 8, 18
.asciz "Xen"
.quad start32 + LOW

.section .text.start32, "ax"
.code32
.globl start32
start32:
    cli
    mov [start_info + LOW], ebx
    # Four GiB by large pages: where they are, until there are 64 bits, and where Linux has its direct map.
    mov edi, offset directories + LOW
    mov eax, 0x83
    mov ecx, 2048
1:  mov [edi], eax
    mov dword ptr [edi + 4], 0
    add eax, 0x200000
    add edi, 8
    loop 1b
    mov edi, offset pointers + LOW
    mov eax, offset directories + LOW + 3
    mov ecx, 4
2:  mov [edi], eax
    add eax, 4096
    add edi, 8
    loop 2b
    mov eax, offset pointers + LOW + 3
    mov [top + LOW], eax
    mov [top + LOW + 273 * 8], eax
    # The kernel's own 2 GiB at the end.
    mov eax, offset directories + LOW + 3
    mov [own_pointers + LOW + 510 * 8], eax
    mov eax, offset own_pointers + LOW + 3
    mov [top + LOW + 511 * 8], eax
    # The sandbox, whose tables are attacked, in both halves; and the user's pages.
    mov eax, offset sandbox_pointers + LOW + 7
    mov [top + LOW + 8], eax
    mov [top + LOW + 300 * 8], eax
    mov eax, offset sandbox_directory + LOW + 7
    mov [sandbox_pointers + LOW], eax
    mov eax, offset sandbox_table + LOW + 7
    mov [sandbox_directory + LOW], eax
    mov eax, offset user_pointers + LOW + 7
    mov [top + LOW + 16], eax
    mov eax, offset user_directory + LOW + 7
    mov [user_pointers + LOW], eax
    mov eax, offset user_table + LOW + 7
    mov [user_directory + LOW], eax
    mov eax, offset user_page + LOW + 7
    mov [user_table + LOW], eax
    add eax, 4096
    mov [user_table + LOW + 8], eax
    mov eax, offset top + LOW
    mov cr3, eax
    mov eax, 0x6a0          # PAE, PGE, OSFXSR, OSXMMEXCPT
    mov cr4, eax
    mov ecx, 0xc0000080
    mov eax, 0x901          # NXE, LME, SCE
    xor edx, edx
    wrmsr
    mov eax, 0x80010033     # PG, WP, NE, ET, MP, PE
    mov cr0, eax
    lgdt [low_gdt_pointer + LOW]
    ljmp 8, offset low64 + LOW

.code64
low64:
    mov rax, offset start64
    jmp rax

start64:
    lgdt [gdt_pointer]
    mov eax, 0x10
    mov ds, eax
    mov es, eax
    mov ss, eax
    lea rsp, stack_top
    # From here on nothing is where it is in memory.
    mov qword ptr [top], 0
    mov eax, offset top + LOW
    mov cr3, rax
    # The task-state segment's descriptor.
    lea rax, tss
    lea rdi, gdt_task
    mov word ptr [rdi], 103
    mov [rdi + 2], ax
    shr rax, 16
    mov [rdi + 4], al
    mov byte ptr [rdi + 5], 0x89
    mov [rdi + 7], ah
    shr rax, 16
    mov [rdi + 8], eax
    lea rax, trap_stack_top
    mov [tss + 4], rax      # RSP0
    mov [tss + 36], rax     # IST1
    mov word ptr [tss + 102], 104
    # All 256 gates lead to the way back, the single step's to its own.
    lea rdi, idt
    lea rax, recover
    mov ecx, 256
3:  mov [rdi], ax
    mov word ptr [rdi + 2], 8
    mov word ptr [rdi + 4], 0x8e01
    mov rdx, rax
    shr rdx, 16
    mov [rdi + 6], dx
    shr rdx, 16
    mov [rdi + 8], rdx
    add rdi, 16
    loop 3b
    lea rdi, idt
    lea rax, step
    mov [rdi + 16], ax
    shr rax, 16
    mov [rdi + 22], ax
    lidt [idt_pointer]
    mov ax, 0x28
    ltr ax
    mov edi, start_info
    call main
4:  cli
    hlt
    jmp 4b

# guard(attack, state): calls it; false if it ended in an exception or interrupt.
.globl guard
guard:
    push rbx
    push rbp
    push r12
    push r13
    push r14
    push r15
    mov guard_stack, rsp
    mov rax, rdi
    mov rdi, rsi
    call rax
    mov r12d, 1
guarded:
    # Everything is as the kernel wants it again.
    mov eax, 0x10
    mov ds, eax
    mov es, eax
    mov ss, eax
    mov eax, 0x80010033
    mov cr0, rax
    mov eax, 0x6a0
    mov cr4, rax
    mov eax, offset top + LOW
    mov cr3, rax
    xor eax, eax
    mov dr7, rax
    lidt [idt_pointer]
    mov eax, r12d
    pop r15
    pop r14
    pop r13
    pop r12
    pop rbp
    pop rbx
    ret

# A single step of user code: some are allowed.
step:
    test byte ptr [rsp + 8], 3
    jz recover
    dec qword ptr steps
    js recover
    iretq

# Any other exception or interrupt: the attack is over.
recover:
    cld
    # As much as an interrupt needs.
    mov rcx, 0xffff8880fee000b0
    mov dword ptr [rcx], 0
    mov rsp, guard_stack
    xor r12d, r12d
    jmp guarded

# enter_user(registers, flags): user code at the beginning of its page.
.globl enter_user
enter_user:
    mov rax, 0x10000000000
    push 0x1b
    lea rcx, [rax + 0x1f00]
    push rcx
    push rsi                # RFLAGS
    push 0x23
    push rax
    mov rax, [rdi]
    mov rbx, [rdi + 8]
    mov rcx, [rdi + 16]
    mov rdx, [rdi + 24]
    mov rsi, [rdi + 32]
    mov rbp, [rdi + 40]
    mov r8, [rdi + 48]
    mov r9, [rdi + 56]
    mov rdi, [rdi + 64]
    iretq

.section .data.tables, "aw"
.align 8
gdt: .quad 0, 0x00af9a000000ffff, 0x00cf92000000ffff, 0x00cff2000000ffff, 0x00affa000000ffff
gdt_task: .quad 0, 0
gdt_pointer: .word 55
    .quad gdt
low_gdt_pointer: .word 55
    .quad gdt + LOW
.align 8
idt_pointer: .word 4095
    .quad idt
.globl steps
.align 8
steps: .quad 0
guard_stack: .quad 0
start_info: .quad 0

.section .bss.tables, "aw", @nobits
.align 4096
.globl top, sandbox_table, sandbox_directory, sandbox_pointers, user_page
top: .skip 4096
pointers: .skip 4096
own_pointers: .skip 4096
directories: .skip 16384
sandbox_pointers: .skip 4096
sandbox_directory: .skip 4096
sandbox_table: .skip 4096
user_pointers: .skip 4096
user_directory: .skip 4096
user_table: .skip 4096
user_page: .skip 8192
idt: .skip 4096
tss: .skip 4096
    .skip 65536
stack_top:
    .skip 16384
trap_stack_top:
