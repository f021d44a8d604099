//! `--disk`: images for the guest; `ring3 image`: new ones.

use std::{
    path::{Path, PathBuf},
    str::FromStr,
    thread,
    time::{Duration, Instant},
};

use clap::{Args, Subcommand};
use faults::Target;
use images::{Cache, Creation, Format, Image};
use virtio::{Block, BlockBackend, BrokenDisk, SECTOR, VirtioDevice};
use vmm::Attachment;

use crate::{
    debian::{self, DebianArguments},
    failure::Failure,
    foreign,
    injection::{self, Elsewhere, Faults, Injection},
    servers,
    values::{DevicesChoice, MemorySize},
};

const EXAMPLES: &str = "\
Examples:
  An empty disk, and one that shows another until it is written to:
    ring3 image create disk.img --size 4G
    ring3 image create work.qcow2 --backing disk.img

  A disk with Debian on it, and running it:
    ring3 image create debian --suite bookworm --size 4G
    ring3 run --config debian.toml
";

/// How long an image in use is tried, and how often.
const PATIENCE: Duration = Duration::from_millis(400);
const GLANCE: Duration = Duration::from_millis(10);
/// Bytes of a serial number at most.
const SERIAL_MAX: usize = 20;

/// What `--disk` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskChoice {
    /// An image, which we serve.
    Image(DiskArgument),
    /// What another program serves at this socket.
    Foreign(PathBuf),
}

impl FromStr for DiskChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix(foreign::PREFIX) {
            Some("") => Err("the socket's name is empty: vhost-user:SOCKET".to_owned()),
            Some(socket) => Ok(Self::Foreign(socket.into())),
            None => text.parse().map(Self::Image),
        }
    }
}

impl DiskChoice {
    fn attach(
        &self,
        index: usize,
        devices: DevicesChoice,
        queues: u16,
        faults: Option<&Injection>,
    ) -> Result<Attachment, Failure> {
        let attachment = match self {
            Self::Image(disk) => disk.attach(index, devices, queues, faults)?,
            Self::Foreign(socket) => foreign::disk(socket)?,
        };
        let plug = faults.and_then(|faults| faults.plug(Target::Disk(index)));
        Ok(match plug {
            Some(plug) => injection::connect(attachment, plug),
            None => attachment,
        })
    }
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskArgument {
    /// The image.
    pub image: Image,
    /// What the guest sees as its serial number.
    pub serial: Option<String>,
    /// All of this as it was given.
    pub text: String,
}

impl FromStr for DiskArgument {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let image =
            Image { path: PathBuf::new(), format: None, readonly: false, cache: Cache::default() };
        let mut disk = Self { image, serial: None, text: text.to_owned() };
        let mut path = text;
        // Options are at the end; what is before the first of them is the name, commas and all.
        while let Some((rest, word)) = path.rsplit_once(',') {
            if !disk.option(word)? {
                break;
            }
            path = rest;
        }
        if path.is_empty() {
            return Err("the file name is empty".to_owned());
        }
        disk.image.path = path.into();
        Ok(disk)
    }
}

impl DiskArgument {
    /// Takes an option; false if it is rather part of a name.
    fn option(&mut self, word: &str) -> Result<bool, String> {
        match word.split_once('=') {
            Some(("format", format)) => self.image.format = Some(format.parse()?),
            Some(("cache", cache)) => self.image.cache = parse_cache(cache)?,
            Some(("serial", serial)) => self.serial = Some(parse_serial(serial)?),
            None if word == "readonly" || word == "ro" => self.image.readonly = true,
            _ if word.contains(['/', '.']) => return Ok(false),
            _ => {
                return Err(format!(
                    "unknown option `{word}`; there are format=, readonly, cache= and serial="
                ));
            }
        }
        Ok(true)
    }

    /// Opens it as the machine's disk of this number, with so many queues. One that is in use is tried for a moment: the machine that has it may have
    /// been killed, and its device not be gone yet.
    pub fn body(
        &self,
        index: usize,
        queues: u16,
        faults: Option<Faults>,
    ) -> Result<Box<dyn VirtioDevice>, Failure> {
        let backend = self.open()?;
        let serial = self.serial.clone().unwrap_or_else(|| format!("ring3-disk{index}"));
        let disk = |backend| Box::new(Block::new(backend, &serial).with_queues(queues));
        let Some(faults) = faults else { return Ok(disk(backend)) };
        let (backend, rogue) = faults.of_disk(backend, index)?;
        Ok(rogue.spoil(disk(backend)))
    }

