//! Events of virtio requests, of the notes that whoever serves a device makes of them.
//!
//! A request is an event once it has been given back. What the notes say is a device server's word: a server that was taken over can
//! make events up, no more.

use std::collections::HashMap;

use ring3_trace::{Event, filter::Filter};
use vmm::{LogReader, LoggedDevice, RequestNote};

use super::{
    fields::EventFields,
    request_names::{self, RequestWords},
};
use crate::linux::{Form, Parameter, Task};

/// Requests of a device that are under way, at the most: more than its queues hold.
const MOST_UNDER_WAY: usize = 1 << 16;
/// What a filter can ask of a request, with the numbers of [`Request::values`].
const FIELDS: [&str; 5] = ["device", "queue", "out", "in", "sector"];

/// A filter can ask for this.
pub fn has_field(name: &str) -> bool {
    FIELDS.contains(&name)
}

/// Reads the notes of all devices.
pub struct RequestTracer {
    devices: Vec<DeviceRequests>,
    filter: Option<Filter>,
    /// When the trace began, by the host's clock.
    began: u64,
    parameters: Vec<Parameter>,
}

struct DeviceRequests {
    slot: u8,
    device_type: u16,
    notes: LogReader,
    /// By queue and first descriptor.
    under_way: HashMap<(u16, u16), RequestNote>,
}

impl RequestTracer {
    /// Has requests noted from now on.
    pub fn new(devices: &[LoggedDevice], filter: Option<Filter>) -> Self {
        let began = host::current().uptime_ns();
        let device = |device: &LoggedDevice| DeviceRequests {
            slot: device.slot,
            device_type: device.device_type,
            notes: LogReader::new(device.log.clone()),
            under_way: HashMap::new(),
        };
        let parameter =
            |name: &&str| Parameter { name: (*name).to_owned(), form: Form::Unsigned(8) };
        let parameters = FIELDS.iter().map(parameter).collect();
        Self { devices: devices.iter().map(device).collect(), filter, began, parameters }
    }

    /// The requests that were given back since the last call, and how many notes were lost.
    pub fn take(&mut self) -> (Vec<Event>, u64) {
        let (mut ended, mut lost) = (Vec::new(), 0_u64);
        for device in &mut self.devices {
            let DeviceRequests { slot, device_type, notes, under_way } = device;
            lost = lost.saturating_add(notes.read(|note| {
                let key = (note.queue, note.head);
                if note.is_end {
                    let (slot, device_type) = (*slot, *device_type);
                    ended.push(Request {
                        slot,
                        device_type,
                        begin: under_way.remove(&key),
                        end: note,
                    });
                } else if under_way.len() < MOST_UNDER_WAY {
                    under_way.insert(key, note);
                }
            }));
        }
        ended.sort_by_key(Request::began);
        (ended.iter().filter_map(|request| self.event(request)).collect(), lost)
    }

    fn event(&self, request: &Request) -> Option<Event> {
        let RequestNote { ns, writable, .. } = request.end;
        let RequestWords { name, arguments, result } = request.named();
        let event = Event {
            ns: request.began().saturating_sub(self.began),
            kind: "virtio".to_owned(),
            name,
            arguments,
            result: Some(result),
            took: request.begin.map(|begin| ns.saturating_sub(begin.ns)),
            ..Event::default()
        };
        let filter = self.filter.as_ref();
        let meant = filter.is_none_or(|filter| {
            let fields = EventFields {
                kind: &event.kind,
                name: &event.name,
                task: &Task::default(),
                vcpu: 0,
                arguments: &request.values(),
                call: None,
                parameters: &self.parameters,
                read: &|_, _| 0,
                end: Some((writable.into(), event.took.unwrap_or_default())),
            };
            filter.matches(&|name| fields.field(name))
        });
        meant.then_some(event)
    }
}

/// A request that was given back.
struct Request {
    slot: u8,
    device_type: u16,
    /// `None` if it was taken before the trace began.
    begin: Option<RequestNote>,
    end: RequestNote,
}

impl Request {
    fn began(&self) -> u64 {
        self.begin.map_or(self.end.ns, |begin| begin.ns)
    }

    /// Bytes that the driver has offered, to be read and to be written.
    fn offered(&self) -> [u32; 2] {
        let begin = self.begin.unwrap_or_default();
        [self.end.readable, begin.writable]
    }

    /// The values of [`FIELDS`].
    fn values(&self) -> [u64; 5] {
        let [readable, writable] = self.offered().map(u64::from);
        let sector = self.begin.and_then(|begin| request_names::sector(self.device_type, &begin));
        let (slot, queue) = (self.slot.into(), self.end.queue.into());
        [slot, queue, readable, writable, sector.unwrap_or_default()]
    }

    fn named(&self) -> RequestWords {
        let [readable, writable] = self.offered();
        let named = request_names::named(self.device_type, self.begin.as_ref(), &self.end);
        let RequestWords { name, arguments, result } = named;
        let place = format!("device {}, queue {}", self.slot, self.end.queue);
        let arguments = format!("{place}{arguments}, {readable} bytes out, room for {writable}");
        RequestWords { name, arguments, result }
    }
}
