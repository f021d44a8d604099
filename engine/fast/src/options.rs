//! How the engine does what it does, as its user asks.

use crate::LockStep;

/// How user code is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum User {
    /// By the interpreter.
    Interpreted,
    /// Directly on the CPU, if it is 64-bit code.
    Direct,
    /// As kernel code is, if it is 64-bit code.
    Translated,
}

/// How programs are run that have more scattered pages than there can be mappings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scattered {
    /// Directly. A page that is accessed and not mapped gets a mapping, and another page loses one.
    Map,
    /// Translated, with a look-up for each access, until mappings suffice again.
    #[default]
    Lookup,
    /// Every program is translated with look-ups, whether it needs them or not.
    Always,
}

/// Linux has few identifiers of address spaces, so processes take turns with them. When the guest switches back to a process, the engine
/// has to learn which mappings of that process are still right: this says how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Switches {
    /// From the count of flushes that the guest's kernel keeps. Where the kernel keeps none, from a comparison.
    #[default]
    Counted,
    /// Each switch back to a process compares the mappings of that process with its page tables.
    Compared,
    /// The same, and the engine fails if the kernel's count was wrong.
    Checked,
}

/// How the fast engine does what it does. Whoever is asked by the user fills it in; it is handed on as it is, and read here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// How translated code is compared with the interpreter; `None` for not at all.
    pub lock_step: Option<LockStep>,
    /// The host hands over system calls of 64-bit user code by syscall user dispatch.
    pub user_dispatch: bool,
    /// System calls of user code come by trap each time: their sites are not patched.
    pub unpatched: bool,
    /// Processes with guest code are traced: what stops them comes by ptrace.
    pub traced: bool,
    /// Host mappings of pages that the guest's page tables do not say any more are taken away, not closed.
    pub unmap_flushed: bool,
    /// How programs are run that have more scattered pages than there can be mappings.
    pub scattered: Scattered,
    /// Processes that have just begun run directly, too, not translated with look-ups.
    pub young_directly: bool,
    /// Translations of programs' code are each for one address, not for wherever the program is loaded.
    pub fixed_programs: bool,
    /// Processes share no copies of code where they execute copies, which is where a program could load protection keys.
    pub copies_apart: bool,
    /// 32-bit user code is interpreted, even where the host can run it.
    pub interpret_narrow: bool,
    /// The code of 32-bit guests, kernels' and programs', is interpreted.
    pub interpret_narrow_guests: bool,
    /// What 32-bit kernels access in pages that they map only for a moment has mappings of the host's, and no look-ups.
    pub map_fleeting: bool,
    /// Each vCPU translates the kernel for itself.
    pub translations_apart: bool,
    /// Computed jumps of translated kernel code search for where they lead: blocks have no landings.
    pub search_jumps: bool,
    /// So many mappings a process with guest code may have, if not as many as the host allows.
    pub most_mappings: Option<u32>,
    /// User code that runs directly does so in processes of its own, where no protection keys close the kernel's memory to it.
    pub strict: bool,
    /// Wedges ring no doorbells of devices, and take no interrupts.
    pub leave_bells: bool,
    /// How the engine learns, at a switch to a process, which of its mappings are still right.
    pub switches: Switches,
    /// Protection keys are left alone, as if the host had none.
    pub without_keys: bool,
}

/// Which code is run how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Modes {
    /// User code.
    pub user: User,
    /// Kernel code is translated; otherwise it is interpreted.
    pub kernel_translated: bool,
    /// How that is done.
    pub options: Options,
}

impl Modes {
    /// User code runs in processes of its own.
    pub(crate) fn is_strict(&self) -> bool {
        self.options.strict && self.kernel_translated && self.user == User::Direct
    }
}
