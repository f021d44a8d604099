//! Which addresses the guest may reach: all of them, or the public internet and what rules open again.
//!
//! A restricted guest reaches neither this host nor what is near it: no address of the host's, no private, link-local or metadata
//! range, no network that the host is directly on. A name that resolves to such an address helps nobody, because it is the address of
//! each connection that is looked at. Addresses and networks of the host are those of the moment the network starts; whether an
//! address has become the host's own since is asked of its kernel at each connection.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    str::FromStr,
};

use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, getsockname, socket_with};

/// What the guest may reach.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Reach {
    /// What the host reaches, and the host's loopback at the gateway's address.
    #[default]
    Everything,
    /// Public addresses, and those that a rule names.
    Public(Vec<Allow>),
}

impl Reach {
    /// Leaves public addresses only.
    pub fn restrict(&mut self) {
        if *self == Self::Everything {
            *self = Self::Public(Vec::new());
        }
    }

    /// Opens what a rule names.
    ///
    /// # Errors
    /// Nothing is closed that could be opened.
    pub fn allow(&mut self, rule: Allow) -> Result<(), &'static str> {
        match self {
            Self::Everything => Err("everything is allowed already: restrict comes before allow="),
            Self::Public(rules) => {
                rules.push(rule);
                Ok(())
            }
        }
    }

    /// Whether the guest may connect to `port` at `named`, an address as the guest says it, which stands for `target` on the host.
    pub(crate) fn allows(&self, named: IpAddr, target: SocketAddr, near: &NearNetworks) -> bool {
        let Self::Public(rules) = self else { return true };
        let (named, port) = (plain(named), target.port());
        rules.iter().any(|rule| rule.matches(named, port))
            || !(is_near(named) || near.contains(named) || is_of_this_host(target))
    }
}

/// An exception from the restriction: `192.168.1.0/24:443`, `[fd00::1]:5432`, `10.0.2.2:*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allow {
    range: Range,
    /// None: every port.
    port: Option<u16>,
}

/// What is wrong with a rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{text}` is not a rule such as 192.168.1.0/24:443, [fd00::]/8:443 or 10.0.2.2:*: {problem}"
)]
pub struct AllowError {
    text: String,
    problem: &'static str,
}

impl Allow {
    fn matches(&self, address: IpAddr, port: u16) -> bool {
        self.range.contains(address) && self.port.is_none_or(|own| own == port)
    }
}

impl FromStr for Allow {
    type Err = AllowError;

    fn from_str(text: &str) -> Result<Self, AllowError> {
        parse(text).map_err(|problem| AllowError { text: text.to_owned(), problem })
    }
}

fn parse(text: &str) -> Result<Allow, &'static str> {
    let (range, port) = text.rsplit_once(':').ok_or("it ends with a colon and a port, or `*`")?;
    let port = match port {
        "*" => None,
        number => match number.parse() {
            Ok(0) | Err(_) => return Err("a port is a number from 1 to 65535, or `*`"),
            Ok(port) => Some(port),
        },
    };
    let (address, bits) = range.split_once('/').map_or((range, None), |(a, b)| (a, Some(b)));
    let bare = address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let address: IpAddr = match bare {
        Some(bare) => bare.parse::<Ipv6Addr>().map(IpAddr::V6),
        None => address.parse::<Ipv4Addr>().map(IpAddr::V4),
    }
    .map_err(|_| "an address is four numbers, or eight in brackets")?;
    if address.is_loopback() {
        return Err("the guest finds this host's loopback at 10.0.2.2: name that");
    }
    let longest = if address.is_ipv4() { 32 } else { 128 };
    let bits = bits.map_or(Ok(longest), str::parse).map_err(|_| "a prefix is a number of bits")?;
    if bits > longest {
        return Err("the prefix has more bits than the address");
    }
    Ok(Allow { range: Range { address, bits }, port })
}

impl fmt::Display for Allow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Range { address, bits } = self.range;
        match address {
            IpAddr::V4(address) => write!(f, "{address}/{bits}:")?,
            IpAddr::V6(address) => write!(f, "[{address}]/{bits}:")?,
        }
        match self.port {
            Some(port) => write!(f, "{port}"),
            None => write!(f, "*"),
        }
    }
}

