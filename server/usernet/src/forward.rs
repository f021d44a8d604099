//! A port of the host that leads to the guest, as QEMU and podman write it.

use std::{
    fmt,
    net::{Ipv4Addr, SocketAddr},
    str::FromStr,
};

use crate::GUEST;

/// A transport protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Connections.
    Tcp,
    /// Datagrams.
    Udp,
}

/// A port of the host that leads to the guest: `tcp:127.0.0.1:8080-:80`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forward {
    /// What is forwarded.
    pub protocol: Protocol,
    /// Where the host listens.
    pub host: SocketAddr,
    /// The guest's address and port.
    pub guest: (Ipv4Addr, u16),
}

/// What is wrong with a forward.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a forward such as tcp:127.0.0.1:8080-:80: {problem}")]
pub struct ForwardError {
    text: String,
    problem: &'static str,
}

impl FromStr for Forward {
    type Err = ForwardError;

    fn from_str(text: &str) -> Result<Self, ForwardError> {
        parse(text).map_err(|problem| ForwardError { text: text.to_owned(), problem })
    }
}

fn parse(text: &str) -> Result<Forward, &'static str> {
    let (protocol, rest) = text.split_once(':').ok_or("it begins with tcp: or udp:")?;
    let protocol = match protocol {
        "tcp" | "" => Protocol::Tcp,
        "udp" => Protocol::Udp,
        _ => return Err("the protocol is tcp or udp"),
    };
    let (host, guest) = rest.split_once('-').ok_or("a `-` parts the host's from the guest's")?;
    let host = endpoint(host, Ipv4Addr::LOCALHOST)?.into();
    Ok(Forward { protocol, host, guest: endpoint(guest, GUEST)? })
}

/// `ADDRESS:PORT`, either address or colon left out.
fn endpoint(text: &str, default: Ipv4Addr) -> Result<(Ipv4Addr, u16), &'static str> {
    let (address, port) = text.rsplit_once(':').unwrap_or(("", text));
    let port = port.parse().map_err(|_| "a port is a number up to 65535")?;
    let address = match address {
        "" => default,
        text => text.parse().map_err(|_| "an address is four numbers such as 127.0.0.1")?,
    };
    if port == 0 { Err("port 0 is no port") } else { Ok((address, port)) }
}

impl fmt::Display for Forward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let protocol = match self.protocol {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        };
        write!(f, "{protocol}:{}-{}:{}", self.host, self.guest.0, self.guest.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms() {
        let forward: Forward = "tcp:127.0.0.1:8080-:80".parse().expect("a forward");
        assert_eq!(forward.to_string(), "tcp:127.0.0.1:8080-10.0.2.15:80");
        let forward: Forward = "udp::53-10.0.2.15:5353".parse().expect("a forward");
        assert_eq!(forward.to_string(), "udp:127.0.0.1:53-10.0.2.15:5353");
        let forward: Forward = "tcp:0.0.0.0:22-22".parse().expect("a forward");
        assert_eq!(forward.to_string(), "tcp:0.0.0.0:22-10.0.2.15:22");
    }

    #[test]
    fn mistakes_are_named() {
        for (text, problem) in [
            ("8080", "begins with tcp"),
            ("sctp:1-2", "tcp or udp"),
            ("tcp:80", "parts the host's"),
            ("tcp:80-", "up to 65535"),
            ("tcp:99999-80", "up to 65535"),
            ("tcp:0-80", "port 0"),
            ("tcp:localhost:80-80", "four numbers"),
        ] {
            let error = text.parse::<Forward>().expect_err(text).to_string();
            assert!(error.contains(problem) && error.contains(text), "{error}");
        }
    }
}
