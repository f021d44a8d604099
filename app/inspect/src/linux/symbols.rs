//! kallsyms: names of the kernel's symbols, packed by a table of tokens (scripts/kallsyms.c).

use std::{
    collections::{BTreeMap, HashMap},
    ops::Range,
};

use super::KernelError;
use crate::{memory::KernelMemory, vmcoreinfo::VmCoreInfo};

/// Symbols at the most: a kernel has some 150 000.
const MOST: u32 = 2_000_000;
/// Bytes of all packed names at the most.
const MOST_BYTES: u64 = 32 << 20;
/// Bytes of the tokens at the most: 256 of them.
const TOKENS: u64 = 64 << 10;
/// Bytes of a name, of which Linux allows 512, and of all names, at the most: a kernel has some four million.
const MOST_NAME: usize = 1 << 10;
const MOST_NAMES: usize = 32 << 20;
/// Addresses below this are those of per-CPU variables, counted from a CPU's own.
const PER_CPU: u64 = 1 << 32;

/// From this release on the table may have no `kallsyms_relative_base`.
const WITHOUT_BASE: [u32; 2] = [7, 1];

/// The kernel's symbols.
pub struct Symbols {
    by_name: HashMap<String, u64>,
    by_address: BTreeMap<u64, String>,
}

/// The addresses of the parts of kallsyms (GVA).
struct KallsymsLayout {
    names: u64,
    count: u64,
    tokens: u64,
    index: u64,
    offsets: u64,
    /// What offsets are counted from; without it each is counted from its own place.
    base: Option<u64>,
}

impl KallsymsLayout {
    fn of(info: &VmCoreInfo) -> Result<Self, KernelError> {
        let symbol = |key: &'static str, name| info.symbol(name).ok_or(KernelError::Key(key));
        Ok(Self {
            names: symbol("SYMBOL(kallsyms_names)", "kallsyms_names")?,
            count: symbol("SYMBOL(kallsyms_num_syms)", "kallsyms_num_syms")?,
            tokens: symbol("SYMBOL(kallsyms_token_table)", "kallsyms_token_table")?,
            index: symbol("SYMBOL(kallsyms_token_index)", "kallsyms_token_index")?,
            offsets: symbol("SYMBOL(kallsyms_offsets)", "kallsyms_offsets")?,
            base: match symbol("SYMBOL(kallsyms_relative_base)", "kallsyms_relative_base") {
                Err(_) if release(info) >= WITHOUT_BASE => None,
                base => Some(base?),
            },
        })
    }
}

/// Major and minor number of the kernel's release, as far as it has them.
fn release(info: &VmCoreInfo) -> [u32; 2] {
    let mut numbers = info.release().split(|c: char| !c.is_ascii_digit()).map(str::parse);
    [(); 2].map(|()| numbers.next().and_then(Result::ok).unwrap_or(0))
}

/// The table as it lies in memory.
struct Table {
    names: Vec<u8>,
    tokens: Vec<u8>,
    index: Vec<u8>,
    offsets: Vec<u8>,
    /// What offsets are counted from.
    base: OffsetBase,
}

/// What offsets are counted from.
#[derive(Clone, Copy)]
enum OffsetBase {
    /// An address.
    One(u64),
    /// The place of each offset in memory. This is the place of the first (GVA).
    Own(u64),
}

impl Symbols {
    /// Reads them.
    pub(super) fn read(memory: KernelMemory<'_>, info: &VmCoreInfo) -> Result<Self, KernelError> {
        let table = Table::read(memory, &KallsymsLayout::of(info)?)?;
        let start = info.symbol("_stext").ok_or(KernelError::Key("SYMBOL(_stext)"))?;
        // Two ways to say an address have been in use; this symbol tells which it is.
        let found = [true, false].map(|signed| table.symbols(signed));
        let right = |symbols: &Vec<(String, u64)>| {
            symbols.iter().any(|(name, address)| name == "_stext" && *address == start)
        };
        let symbols = found.into_iter().find(right);
        let symbols = symbols.ok_or(KernelError::Symbols("its addresses are not what is known"))?;
        let by_address = symbols.iter().map(|(name, address)| (*address, name.clone()));
        Ok(Self { by_address: by_address.collect(), by_name: symbols.into_iter().collect() })
    }

    /// The address of a symbol; of a per-CPU one, its place among a CPU's.
    pub fn find(&self, name: &str) -> Option<u64> {
        self.by_name.get(name).copied()
    }

    /// The same, or what is missing.
    pub(super) fn require(&self, name: &str) -> Result<u64, KernelError> {
        self.find(name).ok_or_else(|| KernelError::Symbol(name.to_owned()))
    }

