//! A Linux guest's kernel: its symbols, its types, and who runs.
//!
//! All of it comes from guest memory: VMCOREINFO says where kallsyms is, kallsyms where BTF is, and BTF how structures are laid
//! out. A kernel that lacks one of them is refused with its name.

mod maps;
mod symbols;
mod types;

use std::{thread, time::Duration};

use ram::Ram;
use vmm::{Inspector, RunningKernel};
use x86::{
    control::{cr0, cr4, efer},
    paging::Roots,
};

pub use maps::{MappedFile, VmaLayout};
pub use symbols::Symbols;
pub use types::{Form, Parameter, Types};

use crate::{
    memory::{self, KernelMemory},
    stopped::StoppedVcpus,
    vmcoreinfo::VmCoreInfo,
};

/// Pause between two searches for a kernel that is still to come.
const BREATH: Duration = Duration::from_millis(20);
/// Bytes of a name of a task, with its zero.
const COMM: usize = 16;

/// Where the Linux kernel that runs counts its flushes; for [`vmm::FlushCounts`].
pub fn flush_counts(ram: &Ram, kernel: RunningKernel) -> Option<u64> {
    LinuxKernel::running(ram, kernel).and_then(|kernel| kernel.flush_counts()).ok()
}

/// Why the guest's kernel cannot be inspected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// There is no kernel yet, or none that says anything.
    #[error(
        "there is no VMCOREINFO in memory: no Linux kernel, or not booted so far, or one without CONFIG_CRASH_CORE"
    )]
    VmCoreInfo,
    /// VMCOREINFO lacks something.
    #[error("this kernel's VMCOREINFO has no {0}; kernels from 6.0 on have")]
    Key(&'static str),
    /// The table of symbols is not as in the kernels that are known.
    #[error("this kernel's kallsyms cannot be read: {0}")]
    Symbols(&'static str),
    /// A symbol is missing.
    #[error("this kernel has no symbol {0}")]
    Symbol(String),
    /// The types are missing or not readable.
    #[error("this kernel's BTF cannot be read ({0}); it needs CONFIG_DEBUG_INFO_BTF")]
    Types(String),
}

/// The guest's Linux kernel: its symbols and types.
pub struct LinuxKernel {
    /// Its symbols.
    pub symbols: Symbols,
    /// Its types.
    pub types: Types,
    roots: Roots,
    /// Where the current task is, relative to a CPU's GS base.
    current: u64,
    task: TaskLayout,
    /// None if the kernel's structures say nothing of page tables.
    tables: Option<TablesLayout>,
}

struct TaskLayout {
    pid: u64,
    tgid: u64,
    comm: u64,
}

/// Offsets of what leads to a task's page tables.
struct TablesLayout {
    /// In the task.
    mm: u64,
    /// In what the task has of memory.
    pgd: u64,
}

impl TablesLayout {
    fn of(types: &Types) -> Result<Self, KernelError> {
        Ok(Self { mm: types.offset("task_struct", "mm")?, pgd: types.offset("mm_struct", "pgd")? })
    }
}

/// A thread of the guest's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Task {
    /// Its structure (GVA).
    pub address: u64,
    /// Its number.
    pub tid: u32,
    /// Its process's number.
    pub pid: u32,
    /// Its name.
    pub comm: String,
}

impl LinuxKernel {
    /// Finds the kernel in memory.
    ///
    /// # Errors
    /// [`KernelError`] says what is missing.
    pub fn find(ram: &Ram) -> Result<Self, KernelError> {
        let info = VmCoreInfo::find(ram).ok_or(KernelError::VmCoreInfo)?;
        Self::describe(KernelMemory::All(ram, roots(&info)?), &info)
    }

