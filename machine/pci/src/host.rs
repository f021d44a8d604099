//! The host bridge: which function sits in which slot, and who decodes which address.

use crate::config::Identity;
use crate::intx::WiredOr;
use crate::{
    ConfigPorts, ConfigSpace, Ecam, Function, MmioWindow, PciError, SLOTS, WINDOW_BASE,
    WINDOW_SIZE, lock,
};
use bus::{Bell, InterruptLine, MsiSink};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// A host bridge without quirks attached to its ID: Red Hat's generic PCIe host.
const HOST_BRIDGE: Identity = Identity {
    vendor: 0x1b36,
    device: 0x0008,
    revision: 0,
    class: 0x06_00_00,
    subsystem_vendor: 0x1af4,
    subsystem: 0x1100,
};

/// The global system interrupt that pin `pin` (1 is INTA#) of device `slot` drives.
pub fn interrupt_gsi(slot: u8, pin: u8) -> u8 {
    16 + (slot.wrapping_add(pin) & 7)
}

/// The ISA interrupt that the same pin drives where there is no I/O APIC: one of two that no device of a PC has.
pub fn interrupt_irq(slot: u8, pin: u8) -> u8 {
    wire_irq(interrupt_gsi(slot, pin).into())
}

const ISA_IRQS: [u8; 2] = [10, 11];

/// The ISA interrupt of the wire at a GSI, 16 to 23.
pub fn wire_irq(gsi: u32) -> u8 {
    ISA_IRQS[gsi as usize % ISA_IRQS.len()]
}

type SharedFunction = Arc<Mutex<dyn Function>>;

/// The bus behind the bridge. Clones are the same bus.
#[derive(Clone)]
pub struct PciHost(Arc<Topology>);

/// A reserved device number and the wires that end there.
pub struct Slot {
    number: u8,
    msi: Arc<dyn MsiSink>,
    line: Arc<dyn InterruptLine>,
}

impl Slot {
    /// Device number on bus 0.
    pub fn number(&self) -> u8 {
        self.number
    }

    /// Where the slot's messages go.
    pub fn msi(&self) -> Arc<dyn MsiSink> {
        self.msi.clone()
    }

    /// The slot's INTA#; shared with other slots downstream.
    pub fn line(&self) -> Arc<dyn InterruptLine> {
        self.line.clone()
    }
}

struct Topology {
    lines: [Arc<WiredOr>; 8],
    msi: Arc<dyn MsiSink>,
    slots: RwLock<Slots>,
    routes: RwLock<Vec<Route>>,
}

struct Slots {
    functions: [Option<SharedFunction>; SLOTS],
    next: u8,
    /// First GPA of the window that no BAR was assigned.
    free: u64,
}

/// Addresses a function decodes now.
#[derive(Clone, Copy, Debug)]
struct Route {
    slot: u8,
    bar: u8,
    base: u64,
    size: u64,
}

struct HostBridge(ConfigSpace);

impl Function for HostBridge {
    fn config(&self) -> &ConfigSpace {
        &self.0
    }
    fn config_mut(&mut self) -> &mut ConfigSpace {
        &mut self.0
    }
}

impl PciHost {
    /// An empty bus with the bridge in slot 0. `lines` are GSIs 16 to 23, each with its ISA interrupt ([`wire_irq`]).
    pub fn new(lines: [Arc<dyn InterruptLine>; 8], msi: Arc<dyn MsiSink>) -> Self {
        let mut functions = [const { None }; SLOTS];
        let bridge = HostBridge(ConfigSpace::new(HOST_BRIDGE));
        functions[0] = Some(Arc::new(Mutex::new(bridge)) as SharedFunction);
        Self(Arc::new(Topology {
            lines: lines.map(WiredOr::new),
            msi,
            slots: RwLock::new(Slots { functions, next: 1, free: WINDOW_BASE }),
            routes: RwLock::default(),
        }))
    }

    /// Reserves the next device number.
    ///
    /// # Errors
    /// [`PciError::NoSlot`].
    pub fn reserve(&self) -> Result<Slot, PciError> {
        let mut slots = self.0.slots.write().unwrap_or_else(PoisonError::into_inner);
        let number = slots.next;
        if usize::from(number) >= SLOTS {
            return Err(PciError::NoSlot);
        }
        slots.next += 1;
        let wire = &self.0.lines[usize::from(interrupt_gsi(number, 1) - 16)];
        Ok(Slot { number, msi: self.0.msi.clone(), line: wire.input() })
    }

