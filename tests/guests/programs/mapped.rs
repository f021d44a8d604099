//! Maps a file, shared, and has all of its pages: `mapped FILE` says `mapped` and waits until it is killed; `mapped FILE dirty`
//! writes a byte of each page back as it is, and ends.

use std::{
    env,
    ffi::{c_int, c_long, c_void},
    fs::OpenOptions,
    hint,
    os::fd::AsRawFd,
    ptr, thread,
    time::Duration,
};

const PAGE: usize = 4096;
const READ_WRITE: c_int = 3;
const SHARED: c_int = 1;

unsafe extern "C" {
    fn mmap(at: *mut c_void, len: usize, prot: c_int, flags: c_int, fd: c_int, offset: c_long) -> *mut c_void;
}

fn main() {
    let arguments: Vec<_> = env::args().collect();
    let file = OpenOptions::new().read(true).write(true).open(&arguments[1]).expect("a file");
    let len = file.metadata().expect("its length").len() as usize;
    // SAFETY: a new mapping, at a place of the kernel's choice.
    let start = unsafe { mmap(ptr::null_mut(), len, READ_WRITE, SHARED, file.as_raw_fd(), 0) };
    assert!(start as isize != -1, "it cannot be mapped");
    let dirty = arguments.len() > 2;
    for at in (0..len).step_by(PAGE) {
        // SAFETY: inside the mapping, and the file keeps its length.
        unsafe {
            let byte = start.cast::<u8>().add(at);
            let value = hint::black_box(byte.read_volatile());
            if dirty {
                byte.write_volatile(value);
            }
        }
    }
    println!("mapped");
    while !dirty {
        thread::sleep(Duration::from_secs(1000));
    }
}
