//! Records of blocks as bytes, and back.

use super::{BLOCKS, BlockRecords, Jump, Kind, NONE, Packed, Placed, State, Variant};
use crate::{
    cache::kept::packed::{PackedTables, put, u16_at, u32_at, u64_at},
    recover::{Bias, Fixes},
};

/// Bytes of a [`Kind`].
const KIND: usize = 8;
/// How there being no bias, and the fixed one, are written; a register's is the register's number.
const NO_BIAS: u8 = u8::MAX;
const FIXED_BIAS: u8 = NO_BIAS - 1;
/// How there being no spilled register is written.
const NOT_SPILLED: u8 = u8::MAX;

impl BlockRecords {
    /// The number of blocks.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Appends all records. Host addresses become offsets from the HVA `first`.
    pub fn encode(&self, first: u64, to: &mut Vec<u8>) {
        let starts = self.starts.iter().zip(&self.blocks);
        put(to, starts.map(|(start, block)| encoded_block((start - first) as u32, block)));
        put(to, self.marks.iter().map(encoded_mark));
        put(to, self.jumps.iter().map(encoded_jump));
        put(to, self.kinds.iter().map(encoded_kind));
    }

    /// Reads what [`Self::encode`] has written. All blocks are asleep. `None` if the bytes are no such records.
    pub fn decode(first: u64, from: &mut PackedTables<'_>) -> Option<Self> {
        let mut records = Self::new(0);
        let blocks = from.table()?;
        records.starts.extend(blocks.iter().map(|block| first + u64::from(u32_at(block, 0))));
        records.blocks.extend(blocks.iter().map(decoded_block));
        records.marks.extend(from.table()?.iter().map(decoded_mark));
        records.jumps.extend(from.table()?.iter().map(decoded_jump));
        records.kinds.extend(from.table()?.iter().map(decoded_kind));
        let kinds = records.kinds.iter().enumerate();
        records.kind_of = kinds.map(|(index, kind)| (*kind, index as u16)).collect();
        (records.blocks.len() <= BLOCKS && records.are_consistent()).then_some(records)
    }

    /// Each index is one of something that is there.
    fn are_consistent(&self) -> bool {
        let ascends = |of: fn(&Placed) -> u32, end: usize| {
            self.blocks.iter().map(of).is_sorted()
                && self.blocks.last().is_none_or(|last| of(last) as usize <= end)
        };
        self.starts.is_sorted()
            && ascends(|block| block.first_mark, self.marks.len())
            && ascends(|block| block.first_jump, self.jumps.len())
            && self.marks.iter().all(|mark| usize::from(mark.kind) < self.kinds.len())
            && self.blocks.iter().all(|block| is_one(block.incoming, self.jumps.len()))
            && self.jumps.iter().all(|jump| {
                (jump.from as usize) < self.blocks.len() && is_one(jump.next, self.jumps.len())
            })
    }
}

/// One of so many, or none.
fn is_one(number: u32, count: usize) -> bool {
    number == NONE || (number as usize) < count
}

fn encoded_block(start: u32, block: &Placed) -> [u8; 34] {
    let mut bytes = [0; 34];
    bytes[..4].copy_from_slice(&start.to_le_bytes());
    bytes[4..12].copy_from_slice(&block.guest.to_le_bytes());
    bytes[12..16].copy_from_slice(&block.first_mark.to_le_bytes());
    bytes[16..20].copy_from_slice(&block.first_jump.to_le_bytes());
    bytes[20..22].copy_from_slice(&block.guest_len.to_le_bytes());
    bytes[22..24].copy_from_slice(&block.len.to_le_bytes());
    bytes[24..28].copy_from_slice(&block.variant.0.to_le_bytes());
    bytes[28..32].copy_from_slice(&block.incoming.to_le_bytes());
    bytes[32..].copy_from_slice(&block.body.to_le_bytes());
    bytes
}

fn decoded_block(bytes: &[u8; 34]) -> Placed {
    Placed {
        guest: u64_at(bytes, 4),
        pages: [0; 2],
        first_mark: u32_at(bytes, 12),
        first_jump: u32_at(bytes, 16),
        incoming: u32_at(bytes, 28),
        guest_len: u16_at(bytes, 20),
        len: u16_at(bytes, 22),
        body: u16_at(bytes, 32),
        variant: Variant(u32_at(bytes, 24)),
        state: State::Asleep,
        writes: 0,
    }
}

fn encoded_mark(mark: &Packed) -> [u8; 6] {
    let [[a, b], [c, d], [e, f]] = [mark.host, mark.guest, mark.kind].map(u16::to_le_bytes);
    [a, b, c, d, e, f]
}

fn decoded_mark(bytes: &[u8; 6]) -> Packed {
    Packed { host: u16_at(bytes, 0), guest: u16_at(bytes, 2), kind: u16_at(bytes, 4) }
}

fn encoded_jump(jump: &Jump) -> [u8; 23] {
    let mut bytes = [0; 23];
    bytes[..8].copy_from_slice(&jump.target.to_le_bytes());
    bytes[8..12].copy_from_slice(&jump.from.to_le_bytes());
    bytes[12..14].copy_from_slice(&jump.displacement.to_le_bytes());
    bytes[14..18].copy_from_slice(&jump.variant.0.to_le_bytes());
    bytes[18..22].copy_from_slice(&jump.next.to_le_bytes());
    bytes[22] = jump.kept.into();
    bytes
}

fn decoded_jump(bytes: &[u8; 23]) -> Jump {
    Jump {
        target: u64_at(bytes, 0),
        from: u32_at(bytes, 8),
        next: u32_at(bytes, 18),
        kept: bytes[22] != 0,
        displacement: u16_at(bytes, 12),
        variant: Variant(u32_at(bytes, 14)),
    }
}

fn encoded_kind((boundary, undoes, fixes): &Kind) -> [u8; KIND] {
    let bias = |bias: Option<Bias>| match bias {
        None => NO_BIAS,
        Some(Bias::Fixed) => FIXED_BIAS,
        Some(Bias::Register(number)) => number,
    };
    let [a, b, c, d] = fixes.spilled.map(|register| register.unwrap_or(NOT_SPILLED));
    [u8::from(*boundary), u8::from(*undoes), bias(fixes.rsi), bias(fixes.rdi), a, b, c, d]
}

fn decoded_kind([boundary, undoes, rsi, rdi, spilled @ ..]: &[u8; KIND]) -> Kind {
    let bias = |bias: u8| match bias {
        NO_BIAS => None,
        FIXED_BIAS => Some(Bias::Fixed),
        number => Some(Bias::Register(number)),
    };
    let spilled = spilled.map(|register| (register != NOT_SPILLED).then_some(register));
    let fixes = Fixes { rsi: bias(*rsi), rdi: bias(*rdi), spilled };
    (*boundary != 0, *undoes != 0, fixes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_marks_are_read_as_they_were_written() {
        let biases = [None, Some(Bias::Fixed), Some(Bias::Register(0)), Some(Bias::Register(15))];
        for (rsi, rdi) in biases.iter().flat_map(|rsi| biases.map(|rdi| (*rsi, rdi))) {
            let fixes = Fixes { rsi, rdi, spilled: [Some(0), None, Some(15), None] };
            for kind in [(false, true, fixes), (true, false, fixes)] {
                assert_eq!(decoded_kind(&encoded_kind(&kind)), kind);
            }
        }
    }
}
