use super::*;
use std::sync::mpsc::channel;

const SOON: Duration = Duration::from_millis(50);

/// A session of these events, with one output that has ended.
fn session(events: Vec<SessionEvent>) -> (Session<'static>, UnixStream, Sender<SessionEvent>) {
    let (sender, receiver) = channel();
    events.into_iter().for_each(|event| sender.send(event).expect("kept"));
    let (control, agent) = UnixStream::pair().expect("a pair");
    let session = Session {
        events: receiver,
        control,
        tail: ConsoleTail::new(false),
        timeout: Some(Duration::from_secs(20)),
        grace: Duration::from_secs(10),
        outputs: 0,
        pace: Pace::new(host_linux::LinuxClock::new()),
        obey: Box::new(|_| true),
    };
    (session, agent, sender)
}

fn said(kind: u8, number: u32) -> SessionEvent {
    SessionEvent::Said(kind, number, String::new())
}

fn outcome(events: Vec<SessionEvent>) -> SessionOutcome {
    session(events).0.wait().expect("an end").outcome
}

#[test]
fn the_exit_status_is_the_commands() {
    let status = |events| outcome(events).status();
    assert_eq!(status(vec![said(message::STARTED, 0), said(message::EXITED, 7)]), 7);
    assert_eq!(status(vec![said(message::KILLED, 9)]), 137);
    assert_eq!(status(vec![said(message::NOT_FOUND, 0)]), 127);
}

#[test]
fn output_that_was_lost_is_a_failure_of_its_own() {
    let lost = || SessionEvent::Carried(Carried::Output(Some("standard output: full".to_owned())));
    for (status, expected) in [(0, LOST), (3, 3)] {
        // Whichever comes first.
        for events in
            [[said(message::EXITED, status), lost()], [lost(), said(message::EXITED, status)]]
        {
            let (mut session, _agent, _sender) = session(events.into());
            session.outputs = 1;
            let ending = session.wait().expect("an end");
            assert_eq!(ending.problems.len(), 1);
            assert_eq!(ending.tell(), expected);
        }
    }
}

#[test]
fn signals_are_passed_on_once_the_command_runs() {
    let events =
        vec![said(message::STARTED, 0), SessionEvent::Signal(SIGTERM), said(message::KILLED, 15)];
    let (mut session, mut agent, _sender) = session(events);
    assert_eq!(session.wait().expect("an end").outcome, SessionOutcome::Killed(15));
    let mut bytes = [0; 3 * MESSAGE + protocol::Time::BYTES];
    agent.read_exact(&mut bytes).expect("the time, a size and a signal");
    assert_eq!(bytes[0], message::TIME);
    assert!(bytes.ends_with(&protocol::encode(message::SIGNAL, 15)));
    assert_eq!(outcome(vec![SessionEvent::Signal(SIGINT)]).status(), 130);
}

#[test]
fn a_command_that_goes_on_after_sigterm_is_ended() {
    let events =
        vec![said(message::STARTED, 0), SessionEvent::Signal(SIGTERM), said(message::SENT, 15)];
    let (mut session, _agent, _sender) = session(events);
    session.grace = SOON;
    let ending = session.wait().expect("an end");
    assert_eq!(ending.outcome.status(), 143);
    assert!(ending.outcome.message().is_some_and(|said| said.contains("the command was still")));
}

/// A program may well go on after an interrupt. A guest that does not even take one stands still.
#[test]
fn a_guest_that_takes_no_signal_is_ended() {
    for (sent, expected) in [(true, 124), (false, 130)] {
        let mut events = vec![said(message::STARTED, 0), SessionEvent::Signal(SIGINT)];
        events.extend(sent.then(|| said(message::SENT, 2)));
        let (mut session, _agent, _sender) = session(events);
        (session.grace, session.timeout) = (SOON, Some(4 * SOON));
        assert_eq!(session.wait().expect("an end").outcome.status(), expected);
    }
}

#[test]
fn a_second_sigterm_ends_the_machine_and_an_echo_does_not() {
    let term = || SessionEvent::Signal(SIGTERM);
    let events = vec![said(message::STARTED, 0), term(), term(), said(message::EXITED, 0)];
    assert_eq!(outcome(events), SessionOutcome::Exited(0));
    let (mut session, _agent, sender) = session(vec![said(message::STARTED, 0), term()]);
    thread::spawn(move || {
        thread::sleep(ECHO + SOON);
        sender.send(SessionEvent::Signal(SIGTERM)).expect("heard");
    });
    assert_eq!(session.wait().expect("an end").outcome.status(), 143);
}

/// What it wrote waits for a reader that never comes.
#[test]
fn a_signal_ends_the_wait_for_output() {
    let (mut session, _agent, _sender) = session(vec![
        said(message::STARTED, 0),
        said(message::EXITED, 0),
        SessionEvent::Signal(SIGTERM),
    ]);
    session.outputs = 1;
    assert_eq!(session.wait().expect("an end").outcome.status(), 143);
}

#[test]
fn a_guest_that_ends_early_is_an_error_with_its_last_words() {
    let (mut session, _agent, _sender) = session(vec![SessionEvent::Ended(Ended::Reset)]);
    session.tail.write_all(b"Kernel panic - not syncing\n").expect("kept");
    let failure = session.wait().expect_err("no outcome").to_string();
    assert!(failure.contains("panic") && failure.contains("not syncing"), "{failure}");
}

#[test]
fn an_agent_that_repeats_itself_fills_no_memory() {
    let (sender, events) = channel();
    let (control, mut agent) = UnixStream::pair().expect("a pair");
    watch_control(&control, sender).expect("watched");
    agent.write_all(&protocol::encode(message::STARTED, 0).repeat(100_000)).expect("heard");
    agent.write_all(&protocol::encode(message::EXITED, 3)).expect("heard");
    let first: Vec<_> = events.iter().take(2).collect();
    assert!(
        matches!(
            first[..],
            [SessionEvent::Said(message::STARTED, ..), SessionEvent::Said(message::EXITED, 3, _)]
        ),
        "{first:?}"
    );
}
