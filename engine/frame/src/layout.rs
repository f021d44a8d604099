// What monitor, wedge and translated code agree on. The wedge is built without crates and includes
// this file, so it names nothing but core.

use core::sync::atomic::AtomicU32;

/// Where the reserved part of a wedge's address space lies: what is the wedge's own, at the same distances from
/// each other wherever that is. The constants of this file are the addresses of the usual base. It is one entry of
/// the guest's uppermost page table, so a program whose pages are in its way has all of it moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Base(u64);

impl Base {
    /// The base of the reserved part in this entry of the uppermost page table.
    pub const fn of_entry(entry: u16) -> Self {
        Self(((entry as u64) << ENTRY_BITS).wrapping_sub(BIAS))
    }

    /// The entry of the uppermost page table.
    pub const fn entry(self) -> u16 {
        (self.bias() >> ENTRY_BITS) as u16
    }

    /// Where something lies that has the address `usual` with the usual base.
    pub const fn at(self, usual: u64) -> u64 {
        usual.wrapping_add(self.0)
    }

    /// Added to a kernel GVA to get its HVA, modulo 2^64.
    pub const fn bias(self) -> u64 {
        self.at(BIAS)
    }

    /// The first kernel GVA that has an HVA.
    pub const fn kernel_start(self) -> u64 {
        KERNEL_START.wrapping_sub(self.0)
    }
}

/// In what the wedge refers to from several places at a time, host code it calls included. It tells the compiler that
/// a mutable reference is not the only one: without it stores were left out before calls that do not return.
pub type Shares = core::marker::PhantomPinned;

/// log2 of the bytes that an entry of the uppermost page table stands for.
pub const ENTRY_BITS: u32 = 39;

