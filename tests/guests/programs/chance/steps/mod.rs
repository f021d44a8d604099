//! The steps that programs are made of.

mod case;
mod code;
mod compat;
mod memory;
mod process;
mod signals;
mod tracing;

use crate::{random::Random, world::World};

/// Does something by chance, and notes what came of it.
pub type Step = fn(&mut Random, &World);

/// Every kind of step by its name.
pub const STEPS: [(&str, Step); 25] = [
    ("map", memory::map),
    ("reserve", memory::reserve),
    ("copy", memory::copy),
    ("peek", memory::peek),
    ("dump", memory::dump),
    ("exec", code::exec),
    ("refuse", code::refuse),
    ("floats", code::floats),
    ("single", code::single),
    ("change", code::change),
    ("hot", code::hot),
    ("align", code::align),
    ("interrupt", code::interrupt),
    ("case", case::run),
    ("kernel", process::kernel),
    ("fork", process::fork),
    ("threads", process::threads),
    ("execve", process::execve),
    ("signal", signals::raise),
    ("frame", signals::frame),
    ("timer", signals::timer),
    ("trace", tracing::trace),
    ("compat", compat::run),
    ("segments", compat::segments),
    ("registers", process::registers),
];

/// The step of this name.
pub fn find(name: &str) -> Option<Step> {
    STEPS.iter().find(|(known, _)| *known == name).map(|(_, step)| *step)
}

pub use process::echo;
