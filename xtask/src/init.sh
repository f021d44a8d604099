#!/bin/sh
# First process of a guest: mounts, loads modules, then a script or a shell, then power-off.
/bin/busybox mkdir -p /usr/bin /usr/sbin /sbin
/bin/busybox --install -s
export PATH=/bin:/sbin:/usr/bin:/usr/sbin HOME=/root TERM=linux
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
while read -r module; do
    insmod "/modules/$module.ko" || echo "init: cannot load $module"
done < /modules/order
hostname guest

if [ -x /script ]; then
    sh /script
    echo "init: script ended with $?"
else
    echo
    echo "Linux $(uname -r), $(nproc) CPU, booted in $(cut -d' ' -f1 /proc/uptime) s."
    echo "exit or poweroff ends the machine; Ctrl-A X kills it."
    cd /root
    # These programs ask the first process by signals, which a shell hears while it waits.
    trap 'sync; poweroff -f' USR1 USR2
    trap 'sync; reboot -f' TERM
    setsid cttyhack sh -l &
    wait $!
fi
sync
poweroff -f
