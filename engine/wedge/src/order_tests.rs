//! Orders are carried out before guest code runs, however many there are, and guest code does not run before
//! it is told to: what it did then would be nobody's.

use crate::{MapCommand, Pages, Wedge};
use ram::Ram;
use wedge_abi::{MAX_ORDERS, go};

const RAM_LEN: u64 = 1 << 20;
/// Where nothing is mapped: user code that goes on there comes back at once.
const NOWHERE: u64 = 0x5555_5555_0000;

/// A wedge that is to go on with user code.
fn ready() -> (Wedge, Pages) {
    let ram = Ram::new(RAM_LEN).expect("the host gives memory");
    let parts = crate::WedgeRam {
        memory: ram.object(),
        len: ram.len(),
        low: ram.low_len(),
        marks: ram.marks(),
        words: ram.words_start(),
        walked: true,
    };
    let mut pages = Pages::new().expect("the host gives memory");
    let wedge = Wedge::start(parts, &pages, 1).expect("the host gives a process");
    let page = pages.vcpu_page();
    (page.run.go, page.regs.rip) = (go::USER, NOWHERE);
    pages.publish();
    (wedge, pages)
}

fn user_entries(pages: &mut Pages) -> u64 {
    pages.fetch();
    pages.vcpu_page().counters.user_entries
}

fn order(wedge: &mut Wedge, times: usize) {
    for _ in 0..times {
        wedge.order(MapCommand::Unmap { start: NOWHERE, len: 4096 }).expect("the process lives");
    }
}

#[test]
fn a_full_list_runs_no_guest_code() {
    let (mut wedge, mut pages) = ready();
    order(&mut wedge, 2 * MAX_ORDERS + 1);
    assert_eq!(user_entries(&mut pages), 0);
    assert!(wedge.run().expect("the process lives"));
    assert_eq!(user_entries(&mut pages), 1);
}

/// Another wedge gives a turn without the monitor, which has no orders left.
#[test]
fn the_turn_after_a_full_list_may_be_anybodys() {
    let (mut wedge, mut pages) = ready();
    order(&mut wedge, MAX_ORDERS);
    wedge.take_turns().expect("the process lives");
    assert_eq!(user_entries(&mut pages), 1);
}
