# Rules between two network namespaces drop, count and redirect, and no more once they are gone.
ip netns add other
ip link add near type veth peer name far netns other
ip address add 10.9.0.1/24 dev near
ip link set near up
ip -n other address add 10.9.0.2/24 dev far
ip -n other link set far up
pings() { ip netns exec other ping -q -c 5 -i 0.2 -W 1 10.9.0.1 | sed -n 's/.* \([0-9]*\) received.*/\1/p'; }
page='exec 5<>/dev/tcp/10.9.0.1/8081; printf "GET / HTTP/1.0\r\n\r\n" >&5; head -n 1 <&5'
fetch() { ip netns exec other bash -c "$page"; }
counted() { nft list chain inet work $1 | sed -n 's/.*counter packets \([0-9]*\) .*/\1/p'; }
test "$(pings)" = 5
nft -f - << END
table inet work {
    chain in { type filter hook input priority 0; iifname near icmp type echo-request counter drop; }
    chain to { type nat hook prerouting priority -100; iifname near tcp dport 8081 counter redirect to :80; }
}
END
test "$(pings)" = 0
test "$(counted in)" = 5
fetch | grep '200 OK'
test "$(counted to)" = 1
nft delete table inet work
test "$(pings)" = 5
if fetch; then exit 1; fi
ip netns delete other
echo "5 of 5 pings dropped, 1 connection redirected" >&3
