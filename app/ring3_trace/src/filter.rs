//! Which events are wanted: a small language.
//!
//! ```text
//! syscall:openat and ret < 0            a kind of event, and which
//! fd == 3 || path ~ "/etc/*"            arguments by name; ~ is a pattern with * and ?
//! dur > 1ms and not comm == bash        times have units: ns, us, ms, s
//! flags & O_CREAT and ret == -EEXIST    bits; errors and flags of open by name
//! ```
//!
//! An argument that an event does not have makes a comparison false. Where a system call begins its result is not known yet:
//! [`Filter::may_match`] then says whether it can still come to anything.

mod early;

use crate::constant;

pub use early::{Early, Need};

/// Kinds of events, which are words of their own.
const KINDS: [&str; 17] = [
    "syscall",
    "exec",
    "exit",
    "fork",
    "switch",
    "irq",
    "exception",
    "signal",
    "msr",
    "port",
    "mmio",
    "vector",
    "engine",
    "watch",
    "break",
    "return",
    "virtio",
];

/// The value of a field that an expression names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FieldValue {
    /// A number.
    Number(i128),
    /// Text.
    Text(String),
    /// The event will have the field later.
    NotYetKnown,
    /// The event has no such field.
    NoSuchField,
}

/// A filter expression that cannot be parsed, or compares what cannot be compared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("column {}: {problem}", column + 1)]
pub struct FilterError {
    /// Letters before it.
    pub column: usize,
    /// What is wrong there.
    pub problem: String,
}

