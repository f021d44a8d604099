//! The tables of the papers that ring3 unites, beside the same measurements of ours.
//!
//! A paper's machine is of another century, so only multiples of native are compared. docs/papers.md says what each paper did.

use crate::{
    record::{NATIVE, Report, Row},
    table::{grid, multiple_text, quantity},
};

/// The environment compared with the papers' systems.
const RING3: &str = "ring3:fast";

/// A table of a paper.
struct Table {
    title: &'static str,
    machine: &'static str,
    /// Systems that the paper measured beside native.
    systems: &'static [&'static str],
    lines: &'static [Line],
}

/// A line of a table.
struct Line {
    what: &'static str,
    /// The paper's figures; empty where the paper has none.
    paper: PaperFigures,
    /// The row of this benchmark that measures the same, or why there is none.
    row: Result<&'static str, &'static str>,
}

/// A paper's figures.
enum PaperFigures {
    /// Durations: native and each system.
    Durations(f64, &'static [f64]),
    /// Rates: native and each system.
    Rates(f64, &'static [f64]),
    /// Each system's overhead over native, in percent.
    OverheadPercent(&'static [f64]),
    /// Each system's figure, without native; and the unit.
    WithoutNative(&'static [f64], &'static str),
}

const TABLES: [Table; 6] = [
    Table {
        title: "000 (King and Chen 2002), table 1: overhead of a whole run",
        machine: "Athlon 1.5 GHz, 512 MB; UMLinux 2.2.20 on 2.4.18",
        systems: &["ptrace", "KTrace", "+ bounds", "+ fast switch", "VMware"],
        lines: &[
            Line {
                what: "POV-Ray",
                paper: PaperFigures::OverheadPercent(&[33.9, 16.7, 5.5, 5.6, 3.7]),
                row: Ok("povray"),
            },
            Line {
                what: "kernel build (ours: Lua)",
                paper: PaperFigures::OverheadPercent(&[1240.0, 627.3, 102.5, 48.9, 20.3]),
                row: Ok("lua"),
            },
            Line {
                what: "SPECweb99 (ours: nginx)",
                paper: PaperFigures::OverheadPercent(&[819.2, 392.8, 26.8, 23.8, 3.0]),
                row: Ok("nginx"),
            },
        ],
    },
    Table {
        title: "000, table 2: latencies (us)",
        machine: "the same",
        systems: &["ptrace", "KTrace", "+ bounds", "+ fast switch"],
        lines: &[
            Line {
                what: "null call",
                paper: PaperFigures::WithoutNative(&[71.0, 37.3, 3.3, 3.3], "us"),
                row: Ok("getppid"),
            },
            Line {
                what: "context switch, 1 MB each (ours: there and back)",
                paper: PaperFigures::WithoutNative(&[23137.0, 12412.0, 3764.0, 1745.0], "us"),
                row: Ok("ctx1m"),
            },
        ],
    },
    Table {
        title: "001 (Blattmann), tables 5.1 to 5.6",
        machine: "1.5 GHz, L4 under Linux 2.6.9",
        systems: &["original", "S1", "S2"],
        lines: &[
            Line {
                what: "getpid (us)",
                paper: PaperFigures::Durations(1.022, &[4.102, 4.422, 3.25]),
                row: Ok("getppid"),
            },
            Line {
                what: "fork and exit (ms)",
                paper: PaperFigures::Durations(0.128, &[1.225, 1.296, 0.72]),
                row: Ok("fork"),
            },
            Line {
                what: "POV-Ray (s)",
                paper: PaperFigures::Durations(89.05, &[89.66, 90.04, 89.5]),
                row: Ok("povray"),
            },
            Line {
                what: "netperf, sending (Mb/s)",
                paper: PaperFigures::Rates(88.09, &[86.44, 85.77, 78.85]),
                row: Ok("netout"),
            },
            Line {
                what: "kernel build (s; ours: Lua)",
                paper: PaperFigures::Durations(243.35, &[295.96, 305.84, 324.73]),
                row: Ok("lua"),
            },
        ],
    },
    Table {
        title: "002 (Hoexer, Sieh, Waitz: FAUmachine), table 1: make bzImage (s)",
        machine: "Athlon XP 2100+, 1 GB; Linux 2.4.18",
        systems: &["tracer, JIT", "kernel, JIT", "tracer", "kernel"],
        lines: &[Line {
            what: "make bzImage (ours: Lua)",
            paper: PaperFigures::Durations(141.0, &[1547.0, 635.0, 1439.0, 514.0]),
            row: Ok("lua"),
        }],
    },
    Table {
        title: "003 (Kinebuchi), table 1: LMbench",
        machine: "1.3 GHz Pentium M, QEMU's translator on L4",
        systems: &["x86 on x86"],
        lines: &[
            Line {
                what: "lat_syscall (us)",
                paper: PaperFigures::Durations(0.2634, &[3.0967]),
                row: Ok("getppid"),
            },
            Line {
                what: "lat_ctx (us; ours: pipe)",
                paper: PaperFigures::Durations(0.54, &[48.1]),
                row: Ok("pipe"),
            },
            Line {
                what: "bw_mem rd (MB/s)",
                paper: PaperFigures::Rates(9328.49, &[1051.8]),
                row: Ok("memread"),
            },
            Line {
                what: "bw_mem wr (MB/s; ours: memset)",
                paper: PaperFigures::Rates(5509.96, &[597.21]),
                row: Ok("memset"),
            },
            Line {
                what: "bw_file_rd (MB/s)",
                paper: PaperFigures::Rates(1557.27, &[36.29]),
                row: Ok("fileread"),
            },
            Line {
                what: "the same for ARM and SPARC",
                paper: PaperFigures::WithoutNative(&[], ""),
                row: Err("no foreign guests yet"),
            },
        ],
    },
    Table {
        title: "004 (Liebergeld, Peter, Lackorzynski), tables 1 to 3",
        machine: "1 CPU of several; hardware virtualization",
        systems: &["Karma"],
        lines: &[
            Line {
                what: "processes come and go (s)",
                paper: PaperFigures::Durations(947.0, &[876.0]),
                row: Ok("fork"),
            },
            Line {
                what: "kernel build (s; ours: Lua)",
                paper: PaperFigures::Durations(619.0, &[620.0]),
                row: Ok("lua"),
            },
            Line {
                what: "the same with 2 and 3 CPUs",
                paper: PaperFigures::WithoutNative(&[], ""),
                row: Err("the paper's figures are not here; ours is `lua2`"),
            },
        ],
    },
];

/// The rows that the tables need.
pub fn rows() -> Vec<String> {
    let named = TABLES.iter().flat_map(|table| table.lines).filter_map(|line| line.row.ok());
    let mut rows: Vec<_> = named.map(str::to_owned).collect();
    rows.sort();
    rows.dedup();
    rows
}

/// A stage of a ladder: what it is, and the environment that has it.
type Stage = (&'static str, &'static str);

/// Ways to do the same, from the slowest to ours, each in an environment.
pub struct Ladder {
    title: &'static str,
    /// What is measured at each stage.
    rows: &'static [&'static str],
    stages: &'static [Stage],
}

/// The ladders of 000 and of 002, as ours.
pub const LADDERS: [Ladder; 2] = [
    Ladder {
        title: "000's ladder, ours",
        rows: &["getppid", "pipe", "ctx1m", "fork"],
        stages: &[
            ("calls come by ptrace", "ring3:ptrace"),
            ("calls come by a trap in the process", "ring3:trap"),
            ("the kernel runs interpreted", "ring3:direct"),
            ("the kernel is closed in a process of its own", "ring3:strict"),
            ("spaces change by unmapping", "ring3:unmap"),
            ("calls by patched sites, kernel translated, slots", RING3),
        ],
    },
    Ladder {
        title: "002's table 1, ours",
        rows: &["lua"],
        stages: &[
            ("calls come by ptrace (tracer, JIT)", "ring3:ptrace"),
            ("calls come by a trap in the process (kernel, JIT)", "ring3:trap"),
            ("calls by patched sites", RING3),
        ],
    },
];

impl Ladder {
    /// What is measured at each stage.
    pub fn rows(&self) -> Vec<String> {
        self.rows.iter().map(|row| (*row).to_owned()).collect()
    }

    /// The environments that the stages are.
    pub fn peers(&self) -> Vec<String> {
        self.stages.iter().map(|(_, environment)| (*environment).to_owned()).collect()
    }

    /// The ladder with a report's results; empty if the report has none of its slow stages.
    fn render(&self, report: &Report) -> String {
        let rows: Vec<_> = self.rows.iter().filter_map(|name| report.row(name)).collect();
        let is_there =
            |environment: &str| rows.iter().any(|row| row.results.contains_key(environment));
        if !self.stages.iter().any(|(_, stage)| *stage != RING3 && is_there(stage)) {
            return String::new();
        }
        let mut lines = vec![vec![self.title.to_owned()]];
        lines[0].extend(rows.iter().map(|row| row.name.clone()));
        for (stage, environment) in [("native", NATIVE)].iter().chain(self.stages) {
            let cell = |row: &&Row| {
                let median = row.results.get(*environment).and_then(|result| result.median());
                median
                    .map_or_else(|| "not measured".to_owned(), |median| quantity(median, &row.unit))
            };
            let cells = std::iter::once((*stage).to_owned()).chain(rows.iter().map(cell));
            lines.push(cells.collect());
        }
        format!("\n{}", grid(&lines))
    }
}

/// The ladders of which a report has slow stages.
pub fn ladders(report: &Report) -> String {
    LADDERS.iter().map(|ladder| ladder.render(report)).collect()
}

/// All tables, with a report's results beside them.
pub fn render(report: &Report) -> String {
    let machine = &report.machine;
    let mut text = format!("ours: {}, Linux {}, {RING3}\n", machine.cpu, machine.kernel);
    for table in &TABLES {
        text += &format!("\n{} ({})\n", table.title, table.machine);
        let mut lines = vec![vec!["multiples of native".to_owned()]];
        lines[0].extend(table.systems.iter().map(|system| (*system).to_owned()));
        lines[0].extend(["ring3".to_owned(), "ours, absolute".to_owned()]);
        lines.extend(table.lines.iter().map(|line| cells(table, line, report)));
        text += &grid(&lines);
    }
    text
}

fn cells(table: &Table, line: &Line, report: &Report) -> Vec<String> {
    let mut cells = vec![line.what.to_owned()];
    let paper = line.paper.multiples();
    cells.extend((0..table.systems.len()).map(|n| paper.get(n).cloned().unwrap_or_default()));
    cells.extend(match line.row {
        Ok(name) => ring3(report, name),
        Err(why) => ["pending".to_owned(), why.to_owned()],
    });
    cells
}

impl PaperFigures {
    fn multiples(&self) -> Vec<String> {
        match self {
            Self::Durations(native, all) => all.iter().map(|t| multiple_text(t / native)).collect(),
            Self::Rates(native, all) => all.iter().map(|t| multiple_text(native / t)).collect(),
            Self::OverheadPercent(all) => {
                all.iter().map(|t| multiple_text(1.0 + t / 100.0)).collect()
            }
            Self::WithoutNative(all, unit) => {
                all.iter().map(|value| format!("{value} {unit}")).collect()
            }
        }
    }
}

/// Ring3's multiple of native, and both figures.
fn ring3(report: &Report, name: &str) -> [String; 2] {
    let found = report.row(name).and_then(|row| {
        let median = |environment| row.results.get(environment)?.median();
        let (native, ring3) = (median(NATIVE)?, median(RING3)?);
        let figures = format!("{} of {}", quantity(ring3, &row.unit), quantity(native, &row.unit));
        Some([multiple_text(row.multiple(RING3)?), figures])
    });
    found.unwrap_or_else(|| ["not measured".to_owned(), format!("--rows {name}")])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{program, record::Report};
    use std::path::Path;

    #[test]
    fn papers_figures_become_multiples() {
        assert_eq!(PaperFigures::Durations(141.0, &[1547.0, 514.0]).multiples(), ["11.0", "3.65"]);
        assert_eq!(PaperFigures::Rates(9328.49, &[1051.8]).multiples(), ["8.87"]);
        assert_eq!(PaperFigures::OverheadPercent(&[1240.0]).multiples(), ["13.4"]);
        for table in &TABLES {
            for line in table.lines {
                let count = line.paper.multiples().len();
                let pending = line.row.is_err() && count == 0;
                assert!(count == table.systems.len() || pending, "{}", line.what);
            }
        }
    }

    #[test]
    fn a_ladder_has_a_line_for_each_stage() {
        let results = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/results/");
        let file = Path::new(results).join("2026-11-23-full-amd.json");
        let mut report = Report::read(&file).expect("a result");
        for row in &mut report.rows {
            let fast = row.results.get(RING3).cloned();
            row.results.extend(fast.map(|fast| ("ring3:ptrace".to_owned(), fast)));
        }
        let text = ladders(&report);
        let line = |what: &str| text.lines().find(|line| line.starts_with(what)).expect("a line");
        assert!(line("calls come by ptrace").contains("ns"), "{text}");
        assert!(line("spaces change by unmapping").contains("not measured"), "{text}");
        assert!(line("calls come by ptrace (tracer, JIT)").contains(" s"), "{text}");
        assert!(line("calls come by a trap in the process (kernel").contains("not measured"));
    }

    #[test]
    fn a_result_of_ours_is_shown_beside_them() {
        let results = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/results/");
        let file = Path::new(results).join("2026-11-23-full-amd.json");
        let report = Report::read(&file).expect("a result");
        let text = render(&report);
        let line = |what: &str| text.lines().find(|line| line.starts_with(what)).expect("a line");
        assert!(line("getpid").contains("ns of"), "{text}");
        assert!(line("kernel build").contains(" s of "), "{text}");
        assert!(line("the same for ARM").contains("pending"), "{text}");
        assert_eq!(ladders(&report), "", "a result without slow stages has no ladder");
        // Each row is one that there is, or that the full result has.
        let known = |name: &String| report.rows.iter().any(|row| row.name == *name);
        let newer = include_str!("../guest/processes.c");
        let is_row = |name: &String| {
            known(name)
                || program::ROWS.contains(&name.as_str())
                || newer.contains(&format!("{{ \"{name}\", \"processes\""))
        };
        assert!(rows().iter().all(is_row), "{:?}", rows());
    }
}
