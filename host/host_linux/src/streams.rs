//! The standard streams as the parent process set them up.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    fs::{FileType, OFlags, fcntl_getfl, fstat, major, minor},
};

use crate::inherited;

/// What a standard stream is, as far as somebody else could have the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stream {
    /// It was closed when this process started.
    Closed,
    /// The same as this path, opened this way.
    Like(&'static str, AccessMode),
    /// Only this process has it.
    Own,
}

/// What an open file may be used for, as `open` numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessMode {
    /// To read.
    Read = 0,
    /// To write.
    Write = 1,
    /// To do both.
    Both = 2,
}

/// The kind of file behind standard input (0), output (1) or error (2).
pub fn stream(number: u8) -> Stream {
    if inherited::is_closed(number) {
        return Stream::Closed;
    }
    let kind = match number {
        0 => kind(io::stdin().as_fd(), true),
        1 => kind(io::stdout().as_fd(), false),
        _ => kind(io::stderr().as_fd(), false),
    };
    kind.unwrap_or(Stream::Own)
}

/// Files that are the same everywhere, and those that cannot be used for what they are there for, of which only the error
/// counts.
fn kind(fd: BorrowedFd<'_>, is_input: bool) -> rustix::io::Result<Stream> {
    let stat = fstat(fd)?;
    let access = match fcntl_getfl(fd)? & OFlags::ACCMODE {
        OFlags::RDONLY => AccessMode::Read,
        OFlags::WRONLY => AccessMode::Write,
        _ => AccessMode::Both,
    };
    let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice;
    let device = is_device.then(|| (major(stat.st_rdev), minor(stat.st_rdev)));
    let wrong = if is_input { AccessMode::Write } else { AccessMode::Read };
    Ok(match device {
        Some((1, 3)) => Stream::Like("/dev/null", access),
        Some((1, 5)) => Stream::Like("/dev/zero", access),
        Some((1, 7)) => Stream::Like("/dev/full", access),
        _ if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {
            Stream::Like("/", AccessMode::Read)
        }
        _ if access == wrong => Stream::Like("/dev/null", access),
        _ => Stream::Own,
    })
}

/// Waits until `from` can be read, or has ended; false if nobody reads what is written `to` any more.
///
/// # Errors
/// The host refuses.
pub fn wait(from: impl AsFd, to: impl AsFd) -> io::Result<bool> {
    let (from, to) = (from.as_fd(), to.as_fd());
    loop {
        let mut both = [PollFd::new(&from, PollFlags::IN), PollFd::new(&to, PollFlags::empty())];
        match poll(&mut both, None) {
            Err(rustix::io::Errno::INTR) => continue,
            other => other?,
        };
        let [from, to] = both.map(|one| one.revents());
        // What there is to read is read first: to write it is what tells the reader's end from ours.
        if !from.is_empty() {
            return Ok(true);
        }
        if to.intersects(PollFlags::ERR | PollFlags::HUP) {
            return Ok(false);
        }
    }
}

/// Opens a standard stream again, by a descriptor that std buffers nothing for.
///
/// # Errors
/// The host has no descriptor left.
pub fn again(stream: impl AsFd) -> io::Result<std::fs::File> {
    stream.as_fd().try_clone_to_owned().map(Into::into)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn kind_of(options: &mut std::fs::OpenOptions, path: &str, is_input: bool) -> Stream {
        kind(options.open(path).expect("there").as_fd(), is_input).expect("known")
    }

    #[test]
    fn what_is_the_same_everywhere() {
        let full = kind_of(File::options().write(true), "/dev/full", false);
        assert_eq!(full, Stream::Like("/dev/full", AccessMode::Write));
        let null = kind_of(File::options().read(true).write(true), "/dev/null", true);
        assert_eq!(null, Stream::Like("/dev/null", AccessMode::Both));
        let folder = kind_of(File::options().read(true), "/tmp", true);
        assert_eq!(folder, Stream::Like("/", AccessMode::Read));
        let barred = kind_of(File::options().read(true), "/etc/passwd", false);
        assert_eq!(barred, Stream::Like("/dev/null", AccessMode::Read));
        assert_eq!(kind_of(File::options().read(true), "/etc/passwd", true), Stream::Own);
    }

    #[test]
    fn a_reader_that_has_gone_is_seen() {
        let (_quiet, from) = io::pipe().map(|(reader, writer)| (writer, reader)).expect("a pipe");
        let (reader, to) = io::pipe().expect("a pipe");
        drop(reader);
        assert!(!wait(&from, &to).expect("watched"));
    }
}
