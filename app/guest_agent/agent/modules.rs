//! The kernel's modules as a machine has them: its folder, the devices whose drivers are loaded when they are opened, and what the kernel calls
//! to have a module loaded, if there is no modprobe.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use crate::{
    lists::{LazyDevice, Lists},
    sys,
};

/// The kernel's name, by which its folder is called.
const RELEASE: &str = "/proc/sys/kernel/osrelease";
/// What the kernel calls to have a module loaded.
const HELPER: &str = "/proc/sys/kernel/modprobe";
/// Where this program is if that is not there.
const OURS: &str = "/run/ring3-modprobe";
const EEXIST: i32 = 17;
const CHARACTERS: u32 = 0o020_000;
const BLOCKS: u32 = 0o060_000;
/// Devices that all may open; systemd's rules say so (`50-udev-default.rules`).
const FOR_ALL: [&str; 3] = ["fuse", "net/tun", "vfio/vfio"];

/// Shows the folder of modules where programs look for modules, if there is a folder, and makes the devices that it lists. The
/// guest's new root must be in place.
pub fn prepare(folder: &[u8]) -> io::Result<()> {
    let shown = if folder.is_empty() { Ok(()) } else { show(folder) };
    for name in FOR_ALL {
        // What is not there needs no rights.
        let _ = fs::set_permissions(format!("/dev/{name}"), fs::Permissions::from_mode(0o666));
    }
    shown
}

fn show(folder: &[u8]) -> io::Result<()> {
    let place = place()?;
    fs::create_dir_all(&place)?;
    sys::bind_read_only(folder, place.as_os_str().as_encoded_bytes())?;
    let devices = fs::read_to_string(place.join("modules.devname")).unwrap_or_default();
    devices.lines().filter_map(LazyDevice::parse).for_each(|device| make(&device));
    help()
}

/// Where the program that the kernel calls is not there, it calls this one.
fn help() -> io::Result<()> {
    let helper = fs::read_to_string(HELPER)?;
    let helper = helper.trim();
    if helper.is_empty() || Path::new(helper).exists() {
        return Ok(());
    }
    fs::copy("/proc/self/exe", OURS)?;
    fs::set_permissions(OURS, fs::Permissions::from_mode(0o755))?;
    fs::write(HELPER, OURS)
}

/// `/lib/modules/RELEASE`.
fn place() -> io::Result<PathBuf> {
    Ok(Path::new("/lib/modules").join(fs::read_to_string(RELEASE)?.trim()))
}

/// One that is there already is its driver's.
fn make(device: &LazyDevice<'_>) {
    let path = format!("/dev/{}", device.name);
    let _ = Path::new(&path).parent().map(fs::create_dir_all);
    let kind = if device.is_block { BLOCKS } else { CHARACTERS };
    let _ = sys::make_node(&path, kind | 0o600, device.major, device.minor);
}

/// What the kernel calls: `modprobe -q -- NAME`. Whether all was loaded that has the name.
pub fn load(name: &str) -> io::Result<bool> {
    let place = place()?;
    let depends = fs::read_to_string(place.join("modules.dep"))?;
    let aliases = fs::read_to_string(place.join("modules.alias")).unwrap_or_default();
    let lists = Lists { depends: &depends, aliases: &aliases };
    let lines = lists.lines(name);
    for line in &lines {
        let (file, needed) = line.split_once(':').unwrap_or((line, ""));
        for file in needed.split_whitespace().rev().chain([file]) {
            insert(&place.join(file))?;
        }
    }
    Ok(!lines.is_empty())
}

fn insert(path: &Path) -> io::Result<()> {
    let is_packed = path.extension().is_none_or(|extension| extension != "ko");
    match sys::load_module_file(&File::open(path)?, is_packed) {
        Err(error) if error.raw_os_error() != Some(EEXIST) => Err(error),
        _ => Ok(()),
    }
}
