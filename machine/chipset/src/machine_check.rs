//! A CPU's machine-check banks (SDM vol. 3B, chapter 15), and errors that somebody has put into them on purpose.
//!
//! The banks are there in every machine and say nothing unless a fault does. Errors of the host's hardware are the host's:
//! none of them comes here.

use std::sync::Mutex;

use x86::msr;

use crate::lock;

/// Banks of a CPU.
const BANKS: usize = 10;
/// Registers of a bank from [`msr::MC0_CTL`] on.
const REGISTERS: u32 = 4;
/// IA32_MCG_CAP: banks, IA32_MCG_CTL, corrected machine-check interrupts, software error recovery.
const CAPABILITIES: u64 = BANKS as u64 | 1 << 8 | 1 << 10 | 1 << 24;
/// IA32_MCG_STATUS: restart IP valid, error IP valid, machine check in progress.
const RESTART: u64 = 1 << 0;
const AT_FAULT: u64 = 1 << 1;
const IN_PROGRESS: u64 = 1 << 2;
/// IA32_MCi_CTL2: CMCI enabled; how many errors it takes.
const CMCI: u64 = 1 << 30;
const THRESHOLD: u64 = 0x7fff;
/// IA32_MCi_STATUS.
const VALID: u64 = 1 << 63;
const OVERFLOW: u64 = 1 << 62;
const UNCORRECTED: u64 = 1 << 61;
const ENABLED: u64 = 1 << 60;
const MISC_VALID: u64 = 1 << 59;
const ADDRESS_VALID: u64 = 1 << 58;
const CORRUPT: u64 = 1 << 57;
const SIGNALLED: u64 = 1 << 56;
const ACTION: u64 = 1 << 55;
/// One corrected error, in the count in bits 52:38.
const ONE: u64 = 1 << 38;
const COUNT: u64 = 0x7fff << 38;
/// IA32_MCi_MISC: the address is a GPA, and exact to a line of a cache.
const LINE: u64 = 2 << 6 | 6;

/// How bad an error is (SDM 15.6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// Corrected.
    Corrected,
    /// Uncorrected, and nobody has used it yet (UCNA).
    NoAction,
    /// Uncorrected, found before anybody used it, and told (SRAO).
    Optional,
    /// Uncorrected, and the CPU was about to use it (SRAR).
    Required,
    /// The state of the CPU is lost.
    Fatal,
}

impl Severity {
    fn status(self) -> u64 {
        match self {
            Self::Corrected => ONE,
            Self::NoAction => UNCORRECTED,
            Self::Optional => UNCORRECTED | SIGNALLED,
            Self::Required => UNCORRECTED | SIGNALLED | ACTION,
            Self::Fatal => UNCORRECTED | CORRUPT,
        }
    }

    /// It raises #MC; the others interrupt where that is asked for, or wait for somebody to look.
    fn raises(self) -> bool {
        matches!(self, Self::Optional | Self::Required | Self::Fatal)
    }
}

/// An error of the hardware.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MachineError {
    /// How bad it is.
    pub severity: Severity,
    /// Number of the bank that notes it. Beyond the last bank it is the last one.
    pub bank: usize,
    /// The error code of the architecture (SDM 15.9).
    pub code: u16,
    /// Where it was (GPA).
    pub address: Option<u64>,
}

impl MachineError {
    /// Banks of a CPU.
    pub const BANKS: usize = BANKS;
}

/// What became of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Logged {
    /// The bank that has it.
    pub bank: usize,
    /// What its IA32_MCi_STATUS says now.
    pub status: u64,
    /// The CPU's local APIC is to interrupt it.
    pub interrupts: bool,
    /// All CPUs are to take #MC.
    pub raises: bool,
}

/// The registers of one CPU.
#[derive(Default)]
pub(crate) struct MachineChecks(Mutex<Registers>);

struct Registers {
    control: u64,
    status: u64,
    banks: [Bank; BANKS],
}

#[derive(Clone, Copy, Default)]
struct Bank {
    control: u64,
    status: u64,
    address: u64,
    misc: u64,
    control2: u64,
}

impl Default for Registers {
    /// As firmware leaves them: everything is told.
    fn default() -> Self {
        let bank = Bank { control: u64::MAX, ..Bank::default() };
        Self { control: u64::MAX, status: 0, banks: [bank; BANKS] }
    }
}

