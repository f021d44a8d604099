//! The kernel's kselftests for x86: user programs that try single steps, segments, signal frames
//! and system calls where processors and emulators go wrong. The same programs run on the host's
//! CPU and kernel; what passes there has to pass in ring3.

use std::{
    fs,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use xtask::{
    assets::{Assets, Kernel},
    command::progress,
    initramfs::File,
    self_tests::{Program, SelfTestAssets, makes_32_bit_programs},
};

use crate::{
    console::Console,
    in_kernel::{self, Userland},
    is_wanted,
    machine::Limits,
    outcome::{Outcome, side_by_side},
};

/// Seconds a program may take on the host.
const HOST_SECONDS: u32 = 60;
/// Seconds a program may take in the guest.
const GUEST_SECONDS: u32 = 600;
/// Exit code of a program that found nothing to test (tools/testing/selftests/kselftest.h).
const SKIPPED: i32 = 4;

/// Runs them here and there.
///
/// # Errors
/// A program that passes on the host did not pass in ring3.
pub fn run(assets: &Assets, parts: &[String], limits: Limits<'_>) -> Result<String> {
    let mut programs = assets.kselftests()?;
    if !makes_32_bit_programs()? {
        println!("only 64-bit kselftests: for the others, install the package gcc-multilib");
    }
    programs.retain(|program| is_wanted(&program.name, parts));
    ensure!(
        !programs.is_empty(),
        "no kselftest has one of {parts:?} in its name: leave out --filter"
    );
    let host = on_the_host(&programs)?;
    let image = assets.kernel(Kernel::TrixieFull)?.image;
    let files: Vec<_> = programs.iter().map(packed).collect::<Result<_>>()?;
    let script = script(&programs);
    let userland =
        Userland { files: &files, script: &script, options: "", memory: in_kernel::MEMORY };
    let console = in_kernel::boot(assets, &image, &userland, limits)?;
    let rows = programs.iter().zip(host);
    let rows: Vec<_> =
        rows.map(|(program, host)| (&*program.name, host, ended(&console, program))).collect();
    println!("{}", side_by_side(["kselftest", "host", "ring3"], &rows));
    verdict(&rows)
}

/// The outcomes on the host, in the order of the programs.
fn on_the_host(programs: &[Program]) -> Result<Vec<Outcome>> {
    let bar = progress("on the host");
    let mut outcomes = Vec::new();
    for program in programs {
        bar.set_message(format!("{} on the host", program.name));
        let mut command = Command::new("timeout");
        command.args(["--kill-after=5", &HOST_SECONDS.to_string()]).arg(&program.path);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let status = command.status().context("cannot run `timeout`")?;
        outcomes.push(Outcome::of(status.code().unwrap_or(-1), SKIPPED));
    }
    bar.finish_and_clear();
    Ok(outcomes)
}

fn packed(program: &Program) -> Result<File> {
    let content = fs::read(&program.path)?;
    Ok(File { path: format!("root/{}", program.name), permissions: 0o755, content })
}

/// Each program after the other, with its exit code on a line of its own.
fn script(programs: &[Program]) -> String {
    let run = |program: &Program| {
        let name = &program.name;
        format!(
            "echo 'kselftest: starts {name}'\n\
             timeout -k 5 {GUEST_SECONDS} ./{name} < /dev/null\n\
             echo \"\nkselftest: ended {name} $?\"\n"
        )
    };
    let runs: String = programs.iter().map(run).collect();
    format!("cd /root\nulimit -c 0\n{runs}")
}

fn ended(console: &Console, program: &Program) -> Outcome {
    let code = console.after(&format!("kselftest: ended {} ", program.name));
    Outcome::shown(code, SKIPPED)
}

fn verdict(rows: &[(&str, Outcome, Outcome)]) -> Result<String> {
    let worse = rows.iter().filter(|(_, host, guest)| host.is_good() && !guest.is_good());
    let worse: Vec<_> = worse.map(|(name, _, guest)| format!("{name} {guest}")).collect();
    ensure!(worse.is_empty(), "passes on the host but not in ring3: {}", worse.join(", "));
    let passed = |which: fn(&(&str, Outcome, Outcome)) -> Outcome| {
        rows.iter().filter(|row| which(row) == Outcome::Passed).count()
    };
    let (host, guest) = (passed(|row| row.1), passed(|row| row.2));
    Ok(format!("{guest} of {} passed, on the host {host}", rows.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use Outcome::{Failed, Passed, Skipped, TimedOut};

    #[test]
    fn only_what_the_host_passes_is_asked() {
        let rows = [("a", Passed, Passed), ("b", Failed(1), TimedOut), ("c", Skipped, Passed)];
        assert_eq!(verdict(&rows).expect("as good"), "2 of 3 passed, on the host 1");
        let worse = [("a", Passed, Passed), ("b", Passed, Failed(1))];
        assert!(verdict(&worse).expect_err("b").to_string().ends_with("b failed (1)"));
        verdict(&[("a", Passed, Outcome::Lost)]).expect_err("lost");
    }

    #[test]
    fn exit_codes_are_read_from_the_console() {
        let mut console = Console::default();
        console.print(b"kselftest: starts x_64\n[OK]\n\nkselftest: ended x_64 1\n");
        let program = |name: &str| Program { name: name.to_owned(), path: "x".into() };
        assert_eq!(ended(&console, &program("x_64")), Failed(1));
        assert_eq!(ended(&console, &program("y_64")), Outcome::Lost);
    }
}
