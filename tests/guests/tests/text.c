// Reads code in every way there is, after it has called the kernel often and asked CPUID, and compares it with the files:
// the C library's, its own and the loader's. What it has executed of the latter two it does not load by itself (CAVEATS.md).
#define _GNU_SOURCE
#include <fcntl.h>
#include <link.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

static int failed;

struct text { const char *name; uint8_t *at; size_t len; off_t offset; uint8_t *file; };

static struct text texts[16];
static int count;

static void wrong(const char *how, struct text *t, const uint8_t *seen)
{
	for (size_t i = 0; i < t->len; i++)
		if (seen[i] != t->file[i]) {
			printf("FAILED: %s of %s: byte %#zx is %02x, not %02x\n", how, t->name, i, seen[i], t->file[i]);
			failed = 1;
			return;
		}
	printf("%s of %s: the same\n", how, strrchr(t->name, '/') ? strrchr(t->name, '/') + 1 : t->name);
}

static void find_texts(void)
{
	char line[512];
	FILE *maps = fopen("/proc/self/maps", "r");
	while (fgets(line, sizeof line, maps) && count < 16) {
		unsigned long from, to, offset; char rights[8], name[300] = "";
		if (sscanf(line, "%lx-%lx %7s %lx %*s %*s %299s", &from, &to, rights, &offset, name) < 5)
			continue;
		if (!strchr(rights, 'x') || name[0] != '/')
			continue;
		struct text *t = &texts[count++];
		t->name = strdup(name); t->at = (void *)from; t->len = to - from; t->offset = offset;
		t->file = calloc(1, t->len);
		int file = open(name, O_RDONLY);
		if (file < 0 || pread(file, t->file, t->len, offset) < 0)
			_exit(9);
		close(file);
	}
	fclose(maps);
}

static void by_write(struct text *t)
{
	int file = memfd_create("copy", 0);
	uint8_t *seen = calloc(1, t->len);
	if (write(file, t->at, t->len) != (ssize_t)t->len || pread(file, seen, t->len, 0) != (ssize_t)t->len)
		_exit(8);
	wrong("write", t, seen);
	close(file); free(seen);
}

static void by_mem(struct text *t)
{
	int file = open("/proc/self/mem", O_RDONLY);
	uint8_t *seen = calloc(1, t->len);
	if (pread(file, seen, t->len, (off_t)t->at) != (ssize_t)t->len)
		_exit(7);
	wrong("/proc/self/mem", t, seen);
	close(file); free(seen);
}

static void by_loads(struct text *t)
{
	uint8_t *seen = malloc(t->len);
	memcpy(seen, t->at, t->len);
	wrong("a load", t, seen);
	free(seen);
}

/* Code that others execute, and this program does not. */
static void of_a_mapping(struct text *t)
{
	struct text other = *t;
	int file = open(t->name, O_RDONLY);
	other.at = mmap(0, t->len, PROT_READ | PROT_EXEC, MAP_PRIVATE, file, t->offset);
	if (other.at == MAP_FAILED)
		_exit(5);
	by_loads(&other);
	by_write(&other);
	munmap(other.at, t->len);
	close(file);
}

static void from_outside(void)
{
	int parent = getpid();
	int child = fork();
	if (child == 0) {
		for (int i = 0; i < count; i++) {
			struct text *t = &texts[i];
			uint8_t *seen = malloc(t->len);
			struct iovec here = { seen, t->len }, there = { t->at, t->len };
			if (process_vm_readv(parent, &here, 1, &there, 1, 0) != (ssize_t)t->len)
				_exit(6);
			wrong("process_vm_readv", t, seen);
			free(seen);
		}
		fflush(stdout);
		_exit(failed);
	}
	int status;
	waitpid(child, &status, 0);
	failed |= status != 0;
}

static void by_ptrace(void)
{
	int child = fork();
	if (child == 0) {
		ptrace(PTRACE_TRACEME, 0, 0, 0);
		raise(SIGSTOP);
		_exit(0);
	}
	int status;
	waitpid(child, &status, 0);
	for (int i = 0; i < count; i++) {
		struct text *t = &texts[i];
		size_t len = t->len > 65536 ? 65536 : t->len;
		uint8_t *seen = malloc(t->len);
		memcpy(seen, t->file, t->len);
		for (size_t at = 0; at < len; at += 8) {
			long word = ptrace(PTRACE_PEEKTEXT, child, t->at + at, 0);
			memcpy(seen + at, &word, 8);
		}
		wrong("PEEKTEXT", t, seen);
		free(seen);
	}
	kill(child, SIGKILL);
	waitpid(child, &status, 0);
}

static __attribute__((noinline)) void ask(void)
{
	unsigned a = 0, b, c = 0, d;
	__asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
}

/* CPUID, which is changed where the host cannot make it fault, and what loads from the page that it is in itself. */
uint64_t own_page(void);
__asm__(".text\n.p2align 12\n"
	"own_page: push %rbx\n\tmov $1000, %esi\n"
	"1: xor %eax, %eax\n\tcpuid\n\tmov 2f(%rip), %rax\n\tdec %esi\n\tjnz 1b\n\tpop %rbx\n\tret\n"
	"2: .quad 0x1122334455667788\n.p2align 12\n");

static void of_its_own_page(void)
{
	uint64_t seen = own_page();
	printf("a page that loads from itself: %s\n", seen == 0x1122334455667788 ? "the same" : "FAILED");
	failed |= seen != 0x1122334455667788;
}

int main(void)
{
	of_its_own_page();
	for (int i = 0; i < 10000; i++)
		getppid();
	ask();
	for (int i = 0; i < 1000; i++) {
		long r;
		__asm__ volatile("mov $110, %%eax\n\tsyscall" : "=a"(r) : : "rcx", "r11", "memory");
	}
	find_texts();
	for (int i = 0; i < count; i++) {
		of_a_mapping(&texts[i]);
		by_mem(&texts[i]);
		if (strstr(texts[i].name, "/libc")) {
			by_loads(&texts[i]);
			by_write(&texts[i]);
			for (int i = 0; i < 10000; i++)
				getppid();
			ask();
			by_write(&texts[i]);
			by_loads(&texts[i]);
		}
	}
	from_outside();
	by_ptrace();
	printf(failed ? "some were different\n" : "all were the same\n");
	return failed;
}
