/* Prints which programs a guest starts: programs MACHINE */
#include "ring3_trace.h"

int main(int argc, char **argv)
{
    struct ring3_trace service;
    char *line = NULL, comm[64], program[512];
    size_t size = 0;

    if (argc != 2) {
        fprintf(stderr, "programs MACHINE\n");
        return 2;
    }
    service = ring3_trace_connect(argv[1], "{\"events\": [\"exec\"]}");
    if (!service.from) {
        fprintf(stderr, "programs: no machine is called %s\n", argv[1]);
        return 2;
    }
    while (ring3_trace_line(&service, &line, &size)) {
        if (ring3_trace_member(line, "error")) {
            fprintf(stderr, "programs: %s", line);
            return 1;
        }
        if (ring3_trace_member(line, "started"))
            puts("records");
        if (ring3_trace_member(line, "event"))
            printf("%s %lld %s\n", ring3_trace_text(line, "comm", comm, sizeof comm),
                   ring3_trace_number(line, "pid", -1), ring3_trace_text(line, "arguments", program, sizeof program));
        fflush(stdout);
    }
    ring3_trace_close(&service);
    free(line);
    return 0;
}
