//! A machine with its threads.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, channel},
    },
    thread,
    time::{Duration, Instant},
};

use engine::{Attention, Board, Control, Engine, Interpreter, Order, Statistics, VcpuLoop};
use fast::{Fast, Modes, User};
use ram::Ram;
use x86::Vcpu;
use x86_interp::System;

use crate::{
    Ended, EngineKind, EngineOptions, Error, Machine,
    console::Outlet,
    machine::Release,
    timer::{self, Alarm, Punctual},
};

/// RAM of a machine that is only tried, in bytes.
const TRIAL_RAM: u64 = 1 << 20;

/// A machine that runs.
pub struct Running {
    control: Control,
    alarm: Arc<Alarm>,
    outlet: Outlet,
    releases: Vec<Release>,
    /// The vCPU thread's last word.
    statistics: Receiver<Statistics>,
    fallback: Option<String>,
}

/// Starts the timer and vCPU threads.
pub(crate) fn start(
    machine: Machine,
    on_end: impl FnOnce(Ended) + Send + 'static,
) -> Result<Running, Error> {
    let Machine { vcpu, engine, mut parts, timers, alarm, events, control, .. } = machine;
    let Machine { outlet, releases, .. } = machine;
    timer::start(timers.clone(), Arc::clone(&alarm), Arc::clone(&parts.clock))?;
    parts.clock = Arc::new(Punctual::new(timers, Arc::clone(&alarm), parts.clock));
    let (ready_sender, ready) = channel();
    let (statistics_sender, statistics) = channel();
    let vcpu_control = control.clone();
    let run = move || {
        let (apic, clock) = (Arc::clone(&parts.apic), Arc::clone(&parts.clock));
        let attention = Arc::clone(&parts.attention);
        let made = parts.board().and_then(|board| engine_of(engine, vcpu, board, &attention));
        let (engine, fallback) = match made {
            Ok(made) => made,
            // Nobody listening means the machine was given up already.
            Err(error) => return drop(ready_sender.send(Err(error))),
        };
        // As above.
        let _ = ready_sender.send(Ok(fallback));
        let mut vcpu = VcpuLoop::new(engine, apic, attention, vcpu_control, clock);
        let ended = match vcpu.run() {
            engine::Ended::Stopped => events.take().unwrap_or(Ended::Stopped),
            engine::Ended::TripleFault(report) => Ended::TripleFault(report),
            engine::Ended::Failed(failure) => Ended::Failed(failure),
        };
        // Whoever gave up waiting for statistics has none.
        let _ = statistics_sender.send(vcpu.statistics());
        on_end(ended);
    };
    thread::Builder::new().name("vcpu0".into()).spawn(run).map_err(Error::Thread)?;
    let failed = || Error::Assembly("the vCPU thread did not start".to_owned());
    let fallback = ready.recv().map_err(|_| failed())??;
    Ok(Running { control, alarm, outlet, releases, statistics, fallback })
}

/// Whether [`EngineKind::Auto`] is the fast engine on this host, found out by trying.
///
/// # Errors
/// Says why it is the interpreter.
pub fn check_fast_engine() -> Result<(), String> {
    let ram = Ram::new(TRIAL_RAM).map_err(|error| error.to_string())?;
    fast::check_host(&ram)
}

/// The best engine this host can run, where none is asked for.
///
/// # Errors
/// Says why it is the interpreter.
fn settle(kind: EngineKind, ram: &Ram) -> Result<EngineKind, String> {
    if kind != EngineKind::Auto {
        return Ok(kind);
    }
    fast::check_host(ram)?;
    if !fast::kernel_is_closed() {
        tracing::info!(
            "no protection keys: programs in the guest can reach the guest kernel's memory"
        );
    }
    Ok(EngineKind::Fast)
}

/// An engine, and why it is the interpreter if nobody asked for that.
type Made = (Box<dyn Engine>, Option<String>);

fn engine_of(
    choice: EngineOptions,
    vcpu: Vcpu,
    board: Board,
    attention: &Attention,
) -> Result<Made, Error> {
    let direct = if choice.translate_user { User::Translated } else { User::Direct };
    let (user, kernel_translated) = match settle(choice.kind, board.ram()) {
        // Settled.
        Ok(EngineKind::Auto) => return Err(Error::Assembly("no engine was chosen".to_owned())),
        Err(reason) => return Ok((Box::new(Interpreter::new(vcpu, board)), Some(reason))),
        Ok(EngineKind::Interpreter) => return Ok((Box::new(Interpreter::new(vcpu, board)), None)),
        Ok(EngineKind::Fast) => (direct, true),
        Ok(EngineKind::Direct) => (direct, false),
        Ok(EngineKind::Jit) => (User::Interpreted, true),
    };
    let EngineOptions { lock_step, user_dispatch, unmap_flushed, .. } = choice;
    let keeps = !unmap_flushed;
    let modes = Modes { user, kernel_translated, lock_step, user_dispatch, keeps };
    let engine = Fast::new(vcpu, board, attention, modes);
    Ok((Box::new(engine.map_err(|error| Error::Engine(error.to_string()))?), None))
}

fn until(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// Releases all devices at once: none has to wait for one that stands still. What is returned says so of each, and is disconnected after the last.
fn release(releases: Vec<Release>) -> Receiver<()> {
    let (sender, released) = channel();
    for release in releases {
        let sender = sender.clone();
        let release = move || {
            release();
            // Nobody listens after the time is over.
            let _ = sender.send(());
        };
        // On a host that gives no thread, the process's end is what ends its servers.
        let _ = thread::Builder::new().name("release".into()).spawn(release);
    }
    released
}

impl Running {
    /// Why guest code is interpreted, if it is without anybody having asked for that.
    pub fn fallback(&self) -> Option<&str> {
        self.fallback.as_deref()
    }

    /// Makes the vCPU stand still, or go on.
    pub fn pause(&self, pause: bool) {
        self.control.order(if pause { Order::Pause } else { Order::Run });
    }

    /// Stops the machine if it has not ended, lets its output out, and returns what it did; `None`
    /// if it does not come to rest. Whatever stands still is left behind after `patience`.
    pub fn finish(self, patience: Duration) -> Option<Statistics> {
        let deadline = Instant::now() + patience;
        self.control.order(Order::Stop);
        self.outlet.close();
        // It may wait for the answer of a server that stands still, and goes on when that is hung up on.
        let statistics = self.statistics.recv_timeout(patience / 4).ok();
        let released = release(self.releases);
        let statistics = statistics.or_else(|| self.statistics.recv_timeout(patience / 4).ok());
        self.outlet.drain(until(deadline));
        self.alarm.end();
        // Each has released its device, or the time is over.
        while released.recv_timeout(until(deadline)).is_ok() {}
        statistics
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_stands_still_holds_up_no_other() {
        let (sender, seen) = channel();
        let stuck: Release = Box::new(|| thread::sleep(Duration::from_secs(3600)));
        let free: Release = Box::new(move || sender.send(()).expect("seen"));
        let released = release(vec![stuck, free]);
        seen.recv_timeout(Duration::from_secs(20)).expect("released");
        released.recv_timeout(Duration::from_secs(20)).expect("told of");
        let stuck = released.recv_timeout(Duration::from_millis(50));
        assert!(stuck.is_err());
    }
}