/// The wedge's window: one aligned 4 GiB, so that a filter needs one comparison per half. It lies, like
/// all that is not the guest's, between [`NO_USER`] and [`UPPER_USER`]. Programs choose addresses at
/// random (JavaScript engines do), so what is taken from them elsewhere is as little as possible.
pub const WINDOW: usize = BIAS as usize + 0x40_0000_0000;
/// Bytes of the window.
pub const WINDOW_LEN: usize = 1 << 32;
/// The blob: text and constants, read-execute.
pub const BLOB: usize = WINDOW;
/// The pages shared by the monitor and one wedge.
pub const SHARED: usize = WINDOW + 0x10_0000;
/// The stack the wedge runs on.
pub const STACK: usize = WINDOW + 0x20_0000;
/// Bytes of that stack.
pub const STACK_LEN: usize = 0x4000;
/// The alternate signal stack.
pub const ALT_STACK: usize = WINDOW + 0x30_0000;
/// Bytes of it.
pub const ALT_STACK_LEN: usize = 0x8000;
/// The gate page: what the last instructions before user code read. User code can read and write it.
pub const GATE: usize = WINDOW + 0x38_0000;
/// Whose turn it is, shared by all wedges of a vCPU ([`Turns`]).
pub const TURNS: usize = WINDOW + 0x39_0000;
/// What a wedge and the process of its user code tell each other ([`UserPage`]), where user code has one of its own.
pub const USER_PAGE: usize = WINDOW + 0x3a_0000;
/// What that process is to do before user code runs ([`Journal`]); it cannot write it.
pub const JOURNAL: usize = WINDOW + 0x3b_0000;
/// The vCPU page, shared by all wedges of a vCPU.
pub const FRAME: usize = WINDOW + 0x40_0000;
/// Bytes of it.
pub const FRAME_LEN: usize = 0x4000;
/// The indirect-jump tables, shared by all wedges.
pub const TABLES: usize = WINDOW + 0x1000_0000;
/// The code cache, shared by all wedges; writable in the monitor only.
pub const CACHE: usize = WINDOW + 0x2000_0000;
/// Bytes of the code cache.
pub const CACHE_LEN: usize = 64 << 20;
/// The look-ups of a wedge's user code (`Lookups`), within 2 GiB of the code cache.
pub const LOOKUPS: usize = WINDOW + 0x3000_0000;
/// Where a patched system call finds its stub: 8-byte pointers. `jmp [SITES + n]` takes the place of `mov
/// eax, nr; syscall`, and its last two bytes, the upper half of this address, that of the SYSCALL: 16 is no
/// instruction in 64-bit code, so a jump to the SYSCALL is #UD, and found by that. No program for Linux has memory
/// here unless it asks for that very address, and null pointers do not reach that far. gVisor patches its programs'
/// calls in the same way, has its own table at 0x60000, and counts on a fault as long as nothing is there.
pub const SITES: usize = 0x0016_0000;
/// Bytes of the table.
pub const SITES_LEN: usize = 0x1_0000;
/// A program with pages below this address may have, or come to have, some where the table is: what one page
/// table of the guest's leads to. Programs at fixed addresses begin here (lld's) or higher.
pub const NEAR_SITES_END: u64 = 2 << 20;
/// Entries of the table.
pub const MAX_SITES: usize = SITES_LEN / 8;
/// The stubs: the end of the code cache.
pub const STUBS: usize = CACHE + CACHE_LEN - MAX_SITES * STUB_LEN;
/// Bytes of a stub: `mov eax, nr; movabs rcx, behind the call; jmp` to the blob's entry; and its
/// tail, where the site goes on.
pub const STUB_LEN: usize = 64;
/// Offset in a stub of its tail: the instruction that the patch has displaced, and a jump back.
pub const STUB_TAIL: usize = 32;
/// Offset in a stub of the address behind the call.
pub const STUB_RETURN: usize = 7;
/// Bytes of a patch: of `mov eax, nr; syscall`, or of `syscall; cmp rax, imm32`, of which it leaves the last
/// byte.
pub const SITE_LEN: u64 = 7;
/// Bytes of `cmp rax, imm32`.
pub const CMP_LEN: u64 = 6;
/// System calls by trap after which a site is worth patching.
pub const HOT: u8 = 32;
/// Counters for that.
pub const HEAT: usize = 256;
/// End of the part of the window that may be mapped.
pub const WINDOW_END: usize = MARKS + RAM_MAX / 4096;
/// End of user addresses.
pub const TOP: usize = 0x7fff_ffff_f000;
/// Added to a kernel GVA to get its HVA, modulo 2^64.
pub const BIAS: u64 = 0x7e00_0000_0000;
/// HVA of all of guest RAM, closed to user code: where the wedge reads page tables.
pub const RAM: usize = BIAS as usize + 0x48_0000_0000;
/// The most RAM that has room there, in bytes.
pub const RAM_MAX: usize = UPPER_USER as usize - RAM;
/// The descriptor of guest RAM in a wedge, the only one it has.
pub const RAM_FD: u64 = 0;
/// The descriptor in a wedge by which it hears of the process of its user code, and lets it go on.
pub const LISTENER_FD: u64 = 1;
/// The call by which that process says that it has stopped. No host has one of this number.
pub const HAND_OVER: u64 = 0x0fff_fff0;
/// Where in the blob that process begins: bytes behind its start.
pub const USER_START: usize = 16;
/// The marks of RAM pages, a byte each: not zero means that the monitor decides.
pub const MARKS: usize = WINDOW + 0x4000_0000;
/// The mark of an empty page that nobody can write unnoticed.
pub const EMPTY_PAGE: u8 = 11;
/// The host's FS base in translated code while the guest's GS base is a user address: whatever
/// kernel code adds to it, the host refuses the access.
pub const NOWHERE: u64 = 0xffff_8000_0000_0000;
/// The first kernel GVA that has an HVA.
pub const KERNEL_START: u64 = 0xffff_8200_0000_0000;
/// From here to [`UPPER_USER`] no user page is installed: small kernel addresses end up here.
pub const NO_USER: u64 = BIAS;
/// See [`NO_USER`].
pub const UPPER_USER: u64 = 0x7e80_0000_0000;
/// log2 of the bytes of a region: user and kernel memory do not share one.
pub const REGION_BITS: u32 = 30;
/// So many bytes before a region of the kernel's are no user pages installed: a string instruction that begins
/// there would go on into the kernel's memory. The length of a large page, so that none is cut.
pub const BORDER: u64 = 2 << 20;
/// Regions of a 48-bit address space.
pub const REGION_COUNT: usize = 1 << (48 - REGION_BITS);
/// HVA of the table of biases by region: what translated code adds to an address that may be the
/// user's or the kernel's. Within 2 GiB of [`BIAS`], so that it is reached by GS.
pub const REGIONS: usize = BIAS as usize + 0x7fc0_0000;
/// Bytes of that table.
pub const REGIONS_LEN: usize = REGION_COUNT * 8;
/// HVA of the table of changed copies (`Lookups`), each wedge's own: what translated kernel code adds to an address of
/// the user's that it reads. Behind that of biases, so that it is reached by GS, too.
pub const COPIES: usize = REGIONS + REGIONS_LEN;
/// Entries of it.
pub const COPY_COUNT: usize = 1 << 17;
/// Bytes of it.
pub const COPIES_LEN: usize = COPY_COUNT * 8;
/// The bits of an address that are its index there. None of the kernel's has the index of one of the user's.
pub const COPY_INDEX: u64 = 0xffff << 12 | 1 << 47;
const _: () = assert!(COPIES + COPIES_LEN <= BIAS as usize + (1 << 31));

