# An ext4 file system in a file: what was written is there after it is mounted again.
truncate -s 128M disk
mkfs.ext4 -q disk
mkdir there
mount -o loop disk there
cp -a /usr/lib/x86_64-linux-gnu/perl-base there
umount there
e2fsck -fn disk
mount -o loop disk there
diff -r /usr/lib/x86_64-linux-gnu/perl-base there/perl-base
find there -type f | wc -l | sed 's/$/ files the same/' >&3
umount there
test -z "$(losetup --all)"
