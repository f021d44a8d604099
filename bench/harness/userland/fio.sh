# A disk's first 64 MB: written in order and read back, or read 4 KB at a time at random; fio verifies what it reads.
# The device's own caching is the host's; the guest's is passed by, where it can be.
case $BENCH_DISK in /dev/*) direct=1 ;; *) direct=0 ;; esac
common="--name=bench --filename=$BENCH_DISK --size=64M --direct=$direct --ioengine=psync --thread --verify=crc32c
    --verify_fatal=1 --output-format=terse --output=/dev/null --allow_mounted_write=0"
case $1 in
clean) [ $direct = 1 ] || /bin/busybox rm -f $BENCH_DISK ;;
prepare) /usr/bin/fio $common --rw=write --bs=4k --verify_interval=4k --do_verify=0 || exit 1 ;;
random) /usr/bin/fio $common --rw=randread --bs=4k --io_size=16M --norandommap || exit 1 ;;
sequential) /usr/bin/fio $common --rw=write --bs=1M --verify_interval=4k --do_verify=1 --end_fsync=1 || exit 1 ;;
esac
exit 42
