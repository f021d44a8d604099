//! The local APIC: one for each vCPU (SDM chapter 10).
//!
//! [`state`] has the registers, as plain data. [`Lapic`] puts them behind a lock, keeps the
//! summary the CPU polls, and kicks the CPU when something new waits. [`ApicBus`] carries
//! messages to the local APICs they are for.

pub(crate) mod message;
pub(crate) mod registers;
pub(crate) mod state;
mod timer;
mod vectors;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use bus::{Kicker, Rearm, Timed};
use host::Clock;
use x86::Fault;

use crate::lock;
use message::{Delivery, Destination, Message, Taken};
use registers::{BASE_ADDRESS, BASE_ENABLED, DEFAULT_BASE};
use state::{ApicState, Shorthand};
use timer::Timer;

/// No page: the registers are not in memory.
const NO_WINDOW: u64 = u64::MAX;

/// A local APIC behind its lock.
pub(crate) struct Lapic {
    state: Mutex<ApicState>,
    /// [`ApicState::pending`] as of the last change, for the CPU to poll without the lock.
    pending: AtomicU32,
    /// GPA of the register page, or [`NO_WINDOW`].
    window: AtomicU64,
    kicker: Arc<dyn Kicker>,
}

impl Lapic {
    pub(crate) fn new(
        id: u32,
        kicker: Arc<dyn Kicker>,
        clock: Arc<dyn Clock>,
        rearm: Arc<dyn Rearm>,
    ) -> Self {
        let state = Mutex::new(ApicState::new(id, id == 0, Timer::new(clock, rearm)));
        let window = AtomicU64::new(DEFAULT_BASE);
        Self { state, pending: AtomicU32::new(0), window, kicker }
    }

    /// Every access to the state goes through here, so that the summary follows it.
    pub(crate) fn with<T>(&self, access: impl FnOnce(&mut ApicState) -> T) -> T {
        let mut state = lock(&self.state);
        let result = access(&mut state);
        let now = state.pending();
        let before = self.pending.swap(now, Ordering::AcqRel);
        drop(state);
        if now & !before != 0 {
            self.kicker.kick();
        }
        result
    }

    #[inline]
    pub(crate) fn pending(&self) -> u32 {
        self.pending.load(Ordering::Relaxed)
    }

    /// Whether the register page holds this GPA.
    #[inline]
    pub(crate) fn claims(&self, gpa: u64) -> bool {
        gpa & !0xfff == self.window.load(Ordering::Relaxed)
    }

    pub(crate) fn set_base(&self, value: u64) -> Result<(), Fault> {
        self.with(|state| {
            state.set_base(value)?;
            let in_memory = value & BASE_ENABLED != 0 && !state.x2apic();
            let window = if in_memory { value & BASE_ADDRESS } else { NO_WINDOW };
            self.window.store(window, Ordering::Relaxed);
            Ok(())
        })
    }
}

/// A local APIC as a timed device.
pub(crate) struct LapicTimer(pub(crate) Arc<Lapic>);

impl Timed for LapicTimer {
    fn deadline(&self) -> Option<u64> {
        lock(&self.0.state).timer.deadline()
    }
    fn expire(&mut self, now: u64) {
        self.0.with(|state| state.expire(now));
    }
}

/// All local APICs. Each message locks one after the other, never two at once.
pub(crate) struct ApicBus(pub(crate) Vec<Arc<Lapic>>);

impl ApicBus {
    /// Delivers a message; what became of it where it fared best.
    pub(crate) fn send(&self, message: &Message) -> Taken {
        if message.delivery == Delivery::Lowest {
            return self.send_to_lowest(message);
        }
        // A unicast by physical ID, the common case, goes straight to its destination.
        if let Destination::Physical(id) = message.destination
            && id != message::BROADCAST
        {
            let target = self.0.get(id as usize);
            return target.map_or(Taken::No, |lapic| lapic.with(|state| state.receive(message)));
        }
        let receive = |state: &mut ApicState| match state.matches(message.destination) {
            true => state.receive(message),
            false => Taken::No,
        };
        self.0.iter().map(|lapic| lapic.with(receive)).max().unwrap_or(Taken::No)
    }

    fn send_to_lowest(&self, message: &Message) -> Taken {
        let priority =
            |state: &mut ApicState| state.matches(message.destination).then(|| state.apr());
        let matching = self.0.iter().filter_map(|l| Some((l.with(priority)?, l)));
        let Some((_, lapic)) = matching.min_by_key(|(priority, _)| *priority) else {
            return Taken::No;
        };
        lapic.with(|state| state.receive(message))
    }

    /// Delivers the message the local APIC with ID `from` sends by its ICR.
    pub(crate) fn send_ipi(&self, from: u32, message: &Message, shorthand: Shorthand) {
        let to = |id: usize| match shorthand {
            Shorthand::ToSelf => id == from as usize,
            Shorthand::All => true,
            _ => id != from as usize,
        };
        if shorthand == Shorthand::Destination {
            self.send(message);
            return;
        }
        for (_, lapic) in self.0.iter().enumerate().filter(|(id, _)| to(*id)) {
            lapic.with(|state| state.receive(message));
        }
    }

    /// Drives every LINT0.
    pub(crate) fn set_lint0(&self, level: bool) {
        self.0.iter().for_each(|lapic| lapic.with(|state| state.set_lint0(level)));
    }
}
