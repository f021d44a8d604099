//! Which faults strike a request.

use std::{
    fmt,
    ops::Range,
    time::{Duration, Instant},
};

use fastrand::Rng;
use serde::{Deserialize, Serialize};

use crate::{Contents, Effect, Fault, Record, Recorder, Struck, Target};

/// What a guest asks of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// Read from a disk.
    Read,
    /// Write to it, zeroes included.
    Write,
    /// Make writes stable.
    Flush,
    /// Give up contents of the disk.
    Discard,
    /// A frame from the guest.
    Send,
    /// A frame for the guest.
    Receive,
    /// A message-signalled interrupt.
    Interrupt,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Discard => "discard",
            Self::Send => "send",
            Self::Receive => "receive",
            Self::Interrupt => "interrupt",
        })
    }
}

/// A request that faults may strike.
#[derive(Clone, Debug)]
pub struct DeviceRequest {
    /// What is asked for.
    pub op: Op,
    /// Bytes of the disk it concerns; from 0 for a frame, empty for a flush, from its vector for an interrupt.
    pub bytes: Range<u64>,
}

/// A fault that strikes: what it does, and what to report when that is known.
#[derive(Debug)]
pub struct Strike<A> {
    pub(crate) action: A,
    record: Record,
}

/// The faults of one device, and how far each is.
pub struct Schedule<A> {
    on: Target,
    rules: Vec<ArmedFault<A>>,
    random: Rng,
    started: Instant,
    recorder: Recorder,
}

struct ArmedFault<A> {
    fault: Fault<A>,
    /// Requests that met its conditions so far.
    seen: u64,
    struck: u64,
    /// Since when it may begin; what has a cue waits for that.
    armed: Option<Duration>,
    began: Option<Duration>,
}

impl<A: Clone> Schedule<A> {
    /// The faults of a device that starts now. Devices of a scenario differ in their random choices.
    pub fn new(on: Target, faults: Vec<Fault<A>>, seed: u64, recorder: Recorder) -> Self {
        let rule = |fault: Fault<A>| {
            let armed = fault.cue.is_none().then_some(Duration::ZERO);
            ArmedFault { fault, seen: 0, struck: 0, armed, began: None }
        };
        let salt = match on {
            Target::Disk(number) => number as u64,
            Target::Net(number) => 1 << 32 | number as u64,
            _ => 2 << 32,
        };
        let rules = faults.into_iter().map(rule).collect();
        let random = Rng::with_seed(seed ^ salt.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Self { on, rules, random, started: Instant::now(), recorder }
    }

    /// The faults that strike this request now, in the scenario's order.
    pub fn strikes(&mut self, request: &DeviceRequest) -> Vec<Strike<A>> {
        self.strikes_at(request, self.started.elapsed())
    }

    fn strikes_at(&mut self, request: &DeviceRequest, now: Duration) -> Vec<Strike<A>> {
        let (on, random) = (self.on.to_string(), &mut self.random);
        let strikes = self.rules.iter_mut().filter_map(|rule| {
            rule.strikes(request, now, random).then(|| Strike {
                action: rule.fault.action.clone(),
                record: Record {
                    fault: rule.fault.name.clone(),
                    on: on.clone(),
                    seconds: now.as_secs_f64(),
                    struck: Some(Struck {
                        op: request.op,
                        request: rule.seen,
                        offset: request.bytes.start,
                        len: request.bytes.end - request.bytes.start,
                    }),
                    effect: Effect::Failed,
                    contents: Vec::new(),
                },
            })
        });
        strikes.collect()
    }

    /// Records what a fault did to a request.
    pub fn record<B>(&mut self, strike: Strike<B>, effect: Effect) {
        self.record_contents(strike, effect, Vec::new());
    }

    /// Records what a fault did to a request, and which bytes of the disk or of the answer are wrong since.
    pub fn record_contents<B>(
        &mut self,
        strike: Strike<B>,
        effect: Effect,
        contents: Vec<Contents>,
    ) {
        (self.recorder)(&Record { effect, contents, ..strike.record });
    }

    /// Reports what another's fault came to here.
    pub fn record_of(&mut self, fault: &str, effect: Effect) {
        let (on, seconds) = (self.on.to_string(), self.started.elapsed().as_secs_f64());
        let (fault, contents) = (fault.to_owned(), Vec::new());
        (self.recorder)(&Record { fault, on, seconds, struck: None, effect, contents });
    }

    /// The cue of a fault that waits for one has come.
    pub fn arm(&mut self, fault: &str) {
        self.arm_at(fault, self.started.elapsed());
    }

    fn arm_at(&mut self, fault: &str, now: Duration) {
        let waiting = self.rules.iter_mut().filter(|rule| rule.fault.name == fault);
        waiting.for_each(|rule| rule.armed = rule.armed.or(Some(now)));
    }

    /// Where random choices of the faults themselves come from.
    pub fn random(&mut self) -> &mut Rng {
        &mut self.random
    }

    /// Whether a fault's action is such.
    pub fn has(&self, is_such: impl Fn(&A) -> bool) -> bool {
        self.rules.iter().any(|rule| is_such(&rule.fault.action))
    }

    /// Flips so many bits of `data`, no more than it has.
    pub fn flip(&mut self, bits: u32, data: &mut [u8]) -> Vec<(u64, u8, u8)> {
        let mut flipped = Vec::new();
        for _ in 0..u64::from(bits).min(data.len() as u64 * 8) {
            let at = self.random.usize(..data.len());
            let before = data[at];
            data[at] ^= 1 << self.random.u32(..8);
            flipped.push((at as u64, before, data[at]));
        }
        flipped
    }
}

impl<A> ArmedFault<A> {
    fn strikes(&mut self, request: &DeviceRequest, now: Duration, random: &mut Rng) -> bool {
        let fault = &self.fault;
        let begins = self.armed.is_some_and(|armed| now >= armed + fault.after);
        if !begins || !fault.ops.contains(&request.op) || !self.concerns(&request.bytes) {
            return false;
        }
        self.seen += 1;
        if self.seen < fault.request || self.struck >= fault.times {
            return false;
        }
        let began = *self.began.get_or_insert(now);
        let over = fault.lasts.is_some_and(|lasts| now - began > lasts);
        let strikes = !over && random.f64() < fault.probability;
        self.struck += u64::from(strikes);
        strikes
    }

