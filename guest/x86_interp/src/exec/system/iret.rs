//! IRET: from handlers in every mode, to outer levels, compatibility code, virtual-8086 mode and
//! nested tasks (SDM 6.12, 6.14.3, 20.2.3).

use super::returning::Return;
use crate::{
    cpu::Cpu, exec::Choice, op::Op, segmentation::virtual_8086_segment, system::System,
    task::TaskSwitch,
};
use iced_x86::{Instruction, Mnemonic};
use std::{
    mem,
    sync::atomic::{Ordering, fence},
};
use x86::{Fault, control::cr0, flags, reg, seg};

fn iret<S: System, const SIZE: usize>(
    cpu: &mut Cpu<S>,
    sys: &mut S,
    _: &Op<S>,
) -> Result<(), Fault> {
    // It serializes (SDM 8.3).
    fence(Ordering::SeqCst);
    if mem::take(&mut cpu.vcpu.nmi_blocked) {
        sys.nmi_ended();
    }
    if cpu.vcpu.cr0 & cr0::PE == 0 || cpu.vcpu.rflags & flags::VM != 0 {
        return cpu.iret_real::<SIZE>(sys);
    }
    if cpu.vcpu.rflags & flags::NT != 0 {
        return cpu.iret_task(sys);
    }
    cpu.iret_protected::<SIZE>(sys)
}

impl<S: System> Cpu<S> {
    fn iret_real<const SIZE: usize>(&mut self, sys: &mut S) -> Result<(), Fault> {
        self.check_virtual_iopl()?;
        let rip = self.word::<SIZE>(sys, 0)?;
        let selector = self.word::<SIZE>(sys, 1)? as u16;
        let image = self.word::<SIZE>(sys, 2)?;
        let cs = self.real_segment(seg::CS, selector);
        self.check_far_target(&cs, rip)?;
        self.drop_stack(3 * SIZE as u64);
        self.vcpu.seg[seg::CS] = cs;
        self.merge_flags(image, SIZE, flags::RF);
        self.jump(rip);
        Ok(())
    }

    /// NT: back to the task the TSS links to; long mode has no tasks.
    fn iret_task(&mut self, sys: &mut S) -> Result<(), Fault> {
        if self.vcpu.long_mode() {
            return Err(Fault::gp(0));
        }
        let base = self.vcpu.tr.base;
        let link = self.load_system::<2>(sys, self.wrap_linear(base))? as u16;
        self.switch_task(sys, link, TaskSwitch::Return, self.vcpu.rflags)
    }

    fn iret_protected<const SIZE: usize>(&mut self, sys: &mut S) -> Result<(), Fault> {
        let size = SIZE as u64;
        // CS first, and of its word and that of SS only the selector: as with RETF.
        let selector = self.peek::<2>(sys, size)? as u16;
        let rip = self.word::<SIZE>(sys, 0)?;
        let image = self.word::<SIZE>(sys, 2)?;
        let leaves = SIZE == 4 && image & flags::VM != 0 && self.vcpu.cpl() == 0;
        if leaves && !self.vcpu.long_mode() {
            return self.enter_virtual_8086(sys, rip, selector, image);
        }
        let cs = self.return_segment(sys, selector)?;
        let outward = cs.rpl() > self.vcpu.cpl();
        // 64-bit handlers always find a stack pointer in the frame.
        let stack = if outward || self.vcpu.is_64bit() {
            let rsp = self.word::<SIZE>(sys, 3)?;
            let selector = self.peek::<2>(sys, 4 * size)? as u16;
            Some((self.return_stack(sys, &cs, selector)?, rsp))
        } else {
            None
        };
        let rip = self.check_far_target(&cs, rip)?;
        if stack.is_none() {
            self.drop_stack(3 * size);
        }
        let resume = if SIZE == 2 { 0 } else { flags::RF };
        self.merge_flags(image, SIZE, resume);
        self.finish_return(Return { cs, rip, stack }, 0);
        Ok(())
    }

    /// The frame goes on with ESP SS ES DS FS GS; the program runs at CPL 3.
    fn enter_virtual_8086(
        &mut self,
        sys: &mut S,
        rip: u64,
        cs: u16,
        image: u64,
    ) -> Result<(), Fault> {
        let mut words = [0; 6];
        for (n, word) in words.iter_mut().enumerate() {
            *word = self.word::<4>(sys, 3 + n as u64)?;
        }
        let [esp, ss, es, ds, fs, gs] = words;
        let order = [es, cs.into(), ss, ds, fs, gs];
        self.vcpu.rflags = image & flags::ALL | flags::FIXED;
        self.vcpu.seg = order.map(|selector| virtual_8086_segment(selector as u16));
        self.vcpu.gpr[reg::RSP] = esp;
        self.update_view();
        self.jump(rip & 0xffff);
        Ok(())
    }
}

pub(super) fn select<S: System>(insn: &Instruction) -> Option<Choice<S>> {
    Some(match insn.mnemonic() {
        Mnemonic::Iret => (iret::<S, 2>, true),
        Mnemonic::Iretd => (iret::<S, 4>, true),
        Mnemonic::Iretq => (iret::<S, 8>, true),
        _ => return None,
    })
}