/// The index in the table of copies that stands for the page of an address, and for others.
pub const fn copy_slot(gva: u64) -> usize {
    (gva >> 12 & 0xffff | (gva >> 47 & 1) << 16) as usize
}

/// Entry of [`REGIONS`] that makes any address non-canonical.
pub const POISON: u64 = 1 << 62;
/// Orders taken at once.
pub const MAX_ORDERS: usize = 128;
/// Mappings a wedge makes by itself before it tells the monitor.
pub const MAX_MADE: usize = 200;
/// Bytes of small pages that a wedge maps at once at the most.
pub const MAX_RUN: u64 = 64 * 4096;
/// Large user pages a wedge maps by itself.
pub const MAX_LARGE: usize = 64;
/// Hints about what is mapped.
pub const HINTS: usize = 2048;
/// Wedges of a vCPU; their numbers start at one.
pub const MAX_WEDGES: usize = 12;
/// The monitor's number.
pub const MONITOR: usize = 0;
/// The signal that makes running guest code come back.
pub const KICK: i32 = 10;
/// Slots of one indirect-jump table: one for each value of an address's low 16 bits.
pub const TABLE_SLOTS: usize = 1 << 16;
/// Bytes of one table: an 8-byte key, the negated GVA, and an 8-byte HVA a slot.
pub const TABLE_LEN: usize = TABLE_SLOTS * 16;
/// Slots of the table behind them, which the wedge searches: 8-byte GVA, 8-byte HVA.
pub const DEEP_SLOTS: usize = 1 << 17;
/// Slots looked at for one GVA.
pub const DEEP_REACH: usize = 8;
/// Offset in the tables of that table, which is that much longer than its slots.
pub const DEEP: usize = 2 * TABLE_LEN;
/// Offset in the tables of a bit for each page of user code, by [`site_page`]: it may hold patched
/// system calls.
pub const SITE_PAGES: usize = DEEP + (DEEP_SLOTS + DEEP_REACH) * 16;
/// log2 of those bits.
const SITE_PAGE_BITS: u32 = 16;
/// Offset in the tables of those for translated user code, whole pages.
pub const USER_TABLES: usize = (SITE_PAGES + (1 << SITE_PAGE_BITS) / 8).next_multiple_of(4096);
/// Bytes of all.
pub const TABLES_LEN: usize = USER_TABLES + SITE_PAGES;
/// Translated user code lies at the end of the code cache, before the stubs: bytes.
pub const USER_CACHE_LEN: usize = 24 << 20;
/// Its first byte.
pub const USER_CACHE: usize = STUBS - USER_CACHE_LEN;

/// A GVA times this, without its lowest [`DEEP_SHIFT`] bits, is where the search for it starts.
pub const DEEP_FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
/// See [`DEEP_FACTOR`].
pub const DEEP_SHIFT: u32 = 64 - DEEP_SLOTS.trailing_zeros();

/// Where the search for a GVA starts; it ends before `DEEP_REACH` slots, the table never.
pub const fn deep_slot(guest: u64) -> usize {
    (guest.wrapping_mul(DEEP_FACTOR) >> DEEP_SHIFT) as usize
}

/// The word and the bit in it that stand for the page of a GVA, and for others.
pub const fn site_page(gva: u64) -> (usize, u32) {
    let bit = (gva >> 12).wrapping_mul(DEEP_FACTOR) >> (64 - SITE_PAGE_BITS);
    (bit as usize / 64, bit as u32 % 64)
}

/// What the user has at this address and up may be in the neighbourhood of [`SITES`].
pub const fn near_sites(address: u64) -> bool {
    address < NEAR_SITES_END
}

/// A range has something of [`SITES`] in it.
pub const fn hides_sites(start: u64, len: u64) -> bool {
    start < (SITES + SITES_LEN) as u64 && start.saturating_add(len) > SITES as u64
}

/// The region of an address, as an index into [`REGIONS`].
pub const fn region(address: u64) -> usize {
    (address >> REGION_BITS) as usize & (REGION_COUNT - 1)
}

/// Words of [`Frame::code_pages`].
pub const CODE_PAGE_WORDS: usize = 64;

/// The word and the bit in it that stand for a page of translated user code, and for others.
pub const fn code_page(gva: u64) -> (usize, u32) {
    let bit = (gva >> 12).wrapping_mul(DEEP_FACTOR) >> 52;
    (bit as usize / 64, bit as u32 % 64)
}

