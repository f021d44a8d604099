//! What a guest sees of a folder that it and the host change.

mod client;

use std::{
    fs,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::Path,
};

use client::{Client, ROOT};
use sharedfs::Keeping;

const ENOSYS: i32 = 38;
const ESTALE: i32 = 116;
const KEEP_CACHE: u32 = 2;

fn writable(path: &Path) -> Client {
    Client::new(path, false, Keeping::Usual)
}

#[test]
fn inode_numbers_agree_wherever_they_are_told() {
    let directory = tempfile::tempdir().expect("a folder");
    let at = |name: &str| directory.path().join(name);
    fs::create_dir(at("d")).expect("made");
    for i in 0..300 {
        fs::write(at(&format!("d/{i}")), "x").expect("written");
    }
    fs::write(directory.path().join(std::ffi::OsStr::from_bytes(b"d/\xff\xfe")), "x")
        .expect("written");
    let mut client = writable(directory.path());
    let folder = client.lookup(ROOT, b"d").expect("there");
    for plus in [false, true] {
        let all = client.list(folder.node, plus).expect("listed");
        assert_eq!(all.len(), 303, "with . and ..");
        for listed in all {
            let path = at("d").join(std::ffi::OsStr::from_bytes(&listed.name));
            assert_eq!(listed.ino, fs::metadata(&path).expect("there").ino(), "{path:?}");
            if listed.name.starts_with(b".") {
                assert_eq!(listed.found, None);
                continue;
            }
            let found = client.lookup(folder.node, &listed.name).expect("there");
            assert_eq!(found.ino, listed.ino);
            assert_eq!(client.attributes(found.node).expect("there").ino, listed.ino);
            assert!(listed.found.is_none_or(|listed| listed.node == found.node));
        }
    }
}

#[test]
fn a_folder_that_lasts_is_asked_for_once() {
    let directory = tempfile::tempdir().expect("a folder");
    fs::write(directory.path().join("a"), "abc").expect("written");
    let mut client = Client::new(directory.path(), true, Keeping::Lasting);
    const YEAR: u64 = 365 * 24 * 3600;
    let absent = client.lookup(ROOT, b"nothing").expect("an answer to keep");
    assert!(absent.node == 0 && absent.valid.0 > YEAR, "{absent:?}");
    let found = client.lookup(ROOT, b"a").expect("there");
    assert!(found.valid.0 > YEAR && found.valid.1 > YEAR, "{found:?}");
    assert_eq!(client.open(found.node, 0), Err(ENOSYS), "opened without a word from now on");
    assert_eq!(client.read(found.node, 0, 100).expect("read"), b"abc");
    assert_eq!(client.ask(22, found.node, &[0; 16]).err(), Some(ENOSYS), "no attributes");
    assert_eq!(client.list(ROOT, true).expect("listed").len(), 3);
    let mut client = Client::new(directory.path(), true, Keeping::Fresh);
    let absent = client.lookup(ROOT, b"nothing").expect("an answer to keep");
    assert_eq!(
        (absent.node, absent.valid.0),
        (0, 1),
        "for a second, in which nothing else is promised either"
    );
    let found = client.lookup(ROOT, b"a").expect("there");
    assert_eq!(found.valid, (1, 1));
    let (handle, _) = client.open(found.node, 0).expect("opened");
    assert_eq!(client.read(found.node, handle, 100).expect("read"), b"abc");
}

/// Where there are none the guest does not look for a file's capabilities before it writes to it.
#[test]
fn a_written_folder_has_extended_attributes_unless_it_is_kept() {
    let directory = tempfile::tempdir().expect("a folder");
    fs::write(directory.path().join("a"), "abc").expect("written");
    const ENODATA: i32 = 61;
    let capability = [&[0; 8][..], b"security.capability\0"].concat();
    for (keeping, error) in
        [(Keeping::Fresh, ENODATA), (Keeping::Usual, ENODATA), (Keeping::Lasting, ENOSYS)]
    {
        let mut client = Client::new(directory.path(), false, keeping);
        let found = client.lookup(ROOT, b"a").expect("there");
        assert_eq!(client.ask(22, found.node, &capability).err(), Some(error), "{keeping:?}");
        assert_eq!(found.valid, (0, 0), "the host may change it: for less than a second");
    }
}

