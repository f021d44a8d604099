//! A console whose driver does anything while keys are pressed and the terminal is resized.
#![no_main]

use fuzz::{Deed, Guest};
use libfuzzer_sys::fuzz_target;
use std::io::Write;
use std::sync::{Arc, Mutex};
use virtio::{CONSOLE_RECEIVE, Console, InputBuffer};

#[derive(Clone, Default)]
struct Screen(Arc<Mutex<Vec<u8>>>);

impl Write for Screen {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        let mut shown = self.0.lock().unwrap();
        shown.clear();
        shown.extend(data);
        Ok(data.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fuzz_target!(|deeds: Vec<Deed>| {
    let (keys, screen) = (InputBuffer::default(), Screen::default());
    let console = Console::new(Box::new(keys.clone()), Box::new(screen.clone()));
    let size = console.size();
    let mut guest = Guest::new(console);
    guest.start(u64::MAX);
    for deed in &deeds {
        match deed {
            Deed::Outside(event) if event % 2 == 0 => {
                keys.push(&[*event; 5]);
                guest.doorbell.ring(CONSOLE_RECEIVE);
            }
            Deed::Outside(event) => {
                size.set((*event).into(), 25);
                guest.doorbell.config_changed();
            }
            deed => guest.perform(deed),
        }
    }

    guest.reset();
    guest.start(0);
    assert_eq!(guest.status(), 15, "a reset mends everything");
    guest.set_memory(0x4000, b"hello");
    guest.describe(1, 0, 0x4000, 5, 0, 0);
    guest.offer(1, 0);
    guest.notify(1);
    assert_eq!((guest.used_index(1), &screen.0.lock().unwrap()[..]), (1, &b"hello"[..]));
});
