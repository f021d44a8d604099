//! Events of a trace, in the forms that people and programs read.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use inspect::trace::Event;
use serde_json::json;

use super::{trace::TraceFormat, trace_dat::TraceDat};

/// Where events go.
pub(super) trait Shown {
    /// Shows one.
    fn show(&mut self, event: &Event) -> io::Result<()>;
    /// Has the reader see what was shown so far: no event is there at the moment.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
    /// There are no more.
    fn finish(&mut self) -> io::Result<()>;
}

/// In this form.
pub(super) fn new(format: TraceFormat, output: Box<dyn Write>) -> Box<dyn Shown> {
    match format {
        TraceFormat::Text => Box::new(Text(output)),
        TraceFormat::Json => Box::new(Json(output)),
        TraceFormat::Folded => Box::new(Folded { output, times: BTreeMap::new() }),
        TraceFormat::Perfetto => Box::new(Perfetto { output, any: false }),
        TraceFormat::TraceDat => Box::new(TraceDat::new(output)),
    }
}

struct Text(Box<dyn Write>);

impl Shown for Text {
    fn show(&mut self, event: &Event) -> io::Result<()> {
        let Event { ns, tid, comm, .. } = event;
        let seconds = *ns as f64 / 1e9;
        writeln!(self.0, "{seconds:12.6} {comm} {tid} {}", words(event))
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
    fn finish(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// System calls as strace prints them, others by kind.
pub(super) fn words(event: &Event) -> String {
    let Event { kind, name, arguments, result, took, .. } = event;
    let took = took.map(|ns| format!(" <{:.6}>", ns as f64 / 1e9)).unwrap_or_default();
    let result = result.as_ref().map(|result| format!(" = {result}")).unwrap_or_default();
    match kind.as_str() {
        "syscall" => format!("{name}({arguments}){result}{took}"),
        kind if kind == name => format!("{kind} {arguments}"),
        kind => format!("{kind} {name} {arguments}{result}{took}"),
    }
}

struct Json(Box<dyn Write>);

impl Shown for Json {
    fn show(&mut self, event: &Event) -> io::Result<()> {
        writeln!(self.0, "{}", serde_json::to_string(event)?)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
    fn finish(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Microseconds, or how often where there is no time, by thread and name.
struct Folded {
    output: Box<dyn Write>,
    times: BTreeMap<String, u64>,
}

impl Shown for Folded {
    fn show(&mut self, event: &Event) -> io::Result<()> {
        let Event { comm, kind, name, took, .. } = event;
        let stack = format!("{};{kind};{name}", comm.replace([';', ' '], "_"));
        *self.times.entry(stack).or_default() += took.map_or(1, |ns| ns.div_ceil(1000));
        Ok(())
    }
    fn finish(&mut self) -> io::Result<()> {
        for (stack, time) in &self.times {
            writeln!(self.output, "{stack} {time}")?;
        }
        self.output.flush()
    }
}

/// The JSON form of Chrome's traces, which Perfetto reads.
struct Perfetto {
    output: Box<dyn Write>,
    any: bool,
}

impl Shown for Perfetto {
    fn show(&mut self, event: &Event) -> io::Result<()> {
        let Event { ns, pid, tid, name, kind, arguments, result, took, .. } = event;
        let phase = if took.is_some() { "X" } else { "i" };
        let micro = |ns: u64| ns as f64 / 1e3;
        let line = json!({
            "name": name, "cat": kind, "ph": phase, "ts": micro(*ns), "dur": took.map(micro),
            "pid": pid, "tid": tid, "s": "t",
            "args": { "arguments": arguments, "result": result, "comm": event.comm },
        });
        let before = if std::mem::replace(&mut self.any, true) { "," } else { "[" };
        write!(self.output, "{before}\n{line}")
    }
    fn finish(&mut self) -> io::Result<()> {
        let before = if self.any { "" } else { "[" };
        writeln!(self.output, "{before}\n]")?;
        self.output.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("no panic").extend(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn written(format: TraceFormat, events: &[Event]) -> String {
        let kept = Kept::default();
        let mut shown = new(format, Box::new(kept.clone()));
        events.iter().for_each(|event| shown.show(event).expect("written"));
        shown.finish().expect("written");
        String::from_utf8(kept.0.lock().expect("no panic").clone()).expect("text")
    }

    fn events() -> [Event; 2] {
        let text = |text: &str| text.to_owned();
        let (comm, kind, name) = (text("a b"), text("syscall"), text("read"));
        let call = Event { ns: 1_500_000, tid: 7, comm, kind, name, ..Event::default() };
        let (arguments, result) = (text("3, \"x\", 1"), Some(text("1")));
        let call = Event { arguments, result, took: Some(2500), ..call };
        let (kind, name, arguments) = (text("exec"), text("exec"), text("/bin/true"));
        [call, Event { kind, name, arguments, ..Event::default() }]
    }

    #[test]
    fn each_form_is_what_its_readers_expect() {
        let text = written(TraceFormat::Text, &events());
        assert!(text.contains("0.001500 a b 7 read(3, \"x\", 1) = 1 <0.000003>"), "{text}");
        assert!(text.contains(" exec /bin/true"), "{text}");
        assert_eq!(written(TraceFormat::Folded, &events()), ";exec;exec 1\na_b;syscall;read 3\n");
        let perfetto = written(TraceFormat::Perfetto, &events());
        let perfetto: serde_json::Value = serde_json::from_str(&perfetto).expect("JSON");
        assert_eq!((&perfetto[0]["ph"], &perfetto[0]["dur"]), (&json!("X"), &json!(2.5)));
        assert_eq!(perfetto[1]["ph"], "i");
        assert_eq!(written(TraceFormat::Perfetto, &[]), "[\n]\n");
        let json = written(TraceFormat::Json, &events());
        let back: Vec<Event> =
            json.lines().map(|line| serde_json::from_str(line).expect("an event")).collect();
        assert_eq!(back, events());
    }
}
