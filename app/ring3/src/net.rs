//! `--net`: what a network interface is connected to.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    str::FromStr,
    sync::Arc,
};

use faults::{Plug, PluggedNet, Rogue, Target};
use usernet::{Forward, NetworkConfig, Reach};
use vhost_user::{Nearness, Reserve, Served};
use virtio::{NET_RECEIVE, Net, NetBackend, Notify, VirtioDevice};
use vmm::Attachment;

use crate::{
    failure::Failure,
    foreign,
    injection::{self, Elsewhere, Faults, Injection},
    servers,
    values::DevicesChoice,
};

/// A network interface.
#[derive(Clone, Debug)]
pub struct NetArgument {
    kind: Kind,
    mac: Option<[u8; 6]>,
    /// All of this as it was given.
    text: String,
}

/// Sets who is told of frames for the guest.
pub type Connect = Box<dyn FnOnce(Notify) + Send>;

/// Starts an interface whose descriptors are open. Returns its body, and what connects the doorbell for received frames.
pub type Open = Box<dyn FnOnce() -> Result<(Interface, Connect), Failure>>;

/// An interface that has yet to be given its queues.
pub struct Interface {
    net: Net,
    rogue: Option<Rogue>,
}

impl Interface {
    /// Its body, with so many pairs of queues.
    pub fn with_pairs(self, pairs: u16) -> Box<dyn VirtioDevice> {
        let net = Box::new(self.net.with_pairs(pairs));
        match self.rogue {
            Some(rogue) => rogue.spoil(net),
            None => net,
        }
    }
}

/// What it is connected to.
#[derive(Clone, Debug)]
enum Kind {
    /// A network of ours.
    User { forwards: Vec<Forward>, name_server: Option<SocketAddr>, reach: Reach },
    /// passt's.
    Passt { forwards: Vec<Forward> },
    /// The other machine that was given this path.
    Socket { path: PathBuf },
    /// A device of the host.
    Tap { name: String },
    /// What another program serves.
    Foreign { socket: PathBuf },
}

impl FromStr for NetArgument {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = text.split(',');
        let kind = Kind::named(words.next().unwrap_or_default())?;
        let mut net = Self { kind, mac: None, text: text.to_owned() };
        words.try_for_each(|word| net.option(word))?;
        net.kind.check().map(|()| net)
    }
}

impl Kind {
    fn named(name: &str) -> Result<Self, String> {
        if let Some(socket) = name.strip_prefix(foreign::PREFIX) {
            return Ok(Self::Foreign { socket: socket.into() });
        }
        match name {
            "user" => {
                let (forwards, name_server, reach) = Default::default();
                Ok(Self::User { forwards, name_server, reach })
            }
            "passt" => Ok(Self::Passt { forwards: Vec::new() }),
            "socket" => Ok(Self::Socket { path: PathBuf::new() }),
            "tap" => Ok(Self::Tap { name: String::new() }),
            _ => Err(format!(
                "unknown network `{name}`; there are user, passt, socket, tap and vhost-user:SOCKET"
            )),
        }
    }

    fn options(&self) -> &'static str {
        match self {
            Self::User { .. } => "hostfwd=, dns=, mac=, restrict, allow=",
            Self::Passt { .. } => "hostfwd=, mac=",
            Self::Socket { .. } => "path=, mac=",
            Self::Tap { .. } => "ifname=, mac=",
            Self::Foreign { .. } => "mac=",
        }
    }

    fn check(&self) -> Result<(), String> {
        match self {
            Self::Socket { path } if path.as_os_str().is_empty() => {
                Err("path= is missing: socket,path=FILE".to_owned())
            }
            Self::Tap { name } if name.is_empty() => {
                Err("ifname= is missing: tap,ifname=NAME".to_owned())
            }
            Self::Foreign { socket } if socket.as_os_str().is_empty() => {
                Err("give a socket: vhost-user:SOCKET".to_owned())
            }
            _ => Ok(()),
        }
    }
}

