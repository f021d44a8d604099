//! The host bridge as a guest sees it: both configuration mechanisms, BARs that move, shared wires,
//! and accesses of every kind.

use bus::{Device, InterruptLine, MsiSink};
use pci::{
    Bar, ConfigSpace, Endpoint, Function, Identity, MsiTable, PciError, PciHost, WINDOW_BASE,
    interrupt_gsi, interrupt_irq, wire_irq,
};
use proptest::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

#[derive(Default)]
struct Wire(AtomicBool);
impl InterruptLine for Wire {
    fn set(&self, level: bool) {
        self.0.store(level, Ordering::SeqCst);
    }
}

struct NoMessages;
impl MsiSink for NoMessages {
    fn send(&self, _: u64, _: u32) {}
}

/// A function whose BAR reads give its number, and that remembers the last write.
struct Card {
    endpoint: Endpoint,
    number: u8,
    last_write: Option<(u64, Vec<u8>)>,
}

impl Function for Card {
    fn config(&self) -> &ConfigSpace {
        self.endpoint.config()
    }
    fn config_mut(&mut self) -> &mut ConfigSpace {
        self.endpoint.config_mut()
    }
    fn config_read(&mut self, offset: usize, data: &mut [u8]) {
        assert!(offset % 4 + data.len() <= 4, "split into dwords");
        self.endpoint.config_read(offset, data);
    }
    fn config_write(&mut self, offset: usize, data: &[u8]) {
        assert!(offset % 4 + data.len() <= 4, "split into dwords");
        self.endpoint.config_write(offset, data);
    }
    fn bar_read(&mut self, bar: u8, offset: u64, data: &mut [u8]) {
        assert!(bar == 2 && offset + data.len() as u64 <= 0x8000, "inside the BAR");
        if !self.endpoint.msix_read(bar, offset, data) {
            data.fill(self.number);
        }
    }
    fn bar_write(&mut self, bar: u8, offset: u64, data: &[u8]) {
        assert!(bar == 2 && offset + data.len() as u64 <= 0x8000, "inside the BAR");
        if !self.endpoint.msix_write(bar, offset, data) {
            self.last_write = Some((offset, data.to_vec()));
        }
    }
    fn reset(&mut self) {
        self.endpoint.reset();
    }
}

struct Bench {
    host: PciHost,
    wires: [Arc<Wire>; 8],
    cards: Vec<Arc<Mutex<Card>>>,
}

impl Bench {
    fn new(cards: usize) -> Self {
        let wires: [Arc<Wire>; 8] = std::array::from_fn(|_| Arc::new(Wire::default()));
        let host = PciHost::new(wires.clone().map(|wire| wire as _), Arc::new(NoMessages));
        let cards = (0..cards).map(|_| add_card(&host).unwrap()).collect();
        Self { host, wires, cards }
    }

