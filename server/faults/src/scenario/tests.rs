use super::*;
use crate::actions::{Bit, Flip, Place};

const ALL: &str = r#"
    seed = 7
    [[fault]]
    name = "worn"
    on = "disk0"
    do = "read-error"
    sectors = [2048, 4096]
    times = 3
    [[fault]]
    on = "disk1"
    do = { latency = "50ms" }
    op = "flush"
    after = "5s"
    for = "10s"
    [[fault]]
    on = "net0"
    do = { delay = { by = "10ms", jitter = "5ms" } }
    probability = 0.1
    [[fault]]
    on = "disk0"
    do = "power-cut"
    request = 120
"#;

#[test]
fn a_scenario_is_understood() {
    let scenario = Scenario::parse(ALL).expect("sound");
    assert_eq!(scenario.seed, 7);
    let targets: Vec<_> = scenario.targets().iter().map(Target::to_string).collect();
    assert_eq!(targets, ["disk0", "disk1", "net0"]);
    let [worn, cut] = scenario.of_disk(0).try_into().expect("two");
    assert_eq!((worn.bytes, worn.times, &*worn.ops), (Some(1 << 20..2 << 20), 3, &[Op::Read][..]));
    assert_eq!((cut.request, cut.times, &*cut.name), (120, 1, "fault 4"));
    let slow = &scenario.of_disk(1)[0];
    assert_eq!(slow.action, DiskAction::Latency(Duration::from_millis(50)));
    assert_eq!((slow.after.as_secs(), slow.lasts), (5, Some(Duration::from_secs(10))));
    assert_eq!(scenario.of_net(0)[0].probability, 0.1);
    assert!(scenario.of_net(1).is_empty());
}

#[test]
fn faults_at_a_time() {
    let text = "[[fault]]\nname='a'\non='ram'\ndo={flip={address=0x1000,bit=7}}\nconsole='up'\nafter='1s'\n\
        [[fault]]\non='clock'\ndo={drift=-500}\nfollows='a'\n\
        [[fault]]\non='interrupts'\ndo='lost'\nprobability=0.5\n\
        [[fault]]\non='interrupts'\ndo={spurious=49}\ntimes=9\nevery='1ms'\n\
        [[fault]]\non='machine'\ndo={pause='2s'}";
    let scenario = Scenario::parse(text).expect("sound");
    let [flip, drift, storm, pause] = scenario.timed() else { panic!("{scenario:?}") };
    let bit = Flip::At(Place { address: Some(0x1000), symbol: None, bit: 7 });
    assert_eq!((&flip.action, flip.after.as_secs()), (&MachineAction::Flip(bit), 1));
    assert_eq!(flip.cue, Some(Cue::Console("up".to_owned())));
    assert_eq!(drift.cue, Some(Cue::Follows("a".to_owned())));
    assert_eq!((storm.times, storm.every.as_millis()), (9, 1));
    assert_eq!(pause.action, MachineAction::Pause(Duration::from_secs(2)));
    assert_eq!((scenario.of_interrupts().len(), scenario.cues().len()), (1, 2));
    assert!(!scenario.loses_power());
}

#[test]
fn code_of_the_guest_can_be_a_cue() {
    let text = "[[fault]]\non='machine'\ndo={register={name='rax',bit=3}}\nreached='vfs_read'\n\
        [[fault]]\non='ram'\ndo={flip={process='sh',bits=2}}\nsyscall='fsync'\n\
        [[fault]]\non='machine'\ndo={wrong-result='add'}";
    let scenario = Scenario::parse(text).expect("sound");
    let [register, flip, wrong] = scenario.timed() else { panic!("{scenario:?}") };
    let bit = Bit { name: Some("rax".to_owned()), bit: Some(3) };
    assert_eq!(register.action, MachineAction::Register(bit));
    assert_eq!(register.cue, Some(Cue::Reached("vfs_read".to_owned())));
    let of = Flip::Of { process: "sh".to_owned(), bits: 2 };
    assert_eq!(flip.action, MachineAction::Flip(of));
    assert_eq!(flip.cue, Some(Cue::Calls("fsync".to_owned())));
    assert_eq!(wrong.action, MachineAction::WrongResult("add".to_owned()));
}

