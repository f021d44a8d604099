//! A disk with faults.
//!
//! The disk's thread serves requests. The power can go at any moment besides, by order of another thread: so what the two share is
//! behind a lock, and the disk's thread sleeps only when it has given that back.

use std::{
    io, mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use virtio::{BlockBackend, SECTOR};

use crate::{
    DiskAction, Effect, Schedule,
    cache::{Cut, WriteCache},
    contents::Contents,
    schedule::{DeviceRequest, Op, Strike},
};

/// A disk whose requests meet the faults of a schedule.
pub struct FaultyDisk {
    core: Arc<Mutex<Core>>,
    /// Where a request waits that is never answered; a test replaces it.
    hang: fn() -> io::Error,
}

/// What another thread than the disk's own can do to it.
#[derive(Clone)]
pub struct DiskControl(Arc<Mutex<Core>>);

struct Core {
    backend: Box<dyn BlockBackend>,
    schedule: Schedule<DiskAction>,
    /// Kept only if the power can go.
    cache: Option<WriteCache>,
    gone: bool,
    /// Nothing is answered any more.
    hung: bool,
    /// How much later the request of the moment is answered.
    late: Duration,
}

impl DiskControl {
    /// The cue of a fault has come.
    pub fn arm(&self, fault: &str) {
        lock(&self.0).schedule.arm(fault);
    }

    /// Cuts the power, once: from then on no request is answered. The record's fault is the name of that which cut it.
    ///
    /// # Errors
    /// The disk below cannot be written.
    pub fn cut(&self, fault: &str) -> io::Result<()> {
        let mut core = lock(&self.0);
        if core.gone {
            return Ok(());
        }
        let cut = core.cut()?;
        core.schedule.record_of(fault, cut);
        Ok(())
    }
}

fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    core.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What faults made of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DiskFate {
    /// It is to be done, at this byte, with so many bytes.
    Done { offset: u64, len: u64 },
    /// It is acknowledged, and not done.
    Dropped,
}

impl FaultyDisk {
    /// `backend` with these faults. `loses_power` says whether it may have to show what a power cut leaves.
    pub fn new(
        backend: Box<dyn BlockBackend>,
        schedule: Schedule<DiskAction>,
        loses_power: bool,
    ) -> Self {
        let (cache, late) = (loses_power.then(WriteCache::default), Duration::ZERO);
        let core = Core { backend, schedule, cache, gone: false, hung: false, late };
        Self { core: Arc::new(Mutex::new(core)), hang: stand_still }
    }

    /// What another thread can do to it.
    pub fn control(&self) -> DiskControl {
        DiskControl(Arc::clone(&self.core))
    }

    fn ask<T>(&self, what: impl FnOnce(&mut Core) -> io::Result<T>) -> io::Result<T> {
        let (answer, late, hung) = {
            let mut core = lock(&self.core);
            let answer =
                if core.hung { Err(io::Error::other("no power")) } else { what(&mut core) };
            (answer, mem::take(&mut core.late), core.hung)
        };
        thread::sleep(late);
        if hung { Err((self.hang)()) } else { answer }
    }
}

impl Core {
    /// Meets the faults that strike this request. `data` is what is to be written.
    fn meet(&mut self, op: Op, offset: u64, len: u64, data: &mut [u8]) -> io::Result<DiskFate> {
        if self.gone {
            return Err(io::Error::other("the disk is gone"));
        }
        let request = DeviceRequest { op, bytes: offset..offset + len };
        let mut fate = DiskFate::Done { offset, len };
        for strike in self.schedule.strikes(&request) {
            self.suffer(strike, &request, &mut fate, data)?;
        }
        Ok(fate)
    }

    fn suffer(
        &mut self,
        strike: Strike<DiskAction>,
        request: &DeviceRequest,
        fate: &mut DiskFate,
        data: &mut [u8],
    ) -> io::Result<()> {
        let (before, mut contents) = (*fate, Vec::new());
        let effect = match strike.action {
            DiskAction::ReadError | DiskAction::WriteError => return self.fail(strike, EIO),
            DiskAction::Full => return self.fail(strike, ENOSPC),
            DiskAction::Gone => {
                self.gone = true;
                return self.fail(strike, EIO);
            }
            DiskAction::Hang => {
                self.schedule.record(strike, Effect::Hung);
                self.hung = true;
                return Err(io::Error::other("it hangs"));
            }
            DiskAction::PowerCut => return self.lose_power(strike, request, data),
            DiskAction::Latency(latency) => {
                self.late += latency;
                Effect::Delayed(latency.as_millis() as u64)
            }
            DiskAction::Lost | DiskAction::IgnoredFlush => {
                *fate = DiskFate::Dropped;
                Effect::Dropped
            }
            DiskAction::Torn => self.tear(request, fate),
            DiskAction::Misdirected(sectors) => self.misdirect(sectors, request, fate),
            DiskAction::Corrupt(bits) => Effect::Corrupted(self.schedule.flip(bits, data)),
            DiskAction::Garbage => {
                let meant = data.to_vec();
                self.schedule.random().fill(data);
                contents.extend(Contents::new(request.bytes.start, &meant, data, &meant));
                Effect::Garbage
            }
        };
        if request.op == Op::Write && *fate != before {
            contents = self.left(request, fate, data)?;
        }
        self.schedule.record_contents(strike, effect, contents);
        Ok(())
    }

    /// What a write leaves on the disk that is not as the guest meant it.
    fn left(
        &mut self,
        request: &DeviceRequest,
        fate: &DiskFate,
        data: &[u8],
    ) -> io::Result<Vec<Contents>> {
        let meant_at = request.bytes.start;
        let mut before = vec![0; data.len()];
        self.backend.read_at(meant_at, &mut before)?;
        let mut after = before.clone();
        let mut elsewhere = None;
        match *fate {
            DiskFate::Done { offset, .. } if offset != meant_at => {
                let mut there = vec![0; data.len()];
                self.backend.read_at(offset, &mut there)?;
                elsewhere = Contents::new(offset, &there, data, &there);
            }
            DiskFate::Done { len, .. } => {
                let written = len as usize;
                after[..written].copy_from_slice(&data[..written]);
            }
            DiskFate::Dropped => {}
        }
        let here = Contents::new(meant_at, &before, &after, data);
        Ok(here.into_iter().chain(elsewhere).collect())
    }

    fn fail(&mut self, strike: Strike<DiskAction>, errno: i32) -> io::Result<()> {
        self.schedule.record(strike, Effect::Failed);
        Err(io::Error::from_raw_os_error(errno))
    }

    /// Of a write of one sector nothing is written: a sector is never torn.
    fn tear(&mut self, request: &DeviceRequest, fate: &mut DiskFate) -> Effect {
        let (offset, all) = (request.bytes.start, request.bytes.end - request.bytes.start);
        let len = self.schedule.random().u64(..(all / SECTOR).max(1)) * SECTOR;
        *fate = if len == 0 { DiskFate::Dropped } else { DiskFate::Done { offset, len } };
        Effect::Torn(len)
    }

    /// A write that would miss the disk is lost.
    fn misdirect(&mut self, sectors: i64, request: &DeviceRequest, fate: &mut DiskFate) -> Effect {
        let len = request.bytes.end - request.bytes.start;
        let distance = sectors.saturating_mul(SECTOR as i64);
        let there = request.bytes.start.checked_add_signed(distance);
        let inside = |at: &u64| at.checked_add(len).is_some_and(|end| end <= self.backend.len());
        match there.filter(inside) {
            Some(offset) => {
                *fate = DiskFate::Done { offset, len };
                Effect::Misdirected(offset)
            }
            None => {
                *fate = DiskFate::Dropped;
                Effect::Dropped
            }
        }
    }

    /// The request that is under way may have reached the disk as well, or a part of it.
    fn lose_power(
        &mut self,
        strike: Strike<DiskAction>,
        request: &DeviceRequest,
        data: &mut [u8],
    ) -> io::Result<()> {
        if request.op == Op::Write && !self.backend.is_read_only() {
            self.put(request.bytes.start, data)?;
        }
        let effect = self.cut()?;
        self.schedule.record(strike, effect);
        Err(io::Error::other("no power"))
    }

    fn cut(&mut self) -> io::Result<Effect> {
        let cache =
            self.cache.as_mut().map(|cache| cache.cut(&mut *self.backend, self.schedule.random()));
        let Cut { unflushed, reverted } =
            cache.unwrap_or_else(|| Err(io::Error::other("no cache")))?;
        (self.gone, self.hung) = (true, true);
        Ok(Effect::PowerCut { unflushed, reverted })
    }

    /// Writes, keeping what was there if a power cut could bring it back.
    fn put(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.keep(offset, data.len() as u64)?;
        self.backend.write_at(offset, data)
    }

    fn keep(&mut self, offset: u64, len: u64) -> io::Result<()> {
        let Some(cache) = &mut self.cache else { return Ok(()) };
        cache.keep(&mut *self.backend, offset, len)
    }
}

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// The device's process ends with its machine, however it stands.
fn stand_still() -> io::Error {
    loop {
        thread::park();
    }
}

impl BlockBackend for FaultyDisk {
    fn len(&self) -> u64 {
        lock(&self.core).backend.len()
    }

    fn is_read_only(&self) -> bool {
        lock(&self.core).backend.is_read_only()
    }

    // `writes_through` stays false: another process in its place would not know how far its faults are.

    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.ask(|core| core.read_at(offset, data))
    }

    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.ask(|core| core.write_at(offset, data))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.ask(Core::flush)
    }

    fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.ask(|core| core.discard(offset, len))
    }

    fn write_zeroes(&mut self, offset: u64, len: u64, _: bool) -> io::Result<()> {
        let zeroes = [0; 64 << 10];
        let mut done = 0;
        while done < len {
            let count = (len - done).min(zeroes.len() as u64);
            self.write_at(offset + done, &zeroes[..count as usize])?;
            done += count;
        }
        Ok(())
    }
}

