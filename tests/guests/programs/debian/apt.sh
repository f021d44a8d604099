# Installs what the other workloads need, and checks every file of it against its package; installs and removes one more.
export DEBIAN_FRONTEND=noninteractive
packages="bpftrace busybox-static crun iputils-ping nftables nginx-light openssh-server postgresql runc"
apt-get --quiet update
apt-get --quiet --yes --no-install-recommends install $packages
test -z "$(dpkg --verify $packages postgresql-15 libllvm14 libclang1-14)"
apt-get --quiet --yes install hello
test "$(hello)" = "Hello, world!"
apt-get --quiet --yes purge hello
test ! -e /usr/bin/hello
test -z "$(dpkg --audit)"
echo "$(grep -c ' install ' /var/log/dpkg.log) packages installed" >&3
