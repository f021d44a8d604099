exec /usr/bin/iperf3 --server --port $1 > /dev/null