/// A change of the wedge's mappings.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// Page-aligned HVA.
    pub address: u64,
    /// Bytes, whole pages.
    pub len: u64,
    /// Offset in guest RAM, for a mapping.
    pub offset: u64,
    /// Protection as mmap takes it; zero unmaps. [`KERNEL_PAGE`] closes it to user code.
    pub protection: u64,
}

/// In [`Order::protection`]: user code must not get at it.
pub const KERNEL_PAGE: u64 = 1 << 16;
/// In [`Order::protection`]: a private copy of the page, to be changed by [`POKE`].
pub const COPY: u64 = 1 << 17;
/// In [`Order::protection`]: writes the [`Order::len`] bytes (1 to 8) in [`Order::offset`].
pub const POKE: u64 = 1 << 18;
/// In [`Order::protection`]: only the protection changes.
pub const PROTECT: u64 = 1 << 19;
/// In [`Order::protection`] of what a wedge has mapped by itself: the guest's page is a large one.
pub const PIECE: u64 = 1 << 20;
/// In [`Order::protection`] of what a wedge has mapped by itself: memory without content stands for the page
/// of RAM at [`Order::offset`], which is empty, in all of the range.
pub const EMPTY: u64 = 1 << 21;
/// In [`Order::protection`]: the table of patched system calls is open to user code again, nothing else.
pub const OPEN_SITES: u64 = 1 << 22;
/// In [`Order::protection`]: that table is to be closed, nothing else.
pub const CLOSE_SITES: u64 = 1 << 23;
/// In [`Order::protection`] of what a wedge says it has done: the page was to be executed, and has bytes that open
/// protection keys. It is not mapped.
pub const REFUSED: u64 = 1 << 24;

/// Why translated code exits, in [`Frame::exit_kind`], and why the wedge gives the monitor its turn, in
/// [`Frame::reason`].
#[repr(u64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitKind {
    /// Nothing has run.
    None = 0,
    /// The kernel instruction at RIP must be interpreted.
    CallOut = 1,
    /// The block at RIP is not translated yet; [`Frame::exit_info`] is the link site that wants it,
    /// zero if none.
    Miss = 2,
    /// Interrupts were enabled while one is pending.
    InterruptWindow = 3,
    /// SYSRET to 64-bit code at RIP's instruction; the wedge does it unless it cannot.
    Sysret = 4,
    /// IRETQ at RIP's instruction; the wedge does it unless it cannot.
    Iret = 5,
    /// A signal in translated code: registers are the host's, and [`Frame::pc`] is where it was.
    KernelSignal = 6,
    /// A signal in user code: registers are the user's.
    UserSignal = 7,
    /// A kick before anything has run.
    Kicked = 8,
    /// XRSTOR from [`Frame::operand`] at RIP's instruction, going on at [`Frame::next`]; the wedge
    /// does it unless it cannot.
    LoadVectors = 9,
    /// INVLPG of [`Frame::operand`] at RIP's instruction, going on at [`Frame::next`]; the wedge does
    /// it unless it cannot.
    InvalidatePage = 10,
    /// A system call whose site is worth patching; RIP is behind it.
    HotSite = 11,
    /// MOV to CR3 of [`Frame::operand`] at RIP's instruction, going on at [`Frame::next`]; the wedge does it
    /// unless it cannot.
    LoadSpace = 12,
    /// User code's look-up of [`Frame::operand`] has missed at RIP's instruction, which begins again at [`Frame::jump`];
    /// the wedge fills it unless it cannot.
    Lookup = 13,
    /// SYSCALL of translated user code at RIP's instruction, going on at [`Frame::next`]; the wedge does it unless it
    /// cannot.
    SystemCall = 14,
}

/// How guest code goes on, in [`Frame::go`].
pub mod go {
    /// Only obey orders.
    pub const NOTHING: u64 = 0;
    /// User code at RIP.
    pub const USER: u64 = 1;
    /// The block at [`super::Frame::jump`], with guest registers.
    pub const BLOCK: u64 = 2;
    /// The host instruction at [`super::Frame::pc`], with host registers.
    pub const RAW: u64 = 3;
    /// The same, for one host instruction.
    pub const STEP: u64 = 4;
    /// The same, until translated code is left, and no further.
    pub const LEAVE: u64 = 5;
}

/// What the wedge is doing, in [`Frame::mode`].
pub mod mode {
    /// Its own work.
    pub const WEDGE: u64 = 0;
    /// User code, or the last steps to it.
    pub const USER: u64 = 1;
    /// Translated code, or the last steps to it.
    pub const KERNEL: u64 = 2;
}