/// Addresses that begin with the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    address: IpAddr,
    bits: u32,
}

impl Range {
    const fn v4(a: u8, b: u8, c: u8, d: u8, bits: u32) -> Self {
        Self { address: IpAddr::V4(Ipv4Addr::new(a, b, c, d)), bits }
    }

    const fn v6(first: u16, second: u16, bits: u32) -> Self {
        let address = IpAddr::V6(Ipv6Addr::new(first, second, 0, 0, 0, 0, 0, 0));
        Self { address, bits }
    }

    fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                let differ = u32::from(own) ^ u32::from(other);
                self.bits == 0 || differ >> (32 - self.bits) == 0
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                let differ = u128::from(own) ^ u128::from(other);
                self.bits == 0 || differ >> (128 - self.bits) == 0
            }
            _ => false,
        }
    }
}

/// What is never public: RFC 6890's special ranges, multicast, and where cloud machines find out about themselves.
const NEAR: &[Range] = &[
    Range::v4(0, 0, 0, 0, 8),
    Range::v4(10, 0, 0, 0, 8),
    Range::v4(100, 64, 0, 0, 10), // shared; a cloud's metadata at 100.100.100.200
    Range::v4(127, 0, 0, 0, 8),
    Range::v4(168, 63, 129, 16, 32), // a cloud's metadata, though the address looks public
    Range::v4(169, 254, 0, 0, 16),   // link-local; most clouds' metadata at 169.254.169.254
    Range::v4(172, 16, 0, 0, 12),
    Range::v4(192, 0, 0, 0, 24), // protocol assignments; a cloud's metadata at 192.0.0.192
    Range::v4(192, 88, 99, 0, 24),
    Range::v4(192, 168, 0, 0, 16),
    Range::v4(198, 18, 0, 0, 15),
    Range::v4(224, 0, 0, 0, 3),  // multicast, reserved, broadcast
    Range::v6(0, 0, 16),         // unspecified, loopback, and addresses that hold one of IPv4
    Range::v6(0x64, 0xff9b, 32), // translated to IPv4
    Range::v6(0x100, 0, 64),     // discarded
    Range::v6(0x2001, 0, 23),    // tunnels and the like
    Range::v6(0x2002, 0, 16),    // 6to4, which holds an address of IPv4
    Range::v6(0xfc00, 0, 7),     // private; a cloud's metadata at fd00:ec2::254
    Range::v6(0xfe80, 0, 9),     // link-local and site-local
    Range::v6(0xff00, 0, 8),     // multicast
];

fn is_near(address: IpAddr) -> bool {
    NEAR.iter().any(|range| range.contains(address))
}

/// An IPv4 address in an IPv6 one is that IPv4 address.
fn plain(address: IpAddr) -> IpAddr {
    address.to_canonical()
}

/// The host's addresses, and the networks that it is directly on, as they were when the network was started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NearNetworks(Vec<Range>);

impl NearNetworks {
    /// As the kernel lists its routes. What cannot be read is not there: the ranges that are never public remain.
    pub(crate) fn of_this_host() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let mut near = Self::in_routes(&read("/proc/net/route"), &read("/proc/net/ipv6_route"));
        near.0.extend(own_v4(&read("/proc/net/fib_trie")));
        near.0.extend(read("/proc/net/if_inet6").lines().filter_map(own_v6));
        near
    }

    fn in_routes(v4: &str, v6: &str) -> Self {
        let v4 = v4.lines().filter_map(direct_v4);
        Self(v4.chain(v6.lines().filter_map(direct_v6)).collect())
    }

    fn contains(&self, address: IpAddr) -> bool {
        self.0.iter().any(|range| range.contains(address))
    }
}

/// A line of /proc/net/route, if it is of a network without a gateway: name, destination, gateway, flags, ..., mask as the eighth.
fn direct_v4(line: &str) -> Option<Range> {
    let words: Vec<_> = line.split_whitespace().collect();
    let number = |index: usize| u32::from_str_radix(words.get(index)?, 16).ok();
    let (destination, gateway, mask) = (number(1)?, number(2)?, number(7)?);
    // The words are in memory's order.
    let address = Ipv4Addr::from(destination.to_le_bytes());
    let bits = mask.count_ones();
    (gateway == 0 && bits > 0).then_some(Range { address: address.into(), bits })
}

