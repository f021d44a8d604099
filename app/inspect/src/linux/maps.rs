//! What a program has mapped where: Linux's tree of mappings, of kernels from 6.1 on (lib/maple_tree.c).
//!
//! The tree is read while other vCPUs may change it, so nothing in it is believed: depths and lengths have bounds.

use ram::Ram;

use super::{KernelError, LinuxKernel};

/// Levels of the tree, and folders and mounts of a path, at the most.
const LEVELS: usize = 12;
const FOLDERS: usize = 64;
/// Bytes of a page.
const PAGE: u64 = 4096;
/// The mapping can be executed (VM_EXEC).
const EXECUTABLE: u64 = 4;
/// A node's kind is in these bits of what points to it; its address is the rest.
const NODE: u64 = !0xff;
const LEAF: u64 = 1;
const RANGES: u64 = 2;
const ROOMS: u64 = 3;

/// Offsets of members in the kernel's structures of memory mappings.
pub struct VmaLayout {
    mm: u64,
    root: u64,
    start: u64,
    end: u64,
    page: u64,
    flags: u64,
    file: u64,
    paths: PathLayout,
}

/// Offsets of members in the structures that make a path.
struct PathLayout {
    /// `struct path` in a file, and that of a task's root in what the task has of file systems.
    file: u64,
    fs: u64,
    root: u64,
    /// In `struct path`.
    mount: u64,
    dentry: u64,
    /// In a dentry.
    parent: u64,
    name: u64,
    /// In a mount: what a path has of it, the mount it is on, and where there.
    public: u64,
    under: u64,
    mountpoint: u64,
}

/// A mapped address: its file and the offset there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedFile {
    /// The file's path, from the task's root on; none for memory without a file.
    pub path: Option<String>,
    /// Bytes from the file's beginning.
    pub offset: u64,
    /// It can be executed.
    pub is_executable: bool,
}

impl VmaLayout {
    /// Takes the offsets from the kernel's types.
    ///
    /// # Errors
    /// The kernel has other structures.
    pub fn of(kernel: &LinuxKernel) -> Result<Self, KernelError> {
        let offset = |structure, member| kernel.types.offset(structure, member);
        let area = |member| offset("vm_area_struct", member);
        Ok(Self {
            mm: offset("task_struct", "mm")?,
            root: offset("mm_struct", "mm_mt")? + offset("maple_tree", "ma_root")?,
            start: area("vm_start")?,
            end: area("vm_end")?,
            page: area("vm_pgoff")?,
            flags: area("vm_flags")?,
            file: area("vm_file")?,
            paths: PathLayout::of(kernel)?,
        })
    }

    /// What a task has mapped at an address (GVA).
    pub fn find(
        &self,
        kernel: &LinuxKernel,
        ram: &Ram,
        task: u64,
        address: u64,
    ) -> Option<MappedFile> {
        let word = |at: u64, offset: u64| kernel.word(ram, at.wrapping_add(offset));
        let mm = word(task, self.mm).filter(|mm| *mm != 0)?;
        let area = mapped(word(mm, self.root)?, address, &|at| kernel.word(ram, at))?;
        let (start, end) = (word(area, self.start)?, word(area, self.end)?);
        (start..end).contains(&address).then_some(())?;
        let offset = (address - start).wrapping_add(word(area, self.page)?.wrapping_mul(PAGE));
        let file = word(area, self.file).filter(|file| *file != 0);
        let read = |at| kernel.word(ram, at);
        let text = |at| kernel.text(ram, at);
        let path = file.and_then(|file| self.paths.path(task, file, &read, &text));
        let is_executable = word(area, self.flags)? & EXECUTABLE != 0;
        Some(MappedFile { path, offset, is_executable })
    }
}

impl PathLayout {
    fn of(kernel: &LinuxKernel) -> Result<Self, KernelError> {
        let offset = |structure, member| kernel.types.offset(structure, member);
        Ok(Self {
            file: offset("file", "f_path")?,
            fs: offset("task_struct", "fs")?,
            root: offset("fs_struct", "root")?,
            mount: offset("path", "mnt")?,
            dentry: offset("path", "dentry")?,
            parent: offset("dentry", "d_parent")?,
            name: offset("dentry", "d_name")? + offset("qstr", "name")?,
            public: offset("mount", "mnt")?,
            under: offset("mount", "mnt_parent")?,
            mountpoint: offset("mount", "mnt_mountpoint")?,
        })
    }

