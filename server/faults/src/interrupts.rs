//! Interrupts of PCI devices that get lost, or come twice, or without a reason.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bus::MsiSink;

use crate::{
    Effect, InterruptAction, Schedule,
    schedule::{DeviceRequest, Op},
};

/// Where a message for the first vCPU goes.
const FIRST_CPU: u64 = 0xfee0_0000;

/// The way of messages to the interrupt controllers.
pub struct FaultyInterrupts {
    below: Arc<dyn MsiSink>,
    schedule: Mutex<Schedule<InterruptAction>>,
}

impl FaultyInterrupts {
    /// `below` with these faults.
    pub fn new(below: Arc<dyn MsiSink>, schedule: Schedule<InterruptAction>) -> Self {
        Self { below, schedule: Mutex::new(schedule) }
    }

    fn schedule(&self) -> MutexGuard<'_, Schedule<InterruptAction>> {
        self.schedule.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The cue of a fault has come.
    pub fn arm(&self, fault: &str) {
        self.schedule().arm(fault);
    }

    /// Sends the first vCPU an interrupt that no device asked for.
    pub fn send_spurious(&self, vector: u8) {
        self.below.send(FIRST_CPU, vector.into());
    }

    /// How often a message arrives.
    fn copies(&self, data: u32) -> usize {
        let vector = u64::from(data & 0xff);
        let request = DeviceRequest { op: Op::Interrupt, bytes: vector..vector + 1 };
        let mut schedule = self.schedule();
        let mut copies = 1;
        for strike in schedule.strikes(&request) {
            let effect = match strike.action {
                InterruptAction::Lost => {
                    copies = 0;
                    Effect::Dropped
                }
                InterruptAction::Duplicate => {
                    copies *= 2;
                    Effect::Duplicated
                }
            };
            schedule.record(strike, effect);
        }
        copies
    }
}

impl MsiSink for FaultyInterrupts {
    fn send(&self, address: u64, data: u32) {
        (0..self.copies(data)).for_each(|_| self.below.send(address, data));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Scenario, Target};

    #[derive(Default)]
    struct Sink(Mutex<Vec<u32>>);

    impl MsiSink for Sink {
        fn send(&self, _: u64, data: u32) {
            self.0.lock().expect("whole").push(data);
        }
    }

    #[test]
    fn lost_doubled_and_spurious() {
        let text = "[[fault]]\non='interrupts'\ndo='lost'\nrequest=2\n\
            [[fault]]\non='interrupts'\ndo='duplicate'\nrequest=3";
        let faults = Scenario::parse(text).expect("sound").of_interrupts();
        let sink = Arc::new(Sink::default());
        let schedule = Schedule::new(Target::Interrupts, faults, 1, Box::new(|_| {}));
        let interrupts = FaultyInterrupts::new(sink.clone(), schedule);
        (40..44).for_each(|vector| interrupts.send(FIRST_CPU, vector));
        interrupts.send_spurious(99);
        assert_eq!(*sink.0.lock().expect("whole"), [40, 42, 42, 43, 99]);
    }
}
