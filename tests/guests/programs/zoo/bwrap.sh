# program: bubblewrap
# does: a container with its own users, processes and files
# needs: bwrap
# version: bwrap --version
# seconds: 60
bwrap --unshare-all --uid 7 --gid 8 --ro-bind /usr /usr --symlink usr/lib /lib --symlink usr/lib64 /lib64 --symlink usr/bin /bin \
    --proc /proc --dev /dev --tmpfs /tmp --hostname inside sh -c 'id -u; id -g; echo $$ > /tmp/x; cat /tmp/x; hostname; ls /; ls /dev | wc -l; ls /proc | grep -c "^[0-9]"'
