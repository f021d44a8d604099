//! A stranger writes random words into every page that a machine shares with its wedges, while it runs. The machine
//! may end, with words about it; the monitor goes on.
//!
//! What guest code writes as a rule are registers. Here it is anything, at any time: commands, reports, look-ups,
//! turns. Words of the turns can leave everybody waiting for somebody else. Then the wedge is killed, as a host
//! does that has no memory, and the monitor is to notice.

use crate::{
    Fast,
    test_machine::{MODES, board, kernel_state, map},
};
use bus::Kicker;
use engine::{Engine, VcpuRequests};
use iced_x86::code_asm::*;
use ram::Ram;
use std::{
    fs::{self, File},
    os::unix::fs::{FileExt, MetadataExt},
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use wedge_abi::{LOOKUP_COUNT, Lookup, Shared, TurnsPage, VcpuPage};
use x86::paging::{G, US};
use x86_interp::{Exit, GuestRam};

const CODE: (u64, u64) = (0xffff_ffff_8100_0000, 0x4_0000);
const DATA: (u64, u64) = (0xffff_ffff_8200_0000, 0x5_0000);
const PROGRAM: (u64, u64) = (0x5555_0000_0000, 0x6_0000);
/// Words that are written.
const WORDS: u64 = 1_000_000;
/// Words between two kicks.
const BETWEEN: u64 = 500;
/// So long may a machine be silent before its wedges are killed.
const SILENCE: Duration = Duration::from_millis(300);
/// The test gives up after so long.
const LONG: Duration = Duration::from_secs(60);
/// Instructions that the interpreter goes on for.
const BUDGET: u64 = 20_000;

/// What the kernel does for ever: loads and stores of its own and of the user's, call-outs, invalidations, FPU state.
fn kernel() -> Vec<u8> {
    let mut a = CodeAssembler::new(64).expect("64 bits");
    let assemble = |a: &mut CodeAssembler| {
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.mov(rbx, DATA.0)?;
        a.mov(qword_ptr(rbx + 64), r8)?;
        a.add(r8, 1)?;
        a.mov(r12, PROGRAM.0)?;
        a.stac()?;
        a.add(qword_ptr(r12), r8)?;
        a.clac()?;
        a.invlpg(ptr(r12))?;
        a.xor(eax, eax)?;
        a.cpuid()?;
        a.mov(rax, cr3)?;
        a.mov(cr3, rax)?;
        a.jmp(again)?;
        a.assemble(CODE.0)
    };
    assemble(&mut a).expect("it assembles")
}

fn machine() -> (Fast, Arc<VcpuRequests>) {
    let ram = Ram::new(2 << 20).expect("memory");
    map(&ram, &[(CODE, G), (DATA, G), (PROGRAM, US)]);
    ram.write(CODE.1, &kernel());
    let requests = Arc::new(VcpuRequests::default());
    let vcpu = kernel_state(CODE.0, DATA.0 + 0x800);
    let board = board(ram, requests.clone());
    let fast = Fast::new(
        vcpu,
        board,
        &requests,
        MODES,
        (&crate::Machine::new(1), &crate::Placement::default()),
    );
    (fast.expect("an engine"), requests)
}

/// A memory object that wedges can write, and its bytes.
type Target = (File, u64);

/// What the stranger is at.
#[derive(Default)]
struct Scene {
    wedges: Vec<i32>,
    targets: Vec<Target>,
    requests: Option<Arc<VcpuRequests>>,
}

struct Stage {
    scene: Mutex<Scene>,
    written: AtomicU64,
    /// Times that the monitor has come back.
    heard: AtomicU64,
    over: AtomicBool,
}

/// Objects by what is behind `memfd:`, with the bytes of each that mean something.
const OBJECTS: [(&str, u64); 4] = [
    ("ring3-vcpu", size_of::<VcpuPage>() as u64),
    ("ring3-wedge-orders", size_of::<Shared>() as u64),
    ("ring3-turns", size_of::<TurnsPage>() as u64),
    ("ring3-lookups", (LOOKUP_COUNT * size_of::<Lookup>()) as u64),
];

/// The objects that a wedge has mapped, by inode: other tests of this process have some of the same names.
fn mapped_by(wedge: i32) -> Vec<u64> {
    let maps = fs::read_to_string(format!("/proc/{wedge}/maps")).unwrap_or_default();
    let of_ours = maps.lines().filter(|line| line.contains("memfd:ring3-"));
    of_ours.filter_map(|line| line.split_whitespace().nth(4)?.parse().ok()).collect()
}

/// This process's descriptors of what wedges can write.
fn targets(wedges: &[i32]) -> Vec<Target> {
    let inodes: Vec<u64> = wedges.iter().flat_map(|wedge| mapped_by(*wedge)).collect();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc/self/fd").into_iter().flatten().flatten() {
        let name = fs::read_link(entry.path()).unwrap_or_default().display().to_string();
        let known = OBJECTS.iter().find(|(object, _)| name.contains(&format!("memfd:{object} ")));
        let Some((_, len)) = known else { continue };
        let Ok(file) = File::options().read(true).write(true).open(entry.path()) else { continue };
        if file.metadata().is_ok_and(|known| inodes.contains(&known.ino())) {
            found.push((file, *len));
        }
    }
    found
}

