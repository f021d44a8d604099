//! What the faults of a run came to.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What the faults of a run came to, in the words of fault injection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The result was right.
    Masked,
    /// The system noticed, and said so.
    Detected,
    /// The result was wrong, and nothing was said.
    Wrong,
    /// The guest's kernel crashed.
    Crash,
    /// Nothing came until the time was over.
    Hang,
    /// The guest asked for a reset.
    Reset,
    /// No fault struck, so the run says nothing.
    NotInjected,
}

impl Verdict {
    /// All of them, in the order of reports.
    pub const ALL: [Self; 7] = [
        Self::Masked,
        Self::Detected,
        Self::Wrong,
        Self::Crash,
        Self::Hang,
        Self::Reset,
        Self::NotInjected,
    ];
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Masked => "masked",
            Self::Detected => "detected",
            Self::Wrong => "wrong",
            Self::Crash => "crash",
            Self::Hang => "hang",
            Self::Reset => "reset",
            Self::NotInjected => "not-injected",
        })
    }
}

/// Words on the console that decide.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expect {
    /// The result is right.
    pub masked: Vec<String>,
    /// The result is wrong.
    #[serde(default)]
    pub wrong: Vec<String>,
    /// The system noticed.
    #[serde(default)]
    pub detected: Vec<String>,
    /// The kernel crashed; Linux's words if none are given.
    #[serde(default = "linux_crash")]
    pub crash: Vec<String>,
}

fn linux_crash() -> Vec<String> {
    ["Kernel panic - not syncing", "BUG: ", "Oops: "].map(str::to_owned).to_vec()
}

/// Exit codes of `ring3 run` that say how a guest ended.
const RESET: i32 = 4;
const TRIPLE_FAULT: i32 = 6;
const PANICKED: i32 = 8;
const TIMED_OUT: i32 = 124;

impl Expect {
    /// What a run came to that printed this and ended with this exit code; and why.
    ///
    /// Worse news win: a machine that says that all is well and then crashes has crashed.
    pub fn judge(&self, console: &str, code: i32) -> (Verdict, String) {
        let said = |words: &[String]| words.iter().find(|word| console.contains(*word)).cloned();
        let kinds = [
            (Verdict::Crash, &self.crash),
            (Verdict::Wrong, &self.wrong),
            (Verdict::Detected, &self.detected),
        ];
        let bad = kinds.into_iter().find_map(|(verdict, words)| Some((verdict, said(words)?)));
        if let Some((verdict, word)) = bad {
            return (verdict, format!("the console said `{word}`"));
        }
        match (code, said(&self.masked)) {
            (PANICKED, _) => (Verdict::Crash, "the kernel said that it crashed".to_owned()),
            (TRIPLE_FAULT, _) => (Verdict::Crash, "a triple fault".to_owned()),
            (RESET, _) => (Verdict::Reset, "the guest asked for a reset".to_owned()),
            (TIMED_OUT, _) => (Verdict::Hang, "the time was over".to_owned()),
            (code, None) if code != 0 => {
                (Verdict::Wrong, format!("no result, and exit code {code}"))
            }
            (_, Some(word)) => (Verdict::Masked, format!("the console said `{word}`")),
            (_, None) => (Verdict::Wrong, "the machine ended without its result".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worse_news_win() {
        let expect: Expect =
            toml::from_str("masked = ['WELL']\nwrong = ['LOST']\ndetected = ['EIO']")
                .expect("sound");
        let judge = |console, code| expect.judge(console, code).0;
        assert_eq!(judge("ALL WELL", 0), Verdict::Masked);
        assert_eq!(judge("EIO\nALL WELL", 0), Verdict::Detected);
        assert_eq!(judge("EIO\n3 LOST", 0), Verdict::Wrong);
        assert_eq!(judge("WELL\nKernel panic - not syncing: x", 4), Verdict::Crash);
        assert_eq!(judge("", 0), Verdict::Wrong, "silence is no result");
        assert_eq!(
            (judge("", 124), judge("", 4), judge("", 6)),
            (Verdict::Hang, Verdict::Reset, Verdict::Crash)
        );
    }
}
