//! The part of a filter that a tap compares by itself, so that an event which the filter excludes makes no record. The finished
//! event is compared with the whole filter later: a tap drops only what the filter excludes for certain.

use ring3_trace::filter::{Filter, Need};
use x86::tap::{NumberKind, Step};

use super::{calls::Call, fields};

/// Ends every program: nothing here is meant.
pub const NEVER: Step = Step::Want { from: 0, mask: 0, value: 1 };

/// What arguments of a system call, by their number, have to be: steps that look at the value `from`. `None` if no call of this name
/// is meant.
pub fn of_call(filter: &Filter, call: &Call, from: u8) -> Option<Vec<(usize, Step)>> {
    let mut steps = Vec::new();
    for need in filter.needs() {
        match need {
            Need::Event(kind, name) => {
                let is_it = kind == "syscall" && name.is_none_or(|name| name == call.name);
                is_it.then_some(())?;
            }
            Need::Is(field, _) | Need::Has(field) => has(call, field)?,
            Need::Within(field, ..) | Need::Not(field, _) | Need::OneOf(field, _) => {
                has(call, field)?;
                let n = call.parameter(field).filter(|_| !fields::is_of_all(field));
                if let Some((n, kind)) = n.and_then(|n| Some((n, call.number_kind(n)?))) {
                    steps.extend(step(&need, from, kind)?.map(|step| (n, step)));
                }
            }
        }
    }
    Some(steps)
}

/// A comparison with a field that an event does not have never holds.
fn has(call: &Call, field: &str) -> Option<()> {
    (fields::is_of_all(field) || call.parameter(field).is_some()).then_some(())
}

/// What the number of a process or a thread has to be. `None` if none is meant.
pub fn of_number(filter: &Filter, field: &str, from: u8) -> Option<Vec<Step>> {
    let mut steps = Vec::new();
    for need in filter.needs() {
        match need {
            Need::Within(name, ..) | Need::Not(name, _) | Need::OneOf(name, _) if name == field => {
                steps.extend(step(&need, from, NumberKind::Unsigned32)?);
            }
            _ => {}
        }
    }
    Some(steps)
}

/// The name that a thread has to have.
pub fn comm(filter: &Filter) -> Option<&str> {
    filter.needs().into_iter().find_map(|need| match need {
        Need::Is("comm", name) => Some(name),
        _ => None,
    })
}

/// The step for what a number has to be. `None` if no number is meant, `Some(None)` if the step could not tell.
fn step(need: &Need<'_>, from: u8, kind: NumberKind) -> Option<Option<Step>> {
    let [least, greatest] = kind.bounds();
    Some(match *need {
        Need::Within(_, low, high) => {
            let (low, high) = (low.max(least), high.min(greatest));
            (low <= high).then_some(())?;
            let is_all = (low, high) == (least, greatest);
            (!is_all).then_some(Step::Range { from, kind, bounds: [low as u64, high as u64] })
        }
        Need::Not(_, value) => (least..=greatest).contains(&value).then_some(Step::NotRange {
            from,
            kind,
            bounds: [value as u64; 2],
        }),
        // A number with a sign may have bits above those of its type.
        Need::OneOf(_, mask) => {
            (0..=greatest).contains(&mask).then_some(Step::OneOf { from, mask: mask as u64 })
        }
        Need::Event(..) | Need::Is(..) | Need::Has(_) => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use NumberKind::{Signed32, Unsigned32, Unsigned64};

    fn steps(text: &str) -> Option<Vec<(usize, Step)>> {
        let filter = Filter::new(text).expect("sound");
        // fd with a sign, path, flags, size.
        of_call(&filter, &Call::example(), 9)
    }

    fn range(kind: NumberKind, low: i64, high: i64) -> Step {
        Step::Range { from: 9, kind, bounds: [low as u64, high as u64] }
    }

    #[test]
    fn arguments_are_compared_as_numbers_of_their_types() {
        assert_eq!(steps("fd == 3").expect("meant"), [(0, range(Signed32, 3, 3))]);
        let negative = steps("fd < 0 and ret < 0").expect("meant");
        assert_eq!(negative, [(0, range(Signed32, i32::MIN.into(), -1))]);
        let others = steps("flags & 0x40 and size >= 100").expect("meant");
        let size = Step::Range { from: 9, kind: Unsigned64, bounds: [100, u64::MAX] };
        assert_eq!(others, [(2, Step::OneOf { from: 9, mask: 0x40 }), (3, size)]);
        let not = Step::NotRange { from: 9, kind: Signed32, bounds: [u64::MAX; 2] };
        assert_eq!(steps("fd != -1").expect("meant"), [(0, not)]);
    }

    #[test]
    fn what_cannot_be_told_here_is_left_to_the_event() {
        for text in
            ["fd == 3 or fd == 4", "path ~ '/etc/*'", "path == 3", "dur > 1ms", "fd >= -9999999999"]
        {
            assert_eq!(steps(text), Some(Vec::new()), "{text}");
        }
    }

    #[test]
    fn a_call_that_never_fits_makes_no_record() {
        for text in ["nofd == 3", "size < 0", "syscall:read", "exec", "fd == 3 and name2 ~ 'x'"] {
            assert_eq!(steps(text), None, "{text}");
        }
        assert_eq!(steps("syscall:example and fd >= 0").map(|steps| steps.len()), Some(1));
    }

    #[test]
    fn threads_are_known_by_number_and_name() {
        let filter = Filter::new("pid == 7 and comm == sh").expect("sound");
        assert_eq!(of_number(&filter, "pid", 9), Some(vec![range(Unsigned32, 7, 7)]));
        assert_eq!((of_number(&filter, "tid", 9), comm(&filter)), (Some(Vec::new()), Some("sh")));
        assert_eq!(of_number(&Filter::new("tid < 0").expect("sound"), "tid", 9), None);
    }
}
