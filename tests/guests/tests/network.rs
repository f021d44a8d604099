//! A guest's network: an address by DHCP, the gateway, connections out and in, and names.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream, UdpSocket},
    process::Command,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use guests::{Guest, LEASE, Machine};
use xtask::{assets::Kernel, command::output};

/// Bytes sent each way.
const BULK: usize = 4 << 20;

const SCRIPT: &str = r#"
cat > /lease <<'END'
[ "$1" = bound ] || exit 0
ifconfig $interface $ip netmask $subnet mtu $mtu
route add default gw $router
echo "lease $ip $router $dns $mtu"
END
chmod +x /lease
ifconfig eth0 up
udhcpc -q -f -n -O mtu -i eth0 -s /lease 2>/dev/null
ping -c 2 10.0.2.2 | grep transmitted
head -c 4194304 /dev/zero | timeout 120 nc 10.0.2.2 PORT | md5sum
timeout 60 nc 10.0.2.2 1 </dev/null; echo "refused $?"
nslookup host.example 10.0.2.3 | grep 192.0.2.5
timeout 120 nc -l -p 80 -e cat &
sleep 1; echo ready
wait
echo served
"#;

/// Echoes what it reads, until the end of it, on one connection.
fn echo(listener: &TcpListener) -> std::io::Result<usize> {
    let (mut stream, _) = listener.accept()?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes)?;
    stream.write_all(&bytes)?;
    Ok(bytes.len())
}

/// Echoes so much as [`BULK`] on one connection, which the guest does not end.
fn echo_bulk(listener: &TcpListener) -> std::io::Result<usize> {
    let (mut stream, mut bytes) = (listener.accept()?.0, vec![0; BULK]);
    stream.read_exact(&mut bytes)?;
    stream.write_all(&bytes).map(|()| BULK)
}

/// Answers questions about names: every name has the address 192.0.2.5 and no other records.
fn answer(socket: &UdpSocket) -> std::io::Result<()> {
    const ADDRESS: [u8; 16] = [0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 192, 0, 2, 5];
    let mut buffer = [0; 512];
    loop {
        let (count, from) = socket.recv_from(&mut buffer)?;
        let wants_address = buffer[..count].ends_with(&[0, 1, 0, 1]);
        let mut reply = buffer[..count].to_vec();
        reply[2..4].copy_from_slice(&[0x81, 0x80]);
        reply[7] = u8::from(wants_address);
        reply.extend(ADDRESS.iter().filter(|_| wants_address));
        socket.send_to(&reply, from)?;
    }
}

/// Tries the forwarded port until the guest behind it answers.
fn visit(port: u16) -> Result<Vec<u8>> {
    for _ in 0..400 {
        match visit_once(port) {
            Ok(reply) if !reply.is_empty() => return Ok(reply),
            _ => thread::sleep(Duration::from_secs(1)),
        }
    }
    anyhow::bail!("nobody answered at port {port}")
}

fn visit_once(port: u16) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    stream.write_all(b"hello guest")?;
    stream.shutdown(Shutdown::Write)?;
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply).map(|_| reply)
}

#[test]
fn out_in_and_names() -> Result<()> {
    let (listener, socket) = (TcpListener::bind("127.0.0.1:0")?, UdpSocket::bind("127.0.0.1:0")?);
    let free = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let script = SCRIPT.replace("PORT", &listener.local_addr()?.port().to_string());
    let dns = socket.local_addr()?;
    let echoed = thread::spawn(move || echo(&listener));
    thread::spawn(move || answer(&socket));
    let visited = thread::spawn(move || visit(free));

    let guest = Guest::new(Kernel::BookwormCloud).runs(&script);
    let net = format!("user,dns={dns},hostfwd=tcp:127.0.0.1:{free}-:80");
    let finished = guest.with("--net").with(&net).boots()?;
    finished.prints(&[
        "lease 10.0.2.15 10.0.2.2 10.0.2.3 65520",
        "2 packets transmitted, 2 packets received, 0% packet loss",
        "b5cfa9d6c8febd618f91ac2843d50a1c  -", // 4 MiB of zeroes
        "refused 1",
        "Address: 192.0.2.5",
        "ready",
        "served",
    ])?;
    finished.powers_off()?;
    ensure!(echoed.join().ok().context("the echo failed")?? == BULK, "bytes were lost");
    ensure!(
        visited.join().ok().context("the visit failed")?? == b"hello guest",
        "echoed otherwise"
    );
    Ok(())
}

