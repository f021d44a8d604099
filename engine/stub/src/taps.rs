//! Taps: translated code comes by a point that somebody traces. The point's program makes a record there and then, and the
//! code goes on.
//!
//! Translated code is several vCPUs'. So it says only that somebody has a point there, and each vCPU finds its own programs by
//! address: one that has none goes on.
//!
//! Memory is looked at by walks of the guest's page tables that set nothing, so the guest cannot tell, and nothing faults.
//! What cannot be told so is left to the monitor, which makes the record itself.

use crate::{
    Context, here,
    walk::{self, ram_offset},
};
use core::arch::asm;
use wedge_abi::{RAM, STEP_WORDS, Shared, TAP_BYTES, TAP_ODD, TAP_STEPS, TAPS, Taps, go, walks};
use x86::{
    paging::canonical,
    tap::{self, Memory, Moment, Outcome},
};

const PAGE: u64 = 4096;
const _: () = assert!(STEP_WORDS == tap::STEP_WORDS);

/// The point at RIP is recorded, or not meant: its instruction comes next. False: the monitor is needed.
pub fn pass(cx: &mut Context<'_>) -> bool {
    // SAFETY: mapped for good; one wedge of a vCPU runs at a time, and only it and the monitor, never at once, use it.
    pass_by(cx, unsafe { &mut *(here(TAPS) as *mut Taps) })
}

fn pass_by(cx: &mut Context<'_>, taps: &mut Taps) -> bool {
    let looks = cx.vcpu.run.walks == walks::FOUR_LEVELS
        && cx.vcpu.regs.cpl == 0
        && cx.vcpu.run.go != go::LEAVE;
    let outcome = match taps.points.find(cx.vcpu.regs.rip) {
        Some(first) if looks => record(cx, taps, first),
        Some(_) => Outcome::Odd,
        None => Outcome::Dropped,
    };
    // Where the monitor is to take back a record that has none, it takes nothing.
    taps.last = taps.used;
    match outcome {
        Outcome::Noted(len) => taps.used += len as u64,
        Outcome::Dropped if cx.vcpu.run.go == go::LEAVE => return false,
        Outcome::Dropped => {}
        // The monitor takes what is there, and the point comes again.
        Outcome::Full if taps.used != 0 => return false,
        // One that never fits is made by the monitor.
        Outcome::Full | Outcome::Odd => {
            cx.vcpu.exit.info = TAP_ODD;
            return false;
        }
    }
    cx.vcpu.block.jump = cx.vcpu.exit.operand;
    cx.vcpu.run.go = go::BLOCK;
    true
}

/// Runs the program that begins at a step.
fn record(cx: &Context<'_>, taps: &mut Taps, first: u64) -> Outcome {
    let Taps { used, steps, records, .. } = taps;
    let regs = &cx.vcpu.regs;
    let moment = Moment {
        rip: regs.rip,
        tsc: time(),
        cr2: regs.cr2,
        cr3: regs.cr3,
        gs_base: regs.gs_base,
        gpr: regs.gpr,
    };
    let step = |n: u64| steps.get((n as usize).min(TAP_STEPS)).copied();
    let used = (*used as usize & !7).min(TAP_BYTES);
    let Some(room) = records.0.get_mut(used..) else { return Outcome::Odd };
    let mut memory = Looks { shared: cx.shared, root: regs.cr3, page: 1, at: 0 };
    tap::run(step, first, &moment, &mut memory, room)
}

/// The time-stamp counter, which is the guest's too.
fn time() -> u64 {
    let (low, high): (u64, u64);
    // SAFETY: reads a counter.
    unsafe { asm!("rdtsc", out("rax") low, out("rdx") high, options(nomem, nostack)) };
    high << 32 | low
}

/// Guest memory, by walks that set nothing.
struct Looks<'a> {
    shared: &'a Shared,
    root: u64,
    /// The page (GVA) that was looked at last, and its HVA in the view of RAM; zero if there is none.
    page: u64,
    at: u64,
}

impl Looks<'_> {
    /// HVA of a page; zero if there is none, `None` if a table or the page is not RAM.
    fn find(&self, gva: u64) -> Option<u64> {
        let gpa = if canonical(gva) { walk::look(self.shared, self.root, gva)? } else { None };
        let Some(gpa) = gpa else { return Some(0) };
        ram_offset(self.shared, gpa).map(|offset| here(RAM) as u64 + offset)
    }
}

impl Memory for Looks<'_> {
    fn read(&mut self, gva: u64, to: &mut [u8]) -> Option<bool> {
        let page = gva & !(PAGE - 1);
        if page != self.page {
            (self.page, self.at) = (page, self.find(gva)?);
        }
        if self.at != 0 {
            copy(self.at + gva % PAGE, to);
        }
        Some(self.at != 0)
    }
}

/// Copies bytes of RAM, which others may write meanwhile, inside one page.
fn copy(from: u64, to: &mut [u8]) {
    // SAFETY: the caller's page is in the view of RAM, and `to` is its own.
    unsafe {
        asm!("rep movsb", inout("rsi") from => _, inout("rdi") to.as_mut_ptr() => _,
            inout("rcx") to.len() => _, options(nostack, preserves_flags));
    }
}

/// What the compiler makes of copies of structures. There is no C library here.
#[cfg(freestanding)]
mod library {
    use core::arch::asm;

    /// # Safety
    /// As in C.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
        // SAFETY: as asked of the caller.
        unsafe {
            asm!("rep movsb", inout("rsi") from => _, inout("rdi") to => _,
                inout("rcx") len => _, options(nostack, preserves_flags));
        }
        to
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::{
        alloc::{Layout, alloc_zeroed},
        boxed::Box,
    };
    use wedge_abi::{TapTable, VcpuPage};

    /// Pages of zeroes.
    ///
    /// # Safety
    /// Zeroes are a value of it.
    unsafe fn zeroed<T>() -> Box<T> {
        // SAFETY: as a box allocates it, and as asked of the caller.
        unsafe { Box::from_raw(alloc_zeroed(Layout::new::<T>()).cast()) }
    }

    fn pages() -> (Box<VcpuPage>, Box<Shared>, Box<Taps>) {
        // SAFETY: all of them are made of numbers.
        unsafe { (Box::default(), zeroed(), zeroed()) }
    }

    /// A kick takes back the record of the point that was passed last. If that point made no record, the record before it stays.
    #[test]
    fn where_there_is_no_record_none_can_be_taken_back() {
        let (mut vcpu, mut s, mut taps) = pages();
        (taps.used, taps.last) = (400, 200);
        assert!(
            pass_by(&mut Context::of(&mut vcpu, &mut s), &mut taps) && vcpu.run.go == go::BLOCK
        );
        assert_eq!((taps.used, taps.last), (400, 400));
    }

    #[test]
    fn what_only_runs_to_its_exit_goes_no_further() {
        let (mut vcpu, mut s, mut taps) = pages();
        let mut cx = Context::of(&mut vcpu, &mut s);
        cx.vcpu.run.go = go::LEAVE;
        let passes = pass_by(&mut cx, &mut taps);
        assert!(!passes && cx.vcpu.exit.info != TAP_ODD, "nobody has a point there");
        cx.vcpu.regs.rip = 0x1000;
        TapTable::place(&mut taps.points.0, 0x1000, 1).expect("room");
        assert!(!pass_by(&mut cx, &mut taps) && cx.vcpu.exit.info == TAP_ODD);
        cx.vcpu.run.go = go::BLOCK;
        assert!(!pass_by(&mut cx, &mut taps), "it may not look at memory");
    }
}