/// Regions in the reach of one entry of the uppermost page table that the kernel or the wedge has something in:
/// where a program has pages there, too, its code cannot run beside that.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// Index into the uppermost page table.
    pub entry: u16,
    /// Index of the first region into the table below it.
    pub first: u16,
    /// Index of the last region.
    pub last: u16,
}

impl Claim {
    /// Something of a range of HVAs is claimed.
    pub const fn reaches(&self, start: u64, len: u64) -> bool {
        let base = (self.entry as u64) << ENTRY_BITS;
        let first = base + ((self.first as u64) << REGION_BITS);
        let end = base + ((self.last as u64 + 1) << REGION_BITS);
        start < end && start.saturating_add(len) > first
    }

    /// A range of HVAs has something in the reach of the same entry: the kernel may come to have memory there.
    pub const fn is_near(&self, start: u64, len: u64) -> bool {
        Self { first: 0, last: 511, ..*self }.reaches(start, len)
    }
}

/// Linux's numbers of calls for memory, and of those that end a program.
pub mod calls {
    #![allow(missing_docs)]
    pub const MMAP: u64 = 9;
    pub const MPROTECT: u64 = 10;
    pub const MUNMAP: u64 = 11;
    pub const MREMAP: u64 = 25;
    pub const SHMAT: u64 = 30;
    pub const EXECVE: u64 = 59;
    pub const EXIT_GROUP: u64 = 231;
    pub const EXECVEAT: u64 = 322;
    /// No call.
    pub const NONE: u64 = !0;
}
/// The GPA in CR3.
const ROOT: u64 = ((1 << 46) - 1) & !0xfff;

/// Claims that a wedge looks at; if there are more, it leaves every return to user code to the monitor.
pub const MAX_CLAIMS: usize = 32;
/// Claims that it looks at without a loop.
pub const QUICK_CLAIMS: usize = 8;

/// What CPUID answers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cpuid {
    /// EAX and ECX before it.
    pub asked: [u32; 2],
    /// EAX, EBX, ECX and EDX behind it.
    pub registers: [u32; 4],
}

/// Answers of CPUID that are kept.
pub const MAX_CPUID: usize = 64;

