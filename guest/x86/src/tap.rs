//! Taps: what is noted of a vCPU whose code comes by a point, without stopping it.
//!
//! A tap is a small program of [`Step`]s over the vCPU's registers and memory. It loads words, decides whether the point is
//! meant at all, and copies memory into a record. Programs are made by whoever traces and run where the guest's code runs,
//! or in the monitor if an interpreter comes by the point: the record is the same. What is in a record is the guest's:
//! [`Records`] takes it apart and believes nothing.

use core::iter;

mod pattern;

use pattern::PatternWords;
pub use pattern::{MOST_PATTERN, in_words as pattern_in_words};

/// Values that a program works with: the general registers, the GS base, and what it loads.
pub const VALUES: usize = 24;
/// The value that is the GS base.
pub const GS_BASE: usize = 16;
/// The first value that a program loads into.
pub const LOADED: usize = 17;
/// Words of a step.
pub const STEP_WORDS: usize = 3;
/// Words of a record before its pieces of memory: its length in bytes, RIP, time-stamp counter, CR2, CR3 and GS base, and
/// the general registers.
pub const HEAD_WORDS: usize = 6 + 16;
/// Steps of one run at the most.
const MOST_STEPS: usize = 256;
/// Parts of a list that are noted at the most.
const MOST_PARTS: u64 = 17;
/// Bytes of a text at the most.
pub const MOST_TEXT: usize = 4096;
const PAGE: u64 = 4096;

/// What of a value is a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumberKind {
    /// The lower half, without a sign.
    Unsigned32,
    /// The lower half, with a sign.
    Signed32,
    /// All of it, without a sign.
    Unsigned64,
    /// All of it, with a sign.
    Signed64,
}

impl NumberKind {
    const ALL: [Self; 4] = [Self::Unsigned32, Self::Signed32, Self::Unsigned64, Self::Signed64];

    /// The least and the greatest number there are.
    pub const fn bounds(self) -> [i128; 2] {
        match self {
            Self::Unsigned32 => [0, u32::MAX as i128],
            Self::Signed32 => [i32::MIN as i128, i32::MAX as i128],
            Self::Unsigned64 => [0, u64::MAX as i128],
            Self::Signed64 => [i64::MIN as i128, i64::MAX as i128],
        }
    }

    fn code(self) -> u8 {
        self as u8
    }

    /// The number is in a range whose ends are bits of such numbers.
    fn is_within(self, value: u64, [low, high]: [u64; 2]) -> bool {
        match self {
            Self::Unsigned32 => (low..=high).contains(&(value & 0xffff_ffff)),
            Self::Unsigned64 => (low..=high).contains(&value),
            Self::Signed32 => (low as i64..=high as i64).contains(&i64::from(value as i32)),
            Self::Signed64 => (low as i64..=high as i64).contains(&(value as i64)),
        }
    }
}

