/*
 * The benchmark's program: the same static file natively, in every engine and in every peer.
 *
 * It obeys lines on standard input and answers with lines "@bench {JSON}" on standard output, so that whoever
 * drives it can take turns between machines. A batch repeats a row's operation for about as long as it is told to.
 *
 *   list              describes every row
 *   run ROW MS        one batch of about MS milliseconds
 *   serve NAME PORT   starts a server that is measured from outside; `unserve` ends it
 *   quit              ends (and switches the machine off, where this program is its first process)
 *
 * "bench once" starts one command and ends; "bench ROW..." measures rows and ends.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#include "bench.h"
#include "init.h"
#include "services.h"

const char *scratch = "/tmp", *self_path = "/proc/self/exe", *shell_path = "/bin/sh",
           *userland = "/mnt";

static const struct row *const groups[] = { compute_rows, memory_rows, call_rows, process_rows, crowd_rows, fault_rows,
                                             file_rows, scatter_rows, narrow_rows, two_rows, program_rows };

/* The row whose setup is in force, and how often its operation fits into `budget` milliseconds. */
static const struct row *current;
static uint64_t iterations, budget;

/* So many budgets are very long. */
enum { LONG = 100 };

const char *scratch_file(const char *name)
{
    static char path[4096];
    snprintf(path, sizeof path, "%s/ring3-bench-%d-%s", scratch, (int)getpid(), name);
    return path;
}

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static const struct row *find(const char *name)
{
    for (size_t group = 0; group < sizeof groups / sizeof *groups; group++)
        for (const struct row *row = groups[group]; row->name; row++)
            if (strcmp(row->name, name) == 0)
                return row;
    return NULL;
}

static void list(void)
{
    for (size_t group = 0; group < sizeof groups / sizeof *groups; group++)
        for (const struct row *row = groups[group]; row->name; row++)
            printf("@bench {\"name\":\"%s\",\"group\":\"%s\",\"about\":\"%s\"}\n", row->name, row->group, row->about);
    printf("@bench {\"end\":true}\n");
}

static void finish(void)
{
    if (current && current->teardown)
        current->teardown();
    current = NULL;
}

static const char *time_of(uint64_t n, uint64_t *ns)
{
    uint64_t start = now();
    const char *wrong = current->run(n);
    *ns = now() - start;
    return wrong;
}

/* Finds how often the operation fits into the budget; the last try has warmed everything up. What seems to be enough
 * is tried once more, lest one late wake-up stand for all that follows. What takes very long needs no second try: it was cold only at its
 * beginning, so its time is given back as `whole`. */
static const char *calibrate(uint64_t milliseconds, uint64_t *whole)
{
    const uint64_t goal = milliseconds * 1000000;
    uint64_t n = 1, ns = 0, last = 0;
    for (;;) {
        const char *wrong = time_of(n, &ns);
        CHECK(!wrong, wrong);
        uint64_t fit = ns ? (uint64_t)((double)n * (double)goal / (double)ns) : n * 16;
        if (ns >= goal / 4 && (n == last || ns >= 8 * goal)) {
            iterations = fit ? fit : 1;
            *whole = n == 1 && ns > LONG * goal ? ns : 0;
            return NULL;
        }
        last = n;
        if (ns < goal / 4)
            n = fit < n * 16 ? fit : n * 16;
    }
}

static const char *prepare(const struct row *row, uint64_t milliseconds, uint64_t *whole)
{
    if (current != row) {
        finish();
        const char *wrong = row->setup ? row->setup() : NULL;
        CHECK(!wrong, wrong);
        current = row;
        iterations = 0;
    }
    if (iterations && budget == milliseconds)
        return NULL;
    budget = milliseconds;
    return calibrate(milliseconds, whole);
}

static void batch(const char *name, uint64_t milliseconds)
{
    const struct row *row = find(name);
    uint64_t ns = 0;
    const char *wrong = row ? prepare(row, milliseconds, &ns) : "no such row";
    if (!wrong && !ns)
        wrong = time_of(iterations, &ns);
    if (wrong)
        printf("@bench {\"row\":\"%s\",\"error\":\"%s\",\"at\":%llu}\n", name, wrong, (unsigned long long)now());
    else
        printf("@bench {\"row\":\"%s\",\"iterations\":%llu,\"ns\":%llu,\"at\":%llu}\n", name,
               (unsigned long long)iterations, (unsigned long long)ns, (unsigned long long)now());
}

/* Without echo, so that what is typed does not come back as an answer. */
static void quieten_terminal(void)
{
    struct termios terminal;
    if (tcgetattr(0, &terminal) != 0)
        return;
    terminal.c_lflag &= ~(tcflag_t)(ECHO | ECHOE | ECHOK | ISIG);
    terminal.c_oflag &= ~(tcflag_t)OPOST;
    tcsetattr(0, TCSANOW, &terminal);
}

static void greet(void)
{
    struct utsname kernel;
    quieten_terminal();
    uname(&kernel);
    printf("@bench {\"ready\":\"%s %s\",\"at\":%llu}\n", kernel.sysname, kernel.release, (unsigned long long)now());
}

/* Starts one command, as a machine does that exists for one command. */
static void once(void)
{
    greet();
    current = find("exec");
    const char *wrong = current->run(1);
    printf("@bench {\"finished\":\"%s\"}\n", wrong ? wrong : "");
}

static void serve_others(const char *name, unsigned port)
{
    finish();
    const char *wrong = start_service(name, port);
    if (wrong)
        printf("@bench {\"error\":\"%s\",\"at\":%llu}\n", wrong, (unsigned long long)now());
    else
        printf("@bench {\"serving\":\"%s\"}\n", name);
}

static void serve(void)
{
    char line[256], name[64];
    unsigned milliseconds, port;
    greet();
    while (fgets(line, sizeof line, stdin) && strcmp(line, "quit\n") != 0) {
        if (sscanf(line, "run %63s %u", name, &milliseconds) == 2)
            batch(name, milliseconds);
        else if (sscanf(line, "serve %63s %u", name, &port) == 2)
            serve_others(name, port);
        else if (strcmp(line, "unserve\n") == 0)
            stop_service();
        else if (strcmp(line, "list\n") == 0)
            list();
        else
            printf("@bench {\"error\":\"not understood\",\"at\":%llu}\n", (unsigned long long)now());
    }
    stop_service();
    finish();
}

/* Rows by name, for use by hand. */
static void run_named(char **names)
{
    for (; *names; names++)
        for (int i = 0; i < 5; i++)
            batch(*names, 100);
    finish();
}

/* What the command line asks for. */
static void work(char **arguments)
{
    if (!*arguments)
        serve();
    else if (strcmp(*arguments, "once") == 0)
        once();
    else
        run_named(arguments);
}

/* As the first process: a kernel hands over whatever it did not understand, so only one word counts. */
static void work_in_machine(char **words)
{
    while (*words && strcmp(*words, "once") != 0)
        words++;
    work(words);
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc > 1 && strcmp(argv[1], "true") == 0)
        _exit(TRUE_CODE);
    if (getenv("BENCH_SCRATCH"))
        scratch = getenv("BENCH_SCRATCH");
    if (getenv("BENCH_SHELL"))
        shell_path = getenv("BENCH_SHELL");
    if (getenv("BENCH_USERLAND"))
        userland = getenv("BENCH_USERLAND");
    if (getpid() == 1 && strstr(argv[0], "init"))
        run_as_init(work_in_machine, argv + 1);
    work(argv + 1);
    return 0;
}
