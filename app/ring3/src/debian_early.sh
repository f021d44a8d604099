# In a new root file system ($1) before its kernel is installed: the initrd gets what this machine needs, no more.
mkdir -p "$1/etc/initramfs-tools/conf.d" "$1/usr/share/initramfs-tools/modules.d"
echo MODULES=list > "$1/etc/initramfs-tools/conf.d/ring3"
printf '%s\n' virtio_pci virtio_blk ext4 > "$1/usr/share/initramfs-tools/modules.d/ring3"
