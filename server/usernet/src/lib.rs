//! A network for one guest, without privileges.
//!
//! The guest sees an Ethernet with a gateway, a name server and a DHCP server; connections it makes
//! become ordinary sockets of this process, and forwarded ports of the host become connections to
//! it. Nothing else of the host's network is visible, and nothing needs a privilege.
//!
//! | address | is |
//! |---|---|
//! | 10.0.2.15 | the guest, as DHCP tells it |
//! | 10.0.2.2 | the gateway; for TCP and UDP, the host's own loopback |
//! | 10.0.2.3 | the host's name server |
//!
//! # Parts
//!
//! - `link`: the cable. Two bounded queues of frames between the device and the gateway's thread.
//! - `frames`, `dhcp`: bytes to meaning and back, by smoltcp's wire formats.
//! - `tcp`: smoltcp's sockets on the guest's side, the host's on the other, bytes between them.
//! - `udp`: one host socket per pair of guest and remote ports, forgotten when idle.
//! - `reach`: which addresses there are for the guest.
//! - `gateway`: who gets which packet, and the thread that waits for all of them.
//!
//! # Hostile guests
//!
//! Frames are parsed by checked accessors only. What the guest can make us hold is bounded: frames
//! under way, connections, UDP ports. A guest that exceeds a bound loses frames or connections; the host
//! process keeps its file descriptors. The host's loopback is reachable through the gateway's address
//! only, and what else is near the host as [`NetworkConfig::reach`] says.
//!
//! IPv6, fragments, and ICMP beyond the gateway are not carried.

mod dhcp;
mod forward;
#[cfg(test)]
mod frame_tests;
mod frames;
mod gateway;
mod link;
mod reach;
mod tcp;
mod udp;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

pub use forward::{Forward, ForwardError, Protocol};
pub use gateway::Network;
pub use link::Cable;
pub use reach::{Allow, AllowError, Reach};

use reach::NearNetworks;

/// The guest's address.
pub const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
/// The gateway, which is the host.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
/// The name server.
pub const NAME_SERVER: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 3);
/// Bits of the network's prefix.
pub const PREFIX: u8 = 24;
/// Where names are asked for.
const DNS_PORT: u16 = 53;
/// The largest IP packet: a multiple of 4 below 64 KiB, so that bulk data needs no segmentation.
pub const MTU: u16 = 65_520;

/// What the network offers.
#[derive(Clone, Debug)]
pub struct NetworkConfig {
    /// UdpPorts of the host that lead to the guest.
    pub forwards: Vec<Forward>,
    /// Where names are asked for; none: the guest gets no answers.
    pub name_server: Option<SocketAddr>,
    /// What the guest may reach. The name server it may always ask.
    pub reach: Reach,
}

impl Default for NetworkConfig {
    /// No forwarded ports, the host's first name server, everything to be reached.
    fn default() -> Self {
        let (forwards, reach) = Default::default();
        Self { forwards, name_server: host_name_server(), reach }
    }
}

/// Why there is no network.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// A port to be forwarded cannot be listened on.
    #[error("cannot forward {forward}: {error}; choose another address or port")]
    Forward {
        /// What was asked for.
        forward: Forward,
        /// What the host said.
        error: std::io::Error,
    },
    /// The host gives no poll descriptor or thread.
    #[error("cannot start the network: {0}")]
    Host(#[from] std::io::Error),
}

/// Opens the ports of a network, which has no thread yet: a process that is to give up rights can do so before it has any.
///
/// # Errors
/// See [`GatewayError`].
pub fn open(config: &NetworkConfig) -> Result<Network, GatewayError> {
    Network::open(config)
}

/// Starts a network; returns the guest's end of the cable. It ends when the cable is dropped.
///
/// # Errors
/// See [`GatewayError`].
pub fn start(config: &NetworkConfig) -> Result<Cable, GatewayError> {
    open(config)?.start()
}

