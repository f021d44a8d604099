//! A program of the guest that puts on its wire what no sound one does: frames of odd lengths, truncated and damaged ones of every protocol
//! that the network speaks, headers of virtio that lie, and floods. Its argument is the interface.
//!
//! Addresses are those of the guest's own network, whatever else is damaged, so that nothing leaves the host.

use std::{
    ffi::{CString, c_char, c_int, c_uint, c_void},
    io,
};

unsafe extern "C" {
    fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    fn bind(socket: c_int, address: *const c_void, len: c_uint) -> c_int;
    fn setsockopt(socket: c_int, level: c_int, name: c_int, value: *const c_void, len: c_uint) -> c_int;
    fn send(socket: c_int, data: *const c_void, len: usize, flags: c_int) -> isize;
    fn if_nametoindex(name: *const c_char) -> c_uint;
}

const AF_PACKET: c_int = 17;
const SOCK_RAW: c_int = 3;
const SOL_PACKET: c_int = 263;
const PACKET_VNET_HDR: c_int = 15;

/// Bytes of an Ethernet header, and of an IP header without options.
const ETHERNET: usize = 14;
const IP: usize = 20;
const IPV4: [u8; 2] = [8, 0];
const ARP: [u8; 2] = [8, 6];
const GUEST: [u8; 4] = [10, 0, 2, 15];
const GATEWAY: [u8; 4] = [10, 0, 2, 2];
const NAME_SERVER: [u8; 4] = [10, 0, 2, 3];
const EVERYBODY: [u8; 4] = [255; 4];
const TARGETS: [[u8; 4]; 5] = [GATEWAY, NAME_SERVER, GUEST, [10, 0, 2, 255], EVERYBODY];
const MAC: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
/// The longest frame that the interface takes.
const LONGEST: usize = 65_520 + ETHERNET;

/// A socket that takes whole frames; with `headers`, each behind a virtio header.
struct Wire {
    socket: c_int,
    sent: u64,
    refused: u64,
}

impl Wire {
    fn open(interface: &str, headers: bool) -> io::Result<Self> {
        let every_protocol = 3_u16.to_be();
        let name = CString::new(interface)?;
        // SAFETY: the name ends, and is read.
        let index = unsafe { if_nametoindex(name.as_ptr()) };
        // SAFETY: three numbers.
        let socket = unsafe { socket(AF_PACKET, SOCK_RAW, every_protocol.into()) };
        if index == 0 || socket < 0 {
            return Err(io::Error::last_os_error());
        }
        let mut address = [0_u8; 20];
        address[..2].copy_from_slice(&(AF_PACKET as u16).to_ne_bytes());
        address[2..4].copy_from_slice(&every_protocol.to_ne_bytes());
        address[4..8].copy_from_slice(&index.to_ne_bytes());
        // SAFETY: a `struct sockaddr_ll` of twenty bytes is read.
        let bound = unsafe { bind(socket, address.as_ptr().cast(), 20) };
        let flag = c_int::from(headers);
        // SAFETY: a number of four bytes is read.
        let set = unsafe { setsockopt(socket, SOL_PACKET, PACKET_VNET_HDR, (&raw const flag).cast(), 4) };
        if bound < 0 || set < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { socket, sent: 0, refused: 0 })
    }

    /// Sends a frame, if the guest's kernel lets it out.
    fn send(&mut self, frame: &[u8]) {
        // SAFETY: the frame is read.
        let sent = unsafe { send(self.socket, frame.as_ptr().cast(), frame.len(), 0) };
        *(if sent < 0 { &mut self.refused } else { &mut self.sent }) += 1;
    }
}

/// Numbers that look random, the same each time (xorshift64*).
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % end
    }

    fn byte(&mut self) -> u8 {
        self.below(256) as u8
    }
}

fn ethernet(kind: [u8; 2], payload: &[u8]) -> Vec<u8> {
    [&[0xff; 6], &MAC[..], &kind, payload].concat()
}

