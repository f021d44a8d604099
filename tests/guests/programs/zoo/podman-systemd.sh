# program: podman with systemd inside
# does: a container of Debian's systemd, from packages that are installed here: it boots, starts, watches and ends services
# needs: podman crun /lib/systemd/systemd apt-cache
# version: podman --version
# memory: 2G
# seconds: 400
# fails: the host has no right to raise limits, which crun asks for; a guest has
packages=$(apt-cache depends --recurse --installed --no-recommends --no-suggests --no-conflicts --no-breaks \
    --no-replaces --no-enhances systemd bash dash coreutils grep | grep '^[a-z0-9]')
# A folder of the host's takes no set-ID programs; this is the guest's own.
work=$(mktemp -d /var/tmp/zoo.XXXXXX)
trap 'podman $opts rm -f -t 0 zoo > /dev/null 2>&1; rm -rf "$work"' EXIT
opts="--root $work/store --runroot $work/run --cgroup-manager=cgroupfs --storage-driver=vfs --events-backend=none"
for package in $packages; do dpkg -L "$package"; done 2> /dev/null |
    grep -v -E -e '^/usr/share/(doc|man|locale|info|zoneinfo)' -e '^/\.$' -e '^/var/lib/dpkg' -e /gconv/ -e /perl |
    sed -E -e 's|^/||' -e 's,^(bin|sbin|lib|lib64)/,usr/&,' > "$work/listed"
printf '%s\n' bin sbin lib lib64 usr/bin/sh etc/passwd etc/group etc/shadow >> "$work/listed"
sort -u "$work/listed" > "$work/files"
mkdir "$work/image" && cd "$work/image" || exit
tar -C / --no-recursion -T "$work/files" -cf - 2> /dev/null | tar -xf -
mkdir -p etc/systemd/system proc sys dev run tmp var/log
: > etc/machine-id
ln -s /dev/null etc/systemd/system/systemd-firstboot.service
cat > etc/systemd/system/works.service <<'S'
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -c 'echo worked > /run/worked'
S
cat > etc/systemd/system/dies.service <<'S'
[Service]
ExecStart=/bin/sh -c 'echo x >> /run/died; exit 3'
Restart=on-failure
RestartSec=100ms
StartLimitBurst=3
S
cat > etc/systemd/system/limited.service <<'S'
[Service]
TasksMax=5
MemoryMax=64M
ExecStart=/bin/sleep 1000
S
tar -c . | podman $opts import - zoo > /dev/null 2> "$work/log" || { cat "$work/log"; exit 1; }
podman $opts run -d --name zoo --systemd=always --ulimit host --network=none --log-driver=none zoo /lib/systemd/systemd \
    > /dev/null 2> "$work/log" || { cat "$work/log"; exit 1; }
podman $opts exec -i zoo sh 2>&1 << 'S'
for i in $(seq 600); do
    state=$(systemctl is-system-running 2> /dev/null)
    case $state in running | degraded) break ;; esac
    sleep 0.3
done
echo "the system is $state"
systemctl --failed --no-legend --plain
systemctl start works && cat /run/worked
systemctl is-active works
systemctl start limited && systemctl show limited -p TasksMax -p MemoryMax -p ActiveState
systemctl stop limited
systemctl is-active limited
systemctl start dies
for i in $(seq 100); do systemctl is-failed -q dies && break; sleep 0.3; done
systemctl is-failed dies
wc -l < /run/died
journalctl -o cat -u dies | grep -c status=3
S
podman $opts stop -t 60 zoo > /dev/null; echo "stopped with $?"
