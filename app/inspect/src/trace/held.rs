//! Records of several vCPUs in the order of time.
//!
//! A vCPU's records come when it gives its turn away, after some milliseconds at the most while it runs. A thread that has gone
//! to another vCPU meanwhile has ended there what it began here. So where there are several vCPUs records are held for a
//! while, and then told as they happened.

use std::time::{Duration, Instant};

use x86::tap;

use super::outlet::Batch;

/// How long records are held where there are several vCPUs.
const WHILE: Duration = Duration::from_millis(200);

/// Records that are not told yet.
#[derive(Default)]
pub struct Held {
    pub batches: Vec<Batch>,
    /// When those came that are to be told next, and the counter then.
    marks: Vec<(Instant, u64)>,
}

impl Held {
    /// What is to be told now, in batches that follow each other.
    pub fn due(&mut self, hold: bool) -> Vec<Batch> {
        if !hold {
            return in_order(std::mem::take(&mut self.batches), u64::MAX, &mut self.batches);
        }
        let newest = self.batches.iter().map(|batch| batch.tsc).max();
        self.marks.extend(newest.map(|tsc| (Instant::now(), tsc)));
        let over = self.marks.partition_point(|(came, _)| came.elapsed() >= WHILE);
        let Some(until) = self.marks.drain(..over).map(|(_, tsc)| tsc).max() else {
            return Vec::new();
        };
        in_order(std::mem::take(&mut self.batches), until, &mut self.batches)
    }
}

/// What is not newer than `until`, in order; the rest is put back.
fn in_order(mut all: Vec<Batch>, until: u64, rest: &mut Vec<Batch>) -> Vec<Batch> {
    let mut due = Vec::new();
    if let [_] = &all[..]
        && until == u64::MAX
    {
        due.append(&mut all);
        return due;
    }
    let mut records: Vec<(u64, usize, Vec<u8>)> = Vec::new();
    for (n, batch) in all.iter().enumerate() {
        let mut at = 0;
        let mut later = Vec::new();
        for record in tap::records(&batch.records) {
            let bytes = &batch.records[at..at + record.len()];
            at += record.len();
            if record.moment.tsc <= until {
                records.push((record.moment.tsc, n, bytes.to_vec()));
            } else {
                later.extend_from_slice(bytes);
            }
        }
        if !later.is_empty() {
            rest.push(Batch { records: later, ..*batch });
        }
    }
    records.sort_by_key(|(tsc, ..)| *tsc);
    for (_, n, bytes) in records {
        let Batch { vcpu, tsc, ns, .. } = all[n];
        match due.last_mut() {
            Some(last) if last.vcpu == vcpu && last.tsc == tsc => last.records.extend(bytes),
            _ => due.push(Batch { vcpu, records: bytes, tsc, ns }),
        }
    }
    due
}

#[cfg(test)]
mod tests {
    use super::*;
    use x86::tap::{HEAD_WORDS, Moment, Step};

    struct Nothing;

    impl tap::Memory for Nothing {
        fn read(&mut self, _: u64, _: &mut [u8]) -> Option<bool> {
            Some(false)
        }
    }

    /// Records of these times.
    fn batch(vcpu: usize, times: &[u64]) -> Batch {
        let mut records = Vec::new();
        for tsc in times {
            let mut room = vec![0; HEAD_WORDS * 8];
            let moment = Moment { tsc: *tsc, ..Moment::default() };
            tap::run(|_| Some(Step::End.encode()), 0, &moment, &mut Nothing, &mut room);
            records.append(&mut room);
        }
        let tsc = times.last().copied().unwrap_or_default();
        Batch { vcpu, records, tsc, ns: 0 }
    }

    fn times(batches: &[Batch]) -> Vec<(usize, u64)> {
        let of = |batch: &Batch| -> Vec<(usize, u64)> {
            tap::records(&batch.records).map(|record| (batch.vcpu, record.moment.tsc)).collect()
        };
        batches.iter().flat_map(of).collect()
    }

    #[test]
    fn records_of_two_are_told_as_they_happened() {
        let batches = vec![batch(0, &[1, 4]), batch(1, &[2, 3, 5])];
        let mut held = Held { batches, ..Held::default() };
        assert_eq!(times(&held.due(true)), [], "not yet");
        assert_eq!(times(&held.due(false)), [(0, 1), (1, 2), (1, 3), (0, 4), (1, 5)]);
        assert!(held.due(false).is_empty());
    }

    #[test]
    fn what_came_later_is_held_longer() {
        let mut rest = Vec::new();
        let due = in_order(vec![batch(0, &[1, 4]), batch(1, &[2, 6])], 3, &mut rest);
        assert_eq!(times(&due), [(0, 1), (1, 2)]);
        assert_eq!(times(&rest), [(0, 4), (1, 6)]);
    }
}
