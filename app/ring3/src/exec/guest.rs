//! What the guest is made of: the request to its agent, its first root file system, its folders.

use std::{
    env,
    ffi::OsString,
    io, iter,
    os::unix::{ffi::OsStrExt, net::UnixStream},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

use guest_agent::{
    AGENT, protocol,
    protocol::{AgentRequest, Limit},
};
use host_linux::{inherited, terminal, user};
use kernels::{cpio::CpioArchive, modules::Module};
use sharedfs::{Folder, Keeping};
use sockets::Sockets;
use virtio::vsock::{self, Vsock};
use vmm::{Attachment, BootProtocol, Description, GuestClock, ModuleFile};

use super::{
    arguments::Guest,
    kernel::{self, GuestKernel},
    streams::StreamPlan,
};
use crate::{
    description,
    failure::Failure,
    net,
    share::{self, ServedFolder, ShareArgument},
    values::{DevicesChoice, GuestIsolation},
};

/// The guest's address on vsock.
const CID: u64 = 3;
/// Quiet, at once dead if dead, and without what only costs time in a machine of a minute: probing for what it does
/// not have, the kernel's tests of its own ciphers, and taking the LOCK prefixes out of its code for its one CPU, ten thousand
/// changes of code (more than half a second). Its time goes as the host's wall clock, not as the time-stamp counter. Programs are
/// not at random addresses, so a program can use the host's mappings that the last program left at the same addresses.
const CMDLINE: &str = "console=ttyS0 quiet loglevel=3 panic=-1 random.trust_cpu=on \
                       tsc=reliable clocksource=kvm-clock \
                       no_timer_check mitigations=off nowatchdog 8250.nr_uarts=1 \
                       noreplace-smp norandmaps pnpacpi=off cryptomgr.notests=1 \
                       initcall_blacklist=crypto_kdf108_init";
/// Variables passed on without being asked for.
const PASSED: [&str; 10] =
    ["PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "COLORTERM", "TZ", "EDITOR", "LANG"];
/// The agent starts the further virtual CPUs (`guest_agent/agent/cpus.rs`).
const ONE_CPU: &str = "maxcpus=1";
const DEFAULT_SHELL: &str = "/bin/sh";
/// Linux lets no process have more (`fs.nr_open`, as it comes).
const MOST_DESCRIPTORS: u64 = 1 << 20;

/// What is to be run.
#[derive(Clone, Copy)]
pub enum GuestCommand<'a> {
    /// This.
    Given(&'a [OsString]),
    /// The user's shell.
    Shell,
}

/// A guest to be built.
pub struct Made {
    pub description: Description,
    pub attachments: Vec<Attachment>,
    /// Who is to be told what the host changes in folders, by the port to listen at.
    pub listeners: Vec<(u32, UnixStream)>,
}

/// Describes the guest and opens what it shares.
pub fn make(
    arguments: &Guest,
    command: GuestCommand<'_>,
    streams: &StreamPlan,
) -> Result<Made, Failure> {
    description::check_machine(arguments.cpus, arguments.memory, &arguments.engine)?;
    if arguments.net.as_ref().is_some_and(|net| !net.is_user()) {
        return Err(Failure::usage("--net: there is only user here; `ring3 run` has the others"));
    }
    let directory = env::current_dir().map_err(|error| {
        Failure::host(format!("the current folder: {error}; change to another"))
    })?;
    let folders = writable(arguments, &directory)?;
    let mut request = request(arguments, command, &directory, &folders, streams)?;
    let devices = arguments.devices.beside(arguments.cpus);
    let (kernel, mut shared) = kernel_and_shares(arguments, &folders, devices)?;
    // The first is the root.
    let listeners = (protocol::CHANGES..).zip(shared.iter_mut().skip(1));
    let listeners = listeners.filter_map(|(port, shared)| Some((port, shared.listener.take()?)));
    let listeners = listeners.collect();
    let attachments = shared.into_iter().map(|shared| shared.attachment);
    let network = net::attach(arguments.net.as_slice(), devices, arguments.cpus, None)?;
    let attachments = attachments.chain(network).collect();
    let tree = kernel.tree.unwrap_or_default();
    request.modules = tree.into_os_string().into_encoded_bytes();
    let initrd = first_root(&request, &kernel.modules);
    let description = Description {
        kernel: kernel.image,
        unpacked: kernel.unpacked,
        modules: vec![ModuleFile { data: initrd, cmdline: String::new() }],
        cmdline: cmdline(arguments),
        protocol: BootProtocol::Auto,
        memory: arguments.memory.0,
        cpus: arguments.cpus,
        engine: description::engine(&arguments.engine, GuestIsolation::Fast)?,
        test_devices: false,
        clock: GuestClock::Led, // the agent sets the guest's
        paravirt: arguments.engine.paravirt.0,
    };
    Ok(Made { description, attachments, listeners })
}

/// The devices of what the guest sees of the host.
fn shares(
    arguments: &Guest,
    folders: &[PathBuf],
    devices: DevicesChoice,
) -> Result<Vec<ServedFolder>, Failure> {
    let keeping = if arguments.fresh { Keeping::Fresh } else { Keeping::Lasting };
    let root = Folder { keeping, ..Folder::new("/", true) };
    let own = |(index, folder): (usize, &PathBuf)| {
        let privileged = arguments.privileged_files;
        let folder = Folder { keeping, privileged, ..Folder::new(folder, false) };
        ShareArgument { folder, tag: tag(index) }
    };
    let root = ShareArgument { folder: root, tag: protocol::ROOT_TAG.to_owned() };
    let all = iter::once(root).chain(folders.iter().enumerate().map(own)).collect();
    all_shared(all, |share| share::device(share, devices, arguments.cpus))
}

/// The devices of folders. A thread waits for the start of each folder's server, so that all start at the same time.
fn all_shared(
    all: Vec<ShareArgument>,
    share: impl Fn(&ShareArgument) -> Result<ServedFolder, Failure> + Sync,
) -> Result<Vec<ServedFolder>, Failure> {
    let share = &share;
    thread::scope(|scope| {
        let start = |one| {
            let thread = thread::Builder::new().name("folder".into());
            thread.spawn_scoped(scope, move || share(&one))
        };
        let started = all.into_iter().map(start).collect::<io::Result<Vec<_>>>();
        let started = started.map_err(|error| Failure::host(error.to_string()))?;
        let shared = started.into_iter().map(|thread| {
            thread.join().map_err(|_| Failure::bug("what shares a folder failed"))?
        });
        shared.collect()
    })
}

/// The kernel, and the devices of what the guest sees of the host. Both take time in which little is computed, so the
/// kernel is looked for by a thread.
fn kernel_and_shares(
    arguments: &Guest,
    folders: &[PathBuf],
    devices: DevicesChoice,
) -> Result<(GuestKernel, Vec<ServedFolder>), Failure> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("kernel".into());
        let kernel = thread.spawn_scoped(scope, || kernel::find(arguments));
        let kernel = kernel.map_err(|error| Failure::host(error.to_string()))?;
        let shared = shares(arguments, folders, devices)?;
        let kernel = kernel.join().map_err(|_| Failure::bug("what looks for the kernel failed"))?;
        Ok((kernel?, shared))
    })
}

