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
//! - `gateway`: who gets which packet, and the thread that waits for all of them.
//!
//! # Hostile guests
//!
//! Frames are parsed by checked accessors only. What the guest can make us hold is bounded: frames
//! under way, connections, UDP ports. A guest that exceeds a bound loses frames or connections; the host
//! process keeps its file descriptors. The host's loopback is reachable through the gateway's address
//! only, unless [`Config::host_access`] is off.
//!
//! IPv6, fragments, and ICMP beyond the gateway are not carried.

mod dhcp;
mod forward;
#[cfg(test)]
mod frame_tests;
mod frames;
mod gateway;
mod link;
mod tcp;
mod udp;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

pub use forward::{Forward, ForwardError, Protocol};
pub use link::{Cable, Ring};

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
pub struct Config {
    /// Ports of the host that lead to the guest.
    pub forwards: Vec<Forward>,
    /// Where names are asked for; none: the guest gets no answers.
    pub name_server: Option<SocketAddr>,
    /// The gateway's address leads to the host's loopback.
    pub host_access: bool,
}

impl Default for Config {
    /// No forwarded ports, the host's first name server, host access.
    fn default() -> Self {
        Self { forwards: Vec::new(), name_server: host_name_server(), host_access: true }
    }
}

/// Why there is no network.
#[derive(Debug, thiserror::Error)]
pub enum Error {
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

/// Starts a network; returns the guest's end of the cable. It ends when the cable is dropped.
///
/// # Errors
/// See [`Error`].
pub fn start(config: &Config) -> Result<Cable, Error> {
    gateway::start(config)
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

/// Where the host connects to for an address the guest names; `None` where it may not.
fn host_target(config: &Config, to: Ipv4Addr, port: u16) -> Option<SocketAddr> {
    match to {
        GATEWAY => config.host_access.then(|| (Ipv4Addr::LOCALHOST, port).into()),
        NAME_SERVER => config.name_server.filter(|_| port == DNS_PORT),
        _ if to.is_loopback() || to.is_multicast() || to.is_broadcast() => None,
        _ if to.is_unspecified() || is_ours(to) => None,
        _ => Some((to, port).into()),
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

    #[test]
    fn the_hosts_loopback_is_behind_the_gateway_only() {
        let mut config = Config { name_server: None, ..Config::default() };
        let target = |config: &Config, ip: [u8; 4]| host_target(config, ip.into(), 80);
        assert_eq!(target(&config, [10, 0, 2, 2]), Some(([127, 0, 0, 1], 80).into()));
        assert_eq!(target(&config, [127, 0, 0, 1]), None);
        assert_eq!(target(&config, [0, 0, 0, 0]), None);
        assert_eq!(target(&config, [10, 0, 2, 99]), None);
        assert_eq!(target(&config, [10, 0, 2, 3]), None);
        assert_eq!(target(&config, [192, 0, 2, 7]), Some(([192, 0, 2, 7], 80).into()));
        config.host_access = false;
        assert_eq!(target(&config, [10, 0, 2, 2]), None);
    }
}
