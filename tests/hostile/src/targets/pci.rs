//! Anything written to configuration space, MSI-X tables and the BAR window of a bus with two devices.

use std::sync::Arc;

use arbitrary::Arbitrary;
use bus::Device;
use host_fake::FakeEntropy;
use ram::Ram;
use virtio::{Console, InputBuffer, Rng};

use super::{all, none};
use crate::devices::{RAM, empty_bus, plug};
use fuzzer::Target;

pub(crate) const TARGET: Target = Target { name: "pci", seeds: none, run };

/// Accesses of one input.
const MOST: usize = 400;

#[derive(Arbitrary, Debug)]
enum Access {
    /// CONFIG_ADDRESS with these fields, then CONFIG_DATA.
    Ports { slot: u8, register: u8, byte: u8, size: u8, write: Option<u32> },
    /// Any access to the ports.
    RawPorts { offset: u8, size: u8, write: Option<u32> },
    /// A register of a slot.
    Ecam { slot: u8, register: u16, size: u8, write: Option<u64> },
    /// Where the BARs were put.
    Bars { offset: u16, size: u8, write: Option<u64> },
    /// Anywhere in the window.
    Window { offset: u32, size: u8, write: Option<u64> },
    /// The reset button.
    Reset,
}

fn access(device: &mut dyn Device, len: u64, offset: u64, size: u8, write: Option<u64>) {
    let size = 1_usize << (size % 4);
    let offset = offset % (len - size as u64 + 1);
    match write {
        Some(value) => device.write(offset, &value.to_le_bytes()[..size]),
        None => device.read(offset, &mut [0; 8][..size]),
    }
}

fn run(bytes: &[u8]) {
    let ram = Ram::new(RAM).expect("a little memory");
    let host = empty_bus();
    plug(&host, Rng::new(Arc::new(FakeEntropy::new(5))), &ram);
    let console = Console::new(Box::new(InputBuffer::default()), Box::new(std::io::sink()));
    plug(&host, console, &ram);
    let (mut ports, mut ecam, mut window) = (host.config_ports(), host.ecam(), host.window());
    for one in all::<Access>(bytes, MOST) {
        match one {
            Access::Ports { slot, register, byte, size, write } => {
                let address = 1 << 31 | u32::from(slot % 4) << 11 | u32::from(register & 0xfc);
                ports.write(0, &address.to_le_bytes());
                let size = size % 3;
                access(&mut ports, 8, 4 + u64::from(byte % 4), size, write.map(u64::from));
            }
            Access::RawPorts { offset, size, write } => {
                access(&mut ports, 8, offset.into(), size, write.map(u64::from));
            }
            Access::Ecam { slot, register, size, write } => {
                let offset = u64::from(slot % 4) << 15 | u64::from(register);
                access(&mut ecam, pci::ECAM_SIZE, offset, size, write);
            }
            Access::Bars { offset, size, write } => {
                access(&mut window, pci::WINDOW_SIZE, offset.into(), size, write);
            }
            Access::Window { offset, size, write } => {
                access(&mut window, pci::WINDOW_SIZE, offset.into(), size, write);
            }
            Access::Reset => host.reset(),
        }
    }
    host.reset();
    for (slot, id) in [(1_u64, 0x1044_1af4_u32), (2, 0x1043_1af4)] {
        let mut data = [0; 4];
        ecam.read(slot << 15, &mut data);
        assert_eq!(u32::from_le_bytes(data), id);
        let mut queues = [0; 2];
        window.read((slot - 1) * 0x8000 + 18, &mut queues);
        assert_eq!(u16::from_le_bytes(queues), slot as u16, "memory decoding works after reset");
    }
}
