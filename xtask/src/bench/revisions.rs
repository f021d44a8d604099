//! Builds ring3 as it is, and as it was at another revision.
//!
//! The other revision is exported into a directory of its own, so that the checkout stays as it is.
//! Its program is kept for the next time, and what it depends on for the next revision.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use harness::peers::Ring3;

use super::files::build_directory;
use crate::{
    checks::{build_ring3, root},
    command::{output, run},
};

/// What to measure: ring3 as it is, and `before`, if that is asked for.
///
/// # Errors
/// One of them does not exist or does not build.
pub(super) fn programs(given: Option<&Path>, before: Option<&str>) -> Result<Vec<Ring3>> {
    let mut programs = vec![Ring3 { suffix: String::new(), program: current(given)? }];
    if let Some(revision) = before {
        let (name, program) = other(revision)?;
        programs.push(Ring3 { suffix: format!("@{name}"), program });
    }
    Ok(programs)
}

/// The program given, or the one built from the tree.
fn current(given: Option<&Path>) -> Result<PathBuf> {
    let Some(program) = given else { return build_ring3() };
    ensure!(program.exists(), "{} does not exist: --ring3 names a built ring3", program.display());
    Ok(program.canonicalize()?)
}

/// The program of another revision, and that revision's name.
fn other(revision: &str) -> Result<(String, PathBuf)> {
    let name = resolve(revision)?;
    let revisions = build_directory().join("revisions");
    let program = revisions.join(format!("ring3-{name}"));
    if !program.exists() {
        let tree = revisions.join(&name);
        export(&name, &tree)?;
        let built = build(&tree, &revisions.join("target"))?;
        fs::rename(&built, &program)
            .with_context(|| format!("cannot move {} to {}", built.display(), program.display()))?;
        fs::remove_dir_all(tree)?;
    }
    Ok((name, program))
}

fn resolve(revision: &str) -> Result<String> {
    let commit = format!("{revision}^{{commit}}");
    let mut git = Command::new("git");
    git.args(["rev-parse", "--short=12", "--verify", "--quiet", &commit]).current_dir(root());
    let name = output(&mut git).with_context(|| format!("there is no revision `{revision}`"))?;
    Ok(name.trim().to_owned())
}

fn export(revision: &str, directory: &Path) -> Result<()> {
    fs::create_dir_all(directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    let mut git = Command::new("git");
    git.args(["archive", revision]).current_dir(root()).stdout(Stdio::piped());
    let mut archive = git.spawn().context("cannot run git")?;
    let tree = archive.stdout.take().context("git has no output")?;
    run(Command::new("tar").arg("-x").arg("-C").arg(directory).stdin(tree))?;
    ensure!(archive.wait()?.success(), "`git archive {revision}` failed");
    Ok(())
}

/// Builds a tree in a directory that trees share; says where its program is.
fn build(tree: &Path, target: &Path) -> Result<PathBuf> {
    eprintln!("Building ring3 in {}", tree.display());
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--release", "--package", "ring3"]).current_dir(tree);
    run(cargo.env("CARGO_TARGET_DIR", target))?;
    Ok(target.join("release/ring3"))
}

#[cfg(test)]
mod tests {
    use super::resolve;

    #[test]
    fn an_unknown_revision_is_named() {
        let text = format!("{:#}", resolve("no-such-revision").expect_err("there is none"));
        assert!(text.contains("no-such-revision"), "{text}");
    }
}