const RECONNECTS: &str = "
ifconfig eth0 10.0.2.15 netmask 255.255.255.0 mtu 65520
timeout 120 nc 10.0.2.2 PORT </dev/null
read line
until timeout 5 nc 10.0.2.2 PORT </dev/null; do sleep 1; done
timeout 120 nc -l -p 80 -e cat
echo served
";

/// Whoever serves the network is killed; another takes its place, forwarded ports and all.
#[test]
fn a_network_whose_process_is_killed_comes_back() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port().to_string();
    let free = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    thread::spawn(move || -> std::io::Result<()> {
        listener.accept()?.0.write_all(b"first\n")?;
        listener.accept()?.0.write_all(b"second\n")
    });
    let guest = Guest::new(Kernel::BookwormCloud).runs(&RECONNECTS.replace("PORT", &port));
    let net = format!("user,hostfwd=tcp:127.0.0.1:{free}-:80");
    let mut machine = Machine::start(&guest.with("--net").with(&net))?;
    machine.says("first")?;
    let [server] = machine.processes("net")?[..] else { bail!("not one process serves it") };
    output(Command::new("kill").args(["-KILL", &server.to_string()]))?;
    machine.hears("")?;
    machine.says("second")?;
    ensure!(visit(free)? == b"hello guest", "echoed otherwise");
    machine.says("served")?;
    machine.says("init: script ended with 0")?;
    ensure!(machine.ends()?.success());
    Ok(())
}

static HOSTILE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/hostile_frames"));

const ATTACKS: &str = r#"
cat > /lease <<'END'
[ "$1" = bound ] || exit 0
echo "lease $ip $router $dns $mtu"
END
chmod +x /lease
dmesg -n 1
ifconfig eth0 10.0.2.15 netmask 255.255.255.0 mtu 65520
until ping -c 1 -W 1 10.0.2.2 >/dev/null; do :; done
echo begins
hostile_frames eth0
udhcpc -q -f -n -O mtu -i eth0 -s /lease 2>/dev/null
until ping -c 1 -W 1 10.0.2.2 >/dev/null; do :; done
ping -c 2 10.0.2.2 | grep transmitted
nslookup host.example 10.0.2.3 | grep 192.0.2.5
timeout 120 nc -l -p 80 -e cat
echo served
"#;

/// A guest whose root sends what no sound one does has the network afterwards that it had before, served by the same process.
#[test]
fn hostile_frames_are_survived() -> Result<()> {
    let socket = UdpSocket::bind("127.0.0.1:0")?;
    let free = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let net =
        format!("user,restrict,dns={},hostfwd=tcp:127.0.0.1:{free}-:80", socket.local_addr()?);
    thread::spawn(move || answer(&socket));
    let guest = Guest::new(Kernel::BookwormCloud).runs(ATTACKS);
    let guest = guest.has_program("hostile_frames", HOSTILE).with("--net").with(&net);
    let mut machine = Machine::start(&guest)?;
    machine.says("begins")?;
    let before = machine.processes("net")?;
    println!("{}", machine.says("hostile: done")?);
    machine.says("lease 10.0.2.15 10.0.2.2 10.0.2.3 65520")?;
    machine.says("2 packets transmitted, 2 packets received, 0% packet loss")?;
    machine.says("Address: 192.0.2.5")?;
    ensure!(visit(free)? == b"hello guest", "echoed otherwise");
    machine.says("served")?;
    ensure!(before.len() == 1 && before == machine.processes("net")?, "another process serves it");
    machine.says("init: script ended with 0")?;
    ensure!(machine.ends()?.success());
    Ok(())
}

const FIRST: &str = "
ifconfig eth0 10.1.0.1 netmask 255.255.255.0 up
timeout 200 nc -l -p 7 -e cat
echo served
";

const SECOND: &str = "
ifconfig eth0 10.1.0.2 netmask 255.255.255.0 up
until ping -c 1 -W 1 10.1.0.1 >/dev/null; do :; done
until echo hello | timeout 20 nc 10.1.0.1 7; do sleep 1; done
";

/// Two machines that are given the same socket have a cable between them.
#[test]
fn two_machines() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let net = format!("socket,path={}", folder.path().join("cable").display());
    let boots = |script: &str| {
        Guest::new(Kernel::BookwormCloud).runs(script).with("--net").with(&net).boots()
    };
    let (first, second) = thread::scope(|scope| {
        let first = scope.spawn(|| boots(FIRST));
        let second = boots(SECOND);
        (first.join().ok().context("the first machine failed"), second)
    });
    let (first, second) = (first??, second?);
    second.prints(&["hello"])?;
    second.powers_off()?;
    first.prints(&["served"])?;
    first.powers_off()
}