    /// Where it is served. A damaged qcow2 image that is written to can end the process that does it: that is never the monitor.
    fn served(&self, devices: DevicesChoice) -> DevicesChoice {
        let format = self.image.format.unwrap_or_else(|| Format::of_name(&self.image.path));
        match devices {
            DevicesChoice::Inline if format == Format::Qcow2 && !self.image.readonly => {
                DevicesChoice::Apart
            }
            devices => devices,
        }
    }

    fn open(&self) -> Result<Box<dyn BlockBackend>, Failure> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match images::open(&self.image) {
                Err(error) if error.is_in_use() && Instant::now() < deadline => {
                    thread::sleep(GLANCE);
                }
                opened => {
                    return opened.map_err(|error| Failure::usage(format!("--disk: {error}")));
                }
            }
        }
    }

    fn attach(
        &self,
        index: usize,
        devices: DevicesChoice,
        queues: u16,
        faults: Option<&Injection>,
    ) -> Result<Attachment, Failure> {
        let target = Target::Disk(index);
        match self.served(devices) {
            // The guest asks, the host only answers.
            DevicesChoice::Inline => {
                let faults = faults.and_then(|faults| faults.inline(target));
                Ok(Attachment::new(self.body(index, queues, faults)?, drop))
            }
            DevicesChoice::Processes | DevicesChoice::Near | DevicesChoice::Apart => {
                let faults = faults.and_then(|faults| faults.elsewhere(target));
                let mut words =
                    ["disk", "--queues", &queues.to_string()].map(str::to_owned).to_vec();
                words.extend(faults.iter().flat_map(Elsewhere::words));
                words.extend(["--", &index.to_string(), &self.text].map(str::to_owned));
                servers::attach(words, "--disk", Some(broken), devices.nearness(), faults.into())
            }
        }
    }
}

/// What answers for a disk that is gone, of as many sectors and queues as its configuration says.
fn broken(config: &[u8]) -> Box<dyn VirtioDevice> {
    let sectors = config.first_chunk().copied().map_or(0, u64::from_le_bytes);
    let disk = Block::new(Box::new(BrokenDisk::new(sectors.saturating_mul(SECTOR))), "");
    Box::new(disk.with_queues(Block::queues_in(config)))
}

fn parse_cache(text: &str) -> Result<Cache, String> {
    match text {
        "writeback" => Ok(Cache::Writeback),
        "none" => Ok(Cache::None),
        _ => Err(format!("unknown cache `{text}`; there are writeback and none")),
    }
}

fn parse_serial(text: &str) -> Result<String, String> {
    if text.is_empty() || text.len() > SERIAL_MAX || !text.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(format!(
            "`{text}` is not a serial number: 1 to {SERIAL_MAX} printable characters"
        ));
    }
    Ok(text.to_owned())
}

/// Opens all disks, each with a queue for each virtual CPU.
pub fn attach(
    disks: &[DiskChoice],
    devices: DevicesChoice,
    cpus: u32,
    faults: Option<&Injection>,
) -> Result<Vec<Attachment>, Failure> {
    let queues = cpus as u16;
    let disks = disks.iter().enumerate();
    disks.map(|(index, disk)| disk.attach(index, devices, queues, faults)).collect()
}

/// What to do with images.
#[derive(Debug, Args)]
pub struct ImageArguments {
    /// What to do.
    #[command(subcommand)]
    pub action: ImageAction,
}

/// What to do with images.
#[derive(Debug, Subcommand)]
pub enum ImageAction {
    /// Make an empty disk, or one that shows another until it is written to
    Create(CreateArguments),
}

