//! `ring3 perf-map`: files by which the host's perf names the functions of a guest's kernel.
//!
//! All processes of a machine execute its kernel's translated code from one memory object. perf takes that for a file, with a name of
//! its own, and looks for this file's symbols below `--symfs`: there it finds an ELF file that has them by offsets in the object. A
//! perf map, which perf reads for memory without a file only, has the same by addresses, for other tools.

use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    os::unix::{fs::symlink, net::UnixStream},
    path::{Path, PathBuf},
};

use clap::Args;
use inspect::code_map::{self, CodeLine, FunctionCode, KERNEL_CODE_OBJECT};
use object::{
    Endianness, elf,
    write::{
        StringId,
        elf::{FileHeader, SectionHeader, SectionIndex, Sym, Writer},
    },
};
use vmm::Inspector;

use super::{ControlOrder, Target, client, watched};
use crate::failure::Failure;

/// Which machine, and where its symbols go.
#[derive(Debug, Args)]
pub struct PerfMapArguments {
    /// Which machine
    #[command(flatten)]
    pub target: Target,
    /// The folder for `perf report --symfs`, which is made if need be; what runs beside the guest keeps its names
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
}

/// The machine's side.
pub(super) fn send(inspector: &Inspector, client: &UnixStream) -> io::Result<()> {
    let mut writer = BufWriter::new(client);
    code_map::send(inspector, &mut writer)?;
    writer.flush()
}

/// `ring3 perf-map`.
pub fn perf_map(arguments: &PerfMapArguments) -> Result<u8, Failure> {
    let folder = &arguments.folder;
    let wrong = |error: io::Error| Failure::host(format!("{}: {error}", folder.display()));
    let pid = client::find(&arguments.target)?.pid;
    let functions = ask(&arguments.target)?;
    fs::create_dir_all(folder).map_err(wrong)?;
    link_to_root(folder).map_err(wrong)?;
    let object = folder.join(format!("memfd:{KERNEL_CODE_OBJECT} (deleted)"));
    fs::write(object, symbols(&functions).map_err(wrong)?).map_err(wrong)?;
    let map = File::create(folder.join(format!("perf-{pid}.map"))).map_err(wrong)?;
    write_map(&functions, BufWriter::new(map)).map_err(wrong)?;
    Ok(0)
}

fn ask(target: &Target) -> Result<Vec<FunctionCode>, Failure> {
    let mut machine = client::connect(target, ControlOrder::Code)?;
    let (mut functions, mut is_all) = (Vec::new(), false);
    watched::each_line(&mut machine, |line| {
        match line {
            CodeLine::Function(function) => functions.push(function),
            CodeLine::End => is_all = true,
            CodeLine::Error(problem) => return Err(Failure::host(problem)),
        }
        Ok(())
    })?;
    let ended = || Failure::host(format!("machine {} has ended", target.machine));
    is_all.then_some(functions).ok_or_else(ended)
}

