//! A campaign's results as files: lines of JSON, JUnit's XML, and a page to look at.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs::{self, File},
    io::Write as _,
    path::{Path, PathBuf},
};

use super::{Campaign, Finished, Verdict, write};
use crate::failure::Failure;

/// Name of the results in a campaign's folder.
const RESULTS: &str = "iterations.jsonl";

/// Results as they come.
pub struct Report {
    folder: PathBuf,
    lines: File,
    results: Vec<Finished>,
    all: u64,
}

impl Report {
    /// A new folder for the results of a campaign.
    pub fn create(folder: &Path, campaign: &Campaign) -> Result<Self, Failure> {
        let wrong = |error| Failure::usage(format!("--output {}: {error}", folder.display()));
        fs::create_dir(folder).map_err(wrong)?;
        campaign.store(folder)?;
        let lines = File::create_new(folder.join(RESULTS)).map_err(wrong)?;
        let (results, all) = (Vec::new(), campaign.iterations());
        Ok(Self { folder: folder.to_owned(), lines, results, all })
    }

    /// Writes a result down at once: a campaign that is cut off keeps what it has.
    pub fn add(&mut self, result: &Finished) -> Result<(), Failure> {
        let line = serde_json::to_string(result).unwrap_or_default();
        let written = writeln!(self.lines, "{line}");
        written.map_err(|error| Failure::host(format!("{}: {error}", self.folder.display())))?;
        self.results.push(result.clone());
        eprintln!("[{}/{}] {}", self.results.len(), self.all, result.line());
        Ok(())
    }

    /// The share of each result is known so well, with 95 % confidence.
    pub fn is_precise(&self, precision: f64) -> bool {
        let counts = counts(&self.results);
        let injected = self.results.len() - counts.get(&Verdict::NotInjected).unwrap_or(&0);
        let known = |verdict: &Verdict| {
            let (low, high) = wilson(counts.get(verdict).copied().unwrap_or(0), injected);
            (high - low) / 2.0 <= precision
        };
        let mut shares = Verdict::ALL.iter().filter(|verdict| **verdict != Verdict::NotInjected);
        injected != 0 && shares.all(known)
    }

    /// Writes what is for other programs and for people; returns the summary.
    pub fn finish(mut self) -> Result<String, Failure> {
        self.results.sort_by_key(|result| result.iteration);
        write(&self.folder.join("junit.xml"), &junit(&self.results))?;
        write(&self.folder.join("report.html"), &page(&self.results))?;
        let folder = self.folder.display();
        Ok(format!(
            "{}results: {folder}/{RESULTS}, junit.xml, report.html\n",
            summary(&self.results)
        ))
    }
}

/// The result of an iteration, from a folder of results.
pub fn stored(folder: &Path, number: u64) -> Result<Finished, Failure> {
    let path = folder.join(RESULTS);
    let wrong = |problem: String| Failure::usage(format!("{}: {problem}", path.display()));
    let text = fs::read_to_string(&path).map_err(|error| wrong(error.to_string()))?;
    let results = text.lines().filter_map(|line| serde_json::from_str::<Finished>(line).ok());
    let mut found = results.filter(|result| result.iteration == number);
    found.next().ok_or_else(|| wrong(format!("it has no iteration {number}")))
}

fn counts(results: &[Finished]) -> BTreeMap<Verdict, usize> {
    let mut counts = BTreeMap::new();
    results.iter().for_each(|result| *counts.entry(result.verdict).or_default() += 1);
    counts
}

/// A line for each verdict: how often, and within which bounds the share lies with 95 % confidence.
fn summary(results: &[Finished]) -> String {
    let counts = counts(results);
    let injected = results.len() - counts.get(&Verdict::NotInjected).unwrap_or(&0);
    let mut text = String::new();
    for verdict in Verdict::ALL {
        let Some(&count) = counts.get(&verdict) else { continue };
        let bounds = match verdict {
            Verdict::NotInjected => String::new(),
            _ => {
                let (low, high) = wilson(count, injected);
                format!("  {:.0} to {:.0} %", low * 100.0, high * 100.0)
            }
        };
        let _ = writeln!(text, "{verdict:<13}{count:>6}{bounds}");
    }
    text
}

