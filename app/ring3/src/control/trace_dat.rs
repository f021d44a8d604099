//! A trace as trace-cmd and KernelShark read it: trace.dat, version 6 (trace-cmd.dat.v6(5)).
//!
//! The file describes its events itself, as a kernel's tracefs does. Switches have the format that the kernel gives them, which is what
//! KernelShark draws; all others have one of ours, with what the text form shows. A CPU's events are pages of its ring buffer, in
//! the order of time, so they are kept until the end.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use inspect::trace::Event;

use super::shown::{Shown, words};

/// Bytes of a page of a ring buffer, and of its header: time and length.
const PAGE: usize = 4096;
const PAGE_HEADER: usize = 16;
/// Bytes of an event at the most, and those of them before its text.
const MOST: usize = 2048;
const BEFORE_TEXT: usize = 20;
/// In an event's header: the time since the last one, in so many bits; more is an event of its own.
const DELTA_BITS: u32 = 27;
const TIME_EXTEND: u32 = 30;
/// Bytes of a task's name.
const COMM: usize = 16;
/// What events are called, from number 2 on; a switch is number 1. The last one is for kinds that are not here.
const KINDS: [&str; 17] = [
    "syscall",
    "exec",
    "exit",
    "fork",
    "signal",
    "irq",
    "exception",
    "break",
    "return",
    "watch",
    "port",
    "mmio",
    "msr",
    "vector",
    "engine",
    "virtio",
    "other",
];
const SWITCH: u16 = 1;

const HEADER_PAGE: &str = "\
\tfield: u64 timestamp;\toffset:0;\tsize:8;\tsigned:0;
\tfield: local_t commit;\toffset:8;\tsize:8;\tsigned:1;
\tfield: int overwrite;\toffset:8;\tsize:1;\tsigned:1;
\tfield: char data;\toffset:16;\tsize:4080;\tsigned:1;
";
const HEADER_EVENT: &str = "\
# compressed entry header
\ttype_len    :    5 bits
\ttime_delta  :   27 bits
\tarray       :   32 bits

\tpadding     : type == 29
\ttime_extend : type == 30
\ttime_stamp : type == 31
\tdata max type_len  == 28
";
const COMMON: &str = "\
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
\tfield:unsigned char common_flags;\toffset:2;\tsize:1;\tsigned:0;
\tfield:unsigned char common_preempt_count;\toffset:3;\tsize:1;\tsigned:0;
\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;

";
const SWITCH_FIELDS: &str = "\
\tfield:char prev_comm[16];\toffset:8;\tsize:16;\tsigned:0;
\tfield:pid_t prev_pid;\toffset:24;\tsize:4;\tsigned:1;
\tfield:int prev_prio;\toffset:28;\tsize:4;\tsigned:1;
\tfield:long prev_state;\toffset:32;\tsize:8;\tsigned:1;
\tfield:char next_comm[16];\toffset:40;\tsize:16;\tsigned:0;
\tfield:pid_t next_pid;\toffset:56;\tsize:4;\tsigned:1;
\tfield:int next_prio;\toffset:60;\tsize:4;\tsigned:1;

print fmt: \"%s:%d ==> %s:%d\", REC->prev_comm, REC->prev_pid, REC->next_comm, REC->next_pid
";
const TEXT_FIELDS: &str = "\
\tfield:u64 took;\toffset:8;\tsize:8;\tsigned:0;
\tfield:__data_loc char[] text;\toffset:16;\tsize:4;\tsigned:0;

print fmt: \"%s\", __get_str(text)
";

/// Collects events until there are no more.
pub(super) struct TraceDat {
    output: Box<dyn Write>,
    /// Time (ns) and content of each, by vCPU.
    events: BTreeMap<usize, Vec<(u64, Vec<u8>)>>,
    names: BTreeMap<u32, String>,
}

impl TraceDat {
    pub(super) fn new(output: Box<dyn Write>) -> Self {
        Self { output, events: BTreeMap::new(), names: BTreeMap::new() }
    }
}

impl Shown for TraceDat {
    fn show(&mut self, event: &Event) -> io::Result<()> {
        if event.tid != 0 {
            self.names.insert(event.tid, event.comm.clone());
        }
        self.events.entry(event.vcpu).or_default().push((event.ns, content(event)));
        Ok(())
    }

