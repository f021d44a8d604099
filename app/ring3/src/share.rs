//! `--share`: folders of the host for the guest.

use std::{path::PathBuf, str::FromStr};

use sharedfs::{Folder, FolderServer};
use virtio::Fs;
use vmm::Attachment;

use crate::failure::Failure;

/// Bytes of a tag at most.
const TAG_MAX: usize = 36;

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
        let (rest, readonly) = match text.strip_suffix(":ro") {
            Some(rest) => (rest, true),
            None => (text, false),
        };
        let (path, tag) = rest.rsplit_once(':').ok_or("give a folder and a tag, as in src:work")?;
        if path.is_empty() {
            return Err("the folder's name is empty".to_owned());
        }
        if tag.is_empty() || tag.len() > TAG_MAX || tag.contains(['/', '\0']) {
            return Err(format!("`{tag}` is not a tag: 1 to {TAG_MAX} characters without /"));
        }
        let folder = Folder { path: PathBuf::from(path), readonly };
        Ok(Self { folder, tag: tag.to_owned() })
    }
}

/// Opens a folder as a device.
pub fn device(share: &ShareArgument) -> Result<Attachment, Failure> {
    let server = FolderServer::open(&share.folder).map_err(|error| match error {
        sharedfs::Error::Folder { .. } => Failure::usage(format!("--share: {error}")),
        sharedfs::Error::Host(_) => Failure::host(format!("--share: {error}")),
    })?;
    // The guest asks, the host only answers.
    Ok(Attachment::new(Box::new(Fs::new(Box::new(server), &share.tag)), drop))
}

/// Opens all folders; two of one tag are refused.
pub fn attach(shares: &[ShareArgument]) -> Result<Vec<Attachment>, Failure> {
    for (index, share) in shares.iter().enumerate() {
        if shares[..index].iter().any(|other| other.tag == share.tag) {
            return Err(Failure::usage(format!("--share: two folders have the tag {}", share.tag)));
        }
    }
    shares.iter().map(device).collect()
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
        assert!(!share.folder.readonly);
    }

    #[test]
    fn mistakes_are_named() {
        let long = format!(".:{}", "x".repeat(37));
        for text in ["", "folder", ":tag", "folder:", "folder:a/b", long.as_str()] {
            assert!(text.parse::<ShareArgument>().is_err(), "{text}");
        }
        let twice: Vec<ShareArgument> =
            vec![".:a".parse().expect("one"), "/:a".parse().expect("two")];
        let failure = attach(&twice).err().expect("refused");
        assert!(failure.to_string().contains("the tag a"), "{failure}");
        let absent = vec!["/nonexistent/x:a".parse().expect("sound")];
        assert_eq!(attach(&absent).err().expect("refused").code, 2);
    }
}
