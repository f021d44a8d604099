//! The wedge's search for what opens protection keys: at every place of a page, and across both borders; and
//! its search for what the monitor would change.

use crate::process::{self, Mapping, Mappings, PAGE};
use stub::text;
use wedge_abi::keys;
use x86_interp::GuestRam;

const AT: u64 = 0x40_0000;
const LEN: usize = PAGE as usize;

/// Everything of three bytes that opens keys.
fn openers() -> impl Iterator<Item = [u8; 3]> {
    let operands = (0..=255).filter(|operand| operand >> 3 & 7 == 5 && operand >> 6 != 3);
    operands.map(|operand: u8| [0x0f, 0xae, operand]).chain([[0x0f, 0x01, 0xef]])
}

/// Whether the first of these pages may be executed, which are copies one behind the other, from `from` on.
#[allow(unsafe_code, reason = "calls the wedge's code")]
fn is_closed(from: u64, pages: &[&[u8]], page: u64) -> bool {
    let copy = |(n, bytes): (usize, &&[u8])| {
        let copy = Some(bytes.to_vec());
        (from + n as u64 * PAGE, Mapping { offset: 0, protection: 3, key: false, copy })
    };
    let mut maps: Mappings = pages.iter().enumerate().map(copy).collect();
    // SAFETY: the model says what is read.
    process::enter(&mut maps, || unsafe { text::is_closed(page) })
}

fn with(bytes: &[u8], at: usize) -> Vec<u8> {
    let mut page = vec![0x90; LEN];
    page[at..at + bytes.len()].copy_from_slice(bytes);
    page
}

#[test]
fn every_form_is_found_at_every_place() {
    assert_eq!(openers().count(), 25);
    for opener in openers() {
        for at in (0..40).chain(LEN - 40..=LEN - 3) {
            assert!(!is_closed(AT, &[&with(&opener, at)], AT), "{opener:x?} at {at}");
        }
    }
    for at in 0..=LEN - 3 {
        assert!(!is_closed(AT, &[&with(&[0x0f, 0x01, 0xef], at)], AT), "at {at}");
    }
}

#[test]
fn every_form_is_found_across_a_border_from_both_sides() {
    for opener in openers() {
        for split in [1, 2] {
            let (low, high) = opener.split_at(split);
            let (low, high) = (with(low, LEN - split), with(high, 0));
            for page in [AT, AT + PAGE] {
                assert!(!is_closed(AT, &[&low, &high], page), "{opener:x?}: {split} and the rest");
            }
            assert!(is_closed(AT, &[&low], AT), "nothing is behind it");
            assert!(is_closed(AT, &[&high], AT), "nothing is before it");
        }
    }
}

#[test]
fn what_only_looks_like_it_may_be_executed() {
    for (second, operand) in [0x01, 0xae].into_iter().flat_map(|b| (0..=255).map(move |o| (b, o))) {
        let bytes = [0x0f, second, operand];
        if keys::opens(bytes) {
            continue;
        }
        let (low, high) = (with(&bytes[..2], LEN - 2), with(&bytes[2..], 0));
        assert!(is_closed(AT, &[&with(&bytes, 100)], AT), "{bytes:x?}");
        assert!(is_closed(AT, &[&low, &high], AT) && is_closed(AT, &[&low, &high], AT + PAGE));
    }
}

/// A third byte that begins another one.
#[test]
fn one_behind_the_other_is_found() {
    for bytes in [
        &[0x0f, 0x0f, 0x01, 0xef][..],
        &[0x0f, 0x01, 0x0f, 0xae, 0x2f],
        &[0x0f, 0xae, 0x0f, 0x01, 0xef],
    ] {
        assert!((0..64).all(|at| !is_closed(AT, &[&with(bytes, at)], AT)), "{bytes:x?}");
    }
}

/// LAR, which the monitor finds only where it is plausible.
const LAR: [u8; 3] = [0x0f, 0x02, 0xc1];

/// What looks like an instruction to be changed is left to the monitor until it has looked at just these
/// bytes, at any address.
#[test]
fn what_the_monitor_has_searched_may_be_executed() {
    let ram = ram::Ram::new(1 << 20).expect("the host has memory");
    let pages = wedge::Pages::new().expect("the host has memory");
    process::open_windows(&ram, &pages).expect("the host maps them");
    let show = |page: &[u8]| ram.write(0, page);
    let page = with(&LAR, 100);
    show(&page);
    assert!(!text::is_plain(AT, 0), "nobody has looked at it");
    pages.kernel().note_plain(wedge_abi::print(&page));
    assert!(text::is_plain(AT, 0) && text::is_plain(AT + PAGE, 0));
    for at in [0, 7, 99, 103, 2048, LEN - 1] {
        let mut other = page.clone();
        other[at] ^= 1;
        show(&other);
        assert!(!text::is_plain(AT, 0), "byte {at} is another");
    }
    show(&page);
    pages.kernel().note_site(AT);
    assert!(!text::is_plain(AT, 0), "system calls are patched there");
}