/// An expression.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter(Node);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    Any(Vec<Node>),
    All(Vec<Node>),
    Not(Box<Node>),
    /// A kind of event and, if it is given, which.
    Event(String, Option<String>),
    Compare {
        field: String,
        column: usize,
        by: By,
        value: Value,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Equal,
    Unequal,
    Less,
    AtMost,
    More,
    AtLeast,
    Bits,
    Like,
    Unlike,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Value {
    Number(i128),
    Text(String),
}

impl Filter {
    /// Reads an expression.
    ///
    /// # Errors
    /// [`FilterError`] says where it is none.
    pub fn new(text: &str) -> Result<Self, FilterError> {
        let tokens = tokens(text)?;
        let mut parser = Parser { tokens, at: 0, end: text.chars().count() };
        let node = parser.any()?;
        match parser.peek() {
            None => Ok(Self(node)),
            Some(_) => Err(parser.wrong("expected `and`, `or` or the end")),
        }
    }

    /// Whether it holds.
    pub fn matches(&self, fields: &dyn Fn(&str) -> FieldValue) -> bool {
        self.0.holds(fields) == Some(true)
    }

    /// Whether it holds, or may once everything is known.
    pub fn may_match(&self, fields: &dyn Fn(&str) -> FieldValue) -> bool {
        self.0.holds(fields) != Some(false)
    }

    /// The first name that is not `known`.
    ///
    /// # Errors
    /// It names it, and where it is.
    pub fn check(&self, known: &dyn Fn(&str) -> bool) -> Result<(), FilterError> {
        self.0.check(known)
    }
}

impl Node {
    /// `None` if that is not known yet.
    fn holds(&self, fields: &dyn Fn(&str) -> FieldValue) -> Option<bool> {
        let sure = |nodes: &[Self], wanted: bool| {
            let mut result = Some(!wanted);
            for node in nodes {
                match node.holds(fields) {
                    Some(held) if held == wanted => return Some(wanted),
                    Some(_) => {}
                    None => result = None,
                }
            }
            result
        };
        match self {
            Self::Any(nodes) => sure(nodes, true),
            Self::All(nodes) => sure(nodes, false),
            Self::Not(node) => node.holds(fields).map(|held| !held),
            Self::Event(kind, name) => {
                let is = |field: &str, wanted: &String| {
                    fields(field) == FieldValue::Text(wanted.clone())
                };
                Some(is("kind", kind) && name.as_ref().is_none_or(|name| is("name", name)))
            }
            Self::Compare { field, by, value, .. } => by.holds(&fields(field), value),
        }
    }

    fn check(&self, known: &dyn Fn(&str) -> bool) -> Result<(), FilterError> {
        match self {
            Self::Any(nodes) | Self::All(nodes) => {
                nodes.iter().try_for_each(|node| node.check(known))
            }
            Self::Not(node) => node.check(known),
            Self::Event(..) => Ok(()),
            Self::Compare { field, .. } if known(field) => Ok(()),
            Self::Compare { field, column, .. } => {
                let problem = format!("none of these events has `{field}`");
                Err(FilterError { column: *column, problem })
            }
        }
    }
}

impl By {
    fn holds(self, field: &FieldValue, value: &Value) -> Option<bool> {
        match (field, value) {
            (FieldValue::NotYetKnown, _) => None,
            (FieldValue::Number(number), Value::Number(value)) => {
                Some(self.number(*number, *value))
            }
            (FieldValue::Number(number), Value::Text(value)) => {
                Some(self.text(&number.to_string(), value))
            }
            (FieldValue::Text(text), Value::Text(value)) => Some(self.text(text, value)),
            (FieldValue::Text(text), Value::Number(value)) => {
                Some(self.text(text, &value.to_string()))
            }
            (FieldValue::NoSuchField, _) => Some(false),
        }
    }

    fn number(self, number: i128, value: i128) -> bool {
        match self {
            Self::Equal | Self::Like => number == value,
            Self::Unequal | Self::Unlike => number != value,
            Self::Less => number < value,
            Self::AtMost => number <= value,
            Self::More => number > value,
            Self::AtLeast => number >= value,
            Self::Bits => number & value != 0,
        }
    }

    fn text(self, text: &str, value: &str) -> bool {
        match self {
            Self::Equal => text == value,
            Self::Unequal => text != value,
            Self::Less => text < value,
            Self::AtMost => text <= value,
            Self::More => text > value,
            Self::AtLeast => text >= value,
            Self::Bits => false,
            Self::Like => is_like(text.as_bytes(), value.as_bytes()),
            Self::Unlike => !is_like(text.as_bytes(), value.as_bytes()),
        }
    }
}

/// `*` is any text, `?` any letter. Time is at most the product of both lengths.
fn is_like(text: &[u8], pattern: &[u8]) -> bool {
    let (mut at, mut of, mut star) = (0, 0, None);
    while at < text.len() {
        match pattern.get(of) {
            Some(b'*') => {
                star = Some((of, at));
                of += 1;
            }
            Some(letter) if *letter == b'?' || *letter == text[at] => {
                at += 1;
                of += 1;
            }
            _ => match star {
                Some((before, matched)) => {
                    star = Some((before, matched + 1));
                    (at, of) = (matched + 1, before + 1);
                }
                None => return false,
            },
        }
    }
    pattern[of..].iter().all(|letter| *letter == b'*')
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    /// A name, a number or text without quotes.
    Word(String),
    Quoted(String),
    Sign(&'static str),
}

/// Longer ones first.
const SIGNS: [&str; 17] =
    ["&&", "||", "==", "!=", "!~", "<=", ">=", "(", ")", "!", "<", ">", "=", "~", "&", ":", "-"];

fn is_word(letter: char) -> bool {
    letter.is_alphanumeric() || "_./*?@+".contains(letter)
}

fn tokens(text: &str) -> Result<Vec<(usize, Token)>, FilterError> {
    let letters: Vec<char> = text.chars().collect();
    let (mut tokens, mut at) = (Vec::new(), 0);
    while let Some(letter) = letters.get(at).copied() {
        let rest = &letters[at..];
        let sign = SIGNS.iter().find(|sign| sign.chars().eq(rest.iter().copied().take(sign.len())));
        let begin = at;
        let token = if letter.is_whitespace() {
            at += 1;
            continue;
        } else if letter == '"' || letter == '\'' {
            let len = rest[1..].iter().position(|other| *other == letter);
            let problem = "this quotation mark has no other".to_owned();
            let len = len.ok_or(FilterError { column: at, problem })?;
            at += len + 2;
            Token::Quoted(rest[1..=len].iter().collect())
        } else if let Some(sign) = sign {
            at += sign.len();
            Token::Sign(sign)
        } else if is_word(letter) {
            let word: String = rest.iter().copied().take_while(|letter| is_word(*letter)).collect();
            at += word.chars().count();
            Token::Word(word)
        } else {
            return Err(FilterError {
                column: at,
                problem: format!("`{letter}` means nothing here"),
            });
        };
        tokens.push((begin, token));
    }
    Ok(tokens)
}

struct Parser {
    tokens: Vec<(usize, Token)>,
    at: usize,
    end: usize,
}

/// Parentheses in each other at the most.
const DEPTH: usize = 64;

impl Parser {
    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at).map(|(_, token)| token)
    }

    fn column(&self) -> usize {
        self.tokens.get(self.at).map_or(self.end, |(column, _)| *column)
    }

    fn wrong(&self, problem: &str) -> FilterError {
        FilterError { column: self.column(), problem: problem.to_owned() }
    }

    /// Takes the next token if it is this sign, or this word.
    fn takes(&mut self, sign: &str, word: &str) -> bool {
        let found = match self.peek() {
            Some(Token::Sign(known)) => *known == sign,
            Some(Token::Word(known)) => known == word && !word.is_empty(),
            _ => false,
        };
        self.at += usize::from(found);
        found
    }

    fn any(&mut self) -> Result<Node, FilterError> {
        self.any_at(0)
    }

    fn any_at(&mut self, depth: usize) -> Result<Node, FilterError> {
        if depth > DEPTH {
            return Err(self.wrong("too many parentheses in each other"));
        }
        let mut nodes = vec![self.all(depth)?];
        while self.takes("||", "or") {
            nodes.push(self.all(depth)?);
        }
        Ok(if nodes.len() == 1 { nodes.remove(0) } else { Node::Any(nodes) })
    }

    fn all(&mut self, depth: usize) -> Result<Node, FilterError> {
        let mut nodes = vec![self.one(depth)?];
        while self.takes("&&", "and") {
            nodes.push(self.one(depth)?);
        }
        Ok(if nodes.len() == 1 { nodes.remove(0) } else { Node::All(nodes) })
    }

    fn one(&mut self, depth: usize) -> Result<Node, FilterError> {
        let mut not = false;
        while self.takes("!", "not") {
            not = !not;
        }
        let node = if self.takes("(", "") {
            let node = self.any_at(depth + 1)?;
            if !self.takes(")", "") {
                return Err(self.wrong("expected `)`"));
            }
            node
        } else {
            self.term()?
        };
        Ok(if not { Node::Not(Box::new(node)) } else { node })
    }

    fn word(&mut self) -> Option<String> {
        let word = match self.peek() {
            Some(Token::Word(word)) => word.clone(),
            _ => return None,
        };
        self.at += 1;
        Some(word)
    }

    fn term(&mut self) -> Result<Node, FilterError> {
        let column = self.column();
        let expected = "expected a name, such as `ret`, `fd` or `syscall:openat`";
        let name = |letter: char| letter.is_ascii_alphabetic() || letter == '_';
        if !matches!(self.peek(), Some(Token::Word(word)) if word.starts_with(name)) {
            return Err(self.wrong(expected));
        }
        let Some(field) = self.word() else { return Err(self.wrong(expected)) };
        let is_kind = KINDS.contains(&field.as_str());
        if is_kind && self.takes(":", "") {
            let which = self.word();
            let which = which.ok_or_else(|| self.wrong("expected which one, such as `openat`"))?;
            return Ok(Node::Event(field, Some(which)));
        }
        let Some(by) = self.by() else {
            if is_kind {
                return Ok(Node::Event(field, None));
            }
            return Err(
                self.wrong(&format!("expected a comparison of `{field}`: == != < <= > >= & ~ !~"))
            );
        };
        let value = self.value()?;
        Ok(Node::Compare { field, column, by, value })
    }

    fn by(&mut self) -> Option<By> {
        const ALL: [(&str, By); 10] = [
            ("==", By::Equal),
            ("=", By::Equal),
            ("!=", By::Unequal),
            ("<=", By::AtMost),
            ("<", By::Less),
            (">=", By::AtLeast),
            (">", By::More),
            ("&", By::Bits),
            ("~", By::Like),
            ("!~", By::Unlike),
        ];
        ALL.iter().find(|(sign, _)| self.takes(sign, "")).map(|(_, by)| *by)
    }

    fn value(&mut self) -> Result<Value, FilterError> {
        if let Some(Token::Quoted(text)) = self.peek().cloned() {
            self.at += 1;
            return Ok(Value::Text(text));
        }
        let is_negative = self.takes("-", "");
        let column = self.column();
        let word =
            self.word().ok_or_else(|| self.wrong("expected a number, a name or \"text\""))?;
        let begins = word.starts_with(|letter: char| letter.is_ascii_digit());
        match number(&word).or_else(|| constant(&word)) {
            Some(number) if is_negative => Ok(Value::Number(-number)),
            Some(number) => Ok(Value::Number(number)),
            None if is_negative || begins => {
                Err(FilterError { column, problem: format!("`{word}` is no number") })
            }
            None => Ok(Value::Text(word)),
        }
    }
}