/// A step of a program. `from` and `to` are values by number, offsets are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The end: the record is complete.
    End,
    /// Loads a word.
    Load {
        /// Where to.
        to: u8,
        /// Address.
        from: u8,
        /// Added to the address.
        offset: u64,
    },
    /// Adds to a value.
    Add {
        /// Which value.
        to: u8,
        /// How much.
        amount: u64,
    },
    /// The point is not meant unless these bits of a value are those.
    Want {
        /// Which value.
        from: u8,
        /// Which bits.
        mask: u64,
        /// What they are.
        value: u64,
    },
    /// The point is not meant unless a value is a number in a range.
    Range {
        /// Which value.
        from: u8,
        /// What of it is the number.
        kind: NumberKind,
        /// The least and the greatest that is meant, as bits of such a number.
        bounds: [u64; 2],
    },
    /// The point is not meant if a value is a number in a range.
    NotRange {
        /// Which value.
        from: u8,
        /// What of it is the number.
        kind: NumberKind,
        /// The least and the greatest that is not meant, as bits of such a number.
        bounds: [u64; 2],
    },
    /// The point is not meant unless a value has one of these bits.
    OneOf {
        /// Which value.
        from: u8,
        /// Which bits.
        mask: u64,
    },
    /// The point is not meant unless text is like a pattern, or may be. The pattern follows in [`Step::Words`]
    /// ([`pattern_in_words`]).
    Like {
        /// Address.
        from: u8,
        /// Added to the address.
        offset: u64,
        /// The point is not meant if it is like the pattern.
        not: bool,
    },
    /// From here on, what would make the point one that is not meant goes on at this step instead.
    Else {
        /// The step's number.
        step: u64,
    },
    /// Goes on at a step, from which on there is no other to go on at.
    Goto {
        /// The step's number.
        step: u64,
    },
    /// The monitor has to look unless a value is among so many words, which follow in [`Step::Words`].
    Among {
        /// Which value.
        from: u8,
        /// How many words.
        count: u64,
    },
    /// Goes on at the step whose number is the word of this index, of so many words in the [`Step::Words`] at a step; ends
    /// if there is none, or it is zero.
    Choose {
        /// The index.
        from: u8,
        /// Number of the first step with words.
        table: u64,
        /// How many words.
        count: u64,
    },
    /// Words for others.
    Words([u64; STEP_WORDS]),
    /// Notes bytes.
    Note {
        /// Address.
        from: u8,
        /// Added to the address.
        offset: u64,
        /// How many.
        len: u64,
    },
    /// Notes as many parts as the lower half of a value says.
    Times {
        /// Address.
        from: u8,
        /// Which value.
        count: u8,
        /// Bytes of a part.
        unit: u64,
        /// Bytes at the most.
        most: u64,
    },
    /// Notes text up to its zero.
    Text {
        /// Address.
        from: u8,
    },
    /// Notes addresses up to a zero, and the texts there.
    Texts {
        /// Address.
        from: u8,
    },
    /// Notes words up to a zero.
    UpToZero {
        /// Address.
        from: u8,
        /// Words at the most.
        most: u64,
    },
    /// Notes a list of addresses and lengths, as many as a value says, and the first bytes of each.
    Vectors {
        /// Address.
        from: u8,
        /// Which value.
        count: u8,
        /// Bytes of each at the most.
        bytes: u64,
    },
}

impl Step {
    /// As words.
    pub fn encode(self) -> [u64; STEP_WORDS] {
        let code = |code: u64, a: u8, b: u8| code | u64::from(a) << 8 | u64::from(b) << 16;
        match self {
            Self::End => [0; 3],
            Self::Load { to, from, offset } => [code(1, from, to), offset, 0],
            Self::Add { to, amount } => [code(11, 0, to), amount, 0],
            Self::Want { from, mask, value } => [code(2, from, 0), mask, value],
            Self::Range { from, kind, bounds: [low, high] } => {
                [code(12, from, kind.code()), low, high]
            }
            Self::NotRange { from, kind, bounds: [low, high] } => {
                [code(13, from, kind.code()), low, high]
            }
            Self::OneOf { from, mask } => [code(14, from, 0), mask, 0],
            Self::Like { from, offset, not } => [code(15, from, 0), offset, not.into()],
            Self::Else { step } => [code(16, 0, 0), step, 0],
            Self::Goto { step } => [code(17, 0, 0), step, 0],
            Self::Among { from, count } => [code(3, from, 0), count, 0],
            Self::Choose { from, table, count } => [code(4, from, 0), table, count],
            Self::Words(words) => words,
            Self::Note { from, offset, len } => [code(5, from, 0), offset, len],
            Self::Times { from, count, unit, most } => [code(6, from, count), unit, most],
            Self::Text { from } => [code(7, from, 0), 0, 0],
            Self::Texts { from } => [code(8, from, 0), 0, 0],
            Self::UpToZero { from, most } => [code(9, from, 0), most, 0],
            Self::Vectors { from, count, bytes } => [code(10, from, count), bytes, 0],
        }
    }