fn cmdline(arguments: &Guest) -> String {
    let one = starts_cpus(arguments.cpus, arguments.append.as_deref()).then_some(ONE_CPU);
    let further = arguments.append.iter().map(String::as_str);
    [CMDLINE].into_iter().chain(one).chain(further).collect::<Vec<_>>().join(" ")
}

/// Whether the agent starts CPUs: not where the user has said how many the kernel is to start.
fn starts_cpus(cpus: u32, append: Option<&str>) -> bool {
    const CHOSEN: [&str; 3] = ["maxcpus=", "nr_cpus=", "nosmp"];
    let mut words = append.unwrap_or_default().split_whitespace();
    cpus > 1 && !words.any(|word| CHOSEN.iter().any(|chosen| word.starts_with(chosen)))
}

/// The device of the guest's connections.
pub fn sockets(ports: Vec<(u32, UnixStream)>) -> io::Result<Attachment> {
    let sockets = Sockets::new(ports)?;
    let listen = sockets.ringer();
    let device = Box::new(Vsock::new(Box::new(sockets), CID));
    Ok(Attachment::new(device, move |doorbell| {
        listen(Arc::new(move || doorbell.ring(vsock::RECEIVE)));
    }))
}

fn tag(index: usize) -> String {
    format!("ring3-{index}")
}

/// The folders whose changes are real, outer ones first: an inner one is mounted over its outer one.
fn writable(arguments: &Guest, directory: &Path) -> Result<Vec<PathBuf>, Failure> {
    let mut folders = Vec::new();
    for folder in &arguments.rw {
        let shown = folder.display();
        let real = folder.canonicalize();
        let real = real.map_err(|error| Failure::usage(format!("--rw {shown}: {error}")))?;
        if real == Path::new("/") {
            return Err(Failure::usage(
                "--rw /: the whole file system cannot be shared for writing",
            ));
        }
        folders.push(real);
    }
    if !arguments.private && directory != Path::new("/") {
        folders.push(directory.to_owned());
    }
    folders.sort();
    folders.dedup();
    Ok(folders)
}

