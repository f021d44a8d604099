# A library of the C compiler's, there and back.
data=/usr/lib/x86_64-linux-gnu/libm.so.6
[ -e "$data" ] || data=/lib/x86_64-linux-gnu/libm.so.6
/bin/gzip -6 -c "$data" | /bin/gzip -dc | /bin/busybox cmp - "$data" && exit 42
