//! RAM to load into, and reading it back.

use boot::{BootProtocol, BootRequest, Error, Loaded, Module, unpacked::Unpacked};
use ram::Ram;

/// Enough for every kernel made here, in bytes.
pub const RAM: u64 = 64 << 20;

/// A loaded machine.
pub struct LoadedMachine {
    pub ram: Ram,
    pub loaded: Loaded,
}

/// Loads into fresh RAM that a previous guest has filled.
pub fn try_load(
    kernel: &[u8],
    modules: &[Module<'_>],
    p: BootProtocol,
) -> Result<LoadedMachine, Error> {
    try_load_kept(kernel, None, modules, p)
}

/// The same with what the kernel may have been unpacked to before.
pub fn try_load_kept(
    kernel: &[u8],
    unpacked: Option<&dyn Unpacked>,
    modules: &[Module<'_>],
    protocol: BootProtocol,
) -> Result<LoadedMachine, Error> {
    let ram = Ram::new(RAM).expect("RAM");
    let dirt = vec![0xdb; 0x20_0000];
    for base in [0, crate::images::PHYSICAL] {
        ram.write_gpa(base, &dirt).expect("inside RAM");
    }
    let cmdline = "console=ttyS0";
    let request = BootRequest { kernel, unpacked, modules, cmdline, cpus: 1, protocol };
    boot::load(&ram, &request).map(|loaded| LoadedMachine { ram, loaded })
}

/// Loads what must load.
pub fn load(kernel: &[u8], modules: &[Module<'_>], protocol: BootProtocol) -> LoadedMachine {
    try_load(kernel, modules, protocol).expect("the kernel loads")
}

impl LoadedMachine {
    pub fn bytes(&self, gpa: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.ram.read_gpa(gpa, &mut bytes).expect("inside RAM");
        bytes
    }

    pub fn u32(&self, gpa: u64) -> u32 {
        u32::from_le_bytes(self.bytes(gpa, 4).try_into().expect("4 bytes"))
    }

    pub fn u64(&self, gpa: u64) -> u64 {
        u64::from_le_bytes(self.bytes(gpa, 8).try_into().expect("8 bytes"))
    }

    /// The zero-terminated string at `gpa`.
    pub fn string(&self, gpa: u64) -> String {
        let bytes = self.bytes(gpa, 4096);
        let line = bytes.split(|b| *b == 0).next().expect("split gives one part at least");
        String::from_utf8(line.to_vec()).expect("UTF-8")
    }

    /// Nothing placed overlaps anything else placed, and all of it is RAM.
    pub fn assert_disjoint(&self) {
        let mut ranges: Vec<_> = self.loaded.placed.iter().map(|p| p.range.clone()).collect();
        ranges.sort_by_key(|r| r.start);
        assert!(ranges.windows(2).all(|w| w[0].end <= w[1].start), "{ranges:x?}");
        assert!(ranges.iter().all(|r| r.start < r.end && r.end <= RAM), "{ranges:x?}");
    }

    /// The kernel's code lies where it belongs, and zeros follow it.
    pub fn assert_kernel_at(&self, gpa: u64) {
        use crate::images::{BSS, CODE};
        assert_eq!(self.bytes(gpa, CODE.len()), CODE);
        let bss = self.bytes(gpa + CODE.len() as u64, BSS as usize);
        assert!(bss.iter().all(|b| *b == 0), "the bss is zero");
    }
}
