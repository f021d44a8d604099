//! Xen: a hypervisor below a hypervisor, of the kind that needs nothing of the processor. Its first domain is
//! a stock Linux kernel that runs in ring 3, and reaches page tables, segments, traps and timers by asking
//! Xen for them.
//!
//! What the domain reads from Xen is asked for by hypercalls, so it is there only if those, the domain's own
//! programs and its way to the console work. A domain that crashes has Xen reset the machine, which is
//! another end than power-off.

use std::{fs, process::Command};

use anyhow::{Result, ensure};
use tempfile::NamedTempFile;
use xtask::{
    assets::Assets,
    command::output,
    initramfs::{self, Purpose},
    self_tests::{SelfTestAssets, XEN_MODULES},
};

use crate::{
    console::Console,
    in_kernel,
    machine::{Limits, Machine},
};

/// Xen calls the BIOS unless told that there is none.
const XEN: &str = "no-real-mode console=com1 com1=115200,8n1 dom0_mem=512M";
const DOM0: &str = "console=hvc0 panic=-1";
/// Memory of the machine, in MiB.
const MEMORY: u32 = 1024;

const SCRIPT: &str = "
mount -t xenfs xenfs /proc/xen
for name in type guest_type version/major version/minor; do
    echo \"dom0: $name $(cat /sys/hypervisor/$name)\"
done
echo \"dom0: capabilities $(cat /proc/xen/capabilities)\"
echo \"dom0: digest $(sha256sum < /bin/busybox | cut -d' ' -f1)\"
";
/// What Xen's control domain has under `/sys/hypervisor` and `/proc/xen`.
const EXPECTED: [(&str, &str); 5] = [
    ("type", "xen"),
    ("guest_type", "PV"),
    ("version/major", "4"),
    ("version/minor", "20"),
    ("capabilities", "control_d"),
];
/// Xen's own word before it switches the machine off.
const END: &str = "(XEN) Entering ACPI S5 state.";

/// Runs it.
///
/// # Errors
/// Xen or its first domain did not come up, or the domain is not what it should be.
pub fn run(assets: &Assets, limits: Limits<'_>) -> Result<String> {
    ensure!(!limits.qemu, "QEMU is given Xen by hand: docs/guests.md");
    let (xen, kernel) = (assets.xen()?, assets.self_test_kernel()?);
    let busybox = assets.busybox()?;
    let modules = kernel.modules.closure(&XEN_MODULES)?;
    let initrd = NamedTempFile::new()?;
    fs::write(initrd.path(), initramfs::build(&busybox, &modules, Purpose::Script(SCRIPT)))?;
    let modules =
        [format!("{} {DOM0}", kernel.image.display()), initrd.path().display().to_string()];
    let machine =
        Machine { kernel: &xen, initrd: None, modules: &modules, cmdline: XEN, memory: MEMORY };
    verdict(&in_kernel::watch(&machine, limits)?, &digest(&busybox)?)
}

/// What the host says the digest is.
fn digest(content: &[u8]) -> Result<String> {
    let file = NamedTempFile::new()?;
    fs::write(file.path(), content)?;
    let said = output(Command::new("sha256sum").arg(file.path()))?;
    Ok(said.split(' ').next().unwrap_or_default().to_owned())
}

fn verdict(console: &Console, digest: &str) -> Result<String> {
    for (name, expected) in EXPECTED.into_iter().chain([("digest", digest)]) {
        let found = console.after(&format!("dom0: {name} "));
        ensure!(
            found == Some(expected),
            "the domain's {name} is {found:?}, not {expected:?}:\n{}",
            console.tail()
        );
    }
    ensure!(console.after(END).is_some(), "Xen did not switch off:\n{}", console.tail());
    Ok("Xen 4.20, its control domain a PV guest to its end".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(guest_type: &str, end: &str) -> Console {
        let mut console = Console::default();
        let lines = format!(
            "(XEN) *** Building a PV Dom0 ***\n[    1.0] Run /init as init process\ndom0: type xen\n\
             dom0: guest_type {guest_type}\ndom0: version/major 4\ndom0: version/minor 20\n\
             dom0: capabilities control_d\ndom0: digest 00ff\n{end}\n"
        );
        console.print(lines.as_bytes());
        console
    }

    #[test]
    fn a_control_domain_that_ends_is_wanted() {
        verdict(&printed("PV", END), "00ff").expect("all is there");
        for (console, digest) in
            [(printed("HVM", END), "00ff"), (printed("PV", ""), "00ff"), (printed("PV", END), "0")]
        {
            verdict(&console, digest).expect_err("not as it should be");
        }
    }
}