    fn concerns(&self, bytes: &Range<u64>) -> bool {
        let overlaps = |own: &Range<u64>| own.start < bytes.end && bytes.start < own.end;
        self.fault.bytes.as_ref().is_none_or(overlaps)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DiskAction, Scenario};

    fn schedule(text: &str) -> Schedule<DiskAction> {
        let text = format!("seed = 3\n[[fault]]\non = 'disk0'\ndo = 'write-error'\n{text}");
        let scenario = Scenario::parse(&text).expect("sound");
        let faults = scenario.of_disk(0);
        Schedule::new(Target::Disk(0), faults, scenario.seed, Box::new(|_| {}))
    }

    fn write(sector: u64) -> DeviceRequest {
        DeviceRequest { op: Op::Write, bytes: sector * 512..(sector + 1) * 512 }
    }

    /// Which of so many writes, one a millisecond to ever further sectors, are struck.
    fn struck(text: &str, count: u64) -> Vec<u64> {
        let mut schedule = schedule(text);
        let mut strikes = |n| schedule.strikes_at(&write(n), Duration::from_millis(n));
        (0..count).filter(|&n| !strikes(n).is_empty()).collect()
    }

    #[test]
    fn triggers() {
        assert_eq!(struck("", 3), [0, 1, 2]);
        assert_eq!(struck("request = 3", 9), [2], "the third, once");
        assert_eq!(struck("request = 3\ntimes = 2", 9), [2, 3]);
        assert_eq!(struck("sectors = [4, 6]", 9), [4, 5]);
        assert_eq!(
            struck("sectors = [4, 9]\nrequest = 2", 9),
            [5],
            "counted among those that match"
        );
        assert_eq!(struck("after = '5ms'\ntimes = 2", 9), [5, 6]);
        assert_eq!(struck("after = '5ms'\nfor = '1ms'", 9), [5, 6]);
    }

    #[test]
    fn a_cue_is_waited_for() {
        let mut schedule = schedule("console = 'ready'\nafter = '2ms'\ntimes = 1");
        let mut struck = Vec::new();
        for n in 0..9 {
            if n == 3 {
                schedule.arm_at("another", Duration::from_millis(n));
                schedule.arm_at("fault 1", Duration::from_millis(n));
            }
            let strikes = schedule.strikes_at(&write(n), Duration::from_millis(n));
            struck.extend(strikes.iter().map(|_| n));
        }
        assert_eq!(struck, [5]);
    }

    #[test]
    fn chance_is_repeatable_and_fair() {
        let once = struck("probability = 0.1", 10_000);
        assert_eq!(once, struck("probability = 0.1", 10_000));
        assert!((800..1200).contains(&once.len()), "{}", once.len());
    }

    #[test]
    fn other_requests_are_left_alone() {
        let mut schedule = schedule("");
        for op in [Op::Read, Op::Flush, Op::Discard] {
            let request = DeviceRequest { op, ..write(0) };
            assert!(schedule.strikes(&request).is_empty(), "{op}");
        }
    }
}
