//! The lists in a folder of modules, as depmod writes them.

/// A line of `modules.devname`: `tun net/tun c10:200`.
#[derive(Debug, PartialEq, Eq)]
pub struct LazyDevice<'a> {
    /// Its name below /dev.
    pub name: &'a str,
    /// It is a block device.
    pub is_block: bool,
    /// Its driver's number.
    pub major: u64,
    /// Its own.
    pub minor: u64,
}

impl<'a> LazyDevice<'a> {
    /// From a line; `None` if that is a comment.
    pub fn parse(line: &'a str) -> Option<Self> {
        let mut words = line.split_whitespace().skip(1);
        let (name, numbers) = (words.next()?, words.next()?);
        let (is_block, numbers) = match numbers.split_at_checked(1)? {
            ("c", numbers) => (false, numbers),
            ("b", numbers) => (true, numbers),
            _ => return None,
        };
        let (major, minor) = numbers.split_once(':')?;
        Some(Self { name, is_block, major: major.parse().ok()?, minor: minor.parse().ok()? })
    }
}

/// The lists of a folder of modules.
pub struct Lists<'a> {
    /// `FILE: FILE...`; what comes later is loaded earlier.
    pub depends: &'a str,
    /// `alias PATTERN MODULE`.
    pub aliases: &'a str,
}

impl<'a> Lists<'a> {
    /// The lines of the modules that a name means.
    pub fn lines(&self, name: &str) -> Vec<&'a str> {
        let name = plain(name);
        let of = |module: &str| {
            let is_it = |line: &&str| stem(line).is_some_and(|stem| plain(stem) == module);
            self.depends.lines().find(is_it)
        };
        if let Some(line) = of(&name) {
            return vec![line];
        }
        let meant = self.aliases.lines().filter_map(|line| {
            let (pattern, module) = line.strip_prefix("alias ")?.rsplit_once(' ')?;
            matches(plain(pattern).as_bytes(), name.as_bytes()).then_some(module)
        });
        meant.filter_map(|module| of(&plain(module))).collect()
    }
}

/// `tun` of `kernel/drivers/net/tun.ko.xz: ...`.
fn stem(line: &str) -> Option<&str> {
    let (file, _) = line.split_once(':')?;
    let name = file.rsplit('/').next()?;
    name.split('.').next()
}

fn plain(name: &str) -> String {
    name.replace('-', "_")
}

/// Whether a name is as a pattern with `*` and `?` says.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    match (pattern.split_first(), name.split_first()) {
        (None, None) => true,
        (Some((b'*', rest)), None) => matches(rest, name),
        (Some((b'*', rest)), Some((_, later))) => matches(rest, name) || matches(pattern, later),
        (Some((one, rest)), Some((other, later))) => {
            (one == other || *one == b'?') && matches(rest, later)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_parsed() {
        let tun = LazyDevice { name: "net/tun", is_block: false, major: 10, minor: 200 };
        assert_eq!(LazyDevice::parse("tun net/tun c10:200"), Some(tun));
        assert!(LazyDevice::parse("md md b9:0").is_some_and(|device| device.is_block));
        assert_eq!(LazyDevice::parse("# Device nodes to trigger on-demand module loading."), None);
    }

    #[test]
    fn a_name_is_a_module_s_or_an_alias_of_some() {
        let depends = "kernel/fs/ext4/ext4.ko: kernel/fs/jbd2/jbd2.ko\n\
                       kernel/fs/jbd2/jbd2.ko:\n\
                       kernel/drivers/block/virtio-blk.ko.xz:\n";
        let aliases = "alias fs-ext4 ext4\nalias fs-ext3 ext4\nalias virtio:d0000000[0-9]v* x\n\
                       alias virtio:d00000002v* virtio_blk\n";
        let lists = Lists { depends, aliases };
        let files = |name| lists.lines(name).into_iter().map(|line| line.split_once(':'));
        let files = |name| files(name).map(|line| line.map_or("", |(file, _)| file));
        assert!(files("fs-ext3").eq(["kernel/fs/ext4/ext4.ko"]));
        assert!(files("virtio_blk").eq(["kernel/drivers/block/virtio-blk.ko.xz"]));
        assert!(files("virtio-blk").eq(files("virtio:d00000002v00001AF4")));
        assert!(lists.lines("fs-ext").is_empty() && lists.lines("ext").is_empty());
    }

    #[test]
    fn stars_and_question_marks() {
        for (pattern, name, expected) in [
            ("a*c", "abbc", true),
            ("a*c", "ac", true),
            ("a*c", "ab", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("*", "", true),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), expected, "{pattern} {name}");
        }
    }
}
