//! Programs of taps over memory that is a few words, and records that are none.

extern crate std;
use super::*;
use std::{vec, vec::Vec};

/// Memory from 0x1000 on.
struct Bytes(Vec<u8>);

impl Memory for Bytes {
    fn read(&mut self, gva: u64, to: &mut [u8]) -> Option<bool> {
        assert!(gva % PAGE + to.len() as u64 <= PAGE, "one page at a time");
        if gva == 0xdead {
            return None;
        }
        let from = gva.wrapping_sub(0x1000) as usize;
        let Some(bytes) = self.0.get(from..from.wrapping_add(to.len())) else {
            return Some(false);
        };
        to.copy_from_slice(bytes);
        Some(true)
    }
}

fn memory(words: &[u64], text: &[u8]) -> Bytes {
    let words = words.iter().flat_map(|word| word.to_le_bytes());
    let mut all: Vec<u8> = words.chain(text.iter().copied()).collect();
    all.resize(0x3000, 0);
    Bytes(all)
}

fn ran(steps: &[Step], moment: &Moment, memory: &mut Bytes) -> (Outcome, Vec<u8>) {
    let mut out = vec![0xaa; 1024];
    let step = |n: u64| steps.get(usize::try_from(n).ok()?).map(|step| step.encode());
    let outcome = run(step, 0, moment, memory, &mut out);
    (outcome, out)
}

#[test]
fn a_record_has_the_registers_and_the_memory_that_was_asked_for() {
    let mut moment = Moment { rip: 5, tsc: 6, gs_base: 0x1000, ..Moment::default() };
    moment.gpr[7] = 0x1010;
    let mut memory = memory(&[0x1018, 0, 7], b"text\0more");
    let steps = [
        Step::Load { to: 17, from: GS_BASE as u8, offset: 0 },
        Step::Text { from: 17 },
        Step::Note { from: 7, offset: 0, len: 8 },
        Step::End,
    ];
    let (outcome, out) = ran(&steps, &moment, &mut memory);
    assert_eq!(outcome, Outcome::Noted(HEAD_WORDS * 8 + 24 + 24));
    let all: Vec<_> = records(&out).collect();
    let [record] = &all[..] else { panic!("{} records", all.len()) };
    assert_eq!(record.moment, moment);
    let pieces: Vec<_> = record.pieces().collect();
    assert_eq!(pieces, [(0x1018, &b"text\0"[..]), (0x1010, &7u64.to_le_bytes()[..])]);
    let mut read = [0; 9];
    assert_eq!(record.read(0x1014, &mut read), 9, "from one piece to the next");
    assert_eq!(&read[4..], b"text\0");
}

#[test]
fn what_is_not_meant_or_cannot_be_told_makes_no_record() {
    let moment = Moment { gpr: [0x1000; 16], ..Moment::default() };
    let mut memory = memory(&[42], b"");
    let load = Step::Load { to: 17, from: 0, offset: 0 };
    let want = |value| [load, Step::Want { from: 17, mask: 0xff, value }, Step::End];
    assert!(matches!(ran(&want(42), &moment, &mut memory).0, Outcome::Noted(_)));
    assert_eq!(ran(&want(43), &moment, &mut memory).0, Outcome::Dropped);
    let among =
        |word| [load, Step::Among { from: 17, count: 2 }, Step::Words([1, word, 42]), Step::End];
    assert!(matches!(ran(&among(42), &moment, &mut memory).0, Outcome::Noted(_)));
    assert_eq!(ran(&among(9), &moment, &mut memory).0, Outcome::Odd, "the third is not asked");
    let odd = Moment { gpr: [0xdead; 16], ..Moment::default() };
    assert_eq!(ran(&want(42), &odd, &mut memory).0, Outcome::Odd);
    let much = [Step::Note { from: 0, offset: 0, len: 1000 }, Step::End];
    assert_eq!(ran(&much, &moment, &mut memory).0, Outcome::Full);
    assert_eq!(ran(&[load], &moment, &mut memory).0, Outcome::Odd, "it does not end");
    let endless = [Step::Choose { from: 1, table: 1, count: u64::MAX }, Step::Words([0; 3])];
    assert_eq!(ran(&endless, &moment, &mut memory).0, Outcome::Noted(HEAD_WORDS * 8));
}