    fn decode([first, p, q]: [u64; STEP_WORDS]) -> Option<Self> {
        let (from, to) = ((first >> 8 & 31) as u8, (first >> 16 & 31) as u8);
        Some(match first & 0xff {
            0 => Self::End,
            1 => Self::Load { to, from, offset: p },
            2 => Self::Want { from, mask: p, value: q },
            3 => Self::Among { from, count: p },
            4 => Self::Choose { from, table: p, count: q },
            5 => Self::Note { from, offset: p, len: q },
            6 => Self::Times { from, count: to, unit: p, most: q },
            7 => Self::Text { from },
            8 => Self::Texts { from },
            9 => Self::UpToZero { from, most: p },
            10 => Self::Vectors { from, count: to, bytes: p },
            11 => Self::Add { to, amount: p },
            12 => {
                let kind = *NumberKind::ALL.get(usize::from(to))?;
                Self::Range { from, kind, bounds: [p, q] }
            }
            13 => {
                let kind = *NumberKind::ALL.get(usize::from(to))?;
                Self::NotRange { from, kind, bounds: [p, q] }
            }
            14 => Self::OneOf { from, mask: p },
            15 => Self::Like { from, offset: p, not: q != 0 },
            16 => Self::Else { step: p },
            17 => Self::Goto { step: p },
            _ => return None,
        })
    }
}

/// What came of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A record of so many bytes.
    Noted(usize),
    /// The point is not meant.
    Dropped,
    /// The record does not fit.
    Full,
    /// The monitor has to look.
    Odd,
}

/// Guest memory, without a trace of the look in it.
pub trait Memory {
    /// Reads bytes that lie in one page; `Some(false)` if there are none, `None` if it cannot be told here.
    fn read(&mut self, gva: u64, to: &mut [u8]) -> Option<bool>;
}

/// What a vCPU has at a point.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moment {
    /// The point.
    pub rip: u64,
    /// Time-stamp counter.
    pub tsc: u64,
    /// CR2.
    pub cr2: u64,
    /// CR3.
    pub cr3: u64,
    /// GS base.
    pub gs_base: u64,
    /// General registers.
    pub gpr: [u64; 16],
}

/// Why a run ends early.
enum Stop {
    Dropped,
    Full,
    Odd,
}

struct Run<'a, M> {
    values: [u64; VALUES],
    memory: &'a mut M,
    out: &'a mut [u8],
    used: usize,
}

/// Runs the program that begins at a step and writes the record into `out`, whose length is a multiple of eight.
pub fn run(
    step: impl Fn(u64) -> Option<[u64; STEP_WORDS]>,
    first: u64,
    moment: &Moment,
    memory: &mut impl Memory,
    out: &mut [u8],
) -> Outcome {
    let values = core::array::from_fn(|n| match n {
        GS_BASE => moment.gs_base,
        n => moment.gpr.get(n).copied().unwrap_or_default(),
    });
    let mut run = Run { values, memory, out, used: HEAD_WORDS * 8 };
    match run.all(step, first) {
        Err(Stop::Dropped) => Outcome::Dropped,
        Err(Stop::Odd) => Outcome::Odd,
        Err(Stop::Full) => Outcome::Full,
        Ok(()) => match run.head(moment) {
            Some(()) => Outcome::Noted(run.used),
            None => Outcome::Full,
        },
    }
}

