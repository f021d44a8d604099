//! `ring3 run --config FILE`: options in a file.
//!
//! The file's keys are the options' names, so it can say what the command line can and nothing else. It is turned into
//! words that stand where `--config FILE` stood; what is wrong with a value is then told as for any option.

use std::{
    ffi::{OsStr, OsString},
    fs,
    path::Path,
    slice,
};

use clap::{ArgAction, Command, CommandFactory};
use toml::{Table, Value};

use crate::{cli::Arguments, failure::Failure, foreign::PREFIX};

const OPTION: &str = "--config";
/// Options whose values begin with the name of a file.
const FILES: [&str; 7] = ["kernel", "initrd", "module", "disk", "share", "fault", "fault-log"];

/// The command line with what is in configuration files.
pub fn expand(words: Vec<OsString>) -> Result<Vec<OsString>, Failure> {
    if words.get(1).is_none_or(|command| command != "run") {
        return Ok(words);
    }
    let mut expanded = Vec::new();
    let mut rest = words.iter();
    while let Some(word) = rest.next() {
        let file = match word.to_str().and_then(|word| word.strip_prefix(OPTION)) {
            Some("") => rest.next().cloned(),
            Some(rest) => rest.strip_prefix('=').map(OsString::from),
            None => None,
        };
        match file {
            Some(file) => expanded.extend(read(&file, &words)?),
            None => expanded.push(word.clone()),
        }
    }
    Ok(expanded)
}

/// The file's options, but for those that the command line has.
fn read(file: &OsStr, given: &[OsString]) -> Result<Vec<OsString>, Failure> {
    let wrong = |problem: String| Failure::usage(format!("--config {}: {problem}", file.display()));
    let text = fs::read_to_string(file).map_err(|error| wrong(error.to_string()))?;
    let table: Table = text.parse().map_err(|error: toml::de::Error| wrong(error.to_string()))?;
    let folder = Path::new(file).parent().unwrap_or(Path::new(""));
    let mut words = Vec::new();
    for (key, value) in table.iter().filter(|(key, _)| !is_overridden(key, given)) {
        words.extend(option(key, value, folder).map_err(wrong)?);
    }
    Ok(words)
}

/// Whether the command line has an option that can be there once only.
fn is_overridden(key: &str, given: &[OsString]) -> bool {
    let command = Arguments::command();
    let mut options = command.find_subcommand("run").into_iter().flat_map(Command::get_arguments);
    let Some(option) = options.find(|option| option.get_long() == Some(key)) else { return false };
    let names = [Some(format!("--{key}")), option.get_short().map(|short| format!("-{short}"))];
    let is_named = |word: &str| {
        names.iter().flatten().any(|name| word == name || word.starts_with(&format!("{name}=")))
    };
    let is_given = given.iter().filter_map(|word| word.to_str()).any(is_named);
    is_given && !matches!(option.get_action(), ArgAction::Append)
}

/// The words of a key: of each value, if it has several.
fn option(key: &str, value: &Value, folder: &Path) -> Result<Vec<OsString>, String> {
    let values = match value {
        Value::Array(values) => values.as_slice(),
        value => slice::from_ref(value),
    };
    let words = values.iter().map(|value| word(key, value, folder));
    words.filter_map(Result::transpose).collect()
}

