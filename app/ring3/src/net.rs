//! `--net`: what a network interface is connected to.

use std::{
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

use usernet::{Config, Forward};
use virtio::{NET_RECEIVE, Net};
use vmm::Attachment;

use crate::failure::Failure;

/// A network interface.
#[derive(Clone, Debug)]
pub struct NetArgument {
    forwards: Vec<Forward>,
    mac: Option<[u8; 6]>,
    name_server: Option<SocketAddr>,
    host_access: bool,
}

impl FromStr for NetArgument {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = text.split(',');
        match words.next() {
            Some("user") => {}
            other => {
                let kind = other.unwrap_or_default();
                return Err(format!("unknown network `{kind}`; the only one so far is `user`"));
            }
        }
        let (forwards, mac, name_server) = Default::default();
        let mut net = Self { forwards, mac, name_server, host_access: true };
        words.try_for_each(|word| net.option(word)).map(|()| net)
    }
}

impl NetArgument {
    fn option(&mut self, word: &str) -> Result<(), String> {
        match word.split_once('=') {
            Some(("hostfwd", forward)) => {
                self.forwards.push(forward.parse().map_err(|e| format!("hostfwd: {e}"))?);
            }
            Some(("mac", mac)) => self.mac = Some(parse_mac(mac)?),
            Some(("dns", address)) => self.name_server = Some(parse_name_server(address)?),
            None if word == "restrict" => self.host_access = false,
            _ => {
                return Err(format!("unknown option `{word}`; there are hostfwd=, mac=, restrict"));
            }
        }
        Ok(())
    }

    fn attach(&self, index: usize) -> Result<Attachment, Failure> {
        let (forwards, host_access) = (self.forwards.clone(), self.host_access);
        let mut config = Config { forwards, host_access, ..Config::default() };
        config.name_server = self.name_server.or(config.name_server);
        let cable = usernet::start(&config).map_err(|error| match error {
            usernet::Error::Forward { .. } => Failure::usage(format!("--net: {error}")),
            usernet::Error::Host(_) => Failure::host(format!("--net: {error}")),
        })?;
        let connect = cable.ringer();
        let mac = self.mac.unwrap_or([0x52, 0x54, 0x00, 0x12, 0x34, 0x56 + index as u8]);
        Ok(Attachment {
            device: Box::new(Net::new(Box::new(cable), mac)),
            connect: Box::new(|doorbell| {
                connect(Box::new(move || doorbell.ring(NET_RECEIVE)));
            }),
        })
    }
}

fn parse_name_server(text: &str) -> Result<SocketAddr, String> {
    let address = text.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, 53));
    let address = address.or_else(|_| text.parse());
    address.map_err(|_| format!("`{text}` is not a name server such as 192.0.2.1 or 127.0.0.1:53"))
}

fn parse_mac(text: &str) -> Result<[u8; 6], String> {
    let wrong = || format!("`{text}` is not a unicast address such as 52:54:00:12:34:56");
    let bytes: Result<Vec<_>, _> = text.split(':').map(|b| u8::from_str_radix(b, 16)).collect();
    let mac: [u8; 6] = bytes.map_err(|_| wrong())?.try_into().map_err(|_| wrong())?;
    if mac[0] & 1 == 1 || mac == [0; 6] { Err(wrong()) } else { Ok(mac) }
}

/// Starts the networks of all interfaces.
pub fn attach(nets: &[NetArgument]) -> Result<Vec<Attachment>, Failure> {
    nets.iter().enumerate().map(|(index, net)| net.attach(index)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms() {
        let net: NetArgument = "user".parse().expect("the least");
        assert!(net.host_access && net.forwards.is_empty());
        let all = "user,hostfwd=tcp::8080-:80,hostfwd=udp::53-:53,mac=02:00:00:00:00:01,restrict";
        let net: NetArgument = all.parse().expect("everything");
        assert_eq!((net.forwards.len(), net.host_access), (2, false));
        assert_eq!(net.mac, Some([2, 0, 0, 0, 0, 1]));
    }

    #[test]
    fn mistakes_are_named() {
        for (text, part) in [
            ("tap", "unknown network `tap`"),
            ("", "unknown network"),
            ("user,fast", "unknown option `fast`"),
            ("user,hostfwd=80", "not a forward"),
            ("user,mac=01:00:00:00:00:01", "unicast"),
            ("user,mac=1:2:3", "unicast"),
            ("user,dns=example.org", "not a name server"),
        ] {
            let error = text.parse::<NetArgument>().expect_err(text);
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_port_in_use_is_named() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = taken.local_addr().expect("an address").port();
        let net: NetArgument = format!("user,hostfwd=tcp::{port}-:80").parse().expect("sound");
        let failure = attach(&[net]).err().expect("the port is taken");
        assert_eq!(failure.code, 2);
        assert!(failure.to_string().contains(&port.to_string()), "{failure}");
    }
}
