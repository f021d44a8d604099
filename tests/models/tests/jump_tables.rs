//! The jump tables of translated code: vCPUs search them without a lock while others change them under one.
//!
//! A model's vCPU does what the routine for indirect jumps does (`jit/src/stubs.rs`), read by read.

use std::{
    collections::HashMap,
    sync::{Arc, LazyLock},
};

use jit::{
    Layout, Level,
    cache::{Cache, CodeMemory, CodeUser},
    stubs,
};
use shuttle::{
    check_pct, check_random,
    rand::{Rng, thread_rng},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    thread,
};
use wedge_abi::{DEEP, DEEP_REACH, deep_slot};

const LAYOUT: Layout = Layout {
    level: Level::Kernel,
    several: true,
    bias: 0,
    regions: 0x10_0000_0000,
    copies: None,
    cache: 0x10_1000_0000,
    cache_len: stubs::LEN + 0x1000,
    vcpu_page: 0x10_2000_0000,
    table: 0x10_3000_0000,
    landings: Some(0x1000_0000),
    checks: false,
    lookups: None,
    verified: None,
    origins: None,
};

/// Addresses whose search starts at the same slot. They have no landings: a landing lets in only who means it.
static GUESTS: LazyLock<[u64; 3]> = LazyLock::new(|| {
    let first = 0xffff_8880_0100_0000_u64;
    let all = (first..).step_by(16);
    let mut same = all.filter(|guest| deep_slot(*guest) == deep_slot(first));
    [(); 3].map(|()| same.next().expect("an address"))
});

/// The words of the tables that lead to those.
struct Words(HashMap<u64, AtomicU64>);

impl Words {
    fn new() -> Self {
        let slots = GUESTS.iter().flat_map(|guest| deep_keys(*guest));
        let all = slots.flat_map(|key| [key, key + 8]);
        Self(all.map(|at| (at, AtomicU64::new(0))).collect())
    }

    fn read(&self, at: u64) -> u64 {
        self.0[&at].load(SeqCst)
    }

    /// HVA of what a search finds.
    fn find(&self, guest: u64) -> Option<u64> {
        let key = deep_keys(guest).find(|key| self.read(*key) == guest);
        key.map(|key| self.read(key + 8))
    }
}

fn deep_keys(guest: u64) -> impl Iterator<Item = u64> {
    (0..DEEP_REACH).map(move |n| (DEEP + (deep_slot(guest) + n) * 16) as u64)
}

impl CodeMemory for &Words {
    fn write_code(&mut self, _: u64, _: &[u8]) {}
    fn is_closed(&self, _: u64, _: &[u8]) -> bool {
        true
    }
    fn write_table(&mut self, offset: u64, value: u64) {
        if let Some(word) = self.0.get(&offset) {
            word.store(value, SeqCst);
        }
    }
    fn table_word(&self, offset: u64) -> u64 {
        self.0.get(&offset).map_or(0, |word| word.load(SeqCst))
    }
}

struct Machine {
    words: Words,
    cache: Mutex<Cache>,
    /// Whose each block is that there was ever, by its HVA.
    blocks: std::sync::Mutex<HashMap<u64, u64>>,
}

impl Machine {
    fn new(several: bool) -> Self {
        let words = Words::new();
        let cache = Mutex::new(Cache::new(Layout { several, ..LAYOUT }, &mut &words));
        Self { words, cache, blocks: Default::default() }
    }

    /// A vCPU comes to the monitor, outside of translated code: a block is shown again or dropped, and another is made.
    fn change(&self, user: CodeUser) {
        let mut cache = self.cache.lock().expect("nobody panics");
        let memory = &mut &self.words;
        let [guest, other] = [(); 2].map(|()| GUESTS[thread_rng().gen_range(0..3)]);
        cache.pass(user);
        match thread_rng().gen_range(0..2) {
            0 => cache.drop_page(memory, guest & 0xff_f000),
            _ => cache.publish(memory, guest, false),
        }
        if cache.find(other, false).is_none() {
            self.add(&mut cache, other);
        }
        cache.pass(user);
    }

    fn add(&self, cache: &mut Cache, guest: u64) {
        // Whoever finds a block finds whose it is: it will be where there is room.
        let host = LAYOUT.cache + cache.size().1;
        self.blocks.lock().expect("nobody panics").insert(host, guest);
        let memory = &mut &self.words;
        let made = cache.add(memory, guest, &[0xf4], 1, (false, false), [guest & 0xff_f000; 2]);
        assert_eq!(made, Ok(host));
    }

    /// A vCPU is in translated code, and comes to some indirect jumps.
    fn run(&self) {
        for _ in 0..3 {
            let guest = GUESTS[thread_rng().gen_range(0..3)];
            if let Some(host) = self.words.find(guest) {
                let whose = self.blocks.lock().expect("nobody panics").get(&host).copied();
                assert_eq!(whose, Some(guest), "a jump leads to the block of another address");
            }
        }
    }
}

fn vcpus(several: bool) {
    let machine = Arc::new(Machine::new(several));
    let users = [(); 3].map(|()| machine.cache.lock().expect("nobody panics").add_user());
    let threads = users.map(|user| {
        let machine = Arc::clone(&machine);
        thread::spawn(move || {
            for _ in 0..4 {
                machine.change(user);
                machine.run();
            }
        })
    });
    for thread in threads {
        thread.join().expect("it ends");
    }
}

#[test]
fn an_indirect_jump_finds_the_block_of_its_own_address() {
    check_random(|| vcpus(true), 1500);
    check_pct(|| vcpus(true), 500, 3);
}

/// The model finds what the books for several vCPUs are for.
#[test]
#[should_panic(expected = "the block of another address")]
fn without_waiting_for_others_it_does_not() {
    check_random(|| vcpus(false), 20_000);
}
