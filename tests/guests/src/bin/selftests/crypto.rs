//! The kernel's tests of its cryptographic algorithms. Registering one runs its known-answer tests,
//! in every implementation there is for this CPU; `tcrypt` then does so for what is only made
//! on demand, such as modes of ciphers.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use xtask::{assets::Assets, self_tests::SelfTestAssets};

use crate::{
    console::Console,
    in_kernel::{self, Userland},
    machine::Limits,
};

/// The kernel is not to look for modules of its own: there is no modprobe. `tcrypt` never stays
/// loaded, so its exit code says nothing.
const SCRIPT: &str = "
echo /bin/false > /proc/sys/kernel/modprobe
while read -r module; do
    insmod \"/modules/$module.ko\" || echo \"crypto: cannot load $module\"
done < /root/order
insmod /modules/tcrypt.ko mode=0
echo crypto: tcrypt ended
cat /proc/crypto
echo crypto: listed
";

/// Modules that load only with hardware or parameters that are not there.
const MAY_NOT_LOAD: [&str; 1] = ["tcrypt"];

/// Runs them.
///
/// # Errors
/// An algorithm failed its test, or had none.
pub fn run(assets: &Assets, limits: Limits<'_>) -> Result<String> {
    let kernel = assets.self_test_kernel()?;
    let (mut files, mut order) = in_kernel::modules(&kernel, &kernel.crypto())?;
    let (tcrypt, needed) = in_kernel::modules(&kernel, &["tcrypt"])?;
    let more = tcrypt.into_iter().filter(|file| files.iter().all(|f| f.path != file.path));
    let more: Vec<_> = more.collect();
    files.extend(more);
    let missing: Vec<_> = needed.into_iter().filter(|name| !order.contains(name)).collect();
    order.extend(missing);
    order.retain(|name| name != "tcrypt");
    files.push(xtask::initramfs::File {
        path: "root/order".to_owned(),
        permissions: 0o644,
        content: order.iter().flat_map(|name| [name.as_bytes(), b"\n"].concat()).collect(),
    });
    let options = "cryptomgr.notests=0";
    let userland = Userland { files: &files, script: SCRIPT, options, memory: in_kernel::MEMORY };
    verdict(&in_kernel::boot(assets, &kernel.image, &userland, limits)?, order.len())
}

fn verdict(console: &Console, modules: usize) -> Result<String> {
    let unloaded = console.lines().filter_map(|line| line.strip_prefix("crypto: cannot load "));
    let unloaded: Vec<_> = unloaded.filter(|name| !MAY_NOT_LOAD.contains(name)).collect();
    ensure!(unloaded.is_empty(), "could not be loaded: {}", unloaded.join(", "));
    let failures: Vec<_> = console.lines().filter(|line| is_failure(line)).collect();
    ensure!(failures.is_empty(), "the kernel said:\n  {}", failures.join("\n  "));
    ensure!(console.after("crypto: listed").is_some(), "no list:\n{}", console.tail());
    let algorithms = algorithms(console);
    ensure!(!algorithms.is_empty(), "the list is empty");
    let bad = algorithms.iter().filter(|(_, result)| result.as_str() != "passed");
    let bad: Vec<_> = bad.map(|(driver, result)| format!("{driver} {result}")).collect();
    ensure!(bad.is_empty(), "not passed: {}", bad.join(", "));
    Ok(format!("{0}/{0} algorithms passed, from {modules} modules", algorithms.len()))
}

fn is_failure(line: &str) -> bool {
    line.starts_with("alg: ") && !line.starts_with("alg: No test for ")
}

/// Drivers and the results of their tests, from `/proc/crypto`.
fn algorithms(console: &Console) -> BTreeMap<String, String> {
    let mut driver = String::new();
    let mut results = BTreeMap::new();
    for line in console.lines() {
        let Some((key, value)) = line.split_once(':') else { continue };
        match key.trim_end() {
            "driver" => driver = value.trim().to_owned(),
            "selftest" => {
                results.insert(std::mem::take(&mut driver), value.trim().to_owned());
            }
            _ => {}
        }
    }
    results
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(text: &str) -> Console {
        let mut console = Console::default();
        console.print(text.as_bytes());
        console
    }

    const LIST: &str = "name         : sha1\ndriver       : sha1-avx2\nselftest     : passed\n\n\
                        name         : aes\ndriver       : aes-generic\nselftest     : RESULT\n\n\
                        crypto: listed\n";

    #[test]
    fn every_algorithm_must_have_passed() {
        let figures = verdict(&printed(&LIST.replace("RESULT", "passed")), 5).expect("sound");
        assert!(figures.starts_with("2/2 algorithms"), "{figures}");
        let error = verdict(&printed(&LIST.replace("RESULT", "unknown")), 5).expect_err("not");
        assert!(error.to_string().contains("aes-generic unknown"), "{error}");
    }

    #[test]
    fn the_log_counts_too() {
        let list = LIST.replace("RESULT", "passed");
        let said = "[ 1.0] alg: hash: sha1-avx2 test failed (wrong result)\n";
        verdict(&printed(&format!("{said}{list}")), 5).expect_err("the kernel said so");
        verdict(&printed(&format!("crypto: cannot load sha1\n{list}")), 5).expect_err("missing");
    }
}
