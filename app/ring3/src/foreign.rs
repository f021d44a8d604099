//! Devices that other programs serve: `--disk vhost-user:SOCKET`, `--share vhost-user:SOCKET:TAG`, `--net vhost-user:SOCKET`,
//! and passt, which we start.

use std::path::Path;

use cables::PasstServer;
use usernet::Forward;
use vhost_user::{ConfigSource, Foreign, Nature, VhostUserError};
use virtio::{Block, Fs, NET_RECEIVE, Net, device_id};
use virtio_bindings::{virtio_blk as blk, virtio_net as net};
use vmm::{Attachment, Execution};

use crate::failure::Failure;

/// How an argument says that another program serves; a file of such a name is `./vhost-user:...`.
pub const PREFIX: &str = "vhost-user:";

/// PCI class: other mass storage controller.
const STORAGE: u32 = 0x01_80_00;
/// Bytes of a disk's configuration structure up to the fields of write-zeroes.
const DISK_CONFIG: u32 = 60;
/// What a guest may use of a disk: what changes neither the number of queues nor the configuration.
const DISK_FEATURES: u64 = 1 << blk::VIRTIO_BLK_F_SIZE_MAX
    | 1 << blk::VIRTIO_BLK_F_SEG_MAX
    | 1 << blk::VIRTIO_BLK_F_GEOMETRY
    | 1 << blk::VIRTIO_BLK_F_RO
    | 1 << blk::VIRTIO_BLK_F_BLK_SIZE
    | 1 << blk::VIRTIO_BLK_F_FLUSH
    | 1 << blk::VIRTIO_BLK_F_TOPOLOGY
    | 1 << blk::VIRTIO_BLK_F_DISCARD
    | 1 << blk::VIRTIO_BLK_F_WRITE_ZEROES;
/// Features of a disk: those of virtio 1.2, and before it barriers and SCSI commands.
const DISK_KNOWN: u64 = DISK_FEATURES
    | 1 << blk::VIRTIO_BLK_F_BARRIER
    | 1 << blk::VIRTIO_BLK_F_SCSI
    | 1 << blk::VIRTIO_BLK_F_CONFIG_WCE
    | 1 << blk::VIRTIO_BLK_F_MQ
    | 1 << blk::VIRTIO_BLK_F_SECURE_ERASE
    | 1 << blk::VIRTIO_BLK_F_ZONED;
/// A folder's server may know of notifications, which we have no queue for.
const SHARE_KNOWN: u64 = 1;

/// PCI class: Ethernet controller.
const ETHERNET: u32 = 0x02_00_00;
/// What a guest may use of a network interface: features that say what frames look like.
const NET_FEATURES: u64 = 1 << net::VIRTIO_NET_F_CSUM
    | 1 << net::VIRTIO_NET_F_GUEST_CSUM
    | 1 << net::VIRTIO_NET_F_GUEST_TSO4
    | 1 << net::VIRTIO_NET_F_GUEST_TSO6
    | 1 << net::VIRTIO_NET_F_GUEST_ECN
    | 1 << net::VIRTIO_NET_F_GUEST_UFO
    | 1 << net::VIRTIO_NET_F_HOST_TSO4
    | 1 << net::VIRTIO_NET_F_HOST_TSO6
    | 1 << net::VIRTIO_NET_F_HOST_ECN
    | 1 << net::VIRTIO_NET_F_HOST_UFO
    | 1 << net::VIRTIO_NET_F_MRG_RXBUF;
/// Those that the monitor's configuration structure has fields for.
const NET_OURS: u64 = 1 << net::VIRTIO_NET_F_MAC | 1 << net::VIRTIO_NET_F_STATUS;
const NET_MTU: u64 = 1 << net::VIRTIO_NET_F_MTU;
/// Features of a network interface: all of those that a device type may have but two, which are a disk's.
const NET_KNOWN: u64 = ((1 << 24) - 1) & !(1 << 4 | 1 << 6);

/// A disk that is served at this socket.
pub fn disk(socket: &Path) -> Result<Attachment, Failure> {
    let nature = Nature {
        name: "disk",
        device_type: device_id::BLOCK,
        class: STORAGE,
        queues: &[128],
        known: DISK_KNOWN,
        passed: DISK_FEATURES,
        config: ConfigSource::Asked(DISK_CONFIG),
        // The status is the last byte of an answer.
        whole_answers: true,
        ours: 0,
        patient: None,
        refuse: Block::refuse,
    };
    attach(socket, nature, "--disk")
}

/// A folder that is served at this socket.
pub fn share(socket: &Path, tag: &str) -> Result<Attachment, Failure> {
    let nature = Nature {
        name: "folder",
        device_type: device_id::FS,
        class: STORAGE,
        queues: &[64, 256],
        known: SHARE_KNOWN,
        passed: 0,
        // The tag is the monitor's to say.
        config: ConfigSource::Known(Fs::config_of(tag)),
        whole_answers: false,
        ours: 0,
        patient: None,
        refuse: Fs::refuse,
    };
    attach(socket, nature, "--share")
}

/// A network interface that is served at this socket.
pub fn net(socket: &Path, mac: [u8; 6]) -> Result<Attachment, Failure> {
    attach(socket, interface(mac, None), "--net")
}

/// A network interface that a passt of our own serves, which leads these ports of the host to the guest.
pub fn passt(forwards: &[Forward], mac: [u8; 6]) -> Result<Attachment, Failure> {
    let refused = |error: cables::CableError| Failure::usage(format!("--net: {error}"));
    let (mut server, socket) = PasstServer::start(forwards).map_err(refused)?;
    let foreign = Foreign::at(socket, "passt", interface(mac, Some(usernet::MTU)));
    // One that ended said why, and better than who was not answered.
    let foreign = foreign
        .map_err(|error| server.refusal().map_or_else(|| failure(error, "--net"), refused))?;
    let mut attachment = attached(foreign)?;
    let hang_up = attachment.release;
    attachment.release = Box::new(move || {
        hang_up();
        drop(server);
    });
    Ok(attachment)
}

/// A network interface with this address, and with this MTU if it is known.
fn interface(mac: [u8; 6], mtu: Option<u16>) -> Nature {
    Nature {
        name: "network interface",
        device_type: device_id::NET,
        class: ETHERNET,
        queues: &[256, 256],
        known: NET_KNOWN,
        passed: NET_FEATURES,
        ours: if mtu.is_some() { NET_OURS | NET_MTU } else { NET_OURS },
        config: ConfigSource::Known(Net::config_of(mac, mtu.unwrap_or_default())),
        whole_answers: false,
        patient: Some(NET_RECEIVE),
        // A frame that nobody takes is lost.
        refuse: |_, _| Ok(0),
    }
}

fn attach(socket: &Path, nature: Nature, option: &str) -> Result<Attachment, Failure> {
    let foreign = Foreign::connect(socket, nature);
    attached(foreign.map_err(|error| failure(error, option))?)
}

fn failure(error: VhostUserError, option: &str) -> Failure {
    match error {
        VhostUserError::Refused(problem) => Failure::usage(format!("{option} {problem}")),
        error => Failure::host(format!("{option}: {error}")),
    }
}

fn attached(foreign: Foreign) -> Result<Attachment, Failure> {
    let connect = Box::new(foreign.connector());
    let release = foreign.releaser().map_err(|error| Failure::host(error.to_string()))?;
    let (device, release) = (Box::new(foreign), Box::new(release));
    // It copies and passes on, for which no thread is worth waking.
    Ok(Attachment { device, execution: Execution::Inline, connect, release })
}