/// A word that may mean something, or not.
fn word(random: u64) -> u64 {
    match random % 4 {
        0 => random >> 8,
        1 => random >> 8 & 0x1f,
        2 => random >> 8 & !0xfff & ((1 << 47) - 1),
        _ => 0,
    }
}

/// Writes words until there are enough.
fn overwrite(stage: &Stage) {
    let mut random = 1_u64;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let mut heard = (0, Instant::now());
    while !stage.over.load(Ordering::Relaxed) {
        let scene = stage.scene.lock().expect("nobody panics with it");
        for _ in 0..BETWEEN {
            // The turns last, and seldom: nothing else happens after most of their words.
            let turns = next().is_multiple_of(4096);
            let of = |target: &&Target| (target.1 == size_of::<TurnsPage>() as u64) == turns;
            let known: Vec<&Target> = scene.targets.iter().filter(of).collect();
            let Some((file, len)) = known.get(next() as usize % known.len().max(1)) else { break };
            // Mostly near the start, where most of what means something lies.
            let within = if next().is_multiple_of(2) { 1024.min(*len) } else { *len };
            let offset = (next() % within) & !7;
            file.write_all_at(&word(next()).to_le_bytes(), offset).expect("memory");
            stage.written.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(requests) = &scene.requests {
            requests.kick();
        }
        let now = stage.heard.load(Ordering::Relaxed);
        if now != heard.0 {
            heard = (now, Instant::now());
        } else if heard.1.elapsed() > SILENCE {
            kill(&scene.wedges);
            heard.1 = Instant::now();
        }
        drop(scene);
        thread::sleep(Duration::from_micros(200));
    }
}

fn kill(wedges: &[i32]) {
    let numbers = wedges.iter().map(i32::to_string);
    // One that has ended already is no trouble.
    let _ = Command::new("kill").arg("-9").args(numbers).output();
}

/// Runs a machine until it ends, or has come back so often; whether it ended.
fn run(stage: &Stage, times: u32) -> bool {
    let (mut fast, requests) = machine();
    stage.scene.lock().expect("nobody panics with it").requests = Some(requests.clone());
    for time in 0..times {
        let exit = fast.run(BUDGET);
        stage.heard.fetch_add(1, Ordering::Relaxed);
        let known = stage.scene.lock().expect("nobody panics with it").wedges.clone();
        if known.is_empty() || time % 64 == 63 {
            let wedges: Vec<i32> = fast.slots.processes();
            let targets = targets(&wedges);
            assert!(time > 4 || wedges.is_empty() || targets.len() >= 4, "all is found");
            *stage.scene.lock().expect("nobody panics with it") =
                Scene { wedges, targets, requests: Some(requests.clone()) };
        }
        requests.take_kick();
        if matches!(exit, Exit::Shutdown | Exit::Failed) {
            // The guest's triple fault, or a failure that is not said to be ours.
            let failure = fast.failure();
            assert_eq!(failure.is_some(), exit == Exit::Failed);
            assert!(failure.is_none_or(|failure| failure.whose != contract::Whose::Ours));
            *stage.scene.lock().expect("nobody panics with it") = Scene::default();
            return true;
        }
    }
    *stage.scene.lock().expect("nobody panics with it") = Scene::default();
    false
}

#[test]
fn a_million_words_of_a_stranger_s_are_survived() {
    let stage = Stage {
        scene: Mutex::default(),
        written: AtomicU64::new(0),
        heard: AtomicU64::new(0),
        over: AtomicBool::new(false),
    };
    let (mut machines, mut ended, start) = (0, 0, Instant::now());
    thread::scope(|scope| {
        let stranger = scope.spawn(|| overwrite(&stage));
        // On a host that is busy a machine gets many words before it comes to look.
        let is_enough = |ended| stage.written.load(Ordering::Relaxed) >= WORDS && ended > 1;
        while !is_enough(ended) && !stranger.is_finished() && start.elapsed() < LONG {
            machines += 1;
            ended += u32::from(run(&stage, 2000));
        }
        stage.over.store(true, Ordering::Relaxed);
    });
    println!("{machines} machines, {ended} of which ended");
    assert!(stage.written.load(Ordering::Relaxed) >= WORDS);
    assert!(machines > 1 && ended > 1, "most words end a machine sooner or later");
}
