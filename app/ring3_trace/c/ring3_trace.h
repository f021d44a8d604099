/* Services below a guest of ring3, in C: see docs/tracing.md.
 *
 * A service connects to a machine, says in a line of JSON what it wants, and reads lines. This header finds the
 * machine and carries the lines; what is in them is for a JSON library, or for ring3_trace_text and
 * ring3_trace_number, which find a member by its name.
 */
#ifndef RING3_TRACE_H
#define RING3_TRACE_H

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* A connection: both are NULL where there is none. */
struct ring3_trace {
    FILE *from;
    FILE *to;
};

/* The value of a member of a line; NULL if there is none. */
static inline const char *ring3_trace_member(const char *line, const char *name)
{
    char key[64];
    const char *found;

    if (snprintf(key, sizeof key, "\"%s\":", name) >= (int)sizeof key)
        return NULL;
    found = strstr(line, key);
    return found ? found + strlen(key) : NULL;
}

/* A member as a number; `otherwise` if it is none. */
static inline long long ring3_trace_number(const char *line, const char *name, long long otherwise)
{
    const char *value = ring3_trace_member(line, name);
    char *end;
    long long number;

    if (!value)
        return otherwise;
    number = strtoll(value, &end, 10);
    return end == value ? otherwise : number;
}

/* A member as text, as it is in the line: a backslash is not taken away. Returns `text`, which is empty if there is none. */
static inline char *ring3_trace_text(const char *line, const char *name, char *text, size_t size)
{
    const char *value = ring3_trace_member(line, name);
    size_t n = 0;

    if (value && *value == '"') {
        for (value++; *value && *value != '"' && n + 2 < size; value++) {
            if (*value == '\\' && value[1])
                text[n++] = *value++;
            text[n++] = *value;
        }
    }
    if (size)
        text[n] = 0;
    return text;
}

/* Reads a line; 0 once the machine has ended. */
static inline int ring3_trace_line(struct ring3_trace *service, char **line, size_t *size)
{
    return getline(line, size, service->from) > 0;
}

/* Sends a line. */
static inline void ring3_trace_say(struct ring3_trace *service, const char *line)
{
    fprintf(service->to, "%s\n", line);
    fflush(service->to);
}

static inline void ring3_trace_close(struct ring3_trace *service)
{
    if (service->from)
        fclose(service->from);
    if (service->to)
        fclose(service->to);
    service->from = service->to = NULL;
}

static inline struct ring3_trace ring3_trace_open(const char *path)
{
    struct ring3_trace service = { NULL, NULL };
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM, 0), copy;

    if (fd < 0 || strlen(path) >= sizeof address.sun_path)
        return service;
    strcpy(address.sun_path, path);
    copy = dup(fd);
    if (copy < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        close(fd);
        if (copy >= 0)
            close(copy);
        return service;
    }
    service.from = fdopen(fd, "r");
    service.to = fdopen(copy, "w");
    return service;
}

/* Connects to a machine of this user by its name, and asks for events by a request such as
 * {"events": ["exec"]}. What the machine says to it is the first line that is read: {"started":...} or {"error":...}. */
static inline struct ring3_trace ring3_trace_connect(const char *machine, const char *request)
{
    struct ring3_trace none = { NULL, NULL };
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    char folder[200], path[512], name[128], *line = NULL;
    size_t size = 0;
    struct dirent *entry;
    DIR *all;

    if (runtime && *runtime)
        snprintf(folder, sizeof folder, "%s/ring3", runtime);
    else
        snprintf(folder, sizeof folder, "/tmp/ring3-%u", (unsigned)getuid());
    all = opendir(folder);
    while (all && (entry = readdir(all))) {
        struct ring3_trace service;

        if (!strstr(entry->d_name, ".sock"))
            continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        service = ring3_trace_open(path);
        if (!service.from)
            continue;
        ring3_trace_say(&service, "{\"command\":\"status\"}");
        if (ring3_trace_line(&service, &line, &size)
            && !strcmp(ring3_trace_text(line, "name", name, sizeof name), machine)) {
            ring3_trace_say(&service, "{\"command\":\"trace\"}");
            /* The machine's answer comes before the connection is for more than a line. */
            if (ring3_trace_line(&service, &line, &size)) {
                ring3_trace_say(&service, request);
                closedir(all);
                free(line);
                return service;
            }
        }
        ring3_trace_close(&service);
    }
    if (all)
        closedir(all);
    free(line);
    return none;
}

#endif