/// A guest that has been told that there is nothing may try to make it all the same.
#[test]
fn what_the_host_makes_is_found_by_who_was_told_of_nothing() {
    let directory = tempfile::tempdir().expect("a folder");
    let mut client = writable(directory.path());
    assert_eq!(client.lookup(ROOT, b"a").expect("nothing").node, 0);
    fs::write(directory.path().join("a"), "abc").expect("written");
    let (made, handle) = client.create(ROOT, b"a").expect("opened");
    assert_eq!(client.read(made.node, handle, 10).expect("read"), b"abc");
    assert_eq!(client.lookup(ROOT, b"a").expect("there").node, made.node);
}

#[test]
fn what_is_in_the_cache_is_kept_while_nobody_changes_it() {
    let directory = tempfile::tempdir().expect("a folder");
    let path = directory.path().join("a");
    fs::write(&path, "abc").expect("written");
    let mut client = writable(directory.path());
    let found = client.lookup(ROOT, b"a").expect("there");
    let keeps = |client: &mut Client| {
        let (handle, options) = client.open(found.node, 0).expect("opened");
        client.release(found.node, handle).expect("closed");
        options & KEEP_CACHE != 0
    };
    keeps(&mut client);
    assert!(!keeps(&mut client), "it was changed a moment ago, and may be again in the same tick");
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(!keeps(&mut client), "seen for the first time");
    assert!(keeps(&mut client));
    fs::write(&path, "xyz").expect("written");
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(!keeps(&mut client), "of the same length, but changed");
    assert!(keeps(&mut client));
}

#[test]
fn an_open_file_outlives_its_name() {
    let directory = tempfile::tempdir().expect("a folder");
    let mut client = writable(directory.path());
    let (made, handle) = client.create(ROOT, b"a").expect("made");
    fs::write(directory.path().join("a"), "abc").expect("written");
    client.remove(ROOT, b"a").expect("removed");
    assert_eq!(client.attributes(made.node).expect("open").size, 3);
    let (other, other_handle) = client.create(ROOT, b"a").expect("made");
    assert_ne!(other.node, made.node, "another file, though it may have the inode number");
    assert_eq!(client.read(made.node, handle, 10).expect("read"), b"abc");
    assert_eq!(client.read(other.node, other_handle, 10).expect("read"), b"");
    // The host removes one that the guest has open.
    fs::remove_file(directory.path().join("a")).expect("removed");
    assert_eq!(client.attributes(other.node).expect("open").size, 0);
    client.release(other.node, other_handle).expect("closed");
    client.forget(other.node, 1);
    assert_eq!(client.attributes(other.node).err(), Some(ESTALE));
}

#[test]
fn names_given_by_the_guest_lead_to_the_same_file() {
    let directory = tempfile::tempdir().expect("a folder");
    fs::create_dir(directory.path().join("d")).expect("made");
    fs::write(directory.path().join("a"), "abc").expect("written");
    let mut client = writable(directory.path());
    let (a, d) = (client.lookup(ROOT, b"a").expect("a"), client.lookup(ROOT, b"d").expect("d"));
    let linked = client.link(a.node, d.node, b"b").expect("linked");
    assert_eq!((linked.node, linked.ino), (a.node, a.ino));
    client.remove(ROOT, b"a").expect("removed");
    assert_eq!(client.attributes(a.node).expect("by its other name").size, 3);
    client.rename((ROOT, b"d"), (ROOT, b"e")).expect("renamed");
    client.rename((d.node, b"b"), (ROOT, b"c")).expect("renamed");
    assert_eq!(client.attributes(a.node).expect("by its new name").ino, a.ino);
    assert_eq!(client.attributes(d.node).expect("by its new name").ino, d.ino);
    fs::write(directory.path().join("victim"), "").expect("written");
    let victim = client.lookup(ROOT, b"victim").expect("there");
    client.rename((ROOT, b"c"), (ROOT, b"victim")).expect("renamed");
    assert_eq!(client.lookup(ROOT, b"victim").expect("there").node, a.node);
    assert_eq!(client.attributes(victim.node).expect("not forgotten").ino, victim.ino);
}

