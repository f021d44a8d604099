//! How the kernel hands out memory. Pages whose frames ascend with their addresses cost the machine one mapping of the host's, others
//! one each; and each page that is touched for the first time costs the program a fault.

use std::fs;

/// Sizes of pieces of memory that a program may get at a first touch, KiB. With larger ones programs are no faster.
const SIZES: [u32; 3] = [16, 32, 64];

/// Has the kernel hand out memory in the order, and in pieces of the size, that are cheapest here.
pub fn set_up() {
    keep_in_order();
    hand_out_in_pieces();
}

/// Has the kernel give pages that a CPU has freed back to its allocator early, which puts them together again. It would keep
/// tens of MiB of them in a list, and hand them out last in, first out: the frames of a file would come in descending order.
fn keep_in_order() {
    // A part of memory so small that the kernel's own minimum holds: four batches. A kernel without the setting is slower.
    let _ = fs::write("/proc/sys/vm/percpu_pagelist_high_fraction", "1000000");
}

/// Has the kernel answer a first touch with several pages, as far as it uses huge pages at all (Linux 6.8; older ones have no such
/// setting, and are slower). What the command line says of this holds.
fn hand_out_in_pieces() {
    if fs::read_to_string("/proc/cmdline").is_ok_and(|line| line.contains("thp_anon=")) {
        return;
    }
    for size in SIZES {
        let setting = format!("/sys/kernel/mm/transparent_hugepage/hugepages-{size}kB/enabled");
        let _ = fs::write(setting, "inherit");
    }
}
