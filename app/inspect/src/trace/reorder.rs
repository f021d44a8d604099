//! Records of several vCPUs in the order of time.
//!
//! A vCPU's records arrive when the vCPU gives its turn away, while it runs after some milliseconds at the most. A thread may have
//! moved to another vCPU meanwhile, and ended there a call that it began here. With several vCPUs records are therefore held for
//! [`HOLD_TIME`], and then reported in the order of time.

use std::time::{Duration, Instant};

use x86::tap;

use super::channel::Batch;

/// How long records are held where there are several vCPUs.
const HOLD_TIME: Duration = Duration::from_millis(200);

/// Records that are not reported yet.
#[derive(Default)]
pub struct ReorderBuffer {
    pub batches: Vec<Batch>,
    /// For each arrival: when, and the newest time-stamp counter of the records then.
    marks: Vec<(Instant, u64)>,
}

impl ReorderBuffer {
    /// Takes what is due for a report, in batches in the order of time.
    pub fn due(&mut self, hold: bool) -> Vec<Batch> {
        if !hold {
            return in_order(std::mem::take(&mut self.batches), u64::MAX, &mut self.batches);
        }
        let newest = self.batches.iter().map(|batch| batch.tsc).max();
        self.marks.extend(newest.map(|tsc| (Instant::now(), tsc)));
        let over = self.marks.partition_point(|(came, _)| came.elapsed() >= HOLD_TIME);
        let Some(until) = self.marks.drain(..over).map(|(_, tsc)| tsc).max() else {
            return Vec::new();
        };
        in_order(std::mem::take(&mut self.batches), until, &mut self.batches)
    }
}

/// Takes the records not newer than `until`, in order; newer ones go to `rest`.
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
        let mut reorder = ReorderBuffer { batches, ..ReorderBuffer::default() };
        assert_eq!(times(&reorder.due(true)), [], "not yet");
        assert_eq!(times(&reorder.due(false)), [(0, 1), (1, 2), (1, 3), (0, 4), (1, 5)]);
        assert!(reorder.due(false).is_empty());
    }

    #[test]
    fn what_came_later_is_held_longer() {
        let mut rest = Vec::new();
        let due = in_order(vec![batch(0, &[1, 4]), batch(1, &[2, 6])], 3, &mut rest);
        assert_eq!(times(&due), [(0, 1), (1, 2)]);
        assert_eq!(times(&rest), [(0, 4), (1, 6)]);
    }
}
