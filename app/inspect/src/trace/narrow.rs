//! What system calls of 32-bit programs are called: their functions' names and those of the manual differ in more places than those of
//! 64-bit programs (arch/x86/entry/syscalls/syscall_32.tbl).

/// Functions whose names no rule leads to the manual's, and these.
const OTHER: [(&str, &str); 25] = [
    ("newstat", "stat"),
    ("newfstat", "fstat"),
    ("newlstat", "lstat"),
    ("stat", "oldstat"),
    ("fstat", "oldfstat"),
    ("lstat", "oldlstat"),
    ("newuname", "uname"),
    ("uname", "olduname"),
    ("olduname", "oldolduname"),
    ("umount", "umount2"),
    ("oldumount", "umount"),
    ("mmap_pgoff", "mmap2"),
    ("llseek", "_llseek"),
    ("select", "_newselect"),
    ("old_select", "select"),
    ("old_readdir", "readdir"),
    ("old_getrlimit", "getrlimit"),
    ("getrlimit", "ugetrlimit"),
    ("clock_gettime", "clock_gettime64"),
    ("clock_settime", "clock_settime64"),
    ("clock_adjtime", "clock_adjtime64"),
    ("timer_gettime", "timer_gettime64"),
    ("timer_settime", "timer_settime64"),
    ("timerfd_gettime", "timerfd_gettime64"),
    ("timerfd_settime", "timerfd_settime64"),
];
/// Calls with times of 64 bits. Those of 32 bits had their names first.
const LONG_TIMES: [&str; 12] = [
    "clock_getres",
    "clock_nanosleep",
    "utimensat",
    "mq_timedsend",
    "mq_timedreceive",
    "semtimedop",
    "futex",
    "sched_rr_get_interval",
    "pselect6",
    "ppoll",
    "recvmmsg",
    "rt_sigtimedwait",
];
/// Calls with user numbers of 32 bits. Those of 16 bits had their names first.
const LONG_USERS: [&str; 19] = [
    "lchown",
    "getuid",
    "getgid",
    "geteuid",
    "getegid",
    "setreuid",
    "setregid",
    "getgroups",
    "setgroups",
    "fchown",
    "setresuid",
    "getresuid",
    "setresgid",
    "getresgid",
    "chown",
    "setuid",
    "setgid",
    "setfsuid",
    "setfsgid",
];

/// The manual's name of the call that this function carries out, which is told without its prefix.
pub fn name_of(function: &str) -> String {
    if let Some((_, manual)) = OTHER.iter().find(|(known, _)| *known == function) {
        return (*manual).to_owned();
    }
    let suffix = match function {
        _ if LONG_USERS.contains(&function) => "32",
        _ if LONG_TIMES.contains(&function) => "_time64",
        _ => "",
    };
    let own = function.strip_prefix("ia32_").unwrap_or(function);
    let old = ["_time32", "16"].iter().find_map(|end| own.strip_suffix(end));
    let old = old.or_else(|| own.strip_suffix("32").filter(|rest| rest.ends_with("time")));
    format!("{}{suffix}", old.unwrap_or(own))
}

#[cfg(test)]
mod tests {
    use super::name_of;

    #[test]
    fn names_are_those_of_the_table_of_32_bit_calls() {
        for (function, manual) in [
            ("read", "read"),
            ("mmap_pgoff", "mmap2"),
            ("ia32_mmap", "mmap"),
            ("ia32_stat64", "stat64"),
            ("ia32_fstatat64", "fstatat64"),
            ("newuname", "uname"),
            ("olduname", "oldolduname"),
            ("setuid16", "setuid"),
            ("setuid", "setuid32"),
            ("clock_gettime32", "clock_gettime"),
            ("clock_gettime", "clock_gettime64"),
            ("clock_nanosleep_time32", "clock_nanosleep"),
            ("clock_nanosleep", "clock_nanosleep_time64"),
            ("time32", "time"),
            ("utimes_time32", "utimes"),
            ("timer_settime", "timer_settime64"),
            ("futex_time32", "futex"),
            ("sendfile64", "sendfile64"),
            ("truncate", "truncate"),
            ("pselect6_time64", "pselect6_time64"),
            ("umount", "umount2"),
        ] {
            assert_eq!(name_of(function), manual, "{function}");
        }
    }
}
