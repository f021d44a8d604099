//! A session: packets and news of the machine, one after the other.

use std::{
    collections::VecDeque,
    convert::Infallible,
    io::{self, Read, Write},
    sync::mpsc::{Receiver, Sender, channel},
    thread,
};

use gdbstub::{
    common::Signal,
    conn::Connection,
    stub::{
        DisconnectReason, GdbStub, GdbStubError, MultiThreadStopReason,
        state_machine::{GdbStubStateMachine, GdbStubStateMachineInner, state::Running},
    },
    target::ext::breakpoints::WatchKind,
};
use vmm::{Inspector, Reached};

use super::target::{DebugTarget, tid_of};

/// What happens in a session.
pub enum DebuggerEvent {
    /// GDB has sent something.
    Bytes(Vec<u8>),
    /// GDB has gone.
    Gone,
    /// A vCPU has reached a probe, and stands.
    Reached(usize, Reached),
    /// The vCPU that was to make a step has made it.
    Stepped,
    /// The machine has ended.
    Ended,
}

/// Why a session ended badly.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The host gives no thread.
    #[error("no thread for a debugger: {0}")]
    Thread(io::Error),
    /// What was sent is not the protocol, or could not be sent.
    #[error("the debugger's connection: {0}")]
    Protocol(String),
}

/// Writes packets to GDB.
struct PacketWriter<W> {
    writer: W,
    buffer: Vec<u8>,
}

impl<W: Write> Connection for PacketWriter<W> {
    type Error = io::Error;

    fn write(&mut self, byte: u8) -> io::Result<()> {
        self.buffer.push(byte);
        Ok(())
    }
    fn flush(&mut self) -> io::Result<()> {
        self.writer.write_all(&self.buffer)?;
        self.buffer.clear();
        self.writer.flush()
    }
}

type Stub<W> = GdbStubStateMachine<'static, DebugTarget, PacketWriter<W>>;
type StubRunning<W> = GdbStubStateMachineInner<'static, Running, DebugTarget, PacketWriter<W>>;
type StubError = GdbStubError<Infallible, io::Error>;

/// Events and bytes from GDB that are not handled yet.
struct EventQueue {
    events: Receiver<DebuggerEvent>,
    bytes: VecDeque<u8>,
    ended: bool,
}

/// The next event or byte.
enum NextEvent {
    Byte(u8),
    Reached(usize, Reached),
    Stepped,
    Ended,
    Gone,
}

impl EventQueue {
    fn next(&mut self) -> NextEvent {
        loop {
            if let Some(byte) = self.bytes.pop_front() {
                return NextEvent::Byte(byte);
            }
            match self.events.recv() {
                Ok(DebuggerEvent::Bytes(bytes)) => self.bytes.extend(bytes),
                Ok(DebuggerEvent::Reached(vcpu, reached)) => {
                    return NextEvent::Reached(vcpu, reached);
                }
                Ok(DebuggerEvent::Stepped) => return NextEvent::Stepped,
                Ok(DebuggerEvent::Ended) => {
                    self.ended = true;
                    return NextEvent::Ended;
                }
                Ok(DebuggerEvent::Gone) | Err(_) => return NextEvent::Gone,
            }
        }
    }
}

/// Serves a debugger until it leaves; the machine stands for it now, and goes on then.
///
/// # Errors
/// [`SessionError`]; the machine goes on all the same.
pub fn serve(
    inspector: &Inspector,
    reader: impl Read + Send + 'static,
    writer: impl Write,
    attached: impl FnOnce(),
) -> Result<(), SessionError> {
    let (sender, events) = channel();
    let mut machine = DebugTarget::new(inspector, sender.clone());
    attached();
    listen(reader, sender).map_err(SessionError::Thread)?;
    let incoming = EventQueue { events, bytes: VecDeque::new(), ended: false };
    let outgoing = PacketWriter { writer, buffer: Vec::new() };
    let ended = run_session(&mut machine, incoming, outgoing);
    machine.detach();
    match ended {
        Ok(Some(DisconnectReason::Kill)) => machine.inspector().stop(),
        Ok(_) => {}
        Err(error) => return Err(SessionError::Protocol(error.to_string())),
    }
    Ok(())
}

