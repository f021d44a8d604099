//! Cases as text, with what the host CPU made of them.
//!
//! ```text
//! # anything
//! code 0x10020000: 48 01 d8    # add rax,rbx
//! background 0
//! rax 0x1
//! memory 0x10000000: 01 02 03
//! expect fault 13 0x0
//! rax 0x3
//! rip 0x10020003
//! memory 0x10000010: ff
//! ```
//!
//! Registers not named are zero (CS 0x33, which makes it 64-bit code, SS 0x2b, RFLAGS 0x202, FCW 0x37f, MXCSR 0x1f80) before `expect`, and as
//! they were after it. `memory` after `expect` is what changed. `code` lines follow each other.

use std::fmt::Write;

use x86::{Fault, vector};

use crate::field::Field;
use crate::state::{Case, Outcome, Patch, State, Stop};

/// A case file is not understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct CaseError {
    /// The line, from 1; 0 for the whole.
    line: usize,
    reason: String,
}

/// A case and what the host CPU made of it, if that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaseFile {
    /// The case.
    pub case: Case,
    /// Its outcome.
    pub expected: Option<Outcome>,
}

impl CaseFile {
    /// The text of the file; `remarks` become comments at its head.
    pub fn write(&self, remarks: &[String]) -> String {
        let mut text = String::new();
        for remark in remarks {
            let _ = writeln!(text, "# {remark}");
        }
        let case = &self.case;
        write_code(&mut text, case);
        let _ = writeln!(text, "background {}", case.background);
        write_registers(&mut text, &case.state, &State::default());
        write_memory(&mut text, &case.patches);
        if let Some(expected) = &self.expected {
            let _ = writeln!(text, "expect {}", expected.stop);
            write_registers(&mut text, &expected.state, &case.state);
            if expected.state.rip != case.state.rip {
                let _ = writeln!(text, "rip {:#x}", expected.state.rip);
            }
            write_memory(&mut text, &expected.changes);
        }
        text
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// A line is not understood, or there is no code.
    pub fn parse(text: &str) -> Result<Self, CaseError> {
        let mut parser = Parser::default();
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if !line.is_empty() {
                parser.line(line).map_err(|reason| CaseError { line: number + 1, reason })?;
            }
        }
        parser.finish().map_err(|reason| CaseError { line: 0, reason })
    }
}

fn write_code(text: &mut String, case: &Case) {
    let mut done = 0;
    for insn in case.instructions() {
        let bytes = &case.code[done..done + insn.len()];
        done += insn.len();
        let _ = writeln!(text, "code {:#x}: {} # {insn}", insn.ip(), spaced(bytes));
    }
    if case.code.is_empty() {
        let _ = writeln!(text, "code {:#x}:", case.state.rip);
    }
}

fn write_registers(text: &mut String, state: &State, than: &State) {
    for field in Field::all().filter(|field| *field != Field::Rip) {
        if field.get(state) != field.get(than) {
            let _ = writeln!(text, "{field} {:#x}", field.get(state));
        }
    }
}

fn write_memory(text: &mut String, runs: &[Patch]) {
    for run in runs {
        let _ = writeln!(text, "memory {:#x}: {}", run.address, spaced(&run.bytes));
    }
}

fn spaced(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ")
}

/// A file half read.
#[derive(Default)]
struct Parser {
    code: Option<Patch>,
    state: State,
    background: u8,
    patches: Vec<Patch>,
    expected: Option<Outcome>,
}

impl Parser {
    fn line(&mut self, line: &str) -> Result<(), String> {
        let (word, rest) = line.split_once(' ').ok_or("a word and a value are needed")?;
        match word {
            "code" => self.code(bytes_at(rest)?),
            "background" => {
                self.background = rest.parse().map_err(|_| format!("{rest:?} is no background"))?;
                Ok(())
            }
            "memory" => {
                let runs = match &mut self.expected {
                    Some(expected) => &mut expected.changes,
                    None => &mut self.patches,
                };
                runs.push(bytes_at(rest)?);
                Ok(())
            }
            "expect" => {
                let stop = stop(rest)?;
                let state = self.state.clone();
                self.expected = Some(Outcome { stop, state, changes: Vec::new() });
                Ok(())
            }
            register => self.register(register, rest),
        }
    }

