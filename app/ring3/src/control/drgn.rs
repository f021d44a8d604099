//! `ring3 drgn`: drgn at a machine that runs. drgn reads guest memory from the file that is the machine's RAM, and the
//! machine goes on.

use std::{
    ffi::OsString,
    fmt::Write as _,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    process::Command,
};

use clap::Args;
use inspect::core_file::Segment;

use super::{Target, client, dump};
use crate::failure::Failure;

/// Arguments of `ring3 drgn`: the machine, and what drgn does with it.
#[derive(Debug, Args)]
pub struct DrgnArguments {
    /// Which machine
    #[command(flatten)]
    pub target: Target,
    /// A Python script for drgn, in which `prog` is the machine; without a script drgn shows a prompt
    #[arg(long, value_name = "FILE")]
    pub script: Option<PathBuf>,
    /// Options of drgn, such as -s vmlinux: the kernel with its debug symbols
    #[arg(last = true)]
    pub arguments: Vec<OsString>,
}

/// `ring3 drgn`.
pub fn drgn(arguments: &DrgnArguments) -> Result<u8, Failure> {
    let host = |error: io::Error| Failure::host(format!("drgn: {error}"));
    let pid = client::find(&arguments.target)?.pid;
    let ram = ram_of(pid).map_err(host)?;
    File::open(&ram)
        .map_err(|error| Failure::host(format!("the RAM of machine {pid}: {error}")))?;
    let folder = tempfile::tempdir().map_err(host)?;
    let (core, program) = (folder.path().join("core"), folder.path().join("live.py"));
    let mut hollow = File::create(&core).map_err(host)?;
    let segments = dump::hollow(&arguments.target, &mut hollow)?;
    let text = program_of(&ram, &segments, arguments.script.as_deref());
    fs::write(&program, text).map_err(host)?;
    let mut command = Command::new("drgn");
    command.arg("-q").arg("-c").arg(&core).args(&arguments.arguments).arg(&program);
    let status = command.status();
    let status = status.map_err(|error| {
        Failure::host(format!("drgn: {error}; its package is called python3-drgn or drgn"))
    })?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// The RAM of a machine: the largest of its files of that name. Others are of ROMs.
fn ram_of(pid: u32) -> io::Result<PathBuf> {
    let name = format!("/memfd:{}", ram::OBJECT);
    let mut found = None;
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        let path = entry.path();
        let is_ram = |of: PathBuf| of.to_string_lossy().starts_with(&name);
        if fs::read_link(&path).is_ok_and(is_ram) {
            found = found.max(Some((fs::metadata(&path)?.len(), path)));
        }
    }
    let missing = || io::Error::other(format!("process {pid} has no file of RAM"));
    found.map(|(_, path)| path).ok_or_else(missing)
}

/// The Python program that drgn is started with. It has drgn read guest memory from the file `ram`, and then runs the
/// user's script or shows a prompt.
fn program_of(ram: &Path, segments: &[Segment], script: Option<&Path>) -> String {
    let mut text = format!(
        "import os\nram = os.open({:?}, os.O_RDONLY)\n\
         def memory(first, length, at, physical):\n    \
         prog.add_memory_segment(first, length, lambda a, n, o, p: os.pread(ram, n, at + o), physical)\n",
        ram.display().to_string()
    );
    for Segment { gva, gpa, len, at } in segments {
        let (first, physical) = if *gva == 0 { (gpa, "True") } else { (gva, "False") };
        let _ = writeln!(text, "memory({first:#x}, {len:#x}, {at:#x}, {physical})"); // a String takes all
    }
    match script {
        Some(script) => {
            let script = script.display().to_string();
            let _ = write!(
                text,
                "import runpy\nrunpy.run_path({script:?}, {{'prog': prog}}, '__main__')\n"
            );
        }
        None => text.push_str(
            "try:\n    from drgn.cli import run_interactive\n    run_interactive(prog)\n\
             except ImportError:\n    import code, drgn\n    \
             code.interact('prog is the machine', local={'prog': prog, 'drgn': drgn})\n",
        ),
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_where_it_lies() {
        let gva = 0xffff_ffff_8100_0000;
        let image = Segment { gva, gpa: 0x100_0000, len: 0x1000, at: 0x100_0000 };
        let high = Segment { gva: 0, gpa: 1 << 32, len: 0x2000, at: 0x8000_0000 };
        let text = program_of(Path::new("/proc/7/fd/4"), &[image, high], Some(Path::new("a 'b'")));
        assert!(text.contains("memory(0xffffffff81000000, 0x1000, 0x1000000, False)"), "{text}");
        assert!(text.contains("memory(0x100000000, 0x2000, 0x80000000, True)"), "{text}");
        assert!(text.contains("run_path(\"a 'b'\", {'prog': prog}"), "{text}");
    }
}
