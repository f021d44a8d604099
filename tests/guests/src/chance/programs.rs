//! Which programs there are: line `n` of an endless list.

use std::{fmt, str::FromStr};

use anyhow::{Context, Error};
use oracle::random::Random;

const PAGE: u64 = 4096;
/// Bytes that belong to a place.
const PLACE: u64 = 16 * PAGE;
/// The end of a program's address space.
const TOP: u64 = 0x7fff_ffff_f000;
/// Below this are the program's own image and the windows of the oracle's cases.
const BOTTOM: u64 = 0x1010_0000;

/// Kinds of steps, and how often they come.
const KINDS: &[(&str, u64)] = &[
    ("map", 10),
    ("reserve", 1),
    ("copy", 8),
    ("peek", 1),
    ("dump", 1),
    ("exec", 10),
    ("case", 10),
    ("refuse", 6),
    ("floats", 3),
    ("single", 5),
    ("change", 3),
    ("fork", 2),
    ("threads", 1),
    ("execve", 1),
    ("signal", 3),
    ("frame", 4),
    ("timer", 1),
    ("trace", 5),
    ("compat", 6),
    ("segments", 3),
    ("align", 1),
    ("interrupt", 3),
];

/// What of the known differences the list leaves out.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scope {
    /// Memory where a wedge keeps its own.
    pub window: bool,
    /// Code that reads system calls which it makes often.
    pub sites: bool,
    /// Steps whose code runs into what the architecture leaves open, such as flags after a division. Where the
    /// host's CPU does not run them they differ.
    pub open: bool,
}

/// Kinds of such steps.
const OPEN: [&str; 3] = ["exec", "refuse", "floats"];

/// A program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// Its name: its number in the list, or whatever a kept one is called.
    pub name: String,
    /// Page addresses.
    pub places: [u64; 4],
    /// Kinds and numbers.
    pub steps: Vec<(String, u64)>,
}

impl Program {
    /// Number `number` of the list of `seed`.
    pub fn new(seed: u64, number: u64, scope: Scope) -> Self {
        let mut random = Random::new(seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let places = places(&mut random, scope);
        let count = 4 + random.below(10);
        let mut steps: Vec<_> = (0..count).map(|_| step(&mut random, scope)).collect();
        steps.retain(|(kind, _)| scope.open || !OPEN.contains(&kind.as_str()));
        // VERR and the like answer from the host's tables, which know of none of the program's descriptors.
        let mut described = false;
        steps.retain(|(kind, _)| {
            described |= kind == "segments";
            !(described && kind == "case")
        });
        // What the memory is in the end, as the program sees it and as the kernel does.
        steps.extend([("peek".to_owned(), 0), ("dump".to_owned(), 0)]);
        Self { name: number.to_string(), places, steps }
    }
}

fn step(random: &mut Random, scope: Scope) -> (String, u64) {
    let all = KINDS.iter().chain(if scope.sites { &[("hot", 2)][..] } else { &[] });
    let mut left = random.below(all.clone().map(|(_, weight)| weight).sum());
    let chosen = all.clone().find(|(_, weight)| {
        let found = left < *weight;
        left = left.saturating_sub(*weight);
        found
    });
    (chosen.map_or("peek", |(kind, _)| kind).to_owned(), random.bits())
}

fn places(random: &mut Random, scope: Scope) -> [u64; 4] {
    let mut places = [0; 4];
    for chosen in 0..4 {
        while places[chosen] == 0 {
            let place = place(random, places[..chosen].last().copied(), scope);
            let free = |&other: &u64| other == 0 || place.abs_diff(other) >= PLACE;
            if is_allowed(place, scope) && places.iter().all(free) {
                places[chosen] = place;
            }
        }
    }
    places
}

/// Any address of 47 bits, each size of address as often, and often where tables end.
fn place(random: &mut Random, last: Option<u64>, scope: Scope) -> u64 {
    let bits = 28 + random.below(20);
    let any = random.below(1 << bits) & !(PAGE - 1);
    match random.below(8) {
        0 => any >> 21 << 21,
        1 => (any >> 30 << 30).wrapping_sub(PLACE / 2),
        2 => (any >> 39 << 39).wrapping_sub(PLACE / 2),
        3 => last.unwrap_or(any) + PLACE,
        4 if random.chance(30) => TOP - PLACE,
        5 if scope.window => 0x7e00_0000_0000 + (any & 0x7f_ffff_ffff),
        6 if scope.window => 0x5_0000 + (any & 0x1f_f000),
        _ => any,
    }
}

fn is_allowed(place: u64, scope: Scope) -> bool {
    let Some(end) = place.checked_add(PLACE).filter(|end| *end <= TOP) else { return false };
    let reserved = (0x7dff_ff00_0000..0x7e80_0100_0000).contains(&place) || may_show_kernel(place);
    let low = scope.window && place >= 0x1_0000 && end <= 0x40_0000;
    (place >= BOTTOM || low) && (scope.window || !reserved)
}

/// Where Linux has memory from its start on: all of its own, vmalloc, page structures, CPU entry areas.
const KERNEL: [u64; 4] =
    [0xffff_8880_0000_0000, 0xffff_c900_0000_0000, 0xffff_ea00_0000_0000, 0xffff_fe00_0000_0000];

/// Without protection keys a program that has nothing there can see the kernel's memory, wherever the machine has moved.
fn may_show_kernel(place: u64) -> bool {
    let bias = |entry: u64| (entry << 39).wrapping_sub(252 << 39).wrapping_add(0x7e00_0000_0000);
    let shown = |start: u64| (241..=252).map(move |entry| start.wrapping_add(bias(entry)));
    KERNEL
        .into_iter()
        .flat_map(shown)
        .any(|start| (start.wrapping_sub(PLACE)..start.wrapping_add(1 << 30)).contains(&place))
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        self.places.iter().try_for_each(|place| write!(f, " {place:x}"))?;
        self.steps.iter().try_for_each(|(kind, number)| write!(f, " {kind}:{number:x}"))
    }
}

impl FromStr for Program {
    type Err = Error;

    fn from_str(line: &str) -> Result<Self, Error> {
        let mut words = line.split_whitespace();
        let name = words.next().context("an empty line is no program")?.to_owned();
        let mut places = [0; 4];
        for place in &mut places {
            let word = words.next().context("a program has four places")?;
            *place =
                u64::from_str_radix(word, 16).with_context(|| format!("{word} is no address"))?;
        }
        let step = |word: &str| {
            let (kind, number) =
                word.split_once(':').with_context(|| format!("{word} is no step"))?;
            let number = u64::from_str_radix(number, 16);
            Ok((kind.to_owned(), number.with_context(|| format!("{word} has no number"))?))
        };
        Ok(Self { name, places, steps: words.map(step).collect::<Result<_, Error>>()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_the_program() {
        for number in 0..100 {
            let program = Program::new(1, number, Scope::default());
            assert_eq!(program.to_string().parse::<Program>().expect("a line"), program);
        }
        assert!("1 2 3".parse::<Program>().is_err());
        assert!("1 1000 2000 3000 4000 map".parse::<Program>().is_err());
    }

    #[test]
    fn places_do_not_overlap_nor_meet_what_is_left_out() {
        for number in 0..1000 {
            let mut places = Program::new(2, number, Scope::default()).places;
            places.sort_unstable();
            assert!(places.windows(2).all(|two| two[1] - two[0] >= PLACE), "{places:x?}");
            assert!(places.iter().all(|&place| is_allowed(place, Scope::default())), "{places:x?}");
        }
    }
}
