/* The first process of a machine that only runs this program. */
#define _GNU_SOURCE
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void mount_one(const char *type, const char *at)
{
    mkdir(at, 0755);
    if (mount(type, at, type, 0, NULL) != 0 && errno != EBUSY)
        printf("init: cannot mount %s: %s\n", at, strerror(errno));
}

/* Loads the modules named in /modules/order, as far as there are any, and they are for this kernel: UML, which has what
 * it needs built in, gets the same files. */
static void load_modules(void)
{
    char name[100], path[128];
    FILE *order = fopen("/modules/order", "r");
    while (order && fscanf(order, "%99s", name) == 1) {
        snprintf(path, sizeof path, "/modules/%s.ko", name);
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file < 0 || (syscall(SYS_finit_module, file, "", 0) != 0 && errno != ENOEXEC))
            printf("init: cannot load %s: %s\n", name, strerror(errno));
        close(file);
    }
    if (order)
        fclose(order);
}

/* A network card, if there is one, is behind the host's translation of addresses, where ours is known. */
static void bring_up_network(void)
{
    static const char script[] = "ip link set lo up; [ -e /sys/class/net/eth0 ] || exit 0;"
                                 "ip address add 10.0.2.15/24 dev eth0 && ip link set eth0 up &&"
                                 "ip route add default via 10.0.2.2";
    if (WEXITSTATUS(system(script)) != 0)
        printf("init: cannot set up the network\n");
}

/* The second disk may be written to. */
static void name_disk(void)
{
    static const char *const disks[] = { "/dev/vdb", "/dev/ubdb" };
    for (int i = 0; i < 2; i++)
        if (access(disks[i], W_OK) == 0)
            setenv("BENCH_DISK", disks[i], 1);
}

/* Other programs are on the first disk, if there is one, which UML calls ubda; scripts for them came with us. */
static void mount_userland(void)
{
    mkdir("/mnt", 0755);
    if (mount("/dev/vda", "/mnt", "ext4", MS_RDONLY, NULL) != 0 &&
        mount("/dev/ubda", "/mnt", "ext4", MS_RDONLY, NULL) != 0)
        return;
    mount_one("tmpfs", "/mnt/tmp");
    mount_one("devtmpfs", "/mnt/dev");
    mount_one("proc", "/mnt/proc");
    if (mount("/bench", "/mnt/bench", NULL, MS_BIND, NULL) != 0)
        printf("init: cannot mount the scripts: %s\n", strerror(errno));
    name_disk();
    bring_up_network();
}

_Noreturn void run_as_init(void (*work)(char **arguments), char **arguments)
{
    mount_one("proc", "/proc");
    mount_one("sysfs", "/sys");
    mount_one("devtmpfs", "/dev");
    mount_one("tmpfs", "/tmp");
    load_modules();
    mount_userland();
    pid_t child = fork();
    if (child == 0) {
        work(arguments);
        exit(0);
    }
    while (waitpid(child, NULL, 0) < 0 && errno == EINTR)
        ;
    reboot(RB_POWER_OFF);
    for (;;)
        pause();
}
