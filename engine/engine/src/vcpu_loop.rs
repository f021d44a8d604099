//! The loop that drives one vCPU.

use std::sync::Arc;

use contract::{Failure, VcpuEvent, Whose, pending};
use host::Clock;

use crate::{
    Control, CpuPermit, Engine, Event, EventLog, Exit, HostTurn, LocalApic, Report, RunCommand,
    Statistics, VcpuRequests,
    halt_poll::HaltPoll,
    vcpu_work::{ProbeHandlers, VcpuAccess},
};

/// Instructions between two looks at orders when nothing kicks: a safety net, not a schedule.
const BUDGET: u64 = 10_000_000;
/// Events remembered for a crash report.
const LOG: usize = 64;

/// Why a vCPU ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was ordered to stop.
    Stopped,
    /// Triple fault: an exception while delivering a double fault (SDM 6.15).
    TripleFault(Box<Report>),
    /// The engine cannot go on.
    Failed(Failure),
}

/// A vCPU being driven.
pub struct VcpuLoop<E> {
    engine: E,
    apic: Arc<dyn LocalApic>,
    requests: Arc<VcpuRequests>,
    control: Control,
    clock: Arc<dyn Clock>,
    statistics: Statistics,
    log: EventLog,
    handlers: ProbeHandlers,
    /// Where vCPUs outnumber the host's CPUs.
    permit: Option<CpuPermit>,
    /// Set if the vCPU takes turns with the vCPUs of other machines.
    turn: Option<HostTurn>,
    /// When the vCPU looks whether it is kicked before it sleeps; `None` if never.
    poll: Option<HaltPoll>,
}

impl<E: Engine> VcpuLoop<E> {
    /// Drives `engine`, which gets interrupts from `apic` and is woken through `requests`.
    pub fn new(
        engine: E,
        apic: Arc<dyn LocalApic>,
        requests: Arc<VcpuRequests>,
        control: Control,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let (statistics, handlers) = Default::default();
        let log = EventLog::new(LOG);
        let (permit, turn, poll) = Default::default();
        Self {
            engine,
            apic,
            requests,
            control,
            clock,
            statistics,
            log,
            handlers,
            permit,
            turn,
            poll,
        }
    }

    /// The vCPU runs only while it has its permit.
    pub fn among(mut self, permit: Option<CpuPermit>) -> Self {
        self.permit = permit;
        self
    }

    /// Has the vCPU take turns with the vCPUs of other machines. A vCPU with a permit takes no turns, because others of its own
    /// machine may need the permit while it waits.
    pub fn taking_turns(mut self, turn: Option<HostTurn>) -> Self {
        self.turn = turn.filter(|_| self.permit.is_none());
        self
    }

    /// Has the vCPU look for a moment whether it is kicked when it halts. A vCPU with a permit does not, because others need the
    /// CPU.
    pub fn looking(mut self, looks: bool) -> Self {
        self.poll = (looks && self.permit.is_none()).then(HaltPoll::default);
        self
    }

    /// Runs the guest until it ends or is stopped.
    pub fn run(&mut self) -> Ended {
        self.begin(false);
        let ended = self.run_to_end();
        self.cease();
        self.requests.work().close();
        self.handlers.clear();
        ended
    }

    fn run_to_end(&mut self) -> Ended {
        loop {
            self.requests.take_kick();
            // Asking came before the kick, which may have been the one that was taken just now.
            if self.permit.as_ref().is_some_and(CpuPermit::is_asked) {
                self.give_way();
            }
            self.take_turns();
            self.run_work();
            match self.control.current() {
                RunCommand::Stop => return Ended::Stopped,
                RunCommand::Pause => self.sleep(),
                RunCommand::Run if self.handlers.is_stopped() => self.sleep(),
                RunCommand::Run => {
                    if let Some(ended) = self.run_once() {
                        return ended;
                    }
                }
            }
        }
    }

    fn run_work(&mut self) {
        for work in self.requests.work().take() {
            work(&mut VcpuAccess::new(&mut self.engine, &mut self.handlers, &self.statistics));
        }
    }

    /// What has been done so far.
    pub fn statistics(&mut self) -> Statistics {
        Statistics::of(&self.statistics, &mut self.engine)
    }