fn request(
    arguments: &Guest,
    command: GuestCommand<'_>,
    directory: &Path,
    folders: &[PathBuf],
    streams: &StreamPlan,
) -> Result<AgentRequest, Failure> {
    let (user, groups) = if arguments.root { (0, vec![0]) } else { user::current() };
    let shares = folders.iter().enumerate();
    let shares =
        shares.map(|(i, path)| (tag(i).into_bytes(), path.as_os_str().as_bytes().to_vec()));
    let terminal = streams.on_terminal.then(terminal::size);
    Ok(AgentRequest {
        arguments: words(command),
        environment: environment(&arguments.env)?,
        directory: directory.as_os_str().as_bytes().to_vec(),
        user,
        groups,
        shares: shares.collect(),
        terminal,
        errors: streams.errors_apart,
        streams: streams.elsewhere().to_vec(),
        umask: inherited::umask(),
        ignored: inherited::ignored_signals(),
        limits: inherited::limits().map(limit).collect(),
        network: arguments.net.is_some(),
        cpus: starts_cpus(arguments.cpus, arguments.append.as_deref()),
        modules: Vec::new(), // `make` knows which kernel it is
    })
}

/// A limit of ring3's own, for the command: no higher than the guest's kernel allows.
fn limit((resource, both): (u32, [u64; 2])) -> Limit {
    let most = if resource == inherited::DESCRIPTORS { MOST_DESCRIPTORS } else { u64::MAX };
    let [current, maximum] = both.map(|limit| limit.min(most));
    Limit { resource, current, maximum }
}

fn words(command: GuestCommand<'_>) -> Vec<Vec<u8>> {
    match command {
        GuestCommand::Given(words) => words.iter().map(|word| word.as_bytes().to_vec()).collect(),
        GuestCommand::Shell => {
            let shell = env::var_os("SHELL").filter(|shell| Path::new(shell).is_absolute());
            vec![shell.map_or(DEFAULT_SHELL.into(), |shell| shell.as_bytes().to_vec())]
        }
    }
}

/// The variables passed on, then those asked for.
fn environment(asked: &[String]) -> Result<Vec<Vec<u8>>, Failure> {
    let passed = env::vars_os().filter(|(name, _)| {
        name.to_str().is_some_and(|name| PASSED.contains(&name) || name.starts_with("LC_"))
    });
    let join = |name: &[u8], value: &[u8]| [name, b"=", value].concat();
    let mut all: Vec<_> =
        passed.map(|(name, value)| join(name.as_bytes(), value.as_bytes())).collect();
    for variable in asked {
        match variable.split_once('=') {
            Some(("", _)) => {
                return Err(Failure::usage(format!("--env {variable}: the name is missing")));
            }
            Some(_) => all.push(variable.clone().into_bytes()),
            None => all.extend(
                env::var_os(variable).map(|value| join(variable.as_bytes(), value.as_bytes())),
            ),
        }
    }
    Ok(all)
}

/// The agent as `/init`, the request, and the modules.
fn first_root(request: &AgentRequest, modules: &[Module]) -> Vec<u8> {
    let mut archive = CpioArchive::new();
    ["dev", "proc", "sys", "modules"].iter().for_each(|name| archive.directory(name));
    archive.character_device("dev/console", 5, 1);
    archive.file("init", 0o755, AGENT);
    let inside = |path: &'static str| path.trim_start_matches('/');
    archive.file(inside(protocol::REQUEST_FILE), 0o600, &request.encode());
    let order: String = modules.iter().map(|module| format!("{}\n", module.name)).collect();
    archive.file(inside(protocol::MODULE_ORDER), 0o644, order.as_bytes());
    for module in modules {
        archive.file(&format!("modules/{}.ko", module.name), 0o644, &module.content);
    }
    archive.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_set_or_passed_on() {
        let asked = ["A=b=c".to_owned(), "RING3_SURELY_UNSET".to_owned()];
        let all = environment(&asked).expect("sound");
        assert_eq!(all.last().expect("one"), b"A=b=c");
        assert!(environment(&["=x".to_owned()]).is_err());
        assert!(all.iter().all(|variable| !variable.starts_with(b"CARGO")), "filtered");
    }

    #[test]
    fn the_agent_starts_cpus_unless_the_kernel_is_told_how_many() {
        assert!(starts_cpus(2, None) && starts_cpus(2, Some("quiet mitigations=off")));
        assert!(!starts_cpus(1, None));
        for said in ["maxcpus=2", "a nosmp", "nr_cpus=1 b"] {
            assert!(!starts_cpus(2, Some(said)), "{said}");
        }
    }

    #[test]
    fn the_first_root_has_an_init() {
        let archive = first_root(&AgentRequest::default(), &[]);
        let name = b"init\0";
        assert!(archive.windows(name.len()).any(|window| window == name));
        assert!(archive.len() > AGENT.len());
    }
}
