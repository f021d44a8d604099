//! What commands print: on standard output for readers that may have read enough (`ring3 ps | head -1` is no failure,
//! and no panic, which is what `println!` makes of it), and on standard error.

use std::io::{self, ErrorKind, Write};

use host_linux::{inherited, limits};

use crate::failure::Failure;

/// Prints a text that ends its lines itself; what `act` returns for a command that has done that.
pub fn print(text: &str) -> Result<u8, Failure> {
    if inherited::is_closed(1) {
        return Err(Failure::host("standard output: it is closed"));
    }
    print_to(&mut io::stdout(), text)
}

/// Says something on standard error, whether or not that takes it: where it does not, there is the exit code (`eprintln!` would panic).
pub fn say(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

/// A line of ours on standard error, with the limit that may be behind what it says.
pub fn complain(problem: &str) {
    let hint = limits::hint(problem).map(|hint| format!("; {hint}")).unwrap_or_default();
    say(&format!("ring3: {problem}{hint}\n"));
}

fn print_to(output: &mut impl Write, text: &str) -> Result<u8, Failure> {
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Failure::host(format!("standard output: {error}")))
        }
        _ => Ok(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_read_enough_is_no_failure() {
        let (reader, mut writer) = io::pipe().expect("a pipe");
        drop(reader);
        assert_eq!(print_to(&mut writer, "one line\n"), Ok(0));
    }

    #[test]
    fn a_full_disk_is_one() {
        let mut full = std::fs::File::create("/dev/full").expect("the host has it");
        let failure = print_to(&mut full, "one line\n").expect_err("nothing fits");
        assert!(failure.to_string().starts_with("standard output: "), "{failure}");
    }
}