    /// The symbol before an address, and how far before.
    pub fn before(&self, address: u64) -> Option<(&str, u64)> {
        let (at, name) = self.last_until(address)?;
        Some((name, address - at))
    }

    /// The last symbol that is at an address or before, behind those of per-CPU variables.
    fn last_until(&self, address: u64) -> Option<(u64, &str)> {
        let (at, name) = self.by_address.range(..=address).next_back()?;
        (*at >= PER_CPU).then_some((*at, name))
    }

    /// From the symbol before an address to the next one: a function, with what is between it and the next.
    pub fn around(&self, address: u64) -> Option<Range<u64>> {
        let (start, _) = self.last_until(address)?;
        let (end, _) = self.by_address.range(address.checked_add(1)?..).next()?;
        Some(start..*end)
    }

    /// Symbols whose names begin so, and their addresses.
    pub fn starting<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, u64)> {
        let named = self.by_name.iter().filter(move |(name, _)| name.starts_with(prefix));
        named.map(|(name, address)| (name.as_str(), *address))
    }
}

impl Table {
    fn read(memory: KernelMemory<'_>, places: &KallsymsLayout) -> Result<Self, KernelError> {
        let bytes = |gva, len: u64| {
            let mut bytes = vec![0; len as usize];
            let read = memory.read(gva, &mut bytes) == bytes.len();
            read.then_some(bytes).ok_or(KernelError::Symbols("it is not all in memory"))
        };
        let word = |gva| memory.word(gva).ok_or(KernelError::Symbols("it is not in memory"));
        let count = word(places.count)? as u32;
        let len = places.tokens.checked_sub(places.names).filter(|len| *len <= MOST_BYTES);
        let len = len.ok_or(KernelError::Symbols("its parts are in another order"))?;
        if count > MOST {
            return Err(KernelError::Symbols("it is too long"));
        }
        let tokens = places.index.checked_sub(places.tokens).filter(|len| *len <= TOKENS);
        Ok(Self {
            names: bytes(places.names, len)?,
            tokens: bytes(places.tokens, tokens.unwrap_or(TOKENS))?,
            index: bytes(places.index, 512)?,
            offsets: bytes(places.offsets, u64::from(count) * 4)?,
            base: match places.base {
                Some(place) => OffsetBase::One(word(place)?),
                None => OffsetBase::Own(places.offsets),
            },
        })
    }

    /// Names and addresses. Where addresses are `signed`, those that are not negative are absolute.
    fn symbols(&self, signed: bool) -> Vec<(String, u64)> {
        let (mut rest, mut room) = (&self.names[..], MOST_NAMES);
        let offsets = self.offsets.as_chunks::<4>().0;
        let next = |(n, offset): (u64, &[u8; 4])| {
            let (name, offset) = (self.name(&mut rest)?, u32::from_le_bytes(*offset));
            room = room.checked_sub(name.len())?;
            let address = match self.base {
                OffsetBase::One(base) => address(base, offset, signed),
                OffsetBase::Own(first) => {
                    first.wrapping_add(4 * n).wrapping_add_signed((offset as i32).into())
                }
            };
            Some((name, address))
        };
        (0..).zip(offsets).map_while(next).collect()
    }

    /// Takes the next name, without the letter of its type.
    fn name(&self, rest: &mut &[u8]) -> Option<String> {
        let (first, behind) = rest.split_first()?;
        let (len, behind) = match first & 0x80 {
            0 => (usize::from(*first), behind),
            // Names that are packed into more than 127 tokens.
            _ => {
                let (second, behind) = behind.split_first()?;
                (usize::from(first & 0x7f) | usize::from(*second) << 7, behind)
            }
        };
        let (packed, behind) = behind.split_at_checked(len)?;
        *rest = behind;
        let bytes = packed.iter().flat_map(|token| self.token(*token)).copied();
        let bytes: Vec<u8> = bytes.take(MOST_NAME).collect();
        Some(String::from_utf8_lossy(bytes.get(1..)?).into_owned())
    }

    fn token(&self, number: u8) -> &[u8] {
        let at = usize::from(number) * 2;
        let at = u16::from_le_bytes([self.index[at], self.index[at + 1]]);
        let token = self.tokens.get(at.into()..).unwrap_or_default();
        token.split(|byte| *byte == 0).next().unwrap_or_default()
    }
}

