//! Pages of user code where protection keys close the guest's kernel and the wedge to user code.
//!
//! The keys are worth nothing if user code comes to execute a byte sequence that loads them
//! ([`frame::keys`]). So there is no executable mapping of a page but of a copy that was searched:
//!
//! - It is made when user code fetches from the page, and never for another access.
//! - What is executed is a private copy. A device, or a process that serves one, writes guest RAM while user
//!   code runs; nobody can change the copy.
//! - Who searches last is the wedge (`text::is_closed`), in the copy itself, when all changes to it are made
//!   and before it can be executed, with the bytes across its borders. What it refuses comes back
//!   as a report, and is interpreted.
//! - The page counts as code, so that a write to it comes to light and the copy goes, as with all copies:
//!   this is what keeps what is executed right, not what keeps the keys closed.
//!
//! What is decoded as an instruction that opens keys is changed, as ever ([`crate::scan`]). A page in which
//! such bytes are left, in the middle of other instructions or among data, is interpreted when control comes
//! to it.
//!
//! A copy with changes has a key itself, which closes it to user code's loads and not to its fetches. A load
//! faults, and is answered with the page as it is in RAM, in place of the copy; the next fetch with a copy again.
//! So nobody can tell that there are changes. An instruction that loads from its own page needs both at
//! once, so it is interpreted.

use super::{AROUND, Answer, PAGE, Place, Space, walk::leaf};
use crate::{process::Process, scan::Patch, scan_cache::Search};
use frame::keys;
use ram::Ram;
use wedge::Error;
use x86::paging::{Roots, Translation};
use x86_interp::GuestRam;

impl<W: Process> Space<W> {
    /// Maps the page that user code fetches from, and those around it that somebody has executed before.
    pub(super) fn map_code(
        &mut self,
        ram: &Ram,
        roots: Roots,
        place: Place,
        found: &Translation,
    ) -> Result<Answer, Error> {
        if !self.map_closed(ram, place, found)? {
            return Ok(Answer::Interpret);
        }
        let start = place.gva & !(AROUND * PAGE - 1);
        for gva in (start..start + AROUND * PAGE).step_by(PAGE as usize) {
            if gva == place.gva & !(PAGE - 1) || self.mapper.mappings.executed(gva).is_some() {
                continue;
            }
            let found = leaf(ram, roots, gva, true).filter(|found| found.executable);
            let Some(found) = found else { continue };
            if ram.page(found.gpa).is_some_and(|page| ram.is_code(page.offset)) {
                self.map_closed(ram, Place { gva, hva: gva, ..place }, &found)?;
            }
        }
        Ok(Answer::Mapped)
    }

    /// User code executes the page of this GVA, and may be unable to load from it: changed copies are closed to loads.
    pub(crate) fn is_closed_to_loads(&self, gva: u64) -> bool {
        self.mapper.wedge.hides_code() && self.mapper.mappings.executed(gva & !(PAGE - 1)).is_some()
    }

    /// Maps a copy of one page to be executed; false if it is not RAM or has what opens keys.
    fn map_closed(&mut self, ram: &Ram, place: Place, found: &Translation) -> Result<bool, Error> {
        let Some(page) = ram.page(found.gpa & !(PAGE - 1)) else { return Ok(false) };
        let hva = place.hva & !(PAGE - 1);
        if ram.mark_code(page.offset) {
            self.marked.push(page.offset);
        }
        let mut bytes = [0; PAGE as usize];
        ram.read(page.offset, &mut bytes);
        let patches = self.patches(ram, hva, page.offset, found.writable || found.dirty);
        if !patches.is_empty() && !self.mapper.wedge.hides_code() && self.texts.is_interpreted(hva)
        {
            return Ok(false);
        }
        patches.iter().for_each(|patch| apply(&mut bytes, patch));
        if keys::find(&bytes).is_some() {
            self.scans.count(Search::Open);
            return Ok(false);
        }
        self.scans.count(Search::Closed);
        self.mapper.mappings.note(place, found);
        self.mapper.mappings.add_closed(hva, page.offset);
        self.mapper.map_patched(hva, page.offset, &patches)?;
        Ok(true)
    }
}