impl NetArgument {
    fn option(&mut self, word: &str) -> Result<(), String> {
        match (word.split_once('='), &mut self.kind) {
            (Some(("mac", mac)), _) => self.mac = Some(parse_mac(mac)?),
            (
                Some(("hostfwd", forward)),
                Kind::User { forwards, .. } | Kind::Passt { forwards },
            ) => forwards.push(forward.parse().map_err(|error| format!("hostfwd: {error}"))?),
            (Some(("dns", address)), Kind::User { name_server, .. }) => {
                *name_server = Some(parse_name_server(address)?);
            }
            (None, Kind::User { reach, .. }) if word == "restrict" => reach.restrict(),
            (Some(("allow", rule)), Kind::User { reach, .. }) => {
                reach.allow(rule.parse().map_err(|error| format!("allow: {error}"))?)?;
            }
            (Some(("path", file)), Kind::Socket { path }) => *path = file.into(),
            (Some(("ifname", device)), Kind::Tap { name }) => *name = device.to_owned(),
            (_, kind) => {
                return Err(format!("unknown option `{word}`; there are {}", kind.options()));
            }
        }
        Ok(())
    }

    /// What a process that serves it may do.
    pub fn served(&self) -> Served {
        if self.is_user() { Served::Network } else { Served::Cable }
    }

    /// Whether ring3 serves it, so that it can have faults.
    pub fn is_ours(&self) -> bool {
        !matches!(self.kind, Kind::Foreign { .. } | Kind::Passt { .. })
    }

    /// Whether it has the addresses of [`usernet`].
    pub fn is_user(&self) -> bool {
        matches!(self.kind, Kind::User { .. })
    }

    /// Starts the network. An interface whose link a fault takes down can tell its driver of that.
    fn attach(
        &self,
        index: usize,
        devices: DevicesChoice,
        pairs: u16,
        faults: Option<&Injection>,
    ) -> Result<Attachment, Failure> {
        let attachment = self.attach_whole(index, devices, pairs, faults)?;
        let plug = faults.and_then(|faults| faults.plug(Target::Net(index)));
        Ok(match plug {
            Some(plug) => plugged(attachment, plug),
            None => attachment,
        })
    }

    fn attach_whole(
        &self,
        index: usize,
        devices: DevicesChoice,
        pairs: u16,
        faults: Option<&Injection>,
    ) -> Result<Attachment, Failure> {
        let target = Target::Net(index);
        let mac = self.mac.unwrap_or_else(|| self.own_mac(index as u8));
        match (&self.kind, devices) {
            (Kind::Foreign { socket }, _) => foreign::net(socket, mac),
            (Kind::Passt { forwards }, _) => foreign::passt(forwards, mac),
            (_, DevicesChoice::Inline) => {
                self.inline(mac, pairs, faults.and_then(|faults| faults.inline(target)), index)
            }
            (_, DevicesChoice::Processes | DevicesChoice::Near | DevicesChoice::Apart) => {
                let faults = faults.and_then(|faults| faults.elsewhere(target));
                self.in_a_process(mac, pairs, faults, index)
            }
        }
    }

    fn inline(
        &self,
        mac: [u8; 6],
        pairs: u16,
        faults: Option<Faults>,
        index: usize,
    ) -> Result<Attachment, Failure> {
        let (net, connect) = self.open(mac, faults, index)?()?;
        Ok(Attachment::new(net.with_pairs(pairs), |doorbell| {
            connect(Arc::new(move || doorbell.ring(NET_RECEIVE)));
        }))
    }

