//! `test_static_keys`: the kernel patches jumps in its own running code and checks which way they
//! go. The module loads only if all of them go right.

use anyhow::{Result, ensure};
use xtask::{assets::Assets, self_tests::SelfTestAssets};

use crate::{
    console::Console,
    in_kernel::{self, Userland},
    machine::Limits,
};

/// Loading and unloading patches every key there and back; three times catches stale code.
const SCRIPT: &str = "
insmod /modules/test_static_key_base.ko
for round in 1 2 3; do
    insmod /modules/test_static_keys.ko && rmmod test_static_keys && echo \"static keys: $round\"
done
";
const ROUNDS: usize = 3;

/// Runs it.
///
/// # Errors
/// A jump went the wrong way.
pub fn run(assets: &Assets, limits: Limits<'_>) -> Result<String> {
    let kernel = assets.self_test_kernel()?;
    let names = ["test_static_key_base", "test_static_keys"];
    let (files, _) = in_kernel::modules(&kernel, &names)?;
    let userland =
        Userland { files: &files, script: SCRIPT, options: "", memory: in_kernel::MEMORY };
    verdict(&in_kernel::boot(assets, &kernel.image, &userland, limits)?)
}

fn verdict(console: &Console) -> Result<String> {
    let rounds = console.lines().filter(|line| line.starts_with("static keys: ")).count();
    ensure!(rounds == ROUNDS, "{rounds} of {ROUNDS} rounds passed:\n{}", console.tail());
    Ok(format!("{rounds}/{ROUNDS} rounds"))
}
