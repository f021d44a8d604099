//! Self-modifying code: what is executed is what is in memory.

use crate::lab::*;
use iced_x86::code_asm::*;
use x86::reg;
use x86_interp::GuestRam;

#[test]
fn a_store_into_the_same_block_takes_effect() {
    let mut lab = Lab::new();
    lab.kernel(|a| {
        let mut target = a.create_label();
        a.lea(rdi, ptr(target))?;
        a.mov(byte_ptr(rdi + 1), 7)?;
        a.set_label(&mut target)?;
        a.mov(bl, 1)
    });
    lab.finishes();
    assert_eq!(lab.gpr(reg::RBX), 7);
}

#[test]
fn a_store_into_another_block_takes_effect() {
    let mut lab = Lab::new();
    lab.code(64, USER, |a| a.mov(eax, 1).and_then(|()| a.ret()));
    lab.kernel(|a| {
        a.mov(rsi, USER)?;
        a.call(rsi)?;
        a.mov(ebx, eax)?;
        a.mov(byte_ptr(rsi + 1), 5)?;
        a.call(rsi)
    });
    lab.finishes();
    assert_eq!((lab.gpr(reg::RBX), lab.gpr(reg::RAX)), (1, 5));
    assert!(lab.cpu.counters.code_pages_dropped > 0);
}

#[test]
fn a_store_through_another_address_takes_effect() {
    let mut lab = Lab::new();
    lab.page(PAGE, USER | 7);
    lab.code(64, USER, |a| a.mov(eax, 1).and_then(|()| a.ret()));
    lab.kernel(|a| {
        a.mov(byte_ptr(PAGE + 0x800), cl)?; // caches the right to write
        a.mov(rsi, USER)?;
        a.call(rsi)?;
        a.mov(byte_ptr(PAGE + 1), 5)?;
        a.call(rsi)
    });
    lab.finishes();
    assert_eq!(lab.gpr(reg::RAX), 5);
}

#[test]
fn a_string_store_over_itself_takes_effect() {
    let mut lab = Lab::new();
    lab.kernel(|a| {
        let mut target = a.create_label();
        a.lea(rdi, ptr(target))?;
        a.mov(ecx, 3)?;
        a.mov(al, 0x90)?;
        a.rep().stosb()?;
        a.set_label(&mut target)?;
        a.inc(rbx)
    });
    lab.finishes();
    assert_eq!(lab.gpr(reg::RBX), 0, "the INC became NOPs");
}

/// A CPU finishes a string instruction that overwrites its own bytes, unless an interrupt comes.
#[test]
fn a_string_store_that_overwrites_itself_goes_on() {
    let mut lab = Lab::new();
    lab.code(64, PAGE + 8, |a| a.rep().stosb().and_then(|()| a.ret()));
    lab.kernel(|a| {
        a.mov(rdi, PAGE)?;
        a.mov(ecx, 0x900)?;
        a.mov(al, 0xc3)?; // RET
        a.mov(rsi, PAGE + 8)?;
        a.call(rsi)
    });
    lab.finishes();
    assert_eq!((lab.gpr(reg::RCX), lab.gpr(reg::RDI)), (0, PAGE + 0x900));
}

#[test]
fn a_remapped_page_runs_its_new_code() {
    let mut lab = Lab::new();
    lab.code(64, PAGE, |a| a.mov(eax, 1).and_then(|()| a.ret()));
    lab.code(64, PAGE + 0x1000, |a| a.mov(eax, 2).and_then(|()| a.ret()));
    let entry = PT + (PAGE - USER) / 4096 * 8;
    lab.kernel(|a| {
        a.mov(rsi, PAGE)?;
        a.call(rsi)?;
        a.mov(rcx, PAGE + 0x1000 + 7)?;
        a.mov(qword_ptr(entry), rcx)?;
        a.invlpg(byte_ptr(rsi))?;
        a.call(rsi)
    });
    lab.finishes();
    assert_eq!(lab.gpr(reg::RAX), 2);
}

#[test]
fn an_instruction_across_pages_runs_and_faults_on_the_second() {
    let mut lab = Lab::new();
    lab.code(64, PAGE + 0xffd, |a| a.mov(eax, 0x1234).and_then(|()| a.ret()));
    lab.kernel(|a| a.mov(rsi, PAGE + 0xffd).and_then(|()| a.call(rsi)));
    lab.finishes();
    assert_eq!(lab.gpr(reg::RAX), 0x1234);
    lab.page(PAGE + 0x1000, 0);
    lab.cpu.state_changed();
    lab.kernel(|a| a.call(rsi));
    assert_eq!(lab.lands(), x86::vector::PF);
    assert_eq!((lab.v().cr2, lab.coded_frame().1.rip), (PAGE + 0x1000, PAGE + 0xffd));
}

/// A guest that has code at every byte of its memory.
#[test]
fn what_is_kept_of_code_has_a_limit() {
    const MOST: usize = 1 << 19;
    let mut lab = Lab::new();
    lab.kernel(|a| a.nop());
    lab.sys.ram.write(LARGE, &vec![0x90; 1 << 21]);
    let mut largest = 0;
    for at in 0..30_000 {
        lab.v().rip = LARGE + at;
        lab.cpu.run(&mut lab.sys, 1);
        largest = largest.max(lab.cpu.kept_code());
    }
    assert!((MOST / 2..=MOST).contains(&largest), "{largest}");
}

/// Where other CPUs could see half of it, an instruction with LOCK is no load and store.
#[test]
fn locked_stores_into_code_take_effect() {
    let mut lab = Lab::new();
    lab.code(64, USER, |a| a.mov(eax, 1).and_then(|()| a.ret()));
    lab.kernel(|a| {
        a.mov(rsi, USER)?;
        a.call(rsi)?;
        a.lock().add(byte_ptr(rsi + 1), 5)?;
        a.call(rsi)?;
        a.mov(ebx, eax)?;
        a.mov(cl, 9)?;
        a.xchg(byte_ptr(rsi + 1), cl)?;
        a.call(rsi)
    });
    lab.finishes();
    assert_eq!((lab.gpr(reg::RBX), lab.gpr(reg::RAX)), (6, 9));
}
