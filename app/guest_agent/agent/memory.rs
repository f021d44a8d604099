//! How the guest's kernel hands out memory. Pages whose frames ascend with their addresses share one mapping of the host's, while other
//! pages need one each. The first touch of a page costs the program a fault.

use std::fs;

/// Sizes of pieces of memory that a program may get at a first touch, KiB. With larger ones programs are no faster.
const SIZES: [u32; 3] = [16, 32, 64];

/// Has the kernel hand out memory in the order, and in pieces of the size, that are cheapest here.
pub fn set_up() {
    keep_in_order();
    hand_out_in_pieces();
}

/// Has the kernel give pages that a CPU has freed back to its allocator early, which puts the pages together again. Otherwise the
/// kernel keeps tens of MiB of them in a list, and hands out the last one first: the frames of a file come in descending order.
fn keep_in_order() {
    // A part of memory so small that the kernel's own minimum holds: four batches. A kernel without the setting is slower.
    let _ = fs::write("/proc/sys/vm/percpu_pagelist_high_fraction", "1000000");
}

/// Has the kernel answer a first touch with several pages, unless huge pages are switched off or the kernel's command line chooses
/// sizes itself.
fn hand_out_in_pieces() {
    if fs::read_to_string("/proc/cmdline").is_ok_and(|line| line.contains("thp_anon=")) {
        return;
    }
    for size in SIZES {
        let setting = format!("/sys/kernel/mm/transparent_hugepage/hugepages-{size}kB/enabled");
        // Linux before 6.8 has no such setting, and is slower.
        let _ = fs::write(setting, "inherit");
    }
}
