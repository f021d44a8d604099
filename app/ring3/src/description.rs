//! From options to a machine description: files read, sizes checked, each problem in one line that
//! names the thing and says what to do.

use std::{
    fs::File,
    io::{ErrorKind, Read},
    path::Path,
};

use host_linux::probe;
use vmm::{
    BootProtocol, Description, EngineKind, EngineOptions, FastOptions, LockStep, ModuleFile,
};

use crate::{
    failure::Failure,
    run_arguments::RunArguments,
    values::{
        ClockChoice, ComputedJumps, Doorbells, EngineArguments, EngineChoice, Guest32,
        GuestIsolation, Halted, MemorySize, ProgramCode, Translations, User32,
    },
};

/// Less than this boots no kernel we know.
const LEAST_MEMORY: u64 = 16 << 20;
/// Virtual CPUs of a machine at the most.
const MOST_CPUS: u32 = 16;
const PAGE: u64 = 4096;
/// Has Linux keep its time by the clock that follows the host's, though it knows a faster one.
const KVM_CLOCK: &str = "clocksource=kvm-clock";
/// Linux's options about that.
const CLOCK_SOURCE: &str = "clocksource=";
const NO_KVM_CLOCK: [&str; 2] = ["no-kvmclock", "nopv"];
/// What a bzImage has, and where (Linux, `Documentation/arch/x86/boot.rst`).
const LINUX_MAGIC: &[u8] = b"HdrS";
const LINUX_MAGIC_AT: usize = 0x202;

/// Reads and checks everything a run needs.
pub fn describe(arguments: &RunArguments) -> Result<Description, Failure> {
    check_machine(arguments.cpus, arguments.memory, &arguments.engine)?;
    let memory = arguments.memory.0;
    let append = &arguments.append;
    let read = |what, path: &Path| read_file(what, path, memory);
    let kernel = read("kernel", &arguments.kernel)?;
    let uses_unpacked = matches!(arguments.boot_protocol, BootProtocol::Auto | BootProtocol::Linux);
    let unpacked = || arguments.engine.unpacked_kernels.of(&kernel, None);
    let unpacked = uses_unpacked.then(unpacked).flatten();
    let clock = arguments.clock.unwrap_or_else(|| usual_clock(&kernel, append));
    let mut modules = Vec::new();
    if let Some(path) = &arguments.initrd {
        modules.push(ModuleFile { data: read("initrd", path)?, cmdline: String::new() });
    }
    for module in &arguments.module {
        let path = module.split_once(' ').map_or(module.as_str(), |(path, _)| path);
        let data = read("module", Path::new(path))?;
        modules.push(ModuleFile { data, cmdline: module.clone() });
    }
    Ok(Description {
        kernel,
        unpacked,
        modules,
        cmdline: command_line(append, clock),
        protocol: arguments.boot_protocol,
        memory,
        cpus: arguments.cpus,
        engine: engine(&arguments.engine, GuestIsolation::Strict)?,
        test_devices: arguments.test_devices,
        clock: clock.into(),
        paravirt: arguments.engine.paravirt.0,
    })
}

/// Linux has an exact clock unless the user has chosen its source. Other kernels need not know what that asks for.
fn usual_clock(kernel: &[u8], append: &str) -> ClockChoice {
    let mut words = append.split_whitespace();
    let chosen = words.any(|word| word.starts_with(CLOCK_SOURCE) || NO_KVM_CLOCK.contains(&word));
    let linux = kernel.get(LINUX_MAGIC_AT..).is_some_and(|rest| rest.starts_with(LINUX_MAGIC));
    if linux && !chosen { ClockChoice::Exact } else { ClockChoice::Rtc }
}

/// What the kernel is told. What the user says of the clock's source comes last, and so it counts.
fn command_line(append: &str, clock: ClockChoice) -> String {
    match clock {
        ClockChoice::Rtc => append.to_owned(),
        ClockChoice::Exact => format!("{KVM_CLOCK} {append}"),
    }
}

/// Checks what every kind of guest has.
pub fn check_machine(
    cpus: u32,
    memory: MemorySize,
    engine: &EngineArguments,
) -> Result<(), Failure> {
    check_cpus(cpus, engine.lock_step)?;
    check_memory(memory.0, probe::memory_total())
}