/// The word of a value; none for an option that is switched off.
fn word(key: &str, value: &Value, folder: &Path) -> Result<Option<OsString>, String> {
    let text = match value {
        Value::Boolean(on) => return Ok(on.then(|| format!("--{key}").into())),
        Value::Integer(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        Value::String(text) => text.clone(),
        other => return Err(format!("{key}: a {} is no option's value", other.type_str())),
    };
    let mut word = OsString::from(format!("--{key}="));
    match text.strip_prefix(PREFIX) {
        _ if !FILES.contains(&key) => word.push(&text),
        Some(socket) => word.extend([OsStr::new(PREFIX), folder.join(socket).as_os_str()]),
        None => word.push(folder.join(&text)),
    }
    Ok(Some(word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cli, disk::DiskChoice, run_arguments::RunArguments, values::MemorySize};
    use clap::Parser;

    fn run(text: &str, further: &[&str]) -> Result<RunArguments, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("vm.toml");
        fs::write(&file, text).expect("written");
        let words = ["ring3".into(), "run".into(), OPTION.into(), file.into_os_string()];
        let words = words.into_iter().chain(further.iter().map(OsString::from));
        let words = expand(words.collect()).map_err(|failure| failure.to_string())?;
        match Arguments::try_parse_from(words).map_err(|error| error.to_string())?.command {
            cli::Command::Run(run) => Ok(*run),
            _ => unreachable!("run was asked for"),
        }
    }

    #[test]
    fn keys_are_options() {
        let text = "kernel = 'k'\nmemory = '2G'\ntimeout = 5\nstats = true\njson = false\n\
                    disk = ['a.img', '/b.img,readonly', 'vhost-user:s']\nappend = 'root=/dev/vda quiet'\n";
        let run = run(text, &[]).expect("sound");
        assert_eq!(run.memory, MemorySize(2 << 30));
        assert_eq!(
            (run.stats, run.json, run.append.as_str()),
            (true, false, "root=/dev/vda quiet")
        );
        let [DiskChoice::Image(first), DiskChoice::Image(second), DiskChoice::Foreign(socket)] =
            run.disk.as_slice()
        else {
            panic!("{:?}", run.disk)
        };
        assert_eq!(first.image.path.parent(), run.kernel.parent(), "from where the file is");
        assert_eq!(second.image.path, Path::new("/b.img"));
        assert_eq!(socket.parent(), run.kernel.parent());
    }

    #[test]
    fn the_command_line_wins_and_adds() {
        let text = "kernel = 'k'\nmemory = '2G'\ndisk = ['a.img']\n";
        for memory in [&["--memory", "3G"][..], &["-m", "3G"], &["--memory=3G"]] {
            let further = [memory, &["--disk", "c.img"]].concat();
            let run = run(text, &further).expect("sound");
            assert_eq!(run.memory, MemorySize(3 << 30));
            assert_eq!(run.disk.len(), 2);
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (text, part) in [
            ("kernel = ", "vm.toml"),
            ("colour = 'red'", "--colour"),
            ("kernel = 'k'\nmemory = 'much'", "not a size"),
            ("kernel = {}", "kernel: a table"),
            ("memory = '2G'", "--kernel"),
        ] {
            let error = run(text, &[]).expect_err(text);
            assert!(error.contains(part), "{error}");
        }
        let missing = ["ring3", "run", "--config=/nonexistent.toml"].map(OsString::from);
        assert!(expand(missing.to_vec()).is_err_and(|failure| failure.code == 2));
    }

    #[test]
    fn other_commands_keep_their_words() {
        let words = ["ring3", "exec", "--", "x", "--config", "y"].map(OsString::from).to_vec();
        assert_eq!(expand(words.clone()).ok(), Some(words));
    }

    fn sound_files() -> Vec<Vec<u8>> {
        let texts = [
            "kernel = \"vmlinuz\"\nmemory = \"1G\"\ndisk = [\"a.img\", \"vhost-user:b\"]\nstats = true\n",
            "net = [\"user,restrict,allow=10.0.2.2:80\"]\ntimeout = 5\nshare = \"src:work:ro\"\njson = false\n",
        ];
        texts.map(|text| text.as_bytes().to_vec()).to_vec()
    }

    /// Not a panic, whatever a file holds.
    #[test]
    fn any_file_is_told_what_is_wrong_with_it() {
        fn run(bytes: &[u8]) {
            let Some(table) =
                std::str::from_utf8(bytes).ok().and_then(|text| text.parse::<Table>().ok())
            else {
                return;
            };
            for (key, value) in &table {
                if let Err(problem) = option(key, value, Path::new("/folder")) {
                    assert!(!problem.is_empty(), "{key}");
                }
            }
        }
        fuzzer::test(fuzzer::Target { name: "toml", seeds: sound_files, run });
    }
}
