//! Functions of programs by their place in a file: by the symbols that the files of a folder have, if they have any.

use std::{
    collections::HashMap,
    fs, io,
    path::{Path, PathBuf},
};

use object::{
    Object, ObjectSegment, ObjectSymbol, SymbolKind,
    read::elf::{ElfFile64, FileHeader},
};

/// Larger files are not read (bytes).
const LARGEST: u64 = 512 << 20;

/// The files below a folder.
pub(super) struct Files {
    root: Option<PathBuf>,
    known: HashMap<String, Option<Functions>>,
}

/// A file's functions.
struct Functions {
    /// What is loaded: place in the file, length, address.
    segments: Vec<(u64, u64, u64)>,
    /// Address, length and name of each, in order.
    functions: Vec<(u64, u64, String)>,
}

impl Files {
    /// Those below `root`, as the guest names them; without one nothing is known.
    pub fn new(root: Option<PathBuf>) -> Self {
        Self { root, known: HashMap::new() }
    }

    /// The function so many bytes from a file's beginning.
    pub fn function(&mut self, path: &str, offset: u64) -> Option<&str> {
        let root = self.root.as_deref()?;
        if !self.known.contains_key(path) {
            let read = Functions::read(&root.join(path.trim_start_matches('/')));
            // A file that cannot be read has no symbols for us.
            self.known.insert(path.to_owned(), read.ok());
        }
        self.known.get(path)?.as_ref()?.at(offset)
    }
}

impl Functions {
    fn read(path: &Path) -> io::Result<Self> {
        let metadata = fs::metadata(path)?;
        if !metadata.is_file() || metadata.len() > LARGEST {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let bytes = fs::read(path)?;
        let file = ElfFile64::<object::Endianness>::parse(&*bytes).map_err(io::Error::other)?;
        Ok(Self::of(&file))
    }

    fn of<'a, H: FileHeader<Endian = object::Endianness>>(
        file: &object::read::elf::ElfFile<'a, H>,
    ) -> Self {
        let segment = |segment: object::read::elf::ElfSegment<'a, '_, H>| {
            let (offset, len) = segment.file_range();
            (offset, len, segment.address())
        };
        let segments = file.segments().map(segment).collect();
        let symbols = file.symbols().chain(file.dynamic_symbols());
        let symbols = symbols.filter(|symbol| symbol.kind() == SymbolKind::Text);
        let named = symbols.filter_map(|symbol| {
            let name = symbol.name().ok().filter(|name| !name.is_empty())?;
            symbol.is_definition().then(|| (symbol.address(), symbol.size(), name.to_owned()))
        });
        let mut functions: Vec<_> = named.collect();
        functions.sort_unstable();
        Self { segments, functions }
    }

    fn at(&self, offset: u64) -> Option<&str> {
        let inside = |(from, len, _): &&(u64, u64, u64)| {
            offset.checked_sub(*from).is_some_and(|distance| distance < *len)
        };
        let (from, _, address) = self.segments.iter().find(inside)?;
        let address = address.checked_add(offset - from)?;
        let behind = self.functions.partition_point(|(start, ..)| *start <= address);
        // Symbols of assembly have no length.
        let covers = |(start, len, _): &&(u64, u64, String)| *len == 0 || address - start < *len;
        let before = &self.functions[..behind];
        before.iter().rev().take(4).find(covers).map(|(_, _, name)| name.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_found_by_their_place_in_the_file() {
        let functions = Functions {
            segments: vec![(0, 0x1000, 0x40_0000), (0x1000, 0x1000, 0x60_1000)],
            functions: vec![
                (0x60_1100, 0x10, "first".to_owned()),
                (0x60_1110, 0x10, "second".to_owned()),
                (0x60_1200, 0, "entry".to_owned()),
            ],
        };
        assert_eq!(functions.at(0x1105), Some("first"));
        assert_eq!(functions.at(0x1110), Some("second"));
        assert_eq!(functions.at(0x1120), None, "between functions");
        assert_eq!(functions.at(0x1234), Some("entry"));
        assert_eq!(functions.at(0x1105 - 0x1000), None, "of another segment");
        assert_eq!(functions.at(0x2000), None, "not loaded");
    }

    #[test]
    fn this_programs_own_functions_are_known() {
        let path = std::env::current_exe().expect("a program");
        let functions = Functions::read(&path).expect("an ELF file").functions;
        assert!(functions.iter().any(|(_, _, name)| name == "main"));
        assert!(Functions::read(Path::new("/")).is_err());
    }
}
