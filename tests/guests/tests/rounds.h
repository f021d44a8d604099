/* What programs share that do something by chance, again and again, and end at the first thing that is wrong. */
#include <stdio.h>
#include <unistd.h>

static unsigned long seed = 1;

static unsigned long below(unsigned long limit)
{
    seed = seed * 6364136223846793005 + 1442695040888963407;
    return (seed >> 33) % limit;
}

static void check(int right, const char *what, int round)
{
    if (right)
        return;
    printf("wrong: %s in round %d\n", what, round);
    fflush(stdout);
    _exit(1);
}
