/* Runs a program behind a filter such as containers have: no name spaces, no mounts, and EPERM, not ENOSYS, for calls that it does not
   know. */
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LOAD(what) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, what))
#define ANSWER(error) BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (error))
#define REFUSE(number, error) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1), ANSWER(error)
/* process_mrelease, futex_waitv */
#define LAST 449
#define NAME_SPACES 0x7e020000

int main(int count, char **words) {
    struct sock_filter filter[] = {
        LOAD(nr),
        BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, LAST, 0, 1), ANSWER(EPERM),
        REFUSE(SYS_clone3, ENOSYS),
        REFUSE(SYS_unshare, EPERM), REFUSE(SYS_setns, EPERM), REFUSE(SYS_mount, EPERM), REFUSE(SYS_umount2, EPERM),
        REFUSE(SYS_pivot_root, EPERM), REFUSE(SYS_chroot, EPERM), REFUSE(SYS_bpf, EPERM), REFUSE(SYS_keyctl, EPERM),
        REFUSE(SYS_add_key, EPERM), REFUSE(SYS_perf_event_open, EPERM), REFUSE(SYS_userfaultfd, EPERM),
        REFUSE(SYS_io_uring_setup, EPERM), REFUSE(SYS_kcmp, EPERM), REFUSE(SYS_pidfd_getfd, EPERM),
        REFUSE(SYS_mbind, EPERM), REFUSE(SYS_set_mempolicy, EPERM), REFUSE(SYS_syslog, EPERM),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 3),
        LOAD(args[0]),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, NAME_SPACES, 0, 1), ANSWER(EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    if (count < 2 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) {
        perror("container");
        return 99;
    }
    if (syscall(0x0ffffff0) != -1 || errno != EPERM)
        return 98;
    execv(words[1], words + 1);
    perror(words[1]);
    return 97;
}
