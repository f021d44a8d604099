//! What a guest may rely on until it is told otherwise, and that it is told.

mod client;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{Read, Write},
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        net::UnixStream,
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use client::{Client, Found, ROOT};
use fastrand::Rng;
use sharedfs::Keeping;
use tempfile::TempDir;

/// Seconds that are a lease.
const LEASE: u64 = 600;
/// Longer than changes are gathered.
const QUIET: Duration = Duration::from_millis(80);
const LONG: Duration = Duration::from_secs(20);

/// Whoever listens in the guest.
struct Listener(UnixStream);

impl Listener {
    fn of(mut stream: UnixStream) -> Self {
        stream.write_all(&[0]).expect("it listens");
        Self(stream)
    }

    /// What has been withdrawn, once there has been nothing more for a while. `see` does what is to be done before that is said to be seen to.
    fn hears(&mut self, mut see: impl FnMut(&str)) -> BTreeSet<String> {
        self.0.set_read_timeout(Some(QUIET)).expect("set");
        let (mut all, mut path, mut byte) = (BTreeSet::new(), Vec::new(), [0]);
        while self.0.read_exact(&mut byte).is_ok() {
            match byte[0] {
                0 if path.is_empty() => self.0.write_all(&[0]).expect("it listens"),
                0 => {
                    let text = String::from_utf8(std::mem::take(&mut path)).expect("a name");
                    see(&text);
                    all.insert(text);
                }
                byte => path.push(byte),
            }
        }
        all
    }

    fn hears_of(&mut self) -> Vec<String> {
        self.hears(|_| {}).into_iter().collect()
    }
}

/// A folder with some files, which is shared with a guest in which somebody listens.
fn shared() -> (TempDir, Client, Listener) {
    let folder = folder();
    let (client, stream) = Client::with_listener(folder.path());
    (folder, client, Listener::of(stream))
}

fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    fs::create_dir(folder.path().join("d")).expect("made");
    for name in ["a", "b", "d/x", "d/y"] {
        fs::write(folder.path().join(name), name).expect("written");
    }
    folder
}

/// Asks for files in a folder until the guest may rely on what it is told.
fn asks(client: &mut Client, folder: u64, names: &[&str]) -> Vec<Found> {
    let start = Instant::now();
    loop {
        let found = names.iter().map(|name| client.lookup(folder, name.as_bytes()).expect("there"));
        let found: Vec<_> = found.collect();
        if found.iter().all(|found| found.valid.0 == LEASE) {
            return found;
        }
        assert!(start.elapsed() < LONG, "{found:?}");
    }
}

#[test]
fn what_the_host_changes_is_withdrawn() {
    let (folder, mut client, mut listener) = shared();
    let at = |name: &str| folder.path().join(name);
    let found = asks(&mut client, ROOT, &["a", "b", "d"]);
    assert_eq!(found[0].valid.1, LEASE);
    asks(&mut client, found[2].node, &["x", "y"]);
    assert_eq!(client.attributes(ROOT).expect("there").valid.1, LEASE);
    assert!(listener.hears_of().is_empty());
    for (what, expected) in [
        (&(|| fs::write(at("a"), "longer")) as &dyn Fn() -> _, &["a"][..]),
        (&|| fs::set_permissions(at("b"), fs::Permissions::from_mode(0o600)), &["b"]),
        (&|| fs::write(at("d/new"), ""), &["d", "d/new"]),
        (&|| fs::rename(at("d/x"), at("d/z")), &["d", "d/x", "d/z"]),
        (&|| fs::rename(at("a"), at("b")), &[".", "a", "b"]),
        (&|| fs::remove_file(at("d/y")), &["d", "d/y"]),
        (&|| fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o750)), &["."]),
    ] {
        what().expect("done");
        assert_eq!(listener.hears_of(), expected);
    }
}

#[test]
fn what_the_guest_changes_is_not_withdrawn() {
    let (folder, mut client, mut listener) = shared();
    let found = asks(&mut client, ROOT, &["a", "b", "d"]);
    let inner = found[2].node;
    asks(&mut client, inner, &["x", "y"]);
    let (made, handle) = client.create(inner, b"made").expect("made");
    assert_eq!(made.valid, (LEASE, LEASE));
    client.write(made.node, handle, 0, b"content").expect("written");
    assert_eq!(client.set_mode(made.node, 0o600).expect("set").valid.1, LEASE);
    client.release(made.node, handle).expect("closed");
    client.rename((inner, b"made"), (ROOT, b"a")).expect("renamed");
    client.remove(inner, b"x").expect("removed");
    client.make_folder(inner, b"folder").expect("made");
    client.remove_folder(inner, b"folder").expect("removed");
    client.set_mode(inner, 0o700).expect("set");
    fs::write(folder.path().join("b"), "by the host").expect("written");
    assert_eq!(listener.hears_of(), ["b"], "and nothing else");
}