    fn in_a_process(
        &self,
        mac: [u8; 6],
        pairs: u16,
        faults: Option<Elsewhere>,
        index: usize,
    ) -> Result<Attachment, Failure> {
        let mac: Vec<_> = mac.iter().map(|byte| format!("{byte:02x}")).collect();
        let (mac, pairs) = (mac.join(":"), pairs.to_string());
        let mut words = ["net", "--mac", &mac, "--pairs", &pairs].map(str::to_owned).to_vec();
        words.extend(faults.iter().flat_map(Elsewhere::words));
        words.extend(["--", &index.to_string(), &self.text].map(str::to_owned));
        let cut: Reserve = |config| Box::new(Net::cut(config));
        let mut attachment =
            servers::attach(words, "--net", Some(cut), Nearness::Apart, faults.into())?;
        if let Kind::Socket { path } = &self.kind {
            let (path, release) = (path.clone(), attachment.release);
            attachment.release = Box::new(move || {
                release();
                cables::forget(&path);
            });
        }
        Ok(attachment)
    }

    /// Opens what the interface is connected to; what is returned starts it.
    pub fn open(
        &self,
        mac: [u8; 6],
        faults: Option<Faults>,
        index: usize,
    ) -> Result<Open, Failure> {
        match &self.kind {
            Kind::User { forwards, name_server, reach } => {
                let (forwards, reach) = (forwards.clone(), reach.clone());
                let mut config = NetworkConfig { forwards, reach, ..NetworkConfig::default() };
                config.name_server = name_server.or(config.name_server);
                let network = usernet::open(&config).map_err(user_failure)?;
                Ok(Box::new(move || {
                    let cable = network.start().map_err(user_failure)?;
                    let connect = Box::new(cable.ringer());
                    interface(Box::new(cable), connect, mac, faults, index)
                }))
            }
            Kind::Socket { path } => wire(cables::socket(path), mac, faults, index),
            Kind::Tap { name } => wire(cables::tap(name), mac, faults, index),
            Kind::Passt { .. } | Kind::Foreign { .. } => Err(Failure::usage(
                "passt and vhost-user:SOCKET are served by another program already: give user, socket or tap",
            )),
        }
    }

    /// An address for who gave none. Networks of one guest may all have the same; others need one of their own.
    pub fn own_mac(&self, index: u8) -> [u8; 6] {
        match &self.kind {
            Kind::User { .. } | Kind::Passt { .. } => [0x52, 0x54, 0x00, 0x12, 0x34, 0x56 + index],
            Kind::Socket { .. } | Kind::Tap { .. } | Kind::Foreign { .. } => {
                let [a, b, c, d] = std::process::id().to_be_bytes();
                [0x52, 0x54 ^ index, a, b, c, d]
            }
        }
    }
}

/// An interface with a cable that can be pulled.
fn plugged(attachment: Attachment, plug: Plug) -> Attachment {
    let device = Box::new(PluggedNet::new(attachment.device, plug.clone()));
    injection::connect(Attachment { device, ..attachment }, plug)
}

fn wire(
    ready: Result<cables::Ready, cables::CableError>,
    mac: [u8; 6],
    faults: Option<Faults>,
    index: usize,
) -> Result<Open, Failure> {
    let ready = ready.map_err(wire_failure)?;
    Ok(Box::new(move || {
        let wire = ready.start().map_err(wire_failure)?;
        let connect = Box::new(wire.ringer());
        interface(Box::new(wire), connect, mac, faults, index)
    }))
}

/// The interface at the end of a cable, which may have faults.
fn interface(
    cable: Box<dyn NetBackend>,
    connect: Connect,
    mac: [u8; 6],
    faults: Option<Faults>,
    index: usize,
) -> Result<(Interface, Connect), Failure> {
    let Some(faults) = faults else {
        return Ok((Interface { net: Net::new(cable, mac), rogue: None }, connect));
    };
    let (cable, rogue) = faults.of_net(cable, index)?;
    let ringer = cable.ringer();
    let connect_both: Connect = Box::new(move |ring| {
        connect(Arc::clone(&ring));
        ringer(ring);
    });
    let net = Net::new(Box::new(cable), mac);
    Ok((Interface { net, rogue: Some(rogue) }, connect_both))
}

fn wire_failure(error: cables::CableError) -> Failure {
    match error {
        cables::CableError::Host(_) => Failure::host(format!("--net: {error}")),
        _ => Failure::usage(format!("--net: {error}")),
    }
}