/// The engine that was asked for; it must be one that can do what was asked for besides. `usual` is how the guest's programs are kept
/// from its kernel if nothing is said of that.
pub fn engine(
    arguments: &EngineArguments,
    usual: GuestIsolation,
) -> Result<EngineOptions, Failure> {
    let EngineArguments { lock_step, translate_user, .. } = *arguments;
    let user_dispatch = arguments.user_dispatch();
    let (unpatched, traced) = (arguments.unpatched(), arguments.traced());
    let asked = user_dispatch || unpatched;
    let kind = kind(arguments.engine, lock_step.is_some(), translate_user, asked)?;
    check_isolation(arguments.guest_isolation, kind, translate_user)?;
    let direct = matches!(kind, EngineKind::Auto | EngineKind::Fast) && !translate_user;
    if traced && arguments.guest_isolation == Some(GuestIsolation::Strict) {
        return Err(Failure::usage(
            "--system-calls ptrace: with --guest-isolation strict another one than the tracer hands calls over; leave out one",
        ));
    }
    let strict = match arguments.guest_isolation {
        Some(chosen) => chosen == GuestIsolation::Strict,
        None => usual == GuestIsolation::Strict && direct && !traced && probe::can_isolate(),
    };
    let without_keys =
        arguments.guest_isolation.is_some_and(|chosen| chosen != GuestIsolation::Keys);
    let fast = FastOptions {
        lock_step,
        user_dispatch,
        unpatched,
        traced,
        unmap_flushed: arguments.unmap_flushed(),
        scattered: arguments.scattered(),
        young_directly: arguments.young_directly(),
        fixed_programs: arguments.program_code == ProgramCode::Fixed,
        copies_apart: arguments.copies_apart(),
        interpret_narrow: arguments.user32 == User32::Interpret,
        interpret_narrow_guests: arguments.guest32 == Guest32::Interpret,
        map_fleeting: arguments.guest32 == Guest32::Map,
        translations_apart: arguments.translations == Translations::Own,
        search_jumps: arguments.computed_jumps == ComputedJumps::Search,
        most_mappings: arguments.most_mappings,
        strict,
        leave_bells: arguments.doorbells == Doorbells::Monitor,
        switches: arguments.switches(),
        without_keys,
    };
    let sleep_at_once = arguments.halted == Halted::Sleep;
    Ok(EngineOptions { kind, translate_user, sleep_at_once, fast })
}

fn check_isolation(
    chosen: Option<GuestIsolation>,
    kind: EngineKind,
    translate_user: bool,
) -> Result<(), Failure> {
    let strict = chosen == Some(GuestIsolation::Strict);
    let refused = match kind {
        _ if strict && translate_user => {
            "strict: translated programs run beside the kernel; leave out --translate-user"
        }
        EngineKind::Direct if strict => {
            "strict: this engine has none; give --engine fast, jit or interp"
        }
        EngineKind::Auto | EngineKind::Fast if strict && !probe::seccomp_notification() => {
            "strict: this host has no seccomp's notifications (Linux 5.19); give --engine jit or interp"
        }
        EngineKind::Auto | EngineKind::Fast | EngineKind::Direct
            if chosen == Some(GuestIsolation::Keys) && !probe::protection_keys() =>
        {
            "keys: this host has no protection keys; `ring3 doctor` shows what it has"
        }
        _ => return Ok(()),
    };
    Err(Failure::usage(format!("--guest-isolation {refused}")))
}

fn kind(
    choice: EngineChoice,
    lock_step: bool,
    translate_user: bool,
    dispatch: bool,
) -> Result<EngineKind, Failure> {
    use EngineChoice::*;
    match choice {
        Interp | Jit if dispatch => Err(Failure::usage(
            "--system-calls: this engine interprets user code; give --engine fast or direct",
        )),
        Interp | Jit if translate_user => Err(Failure::usage(
            "--translate-user: this engine interprets user code; give --engine fast or direct",
        )),
        Interp | Direct if lock_step && !translate_user => Err(Failure::usage(
            "--lock-step: this engine translates nothing; give --engine fast or jit",
        )),
        Auto if lock_step || translate_user || dispatch => Ok(EngineKind::Fast),
        Auto => Ok(EngineKind::Auto),
        Interp => Ok(EngineKind::Interpreter),
        Direct => Ok(EngineKind::Direct),
        Jit => Ok(EngineKind::Jit),
        Fast => Ok(EngineKind::Fast),
    }
}

fn check_cpus(cpus: u32, lock_step: Option<LockStep>) -> Result<(), Failure> {
    match cpus {
        1..=MOST_CPUS => match lock_step {
            Some(LockStep { cpu, .. }) if cpu >= cpus => Err(Failure::usage(format!(
                "--lock-step=cpu={cpu}: the machine has {cpus} virtual CPUs, counted from 0"
            ))),
            _ => Ok(()),
        },
        _ => Err(Failure::usage(format!(
            "--cpus {cpus}: a machine has 1 to {MOST_CPUS} virtual CPUs"
        ))),
    }
}

