//! Diagnostics for developers on standard error: errors only, unless RING3_LOG asks for more (`RING3_LOG=debug`).
//!
//! A guest can cause messages as fast as it can break a rule of a device. So there are only so many of them in a time, whoever makes
//! them, our code or a library's; the others are counted, and the number is said. Where RING3_LOG is set a developer wants them all.

use std::{
    io::Write,
    sync::{Mutex, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use tracing::{Event, Subscriber};
use tracing_subscriber::{
    EnvFilter, Layer, Registry,
    layer::{Context, SubscriberExt},
    util::SubscriberInitExt,
};

const VARIABLE: &str = "RING3_LOG";
/// The library of shared folders takes an error that it passes on to the guest for one of its own.
const QUIET: &str = "error,fuse_backend_rs=off";
/// So many messages in this time.
const MOST: u32 = 20;
const WHILE: Duration = Duration::from_secs(10);

/// Messages shown and left out since `start`.
struct Window {
    start: Instant,
    shown: u32,
    left_out: u64,
}

/// Whether a message is shown, and how many before it were not.
#[derive(Debug, PartialEq, Eq)]
struct Verdict {
    show: bool,
    left_out: u64,
}

impl Window {
    fn judge(&mut self, now: Instant) -> Verdict {
        let mut left_out = 0;
        if now.duration_since(self.start) >= WHILE {
            left_out = std::mem::take(&mut self.left_out);
            (self.start, self.shown) = (now, 0);
        }
        let show = self.shown < MOST;
        self.shown += u32::from(show);
        self.left_out += u64::from(!show);
        Verdict { show, left_out }
    }
}

fn window() -> &'static Mutex<Window> {
    static WINDOW: OnceLock<Mutex<Window>> = OnceLock::new();
    WINDOW.get_or_init(|| Mutex::new(Window { start: Instant::now(), shown: 0, left_out: 0 }))
}

/// Lets so many messages through.
struct Limit;

impl<S: Subscriber> Layer<S> for Limit {
    fn event_enabled(&self, _: &Event<'_>, _: Context<'_, S>) -> bool {
        let verdict = window().lock().unwrap_or_else(PoisonError::into_inner).judge(Instant::now());
        say(verdict.left_out);
        verdict.show
    }
}

/// Says how many messages were left out, if there were any.
fn say(left_out: u64) {
    if left_out > 0 {
        // Nobody reads it any more where this fails.
        let _ = writeln!(std::io::stderr(), "ring3: {left_out} more messages were left out");
    }
}

/// Has messages shown from now on.
pub fn start() {
    let wanted = std::env::var(VARIABLE);
    let limit = wanted.is_err().then_some(Limit);
    let filter = EnvFilter::new(wanted.unwrap_or_else(|_| QUIET.to_owned()));
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    // The limit is asked last: what the filter keeps back does not count.
    Registry::default().with(lines).with(limit).with(filter).init();
}

/// Says what has been left out until the end.
pub fn end() {
    let mut window = window().lock().unwrap_or_else(PoisonError::into_inner);
    say(std::mem::take(&mut window.left_out));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_counted_and_what_comes_later_is_shown() {
        let start = Instant::now();
        let mut window = Window { start, shown: 0, left_out: 0 };
        let shown = (0..100_000).filter(|_| window.judge(start).show).count();
        assert_eq!(shown, MOST as usize);
        let later = window.judge(start + WHILE);
        assert_eq!(later, Verdict { show: true, left_out: 100_000 - u64::from(MOST) });
        assert_eq!(window.judge(start + WHILE), Verdict { show: true, left_out: 0 });
    }

    /// By whatever library, and whatever it is about.
    #[test]
    fn so_many_messages_reach_the_reader() {
        #[derive(Clone, Default)]
        struct Lines(std::sync::Arc<Mutex<Vec<u8>>>);
        impl Write for Lines {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.0.lock().expect("sound").extend(bytes);
                Ok(bytes.len())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let lines = Lines::default();
        let writer = lines.clone();
        let shown = tracing_subscriber::fmt::layer().with_writer(move || writer.clone());
        let all = Registry::default().with(shown).with(Some(Limit)).with(EnvFilter::new("error"));
        tracing::subscriber::with_default(all, || {
            (0..1000).for_each(|number| tracing::error!(number, "virtio driver error"));
            (0..1000).for_each(|number| tracing::debug!(number, "of no interest"));
        });
        let lines = lines.0.lock().expect("sound");
        let count = lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).count();
        assert_eq!(count, MOST as usize);
    }
}
