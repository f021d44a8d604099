/* A 32-bit program without a C library: does what it reads from its standard input, and says what came of it. */
typedef unsigned u32;

enum { FIB = 27, DIVISIONS = 100000, WRITE = 4, READ = 3, EXIT = 1, GETPPID = 64, SYSINFO = 32 };

u32 vsyscall;

__attribute__((noinline)) static int interrupt(u32 number, u32 a, void *b, u32 c)
{
    int result;
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(number), "b"(a), "c"(b), "d"(c) : "memory");
    return result;
}

/* By way of the vDSO, which chooses. */
static int quick(u32 number)
{
    int result;
    __asm__ volatile("call *vsyscall" : "=a"(result) : "a"(number) : "memory", "ecx", "edx");
    return result;
}

__attribute__((noinline, noclone, optimize("no-optimize-sibling-calls"))) static u32 fib(u32 k)
{
    __asm__ volatile("" : "+r"(k));
    return k < 2 ? k : fib(k - 1) + fib(k - 2);
}

static u32 divisions(void)
{
    u32 sum = 0, of = 123456789;
    for (u32 i = 1; i <= DIVISIONS; i++) {
        __asm__ volatile("" : "+r"(of));
        sum += of / i;
    }
    return sum;
}

/* How often the result was right. */
static u32 done(char row, u32 n)
{
    const int parent = interrupt(GETPPID, 0, 0, 0);
    u32 right = 0;
    for (u32 i = 0; i < n; i++)
        switch (row) {
        case 'f': right += fib(FIB) == 196418; break;
        case 'd': right += divisions() == 1492560709u; break;
        case 'q': right += quick(GETPPID) == parent; break;
        case 'i': right += interrupt(GETPPID, 0, 0, 0) == parent; break;
        }
    return right;
}

void begin(u32 *stack)
{
    u32 *at = stack + 1, request[2];
    while (*at++);
    while (*at++);
    for (; at[0]; at += 2)
        if (at[0] == SYSINFO)
            vsyscall = at[1];
    while (interrupt(READ, 0, request, sizeof request) == sizeof request) {
        u32 right = done((char)request[0], request[1]);
        interrupt(WRITE, 1, &right, sizeof right);
    }
    interrupt(EXIT, 0, 0, 0);
}

__asm__(".globl _start\n_start: mov %esp, %eax; and $-16, %esp; sub $12, %esp; push %eax; call begin");
