//! Which addresses programs of the guest may connect to.
//!
//! The decision is made where the kernel asks its security modules, with the address that it has copied: a program that changes
//! its own copy meanwhile gains nothing.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::{Event, Problem, Request, Rights, Service, Stops};

/// `int security_socket_connect(struct socket *, struct sockaddr *, int)`.
const ASKED: &str = "return:security_socket_connect";
const EACCES: i64 = 13;
const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;
/// Bytes of an address of IPv6.
const LONGEST: usize = 28;

/// An attempt to connect.
#[derive(Clone, Debug)]
pub struct Attempt {
    /// Who, and when.
    pub event: Event,
    /// Where to.
    pub address: SocketAddr,
    /// It was let through.
    pub allowed: bool,
}

/// A policy in force, until it is dropped.
pub struct Policy {
    service: Service,
    allows: Box<dyn FnMut(&SocketAddr) -> bool + Send>,
}

impl Policy {
    /// Only what `allows` says may be connected to from now on. Local sockets are not asked about.
    ///
    /// # Errors
    /// As [`Service::connect`].
    pub fn new(
        machine: &str,
        allows: impl FnMut(&SocketAddr) -> bool + Send + 'static,
    ) -> Result<Self, Problem> {
        let (events, memory, registers) = (vec![ASKED.to_owned()], Rights::Read, Rights::Write);
        let request =
            Request { events, stops: Stops::Entry, memory, registers, ..Request::default() };
        Ok(Self { service: Service::connect(machine, &request)?, allows: Box::new(allows) })
    }

    /// Waits for the next attempt and decides it; `None` once the machine has ended.
    ///
    /// # Errors
    /// The connection fails. Nothing is denied any more then.
    pub fn next_attempt(&mut self) -> Result<Option<Attempt>, Problem> {
        loop {
            let Some(event) = self.service.next_event()? else { return Ok(None) };
            let (vcpu, at) = (event.vcpu, event.values.get(1).copied().unwrap_or_default());
            let bytes = self.service.read(Some(vcpu), at, LONGEST)?;
            let Some(address) = address(&bytes) else {
                self.service.go(vcpu)?;
                continue;
            };
            let allowed = (self.allows)(&address);
            if allowed {
                self.service.go(vcpu)?;
            } else {
                self.service.reply(vcpu, -EACCES)?;
            }
            return Ok(Some(Attempt { event, address, allowed }));
        }
    }
}

/// The address of `struct sockaddr`, if it is one of the Internet's.
fn address(bytes: &[u8]) -> Option<SocketAddr> {
    let family = u16::from_le_bytes(*bytes.first_chunk()?);
    let port = u16::from_be_bytes(*bytes.get(2..)?.first_chunk()?);
    let ip = match family {
        AF_INET => IpAddr::V4(Ipv4Addr::from(*bytes.get(4..)?.first_chunk::<4>()?)),
        AF_INET6 => IpAddr::V6(Ipv6Addr::from(*bytes.get(8..)?.first_chunk::<16>()?)),
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_those_of_the_internet() {
        let v4 = address(b"\x02\0\x1f\x90\x7f\0\0\x01").expect("one");
        assert_eq!(v4.to_string(), "127.0.0.1:8080");
        let v6 = address(&[&b"\x0a\0\0\x50\0\0\0\0"[..], &[0; 15], &[1]].concat()).expect("one");
        assert_eq!(v6.to_string(), "[::1]:80");
        assert!(address(b"\x01\0/run/socket").is_none() && address(b"\x02\0\x1f").is_none());
    }
}