impl MachineChecks {
    /// RDMSR; `None` for what is no register of machine checks.
    pub(crate) fn read(&self, index: u32) -> Option<u64> {
        let mut state = lock(&self.0);
        match index {
            msr::MCG_CAP => Some(CAPABILITIES),
            msr::MCG_STATUS => Some(state.status),
            msr::MCG_CTL => Some(state.control),
            _ => state.register(index).map(|register| *register.0),
        }
    }

    /// WRMSR; `None` for what cannot be written.
    pub(crate) fn write(&self, index: u32, value: u64) -> Option<()> {
        let mut state = lock(&self.0);
        let (register, writable) = match index {
            msr::MCG_STATUS => (&mut state.status, RESTART | AT_FAULT | IN_PROGRESS),
            msr::MCG_CTL => (&mut state.control, u64::MAX),
            _ => state.register(index)?,
        };
        let allowed = value & !writable == 0;
        allowed.then(|| *register = value)
    }

    /// Notes an error in its bank.
    pub(crate) fn log(&self, error: &MachineError) -> Logged {
        let mut state = lock(&self.0);
        let told = state.control == u64::MAX;
        let number = error.bank.min(BANKS - 1);
        let bank = &mut state.banks[number];
        let enabled = told && bank.control == u64::MAX;
        bank.note(error, enabled);
        let raises = error.severity.raises() && enabled;
        let interrupts = !error.severity.raises() && bank.interrupts(error.severity);
        Logged { bank: number, status: bank.status, interrupts, raises }
    }

    /// #MC begins; false if the last one has not ended. `own` is the error of this CPU, if it is not another's.
    pub(crate) fn begin(&self, own: Option<&MachineError>) -> bool {
        let mut state = lock(&self.0);
        let free = state.status & IN_PROGRESS == 0;
        state.status = IN_PROGRESS
            | match own.map(|error| error.severity) {
                Some(Severity::Fatal) => 0,
                Some(Severity::Required) => RESTART | AT_FAULT,
                _ => RESTART,
            };
        free
    }
}

impl Registers {
    /// A register of a bank, and the bits of it that software may set. What says how an error was can only be cleared.
    fn register(&mut self, index: u32) -> Option<(&mut u64, u64)> {
        if let Some(bank) = index.checked_sub(msr::MC0_CTL) {
            let (number, which) = (bank / REGISTERS, bank % REGISTERS);
            let bank = self.banks.get_mut(number as usize)?;
            return Some(match which {
                0 => (&mut bank.control, u64::MAX),
                1 => (&mut bank.status, 0),
                2 => (&mut bank.address, 0),
                _ => (&mut bank.misc, 0),
            });
        }
        let number = index.checked_sub(msr::MC0_CTL2)?;
        let bank = self.banks.get_mut(number as usize)?;
        Some((&mut bank.control2, CMCI | THRESHOLD))
    }
}

impl Bank {
    /// An uncorrected error stays until software has read it; a corrected one gives way to the next (SDM 15.3.2.2.1).
    fn note(&mut self, error: &MachineError, enabled: bool) {
        let (held, old) = (self.status & VALID != 0, self.status);
        if held && old & UNCORRECTED != 0 {
            self.status |= OVERFLOW;
            return;
        }
        let enabled = if enabled { ENABLED } else { 0 };
        let place = if error.address.is_some() { ADDRESS_VALID | MISC_VALID } else { 0 };
        self.status = VALID | enabled | place | error.severity.status() | u64::from(error.code);
        if held {
            let before = old & COUNT;
            self.status |= OVERFLOW;
            self.status += before.min(COUNT - ONE);
        }
        (self.address, self.misc) = error.address.map_or((0, 0), |address| (address, LINE));
    }

    /// Corrected errors have reached the threshold. An uncorrected one that nobody used is told at once (SDM 15.6.3).
    fn interrupts(&self, severity: Severity) -> bool {
        let count = (self.status & COUNT) >> COUNT.trailing_zeros();
        let reached = count >= (self.control2 & THRESHOLD).max(1);
        self.control2 & CMCI != 0 && (reached || severity == Severity::NoAction)
    }
}
