//! The last things that happened to a vCPU, for the report of a crash.

use std::collections::VecDeque;

/// Something that happened between instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A maskable interrupt was delivered.
    Interrupt(u8),
    /// A non-maskable interrupt was delivered.
    Nmi,
    /// The CPU halted.
    Halt,
    /// Another CPU has reset it.
    Init,
    /// Another CPU has started it, at this vector.
    StartUp(u8),
}

/// A bounded log: the newest entries win.
#[derive(Clone, Debug)]
pub struct EventLog {
    /// Instruction count and RIP (an offset into CS) at the event.
    entries: VecDeque<(u64, u64, Event)>,
    capacity: usize,
}

impl EventLog {
    /// A log of the last `capacity` events.
    pub fn new(capacity: usize) -> Self {
        Self { entries: VecDeque::with_capacity(capacity), capacity }
    }

    /// Notes an event after `instructions` instructions, at `rip`.
    pub fn push(&mut self, instructions: u64, rip: u64, event: Event) {
        if self.entries.len() == self.capacity {
            self.entries.pop_front();
        }
        self.entries.push_back((instructions, rip, event));
    }

    /// The events, oldest first, one a line.
    pub fn lines(&self) -> impl Iterator<Item = String> + '_ {
        self.entries.iter().map(|(count, rip, event)| {
            let what = match event {
                Event::Interrupt(vector) => format!("interrupt {vector:#x}"),
                Event::Nmi => "NMI".to_owned(),
                Event::Halt => "halt".to_owned(),
                Event::Init => "INIT".to_owned(),
                Event::StartUp(vector) => format!("start-up {vector:#x}"),
            };
            format!("{count:>14} {rip:016x} {what}")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_are_kept_in_order() {
        let mut log = EventLog::new(2);
        for count in 1..=3 {
            log.push(count, 0x1000, Event::Interrupt(0x30 + count as u8));
        }
        let lines: Vec<_> = log.lines().collect();
        assert_eq!(lines.len(), 2);
        assert!(lines[0].ends_with("interrupt 0x32"), "{}", lines[0]);
        assert!(lines[1].ends_with("interrupt 0x33"), "{}", lines[1]);
    }
}
