//! Keys meant for ring3 among those meant for the guest: Ctrl-A and one more, as in QEMU.

/// Ctrl-A.
const ESCAPE: u8 = 1;

/// What the Ctrl-A keys do.
pub const HELP: &str = "Ctrl-A X leaves, Ctrl-A Ctrl-A sends Ctrl-A, Ctrl-A H shows this";

/// What a key asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// Pass the byte to the guest.
    Guest(u8),
    /// Switch the machine off.
    Leave,
    /// Show [`HELP`].
    Help,
}

/// Finds the escapes in a stream of bytes, however it is cut into reads.
#[derive(Clone, Copy, Debug, Default)]
pub struct Escapes {
    escaped: bool,
}

impl Escapes {
    /// What the next byte asks for, if it completes anything.
    pub fn key(&mut self, byte: u8) -> Option<Key> {
        if !std::mem::take(&mut self.escaped) {
            self.escaped = byte == ESCAPE;
            return (!self.escaped).then_some(Key::Guest(byte));
        }
        match byte {
            b'x' | b'X' => Some(Key::Leave),
            b'h' | b'H' | b'?' => Some(Key::Help),
            ESCAPE => Some(Key::Guest(ESCAPE)),
            // As in QEMU, an unknown escape is lost.
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(bytes: &[u8]) -> Vec<Key> {
        let mut escapes = Escapes::default();
        bytes.iter().filter_map(|&byte| escapes.key(byte)).collect()
    }

    #[test]
    fn plain_bytes_pass() {
        assert_eq!(keys(b"x\x03"), [Key::Guest(b'x'), Key::Guest(3)]);
    }

    #[test]
    fn escapes_act() {
        assert_eq!(keys(b"\x01x"), [Key::Leave]);
        assert_eq!(keys(b"\x01H"), [Key::Help]);
        assert_eq!(keys(b"\x01\x01x"), [Key::Guest(1), Key::Guest(b'x')]);
    }

    #[test]
    fn an_unknown_escape_is_lost_and_over() {
        assert_eq!(keys(b"\x01qx"), [Key::Guest(b'x')]);
        assert_eq!(keys(b"\x01"), []);
    }
}