/// Wilson's score interval of a share, for 95 % confidence.
fn wilson(count: usize, all: usize) -> (f64, f64) {
    const Z: f64 = 1.96;
    let n = all.max(1) as f64;
    let share = count as f64 / n;
    let middle = share + Z * Z / (2.0 * n);
    let spread = Z * (share * (1.0 - share) / n + Z * Z / (4.0 * n * n)).sqrt();
    let scale = 1.0 + Z * Z / n;
    (((middle - spread) / scale).max(0.0), ((middle + spread) / scale).min(1.0))
}

/// What went wrong without a word is a failure; the rest are results.
fn junit(results: &[Finished]) -> String {
    let wrong = counts(results).get(&Verdict::Wrong).copied().unwrap_or(0);
    let mut text = format!(
        "<?xml version=\"1.0\"?>\n<testsuite name=\"ring3 fault campaign\" tests=\"{}\" failures=\"{wrong}\">\n",
        results.len()
    );
    for result in results {
        let (number, seconds) = (result.iteration, result.seconds);
        let _ = write!(text, "  <testcase name=\"iteration {number}\" time=\"{seconds:.3}\">");
        if result.verdict == Verdict::Wrong {
            let (reason, console) = (escape(&result.reason), escape(&result.console));
            let _ = write!(text, "<failure message=\"{reason}\">{console}</failure>");
        }
        let _ = writeln!(text, "<system-out>{}</system-out></testcase>", result.verdict);
    }
    text + "</testsuite>\n"
}

const STYLE: &str = "body{font:15px sans-serif;max-width:60em;margin:2em auto}td,th{padding:2px 12px;text-align:left}\
    pre{background:#eee;padding:6px;overflow:auto}.bar{background:#47a;height:12px}";

fn page(results: &[Finished]) -> String {
    let mut text = format!(
        "<!doctype html><meta charset=utf-8><title>Fault campaign</title><style>{STYLE}</style>\
         <h1>Fault campaign</h1><p>{} iterations</p><table>\n",
        results.len()
    );
    for (verdict, count) in counts(results) {
        let width = 400 * count / results.len().max(1);
        let _ = writeln!(
            text,
            "<tr><td>{verdict}<td>{count}<td><div class=bar style=\"width:{width}px\"></div>"
        );
    }
    text.push_str("</table>\n");
    text.push_str(&plot(results));
    text.push_str(
        "<h2>Iterations</h2><table><tr><th>number<th>result<th>why<th>faults<th>console\n",
    );
    results.iter().for_each(|result| row(result, &mut text));
    text + "</table>\n"
}

/// Pixels of a plot: of its width without the names at its left, of these, and of a line.
const PLOT: (u64, u64, usize) = (600, 100, 22);

/// What came of faults at which request: a line for each verdict, a dot for each iteration.
fn plot(results: &[Finished]) -> String {
    let dots: Vec<_> = results.iter().filter_map(|it| Some((it, first_request(it)?))).collect();
    let Some(last) = dots.iter().map(|(_, request)| *request).max() else { return String::new() };
    let (width, names, line) = PLOT;
    let verdicts: Vec<_> = counts(results).into_keys().collect();
    let mut text = format!(
        "<h2>Results by request, 1 to {last}</h2><svg width={} height={}>\n",
        names + width + 10,
        line * verdicts.len()
    );
    for (row, verdict) in verdicts.iter().enumerate() {
        let y = row * line + line / 2;
        let _ = writeln!(text, "<text x=0 y={}>{verdict}</text>", y + 5);
        for (it, request) in dots.iter().filter(|(it, _)| it.verdict == *verdict) {
            let (x, number) = (names + width * request / last.max(1), it.iteration);
            let _ = writeln!(
                text,
                "<circle cx={x} cy={y} r=4 fill=#47a fill-opacity=.5><title>iteration {number}, request {request}</title></circle>"
            );
        }
    }
    text + "</svg>\n"
}