impl Core {
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        if !self.gone {
            self.backend.read_at(offset, data)?;
        }
        self.meet(Op::Read, offset, data.len() as u64, data).map(drop)
    }

    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut data = data.to_vec();
        match self.meet(Op::Write, offset, data.len() as u64, &mut data)? {
            DiskFate::Done { offset, len } => self.put(offset, &data[..len as usize]),
            DiskFate::Dropped => Ok(()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.meet(Op::Flush, 0, 0, &mut [])? == DiskFate::Dropped {
            return Ok(());
        }
        self.backend.flush()?;
        self.cache.iter_mut().for_each(WriteCache::flushed);
        Ok(())
    }

    fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.meet(Op::Discard, offset, len, &mut [])?;
        // What was discarded is undefined, so a power cut need not bring it back.
        self.backend.discard(offset, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Record, Scenario, Target};
    use std::sync::{Arc, Mutex};

    const SIZE: usize = 64 << 10;

    /// What disk and test both see.
    #[derive(Clone)]
    struct Platter(Arc<Mutex<Vec<u8>>>);

    impl BlockBackend for Platter {
        fn len(&self) -> u64 {
            SIZE as u64
        }
        fn is_read_only(&self) -> bool {
            false
        }
        fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
            let at = offset as usize;
            data.copy_from_slice(&self.0.lock().expect("whole")[at..at + data.len()]);
            Ok(())
        }
        fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
            let at = offset as usize;
            self.0.lock().expect("whole")[at..at + data.len()].copy_from_slice(data);
            Ok(())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
        fn discard(&mut self, _: u64, _: u64) -> io::Result<()> {
            Ok(())
        }
        fn write_zeroes(&mut self, offset: u64, len: u64, _: bool) -> io::Result<()> {
            self.write_at(offset, &vec![0; len as usize])
        }
    }

    struct Bench {
        disk: FaultyDisk,
        platter: Platter,
        records: Arc<Mutex<Vec<Record>>>,
    }

    impl Bench {
        fn new(faults: &str, seed: u64) -> Self {
            let scenario = Scenario::parse(&format!("seed = {seed}\n{faults}")).expect("sound");
            let records: Arc<Mutex<Vec<Record>>> = Arc::default();
            let recorder = records.clone();
            let schedule = Schedule::new(
                Target::Disk(0),
                scenario.of_disk(0),
                seed,
                Box::new(move |record| recorder.lock().expect("whole").push(record.clone())),
            );
            let platter = Platter(Arc::new(Mutex::new(vec![0; SIZE])));
            let loses_power = scenario.loses_power();
            let mut disk = FaultyDisk::new(Box::new(platter.clone()), schedule, loses_power);
            disk.hang = || io::Error::other("hung");
            Self { disk, platter, records }
        }

        fn one(action: &str, more: &str) -> Self {
            Self::new(&format!("[[fault]]\non = 'disk0'\ndo = {action}\n{more}"), 1)
        }

        fn sector(&self, number: usize) -> Vec<u8> {
            self.platter.0.lock().expect("whole")[number * 512..][..512].to_vec()
        }

        fn contents(&self) -> Vec<Contents> {
            let records = self.records.lock().expect("whole");
            records.iter().flat_map(|record| record.contents.clone()).collect()
        }

        fn effects(&self) -> Vec<Effect> {
            self.records.lock().expect("whole").iter().map(|r| r.effect.clone()).collect()
        }
    }

    #[test]
    fn writes_go_wrong_as_asked() {
        let mut lost = Bench::one("'lost'", "request = 2");
        (0..3).for_each(|n| lost.disk.write_at(n * 512, &[1; 512]).expect("acknowledged"));
        let there: Vec<_> = (0..3).map(|n| lost.sector(n)[0]).collect();
        assert_eq!((there, lost.effects()), (vec![1, 0, 1], vec![Effect::Dropped]));
        let left = |at, len, [before, after, meant]: [&str; 3]| {
            let [before, after, meant] = [before, after, meant].map(|byte| byte.repeat(32));
            Contents { at, len, before, after, meant }
        };
        assert_eq!(lost.contents(), [left(512, 512, ["00", "00", "01"])]);

        let mut far = Bench::one("{ misdirected = 4 }", "times = 1");
        far.disk.write_at(512, &[2; 512]).expect("acknowledged");
        assert_eq!((far.sector(1)[0], far.sector(5)[0]), (0, 2));
        let places = [left(512, 512, ["00", "00", "02"]), left(5 * 512, 512, ["00", "02", "00"])];
        assert_eq!(far.contents(), places);

        let mut torn = Bench::one("'torn'", "");
        torn.disk.write_at(0, &[3; 8192]).expect("acknowledged");
        let [Effect::Torn(len)] = torn.effects()[..] else { panic!("{:?}", torn.effects()) };
        let written = torn.platter.0.lock().expect("whole").iter().filter(|&&b| b == 3).count();
        assert_eq!(written as u64, len);
        assert!(len < 8192 && len.is_multiple_of(512));
        assert_eq!(torn.contents(), [left(len, 8192 - len, ["00", "00", "03"])]);

        let mut full = Bench::one("'full'", "");
        let error = full.disk.write_at(0, &[1; 512]).expect_err("full");
        assert_eq!(error.raw_os_error(), Some(ENOSPC));
        full.disk.read_at(0, &mut [9; 512]).expect("reads are well");
    }

    #[test]
    fn garbage_is_read_and_not_written() {
        let mut bad = Bench::one("'garbage'", "times = 1");
        let mut data = [0; 512];
        bad.disk.read_at(0, &mut data).expect("answered");
        assert!(data != [0; 512] && bad.effects() == [Effect::Garbage]);
        let [shown] = &bad.contents()[..] else { panic!("one record") };
        assert_eq!((&shown.before, &shown.before[..8]), (&shown.meant, "00000000"));
        let first = format!("{:02x}", data[shown.at as usize]);
        assert!(shown.after.starts_with(&first), "{shown:?}, {data:x?}");
        bad.disk.read_at(0, &mut data).expect("answered");
        assert_eq!(data, [0; 512], "it was nowhere but in the answer");
    }

    #[test]
    fn corruption_says_what_was_there() {
        let mut bad = Bench::one("{ corrupt = 3 }", "op = 'read'");
        bad.disk.write_at(0, &[0x55; 512]).expect("writes are well");
        let mut data = [0; 512];
        bad.disk.read_at(0, &mut data).expect("no error to be seen");
        let differ: u32 = data.iter().map(|byte| (byte ^ 0x55).count_ones()).sum();
        assert!(matches!(differ, 1 | 3), "a bit may have been flipped twice: {differ}");
        let [Effect::Corrupted(bits)] = &bad.effects()[..] else { panic!("one record") };
        let (at, _, after) = bits[2];
        assert_eq!(data[at as usize], after);
        assert_eq!(bad.sector(0), [0x55; 512], "the disk itself is well");
    }

    #[test]
    fn a_disk_that_is_gone_stays_so() {
        let mut gone = Bench::one("'gone'", "request = 2");
        gone.disk.flush().expect("the first");
        for _ in 0..3 {
            gone.disk.read_at(0, &mut [0; 512]).expect_err("gone");
        }
        assert_eq!(gone.effects(), [Effect::Failed], "it went once");
    }

    /// Ten generations of every sector; the sixth was flushed. After a cut no sector is older, and all ages occur.
    fn cut(faults: &str, seed: u64) -> Vec<u8> {
        let mut bench = Bench::new(faults, seed);
        for generation in 1..=10 {
            for sector in 0..16 {
                bench.disk.write_at(sector * 512, &[generation; 512]).expect("written");
            }
            if generation == 6 {
                bench.disk.flush().expect("acknowledged");
            }
        }
        bench.disk.read_at(0, &mut [0; 512]).expect_err("the cut");
        bench.disk.write_at(0, &[99; 512]).expect_err("no power");
        let ages: Vec<_> = (0..16).map(|sector| bench.sector(sector)[0]).collect();
        assert!((0..16).all(|n| bench.sector(n).iter().all(|&b| b == ages[n])), "torn sectors");
        ages
    }

    const CUT: &str = "[[fault]]\non = 'disk0'\ndo = 'power-cut'\nop = 'read'\n";

    #[test]
    fn what_was_flushed_survives_a_power_cut() {
        let seen: Vec<_> = (0..20).flat_map(|seed| cut(CUT, seed)).collect();
        assert!(seen.iter().all(|age| (6..=10).contains(age)), "{seen:?}");
        assert!((6..=10).all(|age| seen.contains(&age)), "each may survive: {seen:?}");
        assert_eq!(cut(CUT, 5), cut(CUT, 5), "repeatable");
    }

    #[test]
    fn an_ignored_flush_loses_what_it_acknowledged() {
        let faults = format!("{CUT}[[fault]]\nname = 'liar'\non = 'disk0'\ndo = 'ignored-flush'\n");
        let seen: Vec<_> = (0..20).flat_map(|seed| cut(&faults, seed)).collect();
        assert!(seen.iter().any(|age| *age < 6), "{seen:?}");
    }

    #[test]
    fn a_full_cache_writes_back() {
        let bench = Bench::new(CUT, 1);
        let mut core = lock(&bench.disk.core);
        let cache = core.cache.as_mut().expect("one");
        let mut platter = bench.platter.clone();
        for _ in 0..=((64 << 20) / SIZE) {
            cache.keep(&mut platter, 0, SIZE as u64).expect("kept");
        }
        let cut = cache.cut(&mut platter, &mut fastrand::Rng::with_seed(1)).expect("cut");
        assert_eq!(cut.unflushed, SIZE as u64 / 512);
    }

    #[test]
    fn the_power_can_go_between_requests() {
        let mut bench = Bench::new("[[fault]]\non = 'disk1'\ndo = 'power-cut'\nrequest = 1", 3);
        bench.disk.write_at(0, &[1; 512]).expect("written");
        bench.disk.flush().expect("flushed");
        (0..8).for_each(|n| bench.disk.write_at(n * 512, &[2; 512]).expect("written"));
        let switch = bench.disk.control();
        (0..2).for_each(|_| switch.cut("elsewhere").expect("cut"));
        let records = bench.records.lock().expect("whole").clone();
        assert_eq!((records.len(), &*records[0].fault), (1, "elsewhere"), "once");
        assert!(matches!(records[0].effect, Effect::PowerCut { unflushed: 8, .. }));
        assert_eq!(bench.disk.flush().expect_err("no power").to_string(), "hung");
        assert!((1..=2).contains(&bench.sector(0)[0]), "what was flushed, or later");
    }

    #[test]
    fn latency_and_hanging() {
        let mut slow = Bench::one("{ latency = '20ms' }", "op = 'flush'");
        let before = std::time::Instant::now();
        slow.disk.flush().expect("late");
        assert!(before.elapsed().as_millis() >= 20);
        let mut hung = Bench::one("'hang'", "request = 1");
        assert_eq!(hung.disk.flush().expect_err("never").to_string(), "hung");
        assert_eq!(hung.effects(), [Effect::Hung]);
    }
}
