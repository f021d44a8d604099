//! Names of numbers of Linux on x86-64: errors, and how files are opened.

use ring3_trace::{ERRORS, OPEN};

/// Errors that only the kernel and tracers see, from 512 on.
const RESTARTS: [&str; 5] =
    ["ERESTARTSYS", "ERESTARTNOINTR", "ERESTARTNOHAND", "ENOIOCTLCMD", "ERESTART_RESTARTBLOCK"];

/// An error as strace prints it.
pub fn error(number: i32) -> String {
    if let Some(name) = usize::try_from(number - 512).ok().and_then(|n| RESTARTS.get(n)) {
        return format!("? {name}");
    }
    let name = usize::try_from(number - 1).ok().and_then(|n| ERRORS.get(n)).copied();
    let text = std::io::Error::from_raw_os_error(number).to_string();
    let text = text.split(" (os error").next().unwrap_or_default();
    match name.filter(|name| !name.is_empty()) {
        Some(name) => format!("-1 {name} ({text})"),
        None => format!("-1 (errno {number})"),
    }
}

/// open makes a file with these flags.
pub fn creates(flags: u64) -> bool {
    flags & 0o100 != 0 || flags & 0o20200000 == 0o20200000
}

/// The flags of open.
pub fn open_flags(flags: u64) -> String {
    const LARGEFILE: u64 = 0o100000;
    let mut names = vec![["O_RDONLY", "O_WRONLY", "O_RDWR", "O_ACCMODE"][(flags & 3) as usize]];
    let mut rest = flags & !(3 | LARGEFILE);
    for (bits, name) in OPEN {
        if rest & bits == bits {
            names.push(name);
            rest &= !bits;
        }
    }
    let rest = if rest == 0 { String::new() } else { format!("|{rest:#x}") };
    names.join("|") + &rest
}

/// Signals from 1 on.
const SIGNALS: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2",
    "PIPE", "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG",
    "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
];

/// A signal as strace prints it.
pub fn signal(number: u64) -> String {
    let known = usize::try_from(number.wrapping_sub(1)).ok().and_then(|n| SIGNALS.get(n));
    match known {
        Some(name) => format!("SIG{name}"),
        None if (32..=64).contains(&number) => format!("SIGRT_{}", number - 32),
        None => number.to_string(),
    }
}
