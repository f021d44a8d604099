//! `test_bpf`: BPF programs through the guest kernel's compiler, then run. The kernel writes code
//! and executes it at once, in long immediates, odd shifts and every width.

use anyhow::{Context, Result, ensure};
use xtask::{assets::Assets, self_tests::SelfTestAssets};

use crate::{
    console::Console,
    in_kernel::{self, Userland},
    machine::Limits,
};

const SCRIPT: &str = "insmod /modules/test_bpf.ko && echo test_bpf: loaded\n";
/// Programs in Linux 6.12's test_bpf; with the compiler on, all pass.
const PROGRAMS: u32 = 1049;
const TAIL_CALLS: u32 = 10;
const SEGMENTS: u32 = 2;

/// Runs it.
///
/// # Errors
/// Not every program passed.
pub fn run(assets: &Assets, limits: Limits<'_>) -> Result<String> {
    let kernel = assets.self_test_kernel()?;
    let (files, _) = in_kernel::modules(&kernel, &["test_bpf"])?;
    let userland =
        Userland { files: &files, script: SCRIPT, options: "", memory: in_kernel::MEMORY };
    verdict(&in_kernel::boot(assets, &kernel.image, &userland, limits)?)
}

fn verdict(console: &Console) -> Result<String> {
    let parts = [
        ("test_bpf: Summary: ", PROGRAMS, "programs"),
        ("test_bpf: test_tail_calls: Summary: ", TAIL_CALLS, "tail calls"),
        ("test_bpf: test_skb_segment: Summary: ", SEGMENTS, "segments"),
    ];
    let mut figures = Vec::new();
    for (prefix, expected, what) in parts {
        let found = console.after(prefix);
        let found = found.with_context(|| format!("no `{prefix}`:\n{}", console.tail()))?;
        let wanted = format!("{expected} PASSED, 0 FAILED");
        ensure!(found.starts_with(&wanted), "{what}: {found}, not {wanted}{}", failures(console));
        figures.push(format!("{what} {found}"));
    }
    ensure!(console.after("test_bpf: loaded").is_some(), "the module could not be loaded");
    Ok(figures.join("; "))
}

/// The lines about programs that failed.
fn failures(console: &Console) -> String {
    let failed = console.lines().filter(|line| line.contains("FAIL") && line.contains('#'));
    failed.map(|line| format!("\n  {line}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(programs: &str) -> Console {
        let mut console = Console::default();
        let text = format!(
            "[ 1.0] test_bpf: #1 X FAIL (1 times)\n\
             [ 2.0] test_bpf: Summary: {programs}, [1037/1037 JIT'ed]\n\
             [ 3.0] test_bpf: test_tail_calls: Summary: 10 PASSED, 0 FAILED, [10/10 JIT'ed]\n\
             [ 4.0] test_bpf: test_skb_segment: Summary: 2 PASSED, 0 FAILED\n\
             test_bpf: loaded\n"
        );
        console.print(text.as_bytes());
        console
    }

    #[test]
    fn only_the_exact_figures_pass() {
        verdict(&printed("1049 PASSED, 0 FAILED")).expect("sound");
        verdict(&printed("1050 PASSED, 0 FAILED")).expect_err("another kernel");
        let error = verdict(&printed("1048 PASSED, 1 FAILED")).expect_err("one failed");
        assert!(error.to_string().contains("#1 X FAIL"), "{error}");
        verdict(&Console::default()).expect_err("nothing printed");
    }
}