fn check_memory(bytes: u64, host: Option<u64>) -> Result<(), Failure> {
    let mib = |bytes: u64| bytes >> 20;
    if bytes < LEAST_MEMORY {
        let least = mib(LEAST_MEMORY);
        return Err(Failure::usage(format!(
            "--memory: {} KiB is too little to boot anything; give at least {least}M",
            bytes >> 10
        )));
    }
    if !bytes.is_multiple_of(PAGE) {
        return Err(Failure::usage("--memory: must be a multiple of 4K"));
    }
    match host {
        Some(total) if bytes > total => Err(Failure::usage(format!(
            "--memory: {} MiB is more than this host has ({} MiB); give less",
            mib(bytes),
            mib(total)
        ))),
        _ => Ok(()),
    }
}

/// Reads a whole file. One larger than guest memory cannot be used, and may have no end.
fn read_file(what: &str, path: &Path, limit: u64) -> Result<Vec<u8>, Failure> {
    let shown = path.display();
    let wrong = |error: std::io::Error| {
        let hint = match error.kind() {
            ErrorKind::NotFound => "there is no such file",
            ErrorKind::PermissionDenied => "you may not read it",
            ErrorKind::IsADirectory => "it is a directory",
            _ => return Failure::usage(format!("--{what} {shown}: {error}")),
        };
        Failure::usage(format!("--{what} {shown}: {hint}"))
    };
    let file = File::open(path).map_err(wrong)?;
    let mut data = Vec::new();
    file.take(limit + 1).read_to_end(&mut data).map_err(wrong)?;
    if data.is_empty() {
        return Err(Failure::usage(format!("--{what} {shown}: the file is empty")));
    }
    if data.len() as u64 > limit {
        return Err(Failure::usage(format!(
            "--{what} {shown}: the file is larger than the guest's memory; give more --memory"
        )));
    }
    Ok(data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::values::{Flushed, ScatteredChoice, SystemCalls, YoungChoice};

    fn message(result: Result<Vec<u8>, Failure>) -> String {
        let failure = result.expect_err("it fails");
        assert_eq!(failure.code, 2);
        failure.to_string()
    }

    #[test]
    fn files_that_cannot_be_used() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("empty"), "").expect("written");
        std::fs::write(path("large"), [0; 5000]).expect("written");
        let read = |name: &str| message(read_file("kernel", &path(name), 4096));
        assert!(read("missing").contains("no such file"));
        assert!(read("empty").contains("is empty"));
        assert!(read("large").contains("larger than the guest's memory"));
        let endless = read_file("kernel", Path::new("/dev/zero"), 4096);
        assert!(message(endless).contains("larger"));
        let directory = read_file("initrd", directory.path(), 4096);
        assert!(message(directory).contains("it is a directory"));
    }

    #[test]
    fn memory_limits() {
        let host = Some(8 << 30);
        assert!(check_memory(1 << 30, host).is_ok());
        assert!(check_memory(LEAST_MEMORY, None).is_ok());
        for (bytes, part) in [
            (LEAST_MEMORY - PAGE, "too little"),
            (9 << 30, "more than this host"),
            (LEAST_MEMORY + 1, "multiple"),
        ] {
            let failure = check_memory(bytes, host).expect_err("refused");
            assert!(failure.to_string().contains(part), "{failure}");
        }
    }

    fn arguments(engine: EngineChoice) -> EngineArguments {
        EngineArguments {
            engine,
            lock_step: None,
            translate_user: false,
            system_calls: SystemCalls::Seccomp,
            flushed: Flushed::Close,
            scattered: ScatteredChoice::Lookup,
            young: YoungChoice::Lookup,
            doorbells: Doorbells::Wedge,
            code_copies: crate::values::CodeCopies::Shared,
            user32: User32::Direct,
            guest32: Guest32::Translate,
            translations: Translations::Shared,
            computed_jumps: ComputedJumps::Land,
            program_code: ProgramCode::Anywhere,
            known_blocks: crate::values::KnownBlocksChoice::Keep,
            unpacked_kernels: crate::values::UnpackedKernels::Keep,
            crowded: crate::values::Crowded::Free,
            halted: Halted::Look,
            switches: crate::values::SwitchesChoice::Counted,
            most_mappings: None,
            guest_isolation: None,
            paravirt: crate::values::ParavirtChoice(None),
        }
    }

    #[test]
    fn engines_that_translate() {
        let with = |choice, lock_step, translate_user, system_calls| {
            let arguments =
                EngineArguments { lock_step, translate_user, system_calls, ..arguments(choice) };
            engine(&arguments, GuestIsolation::Strict).map(|options| options.kind)
        };
        let ask = |choice, compare: bool, translate_user| {
            let lock_step = compare.then(LockStep::default);
            with(choice, lock_step, translate_user, SystemCalls::Seccomp)
        };
        let dispatch = |choice| with(choice, None, false, SystemCalls::Dispatch);
        assert_eq!(dispatch(EngineChoice::Auto).ok(), Some(EngineKind::Fast));
        assert_eq!(dispatch(EngineChoice::Jit).expect_err("refused").code, 2);
        assert_eq!(ask(EngineChoice::Auto, true, false).ok(), Some(EngineKind::Fast));
        assert_eq!(ask(EngineChoice::Auto, false, true).ok(), Some(EngineKind::Fast));
        assert_eq!(ask(EngineChoice::Direct, true, true).ok(), Some(EngineKind::Direct));
        assert_eq!(ask(EngineChoice::Direct, true, false).expect_err("refused").code, 2);
        assert_eq!(ask(EngineChoice::Jit, false, true).expect_err("refused").code, 2);
        assert_eq!(ask(EngineChoice::Interp, true, false).expect_err("refused").code, 2);
        assert_eq!(ask(EngineChoice::Interp, false, false).ok(), Some(EngineKind::Interpreter));
    }

    #[test]
    fn programs_are_closed_off_where_it_is_usual_or_asked_for() {
        use GuestIsolation::{Fast, Strict};
        let strict = |choice, guest_isolation, translate_user, usual| {
            let arguments =
                EngineArguments { guest_isolation, translate_user, ..arguments(choice) };
            engine(&arguments, usual)
                .map(|options| options.fast.strict)
                .map_err(|failure| failure.code)
        };
        let can = probe::can_isolate();
        for choice in [EngineChoice::Auto, EngineChoice::Fast] {
            assert_eq!(strict(choice, None, false, Strict), Ok(can));
            assert_eq!(strict(choice, None, false, Fast), Ok(false));
            assert_eq!(strict(choice, Some(Fast), false, Strict), Ok(false));
            assert_eq!(
                strict(choice, Some(Strict), false, Fast),
                if probe::seccomp_notification() { Ok(true) } else { Err(2) }
            );
            // What cannot be strict is not by itself, and is refused if asked for.
            assert_eq!(strict(choice, None, true, Strict), Ok(false));
            assert_eq!(strict(choice, Some(Strict), true, Fast), Err(2));
        }
        assert_eq!(strict(EngineChoice::Direct, None, false, Strict), Ok(false));
        assert_eq!(strict(EngineChoice::Direct, Some(Strict), false, Fast), Err(2));
    }

    #[test]
    fn keys_are_left_alone_where_something_else_is_chosen() {
        use GuestIsolation::{Fast, Keys};
        let without_keys = |guest_isolation| {
            let arguments = EngineArguments { guest_isolation, ..arguments(EngineChoice::Auto) };
            engine(&arguments, Fast)
                .map(|options| options.fast.without_keys)
                .map_err(|failure| failure.code)
        };
        assert_eq!((without_keys(None), without_keys(Some(Fast))), (Ok(false), Ok(true)));
        let keys = if probe::protection_keys() { Ok(false) } else { Err(2) };
        assert_eq!(without_keys(Some(Keys)), keys);
    }

    #[test]
    fn linux_has_an_exact_clock() {
        let linux = [&[0; LINUX_MAGIC_AT], LINUX_MAGIC].concat();
        assert_eq!(usual_clock(&linux, "quiet"), ClockChoice::Exact);
        assert_eq!(usual_clock(&linux, "quiet clocksource=hpet"), ClockChoice::Rtc);
        assert_eq!(usual_clock(&linux, "no-kvmclock quiet"), ClockChoice::Rtc);
        assert_eq!(usual_clock(&[0; 0x1000], ""), ClockChoice::Rtc);
        assert_eq!(usual_clock(b"HdrS", ""), ClockChoice::Rtc);
        assert_eq!(command_line("quiet", ClockChoice::Exact), "clocksource=kvm-clock quiet");
    }

    #[test]
    fn numbers_of_cpus() {
        let compared = |cpu| Some(LockStep { cpu, ..LockStep::default() });
        assert!(check_cpus(1, compared(0)).is_ok() && check_cpus(2, compared(1)).is_ok());
        assert!(check_cpus(16, None).is_ok());
        assert_eq!(check_cpus(0, None).expect_err("none").code, 2);
        assert_eq!(check_cpus(17, None).expect_err("too many").code, 2);
        assert_eq!(check_cpus(2, compared(2)).expect_err("no such CPU").code, 2);
    }
}
