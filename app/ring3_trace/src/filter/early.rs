//! What of a filter can be compared before there is an event: as alternatives, each of which is conditions that all have to be met.

use super::{By, Filter, Node, Value};

/// Alternatives at the most. What would have more is left to the event.
const MOST: usize = 16;

/// What a part of a filter asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need<'a> {
    /// It is an event of this kind and, if it is given, of this name.
    Event(&'a str, Option<&'a str>),
    /// This field is a number in this range, or text.
    Within(&'a str, i128, i128),
    /// This field is text, or a number other than this one.
    Not(&'a str, i128),
    /// This field has one of these bits.
    OneOf(&'a str, i128),
    /// This field is this text.
    Is(&'a str, &'a str),
    /// This field is like this pattern.
    Like(&'a str, &'a str),
    /// This field is there, and not this text.
    IsNot(&'a str, &'a str),
    /// This field is there, and not like this pattern.
    Unlike(&'a str, &'a str),
    /// There is this field.
    Has(&'a str),
}

/// What is known of a part of a filter early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Early<T> {
    /// It does not hold.
    Never,
    /// It holds, or may.
    Maybe,
    /// It does not hold unless this condition is met.
    If(T),
}

impl Filter {
    /// One of these alternatives has to be met, all conditions of it. `tell` says what is known of a part of which it is
    /// wanted that it holds, or that it does not hold. There are no alternatives if the filter never holds, and one without
    /// conditions if it may hold in any case.
    pub fn alternatives<T: Clone>(&self, tell: &dyn Fn(Need<'_>, bool) -> Early<T>) -> Vec<Vec<T>> {
        self.0.alternatives(true, tell)
    }
}

impl Node {
    fn alternatives<T: Clone>(
        &self,
        wanted: bool,
        tell: &dyn Fn(Need<'_>, bool) -> Early<T>,
    ) -> Vec<Vec<T>> {
        let each = |nodes: &[Self]| -> Vec<Vec<Vec<T>>> {
            nodes.iter().map(|node| node.alternatives(wanted, tell)).collect()
        };
        let told = |need: Need<'_>| match tell(need, wanted) {
            Early::Never => Vec::new(),
            Early::Maybe => vec![Vec::new()],
            Early::If(condition) => vec![vec![condition]],
        };
        match self {
            Self::Any(nodes) if wanted => one_of(each(nodes)),
            Self::All(nodes) if !wanted => one_of(each(nodes)),
            Self::Any(nodes) | Self::All(nodes) => all_of(each(nodes)),
            Self::Not(node) => node.alternatives(!wanted, tell),
            Self::Event(kind, name) => told(Need::Event(kind, name.as_deref())),
            Self::Compare { field, by, value: Value::Number(value), .. } => {
                told(by.of_number(field, *value))
            }
            Self::Compare { field, by, value: Value::Text(text), .. } => {
                told(by.of_text(field, text))
            }
        }
    }
}

impl By {
    fn of_number(self, field: &str, value: i128) -> Need<'_> {
        match self {
            Self::Equal | Self::Like => Need::Within(field, value, value),
            Self::Unequal | Self::Unlike => Need::Not(field, value),
            Self::Less => Need::Within(field, i128::MIN, value.saturating_sub(1)),
            Self::AtMost => Need::Within(field, i128::MIN, value),
            Self::More => Need::Within(field, value.saturating_add(1), i128::MAX),
            Self::AtLeast => Need::Within(field, value, i128::MAX),
            Self::Bits => Need::OneOf(field, value),
        }
    }

    fn of_text<'a>(self, field: &'a str, text: &'a str) -> Need<'a> {
        match self {
            Self::Equal => Need::Is(field, text),
            Self::Like => Need::Like(field, text),
            Self::Unequal => Need::IsNot(field, text),
            Self::Unlike => Need::Unlike(field, text),
            Self::Less | Self::AtMost | Self::More | Self::AtLeast | Self::Bits => Need::Has(field),
        }
    }
}

fn one_of<T>(parts: Vec<Vec<Vec<T>>>) -> Vec<Vec<T>> {
    let all: Vec<Vec<T>> = parts.into_iter().flatten().collect();
    let is_open = all.len() > MOST || all.iter().any(Vec::is_empty);
    if is_open { vec![Vec::new()] } else { all }
}

fn all_of<T: Clone>(parts: Vec<Vec<Vec<T>>>) -> Vec<Vec<T>> {
    parts.into_iter().fold(vec![Vec::new()], |before, part| {
        // A condition that is left out makes the filter hold more often, not less.
        if !part.is_empty() && before.len() * part.len() > MOST {
            return before;
        }
        let with = |alternative: &Vec<T>| {
            let alternative = alternative.clone();
            part.iter().map(move |more| [&alternative[..], more].concat())
        };
        before.iter().flat_map(with).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fields are numbers, but for `path`, of which nothing is known, and `none`, which is never there.
    fn tell(need: Need<'_>, wanted: bool) -> Early<String> {
        let not = if wanted { "" } else { "not " };
        match need {
            Need::Within("none", ..) if wanted => Early::Never,
            Need::Within("none", ..) => Early::Maybe,
            Need::Within(field, low, high) => Early::If(format!("{not}{field} {low}..{high}")),
            Need::OneOf(field, mask) => Early::If(format!("{not}{field} & {mask}")),
            Need::Event("exec", _) if wanted => Early::Never,
            _ => Early::Maybe,
        }
    }

    fn alternatives(text: &str) -> String {
        let all = Filter::new(text).expect("sound").alternatives(&tell);
        all.iter().map(|one| one.join(", ")).collect::<Vec<_>>().join("; ")
    }

    #[test]
    fn a_filter_is_alternatives_of_conditions() {
        for (text, expected) in [
            ("fd == 3 and flags & 1", "fd 3..3, flags & 1"),
            ("fd == 3 or fd == 4", "fd 3..3; fd 4..4"),
            ("fd == 3 and (n == 1 or n == 2)", "fd 3..3, n 1..1; fd 3..3, n 2..2"),
            ("not (fd == 3 or n == 1)", "not fd 3..3, not n 1..1"),
            ("not (fd == 3 and n == 1)", "not fd 3..3; not n 1..1"),
            ("fd == 3 and path ~ x", "fd 3..3"),
            ("exec or fd == 3", "fd 3..3"),
        ] {
            assert_eq!(alternatives(text), expected, "{text}");
        }
    }

    #[test]
    fn what_is_not_known_early_is_left_to_the_event() {
        let all = |text: &str| Filter::new(text).expect("sound").alternatives(&tell);
        let many: Vec<String> = (0..20).map(|n| format!("fd == {n}")).collect();
        let open = ["fd == 3 or path ~ x", "not path ~ x", "not none == 1", &many.join(" or ")];
        for text in open {
            assert_eq!(all(text), vec![Vec::<String>::new()], "{text}");
        }
        for text in ["none == 1", "none == 1 and fd == 3", "exec", "exec and path ~ x"] {
            assert_eq!(all(text), Vec::<Vec<String>>::new(), "{text}");
        }
    }

    #[test]
    fn too_many_alternatives_become_fewer_conditions() {
        let five = |field: &str| (0..5).map(|n| format!("{field} == {n}")).collect::<Vec<_>>();
        let text = format!("({}) and ({})", five("fd").join(" or "), five("n").join(" or "));
        assert_eq!(Filter::new(&text).expect("sound").alternatives(&tell).len(), 5);
    }

    #[test]
    fn comparisons_of_text_are_told_apart() {
        let told = |need: Need<'_>, _| Early::If(format!("{need:?}"));
        let need =
            |text: &str| Filter::new(text).expect("sound").alternatives(&told).concat().concat();
        assert_eq!(need("comm == sh"), "Is(\"comm\", \"sh\")");
        assert_eq!(need("comm ~ 's*'"), "Like(\"comm\", \"s*\")");
        assert_eq!(need("comm != sh"), "IsNot(\"comm\", \"sh\")");
        assert_eq!(need("comm !~ 's*'"), "Unlike(\"comm\", \"s*\")");
        assert_eq!(need("comm < sh"), "Has(\"comm\")");
    }
}
