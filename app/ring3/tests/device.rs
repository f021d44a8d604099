//! What the processes of devices have of the one that started the machine: nothing but what they are for.

mod tiny;

use std::{
    fs::{self, File},
    os::fd::AsRawFd,
    path::PathBuf,
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::io::{FdFlags, fcntl_setfd};
use tiny::{LONG, kernel, ring3};

const PATIENCE: Duration = Duration::from_secs(10);
const SECRET: &str = "RING3_TEST_SECRET";

/// Ends the machine, whatever becomes of the test.
struct Machine(Child);

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The processes of a machine's devices, once there are so many.
fn devices(parent: u32, count: usize) -> Vec<u32> {
    let started = Instant::now();
    loop {
        let all = fs::read_dir("/proc").expect("listed").flatten();
        let numbers = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let found: Vec<u32> = numbers.filter(|pid| is_device(*pid, parent)).collect();
        if found.len() >= count {
            return found;
        }
        assert!(started.elapsed() < PATIENCE, "{found:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// It is a device's of that parent, and has shut itself in.
fn is_device(pid: u32, parent: u32) -> bool {
    let read = |name| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let status = read("status");
    read("cmdline").starts_with("ring3\0device\0")
        && status.contains(&format!("PPid:\t{parent}\n"))
        && status.contains("Seccomp:\t2\n")
}

/// Files it has open that have a name on a disk.
fn open_files(pid: u32) -> Vec<PathBuf> {
    let links = fs::read_dir(format!("/proc/{pid}/fd")).expect("listed").flatten();
    let files = links.filter_map(|link| fs::read_link(link.path()).ok());
    files.filter(|path| path.starts_with("/") && !path.starts_with("/memfd:")).collect()
}

#[test]
fn a_device_inherits_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let [disk, secret] = ["disk.img", "secret"].map(|name| folder.path().join(name));
    fs::write(&disk, [0; 512]).expect("written");
    fs::write(&secret, "secret").expect("written");
    let shared = folder.path().join("shared");
    fs::create_dir(&shared).expect("made");
    // Whoever starts the machine has left this open.
    let open = File::open(&secret).expect("opened");
    fcntl_setfd(&open, FdFlags::empty()).expect("inherited");
    let kernel = kernel(tiny::SPIN);
    let mut command = ring3(&kernel, LONG);
    command.args(["--console", "none", "--net", "user", "--disk"]).arg(&disk);
    command.arg("--share").arg(format!("{}:work", shared.display()));
    command.env(SECRET, "secret").stderr(Stdio::null());
    let machine = Machine(command.spawn().expect("ring3 starts"));
    let inherited = open_files(machine.0.id());
    assert!(inherited.contains(&secret), "descriptor {} of {inherited:?}", open.as_raw_fd());
    for device in devices(machine.0.id(), 3) {
        let environment = fs::read(format!("/proc/{device}/environ")).expect("read");
        let environment = String::from_utf8_lossy(&environment).into_owned();
        assert!(!environment.contains(SECRET) && !environment.contains("PATH="), "{environment}");
        let files = open_files(device);
        assert!(!files.contains(&secret), "{files:?}");
        let status = fs::read_to_string(format!("/proc/{device}/status")).expect("read");
        let command = fs::read_to_string(format!("/proc/{device}/cmdline")).expect("read");
        // A folder's keeps those that concern files and their owners, if it had any.
        if !command.contains("\0share\0") {
            for set in ["CapInh", "CapPrm", "CapEff"] {
                assert!(
                    status.contains(&format!("{set}:\t0000000000000000\n")),
                    "{command} {status}"
                );
            }
        }
        assert!(status.contains("NoNewPrivs:\t1\n"), "{command} {status}");
    }
}
