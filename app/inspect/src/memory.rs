//! Guest memory, without the guest noticing: no page-table entry is marked as used.

use std::ops::Range;

use contract::GuestRam;
use ram::Ram;
use vmm::RunningKernel;
use x86::{
    control::cr0,
    paging::{self, Access, Roots, WalkMemory},
    tap,
};

/// Bytes of a page.
const PAGE: u64 = 4096;
/// The GVAs at which a kernel's image can be mapped. Modules and BPF programs lie elsewhere.
pub(crate) const IMAGES: Range<u64> = 0xffff_ffff_8000_0000..0xffff_ffff_c000_0000;
/// How far a kernel's constants may be from its code, in bytes.
const NEAR: u64 = 128 << 20;

/// Walks page tables without setting accessed or dirty bits.
struct ReadOnlyWalk<'a> {
    ram: &'a Ram,
    /// An entry that is known, and need not be in memory any more: its GPA and its value.
    known: Option<(u64, u64)>,
}

impl WalkMemory for ReadOnlyWalk<'_> {
    fn read_u64(&mut self, gpa: u64) -> u64 {
        match self.known {
            Some((at, entry)) if at == gpa => entry,
            _ => WalkMemory::read_u64(&mut self.ram, gpa),
        }
    }
    fn read_u32(&mut self, gpa: u64) -> u32 {
        WalkMemory::read_u32(&mut self.ram, gpa)
    }
    fn cas_u64(&mut self, _: u64, _: u64, _: u64) -> bool {
        true
    }
    fn cas_u32(&mut self, _: u64, _: u32, _: u32) -> bool {
        true
    }
}

/// Guest memory as the program of a tap reads it, by these page tables.
pub(crate) struct TapMemory<'a>(pub &'a Ram, pub Roots);

impl tap::Memory for TapMemory<'_> {
    fn read(&mut self, gva: u64, to: &mut [u8]) -> Option<bool> {
        Some(read(self.0, self.1, gva, to) == to.len())
    }
}

/// The GPA of a GVA, whatever rights the page has.
pub fn translate(ram: &Ram, roots: Roots, gva: u64) -> Option<u64> {
    let long = roots.efer & x86::control::efer::LMA != 0;
    if long && !paging::canonical(gva) {
        return None;
    }
    let access = Access { smap_override: true, ..Access::default() };
    paging::walk(&mut ReadOnlyWalk { ram, known: None }, roots, gva, access)
        .ok()
        .map(|found| found.gpa)
}

/// `len` bytes at `address`, cut at the borders of pages: address and length of each piece.
fn pieces(address: u64, len: usize) -> impl Iterator<Item = (u64, usize)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let at = address.wrapping_add(done as u64);
        let part = (len - done).min((PAGE - at % PAGE) as usize);
        done += part;
        (part != 0).then_some((at, part))
    })
}

/// Reads bytes at a GVA; how many could be read.
pub fn read(ram: &Ram, roots: Roots, gva: u64, data: &mut [u8]) -> usize {
    read_by(ram, gva, data, |at| translate(ram, roots, at))
}

/// Reads bytes at a GVA; how many could be read. `translate` finds the GPA of the beginning of each piece.
fn read_by(ram: &Ram, gva: u64, data: &mut [u8], translate: impl Fn(u64) -> Option<u64>) -> usize {
    let mut done = 0;
    for (at, len) in pieces(gva, data.len()) {
        let part = &mut data[done..done + len];
        let found = translate(at).filter(|gpa| ram.read_gpa(*gpa, part).is_ok());
        if found.is_none() {
            break;
        }
        done += len;
    }
    done
}

/// Writes bytes at a GVA, whatever rights its pages have; false if some of it is not RAM, and then nothing was written.
pub fn write(ram: &Ram, roots: Roots, gva: u64, data: &[u8]) -> bool {
    let places: Option<Vec<_>> = pieces(gva, data.len())
        .map(|(at, len)| {
            let gpa = translate(ram, roots, at)?;
            ram.page(gpa).map(|_| (gpa, len))
        })
        .collect();
    let Some(places) = places else { return false };
    let mut rest = data;
    for (gpa, len) in places {
        let (part, behind) = rest.split_at(len);
        rest = behind;
        if ram.write_gpa(gpa, part).is_err() {
            return false;
        }
    }
    true
}

/// A little-endian word at a GVA.
pub fn word(ram: &Ram, roots: Roots, gva: u64) -> Option<u64> {
    KernelMemory::All(ram, roots).word(gva)
}

