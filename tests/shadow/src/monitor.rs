//! A run: what `fast::Fast` does around its slots, with a guest that does random things.

use crate::{
    guest::{Exit, WORLD, Wedge, World, with},
    process,
    tables::{self, Tables},
    tlb::Tlb,
};
use anyhow::{Result, bail};
use fast::{Answer, Selection, Slots};
use oracle::random::Random;
use ram::Ram;
use wedge::Pages;
use wedge_abi::BIAS;
use x86::{
    control::{cr0, cr4, efer},
    paging::{self, Access, Roots},
};
use x86_interp::{Flush, GuestRam, Record};

/// CPUID, which hosts that cannot make it fault have patched in a copy.
const CPUID: [u8; 2] = [0x0f, 0xa2];
/// What pages start and end with: some of it opens protection keys where they meet.
const STARTS: [[u8; 2]; 4] = [[0xef, 0x90], [0x01, 0xef], [0xae, 0x2f], [0x2f, 0x90]];
const ENDS: [[u8; 2]; 3] = [[0x90, 0x0f], [0x0f, 0x01], [0x0f, 0xae]];
const PAGE: u64 = 4096;

/// A guest, from one seed, on one thread: guests of one process use the same fixed addresses.
pub struct Run {
    seed: u64,
    /// An event is one of so many; those from 100 on are nothing.
    events: u64,
    slots: Slots<Wedge>,
    /// What the guest has done since the slots were told.
    record: Record,
    /// The space that an identifier was used for last.
    loaded: [u64; tables::PCIDS as usize],
}

impl Run {
    /// A guest with nothing mapped.
    ///
    /// # Errors
    /// If the host has no memory.
    pub fn new(seed: u64) -> Result<Self> {
        let ram = Ram::with_copies(tables::RAM_LEN)?;
        let pages = Pages::new()?;
        process::open_windows(&ram, &pages)?;
        let (tables, tlb, mut random) = (Tables::new(&ram), Tlb::default(), Random::new(seed));
        process::search(seed % 2 == 1);
        process::keep(!seed.is_multiple_of(5));
        for frame in 0..tables::FRAMES {
            ram.write(
                tables::FIRST_FRAME + frame * PAGE + 64 * frame,
                &CPUID[..(frame % 3) as usize],
            );
            let page = tables::FIRST_FRAME + frame * PAGE;
            // Those without CPUID have whole borders.
            if frame % 3 != 0 {
                ram.write(page, &random.pick(&STARTS));
                ram.write(page + PAGE - 2, &random.pick(&ENDS));
            }
        }
        let slots = Slots::new(ram.clone(), pages.base(), true);
        let (user, exit, violation) = (true, Exit::None, None);
        // In some the same pages come and go.
        let calm = seed % 4 == 3;
        (0..if calm { 3_000 } else { 0 }).for_each(|_| tables.change(&ram, &mut random));
        let world = World {
            ram,
            pages,
            tables,
            tlb,
            gone_to: 0,
            code: Vec::new(),
            random,
            space: 0,
            user,
            calm,
            exit,
            violation,
            only: None,
        };
        WORLD.set(Some(world));
        // In some runs little is flushed, and mappings grow many.
        let events = [100, 500, 2500][(seed % 3) as usize];
        let mut run = Self { seed, events, slots, record: Record::default(), loaded: [0, 1, 2] };
        run.load_root();
        for area in tables::KERNEL {
            run.give_to_kernel(area.wrapping_add(BIAS));
        }
        Ok(run)
    }

    /// Lets the guest run.
    ///
    /// # Errors
    /// A mapping grants what no TLB would, or an access is not answered as the guest's tables say.
    pub fn steps(&mut self, steps: u64) -> Result<()> {
        for step in 0..steps {
            self.step()?;
            if let Some(violation) = with(|world| world.violation.take()) {
                bail!("seed {}, step {step}: {violation}", self.seed);
            }
        }
        Ok(())
    }