/// The vCPU page.
#[repr(C, align(4096))]
#[derive(Clone, Debug)]
pub struct Frame {
    /// General registers in encoding order.
    pub gpr: [u64; 16],
    /// GVA of the next instruction.
    pub rip: u64,
    /// Where user code at `rip` goes on: elsewhere if a patch is in its place.
    pub user_rip: u64,
    /// User code's RFLAGS. In translated code: see `host_flags`.
    pub rflags: u64,
    /// Guest registers that a translated sequence put aside, in order of use.
    pub spill: [u64; 4],
    /// Where the next entry or indirect jump goes, a host address in the code cache.
    pub jump: u64,
    /// The host's PC that a signal interrupted in translated code.
    pub pc: u64,
    /// Virtual RFLAGS.IF: zero or `flags::IF`.
    pub interrupt_flag: u64,
    /// Virtual RFLAGS.AC: zero or `flags::AC`.
    pub alignment_flag: u64,
    /// Not zero: an interrupt waits for the virtual IF.
    pub pending: u64,
    /// PAUSEs of translated code until one is interpreted; zero for never.
    pub pauses: u64,
    /// What GS base is in translated code: the bias from GVA to HVA.
    pub bias: u64,
    /// What FS base is in translated code, see [`percpu()`].
    pub percpu: u64,
    /// [`NOWHERE`].
    pub nowhere: u64,
    /// The status flags, DF and ID as translated code starts and ends with them.
    pub host_flags: u64,
    /// An [`ExitKind`]: why translated code exits.
    pub exit_kind: u64,
    /// An [`ExitKind`]: why the monitor is needed.
    pub reason: u64,
    /// Detail of the exit.
    pub exit_info: u64,
    /// Stack pointer of whoever entered translated code.
    pub host_rsp: u64,
    /// FS and GS base of whoever entered translated code.
    pub host_fs: u64,
    /// See `host_fs`.
    pub host_gs: u64,
    /// Top of this is where translated code may push, when RSP is not the guest's.
    pub stack: [u64; 8],
    /// Address of the operand of what the wedge is to do, GVA.
    pub operand: u64,
    /// GVA of the instruction behind it.
    pub next: u64,
    /// The vector components the guest knows.
    pub vector_mask: u64,
    /// TSC_AUX.
    pub tsc_aux: u64,
    /// The bits of an address that are the index into [`REGIONS`].
    pub region_mask: u64,
    /// [`COPY_INDEX`].
    pub copy_index: u64,
    /// `LOOKUP_INDEX`, `LOOKUP_READS` and `LOOKUP_WRITES`.
    pub lookup_masks: [u64; 3],
    /// Not zero: user code is run translated, or was when it stopped.
    pub user_translated: u64,
    /// CR3 of the program that translated user code is of; zero: the monitor has to look first.
    pub code_space: u64,
    /// A bit for each page of it, by [`code_page`].
    pub code_pages: [u64; CODE_PAGE_WORDS],
    /// The guest's FS base.
    pub fs_base: u64,
    /// The guest's GS base.
    pub gs_base: u64,
    /// The GS base that SWAPGS exchanges.
    pub kernel_gs_base: u64,
    /// Current privilege level, 0 or 3.
    pub cpl: u64,
    /// Selectors.
    pub cs: u64,
    /// See `cs`.
    pub ss: u64,
    /// See `cs`.
    pub ds: u64,
    /// See `cs`.
    pub es: u64,
    /// See `cs`.
    pub fs: u64,
    /// See `cs`.
    pub gs: u64,
    /// Not zero: user code has gone over to 32-bit code by itself.
    pub compatibility: u64,
    /// See [`mode`].
    pub mode: u64,
    /// See [`go`].
    pub go: u64,
    /// A kick arrived while the wedge did its own work.
    pub kicked: u64,
    /// Signal that ended guest code, its `si_code`, and `si_addr` or `si_call_addr`.
    pub signal: u64,
    /// See `signal`.
    pub code: u64,
    /// See `signal`.
    pub address: u64,
    /// CPU exception, for signals that are one.
    pub trap: u64,
    /// Its error code.
    pub error: u64,
    /// SYSCALL's target.
    pub lstar: u64,
    /// RFLAGS bits it clears.
    pub sfmask: u64,
    /// IA32_STAR.
    pub star: u64,
    /// The wedge may do SYSCALL, SYSRET and IRET itself.
    pub fast: u64,
    /// CR2 and CR3.
    pub cr2: u64,
    /// See `cr2`.
    pub cr3: u64,
    /// The wedge may walk the guest's page tables: 4-level paging with NX and WP.
    pub walks: u64,
    /// Not zero: translations have process-context identifiers.
    pub pcids: u64,
    /// The guest's IDT: GVA, zero if it is not the usual one.
    pub idt: u64,
    /// The guest's 64-bit TSS: GVA, zero if it is not the usual one.
    pub tss: u64,
    /// The page fault last delivered to the guest's kernel: RIP, GVA, access and CR3.
    pub faulted: [u64; 4],
    /// A user page that INVLPG has dropped but that is still mapped: zero before user code runs, and before
    /// kernel code can reach the user's memory.
    pub deferred: u64,
    /// The guest's GDT: GVA.
    pub gdt: u64,
    /// Its limit, bytes minus one.
    pub gdt_limit: u64,
    /// Entered user code.
    pub user_entries: u64,
    /// System calls taken to translated code without the monitor.
    pub fast_system_calls: u64,
    /// Returns to user code without the monitor.
    pub fast_returns: u64,
    /// Interrupt returns inside the kernel without the monitor.
    pub fast_kernel_returns: u64,
    /// System calls from patched sites.
    pub patched_system_calls: u64,
    /// Address spaces selected without the monitor.
    pub hand_overs: u64,
    /// Pages mapped without the monitor.
    pub fast_mapped: u64,
    /// Pages whose mapping was still there, and got its rights back or others, without the monitor.
    pub fast_shown: u64,
    /// Page faults delivered to the guest's kernel without the monitor.
    pub fast_faults: u64,
    /// INVLPGs done without the monitor.
    pub fast_invalidations: u64,
    /// Where user code must have no pages.
    pub claims: [Claim; MAX_CLAIMS],
    /// How many claims there are, perhaps more than [`Frame::claims`] holds.
    pub claim_count: u64,
    /// Offsets of their entries in the uppermost page table, some of them several times; all of them if there are no more than
    /// so many.
    pub claim_entries: [u16; QUICK_CLAIMS],
    /// The number of the last system call, [`calls::NONE`] once somebody has returned to user code.
    pub call: u64,
    /// CR3 of the program that made it.
    pub caller: u64,
    /// The monitor remembers what programs have been given.
    pub remembers: u64,
    /// The uppermost page table of a program that has ended; zero for none.
    pub ended: u64,
    /// First address and bytes of claimed memory that a program has been given; no bytes for none.
    pub given: [u64; 2],
    /// The same of such memory that it has given back.
    pub taken: [u64; 2],
    /// What CPUID has answered, as far as is known.
    pub cpuid: [Cpuid; MAX_CPUID],
    /// How many of those are.
    pub cpuid_count: u64,
    /// Not zero: the monitor is told of each exit of translated code, even of what the wedge could do.
    pub alone: u64,
    /// CPUIDs of user code answered without the monitor.
    pub fast_cpuids: u64,
    /// Look-ups filled without the monitor.
    pub fast_lookups: u64,
    /// x87, SSE and AVX state in the standard XSAVE layout; in the CPU while guest code runs.
    pub vectors: Vectors,
    /// See [`Shares`].
    pub shares: Shares,
}

