//! Events other than executed instructions: accesses to devices and model-specific registers, and what engines do.

use contract::VcpuEvent;
use ring3_trace::Event;

use super::{fields::EventFields, tracer::Tracer};
use crate::linux::Task;

/// The event for what a vCPU has done, if it is traced. Its process is not known.
pub fn event(tracer: &Tracer, vcpu: usize, event: VcpuEvent) -> Option<Event> {
    let (kind, name, arguments, values) = describe(event);
    tracer.plan.vcpu_events().contains(kind).then_some(())?;
    let (kind, name) = (kind.to_owned(), name.to_owned());
    let event = Event { ns: tracer.now(), vcpu, kind, name, arguments, ..Event::default() };
    let filter = tracer.selection.filter.as_ref();
    let meant = filter.is_none_or(|filter| {
        let fields = EventFields {
            kind: &event.kind,
            name: &event.name,
            task: &Task::default(),
            vcpu,
            arguments: &values,
            call: None,
            parameters: &[],
            read: &|_, _| 0,
            end: None,
        };
        filter.matches(&|name| fields.field(name))
    });
    meant.then_some(event)
}

/// The event's kind, its name, and its arguments as text and as numbers.
fn describe(event: VcpuEvent) -> (&'static str, &'static str, String, [u64; 2]) {
    let way = |write: bool| if write { "write" } else { "read" };
    match event {
        VcpuEvent::Port { port, size, write, value } => {
            let text = format!("{port:#x}, {size} bytes, {value:#x}");
            ("port", if write { "out" } else { "in" }, text, [port.into(), value.into()])
        }
        VcpuEvent::Mmio { gpa, size, write, value } => {
            ("mmio", way(write), format!("{gpa:#x}, {size} bytes, {value:#x}"), [gpa, value])
        }
        VcpuEvent::Msr { index, write, value } => {
            ("msr", way(write), format!("{index:#x}, {value:#x}"), [index.into(), value])
        }
        VcpuEvent::Vector(vector) => {
            ("vector", "interrupt", format!("{vector:#x}"), [vector.into(), 0])
        }
        VcpuEvent::Translate { gva, blocks } => {
            ("engine", "translate", format!("{gva:#x}, {blocks} blocks"), [gva, blocks])
        }
        VcpuEvent::Drop { pages } => ("engine", "drop", format!("{pages} pages"), [pages, 0]),
        VcpuEvent::Flush { times } => ("engine", "flush", format!("{times} times"), [times, 0]),
        VcpuEvent::Map { gva } => ("engine", "map", format!("{gva:#x}"), [gva, 0]),
        VcpuEvent::Kick => ("engine", "kick", String::new(), [0, 0]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_is_told_with_numbers_for_filters() {
        let port = VcpuEvent::Port { port: 0x3f8, size: 1, write: true, value: 0x41 };
        assert_eq!(
            describe(port),
            ("port", "out", "0x3f8, 1 bytes, 0x41".to_owned(), [0x3f8, 0x41])
        );
        let msr = VcpuEvent::Msr { index: 0x10, write: false, value: 7 };
        assert_eq!(describe(msr), ("msr", "read", "0x10, 0x7".to_owned(), [0x10, 7]));
        let translate = VcpuEvent::Translate { gva: 0x1000, blocks: 3 };
        assert_eq!(describe(translate).2, "0x1000, 3 blocks");
    }
}