    fn code(&mut self, bytes: Patch) -> Result<(), String> {
        let Some(code) = &mut self.code else {
            self.state.rip = bytes.address;
            self.code = Some(bytes);
            return Ok(());
        };
        if code.address.wrapping_add(code.bytes.len() as u64) != bytes.address {
            return Err("code does not follow the code before".into());
        }
        code.bytes.extend(bytes.bytes);
        Ok(())
    }

    fn register(&mut self, name: &str, value: &str) -> Result<(), String> {
        let field: Field =
            name.parse().map_err(|error: crate::field::NoSuchField| error.to_string())?;
        let state = match &mut self.expected {
            Some(expected) => &mut expected.state,
            None => &mut self.state,
        };
        field.set(state, hex(value)?);
        Ok(())
    }

    fn finish(self) -> Result<CaseFile, String> {
        let code = self.code.ok_or("no code")?.bytes;
        let Self { state, background, patches, expected, .. } = self;
        Ok(CaseFile { case: Case { state, code, background, patches }, expected })
    }
}

fn hex(text: &str) -> Result<u128, String> {
    let digits = text.trim().strip_prefix("0x").ok_or_else(|| format!("{text:?} is not 0x..."))?;
    u128::from_str_radix(digits, 16).map_err(|_| format!("{text:?} is no hexadecimal number"))
}

/// `0x1000: 01 02`
fn bytes_at(text: &str) -> Result<Patch, String> {
    let (address, bytes) = text.split_once(':').ok_or("an address and a colon are needed")?;
    let address = u64::try_from(hex(address)?).map_err(|_| "the address has over 64 bits")?;
    let byte = |text| u8::from_str_radix(text, 16).map_err(|_| format!("{text:?} is no byte"));
    Ok(Patch { address, bytes: bytes.split_whitespace().map(byte).collect::<Result<_, _>>()? })
}

/// `fault 14 0x7 0x10000000`, as [`Stop`] displays.
fn stop(text: &str) -> Result<Stop, String> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let number = |text: &str| hex(text).map(|value| value as u64);
    match words[..] {
        ["syscall"] => Ok(Stop::Syscall),
        ["timeout"] => Ok(Stop::Timeout),
        ["fault", number_of, ref rest @ ..] => {
            let number_of: u8 =
                number_of.parse().map_err(|_| format!("{number_of:?} is no vector"))?;
            let code = rest.first().map(|code| number(code)).transpose()?.map(|code| code as u32);
            let address = rest.get(1).map(|address| number(address)).transpose()?;
            if (number_of == vector::PF) != address.is_some() {
                return Err("a page fault, and only it, has an address".into());
            }
            Ok(Stop::Fault(Fault { vector: number_of, code, address: address.unwrap_or(0) }))
        }
        _ => Err(format!("{text:?} is no way to stop")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Generator, forms};

    #[test]
    fn files_round_trip() {
        let mut generator = Generator::new(3, 64, &forms::tested(64));
        for number in 0..200 {
            let case = generator.case(number);
            let mut state = generator.case(number + 1000).state;
            state.rip ^= 8;
            let fault = Fault::page(number, 6);
            let changes = vec![Patch { address: 0x1000_0000, bytes: vec![1, 2] }];
            let expected = Some(Outcome { stop: Stop::Fault(fault), state, changes });
            let file = CaseFile { case, expected };
            let text = file.write(&["a remark".into()]);
            assert_eq!(CaseFile::parse(&text), Ok(file), "{text}");
        }
    }

    #[test]
    fn mistakes_are_told() {
        let error = |text| CaseFile::parse(text).unwrap_err().to_string();
        assert_eq!(error("background 0"), "line 0: no code");
        assert!(error("code 0x1000: 90\nrax one").starts_with("line 2:"));
        assert!(error("code 0x1000: 90\ncode 0x1002: 90").contains("does not follow"));
        assert!(error("code 0x1000: 90\nexpect fault 14 0x4").contains("page fault"));
        assert!(error("code 0x1000: 90\nzmm0 0x1").contains("zmm0"));
    }
}