/// An image to make.
#[derive(Debug, Args)]
#[command(subcommand_negates_reqs = true, args_conflicts_with_subcommands = true)]
#[command(after_help = EXAMPLES)]
pub struct CreateArguments {
    /// A system to install on it.
    #[command(subcommand)]
    pub system: Option<System>,
    /// Where; nothing may be there yet
    #[arg(required = true)]
    pub file: Option<PathBuf>,
    /// The disk's size, such as 512M or 4G; a backing image's if none is given
    #[arg(long, value_name = "SIZE")]
    pub size: Option<MemorySize>,
    /// raw or qcow2; by the file's name if not given
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<Format>,
    /// Image that shows through until it is overwritten (qcow2 only)
    #[arg(long, value_name = "FILE")]
    pub backing: Option<PathBuf>,
    /// The backing image's format; by its name if not given
    #[arg(long, value_name = "FORMAT", requires = "backing")]
    pub backing_format: Option<Format>,
}

/// A system on a disk.
#[derive(Debug, Subcommand)]
pub enum System {
    /// Install Debian on a new disk, without root; says how to run it
    Debian(DebianArguments),
}

/// `ring3 image`.
pub fn image(arguments: &ImageArguments) -> Result<u8, Failure> {
    let ImageAction::Create(wanted) = &arguments.action;
    match (&wanted.system, &wanted.file) {
        (Some(System::Debian(debian)), _) => debian::create(debian),
        (None, Some(file)) => create(wanted, file),
        (None, None) => Err(Failure::usage("image create: the file's name is missing")),
    }
}

fn create(wanted: &CreateArguments, file: &Path) -> Result<u8, Failure> {
    let backing = wanted.backing.clone().map(|path| {
        let format = wanted.backing_format.unwrap_or_else(|| Format::of_name(&path));
        (path, format)
    });
    let creation = Creation {
        path: file.to_owned(),
        format: wanted.format.unwrap_or_else(|| Format::of_name(file)),
        size: wanted.size.map(|MemorySize(bytes)| bytes),
        backing,
    };
    images::create(&creation).map_err(|error| Failure::usage(error.to_string()))?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms() {
        let disk = |text: &str| text.parse::<DiskArgument>();
        let plain = disk("a.img").expect("plain");
        assert!(!plain.image.readonly && plain.image.format.is_none());
        let all = disk("d/a.img,format=qcow2,readonly,cache=none,serial=X1").expect("everything");
        assert_eq!(all.image.path, PathBuf::from("d/a.img"));
        assert_eq!((all.image.format, all.image.readonly), (Some(Format::Qcow2), true));
        assert_eq!((all.image.cache, all.serial.as_deref()), (Cache::None, Some("X1")));
        let comma = disk("a,b.img,ro").expect("a comma in the name");
        assert_eq!((comma.image.path, comma.image.readonly), (PathBuf::from("a,b.img"), true));
    }

    #[test]
    fn a_qcow2_image_that_is_written_is_never_served_by_the_monitor() {
        let served =
            |text: &str, devices| text.parse::<DiskArgument>().expect("sound").served(devices);
        for text in ["a.qcow2", "a.img,format=qcow2"] {
            assert_eq!(served(text, DevicesChoice::Inline), DevicesChoice::Apart, "{text}");
            assert_eq!(served(text, DevicesChoice::Processes), DevicesChoice::Processes);
        }
        for text in ["a.img", "a.qcow2,format=raw", "a.qcow2,readonly"] {
            assert_eq!(served(text, DevicesChoice::Inline), DevicesChoice::Inline, "{text}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (text, part) in [
            ("a.img,readwrite", "unknown option `readwrite`"),
            (",readonly", "name is empty"),
            ("a.img,format=vmdk", "unknown format"),
            ("a.img,cache=fast", "unknown cache"),
            ("a.img,serial=", "serial number"),
            ("a.img,serial=123456789012345678901", "serial number"),
        ] {
            let error = text.parse::<DiskArgument>().expect_err(text);
            assert!(error.contains(part), "{error}");
        }
        let foreign = "vhost-user:/run/disk.sock".parse();
        assert_eq!(foreign, Ok(DiskChoice::Foreign("/run/disk.sock".into())));
        assert!("vhost-user:".parse::<DiskChoice>().is_err());
        let missing: DiskChoice = "/nonexistent/disk.img".parse().expect("sound");
        let failure = attach(&[missing], DevicesChoice::Inline, 1, None).err().expect("refused");
        assert_eq!(failure.code, 2);
        assert!(failure.to_string().contains("does not exist"), "{failure}");
    }
}