    fn finish(&mut self) -> io::Result<()> {
        let cpus = self.events.keys().last().map_or(1, |last| last + 1);
        let pages: Vec<Vec<u8>> =
            (0..cpus).map(|cpu| pages(self.events.remove(&cpu).unwrap_or_default())).collect();
        let mut file = head(&self.names, cpus as u32);
        let first = (file.len() + cpus * 16).next_multiple_of(PAGE);
        let mut at = first;
        for pages in &pages {
            file.extend([at as u64, pages.len() as u64].map(u64::to_le_bytes).concat());
            at += pages.len();
        }
        file.resize(first, 0);
        self.output.write_all(&file)?;
        pages.iter().try_for_each(|pages| self.output.write_all(pages))?;
        self.output.flush()
    }
}

/// All before the CPUs' events.
fn head(names: &BTreeMap<u32, String>, cpus: u32) -> Vec<u8> {
    let mut file = b"\x17\x08\x44tracing6\0".to_vec();
    file.extend([0, 8]); // little endian, and bytes of a long
    file.extend((PAGE as u32).to_le_bytes());
    for (name, text) in [("header_page\0", HEADER_PAGE), ("header_event\0", HEADER_EVENT)] {
        file.extend(name.as_bytes());
        sized(&mut file, text);
    }
    file.extend(0u32.to_le_bytes()); // formats of ftrace's own
    file.extend(2u32.to_le_bytes());
    let switch = vec![format("sched_switch", SWITCH, SWITCH_FIELDS)];
    let ours = (SWITCH + 1..).zip(KINDS).map(|(id, kind)| format(kind, id, TEXT_FIELDS)).collect();
    for (system, formats) in [("sched\0", switch), ("ring3\0", ours)] as [(&str, Vec<String>); 2] {
        file.extend(system.as_bytes());
        file.extend((formats.len() as u32).to_le_bytes());
        formats.iter().for_each(|text| sized(&mut file, text));
    }
    file.extend([0u32, 0].map(u32::to_le_bytes).concat()); // kallsyms, trace_printk
    // A line each: a program may call itself anything.
    let line = |(tid, name): (&u32, &String)| format!("{tid} {}\n", name.replace('\n', "?"));
    sized(&mut file, &names.iter().map(line).collect::<String>());
    file.extend(cpus.to_le_bytes());
    file.extend(b"flyrecord\0");
    file
}

fn sized(file: &mut Vec<u8>, text: &str) {
    file.extend((text.len() as u64).to_le_bytes());
    file.extend(text.as_bytes());
}

fn format(name: &str, id: u16, fields: &str) -> String {
    format!("name: {name}\nID: {id}\nformat:\n{COMMON}{fields}")
}

/// An event as its format says.
fn content(event: &Event) -> Vec<u8> {
    let switch = (event.kind == "switch").then(|| switch(event)).flatten();
    switch.unwrap_or_else(|| text(event))
}

fn common(id: u16, event: &Event) -> Vec<u8> {
    let mut bytes = id.to_le_bytes().to_vec();
    bytes.extend([0, 0]); // flags, and how often preemption is off
    bytes.extend(event.tid.to_le_bytes());
    bytes
}

/// Of `NAME TID -> NAME TID`.
fn switch(event: &Event) -> Option<Vec<u8>> {
    let mut bytes = common(SWITCH, event);
    let (before, after) = event.arguments.split_once(" -> ")?;
    for (n, task) in [before, after].into_iter().enumerate() {
        let (name, tid) = task.rsplit_once(' ')?;
        let mut padded = name.as_bytes().to_vec();
        padded.truncate(COMM - 1);
        padded.resize(COMM, 0);
        bytes.extend(padded);
        bytes.extend(tid.parse::<u32>().ok()?.to_le_bytes());
        bytes.extend(0u32.to_le_bytes()); // priority
        if n == 0 {
            bytes.extend(0u64.to_le_bytes()); // state
        }
    }
    Some(bytes)
}

