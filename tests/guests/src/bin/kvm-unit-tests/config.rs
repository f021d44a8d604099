//! `unittests.cfg`: sections `[name]` of `key = value` lines, as kvm-unit-tests' own shell scripts
//! read it.

use anyhow::{Context, Result, bail};

/// Memory of a test that asks for none in particular, in MiB: what QEMU gives.
const MEMORY: u64 = 128;
/// Seconds a test may take if it does not say: that of kvm-unit-tests' scripts.
const TIMEOUT: u64 = 90;

/// A test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Test {
    /// Its name.
    pub name: String,
    /// The program's file name.
    pub file: String,
    /// The program's arguments.
    pub arguments: String,
    /// CPUs it asks for.
    pub cpus: u32,
    /// Memory it asks for, in MiB.
    pub memory: u64,
    /// Options for QEMU: CPU model and features, devices.
    pub options: Vec<String>,
    /// The one architecture it is for: `i386` or `x86_64`; empty if for both.
    pub arch: String,
    /// Seconds it may take.
    pub timeout: u64,
}

/// What the programs of a directory were built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arch {
    /// 64-bit programs.
    X86_64,
    /// 32-bit programs.
    I386,
}

impl Arch {
    /// As the configuration calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::I386 => "i386",
        }
    }
}

impl Test {
    fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            file: String::new(),
            arguments: String::new(),
            cpus: 1,
            memory: MEMORY,
            options: Vec::new(),
            arch: String::new(),
            timeout: TIMEOUT,
        }
    }

    /// Whether it is for programs built for `arch`.
    pub fn is_for(&self, arch: Arch) -> bool {
        self.arch.is_empty() || self.arch == arch.name()
    }

    /// Whether QEMU's `-cpu` is given `feature`, such as `-x2apic` or `+svm`.
    pub fn asks_for(&self, feature: &str) -> bool {
        let after_cpu = self.options.windows(2).filter(|pair| pair[0] == "-cpu");
        after_cpu.flat_map(|pair| pair[1].split(',')).any(|asked| asked == feature)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        match key {
            "file" => self.file = value.to_owned(),
            "test_args" => self.arguments = value.to_owned(),
            "smp" => self.cpus = value.parse().context("smp")?,
            "timeout" => self.timeout = value.parse().context("timeout")?,
            "arch" => self.arch = value.to_owned(),
            "qemu_params" | "extra_params" => {
                self.options = value.split_whitespace().map(str::to_owned).collect();
                if let Some(pair) = self.options.windows(2).find(|pair| pair[0] == "-m") {
                    self.memory = mib(&pair[1])?;
                }
            }
            // Host settings of KVM, and lists to choose from.
            _ => {}
        }
        Ok(())
    }
}

/// A size as QEMU's `-m` takes it.
fn mib(text: &str) -> Result<u64> {
    let (digits, shift) = match text.strip_suffix(['g', 'G']) {
        Some(digits) => (digits, 10),
        None => (text.trim_end_matches(['m', 'M']), 0),
    };
    let count: u64 = digits.parse().with_context(|| format!("memory size `{text}`"))?;
    count.checked_mul(1 << shift).with_context(|| format!("memory size `{text}`"))
}

/// The tests in a configuration.
///
/// # Errors
/// A line is neither a section, a setting, a comment nor empty; or a number is none.
pub fn parse(text: &str) -> Result<Vec<Test>> {
    let mut tests: Vec<Test> = Vec::new();
    for (number, line) in (1..).zip(text.lines().map(str::trim)) {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            tests.push(Test::new(name));
            continue;
        }
        let (Some((key, value)), Some(test)) = (line.split_once('='), tests.last_mut()) else {
            bail!("unittests.cfg line {number}: `{line}` is no setting of a test");
        };
        let value = value.trim().trim_matches(['"', '\'']);
        test.set(key.trim(), value).with_context(|| format!("unittests.cfg line {number}"))?;
    }
    Ok(tests)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
# comment
[first]
file = first.flat
smp = 2
qemu_params = -cpu qemu64,-x2apic,+tsc-deadline -m 2g
arch = x86_64
timeout = 30

[second]
file = second.flat
test_args = 'cpuid'
";

    #[test]
    fn sections_become_tests() {
        let tests = parse(TEXT).expect("well-formed");
        let [first, second] = tests.as_slice() else { panic!("two tests: {tests:?}") };
        assert_eq!((first.name.as_str(), first.cpus, first.memory), ("first", 2, 2048));
        assert_eq!((first.timeout, first.arch.as_str()), (30, "x86_64"));
        assert!(first.is_for(Arch::X86_64) && !first.is_for(Arch::I386));
        assert!(second.is_for(Arch::X86_64) && second.is_for(Arch::I386));
        assert!(first.asks_for("-x2apic") && !first.asks_for("x2apic"));
        assert_eq!((second.file.as_str(), second.arguments.as_str()), ("second.flat", "cpuid"));
        assert_eq!((second.cpus, second.memory, second.timeout), (1, MEMORY, TIMEOUT));
    }

    #[test]
    fn nonsense_is_refused_with_its_line() {
        for (text, line) in [("file = x", "1"), ("[a]\n\nwhat", "3"), ("[a]\nsmp = two", "2")] {
            let error = format!("{:#}", parse(text).expect_err(text));
            assert!(error.contains(&format!("line {line}")), "{error}");
        }
    }
}