#[test]
fn a_link_in_place_of_a_folder_leads_nowhere() {
    let directory = tempfile::tempdir().expect("a folder");
    let at = |name: &str| directory.path().join(name);
    fs::create_dir_all(at("shared/d")).expect("made");
    fs::create_dir_all(at("outside")).expect("made");
    fs::write(at("shared/d/a"), "inside").expect("written");
    fs::write(at("outside/a"), "outside!").expect("written");
    let mut client = writable(&at("shared"));
    let d = client.lookup(ROOT, b"d").expect("there");
    let a = client.lookup(d.node, b"a").expect("there");
    fs::rename(at("shared/d"), at("kept")).expect("moved");
    std::os::unix::fs::symlink(at("outside"), at("shared/d")).expect("linked");
    // Whatever it makes of the folder that was moved away, it is never the other one.
    for _ in 0..3 {
        if let Ok(found) = client.lookup(d.node, b"a") {
            assert_eq!(found.ino, a.ino);
        }
    }
    let link = client.lookup(ROOT, b"d").expect("there");
    assert!(!link.is_folder());
    assert!(client.lookup(link.node, b"a").is_err());
    assert!(client.create(link.node, b"b").is_err());
    assert!(!at("outside/b").exists());
}

#[test]
fn a_path_may_be_longer_than_the_host_takes_at_once() {
    const DEEP: usize = 60;
    let directory = tempfile::tempdir().expect("a folder");
    let mut client = writable(directory.path());
    let name = vec![b'n'; 200];
    let mut folders = vec![ROOT];
    for _ in 0..DEEP {
        let made = client.make_folder(folders[folders.len() - 1], &name).expect("made");
        folders.push(made.node);
    }
    let deepest = folders[DEEP];
    let (made, handle) = client.create(deepest, b"a").expect("made");
    client.release(made.node, handle).expect("closed");
    for folder in &folders {
        assert!(client.attributes(*folder).expect("there").is_folder());
    }
    assert_eq!(client.attributes(made.node).expect("there").ino, made.ino);
    client.remove(deepest, b"a").expect("removed");
    // Nobody could remove them by path.
    for folder in folders[..DEEP].iter().rev() {
        client.remove_folder(*folder, &name).expect("removed");
    }
}

#[test]
fn only_files_and_folders_are_opened() {
    const EBADF: i32 = 9;
    let directory = tempfile::tempdir().expect("a folder");
    let at = |name: &str| directory.path().join(name);
    let _socket = std::os::unix::net::UnixListener::bind(at("socket")).expect("a socket");
    std::os::unix::fs::symlink("/etc/passwd", at("link")).expect("linked");
    let fifo = rustix::fs::FileType::Fifo;
    let mode = rustix::fs::Mode::from_raw_mode(0o644);
    rustix::fs::mknodat(rustix::fs::CWD, at("fifo"), fifo, mode, 0).expect("a FIFO");
    let mut client = writable(directory.path());
    for name in ["socket", "link", "fifo"] {
        let found = client.lookup(ROOT, name.as_bytes()).expect("there");
        // Opening a FIFO would wait for its other end.
        assert_eq!(client.open(found.node, 0), Err(EBADF), "{name}");
        assert_eq!(client.attributes(found.node).expect("there").ino, found.ino);
    }
}

#[test]
fn a_large_folder_is_listed_once_while_it_shrinks() {
    const FILES: usize = 5000;
    let directory = tempfile::tempdir().expect("a folder");
    for i in 0..FILES {
        fs::write(directory.path().join(i.to_string()), "").expect("written");
    }
    let mut client = writable(directory.path());
    for plus in [false, true] {
        let all = client.list(ROOT, plus).expect("listed");
        let names: std::collections::HashSet<_> = all.iter().map(|listed| &listed.name).collect();
        assert_eq!((names.len(), all.len()), (FILES + 2, FILES + 2));
    }
    let stays = |name: &[u8]| name.last().is_some_and(|digit| digit % 2 == 0);
    let mut asked = 0;
    let all = client.list_meanwhile(ROOT, &mut || {
        for i in (asked * 100..asked * 100 + 100).filter(|i| i % 2 == 1) {
            // Those beyond the last one are not there.
            let _ = fs::remove_file(directory.path().join(i.to_string()));
        }
        asked += 1;
    });
    let left = all.expect("listed").into_iter().filter(|listed| stays(&listed.name));
    let names: Vec<_> = left.map(|listed| listed.name).filter(|name| name[0] != b'.').collect();
    let different: std::collections::HashSet<_> = names.iter().collect();
    assert_eq!((names.len(), different.len()), (FILES / 2, FILES / 2), "what stays is listed once");
}