/// The first name server in /etc/resolv.conf.
fn host_name_server() -> Option<SocketAddr> {
    first_name_server(&std::fs::read_to_string("/etc/resolv.conf").ok()?)
}

fn first_name_server(text: &str) -> Option<SocketAddr> {
    let servers = text.lines().filter_map(|line| line.trim().strip_prefix("nameserver"));
    let mut addresses = servers.filter_map(|rest| rest.trim().parse::<IpAddr>().ok());
    addresses.next().map(|address| SocketAddr::new(address, DNS_PORT))
}

/// What the guest may reach, and how its addresses become the host's.
#[derive(Debug)]
struct Targets {
    name_server: Option<SocketAddr>,
    reach: Reach,
    near: NearNetworks,
}

impl Targets {
    fn new(config: &NetworkConfig) -> Self {
        let (name_server, reach) = (config.name_server, config.reach.clone());
        let near = if reach == Reach::Everything {
            NearNetworks::default()
        } else {
            NearNetworks::of_this_host()
        };
        Self { name_server, reach, near }
    }

    /// Where the host connects to for an address the guest names; `None` where it may not.
    fn find(&self, to: Ipv4Addr, port: u16) -> Option<SocketAddr> {
        let target = match to {
            NAME_SERVER => return self.name_server.filter(|_| port == DNS_PORT),
            GATEWAY => (Ipv4Addr::LOCALHOST, port).into(),
            _ if to.is_loopback() || to.is_multicast() || to.is_broadcast() => return None,
            _ if to.is_unspecified() || is_ours(to) => return None,
            _ => (to, port).into(),
        };
        self.reach.allows(to.into(), target, &self.near).then_some(target)
    }
}

/// Whether an address belongs to the guest's own network.
fn is_ours(address: Ipv4Addr) -> bool {
    address.octets()[..3] == GATEWAY.octets()[..3]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_servers() {
        let text = "# comment\nsearch example\nnameserver  192.0.2.1\nnameserver ::1\n";
        assert_eq!(first_name_server(text), Some(([192, 0, 2, 1], 53).into()));
        assert_eq!(first_name_server("nameserver fe80::1%eth0\nnothing"), None);
    }

    fn target(reach: Reach, ip: [u8; 4]) -> Option<SocketAddr> {
        let config = NetworkConfig { name_server: None, reach, ..NetworkConfig::default() };
        Targets::new(&config).find(ip.into(), 80)
    }

    #[test]
    fn the_hosts_loopback_is_behind_the_gateway_only() {
        let open = |ip| target(Reach::Everything, ip);
        assert_eq!(open([10, 0, 2, 2]), Some(([127, 0, 0, 1], 80).into()));
        assert_eq!(open([127, 0, 0, 1]), None);
        assert_eq!(open([0, 0, 0, 0]), None);
        assert_eq!(open([10, 0, 2, 99]), None);
        assert_eq!(open([10, 0, 2, 3]), None);
        assert_eq!(open([192, 0, 2, 7]), Some(([192, 0, 2, 7], 80).into()));
        assert_eq!(open([192, 168, 0, 7]), Some(([192, 168, 0, 7], 80).into()));
    }

    #[test]
    fn a_restricted_guest_reaches_the_public_and_what_rules_say() {
        let restricted = |ip| target(Reach::Public(Vec::new()), ip);
        assert_eq!(restricted([10, 0, 2, 2]), None);
        assert_eq!(restricted([192, 168, 0, 7]), None);
        assert_eq!(restricted([169, 254, 169, 254]), None);
        assert_eq!(restricted([203, 0, 113, 7]), Some(([203, 0, 113, 7], 80).into()));
        let rules = || Reach::Public(vec!["10.0.2.2:80".parse().expect("a rule")]);
        assert_eq!(target(rules(), [10, 0, 2, 2]), Some(([127, 0, 0, 1], 80).into()));
        assert_eq!(target(rules(), [10, 0, 2, 3]), None);
        assert_eq!(target(rules(), [127, 0, 0, 1]), None, "nor by its own name");
    }
}