#[test]
fn devices_break_their_protocol() {
    let text = "[[fault]]\non='disk0'\ndo={used-id=65535}\nop='read'\nsectors=[0, 8]\n\
        [[fault]]\non='net1'\ndo='spurious'\n[[fault]]\non='disk1'\ndo='config-change'\n\
        [[fault]]\non='disk0'\ndo={status=9}\nconsole='now'";
    let scenario = Scenario::parse(text).expect("sound");
    let [id, status] = &scenario.of_protocol(Target::Disk(0))[..] else { panic!("two") };
    assert_eq!((id.action, &id.ops[..]), (ProtocolAction::UsedId(65535), &[Op::Read][..]));
    assert_eq!((id.bytes.clone(), status.action), (Some(0..4096), ProtocolAction::Status(9)));
    assert_eq!(scenario.of_protocol(Target::Net(1))[0].action, ProtocolAction::Spurious);
    let [change] = scenario.timed() else { panic!("{scenario:?}") };
    assert_eq!((change.on, &change.action), (Target::Disk(1), &MachineAction::ConfigChange));
    assert!(scenario.of_disk(0).is_empty() && scenario.of_protocol(Target::Disk(1)).is_empty());
    assert_eq!((scenario.cues().len(), scenario.targets().len()), (1, 3));
}

#[test]
fn links_go_down_at_a_time() {
    let text = "[[fault]]\non='net1'\ndo={link-down='3s'}\nconsole='pull'\n\
        [[fault]]\non='net0'\ndo='unplugged'\nafter='9s'\n[[fault]]\non='net0'\ndo='loss'";
    let scenario = Scenario::parse(text).expect("sound");
    let [down, out] = scenario.timed() else { panic!("{scenario:?}") };
    assert_eq!(down.action, MachineAction::LinkDown(Duration::from_secs(3)));
    assert_eq!((down.on, out.on), (Target::Net(1), Target::Net(0)));
    assert_eq!((&out.action, scenario.of_net(0).len()), (&MachineAction::Unplugged, 1));
}

