//! More files than descriptors, while the guest and the host rename them.
//!
//! `RING3_MANY_FILES` says how many instead of 20,000.

mod client;

use std::{
    collections::HashMap,
    env, fs,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use client::{Client, ROOT};
use rustix::process::{Resource, Rlimit, setrlimit};
use sharedfs::Keeping;

const IN_A_FOLDER: usize = 200;
const ESTALE: i32 = 116;
/// Renames by the guest while the host renames, too.
const STEPS: usize = 4000;

fn how_many() -> usize {
    let asked = env::var("RING3_MANY_FILES").ok();
    asked.map_or(20_000, |number| number.parse().expect("RING3_MANY_FILES is a number"))
}

fn limit(descriptors: u64) {
    let limit = Rlimit { current: Some(descriptors), maximum: Some(descriptors) };
    setrlimit(Resource::Nofile, limit).expect("fewer descriptors");
}

fn open_now() -> usize {
    fs::read_dir("/proc/self/fd").expect("listed").count()
}

/// Folders of files whose sizes tell them apart.
fn grow(root: &Path, files: usize) {
    for folder in 0..files / IN_A_FOLDER {
        let folder = root.join(format!("d{folder}"));
        fs::create_dir(&folder).expect("made");
        for file in 0..IN_A_FOLDER {
            let file = fs::File::create(folder.join(format!("f{file}"))).expect("made");
            file.set_len(file.metadata().expect("there").ino()).expect("long");
        }
    }
}

/// Every file of the tree: its node and inode number.
fn walk(client: &mut Client) -> Vec<(u64, u64)> {
    let (mut files, mut folders) = (Vec::new(), vec![ROOT]);
    while let Some(folder) = folders.pop() {
        for listed in client.list(folder, true).expect("listed") {
            match listed.found {
                Some(found) if found.is_folder() => folders.push(found.node),
                Some(found) => files.push((found.node, found.ino)),
                None => {}
            }
        }
    }
    files
}

/// One test: the limit is the process's.
#[test]
fn a_tree_has_more_files_than_there_may_be_descriptors() {
    let directory = tempfile::tempdir().expect("a folder");
    let files = how_many();
    grow(directory.path(), files);
    // Downwards: an ordinary user cannot go up again.
    for descriptors in [20_000, 1024, 256] {
        limit(descriptors);
        let before = open_now();
        let mut client = Client::new(directory.path(), false, Keeping::Usual);
        let known = walk(&mut client);
        assert_eq!(known.len(), files);
        // In an order in which neighbours are far from one another.
        for i in 0..files {
            let (node, ino) = known[i * 7919 % files];
            let found = client.attributes(node).expect("found again");
            assert_eq!((found.ino, found.size), (ino, ino));
            let (handle, _) = client.open(node, 0).expect("opened");
            client.release(node, handle).expect("closed");
        }
        assert!(open_now() - before <= descriptors as usize / 2 + 8, "{} are open", open_now());
        client.forget_all(&known.iter().map(|(node, _)| *node).collect::<Vec<_>>());
        assert_eq!(client.attributes(known[0].0).err(), Some(ESTALE));
    }
    renamed_by_both(directory.path(), files / IN_A_FOLDER);
}

/// Swaps the names of files for as long as it may.
fn stir(root: &Path, folders: usize, go_on: &AtomicBool) {
    let mut step = 1_usize;
    while go_on.load(Ordering::Relaxed) {
        let name = |n: usize| root.join(format!("d{}/f{}", n % folders, n / 7 % IN_A_FOLDER));
        let (a, b) = (name(step.wrapping_mul(2_654_435_761)), name(step.wrapping_mul(40_503)));
        // The guest has just moved one of them.
        let _ = fs::rename(&a, root.join("aside")).and_then(|()| fs::rename(&b, &a));
        let _ = fs::rename(root.join("aside"), &b);
        step += 1;
    }
}

fn renamed_by_both(root: &Path, folders: usize) {
    let mut client = Client::new(root, false, Keeping::Usual);
    let known = walk(&mut client);
    let sizes: HashMap<_, _> = known.iter().copied().collect();
    let nodes: Vec<_> = (0..folders)
        .map(|n| client.lookup(ROOT, format!("d{n}").as_bytes()).expect("there").node)
        .collect();
    let go_on = AtomicBool::new(true);
    let mut stale = 0;
    thread::scope(|scope| {
        scope.spawn(|| stir(root, folders, &go_on));
        for step in 0..known.len().min(STEPS) {
            let (from, to) = (nodes[step % folders], nodes[step / 3 % folders]);
            let name = |n: usize| format!("f{}", n % IN_A_FOLDER).into_bytes();
            let _ = client.rename((from, &name(step)), (to, &name(step / 2)));
            let (node, ino) = known[step * 7919 % known.len()];
            match client.attributes(node) {
                Ok(found) => assert_eq!((found.ino, found.size), (ino, ino), "another file"),
                Err(error) => {
                    assert_eq!(error, ESTALE);
                    stale += 1;
                }
            }
            if let Ok(found) = client.lookup(to, &name(step / 2))
                && let Some(ino) = sizes.get(&found.node)
            {
                assert_eq!(found.ino, *ino, "another file");
            }
        }
        go_on.store(false, Ordering::Relaxed);
    });
    println!("{stale} of {} were elsewhere", known.len().min(STEPS));
    // At rest each name leads to its file, whatever the guest knew of it.
    for node in nodes {
        for listed in client.list(node, true).expect("listed") {
            let Some(found) = listed.found else { continue };
            assert_eq!(client.attributes(found.node).expect("there").ino, found.ino);
            assert_eq!(found.size, found.ino);
        }
    }
    let all = fs::read_dir(root).expect("listed").flatten();
    let folders =
        all.filter(|entry| entry.metadata().is_ok_and(|data| data.is_dir() && data.ino() > 0));
    assert_eq!(folders.count(), known.len() / IN_A_FOLDER);
}
