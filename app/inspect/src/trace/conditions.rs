//! The part of a filter that a tap compares by itself, so that an event which the filter excludes makes no record. The finished
//! event is compared with the whole filter later: a tap drops only what the filter excludes for certain.

use ring3_trace::filter::{Early, Filter, Need};
use x86::tap::{self, NumberKind, Step};

use super::{calls::Call, fields};

/// Alternatives of conditions, each of which is steps: what it loads, and a comparison.
pub type Alternatives = Vec<Vec<Vec<Step>>>;

/// Ends every program: nothing here is meant.
pub const NEVER: Step = Step::Want { from: 0, mask: 0, value: 1 };

/// Where what is compared is loaded from, and where to.
#[derive(Clone, Copy)]
pub struct LoadPlace {
    /// The value that is the address of a task or a frame.
    pub base: u8,
    /// The value that is loaded into.
    pub to: u8,
}

impl LoadPlace {
    /// Has the value at this offset loaded before the steps that compare it. Where nothing is to be compared, nothing is loaded.
    fn condition(self, offset: u64, step: Early<Vec<Step>>) -> Early<Vec<Step>> {
        let load = Step::Load { to: self.to, from: self.base, offset };
        match step {
            Early::If(steps) => Early::If([vec![load], steps].concat()),
            known => known,
        }
    }
}

/// What the arguments of a system call have to be. Where it ends (`at_end`) text may have changed.
pub fn of_call(filter: &Filter, call: &Call, place: LoadPlace, at_end: bool) -> Alternatives {
    filter.alternatives(&|need, wanted| {
        let field = match need {
            Need::Event(kind, name) => {
                let is_it = kind == "syscall" && name.is_none_or(|name| name == call.name);
                return certain(is_it == wanted);
            }
            Need::Within(field, ..) | Need::Not(field, _) | Need::OneOf(field, _) => field,
            Need::Is(field, _) | Need::IsNot(field, _) | Need::Has(field) => field,
            Need::Like(field, _) | Need::Unlike(field, _) => field,
        };
        if fields::is_of_all(field) {
            return Early::Maybe;
        }
        // A comparison with a field that an event does not have never holds.
        let Some(n) = call.parameter(field) else { return certain(!wanted) };
        let Some(offset) = call.places().get(n) else { return Early::Maybe };
        place.condition(
            *offset,
            match call.number_kind(n) {
                Some(kind) => number(&need, wanted, place.to, kind),
                None if at_end || !call.is_text(n) => Early::Maybe,
                None => text(&need, wanted, place.to, 0),
            },
        )
    })
}

/// What the task has to be, in which these fields are at these offsets: `pid`, `tid` and `comm`.
pub fn of_task(filter: &Filter, place: LoadPlace, [pid, tid, comm]: [u64; 3]) -> Alternatives {
    let of_number = |need: &Need<'_>, wanted, offset| {
        place.condition(offset, number(need, wanted, place.to, NumberKind::Unsigned32))
    };
    filter.alternatives(&|need, wanted| match need {
        Need::Within("pid", ..) | Need::Not("pid", _) | Need::OneOf("pid", _) => {
            of_number(&need, wanted, pid)
        }
        Need::Within("tid", ..) | Need::Not("tid", _) | Need::OneOf("tid", _) => {
            of_number(&need, wanted, tid)
        }
        Need::Is("comm", _)
        | Need::IsNot("comm", _)
        | Need::Like("comm", _)
        | Need::Unlike("comm", _) => text(&need, wanted, place.base, comm),
        _ => Early::Maybe,
    })
}

fn certain<T>(holds: bool) -> Early<T> {
    if holds { Early::Maybe } else { Early::Never }
}

/// The step for what text at the address in a value has to be.
fn text(need: &Need<'_>, wanted: bool, from: u8, offset: u64) -> Early<Vec<Step>> {
    let (pattern, is_pattern, not) = match *need {
        Need::Is(_, text) => (text, false, !wanted),
        Need::IsNot(_, text) => (text, false, wanted),
        Need::Like(_, pattern) => (pattern, true, !wanted),
        Need::Unlike(_, pattern) => (pattern, true, wanted),
        _ => return Early::Maybe,
    };
    let is_plain = is_pattern || !pattern.contains(['*', '?']);
    match tap::pattern_in_words(pattern).filter(|_| is_plain) {
        Some(words) => {
            let words = words.into_iter().map(Step::Words);
            Early::If([Step::Like { from, offset, not }].into_iter().chain(words).collect())
        }
        None => Early::Maybe,
    }
}