/// With `--symfs` perf looks for all files there: those of the host, too.
fn link_to_root(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir("/")?.flatten() {
        match symlink(entry.path(), folder.join(entry.file_name())) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// The format of perf's documentation (tools/perf/Documentation/jit-interface.txt).
fn write_map(functions: &[FunctionCode], mut map: impl Write) -> io::Result<()> {
    for FunctionCode { hva, len, symbol, .. } in functions {
        writeln!(map, "{hva:x} {len:x} {symbol}")?;
    }
    map.flush()
}

/// An ELF file with no code and these symbols: a function at each offset.
fn symbols(functions: &[FunctionCode]) -> io::Result<Vec<u8>> {
    let mut file = Vec::new();
    let mut writer = Writer::new(Endianness::Little, true, &mut file);
    writer.reserve_null_section_index();
    let name = writer.add_section_name(b".text");
    let text = writer.reserve_section_index();
    let names = reserve(&mut writer, functions, text);
    writer.write_file_header(&FILE).map_err(io::Error::other)?;
    writer.write_null_symbol();
    for (function, name) in functions.iter().zip(names) {
        writer.write_symbol(&symbol(function, name, text));
    }
    writer.write_strtab();
    writer.write_shstrtab();
    writer.write_null_section_header();
    let len = functions.last().map_or(0, |last| last.offset + last.len);
    writer.write_section_header(&SectionHeader { name: Some(name), sh_size: len, ..TEXT });
    writer.write_symtab_section_header(1);
    writer.write_strtab_section_header();
    writer.write_shstrtab_section_header();
    Ok(file)
}

/// Says what comes after the section of code: the symbols, whose names are returned, and the tables.
fn reserve<'a>(
    writer: &mut Writer<'a>,
    functions: &'a [FunctionCode],
    text: SectionIndex,
) -> Vec<StringId> {
    writer.reserve_symtab_section_index();
    writer.reserve_strtab_section_index();
    writer.reserve_shstrtab_section_index();
    writer.reserve_file_header();
    writer.reserve_null_symbol_index();
    let add = |function: &'a FunctionCode| {
        writer.reserve_symbol_index(Some(text));
        writer.add_string(function.symbol.as_bytes())
    };
    let names = functions.iter().map(add).collect();
    writer.reserve_symtab();
    writer.reserve_strtab();
    writer.reserve_shstrtab();
    writer.reserve_section_headers();
    names
}

const FILE: FileHeader = FileHeader {
    os_abi: elf::ELFOSABI_NONE,
    abi_version: 0,
    e_type: elf::ET_DYN,
    e_machine: elf::EM_X86_64,
    e_entry: 0,
    e_flags: 0,
};

/// A section of code that is not in the file. Its addresses are offsets in the memory object.
const TEXT: SectionHeader = SectionHeader {
    name: None,
    sh_type: elf::SHT_NOBITS,
    sh_flags: (elf::SHF_ALLOC | elf::SHF_EXECINSTR) as u64,
    sh_addr: 0,
    sh_offset: 0,
    sh_size: 0,
    sh_link: 0,
    sh_info: 0,
    sh_addralign: 16,
    sh_entsize: 0,
};

fn symbol(function: &FunctionCode, name: StringId, text: SectionIndex) -> Sym {
    Sym {
        name: Some(name),
        section: Some(text),
        st_info: (elf::STB_GLOBAL << 4) | elf::STT_FUNC,
        st_other: 0,
        st_shndx: 0,
        st_value: function.offset,
        st_size: function.len,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use object::{Object, ObjectSection, ObjectSymbol};

    fn functions() -> [FunctionCode; 2] {
        let function = |offset, symbol: &str| {
            let (hva, symbol) = (0x7f00_0000_0000 + offset, symbol.to_owned());
            FunctionCode { hva, offset, len: 0x20, symbol }
        };
        [function(0x100, "vfs_read"), function(0x140, "[module]")]
    }

    #[test]
    fn a_map_has_start_length_and_name_in_hexadecimal() {
        let mut map = Vec::new();
        write_map(&functions(), &mut map).expect("written");
        let expected = "7f0000000100 20 vfs_read\n7f0000000140 20 [module]\n";
        assert_eq!(String::from_utf8(map).expect("text"), expected);
    }

    #[test]
    fn symbols_are_offsets_in_the_memory_object() {
        let file = symbols(&functions()).expect("made");
        let file = object::File::parse(&*file).expect("an ELF file");
        let symbols =
            file.symbols().map(|one| (one.name().expect("text"), one.address(), one.size()));
        assert_eq!(
            symbols.collect::<Vec<_>>(),
            [("vfs_read", 0x100, 0x20), ("[module]", 0x140, 0x20)]
        );
        let text = file.section_by_name(".text").expect("it is there");
        assert_eq!((text.address(), text.size()), (0, 0x160));
    }

    #[test]
    fn files_of_the_host_are_found_below_the_folder() {
        let folder = tempfile::tempdir().expect("a folder");
        for _ in 0..2 {
            link_to_root(folder.path()).expect("linked, and again");
        }
        assert!(folder.path().join("proc/self/status").exists());
    }
}
