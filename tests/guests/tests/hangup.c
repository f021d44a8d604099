// Opens a terminal by its name and closes its other side. Who leads a session gets the terminal, and is hung up then.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(void) {
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    if (master < 0 || grantpt(master) || unlockpt(master))
        return 2;
    if (open(ptsname(master), O_RDWR) < 0)
        return 3;
    close(master);
    puts(getpid() == getsid(0) ? "leads a session" : "goes on");
    return 0;
}