fn ipv4(protocol: u8, to: [u8; 4], payload: &[u8]) -> Vec<u8> {
    let len = ((IP + payload.len()) as u16).to_be_bytes();
    let start = [0x45, 0, len[0], len[1], 0, 1, 0, 0, 64, protocol, 0, 0];
    let mut frame = ethernet(IPV4, &[&start, &GUEST[..], &to, payload].concat());
    checksum(&mut frame);
    frame
}

/// Makes the checksum of an IP header right, so that what is wrong with the rest is looked at.
fn checksum(frame: &mut [u8]) {
    let Some(header) = frame.get_mut(ETHERNET..) else { return };
    let len = usize::from(header.first().map_or(0, |byte| byte & 15)) * 4;
    let Some(header) = header.get_mut(..len.max(IP)) else { return };
    header[10..12].fill(0);
    let sum: u32 = header.chunks(2).map(|two| u32::from(two[0]) << 8 | u32::from(two[1])).sum();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    header[10..12].copy_from_slice(&sum.to_be_bytes());
}

fn udp(from: u16, to: [u8; 4], port: u16, payload: &[u8]) -> Vec<u8> {
    let len = (8 + payload.len()) as u16;
    let header = [from, port, len, 0].map(u16::to_be_bytes).concat();
    ipv4(UDP, to, &[&header, payload].concat())
}

/// A TCP segment with these flags, and options that make its header 24 bytes.
fn tcp(from: u16, to: [u8; 4], port: u16, flags: u8) -> Vec<u8> {
    let ports = [from, port].map(u16::to_be_bytes).concat();
    let rest = [0, 0, 0, 1, 0, 0, 0, 0, 0x60, flags, 4, 0, 0, 0, 0, 0, 2, 4, 5, 0xb4];
    ipv4(TCP, to, &[&ports[..], &rest].concat())
}

fn arp(operation: u8) -> Vec<u8> {
    let start = [0, 1, 8, 0, 6, 4, 0, operation];
    ethernet(ARP, &[&start[..], &MAC, &GUEST, &[0; 6], &GATEWAY].concat())
}

/// A message of a DHCP client as RFC 2131 has it, with some options.
fn dhcp() -> Vec<u8> {
    let mut message = vec![0; 240];
    message[..3].copy_from_slice(&[1, 1, 6]);
    message[28..34].copy_from_slice(&MAC);
    message[236..].copy_from_slice(&[99, 130, 83, 99]);
    message.extend([53, 1, 1, 55, 3, 1, 3, 6, 50, 4, 10, 0, 2, 15, 61, 7, 1]);
    message.extend(MAC);
    message.push(255);
    message
}

fn sound() -> Vec<Vec<u8>> {
    vec![
        arp(1),
        arp(2),
        ipv4(ICMP, GATEWAY, &[8, 0, 0xf7, 0xff, 0, 0, 0, 0]),
        tcp(1000, GATEWAY, 9, 2),
        tcp(1001, GATEWAY, 9, 0x10),
        udp(68, EVERYBODY, 67, &dhcp()),
        udp(1000, NAME_SERVER, 53, b"no question"),
        udp(1000, GATEWAY, 9, &[0x41; 2000]),
    ]
}

fn damaged(frame: &[u8], random: &mut Random) -> Vec<u8> {
    let mut frame = frame.to_vec();
    for _ in 0..=random.below(5) {
        let at = 12 + random.below(frame.len() - 12);
        frame[at] = random.byte();
    }
    match random.below(4) {
        0 => frame.truncate(ETHERNET + random.below(frame.len() - ETHERNET)),
        1 => frame.resize(ETHERNET + random.below(LONGEST - ETHERNET), 0x41),
        _ => {}
    }
    if let Some(target) = frame.get_mut(ETHERNET + 16..ETHERNET + 20) {
        target.copy_from_slice(&TARGETS[random.below(TARGETS.len())]);
    }
    checksum(&mut frame);
    frame
}

