# Boots the systemd of a root file system ($1, an image) natively on this terminal, as a container. Its mounts are its own
# and end with it, and it ends with the process whose number it writes to $2.
set -eu
echo $$ > "$2"
inside='
    mount --make-rprivate /
    mount -o loop "$1" /mnt
    cd /mnt
    mount -t proc proc proc
    mount -t sysfs -o ro sys sys
    mount -t cgroup2 cgroup sys/fs/cgroup
    mount -t tmpfs -o mode=755 dev dev
    for name in full null random tty urandom zero; do touch dev/$name; mount --bind /dev/$name dev/$name; done
    touch dev/console
    mount --bind "$(tty)" dev/console
    mkdir dev/pts dev/shm
    mount -t devpts -o newinstance,ptmxmode=666 pts dev/pts
    ln -s pts/ptmx dev/ptmx
    exec env -i container=other PATH=/usr/sbin:/usr/bin chroot . /lib/systemd/systemd'
exec unshare --pid --mount --uts --ipc --net --cgroup --fork --kill-child sh -euc "$inside" sh "$1"
