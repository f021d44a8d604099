//! Hand-off: which process runs the vCPU.

use core::sync::atomic::AtomicU32;

/// Wedges of a vCPU; their numbers start at one.
pub const MAX_WEDGES: usize = 128;
/// The monitor's number.
pub const MONITOR: usize = 0;
/// The signal that makes running guest code come back.
pub const KICK: i32 = 10;

/// Whose turn it is: the monitor's or one wedge's, by number. Wedges can write it as they like; what they
/// gain is that guest code runs in several of them at once.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct TurnsPage {
    /// Not zero: it is the turn of the one with this number, who waits for that.
    pub words: [AtomicU32; MAX_WEDGES + 1],
    /// The wedge that has the turn or had it last.
    pub current: AtomicU32,
    /// By wedge, the PCID of the space it holds plus one: it can go on there by itself, the monitor has no
    /// orders for it. Zero if not.
    pub spaces: [AtomicU32; MAX_WEDGES + 1],
}
