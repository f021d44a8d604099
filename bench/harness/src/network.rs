//! Servers inside, measured from the host: a web server by wrk, and iperf3 by itself.
//!
//! Clients are the host's own in every environment, so that what differs is the server's side and
//! the way to it: loopback natively, elsewhere a network card and a translation of addresses.

use std::{
    fs,
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    process::Command,
    time::{Duration, Instant},
};

use serde::Deserialize;

use crate::{
    instance::{Instance, Pace},
    peers::PortForward,
    program,
    protocol::Row,
    record::Measurement,
    session::Failure,
};

/// What these rows have in common.
pub const GROUP: &str = "network";
/// Names, the server inside, and what one operation is.
const ROWS: [(&str, &str, &str); 3] = [
    ("nginx", "nginx", "a page of 1 KB from nginx inside to wrk, over 16 connections"),
    ("netin", "iperf3", "1 MB from the host to iperf3 inside"),
    ("netout", "iperf3", "1 MB from iperf3 inside to the host"),
];
/// The page is the beginning of this script.
const PAGE: (&str, usize) = ("python.py", 1024);
/// What one answer of the web server may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// The rows there are.
pub fn rows() -> Vec<Row> {
    ROWS.map(|(name, _, about)| Row::new(GROUP, name, about)).to_vec()
}

/// One row in every environment: figures by environment, in their order.
pub(crate) fn measure(row: &str, instances: &mut [Instance<'_>], pace: &Pace) -> Vec<Measurement> {
    let mut samplers: Vec<_> =
        instances.iter_mut().map(|instance| Sampler::open(row, instance, pace)).collect();
    for _ in 0..pace.batches {
        for sampler in &mut samplers {
            sampler.step(row, pace);
        }
    }
    instances.iter_mut().for_each(Instance::unserve);
    samplers.into_iter().map(|sampler| sampler.measurement).collect()
}

/// Takes the samples of a row in one environment.
struct Sampler {
    forward: Option<PortForward>,
    measurement: Measurement,
    spent: Duration,
}

impl Sampler {
    /// Starts the server.
    fn open(row: &str, instance: &mut Instance<'_>, pace: &Pace) -> Self {
        let server =
            ROWS.iter().find(|(name, ..)| *name == row).map_or(row, |(_, server, _)| server);
        let forward = instance.peer.forward();
        let served = match forward {
            None => Err(Failure::NotAsked("it has no network here".to_owned())),
            Some(forward) => instance.serve(server, forward.guest, pace),
        };
        let mut measurement = Measurement::default();
        let _ = served.map_err(|failure| measurement.stop(&failure));
        Self { forward, measurement, spent: Duration::ZERO }
    }

    fn step(&mut self, row: &str, pace: &Pace) {
        let Some(forward) = self.forward.filter(|_| !self.measurement.is_stopped()) else { return };
        if pace.is_enough(self.measurement.samples.len(), self.spent) {
            return;
        }
        let started = Instant::now();
        match client(row, forward.host, seconds(pace)) {
            Ok(figure) => self.measurement.add(figure),
            Err(error) => self.measurement.error = Some(error),
        }
        self.spent += started.elapsed();
    }
}

/// How long a client goes on: whole seconds, as both know no others.
fn seconds(pace: &Pace) -> u64 {
    (pace.batch * 20).as_secs().clamp(1, 3)
}

/// Nanoseconds of one operation.
fn client(row: &str, port: u16, seconds: u64) -> Result<f64, String> {
    match row {
        "nginx" => check_page(port).and_then(|()| requests(port, seconds)),
        "netin" => stream(port, seconds, &[]),
        _ => stream(port, seconds, &["--reverse"]),
    }
}

/// Asks for the page once, and looks at every byte of it.
fn check_page(port: u16) -> Result<(), String> {
    let file = program::scripts().join(PAGE.0);
    let expected = fs::read(&file).map_err(|error| format!("{}: {error}", file.display()))?;
    let answer = page(port).map_err(|error| format!("the page cannot be had: {error}"))?;
    let is_right = answer.starts_with(b"HTTP/1.1 200") && answer.ends_with(&expected[..PAGE.1]);
    is_right.then_some(()).ok_or_else(|| "the web server's page is another one".to_owned())
}

fn page(port: u16) -> std::io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"GET /page HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(answer)
}

fn requests(port: u16, seconds: u64) -> Result<f64, String> {
    let mut wrk = Command::new("wrk");
    wrk.args([
        "--threads=1",
        "--connections=16",
        "--timeout=30s",
        &format!("--duration={seconds}s"),
    ]);
    parse_wrk(&text(wrk.arg(format!("http://127.0.0.1:{port}/page")), "wrk")?)
}