fn user_failure(error: usernet::GatewayError) -> Failure {
    match error {
        usernet::GatewayError::Forward { .. } => Failure::usage(format!("--net: {error}")),
        usernet::GatewayError::Host(_) => Failure::host(format!("--net: {error}")),
    }
}

fn parse_name_server(text: &str) -> Result<SocketAddr, String> {
    let address = text.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, 53));
    let address = address.or_else(|_| text.parse());
    address.map_err(|_| format!("`{text}` is not a name server such as 192.0.2.1 or 127.0.0.1:53"))
}

/// An interface's address.
pub fn parse_mac(text: &str) -> Result<[u8; 6], String> {
    let wrong = || format!("`{text}` is not a unicast address such as 52:54:00:12:34:56");
    let bytes: Result<Vec<_>, _> = text.split(':').map(|b| u8::from_str_radix(b, 16)).collect();
    let mac: [u8; 6] = bytes.map_err(|_| wrong())?.try_into().map_err(|_| wrong())?;
    if mac[0] & 1 == 1 || mac == [0; 6] { Err(wrong()) } else { Ok(mac) }
}

/// Starts the networks of all interfaces, each with a pair of queues for each virtual CPU.
pub fn attach(
    nets: &[NetArgument],
    devices: DevicesChoice,
    cpus: u32,
    faults: Option<&Injection>,
) -> Result<Vec<Attachment>, Failure> {
    let (pairs, nets) = (cpus as u16, nets.iter().enumerate());
    nets.map(|(index, net)| net.attach(index, devices, pairs, faults)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms() {
        let parse = |text: &str| text.parse::<NetArgument>().expect(text);
        let user = parse("user").kind;
        assert!(
            matches!(user, Kind::User { forwards, reach: Reach::Everything, .. } if forwards.is_empty())
        );
        let all = "user,hostfwd=tcp::8080-:80,hostfwd=udp::53-:53,mac=02:00:00:00:00:01,restrict,\
                   allow=10.0.2.2:5432,allow=192.168.0.0/16:*";
        let net = parse(all);
        assert_eq!(net.mac, Some([2, 0, 0, 0, 0, 1]));
        let Kind::User { forwards, reach: Reach::Public(rules), .. } = net.kind else {
            panic!("{net:?}");
        };
        assert_eq!((forwards.len(), rules.len()), (2, 2));
        let passt = parse("passt,hostfwd=tcp::8080-:80").kind;
        assert!(matches!(passt, Kind::Passt { forwards } if forwards.len() == 1));
        let socket = parse("socket,path=/run/cable").kind;
        assert!(matches!(socket, Kind::Socket { path } if path.to_str() == Some("/run/cable")));
        assert!(matches!(parse("tap,ifname=tap0").kind, Kind::Tap { name } if name == "tap0"));
        let foreign = parse("vhost-user:/run/a:b.sock,mac=02:00:00:00:00:01").kind;
        let expected = PathBuf::from("/run/a:b.sock");
        assert!(matches!(foreign, Kind::Foreign { socket } if socket == expected));
    }

    #[test]
    fn mistakes_are_named() {
        for (text, part) in [
            ("bridge", "unknown network `bridge`"),
            ("tap", "ifname= is missing"),
            ("socket", "path= is missing"),
            ("socket,path=x,hostfwd=tcp::1-:1", "there are path="),
            ("passt,restrict", "there are hostfwd="),
            ("vhost-user:", "give a socket"),
            ("vhost-user:x,restrict", "there are mac="),
            ("", "unknown network"),
            ("user,fast", "unknown option `fast`"),
            ("user,allow=10.0.0.1:80", "restrict comes before"),
            ("user,restrict,allow=10.0.0.1", "not a rule"),
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
        let failure =
            attach(&[net], DevicesChoice::Inline, 1, None).err().expect("the port is taken");
        assert_eq!(failure.code, 2);
        assert!(failure.to_string().contains(&port.to_string()), "{failure}");
    }
}
