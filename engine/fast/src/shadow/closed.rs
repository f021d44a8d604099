//! Pages of user code where protection keys close the guest's kernel and the wedge to user code.
//!
//! The keys are worth nothing if user code comes to execute a byte sequence that loads them
//! ([`wedge_abi::keys`]). So there is no executable mapping of a page but of a copy that was searched:
//!
//! - A copy is made when user code fetches from the page, and never for another access.
//! - Devices write guest RAM while user code runs. They do not write copies.
//! - Most pages have one copy, which all processes share ([`Ram::copy_code`]) and wedges map by themselves. In such a page nothing is
//!   changed, and the page neither begins nor ends with a part of such a sequence.
//! - Any other copy is private. The wedge searches it last (`text::is_closed`), when all changes are made and before the copy can be
//!   executed, with the bytes across its borders. What the wedge refuses comes back as a report, and is interpreted.
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

use super::{
    PAGE,
    code_pages::{CodePage, CodePages, bytes_of},
    mapper::Mapper,
};
use crate::{process::Process, scan::Patch, scan_cache::Search};
use ram::Ram;
use wedge_abi::keys;

/// A copy of a page that may be executed.
pub(super) enum Closed {
    /// All programs share the copy at this offset in the memory object.
    Shared(u64),
    /// The process has a copy of its own, with these changes.
    Private(Vec<Patch>),
}

impl CodePages {
    /// The copy of a page that may be executed. `None` if a copy would have what opens keys, or the page
    /// is interpreted because the program reads it. The page counts as code from now on.
    pub(super) fn closed_copy<W: Process>(
        &mut self,
        ram: &Ram,
        page: CodePage,
        mapper: &mut Mapper<W>,
    ) -> Option<Closed> {
        self.mark(ram, page.offset);
        let mut bytes = bytes_of(ram, page.offset);
        let patches = self.patches(ram, page, mapper);
        let shows_changes = !patches.is_empty() && !mapper.wedge().hides_code();
        if shows_changes && self.texts.is_interpreted(page.hva) {
            return None;
        }
        if patches.is_empty()
            && let Some(copy) = self.shared_copy(ram, page, &bytes)
        {
            return Some(Closed::Shared(copy));
        }
        patches.iter().for_each(|patch| apply(&mut bytes, patch));
        let is_open = keys::find(&bytes).is_some();
        self.count(if is_open { Search::Open } else { Search::Closed });
        (!is_open).then_some(Closed::Private(patches))
    }

    /// Offset of the page's shared copy in the memory object. Wedges map shared copies by themselves. `None` if each program needs a copy
    /// of its own.
    fn shared_copy(&self, ram: &Ram, page: CodePage, bytes: &[u8; PAGE as usize]) -> Option<u64> {
        // Wedges do not ask whether a program has written the page, nor whether its code is 32-bit.
        if !self.may_be_shared(page, bytes) || !has_whole_borders(bytes) {
            return None;
        }
        ram.copy_code(page.offset, |copied| {
            let is_closed = copied == bytes && keys::find(copied).is_none();
            self.count(if is_closed { Search::Closed } else { Search::Open });
            is_closed
        })
    }
}

/// Neither the first nor the last bytes of a page can be part of what opens keys, whatever page is beside it.
fn has_whole_borders(page: &[u8; PAGE as usize]) -> bool {
    let [first, second, .., before, last] = *page;
    let ends = [[0x0f, 0x01, first], [0x0f, 0xae, first], [0x0f, first, second]];
    !ends.into_iter().any(keys::opens) && !keys::may_begin([before, last])
}

fn apply(page: &mut [u8], patch: &Patch) {
    let bytes = patch.bytes.to_le_bytes();
    let changed = page.iter_mut().skip(patch.at).take(patch.len as usize);
    changed.zip(bytes).for_each(|(to, from)| *to = from);
}

#[cfg(test)]
mod tests {
    use super::{super::PAGE, *};
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
