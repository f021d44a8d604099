/* Services below a guest of ring3, in C: see docs/tracing.md.
 *
 * A service connects to a machine, says in a line of JSON what it wants, and reads lines. This header finds the
 * machine and carries the lines; what is in them is for a JSON library, or for ring3_trace_text and
 * ring3_trace_number, which find a member by its name.
 *
 * With a member "ring" in the request, such as {"events": ["syscall"], "ring": 4194304}, events come by memory that both
 * share, and no longer as lines: ring3_trace_next takes them.
 */
#ifndef RING3_TRACE_H
#define RING3_TRACE_H

#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

/* A connection: both are NULL where there is none. */
struct ring3_trace {
    FILE *from;
    FILE *to;
    /* The ring, if the machine has passed one: bytes of its events, how many were read, and those of the event that was taken last. */
    unsigned char *ring;
    uint64_t size, read;
    uint32_t taken;
};

/* An event of a ring. Texts end with a zero byte, and are there until the next one is taken. */
struct ring3_trace_event {
    uint64_t ns;
    /* All ones if there is none. */
    uint64_t took;
    uint32_t pid, tid, vcpu;
    /* `result` is NULL if there is none. */
    const char *kind, *name, *comm, *result, *arguments;
};

/* Bytes of a ring before its events. */
#define RING3_TRACE_EVENTS 4096

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
    if (service->ring)
        munmap(service->ring, RING3_TRACE_EVENTS + service->size);
    service->from = service->to = NULL;
    service->ring = NULL;
}

/* The first byte of the machine's answer, with which it passes a ring if one was asked for. */
static inline void ring3_trace_answered(struct ring3_trace *service)
{
    union {
        char room[CMSG_SPACE(sizeof(int))];
        struct cmsghdr aligned;
    } passed;
    char byte;
    struct iovec part = { &byte, 1 };
    struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = passed.room,
                              .msg_controllen = sizeof passed.room };
    struct cmsghdr *control;
    struct stat status;
    void *ring;
    int fd;

    if (recvmsg(fileno(service->from), &message, MSG_CMSG_CLOEXEC) != 1)
        return;
    ungetc(byte, service->from);
    control = CMSG_FIRSTHDR(&message);
    if (!control || control->cmsg_type != SCM_RIGHTS || control->cmsg_len < CMSG_LEN(sizeof fd))
        return;
    memcpy(&fd, CMSG_DATA(control), sizeof fd);
    if (fstat(fd, &status) == 0 && status.st_size > RING3_TRACE_EVENTS) {
        ring = mmap(NULL, status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (ring != MAP_FAILED) {
            service->ring = ring;
            service->size = status.st_size - RING3_TRACE_EVENTS;
        }
    }
    close(fd);
}

/* Takes the next event of the ring, which must be there: 1, or 0 once the machine has ended. */
static inline int ring3_trace_next(struct ring3_trace *service, struct ring3_trace_event *event)
{
    uint64_t *written = (uint64_t *)(service->ring + 64), *read = (uint64_t *)(service->ring + 192);
    uint32_t *sleeps = (uint32_t *)(service->ring + 256), words[12];
    uint16_t halves[2], texts[2];
    char *line = NULL;
    const char *text;
    size_t size = 0;
    int over = 0;

    service->read += service->taken;
    service->taken = 0;
    for (;;) {
        const unsigned char *at = service->ring + RING3_TRACE_EVENTS + (service->read & (service->size - 1));

        __atomic_store_n(read, service->read, __ATOMIC_RELEASE);
        if (__atomic_load_n(written, __ATOMIC_ACQUIRE) == service->read) {
            if (over)
                break;
            __atomic_store_n(sleeps, 1, __ATOMIC_SEQ_CST);
            if (__atomic_load_n(written, __ATOMIC_SEQ_CST) == service->read)
                over = !ring3_trace_line(service, &line, &size);
            __atomic_store_n(sleeps, 0, __ATOMIC_SEQ_CST);
            continue;
        }
        memcpy(words, at, sizeof words[0]);
        if (words[0] & 0x80000000u) {
            service->read += words[0] & 0x7fffffffu;
            continue;
        }
        memcpy(words, at, sizeof words);
        memcpy(halves, &words[1], sizeof halves);
        memcpy(texts, &words[9], sizeof texts);
        memcpy(&event->ns, &words[2], sizeof event->ns);
        memcpy(&event->took, &words[4], sizeof event->took);
        event->pid = words[6];
        event->tid = words[7];
        event->vcpu = words[8];
        text = (const char *)at + sizeof words;
        event->kind = text;
        event->name = event->kind + halves[0] + 1;
        event->comm = event->name + halves[1] + 1;
        text = event->comm + texts[0] + 1;
        event->result = texts[1] == 0xffff ? NULL : text;
        event->arguments = text + (texts[1] == 0xffff ? 0 : texts[1]) + 1;
        service->taken = words[0];
        break;
    }
    free(line);
    return service->taken != 0;
}

/* Events that were lost, as far as a ring tells of them. */
static inline uint64_t ring3_trace_lost(const struct ring3_trace *service)
{
    return service->ring ? __atomic_load_n((uint64_t *)(service->ring + 128), __ATOMIC_ACQUIRE) : 0;
}

static inline struct ring3_trace ring3_trace_open(const char *path)
{
    struct ring3_trace service = { 0 };
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
    struct ring3_trace none = { 0 };
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
                ring3_trace_answered(&service);
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
