/* Rows of 160 processes at once: many more than a CPU of Linux's has identifiers of address spaces for, which are six. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"

/* As hackbench has them: so many groups, of so many senders and receivers each, and messages of so many bytes. An operation is
   100 rounds. With few of them each process does little more than wake and sleep. */
enum { GROUPS = 4, MEMBERS = 20, MESSAGE = 100, ROUNDS = 100, CROWD = GROUPS * MEMBERS * 2 };

static pid_t crowd[CROWD];
static int born;
/* By which each of them hears how many rounds come next, and says what has come of them. */
static int orders[CROWD][2];

/* Sends each receiver a message full of its own number in each round. */
static uint64_t send_rounds(uint64_t rounds, const int *receivers, int number)
{
    char message[MESSAGE];
    memset(message, number, sizeof message);
    for (uint64_t i = 0; i < rounds; i++)
        for (int to = 0; to < MEMBERS; to++)
            if (write(receivers[to], message, sizeof message) != sizeof message)
                return 0;
    return rounds;
}

/* How many rounds have come whole, by the sum of all bytes. */
static uint64_t receive_rounds(uint64_t rounds, int from)
{
    unsigned char bytes[MESSAGE];
    uint64_t sum = 0;
    const uint64_t each = MESSAGE * MEMBERS * (MEMBERS + 1) / 2;
    for (uint64_t left = rounds * MEMBERS * MESSAGE; left;) {
        ssize_t got = read(from, bytes, sizeof bytes);
        if (got <= 0)
            return 0;
        for (ssize_t i = 0; i < got; i++)
            sum += bytes[i];
        left -= (uint64_t)got;
    }
    return sum % each ? 0 : sum / each;
}

/* What a member does until its parent is gone: a sender if it has receivers. */
static void take_part(int order, int from, const int *receivers, int number)
{
    uint64_t rounds;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    while (read(order, &rounds, sizeof rounds) == sizeof rounds) {
        rounds = receivers ? send_rounds(rounds, receivers, number) : receive_rounds(rounds, from);
        if (write(order, &rounds, sizeof rounds) != sizeof rounds)
            break;
    }
    _exit(0);
}

static bool bear(int from, const int *receivers, int number)
{
    int *order = orders[born];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, order) != 0)
        return false;
    crowd[born] = fork();
    if (crowd[born] == 0)
        take_part(order[1], from, receivers, number);
    close(order[1]);
    return crowd[born++] > 0;
}

static const char *crowd_setup(void)
{
    for (int group = 0; group < GROUPS; group++) {
        int receivers[MEMBERS];
        for (int i = 0; i < MEMBERS; i++) {
            int pair[2];
            CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "cannot make sockets");
            CHECK(bear(pair[0], NULL, 0), "cannot fork");
            close(pair[0]);
            receivers[i] = pair[1];
        }
        for (int i = 0; i < MEMBERS; i++)
            CHECK(bear(-1, receivers, i + 1), "cannot fork");
        for (int i = 0; i < MEMBERS; i++)
            close(receivers[i]);
    }
    return NULL;
}

static void crowd_teardown(void)
{
    for (int i = 0; i < born; i++) {
        close(orders[i][0]);
        kill(crowd[i], SIGKILL);
        waitpid(crowd[i], NULL, 0);
    }
    born = 0;
}

static const char *crowd_run(uint64_t n)
{
    n *= ROUNDS;
    for (int i = 0; i < CROWD; i++)
        CHECK(write(orders[i][0], &n, sizeof n) == sizeof n, "a process is gone");
    for (int i = 0; i < CROWD; i++) {
        uint64_t came;
        CHECK(read(orders[i][0], &came, sizeof came) == sizeof came, "a process is gone");
        CHECK(came == n, "messages are lost or wrong");
    }
    return NULL;
}

/* A child that is there until all are. */
static pid_t bear_one(const int *here, const int *leave)
{
    pid_t child = fork();
    if (child == 0) {
        char byte = 0;
        close(leave[1]);
        _exit(write(here[1], &byte, 1) == 1 && read(leave[0], &byte, 1) == 0 ? TRUE_CODE : 1);
    }
    return child;
}

/* So many children, all there before the first of them ends. */
static const char *crowd_of(uint64_t count)
{
    int here[2], leave[2];
    CHECK(pipe(here) == 0 && pipe(leave) == 0, "cannot make pipes");
    for (uint64_t i = 0; i < count; i++)
        CHECK(bear_one(here, leave) > 0, "cannot fork");
    for (uint64_t i = 0; i < count; i++) {
        char byte;
        CHECK(read(here[0], &byte, 1) == 1, "a child is gone");
    }
    close(leave[1]);
    for (uint64_t i = 0; i < count; i++) {
        int status;
        CHECK(wait(&status) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == TRUE_CODE, "a child has failed");
    }
    close(here[0]), close(here[1]), close(leave[0]);
    return NULL;
}

static const char *many_run(uint64_t n)
{
    while (n) {
        uint64_t count = n < CROWD ? n : CROWD;
        const char *wrong = crowd_of(count);
        CHECK(!wrong, wrong);
        n -= count;
    }
    return NULL;
}

const struct row crowd_rows[] = {
    { "hackbench", "processes", "160,000 messages of 100 bytes by sockets among 160 processes", crowd_run, crowd_setup, crowd_teardown },
    { "forkmany", "processes", "fork, exit and wait, of 160 children that are there at once", many_run, NULL, NULL },
    ROWS_END,
};
