//! What is sent to a reader: a JSON object a line.

use std::io::{self, Write};

use serde::Serialize;

/// Sends a line.
///
/// # Errors
/// The reader has gone.
pub(crate) fn say(output: &mut impl Write, line: &impl Serialize) -> io::Result<()> {
    let mut text = serde_json::to_string(line)?;
    text.push('\n');
    output.write_all(text.as_bytes())
}