    /// The kernel that a vCPU runs. A program can write a description of another kernel into its own memory. So all that is read are
    /// constants of the kernel that runs, by its own page tables, and its entry of system calls has to be where they say.
    ///
    /// # Errors
    /// [`KernelError`] says what is missing or wrong.
    pub fn running(ram: &Ram, kernel: RunningKernel) -> Result<Self, KernelError> {
        let info = VmCoreInfo::find(ram).ok_or(KernelError::VmCoreInfo)?;
        let found = Self::describe(KernelMemory::Constants(ram, kernel), &info)?;
        match found.symbols.require("entry_SYSCALL_64")? == kernel.entry {
            true => Ok(found),
            false => Err(KernelError::Symbols("they are not those of the kernel that runs")),
        }
    }

    fn describe(memory: KernelMemory<'_>, info: &VmCoreInfo) -> Result<Self, KernelError> {
        let symbols = Symbols::read(memory, info)?;
        let [start, stop] = ["__start_BTF", "__stop_BTF"].map(|name| symbols.require(name));
        let types = Types::read(memory, start?, stop?)?;
        // Since 6.2 the current task is the first of the variables that CPUs use most.
        let current = symbols.require("pcpu_hot").or_else(|_| symbols.require("current_task"))?;
        let member = |name| types.offset("task_struct", name);
        let task = TaskLayout { pid: member("pid")?, tgid: member("tgid")?, comm: member("comm")? };
        let tables = TablesLayout::of(&types).ok();
        Ok(Self { symbols, types, roots: memory.roots(), current, task, tables })
    }

    /// Finds the kernel in a machine's memory. With `wait` it searches until there is one or the reader is `gone`, and the machine
    /// stands from the moment on at which there is one: reading all of it takes a while. `None` if the machine has ended.
    ///
    /// # Errors
    /// As [`LinuxKernel::find`].
    pub fn wait_for(
        inspector: &Inspector,
        wait: bool,
        gone: impl Fn() -> bool,
    ) -> Result<Option<(Self, Option<StoppedVcpus>)>, KernelError> {
        loop {
            let is_there = wait && VmCoreInfo::find(inspector.ram()).is_some();
            let stopped = is_there.then(|| StoppedVcpus::new(inspector));
            match Self::find(inspector.ram()) {
                Ok(kernel) => return Ok(Some((kernel, stopped))),
                Err(unknown) if !wait || gone() => return Err(unknown),
                Err(_) => drop(stopped),
            }
            thread::sleep(BREATH);
            if inspector.run_on_vcpu(0, |_| ()).is_none() {
                return Ok(None);
            }
        }
    }

    /// The kernel's own page tables.
    pub fn roots(&self) -> Roots {
        self.roots
    }

    /// Reads kernel memory.
    pub fn read(&self, ram: &Ram, gva: u64, bytes: &mut [u8]) -> bool {
        memory::read(ram, self.roots, gva, bytes) == bytes.len()
    }

    /// A word of kernel memory.
    pub fn word(&self, ram: &Ram, gva: u64) -> Option<u64> {
        memory::word(ram, self.roots, gva)
    }

    /// Text that ends with a zero, in kernel memory.
    pub fn text(&self, ram: &Ram, gva: u64) -> Option<String> {
        memory::text(ram, self.roots, gva, 256)
    }

    /// The task that runs on a vCPU, by the GS base (GVA) that it has in kernel code behind the entry code.
    pub fn current_by(&self, ram: &Ram, base: u64) -> Option<Task> {
        self.current_in(base, &|gva, to: &mut [u8]| memory::read(ram, self.roots, gva, to))
    }

    /// The same, of memory that is read so.
    pub fn current_in(&self, base: u64, read: Reader<'_>) -> Option<Task> {
        self.task_in(word(base.wrapping_add(self.current), read)?, read)
    }

    /// Where the current task is, relative to a CPU's GS base, and in a task its number, its process's and its name.
    pub fn places(&self) -> [u64; 4] {
        [self.current, self.task.pid, self.task.tgid, self.task.comm]
    }

