//! The oracle's cases as the program `chance` reads them: those whose outcome the architecture determines, by
//! the reference interpreter and this host's CPU.
//!
//! The file: numbers of eight bytes. Windows (count; address, length, offset in images, protection each), images of
//! memory (count, length, contents), cases (count, offsets in the file, contents).

use anyhow::Result;
use oracle::{
    Case, Checker, Generator, Stop, background, forms,
    layout::{HLT, IMAGE_LEN, WINDOWS, image_offset},
    undefined::Ignored,
};

/// Flags that a signal's return cannot set: NT, ID, and IOPL.
const OUT_OF_REACH: u64 = 1 << 14 | 1 << 21 | 3 << 12;

/// `count` of them, half of 64 bits and half of 32, as a file.
///
/// # Errors
/// The host lacks something.
pub fn cases(seed: u64, count: usize) -> Result<Vec<u8>> {
    let mut checker = Checker::new()?;
    let mut bodies = Vec::new();
    for bits in [64, 32] {
        let mut generator = Generator::new(seed, bits, &forms::tested(bits));
        let mut number = 0;
        let enough = bodies.len() + count / 2;
        while bodies.len() < enough {
            let case = generator.case(number);
            number += 1;
            if case.code.is_empty() || case.state.rflags & OUT_OF_REACH != 0 {
                continue;
            }
            let report = checker.check(&case)?;
            let ignored = &report.interpreted.ignored;
            if report.differences.is_empty()
                && is_certain(ignored)
                && report.native.stop != Stop::Timeout
            {
                bodies.push(body(&case, ignored, report.native.state.rip));
            }
        }
    }
    Ok(file(&bodies))
}

/// Nothing is open but flags and upper halves, which can be left out of what is noted.
fn is_certain(ignored: &Ignored) -> bool {
    let certain = Ignored {
        flags: ignored.flags,
        upper_halves: ignored.upper_halves,
        x87_pointers: ignored.x87_pointers,
        ..Ignored::default()
    };
    *ignored == certain
}

#[derive(Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn word(&mut self, word: u64) -> &mut Self {
        self.0.extend(word.to_le_bytes());
        self
    }

    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend(bytes);
        self
    }
}

fn file(bodies: &[Vec<u8>]) -> Vec<u8> {
    let mut file = Bytes::default();
    file.word(WINDOWS.len() as u64);
    for window in WINDOWS {
        let protection = 1 | u64::from(window.writable) << 1 | u64::from(window.executable) << 2;
        file.word(window.base).word(window.len).word(window.offset).word(protection);
    }
    file.word(background::COUNT.into()).word(IMAGE_LEN as u64);
    (0..background::COUNT).for_each(|number| {
        file.bytes(&background::image(number)[..]);
    });
    file.word(bodies.len() as u64);
    let mut at = file.0.len() + 8 * bodies.len();
    for body in bodies {
        file.word(at as u64);
        at += body.len();
    }
    bodies.iter().for_each(|body| {
        file.bytes(body);
    });
    file.0
}

/// One case, which ends at `end` where only its own memory is mapped.
fn body(case: &Case, ignored: &Ignored, end: u64) -> Vec<u8> {
    let mut body = Bytes::default();
    let patches: Vec<_> = patches(case);
    body.word((case.background % background::COUNT).into())
        .word(HLT.into())
        .word(patches.len() as u64);
    for (offset, bytes) in patches {
        body.word(offset as u64).word(bytes.len() as u64).bytes(&bytes);
    }
    case.state.gpr.iter().for_each(|&register| {
        body.word(register);
    });
    let state = &case.state;
    body.word(state.rip)
        .word(state.rflags)
        .word(state.fs_base)
        .word(state.gs_base)
        .word(state.bits().into());
    let fpu = &state.fpu;
    body.bytes(&fpu.fcw.to_le_bytes())
        .bytes(&fpu.fsw.to_le_bytes())
        .bytes(&[fpu.ftw, 0])
        .bytes(&[0; 18]);
    body.bytes(&fpu.mxcsr.to_le_bytes()).bytes(&[0; 4]);
    body.bytes(fpu.st.as_flattened())
        .bytes(fpu.xmm.as_flattened())
        .bytes(fpu.ymm_high.as_flattened());
    body.word(ignored.flags).word(ignored.upper_halves.into()).word(end);
    body.0
}

/// Runs of bytes by their offset in the image.
fn patches(case: &Case) -> Vec<(usize, Vec<u8>)> {
    let code = (case.state.rip, &case.code);
    let all = case.patches.iter().map(|patch| (patch.address, &patch.bytes)).chain([code]);
    let mut runs: Vec<(usize, Vec<u8>)> = Vec::new();
    for (start, bytes) in all {
        for (i, &byte) in bytes.iter().enumerate() {
            let Some(offset) = image_offset(start.wrapping_add(i as u64)) else { continue };
            match runs.last_mut() {
                Some((from, run)) if *from + run.len() == offset => run.push(byte),
                _ => runs.push((offset, vec![byte])),
            }
        }
    }
    runs
}
