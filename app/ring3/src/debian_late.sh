# In a new root file system ($1) with everything installed: what makes it a machine's.
set -eu
echo debian > "$1/etc/hostname"
printf '127.0.0.1 localhost\n127.0.1.1 debian\n::1 localhost\n' > "$1/etc/hosts"
echo '/dev/vda / ext4 defaults,discard 0 1' > "$1/etc/fstab"
printf '[Match]\nName=en* eth*\n\n[Network]\nDHCP=yes\n' > "$1/etc/systemd/network/80-dhcp.network"
chroot "$1" systemctl --quiet enable systemd-networkd
# On a host with more to do than it can, or interpreted, a disk or terminal may take minutes to appear; that is no failure.
mkdir -p "$1/etc/systemd/system.conf.d"
printf '[Manager]\nDefaultDeviceTimeoutSec=10min\nDefaultTimeoutStartSec=10min\n' > "$1/etc/systemd/system.conf.d/ring3.conf"
# There are no volumes whose snapshots could be left over.
chroot "$1" systemctl --quiet mask e2scrub_reap.service
# Whoever has the console has the machine; nobody gets in from elsewhere without a password.
chroot "$1" passwd --quiet --delete root