/// Where offsets are `signed`, those that are not negative are absolute addresses.
fn address(base: u64, offset: u32, signed: bool) -> u64 {
    match offset as i32 {
        offset if signed && offset < 0 => {
            base.wrapping_sub(1).wrapping_add(u64::from(offset.unsigned_abs()))
        }
        _ if signed => offset.into(),
        _ => base.wrapping_add(offset.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Token n is one letter but the first two.
    fn table() -> Table {
        let (mut tokens, mut index) = (Vec::new(), Vec::new());
        for number in 0..=255u8 {
            index.extend((tokens.len() as u16).to_le_bytes());
            match number {
                0 => tokens.extend(b"T_st"),
                1 => tokens.extend(b"ext"),
                _ => tokens.push(number),
            }
            tokens.push(0);
        }
        let names = [&[2, 0, 1][..], &[3, b'D', b'x', b'y'], &[0x83, 0, b'A', b'p', b'c']].concat();
        let offsets = [-1i32, -0x101, 0x20].map(i32::to_le_bytes).concat();
        let base = OffsetBase::One(0xffff_ffff_8100_0000);
        Table { names, tokens, index, offsets, base }
    }

    #[test]
    fn names_are_unpacked() {
        let symbols = table().symbols(true);
        let named = |name: &str| symbols.iter().find(|(known, _)| known == name).map(|s| s.1);
        assert_eq!(named("_stext"), Some(0xffff_ffff_8100_0000));
        assert_eq!(named("xy"), Some(0xffff_ffff_8100_0100));
        assert_eq!(named("pc"), Some(0x20), "a per-CPU variable, with a long length");
    }

    #[test]
    fn addresses_of_no_symbol_have_none_before_them() {
        let by_address = table().symbols(true).into_iter().map(|(name, at)| (at, name)).collect();
        let symbols = Symbols { by_name: HashMap::new(), by_address };
        assert_eq!(symbols.before(0xffff_ffff_8100_0003), Some(("_stext", 3)));
        for low in [0, 0x1000, PER_CPU, PER_CPU + 1] {
            assert_eq!((symbols.before(low), symbols.around(low)), (None, None), "{low:#x}");
        }
    }

    #[test]
    fn an_offset_may_be_counted_from_its_own_place() {
        let own = Table { base: OffsetBase::Own(0xffff_ffff_8200_0000), ..table() };
        let symbols = own.symbols(true);
        let addresses: Vec<u64> = symbols.iter().map(|(_, address)| *address).collect();
        let expected = [0xffff_ffff_81ff_ffff, 0xffff_ffff_81ff_ff03, 0xffff_ffff_8200_0028];
        assert_eq!(addresses, expected);
    }

    #[test]
    fn an_older_kernel_must_say_what_offsets_are_counted_from() {
        let places = |release: &str, base: &str| {
            let symbols = ["names", "num_syms", "token_table", "token_index", "offsets"];
            let symbols = symbols.map(|name| format!("SYMBOL(kallsyms_{name})=ff000000\n"));
            let text = format!("OSRELEASE={release}\n{}{base}", symbols.concat());
            KallsymsLayout::of(&VmCoreInfo::of_text(text.as_bytes()).expect("sound"))
        };
        let missing = KernelError::Key("SYMBOL(kallsyms_relative_base)");
        for old in ["6.12.9+deb13-cloud-amd64", "7.0.11", "7", "unknown"] {
            assert_eq!(places(old, "").map(|_| ()), Err(missing.clone()), "{old}");
        }
        for new in ["7.1.0-rc1", "7.2.4+deb14-cloud-amd64", "8.0", "10.0"] {
            assert_eq!(places(new, "").expect("known").base, None, "{new}");
        }
        let base = "SYMBOL(kallsyms_relative_base)=ff100000\n";
        assert_eq!(places("6.1.0", base).expect("known").base, Some(0xff10_0000));
        assert_eq!(places("7.2.4", base).expect("known").base, Some(0xff10_0000));
    }

    #[test]
    fn a_table_of_garbage_ends() {
        let mut table = table();
        table.names = vec![0xff; 9];
        assert!(table.symbols(true).is_empty(), "a name longer than all there is");
        table.names = vec![1; 6];
        table.index = vec![0xff; 512];
        assert!(table.symbols(true).is_empty(), "tokens behind the table's end");
    }

    /// Sixty thousand times as much would be unpacked of what is read.
    #[test]
    fn names_that_grow_when_they_are_unpacked_have_a_limit() {
        const COUNT: usize = 50_000;
        let mut table = table();
        table.tokens = vec![b'T'; TOKENS as usize];
        table.index = vec![0; 512];
        table.names = [4, 0, 0, 0, 0].repeat(COUNT);
        table.offsets = vec![0; 4 * COUNT];
        let bytes: usize = table.symbols(true).iter().map(|(name, _)| name.len()).sum();
        assert!((MOST_NAMES / 2..=MOST_NAMES).contains(&bytes), "{bytes}");
    }
}
