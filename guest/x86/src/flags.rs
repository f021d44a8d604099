//! RFLAGS bits (SDM vol. 1, 3.4.3).

/// Carry.
pub const CF: u64 = 1 << 0;
/// Always one.
pub const FIXED: u64 = 1 << 1;
/// Parity of the low result byte.
pub const PF: u64 = 1 << 2;
/// Auxiliary (nibble) carry.
pub const AF: u64 = 1 << 4;
/// Zero.
pub const ZF: u64 = 1 << 6;
/// Sign.
pub const SF: u64 = 1 << 7;
/// Trap: single step.
pub const TF: u64 = 1 << 8;
/// Interrupt enable.
pub const IF: u64 = 1 << 9;
/// Direction.
pub const DF: u64 = 1 << 10;
/// Overflow.
pub const OF: u64 = 1 << 11;
/// I/O privilege level, two bits.
pub const IOPL: u64 = 3 << 12;
/// Nested task.
pub const NT: u64 = 1 << 14;
/// Resume: suppress an instruction breakpoint once.
pub const RF: u64 = 1 << 16;
/// Virtual-8086 mode.
pub const VM: u64 = 1 << 17;
/// Alignment check, and SMAP override in supervisor mode.
pub const AC: u64 = 1 << 18;
/// Virtual interrupt flag.
pub const VIF: u64 = 1 << 19;
/// Virtual interrupt pending.
pub const VIP: u64 = 1 << 20;
/// CPUID may be used.
pub const ID: u64 = 1 << 21;

/// The six arithmetic status flags.
pub const STATUS: u64 = CF | PF | AF | ZF | SF | OF;
/// Every flag that can be one.
pub const ALL: u64 = STATUS | TF | IF | DF | IOPL | NT | RF | VM | AC | VIF | VIP | ID;
