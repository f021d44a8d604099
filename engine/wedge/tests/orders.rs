//! Orders are carried out before guest code runs, however many there are, and guest code does not run before
//! it is told to: what it did then would be nobody's.

use frame::{MAX_ORDERS, go};
use ram::Ram;
use wedge::{Order, Pages, Wedge};

const RAM_LEN: u64 = 1 << 20;
/// Where nothing is mapped: user code that goes on there comes back at once.
const NOWHERE: u64 = 0x5555_5555_0000;

#[test]
fn a_full_list_runs_no_guest_code() {
    let ram = Ram::new(RAM_LEN).expect("the host gives memory");
    let parts = wedge::Ram {
        fd: ram.fd(),
        len: ram.len(),
        low: ram.low_len(),
        marks: ram.marks_fd(),
        walked: true,
    };
    let mut pages = Pages::new().expect("the host gives memory");
    let mut wedge = Wedge::start(parts, &pages, 1).expect("the host gives a process");
    let frame = pages.frame();
    (frame.go, frame.rip) = (go::USER, NOWHERE);
    for _ in 0..2 * MAX_ORDERS + 1 {
        let (offset, protection) = (0, 0);
        let order = Order { address: NOWHERE, len: 4096, offset, protection };
        wedge.order(order).expect("the process lives");
    }
    assert_eq!(pages.frame().user_entries, 0);
    assert!(wedge.run().expect("the process lives"));
    assert_eq!(pages.frame().user_entries, 1);
}
