//! The translated code of both levels.

use crate::{User, code::Code};
use frame::{Base, STUBS, USER_CACHE};
use jit::{Level, cache::Position};
use ram::Ram;
use wedge::Pages;
use x86::paging::Roots;
use x86_interp::{Flush, Probes, Record};

/// The kernel's code and, if user code is translated, that of one address space's programs.
pub struct Codes {
    kernel: Code,
    user: Option<Code>,
    /// CR3 of that address space.
    space: u64,
    /// Memory operands of user code are looked up.
    look_up: bool,
    /// There has been a flush since it was last looked at where user code lies.
    changed: bool,
}

impl Codes {
    /// None yet. Where user code runs directly, what there will be of it has its memory operands looked up.
    pub fn new(pages: &mut Pages, user: User) -> Self {
        let kernel = Code::new(pages, Level::Kernel, false);
        let translated = user == User::Translated;
        let user = translated.then(|| Code::new(pages, Level::User, false));
        Self { kernel, user, space: 0, look_up: !translated, changed: false }
    }

    /// Drops everything. What is made from now on goes over no breakpoint either.
    pub fn begin_again(&mut self, pages: &mut Pages, user: User) {
        let probes = self.kernel.probes().clone();
        *self = Self::new(pages, user);
        self.set_probes(pages, &probes);
    }

    /// From now on no block of either level goes over these breakpoints.
    pub fn set_probes(&mut self, pages: &mut Pages, probes: &Probes) {
        self.kernel.set_probes(pages, probes);
        if let Some(user) = &mut self.user {
            user.set_probes(pages, &probes.without_taps());
        }
    }

    /// A level's code, if it is translated.
    pub fn at(&mut self, level: Level) -> Option<&mut Code> {
        match level {
            Level::Kernel => Some(&mut self.kernel),
            Level::User => self.user.as_mut(),
        }
    }

    /// All there is.
    pub fn each(&mut self) -> impl Iterator<Item = &mut Code> {
        std::iter::once(&mut self.kernel).chain(&mut self.user)
    }

    /// The kernel's.
    pub fn kernel(&self) -> &Code {
        &self.kernel
    }

    /// The kernel's, to be changed.
    pub fn kernel_mut(&mut self) -> &mut Code {
        &mut self.kernel
    }

    /// User code in the address space with these page tables comes next. What was made from pages that lie elsewhere
    /// there is dropped; processes that were forked, or use the same libraries at the same addresses, share the rest.
    pub fn enter_space(&mut self, pages: &mut Pages, ram: &Ram, roots: Roots) {
        let look_up = self.look_up;
        let probes = self.kernel.probes();
        let user = self.user.get_or_insert_with(|| {
            let mut new = Code::new(pages, Level::User, look_up);
            new.set_probes(pages, &probes.without_taps());
            new
        });
        if self.space != roots.cr3 || std::mem::take(&mut self.changed) {
            self.space = roots.cr3;
            self.changed = false;
            user.check_all(pages, ram, roots);
        }
        pages.frame().code_space = roots.cr3;
    }

    /// The translation of a user page has been dropped: so is the code made from it, whatever the space.
    pub fn forget_page(&mut self, pages: &mut Pages, gva: u64) {
        if let Some(user) = &mut self.user {
            user.forget_page(pages, gva);
        }
    }

    /// The guest instruction that a host PC belongs to.
    pub fn position(&self, pc: u64) -> Option<Position> {
        let user = || self.user.as_ref().and_then(|user| user.position(pc));
        self.kernel.position(pc).or_else(user)
    }

    /// Kernel code at a GVA has faulted at a device.
    pub fn note_device(&mut self, pages: &mut Pages, guest: u64) {
        if self.kernel.devices.note_fault(guest) {
            self.kernel.forget_page(pages, guest);
        }
    }

    /// A host PC lies in the routines that leave translated code.
    pub fn is_exit(&self, pc: u64) -> bool {
        self.kernel.is_exit(pc) || self.user.as_ref().is_some_and(|user| user.is_exit(pc))
    }

    /// Drops what the interpreter has reported stale.
    pub fn apply(&mut self, pages: &mut Pages, ram: &Ram, roots: Roots, record: &Record) {
        for code in self.each() {
            code.apply(pages, ram, roots, record);
        }
        let page = |flush: &Flush| matches!(flush, Flush::Page { .. });
        if !record.flushes.iter().all(page) || self.space != roots.cr3 {
            (self.changed, pages.frame().code_space) = (true, 0);
        }
    }
}

/// What translated code at a host PC adds to addresses.
pub fn bias_at(base: Base, pc: u64) -> u64 {
    let user = base.at(USER_CACHE as u64)..base.at(STUBS as u64);
    if user.contains(&pc) { 0 } else { base.bias() }
}
