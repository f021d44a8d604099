# A container by each runtime, its root an overlay: what it changes is in the upper directory alone.
for runtime in runc crun; do
    mkdir -p $runtime/lower/bin $runtime/upper $runtime/work $runtime/rootfs
    cp /bin/busybox $runtime/lower/bin
    for name in cat hostname rm sh sleep; do ln -s busybox $runtime/lower/bin/$name; done
    mkdir $runtime/lower/proc $runtime/lower/dev $runtime/lower/sys
    echo kept > $runtime/lower/file
    echo gone > $runtime/lower/gone
    echo 'echo "pid $$ on $(hostname): $(cat /file)"; echo changed > /file; rm /gone' > $runtime/lower/job
    echo 'exec sleep 1000' > $runtime/lower/waits
    cd $runtime
    mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work overlay rootfs
    $runtime spec
    sed -i 's/"terminal": true/"terminal": false/; s/"readonly": true/"readonly": false/; s,"sh",&\, "/job",' config.json
    test "$($runtime run one)" = "pid 1 on $(sed -n 's/.*"hostname": "\(.*\)".*/\1/p' config.json): kept"
    test "$(cat upper/file lower/file rootfs/file lower/gone)" = "$(printf 'changed\nkept\nchanged\ngone')"
    test -c upper/gone
    test ! -e rootfs/gone
    sed -i 's,"/job","/waits",' config.json
    $runtime run --detach two > /dev/null 2>&1
    $runtime state two | grep '"status": "running"'
    test "$($runtime exec two cat /file)" = changed
    $runtime kill two KILL
    until $runtime state two | grep '"status": "stopped"'; do sleep 0.2; done
    $runtime delete two
    umount rootfs
    cd ..
    echo "$runtime: 2 containers" >&3
done
