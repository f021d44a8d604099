//! Waiting for an event for less than a millisecond.
// UNSAFETY: the event is of a library that lends its descriptor as a number only.
#![allow(unsafe_code)]

use std::{
    os::fd::{AsRawFd, BorrowedFd},
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmm_sys_util::eventfd::EventFd;

/// Whether an event comes within this time, which is less than a second.
pub(crate) fn comes_within(event: &EventFd, time: Duration) -> bool {
    // SAFETY: the descriptor stays open for as long as the event, which outlives this.
    let event = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
    let wait = Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
    let mut polled = [PollFd::from_borrowed_fd(event, PollFlags::IN)];
    poll(&mut polled, Some(&wait)).is_ok_and(|count| count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    #[test]
    fn what_has_come_is_not_waited_for_and_what_does_not_come_is_given_up() {
        let event = EventFd::new(EFD_NONBLOCK).expect("an event");
        let (start, wait) = (Instant::now(), Duration::from_millis(20));
        assert!(!comes_within(&event, wait));
        assert!(start.elapsed() >= wait);
        event.write(1).expect("rung");
        assert!(comes_within(&event, wait));
        assert_eq!(event.read().expect("not taken"), 1);
    }
}
