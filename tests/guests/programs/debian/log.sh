# After all that, neither the kernel nor systemd has a complaint.
bad='BUG:|Oops|WARNING:|general protection|invalid opcode|segfault at|traps:|rcu.* stall|soft lockup|blocked for more than|EXT4-fs error|I/O error|Call Trace'
if dmesg | grep -E "$bad"; then exit 1; fi
test -z "$(systemctl --failed --no-legend | tee /dev/stderr)"
echo "$(dmesg | wc -l) lines" >&3