/// A line of /proc/net/ipv6_route: destination, bits, source, bits, next hop, ...
fn direct_v6(line: &str) -> Option<Range> {
    let words: Vec<_> = line.split_whitespace().collect();
    let number = |index: usize| u128::from_str_radix(words.get(index)?, 16).ok();
    let (address, bits, hop) = (number(0)?, number(1)? as u32, number(4)?);
    let range = Range { address: Ipv6Addr::from(address).into(), bits: bits.min(128) };
    (hop == 0 && bits > 0).then_some(range)
}

/// The addresses in /proc/net/fib_trie that are the host's own: a line with each, and what it is on the next.
fn own_v4(trie: &str) -> Vec<Range> {
    let pairs = trie.lines().zip(trie.lines().skip(1));
    let own = pairs.filter(|(_, what)| what.contains("/32 host LOCAL"));
    let addresses = own.filter_map(|(line, _)| line.trim().strip_prefix("|-- ")?.parse().ok());
    addresses.map(|address| Range { address: IpAddr::V4(address), bits: 32 }).collect()
}

/// A line of /proc/net/if_inet6: an address without colons, and its interface.
fn own_v6(line: &str) -> Option<Range> {
    let address = u128::from_str_radix(line.split_whitespace().next()?, 16).ok()?;
    Some(Range { address: Ipv6Addr::from(address).into(), bits: 128 })
}

