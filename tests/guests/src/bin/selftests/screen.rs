//! A text screen behind a serial line: as much of a VT100 as memtest86+ uses.

const ROWS: usize = 25;
const COLUMNS: usize = 80;

/// What the screen shows.
#[derive(Debug)]
pub struct Screen {
    cells: [[char; COLUMNS]; ROWS],
    row: usize,
    column: usize,
    /// The control sequence being read, without its escape character.
    sequence: Option<String>,
}

impl Screen {
    /// An empty screen.
    pub fn new() -> Self {
        Self { cells: [[' '; COLUMNS]; ROWS], row: 0, column: 0, sequence: None }
    }

    /// Shows what was printed.
    pub fn print(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            match (self.sequence.take(), byte) {
                (Some(sequence), _) => self.continue_sequence(sequence, char::from(byte)),
                (None, 0x1b) => self.sequence = Some(String::new()),
                (None, b'\r') => self.column = 0,
                (None, b'\n') => self.row += 1,
                (None, 0x20..0x7f) => self.put(char::from(byte)),
                (None, _) => {}
            }
        }
    }

    /// All rows, as lines.
    pub fn text(&self) -> String {
        let line = |row: &[char; COLUMNS]| {
            let text: String = row.iter().collect();
            format!("{}\n", text.trim_end())
        };
        self.cells.iter().map(line).collect::<String>().trim_end().to_owned()
    }

    fn put(&mut self, character: char) {
        let cell = self.cells.get_mut(self.row).and_then(|row| row.get_mut(self.column));
        if let Some(cell) = cell {
            *cell = character;
        }
        self.column += 1;
    }

    /// `ESC [ parameters letter`; anything longer than a sequence can be is dropped.
    fn continue_sequence(&mut self, mut sequence: String, next: char) {
        let ended = match next {
            '[' => false,
            _ => next.is_ascii_alphabetic() || sequence.len() > 32,
        };
        sequence.push(next);
        if !ended {
            self.sequence = Some(sequence);
            return;
        }
        let parameters = sequence.trim_start_matches('[').trim_end_matches(next);
        match next {
            'H' | 'f' => self.move_to(parameters),
            'J' if parameters == "2" => self.cells = [[' '; COLUMNS]; ROWS],
            _ => {}
        }
    }

    /// Rows and columns count from one.
    fn move_to(&mut self, parameters: &str) {
        let mut numbers = parameters.split(';').map(|number| number.parse().unwrap_or(1usize));
        let mut next = || numbers.next().unwrap_or(1).saturating_sub(1);
        (self.row, self.column) = (next(), next());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_goes_where_the_cursor_is() {
        let mut screen = Screen::new();
        screen.print(b"\x1b[2J\x1b[2;3Hab\x1b[7mc\x1b[0md\x1b[1;1Hx\x1b[2;4");
        screen.print(b"HB");
        assert_eq!(screen.text(), "x\n  aBcd");
    }

    #[test]
    fn outside_the_screen_is_nothing() {
        let mut screen = Screen::new();
        screen.print(b"\x1b[999;999Hx\x1b[;Hy\x1b[3;79Habc");
        assert_eq!(screen.text().lines().next(), Some("y"));
        assert!(screen.text().ends_with("ab"));
    }
}
