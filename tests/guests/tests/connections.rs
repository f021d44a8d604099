//! Ten thousand short connections each way through `--net user`: none is lost, and nothing is left of them.

use std::{
    fs,
    net::{SocketAddr, TcpListener, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use guests::{
    Guest, Machine,
    visits::{self, serve},
};
use xtask::assets::Kernel;

static VISITS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/visits"));

const COUNT: u32 = 10_000;
const PAGE: &str = "hello";
/// Visitors of the guest at once.
const VISITORS: u32 = 4;
/// What its own memory may have grown by, in KiB: less than one for each connection.
const GROWTH: u64 = 16 << 10;

const SCRIPT: &str = "
ifconfig eth0 10.0.2.15 netmask 255.255.255.0 mtu 65520
route add default gw 10.0.2.2
visits serve 80 hello &
visits echo 7 &
visits 10.0.2.2:PORT hello 100
read line
visits 10.0.2.2:PORT hello COUNT
read line
";

/// The process that serves the network.
struct Server(u32);

impl Server {
    /// Its open descriptors.
    fn descriptors(&self) -> Result<usize> {
        Ok(fs::read_dir(format!("/proc/{}/fd", self.0))?.count())
    }

    /// KiB of its own memory, the guest's not counted.
    fn memory(&self) -> Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0))?;
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let number = line.and_then(|line| line.split_whitespace().next());
        Ok(number.context("no RssAnon")?.parse()?)
    }

    /// Waits until connections that only wait for their end have had it.
    fn has_descriptors(&self, expected: usize) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.descriptors()? > expected {
            let open = self.descriptors()?;
            ensure!(Instant::now() < deadline, "{open} descriptors of {expected} before");
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Visits of several visitors at once; how many found the page.
fn visited(server: SocketAddr) -> u32 {
    thread::scope(|scope| {
        let visit = |_| scope.spawn(|| visits::visits(server, PAGE, COUNT / VISITORS));
        let visitors: Vec<_> = (0..VISITORS).map(visit).collect();
        visitors.into_iter().map(|visitor| visitor.join().unwrap_or(0)).sum()
    })
}

/// Datagrams of all sizes come back from the guest.
fn echoed(port: u16) -> Result<()> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    socket.set_read_timeout(Some(Duration::from_secs(5)))?;
    socket.connect(("127.0.0.1", port))?;
    let mut answer = [0; 65_536];
    for len in [0, 1, 1400, 9000, 60_000] {
        let sent = vec![len as u8; len];
        socket.send(&sent)?;
        let count = socket.recv(&mut answer).with_context(|| format!("{len} bytes"))?;
        ensure!(answer[..count] == sent, "{count} of {len} bytes came back");
    }
    Ok(())
}

#[test]
fn ten_thousand_each_way() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let own = listener.local_addr()?.port().to_string();
    thread::spawn(move || serve(&listener, PAGE));
    let (web, udp) = (free_port()?, free_port()?);
    let script = SCRIPT.replace("PORT", &own).replace("COUNT", &COUNT.to_string());
    let forwards = format!("hostfwd=tcp:127.0.0.1:{web}-:80,hostfwd=udp:127.0.0.1:{udp}-:7");
    let guest = Guest::new(Kernel::BookwormCloud).has_program("visits", VISITS).runs(&script);
    let mut machine = Machine::start(&guest.with("--net").with(&format!("user,{forwards}")))?;
    machine.says("100 of 100 visits")?;
    let [server] = machine.processes("net")?[..] else { bail!("not one process serves it") };
    let server = Server(server);
    echoed(udp)?;
    let web = SocketAddr::from(([127, 0, 0, 1], web));
    ensure!(visits::visit(web)? == PAGE, "another page");
    thread::sleep(Duration::from_secs(2)); // for what the first visits left
    let (descriptors, memory) = (server.descriptors()?, server.memory()?);

    let started = Instant::now();
    let found = visited(web);
    ensure!(found == COUNT, "{found} of {COUNT} visits of the guest");
    println!("host to guest: {COUNT} connections in {:?}", started.elapsed());
    server.has_descriptors(descriptors)?;

    let started = Instant::now();
    machine.hears("")?;
    machine.says(&format!("{COUNT} of {COUNT} visits"))?;
    println!("guest to host: {COUNT} connections in {:?}", started.elapsed());
    server.has_descriptors(descriptors)?;

    let grown = server.memory()?.saturating_sub(memory);
    println!("memory: {grown} KiB more than {memory} KiB");
    ensure!(grown < GROWTH, "{grown} KiB more than {memory} KiB");
    echoed(udp)?;
    machine.hears("")?;
    machine.says("init: script ended with 0")?;
    ensure!(machine.ends()?.success());
    Ok(())
}
