//! The DHCP server: one lease, for whoever asks.

use std::net::{Ipv4Addr, SocketAddrV4};

use smoltcp::wire::{
    DHCP_CLIENT_PORT, DHCP_SERVER_PORT, DhcpMessageType, DhcpOption, DhcpPacket, DhcpRepr,
    EthernetAddress,
};

use crate::{GATEWAY, GUEST, MTU, NAME_SERVER, frames};

const LEASE_SECONDS: u32 = 86_400;
/// Interface MTU (RFC 2132 section 5.1).
const OPTION_MTU: u8 = 26;
const NETMASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 0);

/// The frame that answers a client's message; `None` where a server keeps silent.
pub(crate) fn reply(message: &[u8]) -> Option<Vec<u8>> {
    let packet = DhcpPacket::new_checked(message).ok()?;
    let request = DhcpRepr::parse(&packet).ok()?;
    let answer = answer(&request)?;
    let mtu = MTU.to_be_bytes();
    let options = [DhcpOption { kind: OPTION_MTU, data: &mtu }];
    let reply = offer(&request, answer, &options);
    let mut bytes = vec![0; reply.buffer_len()];
    reply.emit(&mut DhcpPacket::new_unchecked(&mut bytes[..])).ok()?;
    // To all: the client may not know its address yet.
    let from = SocketAddrV4::new(GATEWAY, DHCP_SERVER_PORT);
    let to = SocketAddrV4::new(Ipv4Addr::BROADCAST, DHCP_CLIENT_PORT);
    Some(frames::udp(EthernetAddress::BROADCAST, from, to, &bytes))
}

fn answer(request: &DhcpRepr<'_>) -> Option<DhcpMessageType> {
    let for_another = request.server_identifier.is_some_and(|server| server != GATEWAY);
    let unset = |address: Ipv4Addr| (!address.is_unspecified()).then_some(address);
    let wanted = request.requested_ip.or(unset(request.client_ip));
    match request.message_type {
        DhcpMessageType::Discover => Some(DhcpMessageType::Offer),
        DhcpMessageType::Request if for_another => None,
        DhcpMessageType::Request if wanted.is_none_or(|ip| ip == GUEST) => {
            Some(DhcpMessageType::Ack)
        }
        DhcpMessageType::Request => Some(DhcpMessageType::Nak),
        DhcpMessageType::Inform => Some(DhcpMessageType::Ack),
        _ => None,
    }
}

fn offer<'a>(
    request: &DhcpRepr<'_>,
    message_type: DhcpMessageType,
    options: &'a [DhcpOption<'a>],
) -> DhcpRepr<'a> {
    let refused = message_type == DhcpMessageType::Nak;
    DhcpRepr {
        message_type,
        transaction_id: request.transaction_id,
        secs: 0,
        client_hardware_address: request.client_hardware_address,
        client_ip: Ipv4Addr::UNSPECIFIED,
        your_ip: if refused { Ipv4Addr::UNSPECIFIED } else { GUEST },
        server_ip: GATEWAY,
        router: (!refused).then_some(GATEWAY),
        subnet_mask: (!refused).then_some(NETMASK),
        relay_agent_ip: Ipv4Addr::UNSPECIFIED,
        broadcast: request.broadcast,
        requested_ip: None,
        client_identifier: None,
        server_identifier: Some(GATEWAY),
        parameter_request_list: None,
        dns_servers: (!refused).then(|| [NAME_SERVER].into_iter().collect()),
        max_size: None,
        lease_duration: (!refused).then_some(LEASE_SECONDS),
        renew_duration: None,
        rebind_duration: None,
        additional_options: if refused { &[] } else { options },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use smoltcp::wire::{EthernetFrame, Ipv4Packet, UdpPacket};

    fn ask(message_type: DhcpMessageType, requested_ip: Option<Ipv4Addr>) -> Option<Vec<u8>> {
        let mut request = offer(&blank(), message_type, &[]);
        request.server_identifier = None;
        request.requested_ip = requested_ip;
        let mut bytes = vec![0; request.buffer_len()];
        request.emit(&mut DhcpPacket::new_unchecked(&mut bytes[..])).expect("it fits");
        let frame = reply(&bytes)?;
        let ethernet = EthernetFrame::new_checked(&frame[..]).expect("a frame");
        let packet = Ipv4Packet::new_checked(ethernet.payload()).expect("a packet");
        Some(UdpPacket::new_checked(packet.payload()).expect("a datagram").payload().to_vec())
    }

    fn blank() -> DhcpRepr<'static> {
        let zero = Ipv4Addr::UNSPECIFIED;
        DhcpRepr {
            message_type: DhcpMessageType::Discover,
            transaction_id: 7,
            secs: 0,
            client_hardware_address: EthernetAddress([2, 0, 0, 0, 0, 1]),
            client_ip: zero,
            your_ip: zero,
            server_ip: zero,
            router: None,
            subnet_mask: None,
            relay_agent_ip: zero,
            broadcast: true,
            requested_ip: None,
            client_identifier: None,
            server_identifier: None,
            parameter_request_list: None,
            dns_servers: None,
            max_size: None,
            lease_duration: None,
            renew_duration: None,
            rebind_duration: None,
            additional_options: &[],
        }
    }

    #[test]
    fn a_lease_names_address_router_and_name_server() {
        let bytes = ask(DhcpMessageType::Request, Some(GUEST)).expect("an answer");
        let packet = DhcpPacket::new_checked(&bytes[..]).expect("a message");
        let reply = DhcpRepr::parse(&packet).expect("sound");
        assert_eq!(reply.message_type, DhcpMessageType::Ack);
        assert_eq!((reply.your_ip, reply.router), (GUEST, Some(GATEWAY)));
        assert_eq!(reply.dns_servers.expect("servers")[..], [NAME_SERVER]);
    }

    #[test]
    fn another_address_is_refused() {
        let bytes = ask(DhcpMessageType::Request, Some([10, 0, 2, 99].into())).expect("an answer");
        let packet = DhcpPacket::new_checked(&bytes[..]).expect("a message");
        let reply = DhcpRepr::parse(&packet).expect("sound");
        assert_eq!(reply.message_type, DhcpMessageType::Nak);
    }

    #[test]
    fn malformed_messages_get_no_answer() {
        assert!(reply(&[]).is_none());
        assert!(reply(&[1; 239]).is_none());
        assert!(reply(&[0xff; 1500]).is_none());
        assert!(ask(DhcpMessageType::Release, None).is_none());
    }
}