    fn run_once(&mut self) -> Option<Ended> {
        let waiting = self.apic.pending();
        if waiting & (pending::INIT | pending::START_UP) != 0 {
            self.start_over();
        }
        self.requests.set_interrupts(waiting & (pending::INTERRUPT | pending::NMI));
        let started = self.clock.monotonic_ns();
        let exit = self.engine.run(BUDGET);
        self.statistics.running_ns += self.clock.monotonic_ns().saturating_sub(started);
        match exit {
            Exit::Budget | Exit::Leave => {}
            Exit::Requested => self.statistics.kicks += 1,
            Exit::InterruptWindow => self.deliver_interrupt(),
            Exit::NmiWindow => self.deliver_nmi(),
            Exit::Halted => self.halt(),
            Exit::Shutdown => return Some(Ended::TripleFault(Box::new(self.report()))),
            Exit::Failed => return Some(Ended::Failed(self.failure())),
            Exit::Probe(reached) => self.handlers.reach(&mut self.engine, reached),
        }
        None
    }

    /// INIT comes before the start-up IPI that follows it.
    fn start_over(&mut self) {
        if self.apic.take_init() {
            self.note(Event::Init);
            self.engine.init();
        }
        if let Some(vector) = self.apic.take_start_up() {
            self.note(Event::StartUp(vector));
            self.engine.start_up(vector);
        }
    }

    /// Sleeps until the next kick. The other vCPUs need not wait for this one meanwhile.
    fn sleep(&mut self) {
        self.cease();
        self.await_kick();
    }

    /// Sleeps until the next kick, and runs again.
    fn await_kick(&mut self) {
        self.requests.sleep();
        self.begin(true);
    }

    /// Lets other vCPUs have the CPU for a while.
    fn give_way(&mut self) {
        self.cease();
        self.begin(false);
    }

    /// Takes a turn if one is due. If none is free, the vCPU waits for one.
    fn take_turns(&mut self) {
        let (Some(turn), Some(at)) = (&mut self.turn, self.engine.cpu()) else { return };
        if !turn.is_due(at) {
            return;
        }
        turn.release();
        if let Some(cpu) = turn.try_take(at) {
            return self.engine.move_to(cpu);
        }
        // The other vCPUs need not wait for this one meanwhile.
        self.engine.ram().leave();
        waiting(&*self.apic, &*self.clock, || turn.wait(at));
        // The turn is of use only on its CPU, so the engine stays there.
        self.engine.move_to(at);
        self.enter();
    }

    /// The vCPU runs nothing from now on.
    fn cease(&mut self) {
        self.engine.ram().leave();
        self.turn.iter_mut().for_each(HostTurn::release);
        self.permit.iter().for_each(CpuPermit::release);
    }

    /// It runs from now on, as soon as there is a CPU for it.
    fn begin(&mut self, urgent: bool) {
        if let Some(permit) = &self.permit {
            let cpu = permit.try_acquire();
            let acquire = || permit.acquire(urgent);
            let cpu = cpu.unwrap_or_else(|| waiting(&*self.apic, &*self.clock, acquire));
            self.engine.settle_on(cpu);
        }
        self.turn.iter_mut().for_each(HostTurn::begin);
        self.enter();
    }

    /// The vCPU counts as running from now on. A flush of the TLB that others have asked for meanwhile is done first.
    fn enter(&mut self) {
        if self.apic.set_running() {
            self.engine.flush();
        }
        self.engine.ram().enter();
    }

    fn failure(&mut self) -> Failure {
        let unsaid =
            || Failure { whose: Whose::Ours, what: "the engine does not say why".to_owned() };
        self.engine.failure().unwrap_or_else(unsaid)
    }

    fn deliver_interrupt(&mut self) {
        if let Some(vector) = self.apic.acknowledge() {
            self.note(Event::Interrupt(vector));
            self.statistics.interrupts += 1;
            self.handlers.tell_of(VcpuEvent::Vector(vector));
            self.engine.interrupt(vector);
        }
    }

    fn deliver_nmi(&mut self) {
        if self.apic.take_nmi() {
            self.note(Event::Nmi);
            self.statistics.nmis += 1;
            self.engine.nmi();
        }
    }

    /// Sleeps until something happens. The engine has just found nothing deliverable in what was
    /// set before it ran, and everything since has kicked.
    fn halt(&mut self) {
        if self.apic.take_unhalt() {
            return self.engine.unhalt();
        }
        self.note(Event::Halt);
        self.apic.halts();
        self.statistics.halts += 1;
        let started = self.clock.monotonic_ns();
        self.cease();
        self.look_for_kick();
        self.await_kick();
        self.statistics.halted_ns += self.clock.monotonic_ns().saturating_sub(started);
    }

