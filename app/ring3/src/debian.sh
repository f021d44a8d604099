# Makes a disk out of Debian's root file system, by the root of a user namespace or the real one.
# $1: the file system as a tar archive. $2: the disk. $3: its bytes. $4, $5: where kernel and initrd go.
set -eu
umask 022
scratch=$(mktemp -d "$2.XXXXXX")
# What is in it belongs to the namespace's users: nobody outside could remove it.
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' HUP INT TERM
# Device nodes cannot be made in a user namespace, and the kernel provides them.
tar -xf "$1" -C "$scratch" --exclude='./dev/*'
cp "$scratch"/boot/vmlinuz-* "$4"
cp "$scratch"/boot/initrd.img-* "$5"
chmod 644 "$4" "$5"
# Debian has it where ordinary users do not look.
PATH=$PATH:/usr/sbin:/sbin
mke2fs -q -t ext4 -L root -d "$scratch" "$2" "$(($3 / 1024))k"