    fn step(&mut self) -> Result<()> {
        self.event();
        self.synchronize()?;
        let roots = with(|world| roots(world));
        if !self.slots.run(true, roots)? {
            return Ok(());
        }
        self.slots.take_invalidated();
        match with(|world| world.exit) {
            Exit::None => {}
            Exit::Access(gva, access) => self.access(gva, access)?,
            Exit::Invalidate(linear) => self.invalidate(linear),
        }
        Ok(())
    }

    /// As `Fast::synchronize`.
    fn synchronize(&mut self) -> Result<()> {
        let mut record = std::mem::take(&mut self.record);
        let (roots, pcid) = with(|world| {
            record.stale_pages = world.ram.take_stale_code();
            (roots(world), world.pcid())
        });
        self.slots.apply(&record, roots, pcid);
        with(|world| self.slots.select(Selection::uncounted(pcid, roots), &world.pages))?;
        with(|world| world.fill()); // a slot that is recycled loads translations
        Ok(())
    }

    /// Something that the interpreter does, or another part of the machine.
    fn event(&mut self) {
        let (event, some) = with(|world| {
            let frame = tables::FIRST_FRAME + world.random.below(tables::FRAMES) * PAGE;
            (world.random.below(self.events), frame)
        });
        match event {
            0..4 => self.switch(true),
            4..8 => self.switch(false),
            8..10 => self.flush_space(),
            10 => self.flush_all(),
            11..13 => self.invalidate_elsewhere(),
            13..21 if with(|world| world.calm && !world.random.chance(2)) => {}
            13..16 => {
                with(|world| world.ram.mark_code(some));
                self.record.code_pages.push(some);
            }
            16..19 => with(|world| {
                let at = world.random.pick(&[0, 8, PAGE - 8]);
                world.write(some + at);
            }),
            19 => with(|world| world.clear(tables::EMPTY_FRAME)),
            20 => process::refuse_after(with(|world| world.random.below(40))),
            _ => {}
        }
    }

    /// MOV CR3, with or without a flush; who gives an identifier to another space flushes.
    fn switch(&mut self, flush: bool) {
        let (space, pcid) = with(|world| {
            world.space = world.random.below(tables::SPACES);
            (world.space, world.pcid())
        });
        if flush || self.loaded[pcid as usize] != space {
            self.loaded[pcid as usize] = space;
            self.record.flushes.push(Flush::Space { pcid: pcid as u16 });
            with(|world| world.tlb.flush_space(pcid));
        }
        self.load_root();
    }

    fn load_root(&mut self) {
        with(|world| {
            let roots = roots(world);
            let page = world.pages.vcpu_page();
            (page.regs.cr3, page.run.walks) = (roots.cr3, wedge_abi::walks::FOUR_LEVELS);
            world.fill();
        });
    }

    /// INVPCID of a PCID that need not be the current one.
    fn flush_space(&mut self) {
        let pcid = with(|world| world.random.below(tables::PCIDS));
        self.record.flushes.push(Flush::Space { pcid: pcid as u16 });
        with(|world| {
            world.tlb.flush_space(pcid);
            world.fill();
        });
    }

    fn flush_all(&mut self) {
        self.record.flushes.push(Flush::All);
        with(|world| {
            world.tlb.flush_all();
            world.fill();
        });
    }

    /// INVPCID of one page under some PCID; the model does not ask for more to be dropped.
    fn invalidate_elsewhere(&mut self) {
        let (pcid, linear) = with(|world| {
            let pcid = world.random.below(tables::PCIDS);
            (pcid, tables::some_page(&mut world.random, false))
        });
        self.record.flushes.push(Flush::Page { pcid: pcid as u16, linear });
        with(|world| {
            world.tlb.flush_page(pcid, linear);
            world.fill();
        });
    }

    /// INVLPG, interpreted.
    fn invalidate(&mut self, linear: u64) {
        let pcid = with(|world| world.pcid());
        self.record.flushes.push(Flush::Page { pcid: pcid as u16, linear });
        with(|world| {
            world.tlb.flush_page(pcid, linear);
            world.fill();
        });
    }

