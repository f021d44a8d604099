//! What the guest program says: lines `@bench {JSON}`, among whatever else a console shows.

use serde::Deserialize;

const MARK: &str = "@bench ";

/// A row as the guest program describes it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Row {
    /// One word.
    pub name: String,
    /// What it stresses.
    pub group: String,
    /// What one operation is.
    pub about: String,
}

impl Row {
    /// A row that is measured from the host.
    pub fn new(group: &str, name: &str, about: &str) -> Self {
        let [group, name, about] = [group, name, about].map(str::to_owned);
        Self { name, group, about }
    }
}

/// One batch of a row.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Batch {
    /// Which row.
    pub row: String,
    /// How often the operation was done.
    pub iterations: u64,
    /// How long that took by the guest's clock, in nanoseconds.
    pub ns: u64,
    /// The guest's clock at the end, in nanoseconds.
    pub at: u64,
}

impl Batch {
    /// Nanoseconds per operation.
    pub fn per_operation(&self) -> f64 {
        self.ns as f64 / self.iterations.max(1) as f64
    }
}

/// A line of the guest program.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Message {
    /// A batch was finished.
    Batch(Batch),
    /// It waits for orders; the text is its kernel.
    Ready {
        /// Name and release.
        ready: String,
    },
    /// A row is described.
    Row(Row),
    /// All rows are described.
    End {
        /// Always.
        end: bool,
    },
    /// A batch failed: a wrong result or a refused system call.
    Error {
        /// What was wrong.
        error: String,
    },
    /// A server can be reached.
    Serving {
        /// Its name.
        serving: String,
    },
    /// The command that a machine was started for has ended.
    Finished {
        /// What was wrong with it; empty if nothing was.
        finished: String,
    },
}

/// The message in a console line, if there is one.
pub fn parse(line: &str) -> Option<Message> {
    let (_, json) = line.split_once(MARK)?;
    serde_json::from_str(json.trim_end()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_found_on_a_console() {
        let line =
            "[    1.2] foo @bench {\"row\":\"fib\",\"iterations\":4,\"ns\":10,\"at\":99}\r\n";
        let Some(Message::Batch(batch)) = parse(line) else { panic!("{:?}", parse(line)) };
        assert_eq!((batch.row.as_str(), batch.per_operation()), ("fib", 2.5));
        assert_eq!(parse("[    0.0] Linux version"), None);
        assert_eq!(parse("@bench {\"row\":\"fib\",\"itera"), None, "a torn line");
    }

    #[test]
    fn an_error_is_no_batch() {
        let message = parse("@bench {\"row\":\"fib\",\"error\":\"wrong\",\"at\":1}");
        assert_eq!(message, Some(Message::Error { error: "wrong".to_owned() }));
    }
}