/// A number, with a unit if it is a time.
fn number(word: &str) -> Option<i128> {
    const UNITS: [(&str, f64); 4] = [("ns", 1.0), ("us", 1e3), ("ms", 1e6), ("s", 1e9)];
    let radix = [("0x", 16), ("0o", 8), ("0b", 2)];
    if let Some((digits, radix)) =
        radix.iter().find_map(|(prefix, radix)| Some((word.strip_prefix(prefix)?, *radix)))
    {
        return i128::from_str_radix(digits, radix).ok();
    }
    if word.len() > 1 && word.starts_with('0') && word.bytes().all(|digit| digit.is_ascii_digit()) {
        return i128::from_str_radix(word, 8).ok();
    }
    if !word.starts_with(|letter: char| letter.is_ascii_digit()) {
        return None;
    }
    let unit = UNITS.iter().find_map(|(unit, ns)| Some((word.strip_suffix(unit)?, *ns)));
    match unit {
        Some((amount, ns)) => amount.parse::<f64>().ok().map(|amount| (amount * ns) as i128),
        None => word.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(field: &str) -> FieldValue {
        match field {
            "kind" => FieldValue::Text("syscall".to_owned()),
            "name" => FieldValue::Text("openat".to_owned()),
            "path" => FieldValue::Text("/etc/passwd".to_owned()),
            "fd" => FieldValue::Number(3),
            "dfd" => FieldValue::Number(-100),
            "flags" => FieldValue::Number(0o101),
            "ret" | "dur" => FieldValue::NotYetKnown,
            _ => FieldValue::NoSuchField,
        }
    }

    fn later_field(field: &str) -> FieldValue {
        match field {
            "ret" => FieldValue::Number(-2),
            "dur" => FieldValue::Number(1_500_000),
            other => fields(other),
        }
    }

    #[test]
    fn expressions_hold_or_not() {
        for (text, expected) in [
            ("syscall", true),
            ("syscall:openat", true),
            ("syscall:read or fd==4", false),
            ("fd == 3 and path~\"/etc/*\"", true),
            ("path ~ '*shadow'", false),
            ("path !~ *shadow", true),
            ("path ~ /e?c/pass*d", true),
            ("not (fd == 3 && dfd == -100)", false),
            ("dfd<0", true),
            ("flags & O_CREAT", true),
            ("flags & O_EXCL", false),
            ("fd == 0x3 and fd = 3 and fd==03", true),
            ("nothing == 0", false),
            ("nothing != 0", false),
            ("!!fd>=3", true),
            ("ret == -ENOENT and ret<0", true),
            ("dur > 1ms", true),
            ("dur > 1.6ms", false),
            ("dur<=1500us or exec", true),
            ("fd==1 or fd==2 and fd==3 or fd==3", true),
        ] {
            let filter = Filter::new(text).unwrap_or_else(|wrong| panic!("{text}: {wrong}"));
            assert_eq!(filter.matches(&later_field), expected, "{text}");
        }
    }

    #[test]
    fn what_can_come_to_nothing_is_known_early() {
        let may = |text: &str| Filter::new(text).expect("right").may_match(&fields);
        assert!(may("ret < 0") && may("fd==3 and ret<0") && may("fd==4 or dur>1s"));
        assert!(!may("fd==4 and ret<0") && !may("not (fd==3 or ret<0)"));
        assert!(may("not ret < 0"), "not yet known is not false");
        assert!(!Filter::new("ret < 0").expect("right").matches(&fields));
    }

    #[test]
    fn errors_point_at_their_column() {
        for (text, column, said) in [
            ("", 0, "expected a name"),
            ("fd", 2, "comparison of `fd`"),
            ("fd==", 4, "expected a number"),
            ("fd==3 fd==4", 6, "`and`, `or`"),
            ("fd==3 and", 9, "expected a name"),
            ("(fd==3", 6, "expected `)`"),
            ("path~\"/etc", 5, "quotation mark"),
            ("fd==3x", 4, "`3x` is no number"),
            ("ret==-ENOWHERE", 6, "is no number"),
            ("fd # 3", 3, "`#` means nothing"),
            ("3 == fd", 0, "expected a name"),
            ("syscall:", 8, "which one"),
            ("é == 3", 0, "expected a name"),
        ] {
            let wrong = Filter::new(text).expect_err(text);
            assert!(wrong.column == column && wrong.problem.contains(said), "{text}: {wrong}");
        }
        assert!(Filter::new(&"(".repeat(100_000)).is_err(), "and no stack overflows");
        assert!(Filter::new(&format!("{}fd==3", "!".repeat(100_000))).is_ok());
    }

    #[test]
    fn unknown_names_are_found() {
        let filter = Filter::new("fd==3 or (ret<0 and fdd==4)").expect("right");
        let wrong = filter.check(&|name| name != "fdd").expect_err("there is one");
        assert_eq!((wrong.column, wrong.to_string().contains("`fdd`")), (20, true));
    }
}
