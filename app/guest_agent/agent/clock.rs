//! The guest's clock by the host's. Both read the same time-stamp counter, so it takes no answer to know how long ago it was what the
//! host says.

use std::{
    arch::x86_64::_rdtsc,
    fs::File,
    io::{self, Read},
};

use crate::{
    protocol::{self, MESSAGE, Time, message},
    sys,
};

/// So many nanoseconds are made up for by letting the clock go slower or faster (0.5 ms a second); more at once.
const SLEWED: i64 = 8_000_000;

/// Sets the clock by the host's first message, which is the time.
pub fn set(control: &mut File) -> io::Result<()> {
    let mut bytes = [0; MESSAGE];
    control.read_exact(&mut bytes)?;
    match protocol::decode(bytes) {
        (message::TIME, khz) => sys::set_time(now(read(control, khz)?)),
        _ => Err(io::Error::other("the host has not said what time it is")),
    }
}

/// Follows what the host says later.
pub fn follow(control: &mut File, khz: u32) -> io::Result<()> {
    let now = now(read(control, khz)?);
    let behind = now - sys::time()?;
    if behind.abs() <= SLEWED { sys::slew_time(behind) } else { sys::set_time(now) }
}

fn read(control: &mut File, khz: u32) -> io::Result<Time> {
    let mut bytes = [0; Time::BYTES];
    control.read_exact(&mut bytes)?;
    Ok(Time::decode(khz, bytes))
}

/// Nanoseconds since 1970, by the counter.
fn now(time: Time) -> i64 {
    // SAFETY: every such CPU has the instruction, and Linux lets programs use it.
    let ticks = unsafe { _rdtsc() }.wrapping_sub(time.tsc);
    let since = u128::from(ticks) * 1_000_000 / u128::from(time.khz.max(1));
    time.wall_ns as i64 + since as i64
}
