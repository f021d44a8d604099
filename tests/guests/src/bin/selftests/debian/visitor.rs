//! What the host does with a guest's services, through forwarded ports.

use std::{
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use fastrand::Rng;
use xtask::command::output;

/// Bytes of the page, and of what goes through ssh and comes back.
const SIZE: usize = 4 << 20;
/// Connections, one after the other.
const FETCHES: usize = 50;
const LOGINS: usize = 3;
/// Seconds a connection may say nothing.
const PATIENCE: Duration = Duration::from_secs(120);

/// A user of the guest's services.
pub struct Visitor {
    folder: PathBuf,
    key: PathBuf,
    /// Of this host, for ssh and HTTP.
    ports: [u16; 2],
    page: Vec<u8>,
}

/// What the guest is shown.
pub fn folder(scratch: &Path) -> PathBuf {
    scratch.join("work")
}

impl Visitor {
    /// With a key to log in with, and a page to be fetched, which no other guest has.
    ///
    /// # Errors
    /// The key cannot be made, or the files not written.
    pub fn new(scratch: &Path, ports: [u16; 2]) -> Result<Self> {
        let (folder, key) = (folder(scratch), scratch.join("key"));
        fs::create_dir(&folder)?;
        let mut generate = Command::new("ssh-keygen");
        output(generate.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&key))?;
        fs::copy(key.with_extension("pub"), folder.join("key.pub"))?;
        let mut page = vec![0; SIZE];
        Rng::new().fill(&mut page);
        fs::write(folder.join("page"), &page)?;
        Ok(Self { folder, key, ports, page })
    }

    /// `--net` for the guest.
    pub fn network(&self) -> String {
        let [ssh, http] = self.ports;
        format!("user,hostfwd=tcp:127.0.0.1:{ssh}-:22,hostfwd=tcp:127.0.0.1:{http}-:80")
    }

    /// `--share` for the guest.
    pub fn share(&self) -> String {
        format!("{}:work:ro", self.folder.display())
    }

    /// Sends a file through ssh, and gets the same back.
    pub fn logs_in(&self) -> Result<String> {
        for _ in 0..LOGINS {
            let mut ssh = Command::new("ssh");
            ssh.args(["-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=accept-new", "-o"]);
            ssh.arg(format!("UserKnownHostsFile={}", self.key.with_extension("hosts").display()));
            ssh.arg("-i").arg(&self.key).args(["-p", &self.ports[0].to_string()]);
            ssh.args(["root@127.0.0.1", "cat; hostname >&2"]);
            let page = fs::File::open(self.folder.join("page"))?;
            let ended = ssh.stdin(Stdio::from(page)).output().context("cannot run ssh")?;
            let said = String::from_utf8_lossy(&ended.stderr);
            ensure!(ended.status.success(), "ssh ended with {}: {said}", ended.status);
            ensure!(ended.stdout == self.page, "ssh gave {} other bytes", ended.stdout.len());
            ensure!(said.lines().any(|line| line == "debian"), "it is not the guest: {said}");
        }
        Ok(format!("{LOGINS} logins by key, {SIZE} bytes there and back in each"))
    }

    /// Fetches the page again and again.
    pub fn fetches(&self) -> Result<String> {
        for _ in 0..FETCHES {
            let answer = fetch(self.ports[1], "/page")?;
            let end = answer.windows(4).position(|four| four == b"\r\n\r\n");
            let (head, page) = answer.split_at(end.context("no header")? + 4);
            let head = String::from_utf8_lossy(head);
            ensure!(head.starts_with("HTTP/1.1 200 "), "nginx says {head}");
            ensure!(head.contains("\nServer: nginx"), "it is not nginx: {head}");
            ensure!(page == self.page, "nginx gave {} other bytes", page.len());
        }
        Ok(format!("{FETCHES} pages of {SIZE} bytes fetched"))
    }
}

fn fetch(port: u16, path: &str) -> Result<Vec<u8>> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).context("nginx stopped in the middle")?;
    Ok(answer)
}
