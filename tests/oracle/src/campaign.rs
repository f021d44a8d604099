//! Many cases on several threads.
//!
//! Case `n` of a seed is the same whatever the number of threads, so that a report of "seed,
//! number" is enough to see it again.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use iced_x86::Code;

use crate::check::{CheckError, Checker, Report};
use crate::generate::Generator;
use crate::state::{Case, Stop};

/// Cases a thread takes at a time.
const CHUNK: u64 = 256;

/// What to run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Seed of the list of cases.
    pub seed: u64,
    /// Number of the first case.
    pub first: u64,
    /// How many cases.
    pub count: u64,
    /// 64 or 32: which mode the code is for.
    pub bits: u32,
    /// Forms to make them from; not empty.
    pub forms: Vec<Code>,
    /// Threads.
    pub jobs: usize,
    /// Different failures after which to stop early.
    pub most_failures: usize,
}

/// A case the sides disagree on.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Its number in the list of the seed.
    pub number: u64,
    /// The case.
    pub case: Case,
    /// What the sides made of it.
    pub report: Report,
}

/// How often a form ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Runs {
    /// To its end.
    pub completed: u64,
    /// To a fault.
    pub faulted: u64,
}

/// What came of a campaign.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Cases run.
    pub cases: u64,
    /// Cases without verdict, because they depend on undefined state or did not end natively.
    pub open: BTreeMap<&'static str, u64>,
    /// Cases the sides disagree on.
    pub failed: u64,
    /// The first such case of each form that comes first in one.
    pub failures: BTreeMap<String, Failure>,
    /// How often each form ran in cases with a verdict.
    pub runs: HashMap<Code, Runs>,
}

impl Summary {
    fn note(&mut self, number: u64, case: Case, report: Report) {
        self.cases += 1;
        let open = match report.native.stop {
            Stop::Timeout => Some("did not end natively"),
            _ => report.interpreted.ignored.all,
        };
        if let Some(reason) = open {
            *self.open.entry(reason).or_default() += 1;
            return;
        }
        self.count_runs(&report);
        if !report.differences.is_empty() {
            self.failed += 1;
            let failure = Failure { number, case, report };
            self.failures.entry(kind(&failure)).or_insert(failure);
        }
    }

    fn count_runs(&mut self, report: &Report) {
        let ran = &report.interpreted.ran;
        let to_end = report.interpreted.completed.min(ran.len());
        for (i, code) in ran.iter().enumerate() {
            let runs = self.runs.entry(*code).or_default();
            if i < to_end {
                runs.completed += 1;
            } else {
                runs.faulted += 1;
            }
        }
    }

    fn merge(&mut self, other: Self) {
        self.cases += other.cases;
        self.failed += other.failed;
        for (reason, count) in other.open {
            *self.open.entry(reason).or_default() += count;
        }
        for (kind, failure) in other.failures {
            self.failures.entry(kind).or_insert(failure);
        }
        for (code, runs) in other.runs {
            let sum = self.runs.entry(code).or_default();
            sum.completed += runs.completed;
            sum.faulted += runs.faulted;
        }
    }
}

/// Failures of the same last instruction and first difference are probably one bug.
fn kind(failure: &Failure) -> String {
    let first = failure.case.instructions().first().map(|insn| insn.code());
    let code = failure.report.interpreted.ran.last().copied().or(first);
    let what = failure.report.differences.first().and_then(|line| line.split(':').next());
    format!("{:?} {}", code.unwrap_or(Code::INVALID), what.unwrap_or_default())
}

/// Runs cases. `progress(done)` is called now and then.
///
/// # Errors
/// The host lacks something, or the native side failed.
pub fn run(plan: &Plan, progress: &(dyn Fn(u64) + Sync)) -> Result<Summary, CheckError> {
    let next = AtomicU64::new(0);
    let total = Mutex::new(Summary::default());
    let work = || -> Result<(), CheckError> {
        let mut checker = Checker::new()?;
        let mut generator = Generator::new(plan.seed, plan.bits, &plan.forms);
        while let Some(numbers) = take(plan, &next) {
            let mut summary = Summary::default();
            for number in numbers {
                let case = generator.case(number);
                let report = checker.check(&case)?;
                summary.note(number, case, report);
            }
            progress(summary.cases);
            let mut total = total.lock().unwrap_or_else(PoisonError::into_inner);
            total.merge(summary);
            if total.failures.len() >= plan.most_failures {
                next.store(plan.count, Ordering::Relaxed);
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..plan.jobs.max(1)).map(|_| scope.spawn(work)).collect();
        threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    Ok(total.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// The next numbers to do.
fn take(plan: &Plan, next: &AtomicU64) -> Option<std::ops::Range<u64>> {
    let start = next.fetch_add(CHUNK, Ordering::Relaxed);
    let end = start.saturating_add(CHUNK).min(plan.count);
    (start < plan.count).then(|| plan.first + start..plan.first + end)
}
