//! What a wedge says of itself: why guest code has stopped, and what it has mapped.

use wedge_abi::{ExitState, MapCommand, MapReport, RawChange, TOP, WedgeExit};

use fuzzer::Target;

pub(crate) const TARGET: Target = Target { name: "wedge", seeds, run };

const PAGE: u64 = 4096;
const REPORT: usize = size_of::<RawChange>();

/// The first word is guest RAM in pages, the next two are an exit, the rest are reports.
fn seeds() -> Vec<Vec<u8>> {
    let kinds = 0..16;
    let report = |kind| RawChange::from_words([kind, 0x40_0000, PAGE, 0]);
    let reports: Vec<u8> = kinds.flat_map(|kind| report(kind).to_bytes()).collect();
    let head = [1_u64 << 18, 1, 2].map(u64::to_le_bytes).concat();
    vec![[head, reports].concat()]
}

fn word(bytes: &[u8], at: usize) -> u64 {
    let word = bytes.get(at * 8..).and_then(|rest| rest.first_chunk());
    word.map_or(0, |word| u64::from_le_bytes(*word))
}

fn run(bytes: &[u8]) {
    let ram = word(bytes, 0) % (1 << 26) * PAGE;
    let (reason, kind) = (word(bytes, 1), word(bytes, 2));
    let exit = WedgeExit::from(&ExitState { reason, kind, ..ExitState::default() });
    assert!(exit.number() < WedgeExit::COUNT);
    for report in bytes.get(24..).unwrap_or_default().as_chunks::<REPORT>().0 {
        let raw = RawChange::from_words([0, 1, 2, 3].map(|at| word(report, at)));
        if let Some(report) = MapReport::decode(raw, ram) {
            check(report, ram);
            assert_eq!(MapReport::decode(report.encode(), ram), Some(report));
            assert_eq!(MapCommand::decode(raw), None, "a report is no command");
        }
    }
}

/// The monitor keeps books by what it believes: whole pages, of the user's part of the wedge and of guest RAM.
fn check(report: MapReport, ram: u64) {
    let (start, len, offset) = match report {
        MapReport::Mapped { start, len, offset, .. }
        | MapReport::Code { start, len, offset }
        | MapReport::Empty { start, len, offset } => (start, len, Some(offset)),
        MapReport::Dropped { start, len } => (start, len, None),
        MapReport::Shown { page, offset, .. } | MapReport::ShownCode { page, offset } => {
            (page, PAGE, Some(offset))
        }
        MapReport::Refused { page } | MapReport::KernelDropped { page } => (page, PAGE, None),
    };
    let end = start.checked_add(len).expect("no wrap");
    assert!(end <= TOP as u64 && len > 0, "{report:x?}");
    assert!(start.is_multiple_of(PAGE) && len.is_multiple_of(PAGE), "{report:x?}");
    if let Some(offset) = offset {
        assert!(offset.is_multiple_of(PAGE) && offset < ram, "{report:x?}");
        let one = matches!(report, MapReport::Empty { .. } | MapReport::Shown { .. });
        let used = if one { PAGE } else { len };
        assert!(offset.checked_add(used).is_some_and(|end| end <= ram), "{report:x?}");
    }
}