fn apply(page: &mut [u8], patch: &Patch) {
    let bytes = patch.bytes.to_le_bytes();
    let changed = page.iter_mut().skip(patch.at).take(patch.len as usize);
    changed.zip(bytes).for_each(|(to, from)| *to = from);
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Decoder, DecoderOptions, Mnemonic};

    /// The third byte of each form of XRSTOR and of what is like it.
    const OPERANDS: std::ops::RangeInclusive<u8> = 0..=255;

    /// What may stand before an opcode, in either mode.
    const PREFIXES: [&[u8]; 12] = [
        &[],
        &[0x66],
        &[0xf2],
        &[0xf3],
        &[0xf0],
        &[0x2e],
        &[0x65],
        &[0x67],
        &[0x48],
        &[0x41],
        &[0x4f],
        &[0x66, 0x48],
    ];

    /// The instruction that begins there loads protection keys; `None` if there is none.
    fn loads_keys(code: &[u8], bits: u32) -> Option<bool> {
        use Mnemonic::{Wrpkru, Xrstor, Xrstor64, Xrstors, Xrstors64};
        let insn = Decoder::new(bits, code, DecoderOptions::NONE).decode();
        let loads = matches!(insn.mnemonic(), Wrpkru | Xrstor | Xrstor64);
        let others = matches!(insn.mnemonic(), Xrstors | Xrstors64); // the kernel's
        (!insn.is_invalid() && !others).then_some(loads)
    }

    #[test]
    fn what_decodes_to_loading_keys_is_found() {
        let mut found = 0;
        for bits in [32, 64] {
            for (second, operand) in
                [0x01, 0xae, 0xc7].into_iter().flat_map(|b| OPERANDS.map(move |o| (b, o)))
            {
                for prefix in PREFIXES {
                    let code = [prefix, &[0x0f, second, operand, 0, 0, 0, 0, 0]].concat();
                    let open = keys::find(&code).is_some();
                    match loads_keys(&code, bits) {
                        Some(true) => assert!(open, "{code:x?}"),
                        // Nothing else is lost, whatever is before it.
                        Some(false) if prefix.is_empty() => assert!(!open, "{code:x?}"),
                        _ => {}
                    }
                    found += u32::from(open);
                }
            }
        }
        assert_eq!(found, 2 * 12 * 25);
    }

    /// Instructions with none of the bytes found load no keys, whatever they are.
    #[test]
    fn nothing_else_loads_keys() {
        let mut random = 1u64;
        let mut byte = || {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (random >> 33) as u8
        };
        for n in 0..2_000_000 {
            let mut code: [u8; 15] = std::array::from_fn(|_| byte());
            code[n % 4] = [0x0f, 0xc5, 0xc4, 0x62][n / 4 % 4];
            code[n % 4 + 1 + n % 3] = [0x01, 0xae][n / 16 % 2];
            let loads = loads_keys(&code, 64) == Some(true);
            assert!(!loads || keys::find(&code).is_some(), "{code:x?}");
        }
    }

    #[test]
    fn they_are_found_wherever_they_are() {
        for at in 0..=PAGE as usize - 3 {
            let mut page = [0x90; PAGE as usize];
            page[at..at + 3].copy_from_slice(&[0x0f, 0x01, 0xef]);
            assert_eq!(keys::find(&page), Some(at));
        }
    }

    #[test]
    fn a_change_takes_what_opens_keys_away() {
        let mut page = [0x90; PAGE as usize];
        page[700..703].copy_from_slice(&[0x0f, 0x01, 0xef]);
        apply(&mut page, &Patch { at: 700, len: 1, bytes: 0xf4 });
        assert_eq!((keys::find(&page), page[700], page[701]), (None, 0xf4, 0x01));
    }
}