#[test]
fn lists_lead_to_what_is_in_them() {
    let mut moment = Moment::default();
    moment.gpr[0] = 0x1000;
    moment.gpr[1] = 2;
    let mut memory = memory(&[0x1020, 0x1022, 0, 0], b"a\0b\0");
    let (_, out) = ran(&[Step::Texts { from: 0 }, Step::End], &moment, &mut memory);
    let record = records(&out).next().expect("one");
    let texts: Vec<_> = record.pieces().skip(1).collect();
    assert_eq!(texts, [(0x1020, &b"a\0"[..]), (0x1022, &b"b\0"[..])]);
    let mut memory = super::tests::memory(&[0x1020, 100, 0x1024, 2], b"abcdefgh");
    let vectors = [Step::Vectors { from: 0, count: 1, bytes: 4 }, Step::End];
    let (_, out) = ran(&vectors, &moment, &mut memory);
    let record = records(&out).next().expect("one");
    let parts: Vec<_> = record.pieces().skip(1).collect();
    assert_eq!(parts, [(0x1020, &b"abcd"[..]), (0x1024, &b"ef"[..])]);
}

#[test]
fn choices_go_on_elsewhere() {
    let mut moment = Moment::default();
    moment.gpr[1] = 0x1000;
    let steps = [
        Step::Choose { from: 0, table: 1, count: 2 },
        Step::Words([3, 2, 0]),
        Step::End,
        Step::Note { from: 1, offset: 0, len: 8 },
        Step::End,
    ];
    let mut memory = memory(&[1], b"");
    let count = |moment: &Moment, memory: &mut Bytes| {
        let (_, out) = ran(&steps, moment, memory);
        records(&out).next().map(|record| record.pieces().count())
    };
    assert_eq!(count(&moment, &mut memory), Some(1));
    moment.gpr[0] = 1;
    assert_eq!(count(&moment, &mut memory), Some(0));
    moment.gpr[0] = u64::MAX;
    assert_eq!(count(&moment, &mut memory), Some(0));
}

#[test]
fn what_is_no_record_ends_them() {
    for len in [0, 7, 8, HEAD_WORDS as u64 * 8 + 4, 1 << 20, u64::MAX] {
        let mut bytes = [0; 1024];
        bytes[..8].copy_from_slice(&len.to_le_bytes());
        assert_eq!(records(&bytes).count(), 0, "{len}");
    }
    let mut bytes = [0xff; 1024];
    bytes[..8].copy_from_slice(&1024u64.to_le_bytes());
    let record = records(&bytes).next().expect("one");
    assert_eq!((record.pieces().count(), record.read(0, &mut [0; 8])), (0, 0));
}

#[test]
fn numbers_are_compared_with_and_without_signs() {
    use NumberKind::{Signed32, Signed64, Unsigned32, Unsigned64};
    let is_meant = |value: u64, step: Step| {
        let moment = Moment { gpr: [value; 16], ..Moment::default() };
        match ran(&[step, Step::End], &moment, &mut memory(&[], b"")).0 {
            Outcome::Noted(_) => true,
            Outcome::Dropped => false,
            other => panic!("{other:?}"),
        }
    };
    let minus = -2i64 as u64;
    let below = |kind, least: u64| Step::Range { from: 0, kind, bounds: [least, u64::MAX] };
    assert!(is_meant(0xffff_fffe, below(Signed32, minus)), "-2");
    assert!(!is_meant(0xffff_fffd, below(Signed32, minus)) && !is_meant(0, below(Signed32, minus)));
    assert!(
        is_meant(minus, below(Signed64, minus)) && !is_meant(minus - 1, below(Signed64, minus))
    );
    let first = |kind| Step::Range { from: 0, kind, bounds: [3, 5] };
    for kind in [Unsigned32, Signed32] {
        assert!(is_meant(0x7_0000_0003, first(kind)) && !is_meant(0x7_0000_0006, first(kind)));
    }
    for kind in [Unsigned64, Signed64] {
        assert!(is_meant(5, first(kind)) && !is_meant(0x7_0000_0003, first(kind)));
    }
    let others = |kind| Step::NotRange { from: 0, kind, bounds: [3, 3] };
    assert!(is_meant(4, others(Signed32)) && !is_meant(3, others(Signed32)));
    let bits = Step::OneOf { from: 0, mask: 6 };
    assert!(is_meant(0x12, bits) && !is_meant(0x11, bits));
}

