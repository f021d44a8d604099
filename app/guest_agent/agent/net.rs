//! The network: loopback, and the first Ethernet interface with the address the host's gateway gives
//! out anyway, without asking for it.

use std::{fs, io};

use crate::sys;

const SIOCADDRT: u64 = 0x890b;
const SIOCSIFFLAGS: u64 = 0x8914;
const SIOCSIFADDR: u64 = 0x8916;
const SIOCSIFNETMASK: u64 = 0x891c;
const SIOCSIFMTU: u64 = 0x8922;
const AF_INET: u16 = 2;
const IFF_UP: u16 = 1;
const RTF_UP_GATEWAY: u16 = 3;

/// `struct sockaddr_in`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Address {
    family: u16,
    port: u16,
    ip: [u8; 4],
    zero: [u8; 8],
}

/// `struct ifreq` with what this program puts into it.
#[repr(C)]
struct Interface<T> {
    name: [u8; 16],
    value: T,
    zero: [u8; 8],
}

/// `struct rtentry`.
#[repr(C)]
#[derive(Default)]
struct Route {
    pad1: u64,
    target: Address,
    gateway: Address,
    mask: Address,
    flags: u16,
    pad2: u16,
    pad3: [u32; 9],
    pad4: [u64; 2],
}

fn address(ip: [u8; 4]) -> Address {
    Address { family: AF_INET, ip, ..Address::default() }
}

fn interface<T>(name: &str, value: T) -> Interface<T> {
    let mut field = [0; 16];
    field.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from);
    Interface { name: field, value, zero: [0; 8] }
}

/// Brings loopback up, with 127.0.0.1 and ::1, which the kernel gives it then. One without networks has none.
pub fn loopback() {
    let up = (IFF_UP, [0_u8; 14]);
    // As said: programs then find what they would find under such a kernel.
    let _ = sys::inet_socket()
        .and_then(|socket| sys::control(&socket, SIOCSIFFLAGS, &mut interface("lo", up)));
}

/// Brings the network up and tells programs whom to ask for names.
pub fn configure() -> Result<(), String> {
    interfaces().map_err(|error| format!("network: {error}"))?;
    // It may be a link to where nothing is.
    let _ = fs::remove_file("/etc/resolv.conf");
    fs::write("/etc/resolv.conf", "nameserver 10.0.2.3\n")
        .map_err(|error| format!("/etc/resolv.conf: {error}"))
}

fn interfaces() -> io::Result<()> {
    let socket = sys::inet_socket()?;
    let up = (IFF_UP, [0_u8; 14]);
    sys::control(&socket, SIOCSIFADDR, &mut interface("eth0", address([10, 0, 2, 15])))?;
    sys::control(&socket, SIOCSIFNETMASK, &mut interface("eth0", address([255, 255, 255, 0])))?;
    sys::control(&socket, SIOCSIFMTU, &mut interface("eth0", (65_520_u32, [0_u8; 12])))?;
    sys::control(&socket, SIOCSIFFLAGS, &mut interface("eth0", up))?;
    let any = address([0; 4]);
    let gateway = address([10, 0, 2, 2]);
    let flags = RTF_UP_GATEWAY;
    let mut route = Route { target: any, gateway, mask: any, flags, ..Route::default() };
    sys::control(&socket, SIOCADDRT, &mut route)
}