    /// Where a CPU counts the flushes of each process-context identifier, relative to its GS base: `cpu_tlbstate.ctxs`, as
    /// [`vmm::FlushCounts`] wants it.
    ///
    /// # Errors
    /// This kernel counts in no way that is known.
    pub fn flush_counts(&self) -> Result<u64, KernelError> {
        let places = [("tlb_context", "ctx_id"), ("tlb_context", "tlb_gen"), ("tlb_state", "ctxs")];
        let [owner, count, counts] = places.map(|(of, member)| self.types.offset(of, member));
        if (owner?, count?) != (0, 8) {
            return Err(KernelError::Types("tlb_context is another one".to_owned()));
        }
        Ok(self.symbols.require("cpu_tlbstate")?.wrapping_add(counts?))
    }

    /// All processes, as far as the list of them is whole.
    pub fn processes(&self, ram: &Ram) -> Vec<Task> {
        const MOST: usize = 100_000;
        let member = self.types.offset("task_struct", "tasks");
        let (Some(first), Ok(tasks)) = (self.symbols.find("init_task"), member) else {
            return Vec::new();
        };
        let next = |task: &u64| {
            let next = self.word(ram, task.wrapping_add(tasks))?.wrapping_sub(tasks);
            (next != first).then_some(next)
        };
        let all = std::iter::successors(Some(first), next).take(MOST);
        all.map_while(|task| self.task(ram, task)).collect()
    }

    /// The root of a process's page tables (GPA); `None` if it is the kernel's own.
    pub fn tables_of(&self, ram: &Ram, task: &Task) -> Option<u64> {
        let TablesLayout { mm, pgd } = self.tables.as_ref()?;
        let mm = self.word(ram, task.address.wrapping_add(*mm)).filter(|mm| *mm != 0)?;
        let table = self.word(ram, mm.wrapping_add(*pgd))?;
        memory::translate(ram, self.roots, table)
    }

    /// A task by its structure (GVA).
    pub fn task(&self, ram: &Ram, address: u64) -> Option<Task> {
        self.task_in(address, &|gva, to: &mut [u8]| memory::read(ram, self.roots, gva, to))
    }

    /// The same, of memory that is read so.
    pub fn task_in(&self, address: u64, read: Reader<'_>) -> Option<Task> {
        let number = |offset: u64| {
            let mut bytes = [0; 4];
            let whole = read(address.wrapping_add(offset), &mut bytes) == bytes.len();
            whole.then(|| u32::from_le_bytes(bytes))
        };
        let (tid, pid) = (number(self.task.pid)?, number(self.task.tgid)?);
        let mut comm = [0; COMM];
        let whole = read(address.wrapping_add(self.task.comm), &mut comm) == comm.len();
        whole.then_some(())?;
        let comm = comm.split(|byte| *byte == 0).next().unwrap_or_default();
        Some(Task { address, tid, pid, comm: String::from_utf8_lossy(comm).into_owned() })
    }
}

/// A word of memory that is read so.
pub fn word(gva: u64, read: Reader<'_>) -> Option<u64> {
    let mut bytes = [0; 8];
    (read(gva, &mut bytes) == bytes.len()).then(|| u64::from_le_bytes(bytes))
}

/// Reads guest memory at a GVA; how many bytes.
pub type Reader<'a> = &'a dyn Fn(u64, &mut [u8]) -> usize;

/// The kernel's own page tables.
fn roots(info: &VmCoreInfo) -> Result<Roots, KernelError> {
    let table = info.symbol("init_top_pgt").ok_or(KernelError::Key("SYMBOL(init_top_pgt)"))?;
    let base = info.number("phys_base").ok_or(KernelError::Key("NUMBER(phys_base)"))?;
    let cr3 = table.wrapping_sub(memory::IMAGES.start).wrapping_add(base as u64);
    Ok(Roots { cr0: cr0::PG, cr3, cr4: cr4::PAE, efer: efer::LMA | efer::NXE })
}
