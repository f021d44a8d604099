# In a new root file system ($1) before its kernel is installed: the initrd gets what this machine needs, no more.
mkdir -p "$1/etc/initramfs-tools/conf.d" "$1/usr/share/initramfs-tools/modules.d"
echo MODULES=list > "$1/etc/initramfs-tools/conf.d/ring3"
printf '%s\n' virtio_pci virtio_blk ext4 > "$1/usr/share/initramfs-tools/modules.d/ring3"
# The modules above make the only disk there is, and the kernel its device: looking for others by udev would be a third of a second.
for step in init-top init-bottom; do mkdir -p "$1/etc/initramfs-tools/scripts/$step"; done
cat > "$1/etc/initramfs-tools/scripts/init-top/udev" << 'END'
#!/bin/sh
exit 0
END
cat > "$1/etc/initramfs-tools/scripts/init-bottom/udev" << 'END'
#!/bin/sh
[ "$1" = prereqs ] && exit 0
mount -n -o move /dev "${rootmnt:?}/dev"
# An initrd has one or the other.
if command -v nuke > /dev/null; then nuke /dev; else rm -rf /dev; fi
ln -s "$rootmnt/dev" /dev
END
chmod 755 "$1"/etc/initramfs-tools/scripts/init-*/udev
