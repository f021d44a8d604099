//! `ring3 top`: what a machine does, a second.

use std::{
    collections::BTreeMap,
    io::{self, IsTerminal, Write},
    net::Shutdown,
    os::unix::net::UnixStream,
    time::Duration,
};

use clap::Args;
use inspect::top::{TopLine, TopRequest};
use serde_json::json;
use vmm::Inspector;

use super::{ControlOrder, Target, watched};
use crate::{failure::Failure, values::seconds};

/// Engine counters that are shown one by one, where they are the largest.
const ROWS: usize = 16;
/// What is shown first, and the counters that add up to it.
const SUMS: [(&str, &[&str]); 10] = [
    ("system calls", &["fast system calls", "patched system calls", "slow system calls"]),
    ("interrupts", &["interrupts"]),
    ("exits", &["wedge turns"]),
    ("kicks", &["kicks"]),
    ("misses", &["misses", "fast page faults"]),
    ("mappings", &["pages mapped", "fast mapped", "fast mappings"]),
    ("translated", &["blocks translated", "blocks decoded"]),
    ("dropped", &["translations dropped", "code pages dropped"]),
    ("device accesses", &["MMIO accesses", "port accesses"]),
    ("TLB flushes", &["flushes", "TLB flushes"]),
];

/// What to watch, and how.
#[derive(Debug, Args)]
pub struct TopArguments {
    /// Which machine
    #[command(flatten)]
    pub target: Target,
    /// Seconds between two looks
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    pub delay: Duration,
    /// End after so many periods
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub iterations: Option<u64>,
    /// Print a block a period instead of refreshing the screen, as is done where there is no terminal
    #[arg(short, long)]
    pub batch: bool,
    /// Print a JSON object a period
    #[arg(long, conflicts_with = "batch")]
    pub json: bool,
}

/// The machine's side: what is wanted is a line of the client's.
pub(super) fn serve(inspector: &Inspector, client: &UnixStream) -> io::Result<()> {
    watched::serve(client, |request: &TopRequest, writer, gone| {
        inspect::top::serve(inspector, request, writer, gone)
    })
}

/// `ring3 top`.
pub fn top(arguments: &TopArguments) -> Result<u8, Failure> {
    let period = u64::try_from(arguments.delay.as_millis()).unwrap_or(u64::MAX).max(50);
    let mut machine =
        watched::ask(&arguments.target, ControlOrder::Top, &TopRequest { period }, false)?;
    let connection = machine.get_ref().try_clone();
    let connection = connection.map_err(|error| Failure::host(error.to_string()))?;
    let mut show = Screen::new(arguments);
    let (mut last, mut periods) = (None, 0);
    watched::each_line(&mut machine, |line| {
        let TopLine::Counts { ns, vcpus } = line;
        let now = Counts { ns, vcpus };
        if let Some(before) = last.replace(now.clone()) {
            let shown = show.period(&arguments.target.machine, &Period::between(&before, &now));
            shown.map_err(|error| Failure::host(format!("output: {error}")))?;
            periods += 1;
        }
        if arguments.iterations == Some(periods) {
            // One that has ended has hung up itself.
            let _ = connection.shutdown(Shutdown::Both);
        }
        Ok(())
    })?;
    Ok(0)
}

/// What the vCPUs had done at some time.
#[derive(Clone)]
struct Counts {
    ns: u64,
    vcpus: Vec<BTreeMap<String, u64>>,
}

/// What they have done in a period.
struct Period {
    seconds: f64,
    /// A second, of all vCPUs together.
    rates: BTreeMap<String, f64>,
    /// Share of the time that each vCPU did not halt.
    busy: Vec<f64>,
}

impl Period {
    fn between(before: &Counts, now: &Counts) -> Self {
        let seconds = now.ns.saturating_sub(before.ns).max(1) as f64 / 1e9;
        let (mut rates, mut busy) = (BTreeMap::new(), Vec::new());
        for (was, is) in before.vcpus.iter().zip(&now.vcpus) {
            // A counter that a machine does not have any more counts from nothing.
            let change = |name: &str| {
                let count = |counts: &BTreeMap<String, u64>| counts.get(name).copied().unwrap_or(0);
                count(is).saturating_sub(count(was)) as f64
            };
            for name in is.keys().filter(|name| !name.ends_with(" ns")) {
                *rates.entry(name.clone()).or_default() += change(name) / seconds;
            }
            let (running, halted) = (change("running ns"), change("halted ns"));
            busy.push(running / (running + halted).max(1.0));
        }
        Self { seconds, rates, busy }
    }

