# Programs in the kernel's own text count what they see to the digit, and one on a control group drops packets.
echo 'getppid for 1 .. 1000' > calls
cat > count.bt << 'END'
kprobe:__x64_sys_getppid /pid == cpid/ { @entered = count(); }
kretprobe:__x64_sys_getppid /pid == cpid/ { @left = count(); }
tracepoint:syscalls:sys_enter_getppid /pid == cpid/ { @traced = count(); }
END
bpftrace -c "/usr/bin/perl calls" count.bt > counts
cat counts
for name in entered left traced; do grep "^@$name: 1000$" counts; done
ping -c 1 10.0.2.2
if systemd-run --wait --collect -p IPAddressDeny=any ping -c 1 -W 2 10.0.2.2; then exit 1; fi
systemd-run --wait -p IPAddressDeny=any -p IPAddressAllow=10.0.2.2 ping -c 1 10.0.2.2
echo "3 programs counted 1000 calls each, 1 dropped packets" >&3