/// Every short length, and those around what the interface takes.
fn odd_lengths(wire: &mut Wire) {
    for len in (0..300).chain([1486, 1500, 9000, LONGEST - ETHERNET, LONGEST, LONGEST + 4, 70_000]) {
        for byte in [0, 0xff, 0x45] {
            wire.send(&ethernet(IPV4, &vec![byte; len]));
            wire.send(&ethernet(ARP, &vec![byte; len]));
            wire.send(&vec![byte; len]);
        }
    }
}

/// Sound frames cut off after each byte, whatever their own lengths say.
fn cut_off(wire: &mut Wire) {
    for frame in sound() {
        (ETHERNET..frame.len()).for_each(|len| wire.send(&frame[..len]));
    }
}

/// Every byte of an IP header, and the first of what is in it, with each of its bits the other way.
fn lies(wire: &mut Wire) {
    for frame in sound() {
        for bit in 8 * 12..8 * frame.len().min(60) {
            let mut other = frame.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            if !(ETHERNET + 16..ETHERNET + 20).contains(&(bit / 8)) {
                wire.send(&other);
                checksum(&mut other);
                wire.send(&other);
            }
        }
    }
}

/// DHCP messages that end early, and whose options say more than is there.
fn malformed_dhcp(wire: &mut Wire) {
    let sound = dhcp();
    for at in 0..sound.len() {
        wire.send(&udp(68, EVERYBODY, 67, &sound[..at]));
        for byte in [0, 1, 0x80, 0xff] {
            let mut message = sound.clone();
            message[at] = byte;
            wire.send(&udp(68, EVERYBODY, 67, &message));
        }
    }
    wire.send(&udp(68, EVERYBODY, 67, &[&sound[..240], &[0xff; 60_000]].concat()));
}

fn damages(wire: &mut Wire) {
    let (sound, mut random) = (sound(), Random(1));
    (0..20_000).for_each(|round| wire.send(&damaged(&sound[round % sound.len()], &mut random)));
}

/// Far more connections, ports and questions than anybody has room for, as fast as the wire takes them.
fn floods(wire: &mut Wire) {
    for port in 1024..11_024 {
        wire.send(&tcp(port, GATEWAY, 9, 2));
        wire.send(&udp(port, GATEWAY, 9, &[0x41; 9000]));
        wire.send(&udp(port, NAME_SERVER, 53, b"no question"));
        wire.send(&ipv4(ICMP, GATEWAY, &[8, 0, 0xf7, 0xff, 0, 0, 0, 0]));
        wire.send(&arp(1));
    }
}

/// Headers of virtio: checksums to be made anywhere, segments of any size and kind.
fn headers(wire: &mut Wire) {
    let (sound, mut random) = (sound(), Random(2));
    for round in 0..20_000 {
        let flags = random.byte() & 3;
        let kind = [0, 1, 3, 4, 5, 0x81, 0xff][random.below(7)];
        let mut header = vec![flags, if round % 2 == 0 { 0 } else { kind }];
        for _ in 0..4 {
            let word = [random.below(64), random.below(65_536)][random.below(2)] as u16;
            header.extend(word.to_ne_bytes());
        }
        wire.send(&[&header, &sound[round % sound.len()][..]].concat());
    }
}

fn main() -> io::Result<()> {
    let interface = std::env::args().nth(1).expect("the interface");
    let mut wire = Wire::open(&interface, false)?;
    let attacks: [(&str, fn(&mut Wire)); 6] = [
        ("odd lengths", odd_lengths),
        ("cut off", cut_off),
        ("lies", lies),
        ("malformed DHCP", malformed_dhcp),
        ("damages", damages),
        ("floods", floods),
    ];
    for (name, attack) in attacks {
        attack(&mut wire);
        println!("hostile: {name}: {} frames are out, {} were refused", wire.sent, wire.refused);
    }
    let mut wire = Wire::open(&interface, true)?;
    headers(&mut wire);
    println!("hostile: headers: {} frames are out, {} were refused", wire.sent, wire.refused);
    println!("hostile: done");
    Ok(())
}