/// The request that an iteration's first fault of requests struck.
fn first_request(result: &Finished) -> Option<u64> {
    result.records.iter().find_map(|record| Some(record.struck.as_ref()?.request))
}

fn row(result: &Finished, text: &mut String) {
    let records: Vec<_> =
        result.records.iter().filter_map(|r| serde_json::to_string(r).ok()).collect();
    let details = |name: &str, body: &str| {
        format!("<details><summary>{name}</summary><pre>{}</pre></details>", escape(body))
    };
    let _ = writeln!(
        text,
        "<tr><td>{}<td>{}<td>{}<td>{}<td>{}",
        result.iteration,
        result.verdict,
        escape(&result.reason),
        details(&records.len().to_string(), &records.join("\n")),
        details("end", &result.console),
    );
}

/// XML 1.0 has no control characters but tab and line ends.
fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\n' | '\t' => escaped.push(c),
            c if c.is_control() => {}
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(iteration: u64, verdict: Verdict) -> Finished {
        let (reason, console) = ("because <of> it".to_owned(), "\u{1b}[0m & \"so\"".to_owned());
        Finished { iteration, verdict, reason, seconds: 1.0, records: Vec::new(), console }
    }

    #[test]
    fn shares_have_bounds() {
        let (low, high) = wilson(50, 100);
        assert!((low - 0.404).abs() < 0.001 && (high - 0.596).abs() < 0.001, "{low} {high}");
        assert_eq!(wilson(0, 10).0, 0.0);
        let results = [result(1, Verdict::Masked), result(2, Verdict::NotInjected)];
        let text = summary(&results);
        assert!(text.contains("masked            1  21 to 100 %"), "{text}");
        assert!(text.lines().last().is_some_and(|line| line.ends_with(" 1")), "{text}");
    }

    #[test]
    fn a_campaign_ends_when_shares_are_known_well_enough() {
        let folder = tempfile::tempdir().expect("a folder");
        let lines = File::create_new(folder.path().join(RESULTS)).expect("new");
        let mut report =
            Report { folder: folder.path().to_owned(), lines, results: Vec::new(), all: 100 };
        assert!(!report.is_precise(0.5), "nothing is known");
        report.results = vec![result(1, Verdict::Masked); 10];
        report.results.extend(vec![result(2, Verdict::Wrong); 10]);
        assert!(report.is_precise(0.21) && !report.is_precise(0.19));
        report.results = vec![result(1, Verdict::NotInjected); 50];
        assert!(!report.is_precise(0.5), "they say nothing");
    }

    #[test]
    fn files_for_others_are_well_formed() {
        let results = [result(1, Verdict::Wrong), result(2, Verdict::Masked)];
        let xml = junit(&results);
        assert!(xml.contains("tests=\"2\" failures=\"1\""), "{xml}");
        assert!(xml.contains("because &lt;of&gt; it") && xml.contains("[0m &amp; &quot;so&quot;"));
        assert!(!xml.contains('\u{1b}'));
        assert_eq!(xml.matches("<testcase").count(), xml.matches("</testcase>").count());
        assert!(page(&results).contains("<td>wrong<td>1"));
    }

    #[test]
    fn results_are_drawn_by_request() {
        let mut results = [result(1, Verdict::Wrong), result(2, Verdict::Masked)];
        assert!(!page(&results).contains("<svg"), "no request was struck");
        let struck = |request: u64| {
            let text = format!(
                "{{\"fault\":\"cut\",\"on\":\"disk0\",\"seconds\":1.0,\"op\":\"write\",\"request\":{request},\
                 \"offset\":0,\"len\":512,\"effect\":\"dropped\"}}"
            );
            vec![serde_json::from_str(&text).expect("a record")]
        };
        results[0].records = struck(3);
        results[1].records = struck(12);
        let page = page(&results);
        assert!(
            page.contains("request, 1 to 12") && page.matches("<circle").count() == 2,
            "{page}"
        );
        // The order of lines is that of the table: right results first.
        assert!(
            page.contains("<circle cx=250 cy=33") && page.contains("<circle cx=700 cy=11"),
            "{page}"
        );
    }
}
