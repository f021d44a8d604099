//! The PVH entry (Xen docs/misc/pvh.pandoc, public/arch-x86/hvm/start_info.h): 32-bit protected mode
//! at the address an ELF note gives, EBX pointing to `hvm_start_info`.

use crate::entry::{protected_mode, with};
use crate::image::Image;
use crate::place::{Loader, PAGE};
use crate::{BootProtocol, BootRequest, Error, layout};
use x86::{Vcpu, reg};

const MAGIC: u32 = 0x336e_c578;
/// First version with a memory map.
const VERSION: u32 = 1;
/// Longest command line we pass, in bytes without the terminating zero.
const CMDLINE_MAX: usize = 4095;

/// Places a kernel with a PVH note, its modules and its start info.
pub(crate) fn load(
    loader: &mut Loader<'_>,
    request: &BootRequest<'_>,
    rsdp: u64,
    image: &Image<'_>,
) -> Result<Vcpu, Error> {
    let why = "it has no Xen PHYS32_ENTRY note (build it with CONFIG_PVH)";
    let (file, protocol) = ("kernel", BootProtocol::Pvh);
    let entry = image.pvh_entry.ok_or(Error::WrongProtocol { file, protocol, why })?;
    image.place(loader)?;
    image.check_entry(entry.into())?;
    let start_info = place_start_info(loader, request, rsdp)?;
    Ok(with(protected_mode(loader, entry)?, &[(reg::RBX, start_info)]))
}

/// Builds `hvm_start_info` and what it points to; returns its GPA.
fn place_start_info(
    loader: &mut Loader<'_>,
    request: &BootRequest<'_>,
    rsdp: u64,
) -> Result<u64, Error> {
    let cmdline = place_string(loader, "kernel", request.cmdline)?;
    let (modules, count) = place_modules(loader, request)?;
    let (map, entries) = place_memory_map(loader)?;
    let mut info = Vec::new();
    info.extend([MAGIC, VERSION, 0, count].map(u32::to_le_bytes).concat());
    info.extend([modules, cmdline, rsdp, map].map(u64::to_le_bytes).concat());
    info.extend([entries, 0].map(u32::to_le_bytes).concat());
    loader.place_info("start info", &info)
}

/// `hvm_modlist_entry`: GPA, size, command line, reserved.
fn place_modules(loader: &mut Loader<'_>, request: &BootRequest<'_>) -> Result<(u64, u32), Error> {
    let mut list = Vec::new();
    for module in request.modules {
        let len = module.data.len() as u64;
        let start = loader.reserve_high("module", len, PAGE, ram::HIGH_BASE)?;
        loader.memory().write_gpa(start, module.data)?;
        let cmdline = place_string(loader, "module", module.cmdline)?;
        list.extend([start, len, cmdline, 0].map(u64::to_le_bytes).concat());
    }
    let count = request.modules.len() as u32;
    if count == 0 {
        return Ok((0, 0));
    }
    Ok((loader.place_info("module list", &list)?, count))
}

/// `hvm_memmap_table_entry`: GPA, size, kind, reserved.
fn place_memory_map(loader: &mut Loader<'_>) -> Result<(u64, u32), Error> {
    let map = layout::memory_map(loader.memory());
    let mut table = Vec::new();
    for entry in &map {
        let len = entry.range.end - entry.range.start;
        table.extend([entry.range.start, len].map(u64::to_le_bytes).concat());
        table.extend([entry.kind as u32, 0].map(u32::to_le_bytes).concat());
    }
    Ok((loader.place_info("memory map", &table)?, map.len() as u32))
}

/// Places a command line; an empty one is address zero, which means none.
fn place_string(loader: &mut Loader<'_>, of: &'static str, line: &str) -> Result<u64, Error> {
    if line.is_empty() {
        return Ok(0);
    }
    if line.len() > CMDLINE_MAX {
        return Err(Error::CommandLineTooLong { len: line.len(), max: CMDLINE_MAX });
    }
    loader.place_info("command line", &crate::zero_terminated(of, line)?)
}
