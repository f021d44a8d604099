# A module comes, works and goes, again and again; one in use (it shows this script) stays.
loaded() { grep "^$1 " /proc/modules; }
for round in $(seq 20); do
    modprobe dummy numdummies=2
    loaded dummy
    ip link show dummy1
    rmmod dummy
    if loaded dummy || ip link show dummy1; then exit 1; fi
done
if rmmod virtiofs; then exit 1; fi
loaded virtiofs
test "$(cat /proc/sys/kernel/tainted)" = 0
echo "loaded and unloaded 20 times" >&3
