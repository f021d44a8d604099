//! From an empty machine to the host's files: modules, mounts, the new root.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io,
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, symlink},
    },
    path::Path,
};

use crate::{
    memory,
    protocol::{self, AgentRequest},
    sys::{self, MS_MOVE, MS_RDONLY},
};

/// Where the new root is put together.
const NEW: &str = "/new";

type Result<T> = std::result::Result<T, String>;

/// Kernel file systems, modules, and the connection to the host.
pub fn first() -> Result<File> {
    for (kind, target) in [("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys")] {
        mount(kind.as_bytes(), target.as_bytes(), kind, 0, "")?;
    }
    memory::set_up();
    spare_interrupts();
    load_modules()?;
    sys::connect_to_host(protocol::CONTROL).map_err(|error| {
        format!("no vsock: {error} (a kernel that is a file may need --modules)")
    })
}

/// Settings of Linux's scheduler that differ from its defaults, because an interrupt costs more on a virtual CPU than on a real one.
///
/// - `NO_HRTICK`: a process's turn ends at a tick. By default Linux 7.2 ends each turn by a timer.
/// - `NO_TTWU_QUEUE`: a CPU that wakes a program puts the program into another CPU's queue by itself. By default the other CPU does so, and
///   is interrupted for it, if the two CPUs share no cache.
const SCHEDULER: [&str; 2] = ["NO_HRTICK", "NO_TTWU_QUEUE"];

/// Has the scheduler do what [`SCHEDULER`] says.
fn spare_interrupts() {
    const DEBUG: &str = "/sys/kernel/debug";
    // A kernel without debugfs or a feature goes on by its defaults. This mount is out of sight once the root is another.
    if mount(b"debugfs", DEBUG.as_bytes(), "debugfs", 0, "").is_ok() {
        for feature in SCHEDULER {
            let _ = fs::write(format!("{DEBUG}/sched/features"), feature);
        }
    }
}

fn load_modules() -> Result<()> {
    let order = fs::read_to_string(protocol::MODULE_ORDER);
    for name in order.map_err(|error| error.to_string())?.lines() {
        let path = format!("/modules/{name}.ko");
        let image = fs::read(&path).map_err(|error| format!("{path}: {error}"))?;
        sys::load_module(&image).map_err(|error| format!("module {name}: {error}"))?;
    }
    Ok(())
}

/// The host's root below a private overlay, the shared folders, kernel file systems; then all that
/// becomes the root. Returns a mount of each shared folder for ourselves, where the kernel can.
pub fn root(request: &AgentRequest) -> Result<Vec<Option<File>>> {
    for directory in ["/lower", "/over", NEW] {
        make(directory.as_ref())?;
    }
    mount(protocol::ROOT_TAG.as_bytes(), b"/lower", "virtiofs", MS_RDONLY, "")?;
    mount(b"overlay", b"/over", "tmpfs", 0, "mode=755")?;
    make("/over/upper".as_ref())?;
    make("/over/work".as_ref())?;
    // With numbers that tell layers apart, a file has the same in its directory and by itself.
    let layers = "lowerdir=/lower,upperdir=/over/upper,workdir=/over/work,xino=on";
    mount(b"overlay", NEW.as_bytes(), "overlay", 0, layers)?;
    kernel_mounts()?;
    let folders = request.shares.iter().map(|(tag, path)| share(tag, path));
    let folders = folders.collect::<Result<_>>()?;
    read_ahead("/lower".as_ref());
    // The capabilities of the host's files are not there, for want of which ping would be root's.
    let _ = fs::write("/proc/sys/net/ipv4/ping_group_range", "0 2147483647");
    std::env::set_current_dir(NEW).map_err(|error| error.to_string())?;
    mount(b".", b"/", "", MS_MOVE, "")?;
    std::os::unix::fs::chroot(".").map_err(|error| format!("chroot: {error}"))?;
    std::env::set_current_dir("/").map_err(|error| error.to_string())?;
    sys::set_host_name("ring3");
    Ok(folders)
}

fn kernel_mounts() -> Result<()> {
    let mounts = [
        ("proc", "/proc", ""),
        ("sysfs", "/sys", ""),
        ("devtmpfs", "/dev", ""),
        ("devpts", "/dev/pts", "mode=620,gid=5,ptmxmode=666"),
        ("tmpfs", "/dev/shm", "mode=1777"),
        ("tmpfs", "/run", "mode=755"),
    ];
    for (kind, path, data) in mounts {
        let target = format!("{NEW}{path}");
        make(target.as_ref())?;
        mount(kind.as_bytes(), target.as_bytes(), kind, 0, data)?;
    }
    let links = [("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")];
    for (name, target) in links {
        // devtmpfs has only what drivers made; if one of these is there, it is as good.
        let _ = symlink(format!("/proc/self/{target}"), format!("{NEW}/dev/{name}"));
    }
    // Only some programs need it, and not every kernel has it.
    let _ = mount(b"cgroup2", format!("{NEW}/sys/fs/cgroup").as_bytes(), "cgroup2", 0, "");
    Ok(())
}

fn share(tag: &[u8], path: &[u8]) -> Result<Option<File>> {
    let target = [NEW.as_bytes(), path].concat();
    let place = Path::new(OsStr::from_bytes(&target));
    make(place)?;
    mount(tag, &target, "virtiofs", 0, "")?;
    read_ahead(place);
    Ok(sys::mount_of(&target).ok())
}

/// Has a shared folder's files be read in requests as long as its server takes. A kernel that does not let us reads in shorter ones.
fn read_ahead(place: &Path) {
    const KIB: &str = "1024";
    let Ok(device) = fs::metadata(place).map(|metadata| metadata.dev()) else { return };
    // A file system without a device of its own has major number 0.
    let minor = device & 0xff | device >> 12 & !0xff;
    let setting = format!("/sys/class/bdi/0:{minor}/read_ahead_kb");
    let _ = fs::write(setting, KIB);
}

fn make(path: &Path) -> Result<()> {
    match fs::create_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(format!("{}: {error}", path.display()))
        }
        _ => Ok(()),
    }
}

fn mount(source: &[u8], target: &[u8], kind: &str, flags: u64, data: &str) -> Result<()> {
    sys::mount_at(source, target, kind, flags, data)
        .map_err(|error| format!("mount {}: {error}", String::from_utf8_lossy(target)))
}
