//! Records of several vCPUs in the order of time.
//!
//! A vCPU's records arrive when the vCPU gives its turn away, while it runs after some milliseconds at the most. A thread may have
//! moved to another vCPU meanwhile, and ended there a call that it began here. With several vCPUs records are therefore held for
//! [`HOLD_TIME`], and then reported in the order of time.

use std::{
    mem,
    ops::Range,
    time::{Duration, Instant},
};

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

/// Records that are due for a report.
#[derive(Default)]
pub struct DueRecords {
    batches: Vec<Batch>,
    /// Records that follow each other, in the order of time: of which batch, and where in it.
    runs: Vec<(usize, Range<usize>)>,
}

impl DueRecords {
    /// The records in the order of time, with the batches they are of.
    pub fn runs(&self) -> impl Iterator<Item = (&Batch, &[u8])> {
        self.runs
            .iter()
            .map(|(n, place)| (&self.batches[*n], &self.batches[*n].records[place.clone()]))
    }
}

impl ReorderBuffer {
    /// Takes what is due for a report.
    pub fn due(&mut self, hold: bool) -> DueRecords {
        if !hold {
            return in_order(mem::take(&mut self.batches), u64::MAX, &mut self.batches);
        }
        let newest = self.batches.iter().map(|batch| batch.tsc).max();
        self.marks.extend(newest.map(|tsc| (Instant::now(), tsc)));
        let over = self.marks.partition_point(|(came, _)| came.elapsed() >= HOLD_TIME);
        let Some(until) = self.marks.drain(..over).map(|(_, tsc)| tsc).max() else {
            return DueRecords::default();
        };
        in_order(mem::take(&mut self.batches), until, &mut self.batches)
    }
}

/// Takes the records of `all` that are not newer than `until`, sorted by time, and moves newer ones to `rest`. Each batch has its own
/// records sorted by time already.
fn in_order(all: Vec<Batch>, until: u64, rest: &mut Vec<Batch>) -> DueRecords {
    let mut due = DueRecords::default();
    let mut records: Vec<(u64, usize, Range<usize>)> = Vec::new();
    for mut batch in all {
        let first = tap::records(&batch.records).next().map(|record| record.moment.tsc);
        // Most are newer, where a vCPU makes many: they are not looked at again and again.
        if first.is_some_and(|tsc| tsc > until) {
            rest.push(batch);
            continue;
        }
        let (n, mut at, mut has_newer) = (due.batches.len(), 0, false);
        for record in tap::records(&batch.records) {
            let tsc = record.moment.tsc;
            has_newer = tsc > until;
            if has_newer {
                break;
            }
            records.push((tsc, n, at..at + record.len()));
            at += record.len();
        }
        if has_newer {
            rest.push(Batch { records: batch.records.split_off(at), ..batch });
        }
        due.batches.push(batch);
    }
    records.sort_by_key(|(tsc, ..)| *tsc);
    for (_, n, place) in records {
        match due.runs.last_mut() {
            Some((last, run)) if *last == n && run.end == place.start => run.end = place.end,
            _ => due.runs.push((n, place)),
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

    fn times_of(batch: &Batch, records: &[u8]) -> Vec<(usize, u64)> {
        tap::records(records).map(|record| (batch.vcpu, record.moment.tsc)).collect()
    }

    fn times(due: &DueRecords) -> Vec<(usize, u64)> {
        due.runs().flat_map(|(batch, records)| times_of(batch, records)).collect()
    }

    #[test]
    fn records_of_two_are_told_as_they_happened() {
        let batches = vec![batch(0, &[1, 4]), batch(1, &[2, 3, 5])];
        let mut reorder = ReorderBuffer { batches, ..ReorderBuffer::default() };
        assert_eq!(times(&reorder.due(true)), [], "not yet");
        assert_eq!(times(&reorder.due(false)), [(0, 1), (1, 2), (1, 3), (0, 4), (1, 5)]);
        assert_eq!(times(&reorder.due(false)), []);
    }

    #[test]
    fn what_came_later_is_held_longer() {
        let mut rest = Vec::new();
        let all = vec![batch(0, &[1, 4]), batch(1, &[2, 6]), batch(1, &[7, 8])];
        let due = in_order(all, 3, &mut rest);
        assert_eq!(times(&due), [(0, 1), (1, 2)]);
        let rest: Vec<_> = rest.iter().map(|batch| times_of(batch, &batch.records)).collect();
        assert_eq!(rest, [vec![(0, 4)], vec![(1, 6)], vec![(1, 7), (1, 8)]]);
    }
}