    /// As `Fast::answer` and what follows it: the access is mapped for, or interpreted.
    fn access(&mut self, gva: u64, access: Access) -> Result<()> {
        let roots = with(|world| roots(world));
        loop {
            let answer = self.slots.answer(roots, gva, access)?;
            with(World::fill);
            for page in self.slots.current()?.take_marked() {
                self.slots.protect(page);
            }
            match answer {
                Answer::Mapped => return Ok(()),
                Answer::Interpret => {
                    with(|world| world.interpret(gva, access));
                    return Ok(());
                }
                Answer::NeedsRegion(hva) => self.give_to_kernel(hva),
            }
        }
    }

    fn give_to_kernel(&mut self, hva: u64) {
        with(|world| world.pages.give_to_kernel(hva));
        self.slots.give_to_kernel(hva);
    }
}

impl World {
    fn interpret(&mut self, gva: u64, access: Access) {
        let roots = roots(self);
        match paging::walk(&mut &self.ram, roots, gva, access) {
            Err(_) => self.must_be_denied(gva, access),
            Ok(found) if access.write => self.write(found.gpa),
            Ok(_) => {}
        }
        self.fill();
    }

    /// A device writes zeros.
    fn clear(&mut self, gpa: u64) {
        self.ram.write(gpa, &[0; PAGE as usize]);
        self.ram.note_write(gpa, PAGE);
    }

    /// A write that is noted: by the interpreter, or a device.
    fn write(&mut self, gpa: u64) {
        if self.ram.page(gpa).is_some() {
            let value = self.value();
            self.ram.store64(gpa, value);
            self.ram.note_write(gpa, 8);
        }
    }
}