/// A pattern and its words, as a step and the steps that follow it.
fn like(from: u8, offset: u64, not: bool, pattern: &str) -> Vec<Step> {
    let words = pattern_in_words(pattern).expect("short");
    let words = words.into_iter().map(Step::Words);
    iter::once(Step::Like { from, offset, not }).chain(words).collect()
}

#[test]
fn text_is_compared_with_patterns() {
    let moment = Moment { gs_base: 0x1000, ..Moment::default() };
    let mut memory = memory(&[], b"/etc/passwd\0");
    for (pattern, expected) in [
        ("/etc/*", true),
        ("*passwd", true),
        ("/e?c/pass*d", true),
        ("/etc/passwd", true),
        ("*", true),
        ("/etc/passwd*", true),
        ("/etc/passwd?", false),
        ("/etc/passw", false),
        ("*shadow", false),
        ("", false),
        ("*a*b*c*", false),
    ] {
        for not in [false, true] {
            let steps = [like(16, 0, not, pattern), vec![Step::End]].concat();
            let meant = matches!(ran(&steps, &moment, &mut memory).0, Outcome::Noted(_));
            assert_eq!(meant, expected != not, "{pattern}, {not}");
        }
    }
}

#[test]
fn text_that_cannot_be_compared_may_be_like_anything() {
    let moment = Moment { gs_base: 0x1000, ..Moment::default() };
    let meant = |text: &[u8], offset| {
        let steps = [like(16, offset, false, "no"), vec![Step::End]].concat();
        ran(&steps, &moment, &mut memory(&[], text)).0
    };
    assert_eq!(meant(b"yes\0", 0), Outcome::Dropped);
    assert_eq!(meant(&[b'y'; 300], 0), Outcome::Noted(HEAD_WORDS * 8), "long");
    assert_eq!(meant(b"\xc3\xa9\0", 0), Outcome::Noted(HEAD_WORDS * 8), "no ASCII");
    assert_eq!(meant(b"yes\0", 0x10_0000), Outcome::Noted(HEAD_WORDS * 8), "no memory");
    assert_eq!(meant(b"yes\0", 0xdead - 0x1000), Outcome::Odd);
    assert_eq!(pattern_in_words(&"x".repeat(MOST_PATTERN + 1)), None);
    assert!(pattern_in_words(&"x".repeat(MOST_PATTERN)).is_some());
    assert_eq!(pattern_in_words("\u{e9}*"), None);
}

/// RDI is 1 and RSI is 2, or RDI is 3; and RDX is 4 in any case.
#[test]
fn one_of_several_alternatives_is_enough() {
    let is = |from, value| Step::Want { from, mask: u64::MAX, value };
    let steps = [
        Step::Else { step: 4 },
        is(7, 1),
        is(6, 2),
        Step::Goto { step: 5 },
        is(7, 3),
        is(2, 4),
        Step::End,
    ];
    for (rdi, rsi, rdx, expected) in
        [(1, 2, 4, true), (3, 0, 4, true), (1, 0, 4, false), (3, 2, 5, false), (1, 2, 5, false)]
    {
        let mut moment = Moment::default();
        (moment.gpr[7], moment.gpr[6], moment.gpr[2]) = (rdi, rsi, rdx);
        let outcome = ran(&steps, &moment, &mut memory(&[], &[])).0;
        assert_eq!(matches!(outcome, Outcome::Noted(_)), expected, "{rdi} {rsi} {rdx}");
    }
    let endless = [Step::Goto { step: 0 }];
    assert_eq!(ran(&endless, &Moment::default(), &mut memory(&[], &[])).0, Outcome::Odd);
}
