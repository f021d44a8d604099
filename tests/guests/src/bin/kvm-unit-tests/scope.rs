//! Which tests do not apply to ring3's machine, and why.
//!
//! Most of those find out themselves and skip. The rest is here: tests of the hypervisor rather
//! than of the machine, of devices this machine does not have, and of other CPU models: ring3 has
//! one, an Intel server part.

use crate::config::Test;

const KVM_CALL: &str = "needs KVM's hypercalls; on a CPU without VMX, VMCALL is #UD";
const S3: &str = "the machine has no sleep state but soft off (S5)";

/// Tests that fail without that saying anything about the machine.
const NOT_APPLICABLE: [(&str, &str); 4] = [
    ("vmexit_vmcall", KVM_CALL),
    ("hypercall", KVM_CALL),
    ("vmware_backdoors", "VMware's I/O port 0x5658 and its pseudo performance counters"),
    ("intel_iommu", "the machine has no DMA remapping unit (VT-d)"),
];

/// Tests that are not started: they would wait forever.
const NOT_STARTED: [(&str, &str); 2] = [
    ("realmode", "its check `sti inhibit` waits for a timer interrupt handled by the BIOS"),
    ("s3", S3),
];

/// What tests ask of the CPU that ours does not do. They are not started either: a success would
/// be that of the same program on our model.
const OTHER_MODELS: [(&str, &str); 4] = [
    ("vendor=AuthenticAMD", "an AMD CPU's: SYSCALL outside 64-bit mode is #UD on Intel's"),
    ("-x2apic", "needs a CPU model without x2APIC"),
    ("-pcid", "needs a CPU model without PCID"),
    ("phys-bits=36", "needs a CPU model with 36 physical address bits"),
];

/// Why a test is not even started.
pub fn impossible(test: &Test) -> Option<&'static str> {
    let named = find(&NOT_STARTED, |name| base(test) == name);
    named.or_else(|| find(&OTHER_MODELS, |feature| test.asks_for(feature)))
}

/// Why a failure of a test does not count.
pub fn reason(test: &Test) -> Option<&'static str> {
    find(&NOT_APPLICABLE, |name| base(test) == name)
}

/// Variables a test's program gets; a boot module holds them.
///
/// `TEST_DEVICE=0` tells it that the hypervisor is not KVM: the local APIC's tests then leave out
/// the one that sends IPIs by a hypercall.
pub fn environment(test: &Test) -> Option<&'static str> {
    (test.file == "apic.flat").then_some("TEST_DEVICE=0\n")
}

/// The name of a test, whatever its program is built for.
fn base(test: &Test) -> &str {
    test.name.trim_end_matches("-i386")
}

fn find(list: &[(&str, &'static str)], is: impl Fn(&str) -> bool) -> Option<&'static str> {
    list.iter().find(|(key, _)| is(key)).map(|(_, reason)| *reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    #[test]
    fn scope_follows_name_and_cpu() {
        let text = "[hypercall]\n[a]\nqemu_params = -cpu qemu64,-pcid,+invpcid\n[b]\n[s3-i386]";
        let tests = config::parse(text).expect("well-formed");
        let reasons: Vec<_> = tests.iter().map(reason).collect();
        assert_eq!(reasons, [Some(KVM_CALL), None, None, None]);
        let impossible: Vec<_> = tests.iter().map(impossible).collect();
        assert_eq!(impossible, [None, Some("needs a CPU model without PCID"), None, Some(S3)]);
    }
}
