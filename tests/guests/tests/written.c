/* Executes CPUID and calls that it makes often, in pages of its own, and has the kernel read these pages in every way there
   is: what arrives is what the program's file has. */
#define _GNU_SOURCE
#include <elf.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE 4096
#define LEN (3 * PAGE)

/* Three pages: CPUID and two calls in the first, CPUID at the end of the second, a call at the start of the third. */
__asm__(".section .text.pages, \"ax\", @progbits\n.balign 4096\npages:\n"
        "ask: push %rbx; mov %edi, %eax; xor %ecx, %ecx; cpuid; mov %ebx, %eax; pop %rbx; ret\n"
        ".balign 64\ncall: mov $39, %eax; syscall; ret\n"
        ".balign 64\ncompare: mov %edi, %eax; syscall; cmp $-4095, %rax; jae 1f; ret; 1: xor %eax, %eax; ret\n"
        ".balign 4096\n.skip 4080, 0x90\n"
        "last: xor %eax, %eax; push %rbx; xor %ecx, %ecx; cpuid; jmp rest; .balign 4096, 0x90\n"
        "rest: pop %rbx; ret\n"
        "next: mov $39, %eax; syscall; ret\n.balign 4096, 0xcc\n.previous");
extern uint8_t pages[];
extern long ask(long), call(void), compare(long), last(void), next(void);

static uint8_t file[LEN], seen[LEN];
static int failed, ways;

static void read_file(void) {
    const Elf64_Phdr *part = (void *)getauxval(AT_PHDR);
    int exe = open("/proc/self/exe", O_RDONLY);
    uint64_t base = (uint64_t)part - part->p_vaddr; /* the first is that of this table */
    for (unsigned long n = 0; n < getauxval(AT_PHNUM); n++, part++) {
        uint64_t into = (uint64_t)pages - base - part->p_vaddr;
        if (part->p_type == PT_LOAD && into < part->p_filesz && pread(exe, file, LEN, part->p_offset + into) != LEN)
            _exit(9);
    }
    close(exe);
}

static void check(const char *how, size_t at, size_t len, ssize_t got) {
    ways++;
    if (got == (ssize_t)len && !memcmp(seen, file + at, len)) return;
    for (size_t n = 0; n < len && failed < 10; n++)
        if (seen[n] != file[at + n]) {
            printf("%s of %zu bytes at %#zx: byte %zu is %02x, not %02x\n", how, len, at, n, seen[n], file[at + n]);
            break;
        }
    if (got != (ssize_t)len) printf("%s of %zu bytes at %#zx: %zd\n", how, len, at, got);
    failed++;
}

/* So much of it, in every way. */
static void range(size_t at, size_t len) {
    int pipes[2], ends[2], memory = memfd_create("copy", 0);
    struct iovec parts[2] = {{pages + at, len / 2}, {pages + at + len / 2, len - len / 2}}, all = {seen, len};
    if (pipe(pipes) || socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) _exit(8);
#define WAY(how, arrives) (memset(seen, 0, LEN), (how), check(#how, at, len, arrives))
    WAY(write(pipes[1], pages + at, len), read(pipes[0], seen, len));
    WAY(writev(pipes[1], parts, 2), read(pipes[0], seen, len));
    WAY(vmsplice(pipes[1], parts, 2, 0), read(pipes[0], seen, len));
    WAY(write(memory, pages + at, len), pread(memory, seen, len, 0));
    WAY(pwrite(memory, pages + at, len, 77), pread(memory, seen, len, 77));
    WAY(pwritev(memory, parts, 2, 5000), pread(memory, seen, len, 5000));
    WAY(sendto(ends[0], pages + at, len, 0, 0, 0), recv(ends[1], seen, len, MSG_WAITALL));
    WAY(sendmsg(ends[0], &(struct msghdr){.msg_iov = parts, .msg_iovlen = 2}, 0), recv(ends[1], seen, len, MSG_WAITALL));
    WAY(0, process_vm_readv(getpid(), &all, 1, parts, 2, 0));
    for (int n = 0; n < 2; n++) close(pipes[n]), close(ends[n]);
    close(memory);
}

/* What the kernel reads word by word: the name that a thread gives itself ends at its first zero. */
static void name(size_t at) {
    char expected[16] = "", got[16] = "";
    memcpy(expected, file + at, 15);
    prctl(PR_SET_NAME, pages + at);
    prctl(PR_GET_NAME, got);
    ways++;
    if (strcmp(expected, got)) printf("the name at %#zx is wrong\n", at), failed++;
}

static void execute(void) {
    for (int n = 0; n < 200; n++) ask(n % 8), call(), compare(39), last(), next();
}

/* The table of patched calls, where this program has nothing: the kernel finds nothing. */
static void nothing_is_at(void *address) {
    int pipes[2];
    if (pipe(pipes)) _exit(8);
    ways++;
    if (write(pipes[1], address, 16) != -1) printf("there is something at %p\n", address), failed++;
}

int main(void) {
    read_file();
    execute();
    size_t sizes[] = {1, 2, 3, 7, 8, 16, 63, 64, 300};
    size_t places[] = {0, 1, 5, 9, 60, 64, 68, 128, 132, 4000, 2 * PAGE - 16, 2 * PAGE - 9, 2 * PAGE - 5, 2 * PAGE - 1, 2 * PAGE};
    for (size_t p = 0; p < sizeof places / sizeof *places; p++)
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            range(places[p], sizes[s]);
            if (s == 0) name(places[p]);
            execute();
        }
    range(0, PAGE), execute(), range(0, LEN), execute(), range(PAGE, PAGE), range(100, LEN - 200);
    nothing_is_at((void *)0x160000), nothing_is_at((void *)0x16fff0);
    printf(failed ? "some bytes were others\n" : "%d ways, all the file's\n", ways);
    return failed != 0;
}