fn text(event: &Event) -> Vec<u8> {
    let kind = KINDS.iter().position(|kind| *kind == event.kind).unwrap_or(KINDS.len() - 1) as u16;
    let mut text = words(event).into_bytes();
    text.truncate(MOST - BEFORE_TEXT - 1);
    text.push(0);
    let mut bytes = common(SWITCH + 1 + kind, event);
    bytes.extend(event.took.unwrap_or_default().to_le_bytes());
    bytes.extend(((text.len() as u32) << 16 | BEFORE_TEXT as u32).to_le_bytes());
    bytes.extend(text);
    bytes
}

/// Pages of a CPU's ring buffer.
fn pages(mut events: Vec<(u64, Vec<u8>)>) -> Vec<u8> {
    events.sort_by_key(|(ns, _)| *ns);
    let (mut all, mut page, mut last) = (Vec::new(), Vec::new(), 0);
    for (ns, content) in events {
        let words = content.len().div_ceil(4) as u32;
        // An extension of the time, header, length and content.
        if page.is_empty() || page.len() + 8 + 8 + words as usize * 4 > PAGE {
            end(&mut all, &mut page);
            page.extend(ns.to_le_bytes());
            page.extend([0; 8]);
            last = ns;
        }
        let delta = ns - last;
        if delta >> DELTA_BITS != 0 {
            let low = (delta & ((1 << DELTA_BITS) - 1)) as u32;
            page.extend((low << 5 | TIME_EXTEND).to_le_bytes());
            page.extend(((delta >> DELTA_BITS) as u32).to_le_bytes());
        }
        let small = if delta >> DELTA_BITS == 0 { delta as u32 } else { 0 };
        page.extend((small << 5).to_le_bytes());
        page.extend((words * 4 + 4).to_le_bytes());
        let end = page.len() + words as usize * 4;
        page.extend(content);
        page.resize(end, 0);
        last = ns;
    }
    end(&mut all, &mut page);
    all
}

/// A page is full: its length is known.
fn end(all: &mut Vec<u8>, page: &mut Vec<u8>) {
    if page.is_empty() {
        return;
    }
    let len = (page.len() - PAGE_HEADER) as u64;
    page[8..16].copy_from_slice(&len.to_le_bytes());
    page.resize(PAGE, 0);
    all.append(page);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(ns: u64, kind: &str, arguments: &str) -> Event {
        let (kind, arguments, name) = (kind.to_owned(), arguments.to_owned(), "read".to_owned());
        Event { ns, tid: 7, comm: "sh".to_owned(), kind, name, arguments, ..Event::default() }
    }

    #[test]
    fn events_are_in_pages_in_the_order_of_time() {
        let some = (0..200).rev().map(|n| (n * (1 << 26), content(&event(n, "syscall", "3"))));
        let pages = pages(some.collect());
        assert!(pages.len() > PAGE && pages.len().is_multiple_of(PAGE));
        let first = u32::from_le_bytes(pages[16..20].try_into().expect("four"));
        assert_eq!(first, 0, "the first of a page is at the page's time");
        let second = 16 + 8 + (BEFORE_TEXT + "read(3)".len() + 1).next_multiple_of(4);
        let header = u32::from_le_bytes(pages[second..second + 4].try_into().expect("four"));
        assert_eq!(header >> 5, 1 << 26, "and the second as much later");
        let far = super::pages(vec![(0, vec![1; 8]), (1 << 40, vec![2; 8])]);
        let at = 16 + 8 + 8;
        let header = u32::from_le_bytes(far[at..at + 4].try_into().expect("four"));
        assert_eq!((header & 31, far[at + 5]), (TIME_EXTEND, 0x20), "2^40 is 2^13 of 2^27");
    }

    #[test]
    fn a_switch_has_the_kernels_form() {
        let bytes = content(&event(0, "switch", "a b 7 -> swapper/0 0"));
        assert_eq!((bytes[0], bytes.len()), (SWITCH as u8, 64));
        assert_eq!(
            (&bytes[8..12], bytes[24], &bytes[40..49]),
            (&b"a b\0"[..], 7, &b"swapper/0"[..])
        );
        let number = |kind: &str| u16::from(content(&event(0, kind, "garbage"))[0]);
        let other = SWITCH + KINDS.len() as u16;
        assert_eq!([number("switch"), number("new"), number("syscall")], [other, other, 2]);
    }
}