    fn ecam(&self, slot: u64, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.host.ecam().read((slot << 15) + offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn set_ecam(&self, slot: u64, offset: u64, value: u32) {
        self.host.ecam().write((slot << 15) + offset, &value.to_le_bytes());
    }

    fn mmio(&self, gpa: u64) -> u8 {
        let mut data = [0];
        self.host.window().read(gpa - WINDOW_BASE, &mut data);
        data[0]
    }
}

fn add_card(host: &PciHost) -> Result<Arc<Mutex<Card>>, PciError> {
    let slot = host.reserve()?;
    let number = slot.number();
    let identity = Identity { vendor: 0x1234, device: u16::from(number), ..Identity::default() };
    let place = MsiTable { bar: 2, table: 0x4000, pending: 0x5000 };
    let wires = (slot.msi(), slot.line());
    let endpoint = Endpoint::new(identity, Bar::memory64(0x8000), place, 3, wires)?;
    host.add(slot, Card { endpoint, number, last_write: None })
}

#[test]
fn both_mechanisms_reach_the_same_registers() {
    let bench = Bench::new(2);
    assert_eq!(bench.ecam(0, 8) >> 8, 0x06_00_00, "the host bridge itself");
    let mut ports = bench.host.config_ports();
    let mut read = |address: u32, offset: u64, size: usize| {
        ports.write(0, &address.to_le_bytes());
        let mut data = vec![0; size];
        ports.read(4 + offset, &mut data);
        data
    };
    assert_eq!(read(0x8000_1000, 0, 4), 0x0002_1234_u32.to_le_bytes());
    assert_eq!(read(0x8000_1000, 2, 2), [2, 0]);
    assert_eq!(read(0x8000_1000, 3, 1), [0]);
    assert_eq!(read(0x0000_1000, 0, 4), [0xff; 4], "not enabled");
    assert_eq!(read(0x8000_1800, 0, 4), [0xff; 4], "no slot 3");
    assert_eq!(read(0x8000_1100, 0, 4), [0xff; 4], "no function 1");
    assert_eq!(read(0x8001_0000, 0, 4), [0xff; 4], "no bus 1");
    let mut address = [0; 4];
    ports.read(0, &mut address);
    assert_eq!(address, 0x8001_0000_u32.to_le_bytes());
    ports.write(0, &[0x55]);
    ports.write(0, &[0x55, 0x55]);
    ports.read(0, &mut address);
    assert_eq!(address, 0x8001_0000_u32.to_le_bytes(), "only dwords reach CONFIG_ADDRESS");
    assert_eq!(bench.ecam(1, 0x100), 0xffff_ffff, "no extended space");
}

#[test]
fn the_reset_control_port_lies_inside_config_address() {
    struct Latch(u8);
    impl Device for Latch {
        fn read(&mut self, offset: u64, data: &mut [u8]) {
            data.fill(self.0 + offset as u8);
        }
        fn write(&mut self, _: u64, data: &[u8]) {
            self.0 = data[0];
        }
    }
    let latch = Arc::new(Mutex::new(Latch(0)));
    let mut ports = Bench::new(0).host.config_ports().with_reset_control(latch.clone());
    ports.write(1, &[6]);
    let mut byte = [0];
    ports.read(1, &mut byte);
    assert_eq!((latch.lock().unwrap().0, byte), (6, [6]));
    ports.write(0, &[0, 9, 0, 0x80]);
    assert_eq!(latch.lock().unwrap().0, 6);
}

#[test]
fn bars_are_assigned_apart_and_can_move() {
    let bench = Bench::new(3);
    let bases: Vec<u32> = (1..4).map(|slot| bench.ecam(slot, 0x18) & !0xf).collect();
    assert_eq!(bases, [0xc000_0000, 0xc000_8000, 0xc001_0000]);
    assert_eq!(bench.mmio(0xc000_8000), 2);
    bench.set_ecam(2, 0x18, 0xd000_0000);
    assert_eq!((bench.mmio(0xc000_8000), bench.mmio(0xd000_0000)), (0xff, 2));
    bench.set_ecam(2, 0x18, 0xc001_4000);
    assert_eq!(bench.mmio(0xc001_0000), 2, "aligned down, and the lower slot answers");
    bench.set_ecam(2, 4, 0);
    assert_eq!(bench.mmio(0xc001_0000), 3);
    bench.set_ecam(2, 4, 2);
    bench.host.reset();
    assert_eq!(bench.mmio(0xc000_8000), 2, "reset puts it back");
}

#[test]
fn accesses_across_the_end_of_a_bar_reach_nobody() {
    let bench = Bench::new(1);
    let mut window = bench.host.window();
    let mut data = [0; 8];
    window.read(0x7ffc, &mut data);
    assert_eq!(data, [0xff; 8]);
    window.write(0x7ffc, &data);
    assert_eq!(bench.cards[0].lock().unwrap().last_write, None);
    window.write(0x7ffd, &[1, 2]);
    assert_eq!(bench.cards[0].lock().unwrap().last_write, Some((0x7ffd, vec![1, 2])));
}

#[test]
fn slots_eight_apart_share_a_wire() {
    let bench = Bench::new(9);
    assert_eq!((interrupt_gsi(1, 1), interrupt_gsi(9, 1)), (18, 18));
    assert_eq!(bench.ecam(9, 0x3c) & 0xffff, 0x010a, "INTA# on IRQ 10");
    assert_eq!((wire_irq(18), wire_irq(19), interrupt_irq(2, 1)), (10, 11, 11));
    let intx = |card: usize| bench.cards[card].lock().unwrap().endpoint.intx().clone();
    let level = || bench.wires[2].0.load(Ordering::SeqCst);
    intx(0).set_pending(true);
    intx(8).set_pending(true);
    intx(0).set_pending(false);
    assert!(level());
    assert_eq!(bench.ecam(9, 4) >> 16 & 8, 8);
    bench.host.reset();
    assert!(!level());
}

#[test]
fn the_bus_fills_up() {
    let bench = Bench::new(31);
    assert!(matches!(bench.host.reserve(), Err(PciError::NoSlot)));
    assert_eq!(bench.mmio(0xc000_0000 + 30 * 0x8000), 31);
}

#[test]
fn the_window_fills_up() {
    struct Huge(ConfigSpace);
    impl Function for Huge {
        fn config(&self) -> &ConfigSpace {
            &self.0
        }
        fn config_mut(&mut self) -> &mut ConfigSpace {
            &mut self.0
        }
    }
    let host = Bench::new(1).host;
    let add = |size| {
        let mut config = ConfigSpace::new(Identity::default());
        config.add_bar(0, Bar::memory64(size))?;
        host.add(host.reserve()?, Huge(config)).map(drop)
    };
    assert_eq!(add(1 << 28), Ok(()));
    assert_eq!(add(1 << 28), Err(PciError::NoRoom(1 << 28)));
    assert_eq!(add(1 << 63), Err(PciError::NoRoom(1 << 63)));
    assert_eq!(add(0x1000), Err(PciError::NoRoom(0x1000)), "behind the large one");
}

/// One guest access: window (0 ports, 1 ECAM, 2 MMIO), offset, size, value if it writes.
type Access = (u8, u64, usize, Option<u64>);

fn access() -> impl Strategy<Value = Access> {
    let offset = prop_oneof![
        0..8_u64,                            // ports
        0x8000..0x8100_u64,                  // slot 1's registers
        0..0x1_8000_u64,                     // BARs
        0..0x2000_0000_u64,                  // anywhere
        (0..8_u64).prop_map(|i| 0x8018 + i), // BAR 2
    ];
    let size = prop::sample::select(vec![1_usize, 2, 4, 8]);
    (0..3_u8, offset, size, prop::option::of(any::<u64>()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn no_access_breaks_anything(accesses in prop::collection::vec(access(), 1..64)) {
        let bench = Bench::new(2);
        let mut ports = bench.host.config_ports();
        let (mut ecam, mut window) = (bench.host.ecam(), bench.host.window());
        for (which, offset, size, value) in accesses {
            let (device, len): (&mut dyn Device, u64) = match which {
                0 => (&mut ports, 8),
                1 => (&mut ecam, pci::ECAM_SIZE),
                _ => (&mut window, pci::WINDOW_SIZE),
            };
            let offset = offset % (len - size as u64 + 1);
            match value {
                Some(value) => device.write(offset, &value.to_le_bytes()[..size]),
                None => device.read(offset, &mut [0; 8][..size]),
            }
        }
        prop_assert_eq!(bench.ecam(1, 0), 0x0001_1234);
        bench.host.reset();
        prop_assert_eq!(bench.mmio(0xc000_8000), 2);
    }
}
