//! Which functions of a Linux guest's kernel the host code is that they were translated into. The host's perf sees that code run, and
//! has no other way to know.

use std::{
    collections::HashMap,
    io::{self, Write},
    ops::Range,
};

use contract::TranslatedCode;
use serde::{Deserialize, Serialize};
use vmm::Inspector;

use crate::{
    lines::say,
    linux::{LinuxKernel, Symbols},
};

/// What the host calls the memory object with the code.
pub use wedge_abi::KERNEL_CODE_OBJECT;

/// The name for code of no known symbol: code of a module, or code that the kernel has made at run time.
const MODULE: &str = "[module]";

/// What is sent to the reader.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CodeLine {
    /// A piece of host code of a function.
    Function(FunctionCode),
    /// There are no more pieces.
    End,
    /// There is no list, for this reason.
    Error(String),
}

/// A piece of host code, into which a part of one function of the guest's kernel was translated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionCode {
    /// HVA of the piece, in each process that executes guest code.
    pub hva: u64,
    /// Bytes before the piece in the memory object ([`KERNEL_CODE_OBJECT`]).
    pub offset: u64,
    /// Bytes of host code.
    pub len: u64,
    /// The kernel's name of the function.
    pub symbol: String,
}

/// Sends a list of all host code that the kernel has been translated into by now.
///
/// # Errors
/// The reader goes.
pub fn send(inspector: &Inspector, output: &mut impl Write) -> io::Result<()> {
    let refused = |problem: String| CodeLine::Error(problem);
    let kernel = match LinuxKernel::find(inspector.ram()) {
        Ok(kernel) => kernel,
        Err(unknown) => return say(output, &refused(unknown.to_string())),
    };
    let Some(code) = inspector.run_on_vcpu(0, |access| access.engine.translated()) else {
        return say(output, &refused("the machine has ended".to_owned()));
    };
    if code.is_empty() {
        return say(output, &refused("its engine translates no kernel code".to_owned()));
    }
    let text = text_of(&kernel.symbols);
    let mut names = Names { kernel: &kernel.symbols, text, known: HashMap::new() };
    for function in functions(&code, &mut |gva| names.of(gva)) {
        say(output, &CodeLine::Function(function))?;
    }
    say(output, &CodeLine::End)?;
    output.flush()
}

/// The kernel's own code (GVA).
fn text_of(symbols: &Symbols) -> Range<u64> {
    let symbol = |name| symbols.find(name).unwrap_or_default();
    symbol("_stext")..symbol("_end")
}

/// Names of functions.
struct Names<'a> {
    kernel: &'a Symbols,
    text: Range<u64>,
    /// What has been looked up, by GVA.
    known: HashMap<u64, String>,
}

impl Names<'_> {
    fn of(&mut self, gva: u64) -> String {
        let find = || {
            let found = self.kernel.before(gva).filter(|_| self.text.contains(&gva));
            found.map_or(MODULE, |(symbol, _)| symbol).to_owned()
        };
        self.known.entry(gva).or_insert_with(find).clone()
    }
}

/// Blocks that lie behind each other and are one function's are one piece.
fn functions(code: &[TranslatedCode], name: &mut impl FnMut(u64) -> String) -> Vec<FunctionCode> {
    let mut all: Vec<FunctionCode> = Vec::new();
    for block in code {
        let symbol = name(block.gva);
        let end = block.offset + block.len;
        match all.last_mut() {
            // Between blocks there is room up to the next 16 bytes.
            Some(last) if last.symbol == symbol && block.offset - last.offset <= last.len + 16 => {
                last.len = end - last.offset;
            }
            _ => all.push(FunctionCode {
                hva: block.hva,
                offset: block.offset,
                len: block.len,
                symbol,
            }),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_one_function_are_one_piece_where_they_lie_together() {
        let block =
            |gva, offset, len| TranslatedCode { gva, hva: 0x2100_0000 + offset, offset, len };
        let code = [
            block(0x1000, 0x100, 0x1c),
            block(0x1040, 0x120, 0x20),
            block(0x2000, 0x140, 0x10),
            block(0x1080, 0x150, 0x10),
            block(0x1090, 0x200, 0x10),
        ];
        let mut name = |gva| if gva < 0x2000 { "one" } else { "two" }.to_owned();
        let pieces: Vec<_> = functions(&code, &mut name)
            .into_iter()
            .map(|piece| (piece.symbol, piece.hva, piece.offset, piece.len))
            .collect();
        let one = |offset, len| ("one".to_owned(), 0x2100_0000 + offset, offset, len);
        let two = ("two".to_owned(), 0x2100_0140, 0x140, 0x10);
        assert_eq!(pieces, [one(0x100, 0x40), two, one(0x150, 0x10), one(0x200, 0x10)]);
    }
}
