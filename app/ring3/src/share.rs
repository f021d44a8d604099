//! `--share`: folders of the host for the guest.

use std::{os::unix::net::UnixStream, path::PathBuf, str::FromStr, sync::mpsc::channel};

use sharedfs::{Folder, FolderServer, Keeping};
use vhost_user::Reserve;
use virtio::Fs;
use vmm::Attachment;

use crate::{
    failure::Failure,
    foreign,
    servers::{self, Further},
    values::DevicesChoice,
};

/// Bytes of a tag at most.
const TAG_MAX: usize = 36;

/// What `--share` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShareChoice {
    /// A folder, which we serve.
    Folder(ShareArgument),
    /// What another program serves.
    Foreign {
        /// Where it listens.
        socket: PathBuf,
        /// What the guest mounts it by.
        tag: String,
    },
}

impl FromStr for ShareChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(rest) = text.strip_prefix(foreign::PREFIX) else {
            return text.parse().map(Self::Folder);
        };
        let parts = rest.rsplit_once(':').filter(|(socket, _)| !socket.is_empty());
        let (socket, tag) = parts.ok_or("give a socket and a tag: vhost-user:SOCKET:TAG")?;
        Ok(Self::Foreign { socket: socket.into(), tag: checked(tag)? })
    }
}

impl ShareChoice {
    fn tag(&self) -> &str {
        match self {
            Self::Folder(ShareArgument { tag, .. }) | Self::Foreign { tag, .. } => tag,
        }
    }

    fn attach(&self, devices: DevicesChoice, cpus: u32) -> Result<Attachment, Failure> {
        match self {
            // None of these is kept.
            Self::Folder(share) => device(share, devices, cpus).map(|shared| shared.attachment),
            Self::Foreign { socket, tag } => foreign::share(socket, tag),
        }
    }
}

/// A tag, if it is one.
fn checked(tag: &str) -> Result<String, String> {
    if tag.is_empty() || tag.len() > TAG_MAX || tag.contains(['/', '\0']) {
        return Err(format!("`{tag}` is not a tag: 1 to {TAG_MAX} characters without /"));
    }
    Ok(tag.to_owned())
}

/// A shared folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareArgument {
    /// What is shared, and how.
    pub folder: Folder,
    /// What the guest mounts it by.
    pub tag: String,
}

impl FromStr for ShareArgument {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let suffix = |suffix| text.strip_suffix(suffix);
        let (rest, readonly, privileged) = match (suffix(":ro"), suffix(":privileged")) {
            (Some(rest), _) => (rest, true, false),
            (_, Some(rest)) => (rest, false, true),
            _ => (text, false, false),
        };
        let (path, tag) = rest.rsplit_once(':').ok_or("give a folder and a tag, as in src:work")?;
        if path.is_empty() {
            return Err("the folder's name is empty".to_owned());
        }
        let tag = checked(tag)?;
        let folder = Folder { privileged, ..Folder::new(path, readonly) };
        Ok(Self { folder, tag })
    }
}

/// Opens a folder.
pub fn open(folder: &Folder) -> Result<FolderServer, Failure> {
    FolderServer::open(folder).map_err(refused)
}

/// What serves a folder, with so many request queues.
pub fn body(server: FolderServer, tag: &str, queues: u16) -> Fs {
    Fs::new(Box::new(server), tag).with_queues(queues)
}

/// Whether somebody in the guest is to be told what the host changes in a folder.
pub fn has_listener(folder: &Folder) -> bool {
    !folder.readonly && folder.keeping == Keeping::Lasting
}

/// Why a folder is not shared.
pub fn refused(error: sharedfs::ShareError) -> Failure {
    match error {
        sharedfs::ShareError::Folder { .. } => Failure::usage(format!("--share: {error}")),
        sharedfs::ShareError::Host(_) => Failure::host(format!("--share: {error}")),
    }
}

/// A folder that is served.
pub struct ServedFolder {
    pub attachment: Attachment,
    /// For whoever listens to what the host changes.
    pub listener: Option<UnixStream>,
}

