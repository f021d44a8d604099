#!/bin/sh
# Linux's locktorture or rcutorture in ring3, while its CPUs go and come back.
#
# Debian builds neither: they are made here from its source against its headers. As root, once:
#     apt-get install linux-headers-amd64 linux-source-6.1 busybox-static cpio
#     (cd FOLDER && apt-get download "$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: //p')")
# It ends with 0 if the test ended with SUCCESS and the kernel complained of nothing.
set -eu
usage="usage: torture.sh lock|rcu SECONDS CPUS FOLDER [PARAMETER=VALUE] (FOLDER has the kernel's package)"
[ $# -ge 4 ] || { echo "$usage" >&2; exit 2; }
kind=$1 seconds=$2 cpus=$3 folder=$4
shift 4
case $kind in lock | rcu) ;; *) echo "$usage" >&2; exit 2 ;; esac
ring3=${RING3:-$(dirname "$0")/../../target/release/ring3}

package=$(ls "$folder"/linux-image-6.1.*-amd64_*.deb | tail -n 1)
release=$(basename "$package" | sed 's/linux-image-\([^_]*\)_.*/\1/')
headers=/lib/modules/$release/build
[ -e "$headers" ] || { echo "torture.sh: there are no headers of $release in $headers" >&2; exit 2; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
dpkg-deb -x "$package" "$work/image"

source=linux-source-6.1
mkdir "$work/modules"
tar -xJf /usr/src/$source.tar.xz -C "$work/modules" --strip-components=2 $source/kernel/torture.c \
    $source/kernel/locking/locktorture.c $source/kernel/rcu/rcutorture.c $source/kernel/rcu/rcu.h
cd "$work/modules"
mv rcu/rcutorture.c locking/locktorture.c .
cat > aside.h << 'END'
#include <linux/sched.h>
/* The kernel has this one only if it is built with rcutorture. */
#define rcutorture_sched_setaffinity(pid, mask) set_cpus_allowed_ptr(current, mask)
END
cat > Makefile << 'END'
obj-m += torture.o locktorture.o rcutorture.o
ccflags-y += -I$(src) -I$(src)/rcu -include $(src)/aside.h
END
make -s -C "$headers" M="$PWD" modules > make.log 2>&1 || { cat make.log >&2; exit 1; }
cd - > /dev/null

root=$work/root
mkdir -p "$root/bin" "$root/proc" "$root/sys" "$root/dev"
cp "$work"/modules/*.ko "$root"
cp "$(command -v busybox)" "$root/bin/busybox"
cat > "$root/init" << END
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
echo 7 > /proc/sys/kernel/printk
insmod /torture.ko
insmod /${kind}torture.ko stat_interval=30 verbose=0 onoff_interval=10 $*
sleep $seconds
rmmod ${kind}torture
poweroff -f
END
chmod +x "$root/init"
(cd "$root" && find . | cpio --quiet -o -H newc | gzip -1) > "$work/initrd"

console=$work/console
"$ring3" run --kernel "$work/image/boot/vmlinuz-$release" --initrd "$work/initrd" --cpus "$cpus" --memory 1G \
    --append "console=ttyS0 panic=-1 quiet rdinit=/init" --timeout $((seconds * 2 + 120)) > "$console" < /dev/null
grep -a torture "$console" || true
if grep -a -E 'BUG:|WARNING:|soft lockup|detected stalls|Call Trace|!!!' "$console"; then exit 1; fi
grep -a -q 'End of test: SUCCESS' "$console"