/// Memory in which a kernel describes itself.
#[derive(Clone, Copy)]
pub(crate) enum KernelMemory<'a> {
    /// All of it, by these page tables.
    All(&'a Ram, Roots),
    /// Constants of the kernel that runs. Whatever somebody could write, a program may have written.
    Constants(&'a Ram, RunningKernel),
}

impl KernelMemory<'_> {
    /// Its page tables.
    pub fn roots(self) -> Roots {
        match self {
            Self::All(_, roots) | Self::Constants(_, RunningKernel { roots, .. }) => roots,
        }
    }

    /// Reads bytes at a GVA; how many could be read.
    pub fn read(self, gva: u64, data: &mut [u8]) -> usize {
        match self {
            Self::All(ram, roots) => read(ram, roots, gva, data),
            Self::Constants(ram, kernel) => read_by(ram, gva, data, |at| constant(ram, kernel, at)),
        }
    }

    /// The word at a GVA.
    pub fn word(self, gva: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        (self.read(gva, &mut bytes) == 8).then(|| u64::from_le_bytes(bytes))
    }
}

/// The GPA of a GVA in the image of a kernel, if the kernel cannot write the page and programs cannot reach it. The process
/// that `kernel.roots` belong to may have ended.
fn constant(ram: &Ram, kernel: RunningKernel, gva: u64) -> Option<u64> {
    let roots = Roots { cr0: kernel.roots.cr0 | cr0::WP, ..kernel.roots };
    let known = Some(((roots.cr3 & paging::ADDRESS) + RunningKernel::IMAGE * 8, kernel.image));
    let walk = |access| paging::walk(&mut ReadOnlyWalk { ram, known }, roots, gva, access).ok();
    let is_in_image = IMAGES.contains(&gva) && gva.abs_diff(kernel.entry) < NEAR;
    let writes = Access { write: true, smap_override: true, ..Access::default() };
    let others = || walk(writes).or_else(|| walk(Access { user: true, ..Access::default() }));
    if !is_in_image || others().is_some() {
        return None;
    }
    walk(Access { smap_override: true, ..Access::default() }).map(|found| found.gpa)
}

/// Text at a GVA that ends with a zero, or after `most` bytes.
pub fn text(ram: &Ram, roots: Roots, gva: u64, most: usize) -> Option<String> {
    let mut bytes = vec![0; most];
    let count = read(ram, roots, gva, &mut bytes);
    let end = bytes[..count].iter().position(|byte| *byte == 0);
    let end = end.or((count == most).then_some(most))?;
    Some(String::from_utf8_lossy(&bytes[..end]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use x86::{
        Vcpu,
        control::{cr0, efer},
        paging::{P, RW},
    };

    /// The first 2 MiB where they are, and page 0x5000 at 0x40_0000 without RAM behind it.
    fn paged() -> (Ram, Roots) {
        let ram = Ram::new(1 << 20).expect("memory");
        for (at, entry) in [(0x1000, 0x2000), (0x2000, 0x3000), (0x3000, 0x4000), (0x3010, 0x6000)]
        {
            ram.store64(at, entry | P | RW);
        }
        for n in 0..0x100 {
            ram.store64(0x4000 + n * 8, (n << 12) | P);
        }
        ram.store64(0x6000, 0x5000 | P);
        let mut vcpu = Vcpu { cr3: 0x1000, cr4: 1 << 5, efer: efer::LMA, ..Vcpu::default() };
        vcpu.cr0 |= cr0::PG;
        (ram, Roots::from(&vcpu))
    }

    #[test]
    fn memory_is_read_and_written_across_pages_and_no_further_than_it_goes() {
        let (ram, roots) = paged();
        assert!(write(&ram, roots, 0x7ffe, b"over"));
        let mut bytes = [0; 4];
        assert_eq!(read(&ram, roots, 0x7ffe, &mut bytes), 4);
        assert_eq!((&bytes, ram.load8(0x8000)), (b"over", b'e'));
        assert_eq!(read(&ram, roots, 0xff_ffe, &mut [0; 9]), 2, "RAM ends there");
        assert!(!write(&ram, roots, 0xff_ffe, b"beyond"), "all or nothing");
        assert_eq!(ram.load8(0xff_ffe), 0);
        assert_eq!(translate(&ram, roots, 0x40_0008), Some(0x5008));
        assert_eq!(translate(&ram, roots, 1 << 47), None, "not canonical");
        assert_eq!(ram.load64(0x3000) & paging::A, 0, "and nothing is marked");
    }
}