    /// A file's path, as a task sees it.
    fn path(
        &self,
        task: u64,
        file: u64,
        word: &dyn Fn(u64) -> Option<u64>,
        text: &dyn Fn(u64) -> Option<String>,
    ) -> Option<String> {
        let place = |at: u64| {
            let mount = word(at.wrapping_add(self.mount))?.wrapping_sub(self.public);
            Some((mount, word(at.wrapping_add(self.dentry))?))
        };
        let (mut mount, mut dentry) = place(file.wrapping_add(self.file))?;
        let root =
            word(task.wrapping_add(self.fs)).and_then(|fs| place(fs.wrapping_add(self.root)));
        let mut names = Vec::new();
        for _ in 0..FOLDERS {
            if root == Some((mount, dentry)) {
                break;
            }
            let parent = word(dentry.wrapping_add(self.parent))?;
            if parent != dentry {
                names.push(text(word(dentry.wrapping_add(self.name))?)?);
                dentry = parent;
                continue;
            }
            let under = word(mount.wrapping_add(self.under))?;
            if under == mount {
                break;
            }
            dentry = word(mount.wrapping_add(self.mountpoint))?;
            mount = under;
        }
        names.push(String::new());
        names.reverse();
        Some(names.join("/"))
    }
}

/// The entry of a tree for an address, by the tree's root.
fn mapped(root: u64, address: u64, word: &dyn Fn(u64) -> Option<u64>) -> Option<u64> {
    let mut entry = root;
    for _ in 0..LEVELS {
        let (node, kind) = (entry & NODE, entry >> 3 & 0xf);
        let slots = match kind {
            LEAF | RANGES => 16,
            ROOMS => 10,
            _ => return None,
        };
        let slot = slot(node, slots, address, word)?;
        entry = word(node + 8 * (slots + slot)).filter(|entry| *entry != 0)?;
        if kind == LEAF {
            return Some(entry);
        }
    }
    None
}

/// The slot of a node in which an address is: behind the parent are the last addresses of all slots but the last.
fn slot(node: u64, slots: u64, address: u64, word: &dyn Fn(u64) -> Option<u64>) -> Option<u64> {
    for slot in 0..slots - 1 {
        let last = word(node + 8 + 8 * slot)?;
        // A last address of zero is that of no slot: the one before was the end.
        if address <= last || (last == 0 && slot != 0) {
            return Some(slot);
        }
    }
    Some(slots - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// A node of ranges with two leaves, each with three slots.
    fn tree() -> HashMap<u64, u64> {
        let (top, low, high) = (0x1000, 0x2000, 0x3000);
        let mut words = HashMap::new();
        let mut node = |at: u64, lasts: &[u64], slots: &[u64]| {
            words.extend((0..32).map(|n| (at + 8 * n, 0)));
            for (n, last) in lasts.iter().enumerate() {
                words.insert(at + 8 + 8 * n as u64, *last);
            }
            for (n, slot) in slots.iter().enumerate() {
                words.insert(at + 8 * (16 + n as u64), *slot);
            }
        };
        node(top, &[0xffff, u64::MAX], &[low | LEAF << 3, high | LEAF << 3]);
        node(low, &[0xfff, 0x1fff, 0xffff], &[0, 0xaa0, 0]);
        node(high, &[0x1_ffff, 0x2_ffff], &[0xbb0, 0, 0xcc0]);
        words
    }

    #[test]
    fn entries_are_found_by_address() {
        let words = tree();
        let word = |at: u64| words.get(&at).copied();
        let find = |address| mapped(0x1000 | RANGES << 3 | 2, address, &word);
        assert_eq!([find(0), find(0x1000), find(0x1fff)], [None, Some(0xaa0), Some(0xaa0)]);
        assert_eq!([find(0x2000), find(0x1_0000)], [None, Some(0xbb0)]);
        assert_eq!([find(0x2_0000), find(0x3_0000)], [None, Some(0xcc0)], "the last has no end");
    }

    #[test]
    fn a_tree_that_leads_to_itself_ends() {
        let loops = |at: u64| Some(if at >= 0x1080 { 0x1000 | RANGES << 3 } else { u64::MAX });
        assert_eq!(mapped(0x1000 | RANGES << 3, 5, &loops), None);
        assert_eq!(mapped(0x1000 | 9 << 3, 5, &loops), None, "a kind that is not known");
    }
}
