//! Going on with a run that was ended: its rows are kept, and the others are measured.
//!
//! Rows of one report are read as if they had been measured together, so only what is the same
//! may go on: the revision, the machine, the batches and the environments.

use std::path::Path;

use crate::{
    Error,
    record::{Environment, Report, Row},
};

impl Report {
    /// The report written to `path` by a run like this one, which has yet to begin: without the
    /// rows that are left, which stay to be measured.
    ///
    /// # Errors
    /// The file cannot be read, or its run was another.
    pub fn resumed(&self, path: &Path, peers: &[&str]) -> Result<Self, Error> {
        let before = Self::read(path)?;
        let names: Vec<_> = before.environments.iter().map(|e| e.name.as_str()).collect();
        let is_same = [
            ("revision", before.revision == self.revision),
            ("machine", before.machine.is_same(&self.machine)),
            ("length of batches", before.effort == self.effort),
            ("list of environments", names.is_empty() || names == peers),
        ];
        match is_same.into_iter().find(|(_, is_same)| !is_same) {
            None => Ok(before),
            Some((what, _)) => Err(Error::OtherRun { path: path.into(), what }),
        }
    }

    /// What is known after another row: all `rows` of this run, behind the `kept` ones of the
    /// run it goes on with.
    pub fn add(&mut self, kept: usize, environments: Vec<Environment>, rows: &[Row], load: f64) {
        self.rows.truncate(kept);
        self.rows.extend_from_slice(rows);
        self.left.retain(|name| rows.iter().all(|row| row.name != *name));
        for environment in environments {
            match self.environments.iter_mut().find(|known| known.name == environment.name) {
                // Rows that were skipped in it all do not say what runs there.
                Some(known) if environment.kernel.is_empty() => known.version = environment.version,
                Some(known) => *known = environment,
                None => self.environments.push(environment),
            }
        }
        self.machine.load.1 = load;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::record::{Effort, Machine, SCHEMA};

    fn row(name: &str) -> Row {
        let [name, group, about, unit] = [name, "", "", "ns"].map(str::to_owned);
        Row { name, group, about, unit, results: BTreeMap::new() }
    }

    fn ended() -> Report {
        let environment = |name: &str| Environment {
            name: name.to_owned(),
            version: String::new(),
            kernel: "Linux".to_owned(),
        };
        Report {
            schema: SCHEMA,
            date: "2026-11-23T01:31:14Z".to_owned(),
            revision: "f5f5d3c95e29".to_owned(),
            machine: Machine::here(),
            effort: Effort { batches: 7, batch: 50 },
            environments: vec![environment("native"), environment("qemu")],
            missing: Vec::new(),
            rows: vec![row("boot")],
            left: vec!["fib".to_owned(), "nginx".to_owned()],
        }
    }

    #[test]
    fn an_ended_run_goes_on_where_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("ended.json");
        ended().write(&file).unwrap();
        let mut fresh = ended();
        fresh.date = "later".to_owned();
        let mut report = fresh.resumed(&file, &["native", "qemu"]).unwrap();
        assert_eq!(report, ended());
        let (kept, mut environments) = (report.rows.len(), report.environments.clone());
        environments[1].kernel = String::new();
        report.add(kept, environments.clone(), &[row("fib")], 1.0);
        report.add(kept, environments, &[row("fib"), row("nginx")], 1.5);
        let names: Vec<_> = report.rows.iter().map(|row| row.name.as_str()).collect();
        assert_eq!((names, report.left.len()), (vec!["boot", "fib", "nginx"], 0));
        assert_eq!(report.machine.load.1, 1.5);
        assert_eq!(report.environments, ended().environments);
    }

    #[test]
    fn another_run_is_not_gone_on_with() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("ended.json");
        ended().write(&file).unwrap();
        let refused = |fresh: Report, peers: &[&str], what: &str| {
            let error = fresh.resumed(&file, peers).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        };
        let peers = ["native", "qemu"];
        let revision = Report { revision: "0".to_owned(), ..ended() };
        let effort = Report { effort: Effort { batches: 5, batch: 20 }, ..ended() };
        let mut machine = ended();
        machine.machine.cpus += 1;
        refused(revision, &peers, "revision");
        refused(effort, &peers, "batches");
        refused(machine, &peers, "machine");
        refused(ended(), &["native", "uml"], "environments");
    }
}