/// Nanoseconds of a request; an error if one was not answered, or not well.
fn parse_wrk(text: &str) -> Result<f64, String> {
    let troubles = ["Socket errors", "Non-2xx"];
    if let Some(line) = text.lines().find(|line| troubles.iter().any(|t| line.contains(t))) {
        return Err(format!("wrk: {}", line.trim()));
    }
    let rate = text.lines().find_map(|line| line.trim().strip_prefix("Requests/sec:"));
    let rate: Option<f64> = rate.and_then(|rate| rate.trim().parse().ok());
    let rate = rate.filter(|rate| *rate > 0.0);
    rate.map(|rate| 1e9 / rate).ok_or_else(|| format!("wrk got no answer: {}", text.trim()))
}

fn stream(port: u16, seconds: u64, options: &[&str]) -> Result<f64, String> {
    let mut iperf3 = Command::new("iperf3");
    iperf3.args(["--client", "127.0.0.1", "--json", "--port", &port.to_string()]);
    iperf3.args(["--time", &seconds.to_string()]).args(options);
    parse_iperf3(&text(&mut iperf3, "iperf3")?)
}

#[derive(Deserialize)]
struct Transfer {
    end: End,
}

#[derive(Deserialize)]
struct End {
    sum_received: Sum,
}

#[derive(Deserialize)]
struct Sum {
    bytes: f64,
    seconds: f64,
}

/// Nanoseconds of a megabyte that arrived.
fn parse_iperf3(text: &str) -> Result<f64, String> {
    let transfer: Result<Transfer, _> = serde_json::from_str(text);
    let sum = transfer.map(|transfer| transfer.end.sum_received).ok();
    let sum = sum.filter(|sum| sum.bytes > 0.0);
    sum.map(|sum| sum.seconds * 1e9 / (sum.bytes / 1e6))
        .ok_or_else(|| format!("iperf3 says of no bytes that they arrived: {}", one_line(text)))
}

/// What a client prints.
fn text(command: &mut Command, package: &str) -> Result<String, String> {
    match command.output() {
        Ok(done) if done.status.success() => Ok(String::from_utf8_lossy(&done.stdout).into_owned()),
        Ok(done) => Err(format!(
            "{package} failed: {} {}",
            one_line(&String::from_utf8_lossy(&done.stdout)),
            one_line(&String::from_utf8_lossy(&done.stderr))
        )),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err(format!("{package} is not installed on the host: the package is {package}"))
        }
        Err(error) => Err(format!("{package}: {error}")),
    }
}

/// The end of a text that may be long, without its line ends.
fn one_line(text: &str) -> String {
    let words: Vec<_> = text.split_whitespace().collect();
    words[words.len().saturating_sub(24)..].join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_if_all_were_answered() {
        let text = "  1000 requests in 1.00s, 1.2MB read\nRequests/sec:   4000.00\n";
        assert_eq!(parse_wrk(text), Ok(250_000.0));
        for trouble in ["  Socket errors: connect 0, read 9", "  Non-2xx or 3xx responses: 4"] {
            let wrong = parse_wrk(&format!("{trouble}\n{text}")).expect_err("trouble");
            assert!(wrong.contains(trouble.trim()), "{wrong}");
        }
        assert!(parse_wrk("Requests/sec:      0.00\n").is_err());
        assert!(parse_wrk("").is_err());
    }

    #[test]
    fn bytes_count_where_they_arrive() {
        let text = r#"{"end":{"sum_sent":{"bytes":9e9,"seconds":1.0},"sum_received":{"bytes":5e8,"seconds":2.0}}}"#;
        assert_eq!(parse_iperf3(text), Ok(4e6));
        assert!(parse_iperf3(&text.replace("5e8", "0")).is_err());
        let wrong = parse_iperf3(r#"{"error": "unable to connect"}"#).expect_err("no transfer");
        assert!(wrong.contains("unable to connect"), "{wrong}");
    }

    #[test]
    fn a_page_is_compared_byte_by_byte() {
        let content = fs::read(program::scripts().join(PAGE.0)).expect("the script");
        let serve = |body: Vec<u8>| {
            let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a port");
            let port = listener.local_addr().expect("bound").port();
            let server = std::thread::spawn(move || {
                let mut stream = listener.accept().expect("asked").0;
                let _ = stream.read(&mut [0; 1000]);
                let head = b"HTTP/1.1 200 OK\r\n\r\n".to_vec();
                stream.write_all(&[head, body].concat()).expect("answered");
            });
            let checked = check_page(port);
            server.join().expect("ended");
            checked
        };
        assert_eq!(serve(content[..PAGE.1].to_vec()), Ok(()));
        let mut damaged = content[..PAGE.1].to_vec();
        damaged[500] ^= 1;
        serve(damaged).expect_err("another page");
    }
}
