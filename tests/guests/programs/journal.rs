//! A program of the guest: `journal DISK COUNT [hasty]` moves money between two accounts on a disk, by way of a journal, so that the sum
//! survives a loss of power at any moment. With `hasty` it has a bug: it commits before the journal's entry is on the disk.
//! `journal check DISK CONSOLE` looks at the disk, for which it runs on the host, too.

use std::{
    env::args,
    fs::{File, OpenOptions, read_to_string},
    io,
    os::unix::fs::{FileExt, OpenOptionsExt},
};

const SECTOR: usize = 512;
/// One sector each.
const ACCOUNTS: usize = 8;
/// Where they are, in sectors.
const HOME: u64 = 64;
/// The journal's entry: what they are to hold.
const ENTRY: u64 = 8;
/// The number of the entry that holds, or 0.
const COMMIT: u64 = 24;
/// All the money there is.
const SUM: u64 = 1000;
/// Past the page cache, so that each write is a request.
const O_DIRECT: i32 = 0o40000;

#[repr(C, align(512))]
struct Sectors([[u8; SECTOR]; ACCOUNTS]);

/// A disk of sectors that begin with two numbers: which transfer wrote them, and an amount.
struct Disk(File);

impl Disk {
    fn open(path: &str, flags: i32) -> io::Result<Self> {
        OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).map(Self)
    }

    fn read(&self, sector: u64) -> io::Result<[(u64, u64); ACCOUNTS]> {
        let mut data = Sectors([[0; SECTOR]; ACCOUNTS]);
        self.0.read_exact_at(data.0.as_flattened_mut(), sector * SECTOR as u64)?;
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight"));
        Ok(data.0.map(|sector| (number(&sector[..8]), number(&sector[8..16]))))
    }

    fn write(&self, sector: u64, number: u64, amounts: &[u64]) -> io::Result<()> {
        let mut data = Sectors([[0; SECTOR]; ACCOUNTS]);
        for (sector, amount) in data.0.iter_mut().zip(amounts) {
            sector[..8].copy_from_slice(&number.to_le_bytes());
            sector[8..16].copy_from_slice(&amount.to_le_bytes());
        }
        let data = &data.0.as_flattened()[..amounts.len() * SECTOR];
        self.0.write_all_at(data, sector * SECTOR as u64)
    }

    fn flush(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    /// Moves money, and says so when it is safe.
    fn transfer(&self, number: u64, hasty: bool) -> io::Result<()> {
        let amounts = amounts(number);
        self.write(ENTRY, number, &amounts)?;
        if !hasty {
            self.flush()?;
        }
        self.write(COMMIT, number, &[0])?;
        self.flush()?;
        self.write(HOME, number, &amounts)?;
        self.flush()?;
        self.write(COMMIT, 0, &[0])?;
        // The next entry must not overtake this.
        self.flush()?;
        println!("done {number}");
        Ok(())
    }

    /// What the accounts hold after recovery.
    fn recovered(&self) -> io::Result<[(u64, u64); ACCOUNTS]> {
        let committed = self.read(COMMIT)?[0].0 > 0;
        self.read(if committed { ENTRY } else { HOME })
    }
}

/// What the accounts hold after a transfer, which changes all of them.
fn amounts(number: u64) -> [u64; ACCOUNTS] {
    let mut amounts = [0; ACCOUNTS];
    let (last, others) = amounts.split_last_mut().expect("accounts");
    (1..).zip(&mut *others).for_each(|(n, amount)| *amount = (number * 37 + n * 11) % 100);
    *last = SUM - others.iter().sum::<u64>();
    amounts
}

fn check(disk: &str, console: &str) -> io::Result<()> {
    let said = read_to_string(console)?;
    let done = said.lines().filter_map(|line| line.trim().strip_prefix("done ")?.parse().ok());
    let done: u64 = done.last().unwrap_or(0);
    let accounts = Disk::open(disk, 0)?.recovered()?;
    let (number, sum) = (accounts[0].0, accounts.iter().map(|(_, amount)| amount).sum());
    match sum {
        SUM | 0 if number >= done => println!("journal sound: {number} of {done} done"),
        SUM | 0 => println!("journal LOST: {done} were done, {number} are there"),
        _ => println!("journal BROKEN: the accounts hold {sum}, not {SUM}: {accounts:?}"),
    }
    Ok(())
}

fn main() -> io::Result<()> {
    let words: Vec<_> = args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["check", disk, console] => check(disk, console),
        [disk, count, rest @ ..] => {
            let (disk, hasty) = (Disk::open(disk, O_DIRECT)?, *rest == ["hasty"]);
            let count: u64 = count.parse().map_err(io::Error::other)?;
            (1..=count).try_for_each(|number| disk.transfer(number, hasty))
        }
        _ => Err(io::Error::other("see its source")),
    }
}