fn roots(world: &World) -> Roots {
    Roots {
        cr0: cr0::PG | cr0::WP | cr0::PE,
        cr3: world.root() | world.pcid(),
        cr4: cr4::PAE | cr4::PGE | cr4::PCIDE | cr4::SMAP | cr4::SMEP,
        efer: efer::LME | efer::LMA | efer::NXE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use x86::paging::{A, D, NX, P, RW, US};

    const GVA: u64 = 0x5555_5540_3000;
    /// GVA of a page that stays in the page tables.
    const STAYS: u64 = GVA + PAGE;
    /// A run in which nothing is searched for what opens keys.
    const SEED: u64 = 2;
    /// A run in which code is searched.
    const SEARCHED: u64 = 1;

    /// A run with two mapped pages: `STAYS` in frame 3 and `GVA` in frame 1, both read once.
    fn run() -> Run {
        let mut run = Run::new(SEED).expect("the host gives memory");
        run.synchronize().expect("a slot");
        say(STAYS, frame(3));
        set(&mut run, frame(1));
        touch(&mut run, STAYS, false);
        touch(&mut run, GVA, false);
        assert_eq!(shown(), 0, "they are new");
        run
    }

    /// Has user code access a page, and the monitor record what the wedge mapped for the access.
    fn touch(run: &mut Run, gva: u64, write: bool) {
        let access = Access { write, user: true, ..Access::default() };
        with(|w| w.only = Some((gva, access)));
        let roots = with(|w| roots(w));
        let done = run.slots.run(true, roots).expect("the wedge runs");
        assert!(done && with(|w| w.exit == Exit::None && w.violation.is_none()));
    }

    fn frame(n: u64) -> u64 {
        (tables::FIRST_FRAME + n * PAGE) | P | US | A | NX
    }

    /// Sets the page-table entry of a GVA.
    fn say(gva: u64, value: u64) {
        with(|w| w.ram.store64(w.tables.entry_for(gva), value));
    }

    /// Sets the entry of `GVA` while its process runs, and flushes the process's space.
    fn set(run: &mut Run, value: u64) {
        say(GVA, value);
        let (ram, roots) = with(|w| (w.ram.clone(), roots(w)));
        run.slots.current().expect("a slot").revalidate(&ram, roots).expect("compared");
    }

    /// Sets the entry of `GVA` while another process runs under the same identifier, and switches back.
    fn set_meanwhile(run: &mut Run, value: u64) {
        say(GVA, value);
        let (pcid, roots) = with(|w| (w.pcid(), roots(w)));
        let flush = Flush::Space { pcid: pcid as u16 };
        let record = Record { flushes: vec![flush], ..Record::default() };
        let others = Roots { cr3: with(|w| w.tables.root(1)) | pcid, ..roots };
        run.slots.apply(&record, others, pcid);
        run.synchronize().expect("its slot");
    }

    fn shown() -> u64 {
        with(|w| w.pages.vcpu_page().counters.shown)
    }

    /// A page that is missing when its process comes back keeps a closed mapping. The same frame reopens the mapping, and
    /// another frame gets a new one.
    #[test]
    fn what_comes_back_is_shown_again() {
        let mut run = run();
        set(&mut run, frame(1) | RW | D);
        touch(&mut run, GVA, true);
        set_meanwhile(&mut run, 0);
        set(&mut run, frame(1) | RW | D);
        touch(&mut run, GVA, false);
        assert_eq!(shown(), 2, "it is back");
        set_meanwhile(&mut run, 0);
        set(&mut run, frame(2) | RW | D);
        touch(&mut run, GVA, false);
        assert_eq!(shown(), 2, "another has come");
    }

    /// A wedge that maps a run of pages maps nothing over searched code that lies behind the first page.
    #[test]
    fn searched_code_stays_when_the_page_before_it_is_read() {
        let mut run = Run::new(SEARCHED).expect("the host gives memory");
        run.synchronize().expect("a slot");
        say(GVA, frame(8) & !NX);
        say(STAYS, frame(9) & !NX);
        with(|w| w.ram.write(frame(9) & paging::ADDRESS, &[0; PAGE as usize]));
        let fetch = Access { fetch: true, user: true, ..Access::default() };
        run.access(STAYS, fetch).expect("the page is searched, and mapped");
        touch(&mut run, GVA, false);
    }

    /// Maps a frame at `GVA` anew, has user code execute it, and says what the wedge has left to the monitor.
    fn executes_again(run: &mut Run, frame: u64) -> Exit {
        let fetch = Access { fetch: true, user: true, ..Access::default() };
        set(run, 0);
        set(run, frame & !NX);
        with(|w| w.only = Some((GVA, fetch)));
        let roots = with(|w| roots(w));
        run.slots.run(true, roots).expect("the wedge runs");
        let exit = with(|w| w.exit);
        run.access(GVA, fetch).expect("the page is searched, and mapped");
        exit
    }

    /// A wedge maps the shared copy of a page by itself until somebody writes the page.
    #[test]
    fn searched_code_is_mapped_by_wedges_until_it_is_written() {
        let mut run = Run::new(SEARCHED).expect("the host gives memory");
        run.synchronize().expect("a slot");
        let asked = Exit::Access(GVA, Access { fetch: true, user: true, ..Access::default() });
        let gpa = frame(9) & paging::ADDRESS;
        with(|w| w.ram.write(gpa, &[0; PAGE as usize]));
        assert_eq!(executes_again(&mut run, frame(9)), asked, "nobody has searched the page");
        assert_eq!(executes_again(&mut run, frame(9)), Exit::None);
        with(|w| w.ram.write_gpa(gpa, &[1])).expect("RAM");
        run.synchronize().expect("its slot");
        assert_eq!(executes_again(&mut run, frame(9)), asked, "the page has been written");
        assert_eq!(executes_again(&mut run, frame(9)), Exit::None);
        // What opens keys may lie across a border of this one.
        with(|w| w.ram.write_gpa(gpa, &[0x2f])).expect("RAM");
        run.synchronize().expect("its slot");
        for _ in 0..2 {
            assert_eq!(executes_again(&mut run, frame(9)), asked, "each program has its own copy");
        }
    }

    /// A page that becomes writable keeps its mapping, whose protection changes.
    #[test]
    fn a_right_is_added_to_what_is_mapped() {
        let mut run = run();
        set(&mut run, frame(1) | RW | D);
        touch(&mut run, GVA, true);
        assert_eq!(shown(), 1);
    }

    /// A page that its running process gives back is unmapped, and mapped anew when the page returns.
    #[test]
    fn what_is_given_back_is_mapped_anew() {
        let mut run = run();
        set(&mut run, 0);
        set(&mut run, frame(1) | RW | D);
        touch(&mut run, GVA, false);
        assert_eq!(shown(), 0);
    }
}
