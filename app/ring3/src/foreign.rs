//! Devices that other programs serve: `--disk vhost-user:SOCKET`, `--share vhost-user:SOCKET:TAG`.

use std::path::Path;

use vhost_user::{Config, Error, Foreign, Nature};
use virtio::{Block, Fs};
use virtio_bindings::{virtio_blk as blk, virtio_ids as ids};
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

/// A disk that is served at this socket.
pub fn disk(socket: &Path) -> Result<Attachment, Failure> {
    let nature = Nature {
        name: "disk",
        device_type: ids::VIRTIO_ID_BLOCK as u16,
        class: STORAGE,
        queues: &[128],
        known: DISK_KNOWN,
        passed: DISK_FEATURES,
        config: Config::Asked(DISK_CONFIG),
        // The status is the last byte of an answer.
        whole_answers: true,
        refuse: Block::refuse,
    };
    attach(socket, nature, "--disk")
}

/// A folder that is served at this socket.
pub fn share(socket: &Path, tag: &str) -> Result<Attachment, Failure> {
    let nature = Nature {
        name: "folder",
        device_type: ids::VIRTIO_ID_FS as u16,
        class: STORAGE,
        queues: &[64, 256],
        known: SHARE_KNOWN,
        passed: 0,
        // The tag is the monitor's to say.
        config: Config::Known(Fs::config_of(tag)),
        whole_answers: false,
        refuse: Fs::refuse,
    };
    attach(socket, nature, "--share")
}

fn attach(socket: &Path, nature: Nature, option: &str) -> Result<Attachment, Failure> {
    let foreign = Foreign::connect(socket, nature).map_err(|error| match error {
        Error::Refused(problem) => Failure::usage(format!("{option} {problem}")),
        error => Failure::host(format!("{option}: {error}")),
    })?;
    let connect = Box::new(foreign.connector());
    let (device, release) = (Box::new(foreign), Box::new(|| {}));
    // It copies and passes on, for which no thread is worth waking.
    Ok(Attachment { device, execution: Execution::Inline, connect, release })
}
