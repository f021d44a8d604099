/* Prints which programs a guest starts: programs MACHINE */
#include "ring3_trace.h"

int main(int argc, char **argv)
{
    struct ring3_trace service;
    struct ring3_trace_event event;
    char *line = NULL;
    size_t size = 0;

    if (argc != 2) {
        fprintf(stderr, "programs MACHINE\n");
        return 2;
    }
    service = ring3_trace_connect(argv[1], "{\"events\": [\"exec\"], \"ring\": 65536}");
    if (!service.from) {
        fprintf(stderr, "programs: no machine is called %s\n", argv[1]);
        return 2;
    }
    if (!ring3_trace_line(&service, &line, &size) || ring3_trace_member(line, "error") || !service.ring) {
        fprintf(stderr, "programs: %s", line ? line : "the machine has ended\n");
        return 1;
    }
    puts("records");
    fflush(stdout);
    while (ring3_trace_next(&service, &event)) {
        printf("%s %u %s\n", event.comm, event.pid, event.arguments);
        fflush(stdout);
    }
    if (ring3_trace_lost(&service))
        fprintf(stderr, "programs: %llu events were lost\n", (unsigned long long)ring3_trace_lost(&service));
    ring3_trace_close(&service);
    free(line);
    return 0;
}
