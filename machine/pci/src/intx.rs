//! INTx: a level-triggered pin, and the wire that several functions' pins share.

use crate::lock;
use bus::InterruptLine;
use std::sync::{Arc, Mutex};

/// One function's interrupt pin. The wire is high while an interrupt is pending and the command
/// register does not disable INTx.
pub struct Intx {
    line: Arc<dyn InterruptLine>,
    state: Mutex<IntxState>,
}

#[derive(Default)]
struct IntxState {
    pending: bool,
    disabled: bool,
}

impl Intx {
    /// A quiet pin on `line`.
    pub fn new(line: Arc<dyn InterruptLine>) -> Arc<Self> {
        Arc::new(Self { line, state: Mutex::default() })
    }

    /// Says whether the function has an interrupt pending.
    pub fn set_pending(&self, pending: bool) {
        self.update(|state| state.pending = pending);
    }

    /// Takes the command register's INTx disable bit, or that MSI-X is on.
    pub fn set_disabled(&self, disabled: bool) {
        self.update(|state| state.disabled = disabled);
    }

    /// The status register's Interrupt Status bit.
    pub fn pending(&self) -> bool {
        lock(&self.state).pending
    }

    fn update(&self, change: impl FnOnce(&mut IntxState)) {
        let mut state = lock(&self.state);
        let before = state.pending && !state.disabled;
        change(&mut state);
        let after = state.pending && !state.disabled;
        if before != after {
            self.line.set(after);
        }
    }
}

/// A wire that is high while any of its inputs is.
pub(crate) struct WiredOr {
    line: Arc<dyn InterruptLine>,
    high_inputs: Mutex<usize>,
}

impl WiredOr {
    /// A low wire.
    pub(crate) fn new(line: Arc<dyn InterruptLine>) -> Arc<Self> {
        Arc::new(Self { line, high_inputs: Mutex::new(0) })
    }

    /// One more input, low.
    pub(crate) fn input(self: &Arc<Self>) -> Arc<dyn InterruptLine> {
        Arc::new(Input { wire: self.clone(), level: Mutex::new(false) })
    }

    fn change(&self, rises: bool) {
        let mut high = lock(&self.high_inputs);
        *high = if rises { *high + 1 } else { *high - 1 };
        // Under the lock, so that the wire's last edge is the right one.
        match (*high, rises) {
            (1, true) => self.line.set(true),
            (0, false) => self.line.set(false),
            _ => {}
        }
    }
}

struct Input {
    wire: Arc<WiredOr>,
    level: Mutex<bool>,
}

impl InterruptLine for Input {
    fn set(&self, level: bool) {
        let mut old = lock(&self.level);
        if *old != level {
            *old = level;
            self.wire.change(level);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Edges(Mutex<Vec<bool>>);
    impl InterruptLine for Edges {
        fn set(&self, level: bool) {
            lock(&self.0).push(level);
        }
    }

    #[test]
    fn a_shared_wire_falls_with_its_last_input() {
        let edges = Arc::new(Edges::default());
        let wire = WiredOr::new(edges.clone());
        let (a, b) = (Intx::new(wire.input()), Intx::new(wire.input()));
        a.set_pending(true);
        b.set_pending(true);
        a.set_pending(false);
        assert_eq!(*lock(&edges.0), [true]);
        b.set_disabled(true);
        assert_eq!(*lock(&edges.0), [true, false]);
        assert!(b.pending());
        b.set_disabled(false);
        assert_eq!(*lock(&edges.0), [true, false, true]);
    }
}