#[test]
fn what_only_makes_and_removes_files_is_promised_nothing() {
    let (_folder, mut client, _listener) = shared();
    asks(&mut client, ROOT, &["a", "b"]);
    let made = client.make_folder(ROOT, b"made").expect("made");
    for name in [&b"1"[..], b"2", b"3", b"4"] {
        let (file, handle) = client.create(made.node, name).expect("made");
        assert_eq!(file.valid, (0, 0));
        client.release(file.node, handle).expect("closed");
    }
    assert!(client.list(made.node, true).expect("listed").len() > 4);
    let (file, _) = client.create(made.node, b"5").expect("made");
    assert_eq!(file.valid, (0, 0), "the host's watches have a price");
}

#[test]
fn a_file_with_several_names_may_change_unseen() {
    let (folder, mut client, mut listener) = shared();
    let at = |name: &str| folder.path().join(name);
    asks(&mut client, ROOT, &["a", "b"]);
    fs::hard_link(at("a"), at("d/link")).expect("linked");
    let d = client.lookup(ROOT, b"d").expect("there").node;
    for _ in 0..3 {
        assert_eq!(client.lookup(d, b"link").expect("there").valid, (0, 0));
    }
    assert!(listener.hears_of().contains(&"a".to_owned()), "it had one name");
    assert_eq!(client.lookup(ROOT, b"a").expect("there").valid, (0, 0));
}

#[test]
fn a_file_that_is_open_is_withdrawn_though_no_name_leads_there() {
    let (folder, mut client, mut listener) = shared();
    let at = |name: &str| folder.path().join(name);
    let a = asks(&mut client, ROOT, &["a", "b"])[0].node;
    client.open(a, 0).expect("opened");
    assert_eq!(client.attributes(a).expect("there").valid.1, LEASE);
    fs::rename(at("a"), at("d/elsewhere")).expect("moved");
    assert_eq!(listener.hears_of(), [".".to_owned(), format!("/{a}"), "a".to_owned()]);
    assert_eq!(client.attributes(a).expect("open").valid.1, 0, "nobody tells of changes there");
}

#[test]
fn without_a_listener_the_guest_asks() {
    let folder = folder();
    let mut client = Client::new(folder.path(), false, Keeping::Lasting);
    for _ in 0..10 {
        assert_eq!(client.lookup(ROOT, b"a").expect("there").valid, (0, 0));
    }
    let (_folder, mut client, listener) = shared();
    asks(&mut client, ROOT, &["a", "b"]);
    drop(listener);
    let start = Instant::now();
    while client.lookup(ROOT, b"a").expect("there").valid != (0, 0) {
        assert!(start.elapsed() < LONG, "nobody listens any more");
    }
}

#[test]
fn a_guest_that_forgets_is_told_nothing() {
    let (folder, mut client, mut listener) = shared();
    let at = |name: &str| folder.path().join(name);
    let d = client.lookup(ROOT, b"d").expect("there").node;
    let inner = asks(&mut client, d, &["x", "y"]);
    inner.iter().for_each(|found| client.forget(found.node, 1000));
    client.forget(d, 1000);
    fs::write(at("d/x"), "changed").expect("written");
    assert!(listener.hears_of().is_empty());
}

/// More changes at once than the host keeps: all that the guest relies on is withdrawn.
#[test]
fn changes_that_the_host_has_lost_count_of_are_withdrawn() {
    let limit = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").expect("a number");
    let limit: usize = limit.trim().parse().expect("a number");
    let (folder, mut client, mut listener) = shared();
    let found = asks(&mut client, ROOT, &["a", "b", "d"]);
    asks(&mut client, found[2].node, &["x", "y"]);
    // The thread that reads them waits until these have been seen to.
    fs::write(folder.path().join("b"), "changed").expect("written");
    listener.0.set_read_timeout(Some(LONG)).expect("set");
    listener.0.read_exact(&mut [0; 3]).expect("of b");
    for round in 0..limit {
        // Two that follow each other and are alike would be one.
        fs::write(folder.path().join(["d/x", "d/y"][round % 2]), "changed").expect("written");
    }
    fs::write(folder.path().join("a"), "unseen").expect("written");
    listener.0.write_all(&[0]).expect("it listens");
    let heard = listener.hears_of();
    for name in ["a", "b", "d", "d/x", "d/y"] {
        assert!(heard.iter().any(|heard| heard == name), "{name} in {heard:?}");
    }
}

fn number(text: &str) -> u64 {
    text.parse().expect("a number")
}

/// What a guest's kernel remembers: names by folder, and attributes.
#[derive(Default)]
struct Cache {
    names: BTreeMap<(u64, String), u64>,
    attributes: BTreeMap<u64, Found>,
}

impl Cache {
    /// It keeps what it may rely on, and forgets the rest at once.
    fn keep(&mut self, folder: u64, name: &str, found: Option<Found>) {
        let key = (folder, name.to_owned());
        self.names.remove(&key);
        let Some(found) = found else { return };
        if found.valid.0 == LEASE {
            self.names.insert(key, found.node);
        }
        self.attributes.remove(&found.node);
        if found.valid.1 == LEASE {
            self.attributes.insert(found.node, found);
        }
    }