const TAP: &str = "
ifconfig eth0 192.0.2.2 netmask 255.255.255.0 up
until ping -c 1 -W 1 192.0.2.1 >/dev/null; do :; done
ping -c 2 192.0.2.1 | grep transmitted
head -c 4194304 /dev/zero | timeout 120 nc 192.0.2.1 PORT | md5sum
";

/// A network in which we are root, as whoever may make one is.
fn network_of_its_own() -> Command {
    let mut unshare = Command::new("unshare");
    unshare.args(["--user", "--map-root-user", "--net"]);
    unshare
}

/// A tap device leads to the host, where one can be made.
#[test]
fn tap() -> Result<()> {
    let probe = network_of_its_own().args(["ip", "tuntap", "add", "tap0", "mode", "tap"]).output();
    let problem = match &probe {
        Ok(probe) => String::from_utf8_lossy(&probe.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    if !probe.is_ok_and(|probe| probe.status.success()) {
        eprintln!("SKIPPED: no tap device can be made here: {problem}");
        return Ok(());
    }
    let mut inside = network_of_its_own();
    inside.arg(std::env::current_exe()?);
    let said = output(inside.args(["--exact", "tap_inside", "--ignored", "--nocapture"]))?;
    ensure!(said.contains("1 passed"), "{said}");
    Ok(())
}

#[test]
#[ignore = "run by `tap` in a network of its own"]
fn tap_inside() -> Result<()> {
    for words in ["tuntap add tap0 mode tap", "addr add 192.0.2.1/24 dev tap0", "link set tap0 up"]
    {
        output(Command::new("ip").args(words.split(' ')))?;
    }
    let listener = TcpListener::bind("192.0.2.1:0")?;
    let script = TAP.replace("PORT", &listener.local_addr()?.port().to_string());
    let echoed = thread::spawn(move || echo(&listener));
    let guest = Guest::new(Kernel::BookwormCloud).runs(&script);
    let finished = guest.with("--net").with("tap,ifname=tap0").boots()?;
    finished.prints(&[
        "2 packets transmitted, 2 packets received, 0% packet loss",
        "b5cfa9d6c8febd618f91ac2843d50a1c  -",
    ])?;
    finished.powers_off()?;
    ensure!(echoed.join().ok().context("the echo failed")?? == BULK, "bytes were lost");
    Ok(())
}

/// The host ends the first connection: passt of May 2025 loses what comes in once the guest has ended its direction.
const BULKY: &str = "
cat /sys/class/net/eth0/mtu
mkfifo /zeroes; head -c 4194304 /dev/zero > /zeroes &
timeout 120 nc $(cat /router) PORT <> /zeroes | md5sum
timeout 120 nc -l -p 80 -e cat
echo served
";

/// A passt of our own, by vhost-user, leads out and in.
#[test]
fn passt() -> Result<()> {
    let probe = Command::new("passt").args(["--vhost-user", "--print-capabilities"]).output();
    if !probe.is_ok_and(|probe| probe.status.success()) {
        eprintln!(
            "SKIPPED: there is no passt with vhost-user; install the package passt of Debian 13 or later"
        );
        return Ok(());
    }
    let listener = TcpListener::bind("0.0.0.0:0")?;
    let free = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let port = listener.local_addr()?.port().to_string();
    let echoed = thread::spawn(move || echo_bulk(&listener));
    let visited = thread::spawn(move || visit(free));
    let script = format!("{LEASE}{}", BULKY.replace("PORT", &port));
    let net = format!("passt,hostfwd=tcp:127.0.0.1:{free}-:80");
    let finished =
        Guest::new(Kernel::BookwormCloud).runs(&script).with("--net").with(&net).boots()?;
    finished.prints(&["65520", "b5cfa9d6c8febd618f91ac2843d50a1c  -", "served"])?;
    finished.powers_off()?;
    ensure!(!finished.messages.contains("ERROR"), "{}", finished.messages);
    ensure!(echoed.join().ok().context("the echo failed")?? == BULK, "bytes were lost");
    let reply = visited.join().ok().context("the visit failed")??;
    ensure!(reply == b"hello guest", "echoed otherwise");
    Ok(())
}
