/*
 * Servers that are measured from the host: each is a script /bench/serve-NAME.sh in the root directory of other programs,
 * which becomes the server.
 */
#include "services.h"

#include <arpa/inet.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"
#include "programs.h"

/* How often, and how long apart in microseconds, a server is asked whether it is there: one minute. */
enum { TRIES = 3000, PAUSE = 20000 };

static pid_t service;

static int can_connect(unsigned port)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int stream = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int done = stream >= 0 && connect(stream, (struct sockaddr *)&address, sizeof address) == 0;
    close(stream);
    return done;
}

const char *start_service(const char *name, unsigned port)
{
    char script[100], argument[16];
    int status;
    stop_service();
    snprintf(script, sizeof script, "/bench/serve-%s.sh", name);
    snprintf(argument, sizeof argument, "%u", port);
    service = start_program(script, argument, true);
    CHECK(service > 0, "cannot start a server");
    for (int tries = 0; tries < TRIES; tries++) {
        if (waitpid(service, &status, WNOHANG) == service) {
            service = 0;
            return program_verdict(status);
        }
        int connected = can_connect(port);
        /* iperf3 listens anew after every connection. */
        usleep(PAUSE);
        if (connected)
            return NULL;
    }
    stop_service();
    return "the server cannot be reached";
}

void stop_service(void)
{
    if (service > 0) {
        kill(service, SIGKILL);
        waitpid(service, NULL, 0);
    }
    service = 0;
}