    fn node(&self, client: &mut Client, path: &str) -> Option<u64> {
        path.split('/').filter(|name| *name != ".").try_fold(ROOT, |folder, name| {
            let known = self.names.get(&(folder, name.to_owned())).copied();
            known.or_else(|| client.lookup(folder, name.as_bytes()).ok().map(|found| found.node))
        })
    }

    /// Looks a name up whatever it remembers.
    fn look(&mut self, client: &mut Client, path: &str) {
        let node = if path == "." { Some(ROOT) } else { path.strip_prefix('/').map(number) };
        if let Some(node) = node {
            self.attributes.remove(&node);
            let found = client.attributes(node).ok().filter(|found| found.valid.1 == LEASE);
            found.map(|found| self.attributes.insert(node, found));
            return;
        }
        let (folder, name) = path.rsplit_once('/').unwrap_or((".", path));
        let Some(folder) = self.node(client, folder) else { return };
        let found = client.lookup(folder, name.as_bytes()).ok().filter(|found| found.node != 0);
        self.keep(folder, name, found);
    }

    /// All it relies on is so.
    fn check(&self, folder: u64, path: &Path, step: usize) {
        for ((_, name), node) in
            self.names.range((folder, String::new())..(folder + 1, String::new()))
        {
            let path = path.join(name);
            let is = fs::symlink_metadata(&path);
            let is = is.unwrap_or_else(|error| panic!("step {step}: {}: {error}", path.display()));
            if let Some(told) = self.attributes.get(node) {
                let now =
                    (is.ino(), is.size(), is.mode(), is.mtime() as u64, is.mtime_nsec() as u32);
                let told = (told.ino, told.size, told.mode, told.changed.0, told.changed.1);
                assert_eq!(told, now, "step {step}: {}", path.display());
            }
            self.check(*node, &path, step);
        }
    }
}

fn any_path(chance: &mut Rng) -> String {
    let name = ["a", "b", "c"][chance.usize(..3)];
    match chance.usize(..3) {
        0 => name.to_owned(),
        _ => format!("{}/{name}", ["d", "e"][chance.usize(..2)]),
    }
}

/// The host changes something by chance. What is not there cannot be changed.
fn host_changes(root: &Path, chance: &mut Rng) {
    let at = |path: String| -> PathBuf { root.join(path) };
    let (one, other) = (at(any_path(chance)), at(any_path(chance)));
    let _ = match chance.usize(..8) {
        0 | 1 => fs::write(one, vec![b'x'; chance.usize(..100)]),
        2 => fs::remove_file(one),
        3 => fs::rename(one, other),
        4 => fs::hard_link(one, other),
        5 => fs::set_permissions(one, fs::Permissions::from_mode(0o600 + chance.usize(..8) as u32)),
        6 => fs::rename(at("d".to_owned()), at("e".to_owned()))
            .and_then(|()| fs::create_dir(at("d".to_owned()))),
        _ => fs::write(&one, "new").and_then(|()| fs::rename(one, other)),
    };
}

/// The guest changes something by chance, and its kernel remembers that as Linux does.
fn guest_changes(client: &mut Client, cache: &mut Cache, chance: &mut Rng) {
    let path = any_path(chance);
    let (folder, name) = path.rsplit_once('/').unwrap_or((".", &path));
    let Some(folder) = cache.node(client, folder) else { return };
    let touched = |cache: &mut Cache| cache.attributes.remove(&folder);
    match chance.usize(..5) {
        0 => {
            if let Ok((found, handle)) = client.create(folder, name.as_bytes()) {
                client.write(found.node, handle, 0, b"guest").expect("written");
                client.release(found.node, handle).expect("closed");
                cache.keep(folder, name, Some(found));
                // The guest's kernel asks for them once it has written.
                cache.attributes.remove(&found.node);
                touched(cache);
            }
        }
        1 => {
            let _ = client.remove(folder, name.as_bytes());
            let node = cache.names.remove(&(folder, name.to_owned()));
            node.and_then(|node| cache.attributes.remove(&node));
            touched(cache);
        }
        2 => {
            if let Some(node) = cache.node(client, &path)
                && let Ok(found) = client.set_mode(node, 0o644)
            {
                cache.attributes.remove(&node);
                if found.valid.1 == LEASE {
                    cache.attributes.insert(node, found);
                }
            }
        }
        _ => cache.look(client, &path),
    }
}

#[test]
fn whatever_is_changed_the_guest_relies_on_nothing_that_is_not_so() {
    for seed in 1..=4 {
        let (folder, mut client, mut listener) = shared();
        fs::create_dir(folder.path().join("e")).expect("made");
        let mut cache = Cache::default();
        let mut chance = Rng::with_seed(seed);
        let mut relied_on = 0;
        for step in 0..25 {
            for _ in 0..12 {
                match chance.usize(..3) {
                    0 => host_changes(folder.path(), &mut chance),
                    _ => guest_changes(&mut client, &mut cache, &mut chance),
                }
            }
            listener.hears(|path| cache.look(&mut client, path));
            cache.check(ROOT, folder.path(), step);
            relied_on += cache.names.len();
        }
        assert!(relied_on > 25, "{relied_on} names in all");
    }
}
