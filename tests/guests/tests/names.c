/* Starts itself so many times, always by one name or each time by another. */
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

int main(int argc, char **argv)
{
    if (argc < 3)
        return 0;
    for (int n = atoi(argv[2]); n > 0; n--) {
        char name[20];
        snprintf(name, sizeof name, "name%d", strcmp(argv[1], "one") == 0 ? 0 : n);
        char *const arguments[] = { name, NULL };
        pid_t child;
        int status = -1;
        if (posix_spawn(&child, argv[0], NULL, NULL, arguments, NULL) != 0)
            return 1;
        if (waitpid(child, &status, 0) != child || status != 0)
            return 2;
    }
    printf("%s names\n", argv[1]);
    return 0;
}