/// Whether an address is one of this host's. The kernel gives a socket that is connected to an address of its own that
/// same address (but where it is a second one of an interface: [`NearNetworks`] has those); connecting a datagram socket sends nothing.
fn is_of_this_host(target: SocketAddr) -> bool {
    let family = if target.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let own = || {
        let socket = socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        connect(&socket, &target)?;
        SocketAddr::try_from(getsockname(&socket)?)
    };
    // Where there is no way, there is nothing to keep the guest from.
    own().is_ok_and(|own| own.ip() == target.ip())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect(text)
    }

    fn allowed(rules: &[&str], address: &str, port: u16) -> bool {
        let rules = rules.iter().map(|rule| rule.parse().expect(rule)).collect();
        let (address, near) = (ip(address), NearNetworks::default());
        Reach::Public(rules).allows(address, SocketAddr::new(address, port), &near)
    }

    #[test]
    fn what_is_near_is_closed() {
        for address in [
            "0.0.0.0",
            "10.0.0.1",
            "10.255.255.255",
            "100.100.100.200",
            "127.0.0.1",
            "127.1.2.3",
            "168.63.129.16",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.192",
            "192.168.0.1",
            "198.19.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:10.0.0.1",
            "::10.0.0.1",
            "64:ff9b::a00:1",
            "2002:a00:1::",
            "fd00:ec2::254",
            "fc00::1",
            "fe80::1",
            "fec0::1",
            "ff02::1",
        ] {
            assert!(!allowed(&[], address, 80), "{address}");
            assert!(Reach::Everything.allows(
                ip(address),
                SocketAddr::new(ip(address), 80),
                &NearNetworks::default()
            ));
        }
    }

    #[test]
    fn what_is_public_is_open() {
        for address in
            ["1.1.1.1", "9.255.255.255", "11.0.0.0", "172.15.0.1", "172.32.0.1", "192.169.0.1"]
        {
            assert!(allowed(&[], address, 443), "{address}");
        }
        for address in ["2606:4700::1111", "2a00:1450::1", "::ffff:1.1.1.1"] {
            assert!(allowed(&[], address, 443), "{address}");
        }
    }

    #[test]
    fn rules_open_what_they_name_and_nothing_else() {
        let rules = ["192.168.1.0/24:443", "10.0.2.2:*", "[fd00::]/8:53"];
        for (address, port, expected) in [
            ("192.168.1.7", 443, true),
            ("192.168.1.7", 80, false),
            ("192.168.2.7", 443, false),
            ("10.0.2.2", 1, true),
            ("10.0.2.3", 1, false),
            ("fd12::1", 53, true),
            ("fd12::1", 54, false),
            ("fc12::1", 53, false),
            ("::ffff:192.168.1.7", 443, true),
        ] {
            assert_eq!(allowed(&rules, address, port), expected, "{address} {port}");
        }
        for rule in rules {
            let rule: Allow = rule.parse().expect(rule);
            assert_eq!(rule.to_string().parse(), Ok(rule));
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (text, problem) in [
            ("10.0.0.1", "ends with a colon"),
            ("10.0.0.1:x", "a port is"),
            ("10.0.0.1:0", "a port is"),
            ("10.0.0.1/33:1", "more bits"),
            ("10.0.0.1/x:1", "number of bits"),
            ("fd00::1:1", "in brackets"),
            ("[::1]:1", "10.0.2.2"),
            ("127.0.0.1:80", "10.0.2.2"),
            ("host:80", "four numbers"),
        ] {
            let error = text.parse::<Allow>().expect_err(text).to_string();
            assert!(error.contains(problem) && error.contains(text), "{error}");
        }
    }

    #[test]
    fn networks_the_host_is_on_are_near() {
        let v4 = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n\
                  eth0 00000000 0100A8CB 0003 0 0 0 00000000 0 0 0\n\
                  eth0 007100CB 00000000 0001 0 0 0 00FFFFFF 0 0 0\n\
                  nonsense\n";
        let v6 = "26064700000000000000000000000000 20 00000000000000000000000000000000 00 \
                  00000000000000000000000000000000 00000100 00000001 00000000 00000001 eth0\n";
        let near = NearNetworks::in_routes(v4, v6);
        let closed = |address| {
            let address = ip(address);
            !Reach::Public(Vec::new()).allows(address, SocketAddr::new(address, 1), &near)
        };
        assert!(closed("203.0.113.9") && closed("2606:4700::9"));
        assert!(!closed("203.0.114.9") && !closed("2606:4701::9"));
        assert_eq!(near.0.len(), 2);
    }

    #[test]
    fn the_hosts_own_addresses_are_listed() {
        let trie = "Local:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 203.0.113.9\n        /32 host LOCAL\n\
                    \x20    |-- 203.0.113.255\n        /32 link BROADCAST\n";
        let own: Vec<_> = own_v4(trie).iter().map(|range| range.address).collect();
        assert_eq!(own, [ip("203.0.113.9")]);
        let line = "26064700000000000000000000000009 02 40 00 80     eth0";
        assert_eq!(own_v6(line).map(|range| range.address), Some(ip("2606:4700::9")));
    }

    #[test]
    #[ignore = "run by a keeper: in a network of its own"]
    fn alone() {
        let own = SocketAddr::from(([203, 0, 113, 7], 80));
        let is_open = || Reach::Public(Vec::new()).allows(own.ip(), own, &NearNetworks::default());
        assert!(is_open(), "it is nobody's");
        for words in ["link set lo up", "address add 203.0.113.7/32 dev lo"] {
            let status = Command::new("ip").args(words.split(' ')).status().expect("iproute2");
            assert!(status.success(), "ip {words}");
        }
        assert!(!is_open(), "it is this host's");
    }

    /// When the network started it was nobody's.
    #[test]
    fn an_address_that_the_host_gets_later_is_closed() {
        let program = std::env::current_exe().expect("this program");
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net"]).arg(program);
        command.args(["--exact", "reach::tests::alone", "--ignored", "--nocapture"]);
        let output = command.output().expect("util-linux");
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        if said.contains("unshare: ") {
            eprintln!("SKIPPED: no network can be made here");
            return;
        }
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }

    #[test]
    fn addresses_of_this_host_are_known_by_asking_its_kernel() {
        assert!(is_of_this_host(([127, 0, 0, 1], 9).into()));
        let near = NearNetworks::of_this_host();
        assert!(near.contains(ip("127.0.0.1")), "{near:?}");
        assert!(!is_of_this_host(([192, 0, 2, 1], 9).into()));
    }
}
