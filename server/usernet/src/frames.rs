//! Frames from parts, by smoltcp's wire formats.

use std::net::{Ipv4Addr, SocketAddrV4};

use smoltcp::{
    phy::ChecksumCapabilities,
    wire::{
        ArpOperation, ArpPacket, ArpRepr, EthernetAddress, EthernetFrame, EthernetProtocol,
        EthernetRepr, Icmpv4Packet, Icmpv4Repr, IpAddress, IpProtocol, Ipv4Packet, Ipv4Repr,
        UdpPacket, UdpRepr,
    },
};

use crate::{GATEWAY, NAME_SERVER};

/// The gateway's Ethernet address.
pub(crate) const GATEWAY_MAC: EthernetAddress =
    EthernetAddress([0x52, 0x55, 0x0a, 0x00, 0x02, 0x02]);
const ETHERNET: usize = 14;
const IPV4: usize = 20;
const UDP: usize = 8;
const HOPS: u8 = 64;

/// An Ethernet frame to the guest with `len` bytes of payload that `fill` writes.
pub(crate) fn ethernet(
    to: EthernetAddress,
    ethertype: EthernetProtocol,
    len: usize,
    fill: impl FnOnce(&mut [u8]),
) -> Vec<u8> {
    let mut bytes = vec![0; ETHERNET + len];
    let repr = EthernetRepr { src_addr: GATEWAY_MAC, dst_addr: to, ethertype };
    repr.emit(&mut EthernetFrame::new_unchecked(&mut bytes[..]));
    fill(&mut bytes[ETHERNET..]);
    bytes
}

/// An IPv4 packet in a frame.
pub(crate) fn ipv4(
    mac: EthernetAddress,
    (from, to): (Ipv4Addr, Ipv4Addr),
    protocol: IpProtocol,
    len: usize,
    fill: impl FnOnce(&mut [u8]),
) -> Vec<u8> {
    let repr = Ipv4Repr {
        src_addr: from,
        dst_addr: to,
        next_header: protocol,
        payload_len: len,
        hop_limit: HOPS,
    };
    ethernet(mac, EthernetProtocol::Ipv4, IPV4 + len, |bytes| {
        let mut packet = Ipv4Packet::new_unchecked(&mut *bytes);
        repr.emit(&mut packet, &ChecksumCapabilities::default());
        fill(&mut bytes[IPV4..]);
    })
}

/// A UDP datagram in a frame.
pub(crate) fn udp(
    mac: EthernetAddress,
    from: SocketAddrV4,
    to: SocketAddrV4,
    payload: &[u8],
) -> Vec<u8> {
    let addresses = (*from.ip(), *to.ip());
    let repr = UdpRepr { src_port: from.port(), dst_port: to.port() };
    let (source, target) = (IpAddress::Ipv4(*from.ip()), IpAddress::Ipv4(*to.ip()));
    ipv4(mac, addresses, IpProtocol::Udp, UDP + payload.len(), |bytes| {
        let mut packet = UdpPacket::new_unchecked(bytes);
        let fill = |data: &mut [u8]| data.copy_from_slice(payload);
        let checksums = ChecksumCapabilities::default();
        repr.emit(&mut packet, &source, &target, payload.len(), fill, &checksums);
    })
}

/// The answer to an ICMP echo request for one of our addresses.
pub(crate) fn echo_reply(mac: EthernetAddress, request: &Ipv4Packet<&[u8]>) -> Option<Vec<u8>> {
    let message = Icmpv4Packet::new_checked(request.payload()).ok()?;
    let checksums = ChecksumCapabilities::default();
    let Icmpv4Repr::EchoRequest { ident, seq_no, data } =
        Icmpv4Repr::parse(&message, &checksums).ok()?
    else {
        return None;
    };
    let reply = Icmpv4Repr::EchoReply { ident, seq_no, data };
    let addresses = (request.dst_addr(), request.src_addr());
    Some(ipv4(mac, addresses, IpProtocol::Icmp, reply.buffer_len(), |bytes| {
        reply.emit(&mut Icmpv4Packet::new_unchecked(bytes), &checksums);
    }))
}

/// The answer to an ARP request for one of our addresses.
pub(crate) fn arp_reply(payload: &[u8]) -> Option<Vec<u8>> {
    let packet = ArpPacket::new_checked(payload).ok()?;
    let ArpRepr::EthernetIpv4 {
        operation: ArpOperation::Request,
        source_hardware_addr: asker,
        source_protocol_addr: asker_ip,
        target_protocol_addr: wanted,
        ..
    } = ArpRepr::parse(&packet).ok()?
    else {
        return None;
    };
    if wanted != GATEWAY && wanted != NAME_SERVER {
        return None;
    }
    let reply = ArpRepr::EthernetIpv4 {
        operation: ArpOperation::Reply,
        source_hardware_addr: GATEWAY_MAC,
        source_protocol_addr: wanted,
        target_hardware_addr: asker,
        target_protocol_addr: asker_ip,
    };
    Some(ethernet(asker, EthernetProtocol::Arp, reply.buffer_len(), |bytes| {
        reply.emit(&mut ArpPacket::new_unchecked(bytes));
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GUEST;

    const MAC: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 1]);

    fn request(wanted: Ipv4Addr) -> Vec<u8> {
        let repr = ArpRepr::EthernetIpv4 {
            operation: ArpOperation::Request,
            source_hardware_addr: MAC,
            source_protocol_addr: GUEST,
            target_hardware_addr: EthernetAddress([0; 6]),
            target_protocol_addr: wanted,
        };
        let mut bytes = vec![0; repr.buffer_len()];
        repr.emit(&mut ArpPacket::new_unchecked(&mut bytes[..]));
        bytes
    }

    #[test]
    fn arp_answers_for_the_gateway_and_not_for_the_guest() {
        assert!(arp_reply(&request(GATEWAY)).is_some());
        assert!(arp_reply(&request(NAME_SERVER)).is_some());
        assert!(arp_reply(&request(GUEST)).is_none(), "the guest probes for its own address");
        assert!(arp_reply(&[0; 5]).is_none());
    }

    #[test]
    fn a_datagram_has_sound_checksums() {
        let (from, to) = (SocketAddrV4::new(GATEWAY, 53), SocketAddrV4::new(GUEST, 4000));
        let frame = udp(MAC, from, to, b"hello");
        let ethernet = EthernetFrame::new_checked(&frame[..]).expect("a frame");
        let packet = Ipv4Packet::new_checked(ethernet.payload()).expect("a packet");
        assert!(packet.verify_checksum());
        let datagram = UdpPacket::new_checked(packet.payload()).expect("a datagram");
        assert!(datagram.verify_checksum(&IpAddress::Ipv4(GATEWAY), &IpAddress::Ipv4(GUEST)));
        assert_eq!(datagram.payload(), b"hello");
    }
}
