//! Rounds of what is measured by starting environments: two rows at once, as one start tells both.

use std::time::{Duration, Instant};

use crate::{
    instance::{Instance, Pace},
    record::Measurement,
    session::Failure,
};

/// Two rows that are measured together, by environment.
pub(crate) type Pair = (Vec<Measurement>, Vec<Measurement>);

/// Takes samples of both rows in every environment in turn, as often as the pace asks for and allows.
pub(crate) fn measure(
    instances: &[Instance<'_>],
    pace: &Pace,
    sample: impl Fn(&Instance<'_>) -> Result<(f64, f64), Failure>,
) -> Pair {
    let mut samplers: Vec<_> = instances.iter().map(|_| PairSampler::default()).collect();
    for _ in 0..pace.batches {
        for (instance, sampler) in instances.iter().zip(&mut samplers) {
            if !sampler.is_over(pace) {
                sampler.step(|| sample(instance));
            }
        }
    }
    samplers.into_iter().map(|sampler| (sampler.first, sampler.second)).unzip()
}

/// Takes the samples of both rows in one environment.
#[derive(Default)]
struct PairSampler {
    first: Measurement,
    second: Measurement,
    spent: Duration,
}

impl PairSampler {
    fn is_over(&self, pace: &Pace) -> bool {
        self.first.is_stopped() || pace.is_enough(self.first.samples.len(), self.spent)
    }

    fn step(&mut self, measure: impl FnOnce() -> Result<(f64, f64), Failure>) {
        let started = Instant::now();
        match measure() {
            Ok((first, second)) => {
                self.first.add(first);
                self.second.add(second);
            }
            Err(failure) => {
                self.first.stop(&failure);
                self.second.stop(&failure);
            }
        }
        self.spent += started.elapsed();
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, process::Command};

    use super::*;
    use crate::peers::Peer;

    fn pace(row: Duration) -> Pace {
        Pace { row, batches: 7, ..Pace::default() }
    }

    #[test]
    fn both_rows_get_what_one_measurement_tells_until_it_fails() {
        let mut sampler = PairSampler::default();
        let pace = pace(Duration::from_secs(60));
        sampler.step(|| Ok((1.0, 2.0)));
        assert!(!sampler.is_over(&pace));
        sampler.step(|| Err(Failure::Wrong("no".to_owned())));
        assert!(sampler.is_over(&pace));
        assert_eq!((sampler.first.samples, sampler.second.samples), (vec![1.0], vec![2.0]));
        assert_eq!((sampler.first.error, sampler.second.error), (some("no"), some("no")));
    }

    fn some(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    #[test]
    fn a_slow_environment_has_the_fewest_rounds_and_the_others_all() {
        let peers = ["slow", "quick"].map(|name| Peer::new(name, "", |_| Command::new("true")));
        let instances: Vec<_> = peers.iter().map(Instance::new).collect();
        let asked = Cell::new(0);
        let (first, second) = measure(&instances, &pace(Duration::from_millis(40)), |instance| {
            asked.set(asked.get() + 1);
            if instance.peer.name() == "slow" {
                std::thread::sleep(Duration::from_millis(50));
            }
            Ok((f64::from(asked.get()), 0.0))
        });
        assert_eq!(first[0].samples, [1.0, 3.0, 5.0, 7.0, 9.0], "no fewer than five");
        assert_eq!(first[1].samples, [2.0, 4.0, 6.0, 8.0, 10.0, 11.0, 12.0]);
        assert_eq!(second[1].samples.len(), 7);
    }
}