impl<M: Memory> Run<'_, M> {
    fn all(
        &mut self,
        step: impl Fn(u64) -> Option<[u64; STEP_WORDS]>,
        first: u64,
    ) -> Result<(), Stop> {
        let (mut at, mut otherwise) = (first, None);
        let word = |table: u64, n: u64| {
            step(table.wrapping_add(n / STEP_WORDS as u64))?
                .get((n % STEP_WORDS as u64) as usize)
                .copied()
        };
        for _ in 0..MOST_STEPS {
            let Some(next) = step(at).and_then(Step::decode) else { return Err(Stop::Odd) };
            at = at.wrapping_add(1);
            match next {
                Step::End => return Ok(()),
                Step::Among { from, count } => {
                    let value = self.value(from);
                    let known = |n: &u64| word(at, *n) == Some(value);
                    if !(0..count.min(64)).any(|n| known(&n)) {
                        return Err(Stop::Odd);
                    }
                    at = at.wrapping_add(count.min(64).div_ceil(STEP_WORDS as u64));
                }
                Step::Choose { from, table, count } => {
                    let n = Some(self.value(from)).filter(|n| *n < count);
                    match n.and_then(|n| word(table, n)).unwrap_or_default() {
                        0 => return Ok(()),
                        chosen => at = chosen,
                    }
                }
                Step::Else { step } => otherwise = Some(step),
                Step::Goto { step } => (at, otherwise) = (step, None),
                Step::Like { from, offset, not } => {
                    let mut pattern = PatternWords::default();
                    for words in &mut pattern {
                        *words = step(at).unwrap_or_default();
                        at = at.wrapping_add(1);
                    }
                    let like = self.is_like(self.value(from).wrapping_add(offset), &pattern)?;
                    if like == Some(not) {
                        at = otherwise.take().ok_or(Stop::Dropped)?;
                    }
                }
                other => match (self.one(other), otherwise) {
                    (Err(Stop::Dropped), Some(step)) => (at, otherwise) = (step, None),
                    (done, _) => done?,
                },
            }
        }
        Err(Stop::Odd)
    }

    fn value(&self, n: u8) -> u64 {
        self.values.get(usize::from(n)).copied().unwrap_or_default()
    }

    fn one(&mut self, step: Step) -> Result<(), Stop> {
        match step {
            Step::Load { to, from, offset } => {
                let loaded = self.word(self.value(from).wrapping_add(offset))?;
                if let Some(value) = self.values.get_mut(usize::from(to)) {
                    *value = loaded.unwrap_or_default();
                }
            }
            Step::Add { to, amount } => {
                if let Some(value) = self.values.get_mut(usize::from(to)) {
                    *value = value.wrapping_add(amount);
                }
            }
            Step::Want { from, mask, value } if self.value(from) & mask != value => {
                return Err(Stop::Dropped);
            }
            Step::Range { from, kind, bounds } if !kind.is_within(self.value(from), bounds) => {
                return Err(Stop::Dropped);
            }
            Step::NotRange { from, kind, bounds } if kind.is_within(self.value(from), bounds) => {
                return Err(Stop::Dropped);
            }
            Step::OneOf { from, mask } if self.value(from) & mask == 0 => {
                return Err(Stop::Dropped);
            }
            Step::Note { from, offset, len } => {
                self.note(self.value(from).wrapping_add(offset), len)?;
            }
            Step::Times { from, count, unit, most } => {
                let len = (self.value(count) & 0xffff_ffff).saturating_mul(unit).min(most);
                self.note(self.value(from), len)?;
            }
            Step::Text { from } => drop(self.text(self.value(from))?),
            Step::Texts { from } => self.texts(self.value(from))?,
            Step::UpToZero { from, most } => self.up_to_zero(self.value(from), most)?,
            Step::Vectors { from, count, bytes } => {
                self.vectors(self.value(from), self.value(count), bytes)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn is_like(&mut self, gva: u64, pattern: &PatternWords) -> Result<Option<bool>, Stop> {
        // What is read is not kept: it lies where the next piece will.
        let room = self.used..self.used.saturating_add(pattern::MOST_COMPARED);
        let room = self.out.get_mut(room).ok_or(Stop::Full)?;
        pattern::compare(self.memory, gva, room, pattern).ok_or(Stop::Odd)
    }

    /// A word, which may lie across two pages.
    fn word(&mut self, gva: u64) -> Result<Option<u64>, Stop> {
        let mut bytes = [0; 8];
        let whole = self.read(gva, &mut bytes)? == 8;
        Ok(whole.then(|| u64::from_le_bytes(bytes)))
    }

    /// How many of these bytes there are.
    fn read(&mut self, gva: u64, to: &mut [u8]) -> Result<usize, Stop> {
        fill(self.memory, gva, to)
    }

    /// Room for the bytes of a piece of memory.
    fn room(&mut self, len: usize) -> Result<&mut [u8], Stop> {
        let at = self.used.saturating_add(16);
        let rounded = len.checked_next_multiple_of(8).ok_or(Stop::Full)?;
        let room = self.out.get_mut(at..at.saturating_add(rounded)).ok_or(Stop::Full)?;
        room.get_mut(..len).ok_or(Stop::Full)
    }

    /// The piece has so many bytes.
    fn close(&mut self, gva: u64, len: usize) -> Result<(), Stop> {
        let end = self.used.saturating_add(16).saturating_add(len.next_multiple_of(8));
        let piece = self.out.get_mut(self.used..end).ok_or(Stop::Full)?;
        let (head, _) = piece.split_at_mut_checked(16).ok_or(Stop::Full)?;
        for (to, word) in head.as_chunks_mut::<8>().0.iter_mut().zip([gva, len as u64]) {
            *to = word.to_le_bytes();
        }
        self.used = end;
        Ok(())
    }

    fn note(&mut self, gva: u64, len: u64) -> Result<(), Stop> {
        if len == 0 || gva == 0 {
            return Ok(());
        }
        let len = usize::try_from(len).map_err(|_| Stop::Full)?;
        self.room(len)?;
        let at = self.used + 16;
        let to = self.out.get_mut(at..at + len).ok_or(Stop::Full)?;
        let done = fill(self.memory, gva, to)?;
        self.close(gva, done)
    }

    /// Text with its zero, or what there is of it: 32 bytes at a time, which mostly are enough.
    fn text(&mut self, gva: u64) -> Result<(), Stop> {
        const PART: usize = 32;
        if gva == 0 {
            return Ok(());
        }
        let mut done = 0;
        while done < MOST_TEXT {
            let rest = self.room(done + PART)?.get_mut(done..).ok_or(Stop::Full)?;
            let len = front(gva, done, rest).len();
            let at = self.used + 16 + done;
            let part = self.out.get_mut(at..at + len).ok_or(Stop::Full)?;
            match self.memory.read(gva.wrapping_add(done as u64), part) {
                Some(true) => {}
                Some(false) => break,
                None => return Err(Stop::Odd),
            }
            match part.iter().position(|byte| *byte == 0) {
                Some(zero) => {
                    done += zero + 1;
                    break;
                }
                None => done += len,
            }
        }
        self.close(gva, done)
    }

    fn texts(&mut self, gva: u64) -> Result<(), Stop> {
        self.note(gva, MOST_PARTS * 8)?;
        for n in 0..MOST_PARTS {
            match self.word(gva.wrapping_add(8 * n))? {
                None | Some(0) => break,
                Some(text) => self.text(text)?,
            }
        }
        Ok(())
    }

    fn up_to_zero(&mut self, gva: u64, most: u64) -> Result<(), Stop> {
        let mut count = 0;
        while count < most && !matches!(self.word(gva.wrapping_add(8 * count))?, None | Some(0)) {
            count += 1;
        }
        self.note(gva, (count + 1) * 8)
    }

    fn vectors(&mut self, gva: u64, count: u64, bytes: u64) -> Result<(), Stop> {
        let count = count.min(MOST_PARTS - 1);
        self.note(gva, count * 16)?;
        for n in 0..count {
            let at = gva.wrapping_add(16 * n);
            let (Some(base), Some(len)) = (self.word(at)?, self.word(at.wrapping_add(8))?) else {
                break;
            };
            self.note(base, len.min(bytes))?;
        }
        Ok(())
    }

    fn head(&mut self, moment: &Moment) -> Option<()> {
        let Moment { rip, tsc, cr2, cr3, gs_base, gpr } = moment;
        let words = [self.used as u64, *rip, *tsc, *cr2, *cr3, *gs_base];
        let out = self.out.get_mut(..HEAD_WORDS * 8)?;
        for (to, word) in out.as_chunks_mut::<8>().0.iter_mut().zip(words.iter().chain(gpr)) {
            *to = word.to_le_bytes();
        }
        Some(())
    }
}

/// Reads bytes page by page; how many there are.
fn fill(memory: &mut impl Memory, gva: u64, to: &mut [u8]) -> Result<usize, Stop> {
    let mut done = 0;
    while let Some(rest) = to.get_mut(done..).filter(|rest| !rest.is_empty()) {
        let part = front(gva, done, rest);
        match memory.read(gva.wrapping_add(done as u64), part) {
            Some(true) => done += part.len(),
            Some(false) => break,
            None => return Err(Stop::Odd),
        }
    }
    Ok(done)
}

/// The part of these bytes, which belong `done` bytes behind a GVA, that lies in one page.
fn front(gva: u64, done: usize, rest: &mut [u8]) -> &mut [u8] {
    let at = gva.wrapping_add(done as u64);
    let len = rest.len().min((PAGE - at % PAGE) as usize);
    match rest.get_mut(..len) {
        Some(part) => part,
        None => &mut [],
    }
}

/// A record, as whoever wrote it says.
#[derive(Clone, Copy, Debug)]
pub struct TapRecord<'a> {
    /// Registers.
    pub moment: Moment,
    pieces: &'a [u8],
}

impl<'a> TapRecord<'a> {
    /// Bytes of it.
    pub fn len(&self) -> usize {
        HEAD_WORDS * 8 + self.pieces.len()
    }

    /// It never is.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The pieces of memory: address and bytes.
    pub fn pieces(&self) -> impl Iterator<Item = (u64, &'a [u8])> + use<'a> {
        let mut rest = self.pieces;
        iter::from_fn(move || {
            let (gva, behind) = word(rest)?;
            let (len, behind) = word(behind)?;
            let len = usize::try_from(len).ok()?;
            let bytes = behind.get(..len)?;
            rest = behind.get(len.checked_next_multiple_of(8)?..)?;
            Some((gva, bytes))
        })
    }

    /// Reads memory as far as it was noted; how many bytes.
    pub fn read(&self, gva: u64, to: &mut [u8]) -> usize {
        let mut done = 0;
        while done < to.len() {
            let at = gva.wrapping_add(done as u64);
            let holds = |(from, bytes): &(u64, &[u8])| at.wrapping_sub(*from) < bytes.len() as u64;
            let Some((from, bytes)) = self.pieces().find(holds) else { break };
            let part = &bytes[at.wrapping_sub(from) as usize..];
            let len = part.len().min(to.len() - done);
            to[done..done + len].copy_from_slice(&part[..len]);
            done += len;
        }
        done
    }
}

fn word(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (first, rest) = bytes.split_first_chunk()?;
    Some((u64::from_le_bytes(*first), rest))
}

/// Records one behind the other; ends where something is no record.
pub fn records(mut rest: &[u8]) -> impl Iterator<Item = TapRecord<'_>> {
    iter::from_fn(move || {
        let (len, _) = word(rest)?;
        let len = usize::try_from(len).ok().filter(|len| *len >= HEAD_WORDS * 8 && len % 8 == 0)?;
        let (head, pieces) = rest.get(..len)?.split_at(HEAD_WORDS * 8);
        rest = &rest[len..];
        let words: &[[u8; 8]; HEAD_WORDS] = head.as_chunks().0.first_chunk()?;
        let word = |n: usize| u64::from_le_bytes(words[n]);
        let [rip, tsc, cr2, cr3, gs_base] = core::array::from_fn(|n| word(1 + n));
        let gpr = core::array::from_fn(|n| word(6 + n));
        Some(TapRecord { moment: Moment { rip, tsc, cr2, cr3, gs_base, gpr }, pieces })
    })
}

#[cfg(test)]
mod tests;