    /// Puts `function` in `slot`, assigns its BARs inside the window and enables their decoding.
    ///
    /// # Errors
    /// [`PciError::NoRoom`].
    pub fn add<F: Function + 'static>(
        &self,
        slot: Slot,
        mut function: F,
    ) -> Result<Arc<Mutex<F>>, PciError> {
        let mut slots = self.0.slots.write().unwrap_or_else(PoisonError::into_inner);
        let config = function.config_mut();
        slots.assign_bars(config)?;
        config.set_memory_enabled();
        match config.interrupt_pin() {
            0 => {}
            pin => config.set_interrupt_line(interrupt_irq(slot.number, pin)),
        }
        self.0.reroute(slot.number, function.config());
        let function = Arc::new(Mutex::new(function));
        slots.functions[usize::from(slot.number)] = Some(function.clone());
        Ok(function)
    }

    /// The device for ports 0xcf8 to 0xcff.
    pub fn config_ports(&self) -> ConfigPorts {
        ConfigPorts::new(self.clone())
    }

    /// The device for what is at [`crate::ECAM_BASE`].
    pub fn ecam(&self) -> Ecam {
        Ecam::new(self.clone())
    }

    /// The device for the window at [`WINDOW_BASE`].
    pub fn window(&self) -> MmioWindow {
        MmioWindow::new(self.clone(), WINDOW_BASE)
    }

    /// Power-on state of every function.
    pub fn reset(&self) {
        for slot in 0..SLOTS as u8 {
            if let Some(function) = self.0.function(slot) {
                let mut function = lock(&function);
                function.reset();
                self.0.reroute(slot, function.config());
            }
        }
    }

    /// Reads configuration space: any size and alignment inside one function's 4096 bytes, all
    /// ones where no function is.
    pub(crate) fn config_read(&self, target: Target, data: &mut [u8]) {
        let Some(function) = target.on_bus_0().and_then(|slot| self.0.function(slot)) else {
            return data.fill(0xff);
        };
        let mut function = lock(&function);
        for (offset, part) in dwords(target.offset, data.len()) {
            function.config_read(offset, &mut data[part]);
        }
    }

    /// Writes configuration space and follows BARs that moved.
    pub(crate) fn config_write(&self, target: Target, data: &[u8]) {
        let Some(slot) = target.on_bus_0() else { return };
        let Some(function) = self.0.function(slot) else { return };
        let mut function = lock(&function);
        for (offset, part) in dwords(target.offset, data.len()) {
            function.config_write(offset, &data[part]);
        }
        if target.offset < 0x28 {
            self.0.reroute(slot, function.config());
        }
    }

    /// Reads at a GPA inside some BAR; all ones where nothing decodes it.
    pub(crate) fn memory_read(&self, gpa: u64, data: &mut [u8]) {
        match self.0.decode(gpa, data.len()) {
            Some((function, bar, offset)) => lock(&function).bar_read(bar, offset, data),
            None => data.fill(0xff),
        }
    }

    /// What the doorbell at a GPA does, if somebody else may ring it.
    pub(crate) fn bell(&self, gpa: u64) -> Option<Bell> {
        let (function, bar, offset) = self.0.decode(gpa, 1)?;
        lock(&function).bell(bar, offset)
    }

    /// Writes at a GPA inside some BAR; lost where nothing decodes it.
    pub(crate) fn memory_write(&self, gpa: u64, data: &[u8]) {
        if let Some((function, bar, offset)) = self.0.decode(gpa, data.len()) {
            lock(&function).bar_write(bar, offset, data);
        }
    }
}

/// A place in configuration space.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) bus: u8,
    pub(crate) slot: u8,
    pub(crate) function: u8,
    pub(crate) offset: usize,
}

impl Target {
    /// The slot, if this is function 0 on the only bus.
    fn on_bus_0(self) -> Option<u8> {
        (self.bus == 0 && self.function == 0).then_some(self.slot)
    }
}

/// Splits an access into pieces that each stay inside a dword: (offset, range of the data).
fn dwords(offset: usize, len: usize) -> impl Iterator<Item = (usize, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let at = offset + done;
        let piece = (4 - at % 4).min(len - done);
        let range = done..done + piece;
        done += piece;
        (piece > 0).then_some((at, range))
    })
}

impl Topology {
    fn function(&self, slot: u8) -> Option<SharedFunction> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        slots.functions.get(usize::from(slot))?.clone()
    }

    /// Replaces the routes of `slot` by what its BARs say now.
    fn reroute(&self, slot: u8, config: &ConfigSpace) {
        let mut routes = self.routes.write().unwrap_or_else(PoisonError::into_inner);
        routes.retain(|route| route.slot != slot);
        if config.memory_enabled() {
            routes.extend(config.bars().filter_map(|(bar, shape)| {
                let base = config.bar_address(bar)?;
                Some(Route { slot, bar, base, size: shape.size })
            }));
        }
        routes.sort_by_key(|route| (route.slot, route.bar));
    }

    /// Who answers an access. Where BARs overlap, the lowest slot does.
    fn decode(&self, gpa: u64, len: usize) -> Option<(SharedFunction, u8, u64)> {
        let routes = self.routes.read().unwrap_or_else(PoisonError::into_inner);
        let route = *routes.iter().find(|route| route.contains(gpa, len as u64))?;
        drop(routes);
        Some((self.function(route.slot)?, route.bar, gpa - route.base))
    }
}

impl Route {
    fn contains(&self, gpa: u64, len: u64) -> bool {
        let offset = gpa.checked_sub(self.base);
        offset.and_then(|at| at.checked_add(len)).is_some_and(|end| end <= self.size)
    }
}

impl Slots {
    fn assign_bars(&mut self, config: &mut ConfigSpace) -> Result<(), PciError> {
        let bars: Vec<_> = config.bars().collect();
        for (index, bar) in bars {
            let alignment = bar.size.max(0x1000);
            let base = self.free.next_multiple_of(alignment);
            if alignment > WINDOW_SIZE || base + alignment > WINDOW_BASE + WINDOW_SIZE {
                return Err(PciError::NoRoom(bar.size));
            }
            config.assign_bar(index, base);
            self.free = base + alignment;
        }
        Ok(())
    }
}
