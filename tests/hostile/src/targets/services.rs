//! What services, and those who watch, ask of a machine that runs: a line that says what, and orders.

use std::{
    cell::{Cell, RefCell},
    sync::Mutex,
};

use inspect::{
    profile::{self, ProfileRequest},
    top::{self, TopRequest},
    trace::{self, Request},
};
use ring3_trace::{Event, bytes, filter::Filter};
use serde::de::DeserializeOwned;

use super::linux;
use crate::machine::Counting;
use fuzzer::Target;

pub(crate) const TARGET: Target = Target { name: "services", seeds, run };

thread_local! {
    static MACHINE: RefCell<Option<Counting>> = const { RefCell::new(None) };
}

/// A request, and then orders. The guest's code is at 0x400020, the image of a kernel from 0 on.
fn seeds() -> Vec<Vec<u8>> {
    let orders = concat!(
        "{\"registers\": {\"vcpu\": 0}}\n",
        "{\"set\": {\"vcpu\": 0, \"registers\": {\"rax\": 1, \"rip\": 4194336, \"rflags\": 70}}}\n",
        "{\"argument\": {\"vcpu\": 0, \"number\": 5, \"value\": 18446744073709551615}}\n",
        "{\"reply\": {\"vcpu\": 0, \"value\": -2}}\n",
        "{\"read\": {\"vcpu\": 0, \"gva\": 4194336, \"len\": 65536}}\n",
        "{\"read\": {\"gva\": 18446744071562067968, \"len\": 18446744073709551615}}\n",
        "{\"write\": {\"gva\": 18446744071562100736, \"bytes\": \"00ff\"}}\n",
        "{\"symbol\": {\"name\": \"do_exit\"}}\n{\"symbols\": {\"prefix\": \"\"}}\n{\"go\": {\"vcpu\": 0}}\n",
    );
    let traces = [
        r#"{"events": ["break:0x400020"], "stops": "both", "registers": "write", "memory": "write"}"#,
        r#"{"events": ["syscall", "exec", "irq", "exception", "signal"], "filter": "ret < 0 and path ~ \"/etc/*\""}"#,
        r#"{"events": ["watch:init_task+10:1048576", "return:f"], "pid": 1, "comm": "init"}"#,
        r#"{"events": ["port", "mmio", "msr", "vector", "engine"], "filter": "cpu == 0 or dur > 1ms"}"#,
        r#"{"events": ["exec", "virtio"], "ring": 18446744073709551615}"#,
        r#"{"events": ["syscall:openat"], "filter": "not (flags & O_CREAT) and arg0 >= -1"}"#,
    ];
    let lines = traces.map(|request| format!("{request}\n{orders}").into_bytes());
    let watchers = [r#"{"hertz": 4294967295, "wait": false}"#, r#"{"period": 0}"#];
    lines.into_iter().chain(watchers.map(|request| request.as_bytes().to_vec())).collect()
}

fn parsed<T: DeserializeOwned>(line: &str) -> Option<T> {
    serde_json::from_str(line).ok()
}

/// What is told of the guest is compared with any expression.
fn check_filter(text: &str) {
    if let Ok(filter) = Filter::new(text) {
        // That it names what there is not is no failure.
        let _ = filter.check(&|name| name.len() < 4);
    }
}

fn run(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let mut lines = text.lines();
    let Some(first) = lines.next() else { return };
    check_filter(first);
    bytes(first);
    let _ = parsed::<Event>(first);
    MACHINE.with_borrow_mut(|kept| {
        let machine = kept.get_or_insert_with(Counting::new);
        serve(machine, first, lines.collect());
        if !machine.lives() {
            *kept = None;
        }
    });
}

fn serve(machine: &Counting, first: &str, orders: Vec<&str>) {
    let inspector = &machine.inspector;
    // An order may have changed it.
    inspector.ram().write_gpa(0, &linux::image()).expect("there is room");
    // The reader goes soon, and whoever asks more often than that asks for ever.
    let asked = Cell::new(0);
    let gone = || {
        asked.set(asked.get() + 1);
        asked.get() > 2
    };
    let output = Mutex::new(Vec::new());
    if let Some(request) = parsed::<Request>(first) {
        if let Some(filter) = &request.filter {
            check_filter(filter);
        }
        let obey = |carries_out: trace::Orders| {
            orders.iter().for_each(|order| drop(carries_out.obey(order)));
        };
        trace::serve(inspector, &request, &output, obey, gone).expect("memory takes all");
    } else if let Some(request) = parsed::<ProfileRequest>(first) {
        profile::serve(inspector, &request, &mut Vec::new(), gone).expect("memory takes all");
    } else if let Some(request) = parsed::<TopRequest>(first) {
        top::serve(inspector, &request, &mut Vec::new(), gone).expect("memory takes all");
    }
}
