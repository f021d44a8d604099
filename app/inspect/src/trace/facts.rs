//! What a filter asks of an event.

use ring3_trace::filter::Fact;

use super::calls::{self, Call, Reader};
use crate::linux::{Form, Parameter, Task};

/// What all events have.
const COMMON: [&str; 9] = ["kind", "name", "comm", "pid", "tid", "cpu", "ret", "dur", "path"];
/// Arguments of functions that are shown.
const ARGUMENTS: [&str; 6] = ["arg0", "arg1", "arg2", "arg3", "arg4", "arg5"];

/// A filter may ask for this whatever the event.
pub fn is_common(name: &str) -> bool {
    COMMON.contains(&name) || ARGUMENTS.contains(&name)
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

/// What is known of an event.
pub struct Facts<'a> {
    /// `syscall` and so on.
    pub kind: &'a str,
    /// Which.
    pub name: &'a str,
    /// Whose.
    pub task: &'a Task,
    /// On which vCPU.
    pub vcpu: usize,
    /// Its arguments.
    pub arguments: &'a [u64],
    /// What they are, if it is a system call.
    pub call: Option<&'a Call>,
    /// What they are, if it is a function's.
    pub parameters: &'a [Parameter],
    /// Guest memory.
    pub read: Reader<'a>,
    /// Result and time (ns), once they are known.
    pub end: Option<(i64, u64)>,
}

impl Facts<'_> {
    /// What a filter calls so.
    pub fn fact(&self, name: &str) -> Fact {
        let text = |text: &str| Fact::Text(text.to_owned());
        match name {
            "kind" => text(self.kind),
            "name" => text(self.name),
            "comm" => text(&self.task.comm),
            "pid" => Fact::Number(self.task.pid.into()),
            "tid" => Fact::Number(self.task.tid.into()),
            "cpu" => Fact::Number(self.vcpu as i128),
            "ret" => self.end.map_or(Fact::Later, |(result, _)| Fact::Number(result.into())),
            "dur" => self.end.map_or(Fact::Later, |(_, time)| Fact::Number(time.into())),
            other => self.argument(other).unwrap_or(Fact::Nothing),
        }
    }

    fn argument_of_function(&self, name: &str) -> Option<Fact> {
        let named = self.parameters.iter().position(|parameter| parameter.name == name);
        let n = named.or_else(|| ARGUMENTS.iter().position(|known| *known == name))?;
        let value = *self.arguments.get(n)?;
        Some(match self.parameters.get(n).map(|parameter| parameter.form) {
            Some(Form::Text) => Fact::Text(
                String::from_utf8_lossy(&calls::terminated(value, self.read)?).into_owned(),
            ),
            Some(form) => Fact::Number(number(form, value)),
            None => Fact::Number(value.into()),
        })
    }

    fn argument(&self, name: &str) -> Option<Fact> {
        let Some(call) = self.call else {
            return self.argument_of_function(name);
        };
        let n = call.parameter(name)?;
        let value = *self.arguments.get(n)?;
        let text = call.text(n, value, self.read).map(Fact::Text);
        Some(text.unwrap_or_else(|| Fact::Number(call.number(n, value))))
    }
}
