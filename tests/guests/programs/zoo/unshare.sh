# program: unshare
# does: namespaces of users, mounts, processes, networks
# needs: unshare
# version: unshare --version
# seconds: 60
unshare --map-root-user --mount --pid --fork --net --uts --ipc sh -c 'mount -t tmpfs t /mnt && echo x > /mnt/x && cat /mnt/x; echo $$; id -u; hostname h && hostname; ip link 2> /dev/null | grep -c LOOPBACK'
unshare --map-root-user --cgroup sh -c 'cat /proc/self/cgroup | cut -d: -f3 | tail -n 1'