/// An XSAVE area.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vectors(pub [u8; 832]);

/// A page of the guest's and how it is mapped. Without protection it is closed: the mapping is there, and shows nothing.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hint {
    /// HVA, and in its lowest bits the protection; zero for none.
    pub page: u64,
    /// Offset in guest RAM.
    pub offset: u64,
}

/// The prctl that sets syscall user dispatch.
pub const SYSCALL_USER_DISPATCH: u64 = 59;

/// Why the process of user code has stopped, in [`UserPage::event`].
pub mod event {
    /// It has done what it was to do.
    pub const DONE: u64 = 0;
    /// A patched system call.
    pub const CALL: u64 = 1;
    /// A signal.
    pub const SIGNAL: u64 = 2;
    /// A kick before user code has run.
    pub const KICKED: u64 = 3;
    /// It could not do what it was to do.
    pub const FAILED: u64 = 4;
}

/// What a wedge and the process of its user code tell each other. User code can write it whenever it runs: so it is read only while that
/// stands still, and believed as far as user code could have set its registers.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct UserPage {
    /// General registers in encoding order.
    pub gpr: [u64; 16],
    /// GVA of the next instruction.
    pub rip: u64,
    /// RFLAGS.
    pub rflags: u64,
    /// FS base.
    pub fs_base: u64,
    /// GS base.
    pub gs_base: u64,
    /// Selectors of DS, ES, FS and GS.
    pub selectors: [u64; 4],
    /// See [`event`].
    pub event: u64,
    /// A kick has come before user code has run.
    pub kicked: u64,
    /// The signal.
    pub signal: u64,
    /// The first words of its `siginfo_t`.
    pub info: [u64; 4],
    /// The registers of its machine context.
    pub context: [u64; 23],
    /// The end of this is where the process pushes when RSP is user code's.
    pub stack: [u64; 8],
    /// Before user code has run: the secret of its host calls, one past the blob's last byte, and whether system calls come by dispatch.
    pub start: [u64; 3],
    /// x87, SSE and AVX state, as in [`Frame::vectors`].
    pub vectors: Vectors,
    /// What a kick has interrupted on the way to the wedge, and is to go on: the registers of its machine context.
    pub interrupted: [u64; 23],
    /// For the IRET to that: RIP, CS, RFLAGS, RSP and SS.
    pub back: [u64; 5],
    /// Its vectors.
    pub interrupted_vectors: Vectors,
    /// See [`Shares`].
    pub shares: Shares,
}

/// Entries of [`Journal::orders`].
pub const MAX_JOURNAL: usize = 80;
/// In [`Journal::orders`]: bytes are to be written.
pub const JOURNAL_POKE: u64 = 0xffff;

/// SS_AUTODISARM. So it is never taken for a stack that is in use, and a signal finds room wherever RSP points.
pub const SIGNAL_STACK_FLAGS: u64 = 1 << 31;

/// What the process of user code is to do.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Journal {
    /// Not zero: user code is to go on then.
    pub enter: u64,
    /// How many orders there are.
    pub count: u64,
    /// Where its signals have their stack, as the host takes it: each signal takes that away ([`SIGNAL_STACK_FLAGS`]).
    pub signal_stack: [u64; 3],
    /// The signals that are to be blocked: none.
    pub mask: u64,
    /// Each a host call's number, its first to fourth argument, and its sixth.
    pub orders: [[u64; 6]; MAX_JOURNAL],
    /// See [`Shares`].
    pub shares: Shares,
}

