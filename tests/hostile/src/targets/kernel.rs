//! Kernel files of every kind, with modules and arguments, put into guest RAM; ACPI tables and boot protocols with them.

use boot::{BootProtocol, BootRequest, Module};
use ram::Ram;

use fuzzer::Target;

#[allow(dead_code, unused_imports, missing_docs, reason = "its tests use the rest")]
#[path = "../../../../machine/boot/tests/load/images.rs"]
mod images;

pub(crate) const TARGET: Target = Target { name: "kernel", seeds, run };

/// Enough for the kernels of the seeds at their places.
const MEMORY: u64 = 64 << 20;
const PROTOCOLS: [&str; 5] = ["auto", "linux64", "bzimage", "pvh", "multiboot"];

/// The first byte says how the rest is started.
fn seeds() -> Vec<Vec<u8>> {
    let plain =
        [images::elf64(), images::elf32(), images::multiboot_elf(), images::multiboot_flat()];
    let packed = images::FORMATS.map(|(_, pack)| images::bzimage(&pack(&images::elf64())));
    let kernels = plain.into_iter().chain(packed);
    kernels.map(|kernel| [vec![0], kernel].concat()).collect()
}

fn run(bytes: &[u8]) {
    let Some((&how, kernel)) = bytes.split_first() else { return };
    let protocol = PROTOCOLS[usize::from(how) % PROTOCOLS.len()];
    let Ok(protocol) = protocol.parse::<BootProtocol>() else { return };
    let memory = Ram::new(MEMORY).expect("memory");
    let (head, tail) = kernel.split_at(kernel.len() / 2);
    let cmdline = String::from_utf8_lossy(&head[..head.len().min(64)]).into_owned();
    let modules = [Module { data: tail, cmdline: &cmdline }];
    let modules = &modules[..usize::from(how >> 4 & 1)];
    let cpus = 1 + u32::from(how >> 5);
    let request =
        BootRequest { kernel, unpacked: None, modules, cmdline: &cmdline, cpus, protocol };
    // That it is refused is no failure.
    if let Ok(loaded) = boot::load(&memory, &request) {
        for placed in loaded.placed {
            let len = (placed.range.end - placed.range.start).min(MEMORY) as usize;
            memory.read_gpa(placed.range.start, &mut vec![0; len]).expect("in RAM");
        }
    }
}
