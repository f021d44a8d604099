# program: podman with crun
# does: a container from an image made here
# needs: podman crun
# version: podman --version
# memory: 1G
# seconds: 200
# fails: the host has no right to raise limits, which crun asks for; a guest has
mkdir image && cp "$(command -v busybox || echo /bin/busybox)" image/ 2> /dev/null || exit 77
opts="--root $PWD/store --runroot $PWD/run --cgroup-manager=cgroupfs --storage-driver=vfs --events-backend=none"
tar -C image -c . | podman $opts import - zoo > /dev/null 2> log || { cat log; exit 1; }
podman $opts run --rm --ulimit host --network=none --cgroups=disabled --log-driver=none zoo /busybox sh -c 'echo inside; /busybox id -u; /busybox ls /' 2>&1
