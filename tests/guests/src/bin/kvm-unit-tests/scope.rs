//! Which tests do not apply to ring3's machine, and why.
//!
//! Most of those find out themselves and skip. The rest is here: tests of the hypervisor rather
//! than of the machine, of devices this machine does not have, and of other CPU models: ring3 has
//! one, an Intel server part.

use crate::config::Test;

const KVM_CALL: &str = "needs KVM's hypercalls; on a CPU without VMX, VMCALL is #UD";
const HYPER_V: &str = "Hyper-V enlightenments, and a test device of QEMU for them";
const FEP: &str = "KVM's forced emulation prefix; plain instructions are tested by `access`";

/// Tests that fail without that saying anything about the machine.
const NOT_APPLICABLE: [(&str, &str); 9] = [
    ("vmexit_vmcall", KVM_CALL),
    ("hypercall", KVM_CALL),
    ("access_fep", FEP),
    ("vmware_backdoors", "VMware's I/O port 0x5658 and its pseudo performance counters"),
    ("intel_iommu", "the machine has no DMA remapping unit (VT-d)"),
    ("hyperv_synic", HYPER_V),
    ("hyperv_connections", HYPER_V),
    ("realmode", "one of its checks ends in an interrupt handler of the BIOS"),
    ("s3", "the machine has no sleep state but soft off (S5)"),
];

/// Tests not worth starting: with one CPU these do nothing and succeed.
const EMPTY: [(&str, &str); 2] =
    [("vmexit_ipi", "needs a second CPU"), ("vmexit_ipi_halt", "needs a second CPU")];

/// CPU features tests ask to be absent, or of another vendor.
const OTHER_MODELS: [(&str, &str); 4] = [
    ("vendor=AuthenticAMD", "an AMD CPU's: SYSCALL outside 64-bit mode is #UD on Intel's"),
    ("-x2apic", "needs a CPU model without x2APIC"),
    ("-pcid", "needs a CPU model without PCID"),
    ("phys-bits=36", "needs a CPU model with 36 physical address bits"),
];

/// Why a test is not even started.
pub fn impossible(test: &Test) -> Option<&'static str> {
    find(&EMPTY, |name| base(test) == name)
}

/// Why a failure of a test does not count.
pub fn reason(test: &Test) -> Option<&'static str> {
    let named = find(&NOT_APPLICABLE, |name| base(test) == name);
    named.or_else(|| find(&OTHER_MODELS, |feature| test.asks_for(feature)))
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
    fn reasons_follow_name_and_cpu() {
        let text =
            "[hypercall]\n[a]\nqemu_params = -cpu qemu64,-pcid,+invpcid\n[b]\n[c]\narch=i386";
        let tests = config::parse(text).expect("well-formed");
        let reasons: Vec<_> = tests.iter().map(reason).collect();
        assert_eq!(reasons, [Some(KVM_CALL), Some("needs a CPU model without PCID"), None, None]);
    }
}
