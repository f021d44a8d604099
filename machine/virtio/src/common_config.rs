//! The common configuration structure (virtio 1.2 section 4.1.4.3).
//!
//! Reads copy from an image of the whole structure, so any size and alignment works. A write
//! changes the fields it covers wholly; 64-bit fields count as two halves, as drivers write them.

use crate::runner::{Doorbell, SharedDevice};
use crate::running::Running;
use crate::{layout::COMMON_LEN, lock};

/// What the driver selects before it looks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Selectors {
    device_features: u32,
    driver_features: u32,
    queue: u16,
}

#[derive(Clone, Copy)]
enum Field {
    DeviceFeatureSelect,
    DriverFeatureSelect,
    DriverFeature,
    ConfigVector,
    Status,
    QueueSelect,
    QueueSize,
    QueueVector,
    QueueEnable,
    /// Half of an address: ring (0 descriptors, 1 available, 2 used), bit offset.
    Ring(u8, u8),
    QueueReset,
}

/// Writable fields: byte offset, bytes.
const FIELDS: [(usize, usize, Field); 16] = [
    (0, 4, Field::DeviceFeatureSelect),
    (8, 4, Field::DriverFeatureSelect),
    (12, 4, Field::DriverFeature),
    (16, 2, Field::ConfigVector),
    (20, 1, Field::Status),
    (22, 2, Field::QueueSelect),
    (24, 2, Field::QueueSize),
    (26, 2, Field::QueueVector),
    (28, 2, Field::QueueEnable),
    (32, 4, Field::Ring(0, 0)),
    (36, 4, Field::Ring(0, 32)),
    (40, 4, Field::Ring(1, 0)),
    (44, 4, Field::Ring(1, 32)),
    (48, 4, Field::Ring(2, 0)),
    (52, 4, Field::Ring(2, 32)),
    (58, 2, Field::QueueReset),
];

/// The structure as it reads now.
pub(crate) fn image(shared: &SharedDevice, select: Selectors) -> [u8; COMMON_LEN as usize] {
    let running = lock(&shared.running);
    let queue = usize::from(select.queue);
    let mut image = [0; COMMON_LEN as usize];
    let mut put = |offset: usize, bytes: &[u8]| {
        image[offset..offset + bytes.len()].copy_from_slice(bytes);
    };
    put(0, &select.device_features.to_le_bytes());
    put(4, &word_of(running.offered(), select.device_features).to_le_bytes());
    put(8, &select.driver_features.to_le_bytes());
    put(12, &word_of(running.driver_features(), select.driver_features).to_le_bytes());
    put(16, &shared.interrupts.config_vector().to_le_bytes());
    put(18, &(running.queues.len() as u16).to_le_bytes());
    put(20, &[running.status(), running.generation()]);
    put(22, &select.queue.to_le_bytes());
    put(26, &shared.interrupts.queue_vector(queue).to_le_bytes());
    if let Some(slot) = running.queues.get(queue) {
        put(24, &slot.shape.size.to_le_bytes());
        put(28, &u16::from(slot.queue.is_some()).to_le_bytes());
        put(30, &select.queue.to_le_bytes());
        put(32, &slot.shape.descriptors.to_le_bytes());
        put(40, &slot.shape.available.to_le_bytes());
        put(48, &slot.shape.used.to_le_bytes());
    }
    image
}

fn word_of(features: u64, select: u32) -> u32 {
    match select {
        0 => features as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}

/// Writes `data` at byte `offset`. `doorbell` is rung for queues that may run from now on.
pub(crate) fn write(
    shared: &SharedDevice,
    select: &mut Selectors,
    doorbell: &Doorbell,
    offset: usize,
    data: &[u8],
) {
    for &(start, len, field) in &FIELDS {
        let covered = start.checked_sub(offset).and_then(|at| data.get(at..at + len));
        if let Some(bytes) = covered {
            let mut value = [0; 4];
            value[..len].copy_from_slice(bytes);
            write_field(shared, select, doorbell, field, u32::from_le_bytes(value));
        }
    }
}

fn write_field(
    shared: &SharedDevice,
    select: &mut Selectors,
    doorbell: &Doorbell,
    field: Field,
    value: u32,
) {
    match field {
        Field::DeviceFeatureSelect => select.device_features = value,
        Field::DriverFeatureSelect => select.driver_features = value,
        Field::QueueSelect => select.queue = value as u16,
        Field::Status => write_status(shared, select, doorbell, value as u8),
        Field::ConfigVector => shared.interrupts.set_config_vector(value as u16),
        Field::QueueVector => {
            shared.interrupts.set_queue_vector(usize::from(select.queue), value as u16);
        }
        Field::DriverFeature => {
            let mut running = lock(&shared.running);
            let features = replace_word(running.driver_features(), select.driver_features, value);
            running.set_driver_features(features);
        }
        _ => write_queue_field(shared, select.queue, doorbell, field, value),
    }
}

/// Replaces 32 bits of the features; words beyond the second do not exist.
fn replace_word(features: u64, select: u32, value: u32) -> u64 {
    match select {
        0 => features & !0xffff_ffff | u64::from(value),
        1 => features & 0xffff_ffff | u64::from(value) << 32,
        _ => features,
    }
}

fn write_status(shared: &SharedDevice, select: &mut Selectors, doorbell: &Doorbell, value: u8) {
    let mut running = lock(&shared.running);
    if value == 0 {
        running.reset();
        *select = Selectors::default();
    } else if running.advance_status(value) {
        let queues = running.queues.len();
        drop(running);
        (0..queues).for_each(|index| doorbell.ring(index));
    }
}

fn write_queue_field(
    shared: &SharedDevice,
    index: u16,
    doorbell: &Doorbell,
    field: Field,
    value: u32,
) {
    let index = usize::from(index);
    let mut running = lock(&shared.running);
    match field {
        Field::QueueEnable if value == 1 => match running.enable_queue(index) {
            Ok(()) => {
                drop(running);
                doorbell.ring(index);
            }
            Err(error) => running.fail(&error),
        },
        Field::QueueReset if value == 1 => running.reset_queue(index),
        Field::QueueSize | Field::Ring(..) => set_shape(&mut running, index, field, value),
        _ => {}
    }
}

/// Sets a queue's size or half of an address; ignored once it is enabled.
fn set_shape(running: &mut Running, index: usize, field: Field, value: u32) {
    let Some(slot) = running.queues.get_mut(index).filter(|slot| slot.queue.is_none()) else {
        return;
    };
    let (address, shift) = match field {
        Field::QueueSize => {
            slot.shape.size = value as u16;
            return;
        }
        Field::Ring(0, shift) => (&mut slot.shape.descriptors, shift),
        Field::Ring(1, shift) => (&mut slot.shape.available, shift),
        Field::Ring(_, shift) => (&mut slot.shape.used, shift),
        _ => return,
    };
    *address = *address & !(0xffff_ffff << shift) | u64::from(value) << shift;
}