/// The step for what a number has to be.
fn number(need: &Need<'_>, wanted: bool, from: u8, kind: NumberKind) -> Early<Vec<Step>> {
    let [least, greatest] = kind.bounds();
    let (low, high, inside) = match *need {
        Need::Within(_, low, high) => (low, high, wanted),
        Need::Not(_, value) => (value, value, !wanted),
        Need::OneOf(_, mask) if (0..=greatest).contains(&mask) => {
            // A number with a sign may have bits above those of its type.
            let mask = mask as u64;
            let none = Step::Want { from, mask, value: 0 };
            return Early::If(vec![if wanted { Step::OneOf { from, mask } } else { none }]);
        }
        _ => return Early::Maybe,
    };
    let (low, high) = (low.max(least), high.min(greatest));
    let bounds = [low as u64, high as u64];
    match inside {
        _ if low > high => certain(!inside),
        _ if (low, high) == (least, greatest) => certain(inside),
        true => Early::If(vec![Step::Range { from, kind, bounds }]),
        false => Early::If(vec![Step::NotRange { from, kind, bounds }]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use NumberKind::{Signed32, Unsigned32, Unsigned64};

    const PLACE: LoadPlace = LoadPlace { base: 7, to: 9 };

    /// The conditions on the arguments fd with a sign, path, flags and size: which argument, and its step.
    fn steps(text: &str) -> Vec<Vec<(usize, Step)>> {
        let (filter, call) = (Filter::new(text).expect("sound"), Call::example());
        let numbered = |steps: &Vec<Step>| match steps[..] {
            [Step::Load { to: 9, from: 7, offset }, step, ..] => {
                (call.places().iter().position(|at| *at == offset).expect("an argument"), step)
            }
            _ => panic!("{steps:?}"),
        };
        let all = of_call(&filter, &call, PLACE, false);
        all.iter().map(|alternative| alternative.iter().map(numbered).collect()).collect()
    }

    fn range(kind: NumberKind, low: i64, high: i64) -> Step {
        Step::Range { from: 9, kind, bounds: [low as u64, high as u64] }
    }

    #[test]
    fn arguments_are_compared_as_numbers_of_their_types() {
        assert_eq!(steps("fd == 3"), [[(0, range(Signed32, 3, 3))]]);
        let negative = steps("fd < 0 and ret < 0");
        assert_eq!(negative, [[(0, range(Signed32, i32::MIN.into(), -1))]]);
        let others = steps("flags & 0x40 and size >= 100");
        let size = Step::Range { from: 9, kind: Unsigned64, bounds: [100, u64::MAX] };
        assert_eq!(others, [[(2, Step::OneOf { from: 9, mask: 0x40 }), (3, size)]]);
        let not = Step::NotRange { from: 9, kind: Signed32, bounds: [u64::MAX; 2] };
        assert_eq!(steps("fd != -1"), [[(0, not)]]);
        assert_eq!(steps("not fd == -1"), [[(0, not)]]);
        assert_eq!(steps("not flags & 2"), [[(2, Step::Want { from: 9, mask: 2, value: 0 })]]);
    }

    #[test]
    fn alternatives_and_patterns_are_compared_too() {
        let [three, four] = [3, 4].map(|n| (0, range(Signed32, n, n)));
        assert_eq!(steps("fd == 3 or fd == 4"), [[three], [four]]);
        assert_eq!(steps("fd == 3 or exec"), [[three]]);
        let like = |not| (1, Step::Like { from: 9, offset: 0, not });
        assert_eq!(steps("path ~ '/etc/*' or fd == 3"), [[like(false)], [three]]);
        assert_eq!(steps("path !~ '/etc/*'"), [[like(true)]]);
        assert_eq!(steps("path == /etc/passwd"), [[like(false)]]);
        assert_eq!(steps("not path != /etc/passwd"), [[like(false)]]);
    }

    #[test]
    fn what_cannot_be_told_here_is_left_to_the_event() {
        let open = ["fd == 3 or ret < 0", "path == 3", "dur > 1ms", "fd >= -9999999999"];
        for text in open.into_iter().chain(["path == 'a*'", "path ~ '\u{e9}*'", "not nofd == 3"]) {
            assert_eq!(steps(text), [[]], "{text}");
        }
        let (filter, call) = (Filter::new("path ~ '/etc/*'").expect("sound"), Call::example());
        assert_eq!(of_call(&filter, &call, PLACE, true), [Vec::<Vec<Step>>::new()], "at the end");
    }

    #[test]
    fn a_call_that_never_fits_makes_no_record() {
        for text in [
            "nofd == 3",
            "size < 0",
            "syscall:read",
            "exec",
            "fd == 3 and name2 ~ 'x'",
            "not size >= 0",
        ] {
            assert_eq!(steps(text), Vec::<Vec<(usize, Step)>>::new(), "{text}");
        }
        assert_eq!(steps("syscall:example and fd >= 0").len(), 1);
    }

    #[test]
    fn threads_are_known_by_number_and_name() {
        let of = |text: &str| {
            let filter = Filter::new(text).expect("sound");
            of_task(&filter, PLACE, [100, 104, 200])
        };
        let load = |offset| Step::Load { to: 9, from: 7, offset };
        let pid = vec![load(100), range(Unsigned32, 7, 7)];
        assert_eq!(of("pid == 7 and ret < 0"), [[pid.clone()]]);
        assert!(of("tid < 0").is_empty());
        let all = of("pid == 7 or comm == sh");
        assert_eq!((all.len(), &all[0][..]), (2, &[pid][..]));
        assert_eq!(all[1][0][0], Step::Like { from: 7, offset: 200, not: false });
    }
}
