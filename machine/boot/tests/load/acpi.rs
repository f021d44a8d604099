//! The ACPI tables as an operating system finds them.

use ram::Ram;
use std::process::Command;

/// The tables of a machine, by signature, with their GPAs; the XSDT first.
fn tables(cpus: u32) -> Vec<(String, u64, Vec<u8>)> {
    let ram = Ram::new(2 << 20).expect("RAM");
    let rsdp = boot::acpi::place(&ram, cpus).expect("the tables fit");
    let root = read(&ram, rsdp, 36);
    assert_eq!((root[..8].as_ref(), sum(&root[..20]), sum(&root)), (b"RSD PTR ".as_ref(), 0, 0));
    let xsdt = table(&ram, u64_at(&root, 24));
    let entries: Vec<u64> = xsdt.2[36..].chunks(8).map(|entry| u64_at(entry, 0)).collect();
    let mut tables = vec![xsdt];
    tables.extend(entries.into_iter().map(|at| table(&ram, at)));
    let fadt = tables.iter().find(|t| t.0 == "FACP").expect("a FADT").2.clone();
    tables.push(table(&ram, u64_at(&fadt, 140)));
    tables.push(table(&ram, u32::from_le_bytes(fadt[36..40].try_into().expect("4")).into()));
    tables
}

fn table(ram: &Ram, gpa: u64) -> (String, u64, Vec<u8>) {
    let head = read(ram, gpa, 8);
    let len = u32::from_le_bytes(head[4..].try_into().expect("4 bytes"));
    let signature = String::from_utf8(head[..4].to_vec()).expect("ASCII");
    (signature, gpa, read(ram, gpa, len as usize))
}

fn read(ram: &Ram, gpa: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    ram.read_gpa(gpa, &mut bytes).expect("inside RAM");
    bytes
}

fn u64_at(bytes: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(bytes[offset..offset + 8].try_into().expect("8 bytes"))
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
}

#[test]
fn every_table_is_found_and_sums_to_zero() {
    for cpus in [1, 255, 300, boot::acpi::MAX_CPUS] {
        let tables = tables(cpus);
        let names: Vec<_> = tables.iter().map(|t| t.0.as_str()).collect();
        assert_eq!(names, ["XSDT", "FACP", "APIC", "MCFG", "HPET", "DSDT", "FACS"]);
        for (name, gpa, bytes) in &tables {
            assert!(name == "FACS" || sum(bytes) == 0, "{name}");
            assert!((0xe_0000..0x10_0000).contains(&(gpa + bytes.len() as u64 - 1)), "{name}");
            assert!(gpa.is_multiple_of(64));
        }
    }
}

#[test]
fn the_madt_lists_every_cpu_once() {
    for (cpus, local, extended) in [(1, 1, 0), (4, 4, 0), (255, 255, 0), (300, 255, 45)] {
        let madt = &tables(cpus)[2].2;
        let (mut rest, mut kinds) = (&madt[44..], Vec::new());
        while let [kind, len, ..] = *rest {
            kinds.push(kind);
            rest = &rest[usize::from(len)..];
        }
        let count = |kind| kinds.iter().filter(|k| **k == kind).count();
        assert_eq!((count(0), count(9), count(1), count(2), count(4)), (local, extended, 1, 2, 1));
    }
}

#[test]
fn fixed_hardware_is_where_the_chipset_has_it() {
    use chipset::power;
    let fadt = &tables(1)[1].2;
    let word = |at: usize| u32::from_le_bytes(fadt[at..at + 4].try_into().expect("4 bytes"));
    let blocks = [(56, power::PM1A_EVENT), (64, power::PM1A_CONTROL), (76, power::PM_TIMER)];
    for (at, port) in blocks {
        assert_eq!(u64::from(word(at)), port);
    }
    for (at, port) in [(148, power::PM1A_EVENT), (172, power::PM1A_CONTROL), (208, power::PM_TIMER)]
    {
        assert_eq!((fadt[at], u64_at(fadt, at + 4)), (1, port));
    }
    const TIMER_32_BITS: u32 = 1 << 8;
    const RESET_REGISTER: u32 = 1 << 10;
    const HARDWARE_REDUCED: u32 = 1 << 20;
    let flags = word(112);
    assert_eq!(flags & (TIMER_32_BITS | RESET_REGISTER | HARDWARE_REDUCED), RESET_REGISTER);
    assert_eq!((u64_at(fadt, 120), fadt[128]), (power::RESET, power::RESET_VALUE));
}

/// Xen takes the extended address of the FACS or complains that the two differ; Linux is content with either.
#[test]
fn both_addresses_of_a_table_are_the_same() {
    let tables = tables(1);
    let fadt = &tables[1].2;
    let word = |at: usize| u32::from_le_bytes(fadt[at..at + 4].try_into().expect("4 bytes"));
    for (name, old, extended) in [("FACS", 36, 132), ("DSDT", 40, 140)] {
        let gpa = tables.iter().find(|table| table.0 == name).expect("a table").1;
        assert_eq!((u64::from(word(old)), u64_at(fadt, extended)), (gpa, gpa), "{name}");
    }
}

#[test]
fn the_reference_compiler_understands_every_table() {
    let dir = tempfile::tempdir().expect("a directory");
    for (name, _, bytes) in tables(300) {
        let (binary, source) = (format!("{name}.dat"), format!("{name}.dsl"));
        std::fs::write(dir.path().join(&binary), bytes).expect("written");
        for arguments in [["-d", &binary], ["-we", &source]] {
            let run = Command::new("iasl").args(arguments).current_dir(dir.path()).output();
            let run = run.expect("iasl, of the package acpica-tools");
            let text = [run.stdout, run.stderr].map(|t| String::from_utf8_lossy(&t).into_owned());
            assert!(run.status.success(), "{name}: {text:?}");
            assert!(!text.concat().contains("Invalid"), "{name}: {text:?}");
        }
    }
}
