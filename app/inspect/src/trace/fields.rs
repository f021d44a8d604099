//! The fields of an event that a filter can compare.

use ring3_trace::filter::FieldValue;

use super::calls::{self, Call, Reader};
use crate::linux::{Form, Parameter, Task};

/// Fields of all events. Arguments of these names are known by their places.
const OF_ALL: [&str; 8] = ["kind", "name", "comm", "pid", "tid", "cpu", "ret", "dur"];
/// The first argument that is text.
const PATH: &str = "path";
/// Arguments of functions that are shown.
const ARGUMENTS: [&str; 6] = ["arg0", "arg1", "arg2", "arg3", "arg4", "arg5"];

/// All events have this field.
pub fn is_of_all(name: &str) -> bool {
    OF_ALL.contains(&name)
}

/// Events of any kind may have this field.
pub fn is_common(name: &str) -> bool {
    is_of_all(name) || name == PATH || ARGUMENTS.contains(&name)
}

/// A register as a number, by its type.
pub fn number(form: Form, value: u64) -> i128 {
    let shift = |bytes: u32| 64 - 8 * bytes.clamp(1, 8);
    match form {
        Form::Signed(bytes) => ((value << shift(bytes)) as i64 >> shift(bytes)).into(),
        Form::Unsigned(bytes) => (value << shift(bytes) >> shift(bytes)).into(),
        Form::Text | Form::Address => value.into(),
    }
}

/// An event, for filters.
pub struct EventFields<'a> {
    /// The event's kind: `syscall` and so on.
    pub kind: &'a str,
    /// The event's name.
    pub name: &'a str,
    /// The thread.
    pub task: &'a Task,
    /// The vCPU.
    pub vcpu: usize,
    /// The arguments.
    pub arguments: &'a [u64],
    /// The system call, if the event is one: names the arguments.
    pub call: Option<&'a Call>,
    /// The function's parameters, if the event is a function: name the arguments.
    pub parameters: &'a [Parameter],
    /// Guest memory.
    pub read: Reader<'a>,
    /// Result and duration (ns), once they are known.
    pub end: Option<(i64, u64)>,
}

impl EventFields<'_> {
    /// The value of a field by its name.
    pub fn field(&self, name: &str) -> FieldValue {
        let text = |text: &str| FieldValue::Text(text.to_owned());
        match name {
            "kind" => text(self.kind),
            "name" => text(self.name),
            "comm" => text(&self.task.comm),
            "pid" => FieldValue::Number(self.task.pid.into()),
            "tid" => FieldValue::Number(self.task.tid.into()),
            "cpu" => FieldValue::Number(self.vcpu as i128),
            "ret" => self
                .end
                .map_or(FieldValue::NotYetKnown, |(result, _)| FieldValue::Number(result.into())),
            "dur" => self
                .end
                .map_or(FieldValue::NotYetKnown, |(_, time)| FieldValue::Number(time.into())),
            other => self.argument(other).unwrap_or(FieldValue::NoSuchField),
        }
    }

    fn argument_of_function(&self, name: &str) -> Option<FieldValue> {
        let named = self.parameters.iter().position(|parameter| parameter.name == name);
        let n = named.or_else(|| ARGUMENTS.iter().position(|known| *known == name))?;
        let value = *self.arguments.get(n)?;
        Some(match self.parameters.get(n).map(|parameter| parameter.form) {
            Some(Form::Text) => FieldValue::Text(
                String::from_utf8_lossy(&calls::terminated(value, self.read)?).into_owned(),
            ),
            Some(form) => FieldValue::Number(number(form, value)),
            None => FieldValue::Number(value.into()),
        })
    }

    fn argument(&self, name: &str) -> Option<FieldValue> {
        let Some(call) = self.call else {
            return self.argument_of_function(name);
        };
        let n = call.parameter(name)?;
        let value = *self.arguments.get(n)?;
        let text = call.text(n, value, self.read).map(FieldValue::Text);
        Some(text.unwrap_or_else(|| FieldValue::Number(call.number(n, value))))
    }
}