    /// Looks for a moment whether the vCPU is kicked, if that is worthwhile.
    fn look_for_kick(&mut self) {
        let is_kicked = || self.requests.waiting() & pending::EXIT != 0;
        let now = || self.clock.monotonic_ns();
        self.poll.iter_mut().for_each(|poll| poll.look(now, is_kicked));
    }

    fn note(&mut self, event: Event) {
        let (count, rip) = (self.engine.counters().instructions, self.engine.vcpu().rip);
        self.log.push(count, rip, event);
    }

    fn report(&self) -> Report {
        Report::new(self.engine.vcpu(), self.engine.ram(), &self.log)
    }
}

/// Waits for a host CPU. The guest is told that the vCPU does not run, so that other vCPUs only note down the flushes of its TLB,
/// and how long the vCPU has waited.
fn waiting<T>(apic: &dyn LocalApic, clock: &dyn Clock, acquire: impl FnOnce() -> T) -> T {
    apic.set_preempted();
    let started = clock.monotonic_ns();
    let acquired = acquire();
    apic.note_stolen(clock.monotonic_ns().saturating_sub(started));
    acquired
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Verdict, pending};
    use bus::Kicker;
    use contract::{Counters, GuestRam, Probes, Reached};
    use ram::Ram;
    use std::{
        collections::VecDeque,
        sync::{
            Mutex,
            atomic::{AtomicBool, AtomicU64, Ordering},
        },
        time::Duration,
    };
    use x86::{Fault, Vcpu};

    /// Does what it was told to, in order, and notes what it was asked.
    struct Scripted {
        exits: VecDeque<Exit>,
        delivered: Vec<u8>,
        /// INIT, and the vectors of start-up IPIs.
        started: Vec<Option<u8>>,
        ram: Ram,
        vcpu: Vcpu,
        requests: Arc<VcpuRequests>,
        /// What [`VcpuRequests::waiting`] was at each run.
        seen: Vec<u32>,
        probes: Probes,
        flushes: usize,
    }

    impl Engine for Scripted {
        fn run(&mut self, _: u64) -> Exit {
            self.seen.push(self.requests.waiting());
            self.exits.pop_front().unwrap_or(Exit::Shutdown)
        }
        fn interrupt(&mut self, vector: u8) {
            self.delivered.push(vector);
        }
        fn nmi(&mut self) {
            self.delivered.push(x86::vector::NMI);
        }
        fn machine_check(&mut self, _: bool) {
            self.delivered.push(x86::vector::MC);
        }
        fn init(&mut self) {
            self.started.push(None);
        }
        fn start_up(&mut self, vector: u8) {
            self.started.push(Some(vector));
        }
        fn unhalt(&mut self) {
            self.started.push(Some(0));
        }
        fn flush(&mut self) {
            self.flushes += 1;
        }
        fn vcpu(&self) -> &Vcpu {
            &self.vcpu
        }
        fn counters(&self) -> Counters {
            Counters::default()
        }
        fn traffic(&self) -> (u64, u64) {
            (0, 0)
        }
        fn ram(&self) -> &dyn GuestRam {
            &self.ram
        }
        fn set_probes(&mut self, probes: &Probes) {
            self.probes = probes.clone();
        }
        fn step(&mut self) -> Option<Reached> {
            self.vcpu.rip += 1;
            None
        }
        fn set_vcpu(&mut self, vcpu: Vcpu) {
            self.vcpu = vcpu;
        }
    }

    #[derive(Default)]
    struct FakeApic {
        vectors: Mutex<VecDeque<u8>>,
        nmi: AtomicBool,
        init: AtomicBool,
        start_up: Mutex<Option<u8>>,
        unhalted: AtomicBool,
        halts: AtomicU64,
        /// 1: it waits; 3: and is to flush.
        standing: AtomicU64,
    }

    impl LocalApic for FakeApic {
        fn pending(&self) -> u32 {
            let some = !self.vectors.lock().expect("no panic").is_empty();
            let nmi = self.nmi.load(Ordering::SeqCst);
            let init = self.init.load(Ordering::SeqCst);
            let start_up = self.start_up.lock().expect("no panic").is_some();
            (u32::from(some) * pending::INTERRUPT)
                | (u32::from(nmi) * pending::NMI)
                | (u32::from(init) * pending::INIT)
                | (u32::from(start_up) * pending::START_UP)
        }
        fn acknowledge(&self) -> Option<u8> {
            self.vectors.lock().expect("no panic").pop_front()
        }
        fn take_nmi(&self) -> bool {
            self.nmi.swap(false, Ordering::SeqCst)
        }
        fn nmi_ended(&self) {}
        fn take_init(&self) -> bool {
            self.init.swap(false, Ordering::SeqCst)
        }
        fn take_start_up(&self) -> Option<u8> {
            self.start_up.lock().expect("no panic").take()
        }
        fn enabled(&self) -> bool {
            true
        }
        fn cr8(&self) -> u8 {
            0
        }
        fn set_cr8(&self, _: u8) {}
        fn msr_read(&self, _: u32) -> Result<u64, Fault> {
            Err(Fault::gp(0))
        }
        fn msr_write(&self, _: u32, _: u64) -> Result<(), Fault> {
            Err(Fault::gp(0))
        }
        fn take_unhalt(&self) -> bool {
            self.unhalted.swap(false, Ordering::SeqCst)
        }
        fn halts(&self) {
            self.halts.fetch_add(1, Ordering::SeqCst);
        }
        fn set_preempted(&self) {
            self.standing.store(1, Ordering::SeqCst);
        }
        fn set_running(&self) -> bool {
            self.standing.swap(0, Ordering::SeqCst) == 3
        }
        fn mmio_read(&self, _: u64, _: &mut [u8]) -> bool {
            false
        }
        fn mmio_write(&self, _: u64, _: &[u8]) -> bool {
            false
        }
    }

    #[derive(Default)]
    struct Ticks(AtomicU64);
    impl Clock for Ticks {
        fn monotonic_ns(&self) -> u64 {
            self.0.fetch_add(1, Ordering::SeqCst)
        }
        fn wall_clock_ns(&self) -> u64 {
            0
        }
        fn tsc(&self) -> u64 {
            0
        }
        fn tsc_hz(&self) -> u64 {
            1
        }
    }

    struct Bench {
        vcpu: VcpuLoop<Scripted>,
        apic: Arc<FakeApic>,
        requests: Arc<VcpuRequests>,
        control: Control,
    }

    fn bench(exits: &[Exit]) -> Bench {
        let requests = Arc::new(VcpuRequests::default());
        let apic = Arc::new(FakeApic::default());
        let control = Control::new(Arc::clone(&requests));
        let engine = Scripted {
            exits: exits.iter().copied().collect(),
            delivered: Vec::new(),
            started: Vec::new(),
            ram: Ram::new(1 << 20).expect("memory"),
            vcpu: Vcpu::default(),
            requests: Arc::clone(&requests),
            seen: Vec::new(),
            probes: Probes::default(),
            flushes: 0,
        };
        let vcpu = VcpuLoop::new(
            engine,
            Arc::clone(&apic) as Arc<dyn LocalApic>,
            Arc::clone(&requests),
            control.clone(),
            Arc::new(Ticks::default()),
        );
        Bench { vcpu, apic, requests, control }
    }

    #[test]
    fn interrupts_are_delivered_in_their_windows() {
        let mut bench = bench(&[Exit::InterruptWindow, Exit::NmiWindow]);
        bench.apic.vectors.lock().expect("no panic").push_back(0x31);
        bench.apic.nmi.store(true, Ordering::SeqCst);
        assert!(matches!(bench.vcpu.run(), Ended::TripleFault(_)));
        assert_eq!(bench.vcpu.engine.delivered, [0x31, x86::vector::NMI]);
        let seen = [pending::INTERRUPT | pending::NMI, pending::NMI, 0];
        assert_eq!(bench.vcpu.engine.seen, seen, "each told of what still waits");
        let statistics = bench.vcpu.statistics();
        assert_eq!((statistics.interrupts, statistics.nmis), (1, 1));
    }

    #[test]
    fn a_window_whose_interrupt_was_withdrawn_delivers_nothing() {
        let mut bench = bench(&[Exit::InterruptWindow]);
        bench.vcpu.run();
        assert_eq!(bench.vcpu.engine.delivered, []);
    }

    #[test]
    fn another_cpu_starts_this_one_over() {
        let mut bench = bench(&[]);
        bench.apic.init.store(true, Ordering::SeqCst);
        *bench.apic.start_up.lock().expect("no panic") = Some(0x9a);
        bench.vcpu.run();
        assert_eq!(bench.vcpu.engine.started, [None, Some(0x9a)]);
        assert_eq!(bench.vcpu.engine.seen, [0], "the engine is told of interrupts only");
    }

    #[test]
    fn an_idle_guest_sleeps_until_kicked() {
        let mut bench = bench(&[Exit::Halted, Exit::InterruptWindow]);
        let (apic, requests) = (Arc::clone(&bench.apic), Arc::clone(&bench.requests));
        let device = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            apic.vectors.lock().expect("no panic").push_back(0x44);
            requests.kick();
        });
        bench.vcpu.run();
        device.join().expect("no panic");
        assert_eq!(bench.vcpu.engine.delivered, [0x44]);
        assert_eq!(bench.vcpu.statistics().halts, 1);
        assert_eq!(bench.apic.halts.load(Ordering::SeqCst), 1, "its APIC is told");
    }

    #[test]
    fn a_vcpu_that_another_one_wakes_does_not_sleep() {
        let mut bench = bench(&[Exit::Halted]);
        bench.apic.unhalted.store(true, Ordering::SeqCst);
        bench.vcpu.run();
        assert_eq!(bench.vcpu.engine.started, [Some(0)]);
        assert_eq!(bench.vcpu.statistics().halts, 0);
    }

    #[test]
    fn who_waits_for_a_seat_says_so_and_flushes_if_it_is_told() {
        let bench = bench(&[Exit::Shutdown]);
        let cpu_pool = crate::CpuPool::new(1, &[Arc::default(), Arc::clone(&bench.requests)]);
        let other = cpu_pool.permit(0);
        assert_eq!(other.try_acquire(), Some(0));
        let mut vcpu = bench.vcpu.among(Some(cpu_pool.permit(1)));
        let vcpu = std::thread::spawn(move || {
            vcpu.run();
            (vcpu.engine.flushes, vcpu.engine.seen.len())
        });
        let waits =
            || bench.apic.standing.compare_exchange(1, 3, Ordering::SeqCst, Ordering::SeqCst);
        while waits().is_err() {
            std::thread::yield_now();
        }
        other.release();
        assert_eq!(vcpu.join().expect("no panic"), (1, 1));
        assert_eq!(bench.apic.standing.load(Ordering::SeqCst), 0);
    }

    /// Notes where it was called, and stops the vCPU at the second call.
    struct Noting(std::sync::mpsc::Sender<u64>, usize);

    impl crate::ProbeHandler for Noting {
        fn reached(&mut self, engine: &mut dyn Engine, _: &mut Probes, _: Reached) -> Verdict {
            self.1 += 1;
            self.0.send(engine.vcpu().rip).expect("heard");
            if self.1 == 2 { Verdict::Stop } else { Verdict::Resume }
        }
    }

    #[test]
    fn a_probe_handler_is_called_and_can_stop_the_vcpu() {
        let probe = Exit::Probe(Reached::Breakpoint);
        let mut bench = bench(&[probe, probe]);
        let (sender, heard) = std::sync::mpsc::channel();
        let requests = Arc::clone(&bench.requests);
        let probes = Probes { breakpoints: [0, 1].into(), ..Probes::default() };
        let comes = probes.clone();
        requests.run_on_vcpu(Box::new(move |vcpu| {
            vcpu.add_handler(Box::new(Noting(sender, 0)), comes, false);
        }));
        let debugger = std::thread::spawn(move || {
            let heard = [heard.recv().expect("called"), heard.recv().expect("called")];
            let (sender, seen) = std::sync::mpsc::channel();
            requests.run_on_vcpu(Box::new(move |vcpu| {
                sender.send(vcpu.engine.vcpu().rip).expect("heard");
                vcpu.remove_handler(1);
            }));
            (heard, seen.recv().expect("done"))
        });
        assert!(matches!(bench.vcpu.run(), Ended::TripleFault(_)));
        let (heard, stopped) = debugger.join().expect("no panic");
        assert_eq!(heard, [0, 1], "it went over the first breakpoint");
        assert_eq!(stopped, 1, "and stopped at the second");
        assert!(bench.vcpu.engine.probes.is_empty(), "nothing is left of who has gone");
        assert!(!bench.requests.run_on_vcpu(Box::new(|_| {})), "it has ended");
    }

    #[test]
    fn orders_are_obeyed_while_halted() {
        let mut bench = bench(&[Exit::Halted]);
        let control = bench.control.clone();
        let user = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(10));
            control.order(RunCommand::Pause);
            std::thread::sleep(Duration::from_millis(10));
            control.order(RunCommand::Stop);
        });
        assert_eq!(bench.vcpu.run(), Ended::Stopped);
        user.join().expect("no panic");
        assert_eq!(bench.vcpu.engine.seen.len(), 1, "it did not run while paused");
    }
}