#[test]
fn mistakes_are_named() {
    for (text, part) in [
        ("[[fault]]\non = 'ram'\ndo = 'reset'", "ram has flip"),
        ("[[fault]]\non = 'ram'\ndo = { flip = 1 }\nop = 'read'", "not a request"),
        ("[[fault]]\non = 'ram'\ndo = { flip = { address = 1, bit = 8 } }", "bits 0 to 7"),
        ("[[fault]]\non = 'ram'\ndo = { flip = 1 }\ntimes = 2", "how long after"),
        ("[[fault]]\non = 'clock'\ndo = { drift = -1000000 }", "more than -1000000"),
        ("[[fault]]\non = 'machine'\ndo = 'stuck'\nfollows = 'x'", "no other fault"),
        ("[[fault]]\non = 'disk0'\ndo = 'lost'\nconsole = 'a'\nfollows = 'b'", "not both"),
        ("[[fault]]\non = 'disk0'\ndo = 'lost'\nevery = '1s'", "not at times"),
        ("[[fault]]\non = 'disk0'\ndo = 'lost'\nreached = 'a b'", "not the name of a function"),
        ("[[fault]]\non = 'disk0'\ndo = 'lost'\nreached = 'f'\nsyscall = 'g'", "not both"),
        ("[[fault]]\non = 'ram'\ndo = { stuck-bit = { bit = 1, value = 0 } }", "say address"),
        ("[[fault]]\non = 'machine'\ndo = { register = { name = 'r16' } }", "rax to r15"),
        ("[[fault]]\non = 'ram'\ndo = { register = {} }", "ram has flip"),
        ("[[fault]]\non = 'machine'\ndo = 'unplugged'", "networks have link-down"),
        ("[[fault]]\non = 'disk0'\ndo = 'unplugged'", "networks have link-down"),
        ("[[fault]]\non = 'disk0'\ndo = { used-index = 0 }", "where it belongs"),
        ("[[fault]]\non = 'disk0'\ndo = { status = 1 }", "mean something"),
        ("[[fault]]\non = 'net0'\ndo = { status = 9 }", "disks have one"),
        ("[[fault]]\non = 'net0'\ndo = { used-id = 9 }\nop = 'read'", "never meets it"),
        ("[[fault]]\non = 'net0'\ndo = 'spurious'\nsectors = [1, 2]", "no sectors"),
        ("[[fault]]\non = 'disk0'\ndo = 'config-change'\nrequest = 2", "not a request"),
        ("[[fault]]\non = 'net0'\ndo = 'unplugged'\nrequest = 2", "not a request"),
        (
            "[[fault]]\non = 'machine'\ndo = 'stuck'\nname = 'a'\nfollows = 'b'\n\
            [[fault]]\non = 'machine'\ndo = 'reset'\nname = 'b'\nfollows = 'a'",
            "waits for this one",
        ),
        ("colour = 1", "line 1: unknown field `colour`"),
        (
            "[[fault]]\non = 'disk0'\ndo = 'lost'\nop = 'dance'",
            "fault `fault 1`: unknown variant `dance`",
        ),
        ("seed = 1\n[[fault", "line 2: "),
        (
            "[[fault]]\non = 'ram'\ndo = { flip = { process = 'x', bits = 1, colour = 2 } }",
            "`colour`",
        ),
        ("[[fault]]\non = 'ram'\ndo = { flip = { process = 'x', bit = 1 } }", "say bits"),
        ("[[fault]]\non = 'ram'\ndo = { flip = { address = 1, bits = 2 } }", "say bit = 0 to 7"),
        (
            "[[fault]]\non = 'ram'\ndo = { flip = { process = 'x', address = 1, bits = 2 } }",
            "say address",
        ),
        ("[[fault]]\non = 'net0'\ndo = { delay = { by = '1ms', jiter = '1ms' } }", "`jiter`"),
        ("[[fault]]\non = 'disk0'\ndo = { corrupt = 1, latency = '1ms' }", "do: "),
        ("[[fault]]\non = 'disk0'\ndo = 'explode'", "explode"),
        ("[[fault]]\non = 'disk0'\ndo = 'loss'", "loss"),
        ("[[fault]]\non = 'tape0'\ndo = 'hang'", "`tape0` is not there"),
        ("[[fault]]\non = 'disk0'\ndo = 'hang'\nwhen = 1", "unknown field `when`"),
        ("[[fault]]\non = 'disk0'\ndo = 'lost'\nop = 'read'", "write op = \"write\""),
        ("[[fault]]\non = 'disk0'\ndo = 'lost'\nop = 'send'", "never meets it"),
        ("[[fault]]\non = 'disk0'\ndo = { latency = 'soon' }", "`soon` is not a time"),
        ("[[fault]]\non = 'disk0'\ndo = { corrupt = 0 }", "flips no bit"),
        ("[[fault]]\non = 'disk0'\ndo = 'lost'\nsectors = [9, 9]", "first < end"),
        ("[[fault]]\non = 'disk0'\ndo = 'lost'\nrequest = 0", "count from 1"),
        ("[[fault]]\non = 'disk0'\ndo = 'lost'\nprobability = 1.5", "at most 1"),
        ("[[fault]]\non = 'net0'\ndo = 'loss'\nsectors = [1, 2]", "no sectors"),
        (
            "[[fault]]\nname='a'\non='disk0'\ndo='hang'\n[[fault]]\nname='a'\non='disk0'\ndo='hang'",
            "same name",
        ),
    ] {
        let error = Scenario::parse(text).expect_err(text).to_string();
        assert!(error.contains(part) && error.lines().count() == 1, "{text}: {error}");
    }
}