fn listen(mut reader: impl Read + Send + 'static, events: Sender<DebuggerEvent>) -> io::Result<()> {
    let listen = move || {
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = reader.read(&mut buffer) {
            if events.send(DebuggerEvent::Bytes(buffer[..count].to_vec())).is_err() {
                return;
            }
        }
        // Nobody to tell means the session is over.
        let _ = events.send(DebuggerEvent::Gone);
    };
    thread::Builder::new().name("gdb".into()).spawn(listen).map(drop)
}

/// Runs the session until GDB detaches, kills the machine or disconnects.
fn run_session<W: Write>(
    machine: &mut DebugTarget,
    mut incoming: EventQueue,
    outgoing: PacketWriter<W>,
) -> Result<Option<DisconnectReason>, StubError> {
    let mut stub: Stub<W> = GdbStub::new(outgoing).run_state_machine(machine)?;
    loop {
        stub = match stub {
            GdbStubStateMachine::Idle(idle) => match incoming.next() {
                NextEvent::Byte(byte) => idle.incoming_data(machine, byte)?,
                NextEvent::Gone => return Ok(None),
                // What a vCPU reached while all were about to stand is not lost: it stands there.
                _ => idle.into(),
            },
            GdbStubStateMachine::Running(running) => match incoming.ended {
                true => return exited(running, machine),
                false => match incoming.next() {
                    NextEvent::Byte(byte) => running.incoming_data(machine, byte)?,
                    NextEvent::Gone => return Ok(None),
                    NextEvent::Ended => return exited(running, machine),
                    NextEvent::Stepped => {
                        report(running, machine, MultiThreadStopReason::DoneStep)?
                    }
                    NextEvent::Reached(vcpu, reached) => {
                        let reason = reason(machine, vcpu, reached);
                        report(running, machine, reason)?
                    }
                },
            },
            GdbStubStateMachine::CtrlCInterrupt(interrupt) => {
                machine.stop();
                let reason = MultiThreadStopReason::Signal(Signal::SIGINT);
                interrupt.interrupt_handled(machine, Some(reason))?
            }
            GdbStubStateMachine::Disconnected(gone) => return Ok(Some(gone.get_reason())),
        };
    }
}

fn report<W: Write>(
    stub: StubRunning<W>,
    machine: &mut DebugTarget,
    reason: MultiThreadStopReason<u64>,
) -> Result<Stub<W>, StubError> {
    machine.stop();
    stub.report_stop(machine, reason)
}

/// GDB is told that there is no machine any more.
fn exited<W: Write>(
    stub: StubRunning<W>,
    machine: &mut DebugTarget,
) -> Result<Option<DisconnectReason>, StubError> {
    stub.report_stop(machine, MultiThreadStopReason::Exited(0)).map(|_| None)
}

fn reason(machine: &DebugTarget, vcpu: usize, reached: Reached) -> MultiThreadStopReason<u64> {
    let tid = tid_of(vcpu);
    match reached {
        Reached::Breakpoint if machine.has_left_halt(vcpu) => MultiThreadStopReason::DoneStep,
        Reached::Breakpoint if machine.has_caught(vcpu) => {
            MultiThreadStopReason::SignalWithThread { tid, signal: Signal::SIGTRAP }
        }
        Reached::Breakpoint => MultiThreadStopReason::HwBreak(tid),
        Reached::Watch { gva, len, write } => {
            let (kind, addr) = machine.watched(gva, len, write);
            MultiThreadStopReason::Watch { tid, kind, addr }
        }
    }
}

/// GDB knows a watchpoint by its kind and an address in it.
impl DebugTarget {
    fn watched(&self, gva: u64, len: u64, write: bool) -> (WatchKind, u64) {
        let watch = self.watch_at(gva, len, write);
        let kind = match watch.map(|watch| (watch.read, watch.write)) {
            Some((true, true)) => WatchKind::ReadWrite,
            Some((true, false)) => WatchKind::Read,
            _ => WatchKind::Write,
        };
        (kind, watch.map_or(gva, |watch| watch.gva.max(gva)))
    }
}
