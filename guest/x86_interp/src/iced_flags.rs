//! Flags, as the decoder names them.

use iced_x86::RflagsBits;
use x86::flags;

/// The RFLAGS bits that stand for a set of [`RflagsBits`]: the status flags and DF.
pub fn rflags(bits: u32) -> u64 {
    const MAP: [(u32, u64); 7] = [
        (RflagsBits::OF, flags::OF),
        (RflagsBits::SF, flags::SF),
        (RflagsBits::ZF, flags::ZF),
        (RflagsBits::AF, flags::AF),
        (RflagsBits::CF, flags::CF),
        (RflagsBits::PF, flags::PF),
        (RflagsBits::DF, flags::DF),
    ];
    MAP.iter().filter(|(iced, _)| bits & iced != 0).map(|(_, flag)| flag).sum()
}