    fn sum(&self, parts: &[&str]) -> f64 {
        parts.iter().filter_map(|part| self.rates.get(*part)).sum()
    }

    fn text(&self, machine: &str) -> String {
        let busy: String =
            self.busy.iter().map(|share| format!(" {:3.0}%", share * 100.0)).collect();
        let mut text = format!("{machine}: {:.1} s, vCPUs busy{busy}\n\n", self.seconds);
        for (name, parts) in SUMS {
            text.push_str(&format!("{name:>28} {:>12.0}/s\n", self.sum(parts)));
        }
        text.push('\n');
        let known = |name: &str| SUMS.iter().any(|(_, parts)| parts.contains(&name));
        let others = self.rates.iter().filter(|(name, rate)| **rate >= 0.5 && !known(name));
        let mut others: Vec<_> = others.collect();
        others.sort_by(|a, b| b.1.total_cmp(a.1));
        for (name, rate) in others.into_iter().take(ROWS) {
            text.push_str(&format!("{name:>28} {rate:>12.0}/s\n"));
        }
        text
    }

    fn json(&self, machine: &str) -> String {
        let sums: BTreeMap<_, _> =
            SUMS.iter().map(|(name, parts)| (*name, self.sum(parts))).collect();
        let (seconds, busy) = (self.seconds, &self.busy);
        let line = json!({
            "machine": machine, "seconds": seconds, "busy": busy, "per-second": sums, "counters": self.rates,
        });
        line.to_string() + "\n"
    }
}

/// Where it is shown. Nothing but the text on it is changed, so there is nothing to put back.
struct Screen {
    json: bool,
    refreshes: bool,
}

impl Screen {
    fn new(arguments: &TopArguments) -> Self {
        let refreshes = !arguments.batch && !arguments.json && io::stdout().is_terminal();
        Self { json: arguments.json, refreshes }
    }

    fn period(&mut self, machine: &str, period: &Period) -> io::Result<()> {
        const CLEAR: &str = "\x1b[H\x1b[2J";
        let text = match (self.json, self.refreshes) {
            (true, _) => period.json(machine),
            (false, true) => format!("{CLEAR}{}", period.text(machine)),
            (false, false) => period.text(machine) + "\n",
        };
        let mut output = io::stdout().lock();
        output.write_all(text.as_bytes())?;
        output.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(ns: u64, of_each: &[&[(&str, u64)]]) -> Counts {
        let vcpu = |counts: &&[(&str, u64)]| {
            counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
        };
        Counts { ns, vcpus: of_each.iter().map(vcpu).collect() }
    }

    #[test]
    fn rates_are_of_all_vcpus_and_of_the_time_that_passed() {
        let before = counts(0, &[&[("slow system calls", 10), ("running ns", 0)], &[]]);
        let first = [("slow system calls", 30), ("running ns", 500), ("halted ns", 1500)];
        let second = [("fast system calls", 40), ("halted ns", 9)];
        let period = Period::between(&before, &counts(2_000_000_000, &[&first, &second]));
        assert_eq!(period.sum(SUMS[0].1), 30.0);
        assert_eq!(period.busy, [0.25, 0.0]);
        let text = period.text("web");
        assert!(text.starts_with("web: 2.0 s, vCPUs busy  25%   0%\n"), "{text}");
        assert!(text.contains("system calls           30/s\n") && !text.contains(" ns"), "{text}");
        let json: serde_json::Value = serde_json::from_str(&period.json("web")).expect("JSON");
        assert_eq!(json["per-second"]["system calls"], 30.0);
        assert_eq!(json["counters"]["slow system calls"], 10.0);
    }

    #[test]
    fn counters_that_begin_anew_do_not_count_backwards() {
        let (before, after) = (counts(0, &[&[("kicks", 9)]]), counts(1, &[&[("kicks", 1)]]));
        assert_eq!(Period::between(&before, &after).sum(&["kicks"]), 0.0);
    }
}
