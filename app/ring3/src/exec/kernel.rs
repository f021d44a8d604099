//! Which kernel a guest runs, and the modules it needs before it has a file system.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use host_linux::cpu;
use kernels::{
    assets::{Assets, Kernel, KernelFiles, NAMED},
    interrupt::{self, Guard},
    modules::{Module, ModuleTree},
};
use vmm::unpacked::Unpacked;

use super::arguments::Guest;
use crate::failure::Failure;

/// What the guest's root and its connections need; a kernel may have some built in.
const MODULES: [&str; 4] = ["virtio_pci", "overlay", "virtiofs", "vmw_vsock_virtio_transport"];
/// What a network needs.
const NETWORK: &str = "virtio_net";
/// Randomness, where the CPU has none that the guest's kernel could trust.
const RANDOM: &str = "virtio_rng";

/// A kernel with its modules in the order to load them.
pub struct GuestKernel {
    pub image: Vec<u8>,
    /// What the image unpacks to, if the cache has it.
    pub unpacked: Option<Arc<dyn Unpacked>>,
    pub modules: Vec<Module>,
    /// The folder with all of its modules, if it is known.
    pub tree: Option<PathBuf>,
}

/// Finds, and if need be fetches, the kernel that was asked for.
pub fn find(arguments: &Guest) -> Result<GuestKernel, Failure> {
    let name = &arguments.kernel;
    let (image, digest, modules, tree) = match (Kernel::named(name), &arguments.modules) {
        (Some(kernel), None) => named(kernel)?,
        (Some(_), Some(_)) => {
            return Err(Failure::usage(format!("--modules: {name} has its own; leave it out")));
        }
        (None, modules) => (file(name)?, None, modules.clone(), modules.clone()),
    };
    let load = |error: anyhow::Error| Failure::usage(format!("--kernel {name}: {error:#}"));
    let content = fs::read(&image).map_err(|error| load(error.into()))?;
    let unpacked = arguments.engine.unpacked_kernels.of(&content, digest.as_deref());
    let network = arguments.net.is_some();
    let modules = modules.map(|folder| needed(&folder, network)).transpose().map_err(load)?;
    let tree = tree.and_then(|tree| tree.canonicalize().ok());
    Ok(GuestKernel { image: content, unpacked, modules: modules.unwrap_or_default(), tree })
}

/// The image, its SHA-256, the modules to boot with, and all of its modules.
type Found = (PathBuf, Option<String>, Option<PathBuf>, Option<PathBuf>);

fn named(kernel: Kernel) -> Result<Found, Failure> {
    let files = fetched(kernel).map_err(|error| Failure::host(format!("{error:#}")))?;
    let modules = files.image.with_file_name("modules");
    Ok((files.image, Some(files.digest), Some(modules), files.tree))
}

fn fetched(kernel: Kernel) -> anyhow::Result<KernelFiles> {
    let assets = Assets::open()?;
    let _guard = Guard::new()?;
    let files = assets.kernel(kernel)?;
    anyhow::ensure!(interrupt::signal().is_none(), "interrupted");
    Ok(files)
}

fn file(name: &str) -> Result<PathBuf, Failure> {
    let path = Path::new(name);
    if path.is_file() {
        return Ok(path.to_owned());
    }
    let names = NAMED.map(|(name, _)| name).join(", ");
    Err(Failure::usage(format!("--kernel {name}: neither a file nor one of {names}")))
}

/// Modules in the order to load them: each takes the guest some milliseconds.
fn needed(folder: &Path, network: bool) -> anyhow::Result<Vec<Module>> {
    let mut names = MODULES.to_vec();
    names.extend(network.then_some(NETWORK));
    names.extend((!cpu::has_random_numbers()).then_some(RANDOM));
    ModuleTree::scan(folder)?.closure(&names)
}