/// What the monitor and one wedge tell each other.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Shared {
    /// The secret a host call from the wedge must carry.
    pub secret: u64,
    /// Not zero: user code's system calls are to come by syscall user dispatch.
    pub user_dispatch: u64,
    /// Not zero: user code runs in a process of its own, whose host calls carry this secret.
    pub user_secret: u64,
    /// What the host calls the hand-over of that process that is to be answered; zero before the first.
    pub handed: u64,
    /// Orders in its journal.
    pub journal_count: u64,
    /// It could not do what it was to do.
    pub user_failed: u64,
    /// One past the blob's last byte.
    pub blob_end: u64,
    /// The protection key of what user code must not touch, zero without keys.
    pub key: u64,
    /// Not zero: what user code executes are copies of pages, and no bytes of them open protection keys.
    pub searched: u64,
    /// Bytes of guest RAM, and how many of them lie at GPA 0 and up; the rest begins at 4 GiB.
    pub ram_len: u64,
    /// See `ram_len`.
    pub ram_low: u64,
    /// Offset in RAM of the last page of the user's that was mapped for reading only.
    pub shared_page: u64,
    /// Mappings the wedge may still make by itself.
    pub budget: u64,
    /// Not zero: the monitor has mapped something larger than a page among the user's.
    pub large: u64,
    /// Not zero: what is mapped may be shown again, or with other rights, by changing its protection.
    pub keeps: u64,
    /// The 2 MiB pages of the user's that the wedge has mapped by itself, or pieces of them: HVAs, zero for
    /// none.
    pub larges: [u64; MAX_LARGE],
    /// Not zero: the table of patched system calls is closed to user code.
    pub sites_closed: u64,
    /// Not zero: user code is run translated, with look-ups.
    pub lookups: u64,
    /// Not zero: there are, or were, changed copies of pages of code.
    pub copied: u64,
    /// The wedge's number.
    pub number: u64,
    /// Not zero once the wedge is ready.
    pub ready: u64,
    /// Negated error number of the first order that failed, zero if none.
    pub failed: i64,
    /// Not zero: orders are to be carried out, and nothing else.
    pub orders_only: u64,
    /// Orders given.
    pub order_count: u64,
    /// The orders.
    pub orders: [Order; MAX_ORDERS],
    /// The blob's entry for patched system calls: HVA.
    pub patched_entry: u64,
    /// System calls by trap, by a hash of their sites.
    pub heat: [u8; HEAT],
    /// By the low twelve bits of the address behind them: there may be system calls whose following
    /// instruction has been displaced.
    pub displaced: [u64; 64],
    /// How many of `made` are.
    pub made_count: u64,
    /// What the wedge has mapped, or with no protection unmapped, by itself.
    pub made: [Order; MAX_MADE],
    /// Pages that the wedge has mapped and nobody has changed since.
    pub hints: [Hint; HINTS],
    /// See [`Shares`].
    pub shares: Shares,
}

/// Whose turn it is: the monitor's or one wedge's, by number. Wedges can write it as they like; what they
/// gain is that guest code runs in several of them at once.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Turns {
    /// Not zero: it is the turn of the one with this number, who waits for that.
    pub words: [AtomicU32; MAX_WEDGES + 1],
    /// The wedge that has the turn or had it last.
    pub current: AtomicU32,
    /// By wedge, the PCID of the space it holds plus one: it can go on there by itself, the monitor has no
    /// orders for it. Zero if not.
    pub spaces: [AtomicU32; MAX_WEDGES + 1],
}

/// The host's FS base in translated code, for a GS base of the guest.
pub fn percpu(gs_base: u64, bias: u64) -> u64 {
    if gs_base >> 63 == 0 { NOWHERE } else { gs_base.wrapping_add(bias) }
}

impl Frame {
    /// Some return to user code, of the program with these page tables and with these values of RAX, RDX, RSI and RDI, comes next. If the last
    /// system call has given a program memory near what is claimed, or taken some, or ended it, this is noted for the monitor: true.
    #[cold]
    #[inline(never)]
    pub fn note_outcome(&mut self, cr3: u64, [result, rdx, rsi, rdi]: [u64; 4]) -> bool {
        let call = core::mem::replace(&mut self.call, calls::NONE);
        if (self.caller ^ cr3) & ROOT != 0 {
            let ends = matches!(call, calls::EXECVE | calls::EXECVEAT | calls::EXIT_GROUP);
            if ends && self.remembers != 0 {
                self.ended = self.caller & ROOT;
            }
            return ends && self.remembers != 0;
        }
        let (start, len) = match call {
            // What may not be accessed either is the program's, where the table of patched calls would be seen.
            calls::MMAP if rdx != 0 || hides_sites(result, rsi) => (result, rsi),
            calls::MPROTECT if rdx != 0 && result == 0 => (rdi, rsi),
            calls::MUNMAP if result == 0 && self.remembers != 0 => (rdi, rsi),
            calls::MREMAP => (result, rdx),
            calls::SHMAT => (result, 4096),
            _ => return false,
        };
        let count = self.claim_count as usize;
        let near = self.claims.iter().take(count).any(|claim| claim.is_near(start, len));
        if start >> 47 != 0 || !near && !near_sites(start) {
            return false;
        }
        *(if call == calls::MUNMAP { &mut self.taken } else { &mut self.given }) = [start, len];
        true
    }
}
