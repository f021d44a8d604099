//! `ring3 doctor`: what this host offers, and what each thing means for speed.

use std::fmt::Write as _;

use host_linux::{LinuxClock, TscSource, probe};
use serde::Serialize;

use crate::isolation;

/// One line of the survey.
#[derive(Debug, Serialize)]
struct Finding {
    /// What was looked at.
    name: &'static str,
    /// What was found.
    value: String,
    /// Whether it is as one would wish; absent for plain facts.
    #[serde(skip_serializing_if = "Option::is_none")]
    good: Option<bool>,
    /// What it means.
    meaning: &'static str,
}

/// The whole survey.
#[derive(Debug, Serialize)]
struct Survey {
    version: &'static str,
    findings: Vec<Finding>,
}

/// Makes the survey; must be called while the process has one thread.
pub fn survey(json: bool) -> String {
    let mut findings = vec![engine()];
    findings.extend(machine());
    findings.extend(mechanisms());
    findings.extend(limits());
    findings.push(instruction_sets());
    let survey = Survey { version: env!("CARGO_PKG_VERSION"), findings };
    if json {
        return serde_json::to_string_pretty(&survey).unwrap_or_default();
    }
    text(&survey)
}

fn text(survey: &Survey) -> String {
    let mut text = format!("ring3 {} on this host:\n", survey.version);
    for finding in &survey.findings {
        let mark = match finding.good {
            Some(true) => "yes",
            Some(false) => "NO",
            None => "",
        };
        let value = if finding.good.is_some() && finding.value.is_empty() {
            mark.to_owned()
        } else {
            finding.value.clone()
        };
        let _ = writeln!(text, "\n{:<24} {value}\n    {}", finding.name, finding.meaning);
    }
    text.truncate(text.trim_end().len());
    text
}

fn fact(name: &'static str, value: impl Into<String>, meaning: &'static str) -> Finding {
    Finding { name, value: value.into(), good: None, meaning }
}

fn mechanism(name: &'static str, good: bool, meaning: &'static str) -> Finding {
    Finding { name, value: String::new(), good: Some(good), meaning }
}

/// What `--engine auto` is here; all else only says why.
fn engine() -> Finding {
    match vmm::check_fast_engine() {
        Ok(()) => fact(
            "engine",
            "fast",
            "programs run directly on the CPU, the guest's kernel is translated",
        ),
        Err(reason) => fact(
            "engine",
            format!("interp: {reason}"),
            "everything is interpreted: exact, but tens of times slower than the CPU",
        ),
    }
}

fn machine() -> Vec<Finding> {
    let clock = LinuxClock::new();
    let mhz = host::Clock::tsc_hz(&clock) as f64 / 1e6;
    let source = match clock.tsc_source() {
        TscSource::CrystalRatio => "from the crystal ratio",
        TscSource::HypervisorLeaf => "from the hypervisor",
        TscSource::NominalFrequency => "nominal",
        TscSource::Calibrated => "measured: CPUID does not tell",
    };
    let nested = if probe::under_hypervisor() { " (itself a virtual machine)" } else { "" };
    vec![
        fact("kernel", probe::kernel_release(), "Linux 5.11 or later has all that is used"),
        fact("cpu", format!("{}{nested}", probe::cpu_name()), "what guest user code runs on"),
        fact(
            "time-stamp counter",
            format!("{mhz:.3} MHz, {source}"),
            "the guest's clock; a measured frequency may drift from the host's by some ppm",
        ),
    ]
}

fn mechanisms() -> Vec<Finding> {
    vec![
        mechanism(
            "syscall user dispatch",
            probe::syscall_user_dispatch(),
            "not used: the filter catches as fast, and its exceptions cannot be reached by guest code",
        ),
        mechanism(
            "seccomp filter",
            probe::seccomp_trap(),
            "catches guest system calls, and jails guest code; the fast engine needs it",
        ),
        mechanism(
            "protection keys",
            probe::protection_keys(),
            "guest kernel memory is shut to guest user code without a system call per switch",
        ),
        mechanism(
            "seccomp notifications",
            probe::seccomp_notification(),
            "where there are no protection keys, --guest-isolation strict shuts kernel memory by them",
        ),
        fact(
            "guest isolation",
            isolation::usual(),
            "what keeps a guest's programs from its kernel's memory unless --guest-isolation says otherwise",
        ),
        mechanism(
            "FSGSBASE",
            probe::fsgsbase(),
            "guest thread switches need no system call for the segment bases",
        ),
        mechanism(
            "CPUID faulting",
            probe::cpuid_faulting(),
            "guest user code sees the guest's CPUID; without it, the host's",
        ),
        mechanism("memfd", probe::memfd(), "guest memory is one file shared by all processes"),
        mechanism(
            "user namespaces",
            probe::user_namespaces(),
            "device servers can be jailed without root; no effect on speed",
        ),
    ]
}

fn limits() -> Vec<Finding> {
    let number = |value: Option<u64>| value.map_or("unknown".to_owned(), |v| v.to_string());
    let mib =
        |value: Option<u64>| value.map_or("unknown".to_owned(), |v| format!("{} MiB", v >> 20));
    let lock = probe::memory_lock_limit();
    vec![
        fact("memory", mib(probe::memory_total()), "a guest can have at most this much"),
        fact("memory available", mib(probe::memory_available()), "more than this swaps or fails"),
        fact(
            "memory lock limit",
            lock.map_or("unlimited".to_owned(), |bytes| format!("{} KiB", bytes >> 10)),
            "guest memory is not locked; a small limit does no harm",
        ),
        fact(
            "vm.max_map_count",
            number(probe::max_map_count()),
            "a program slows down whose scattered pages are more than these; 1048576 is enough for 1.7 GiB of them",
        ),
        fact(
            "vm.mmap_min_addr",
            number(probe::mmap_min_addr()),
            "guest programs that map lower addresses run those parts in the interpreter",
        ),
    ]
}

fn instruction_sets() -> Finding {
    let all = probe::instruction_sets();
    let list = |has: bool| {
        let names: Vec<_> = all.iter().filter(|(_, h)| *h == has).map(|(name, _)| *name).collect();
        names.join(" ")
    };
    let missing = list(false);
    let value =
        if missing.is_empty() { list(true) } else { format!("{} (not: {missing})", list(true)) };
    fact("instruction sets", value, "guests are offered what the host has, up to AVX2")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_valid_and_says_the_same() {
        let parsed: serde_json::Value = serde_json::from_str(&survey(true)).expect("valid");
        let findings = parsed["findings"].as_array().expect("a list");
        let text = survey(false);
        for finding in findings {
            assert!(text.contains(finding["name"].as_str().expect("a name")));
            assert!(!finding["meaning"].as_str().expect("a meaning").is_empty());
        }
        assert!(findings.iter().any(|f| f["good"].is_boolean()));
        assert_eq!(findings[0]["name"], "engine");
        assert_eq!(findings[0]["value"] == "fast", vmm::check_fast_engine().is_ok());
    }
}
