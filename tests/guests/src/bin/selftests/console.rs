//! The console of a Linux guest, line by line.

/// Signs that a kernel is unwell, whatever a test says.
const UNWELL: [&str; 7] = [
    "BUG: ",
    "Oops",
    "WARNING: ",
    "Kernel panic",
    "general protection fault",
    "rcu: INFO: rcu_preempt self-detected stall",
    "invalid opcode",
];

/// Everything printed so far.
#[derive(Debug, Default)]
pub struct Console {
    text: String,
    /// Bytes of `text` that were handed out as lines.
    seen: usize,
}

impl Console {
    /// Adds what was printed and returns the last line that became complete.
    pub fn print(&mut self, bytes: &[u8]) -> Option<&str> {
        self.text.push_str(&String::from_utf8_lossy(bytes).replace('\r', ""));
        let new = &self.text[self.seen..];
        let complete = new.rfind('\n')?;
        self.seen += complete + 1;
        new[..complete].lines().last()
    }

    /// All lines, those of the kernel without their time stamps.
    pub fn lines(&self) -> impl Iterator<Item = &str> {
        self.text.lines().map(without_time)
    }

    /// The first line that begins with `prefix`, without it.
    pub fn after(&self, prefix: &str) -> Option<&str> {
        self.lines().find_map(|line| line.strip_prefix(prefix)).map(str::trim)
    }

    /// The first sign that the kernel is unwell. Of programs that die it says so, too, by "traps:".
    pub fn complaint(&self) -> Option<&str> {
        let mut kernels = self.lines().filter(|line| !line.starts_with("traps: "));
        kernels.find(|line| UNWELL.iter().any(|sign| line.contains(sign)))
    }

    /// The last lines.
    pub fn tail(&self) -> String {
        let lines: Vec<_> = self.text.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }
}

/// `text` of `[   12.345678] text`.
fn without_time(line: &str) -> &str {
    let inner = line.strip_prefix('[').and_then(|rest| rest.split_once("] "));
    let is_time = |time: &str| time.trim().parse::<f64>().is_ok();
    inner.filter(|(time, _)| is_time(time)).map_or(line, |(_, text)| text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_when_complete() {
        let mut console = Console::default();
        assert_eq!(console.print(b"[    1.5] one\r\n[    2."), Some("[    1.5] one"));
        assert_eq!(console.print(b"5] t"), None);
        assert_eq!(console.print(b"wo\n"), Some("[    2.5] two"));
        assert_eq!(console.after("two"), Some(""));
        assert_eq!(console.lines().collect::<Vec<_>>(), ["one", "two"]);
    }

    #[test]
    fn only_times_are_cut_off() {
        assert_eq!(without_time("[10/10 JIT'ed] ok"), "[10/10 JIT'ed] ok");
        assert_eq!(without_time("[  3.25] [1] x"), "[1] x");
    }

    #[test]
    fn complaints_are_found() {
        let mut console = Console::default();
        console.print(b"[ 1.0] all is well\n");
        assert_eq!(console.complaint(), None);
        console.print(b"[ 2.0] WARNING: CPU: 0 PID: 1 at lib/x.c:1\n");
        assert_eq!(console.complaint(), Some("WARNING: CPU: 0 PID: 1 at lib/x.c:1"));
    }
}