/// Has a folder served as a device, with a request queue for each virtual CPU.
pub fn device(
    share: &ShareArgument,
    devices: DevicesChoice,
    cpus: u32,
) -> Result<ServedFolder, Failure> {
    let ShareArgument { folder, tag } = share;
    let queues = cpus as u16;
    match devices {
        // The guest asks, the host only answers.
        DevicesChoice::Inline => {
            let attachment = Attachment::new(Box::new(body(open(folder)?, tag, queues)), drop);
            Ok(ServedFolder { attachment, listener: None })
        }
        DevicesChoice::Processes | DevicesChoice::Near | DevicesChoice::Apart => {
            let real = folder.find().map_err(refused)?;
            let readonly = folder.readonly.then_some("--readonly");
            let keeping = match folder.keeping {
                Keeping::Fresh => Some("--fresh"),
                Keeping::Usual => None,
                Keeping::Lasting => Some("--lasting"),
            };
            let privileged = folder.privileged.then_some("--privileged");
            let options = readonly.into_iter().chain(keeping).chain(privileged);
            let queues = queues.to_string();
            let words = ["share", "--queues", &queues].into_iter().chain(options);
            let words = words.chain(["--", tag, &real]);
            let gone: Reserve = |config| Box::new(Fs::gone(config));
            let words = words.map(str::to_owned).collect();
            let (sender, listener) = channel();
            let further =
                if has_listener(folder) { Further::Listener(sender) } else { Further::Nothing };
            let nearness = devices.nearness();
            let attachment = servers::attach(words, "--share", Some(gone), nearness, further)?;
            Ok(ServedFolder { attachment, listener: listener.try_recv().ok() })
        }
    }
}

/// Has all folders served; two of one tag are refused.
pub fn attach(
    shares: &[ShareChoice],
    devices: DevicesChoice,
    cpus: u32,
) -> Result<Vec<Attachment>, Failure> {
    for (index, share) in shares.iter().enumerate() {
        if shares[..index].iter().any(|other| other.tag() == share.tag()) {
            let tag = share.tag();
            return Err(Failure::usage(format!("--share: two folders have the tag {tag}")));
        }
    }
    shares.iter().map(|share| share.attach(devices, cpus)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms() {
        let share: ShareArgument = "/a:b/c:tag:ro".parse().expect("a share");
        assert_eq!((share.folder.path, share.folder.readonly), (PathBuf::from("/a:b/c"), true));
        assert_eq!(share.tag, "tag");
        let share: ShareArgument = ".:work".parse().expect("a share");
        assert!(!share.folder.readonly && !share.folder.privileged);
        let share: ShareArgument = ".:work:privileged".parse().expect("a share");
        assert!(!share.folder.readonly && share.folder.privileged);
        let foreign = "vhost-user:/run/a:b.sock:work".parse();
        let (socket, tag) = (PathBuf::from("/run/a:b.sock"), "work".to_owned());
        assert_eq!(foreign, Ok(ShareChoice::Foreign { socket, tag }));
    }

    #[test]
    fn mistakes_are_named() {
        let long = format!(".:{}", "x".repeat(37));
        for text in ["", "folder", ":tag", "folder:", "folder:a/b", long.as_str()] {
            assert!(text.parse::<ShareArgument>().is_err(), "{text}");
        }
        for text in ["vhost-user:", "vhost-user:socket", "vhost-user::tag", "vhost-user:socket:"] {
            assert!(text.parse::<ShareChoice>().is_err(), "{text}");
        }
        let twice: Vec<ShareChoice> =
            vec![".:a".parse().expect("one"), "/:a".parse().expect("two")];
        let failure = attach(&twice, DevicesChoice::Processes, 1).err().expect("refused");
        assert!(failure.to_string().contains("the tag a"), "{failure}");
        let absent = vec!["/nonexistent/x:a".parse().expect("sound")];
        assert_eq!(attach(&absent, DevicesChoice::Processes, 1).err().expect("refused").code, 2);
    }
}
