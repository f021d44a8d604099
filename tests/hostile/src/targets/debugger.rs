//! What says it is a debugger, and talks to a machine that runs.

use std::{cell::RefCell, io};

use inspect::gdb;

use crate::machine::Counting;
use fuzzer::Target;

pub(crate) const TARGET: Target = Target { name: "debugger", seeds, run };

/// A line that begins so is sent as it is, without a packet around it.
const RAW: u8 = b'\\';
/// Lines of one input: steps may take their time.
const MOST: usize = 64;

thread_local! {
    static MACHINE: RefCell<Option<Counting>> = const { RefCell::new(None) };
}

/// Packets, one a line.
fn seeds() -> Vec<Vec<u8>> {
    let begins =
        "qSupported:multiprocess+;swbreak+;vContSupported+\nvMustReplyEmpty\nQStartNoAckMode\n";
    let talks = [
        "?\nqC\nqfThreadInfo\nqsThreadInfo\nHg0\ng\nqXfer:features:read:target.xml:0,ffb\n",
        "m400020,40\nM400024,1:90\nX400024,1:\\x90\nm0,ffffffff\nmffffffffffffffff,2\n",
        "Z0,400020,1\nvCont;c:p1.-1\nz0,400020,1\nZ1,400022,1\nvCont;s:p1.1;c\nz1,400022,1\n",
        "Z2,400100,4\nZ3,400100,8\nZ4,400100,ffffffffffffffff\nz4,400100,ffffffffffffffff\n",
        "p0\nP0=0100000000000000\npff\nP10=2000400000000000\nT1\nHc-1\nqAttached\nD\n",
        "vCont?\nvCont;c\n\\\u{3}\nvCont;s\nvCont;r400020,400026\n\\\u{3}\nk\n",
        "qRcmd,68656c70\nqRcmd,6f6e6c79203120\nqRcmd,636f6e736f6c65\nqCRC:400020,40\n",
        "qSearch:memory:400000;1000;ff\nvKill;1\nvRun;\n!\nR00\nqTStatus\nqXfer:auxv:read::0,1000\n",
    ];
    talks.iter().map(|talk| format!("{begins}{talk}").into_bytes()).collect()
}

fn packets(bytes: &[u8]) -> Vec<u8> {
    let lines = bytes.split(|byte| *byte == b'\n').take(MOST);
    lines.flat_map(packet).collect()
}

fn packet(line: &[u8]) -> Vec<u8> {
    if let Some(rest) = line.strip_prefix(&[RAW]) {
        return rest.to_vec();
    }
    let sum = line.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
    [b"+$", line, format!("#{sum:02x}").as_bytes()].concat()
}

fn run(bytes: &[u8]) {
    MACHINE.with_borrow_mut(|kept| {
        let machine = kept.get_or_insert_with(Counting::new);
        let reader = io::Cursor::new(packets(bytes));
        // That it is not understood is no failure.
        let _ = gdb::serve(&machine.inspector, reader, io::sink(), || {});
        if !machine.lives() {
            *kept = None;
        }
    });
}
