//! Devices whose drivers do anything, while things happen outside.

use std::{
    io::{self, Write},
    sync::{Arc, Mutex},
};

use host_fake::FakeEntropy;
use virtio::{
    Block, BlockBackend, CONSOLE_RECEIVE, Console, FileServer, Fs, InputBuffer, NET_RECEIVE, Net,
    NetBackend, Rng, VirtioDevice,
    vsock::{self, Vsock, VsockBackend, VsockHeader},
};

use super::{all, none};
use crate::devices::{Action, Guest};
use fuzzer::Target;

pub(crate) const BLOCK: Target = Target { name: "block", seeds: none, run: block };
pub(crate) const NET: Target = Target { name: "net", seeds: none, run: net };
pub(crate) const FS: Target = Target { name: "fs", seeds: none, run: fs };
pub(crate) const VSOCK: Target = Target { name: "vsock", seeds: none, run: vsock };
pub(crate) const RNG: Target = Target { name: "rng", seeds: none, run: rng };
pub(crate) const CONSOLE: Target = Target { name: "console", seeds: none, run: console };

/// Deeds of one input.
const MOST: usize = 400;
const SECTORS: usize = 64;
const READY: u8 = 15;

/// Has a driver do all of it, and the device be reset then: it works again.
fn torture(
    device: impl VirtioDevice + 'static,
    bytes: &[u8],
    outside: impl Fn(u8, &Guest),
) -> Guest {
    let mut guest = Guest::new(device);
    guest.start(u64::MAX);
    for action in all::<Action>(bytes, MOST) {
        match action {
            Action::Outside(event) => outside(event, &guest),
            action => guest.perform(&action),
        }
    }
    guest.reset();
    guest.start(0);
    assert_eq!(guest.status(), READY, "a reset mends everything");
    guest
}

/// A disk that insists on its contract.
struct Disk(Vec<u8>);

impl Disk {
    fn range(&mut self, offset: u64, len: u64) -> &mut [u8] {
        assert!(offset.is_multiple_of(512) && len.is_multiple_of(512), "whole sectors");
        &mut self.0[offset as usize..(offset + len) as usize]
    }
}

impl BlockBackend for Disk {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }
    fn is_read_only(&self) -> bool {
        false
    }
    fn read_at(&mut self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        data.copy_from_slice(self.range(offset, data.len() as u64));
        Ok(())
    }
    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.range(offset, data.len() as u64).copy_from_slice(data);
        Ok(())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
    fn discard(&mut self, offset: u64, len: u64) -> io::Result<()> {
        self.range(offset, len);
        Ok(())
    }
    fn write_zeroes(&mut self, offset: u64, len: u64, _: bool) -> io::Result<()> {
        self.range(offset, len).fill(0);
        Ok(())
    }
}

fn block(bytes: &[u8]) {
    let disk = Block::new(Box::new(Disk(vec![7; SECTORS * 512])), "fuzz");
    let mut guest = torture(disk, bytes, |_, _| {});
    guest.header(0x4000, 0, 63);
    guest.set_memory(0x6000, &[0xee]);
    guest.describe(0, 0, 0x4000, 16, 1, 1);
    guest.describe(0, 1, 0x5000, 512, 3, 2);
    guest.describe(0, 2, 0x6000, 1, 2, 0);
    guest.offer(0, 0);
    guest.notify(0);
    assert_eq!((guest.used_index(0), guest.memory::<1>(0x6000)), (1, [0]), "a read succeeds");
}

/// A cable on which every frame comes back.
#[derive(Default)]
struct Loop(Vec<Vec<u8>>);

impl NetBackend for Loop {
    fn send(&mut self, frame: &[u8]) {
        assert!((14..=1500 + 18).contains(&frame.len()), "{} bytes", frame.len());
        self.0.push(frame.to_vec());
        self.0.truncate(64);
    }
    fn receive(&mut self, frame: &mut Vec<u8>) -> bool {
        self.0.pop().map(|next| *frame = next).is_some()
    }
}

fn net(bytes: &[u8]) {
    let net = Net::new(Box::new(Loop::default()), [2, 0, 0, 0, 0, 1]);
    torture(net, bytes, |_, guest| guest.doorbell.ring(NET_RECEIVE));
}

/// Gives back what it is asked, as far as there is room.
struct Echo(Vec<u8>);

impl FileServer for Echo {
    fn answer(&mut self, request: &[u8], room: usize) -> &[u8] {
        assert!(request.len() <= virtio::FS_MAX_MESSAGE && room <= virtio::FS_MAX_MESSAGE);
        self.0.clear();
        self.0.extend(request.iter().cycle().take(room.min(request.len() * 2)));
        &self.0
    }
}

fn fs(bytes: &[u8]) {
    torture(Fs::new(Box::new(Echo(Vec::new())), "tag"), bytes, |_, _| {});
}

/// Answers each packet by one of its kind.
#[derive(Default)]
struct Answers(Vec<(VsockHeader, Vec<u8>)>);

impl VsockBackend for Answers {
    fn packet(&mut self, header: &VsockHeader, data: &[u8]) {
        self.0.push((*header, data.to_vec()));
        self.0.truncate(64);
    }
    fn next(&mut self, room: usize, data: &mut Vec<u8>) -> Option<VsockHeader> {
        let (header, mut content) = self.0.pop()?;
        content.truncate(room);
        *data = content;
        Some(header)
    }
    fn reset(&mut self) {
        self.0.clear();
    }
}

fn vsock(bytes: &[u8]) {
    let device = Vsock::new(Box::new(Answers::default()), 3);
    torture(device, bytes, |_, guest| guest.doorbell.ring(vsock::RECEIVE));
}

fn rng(bytes: &[u8]) {
    torture(Rng::new(Arc::new(FakeEntropy::new(1))), bytes, |_, _| {});
}

#[derive(Clone, Default)]
struct Screen(Arc<Mutex<Vec<u8>>>);

impl Write for Screen {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let mut shown = self.0.lock().expect("sound");
        shown.clear();
        shown.extend(data);
        Ok(data.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn console(bytes: &[u8]) {
    let (keys, screen) = (InputBuffer::default(), Screen::default());
    let console = Console::new(Box::new(keys.clone()), Box::new(screen.clone()));
    let size = console.size();
    let mut guest = torture(console, bytes, |event, guest| {
        if event % 2 == 0 {
            keys.push(&[event; 5]);
            guest.doorbell.ring(CONSOLE_RECEIVE);
        } else {
            size.set(event.into(), 25);
            guest.doorbell.config_changed();
        }
    });
    guest.set_memory(0x4000, b"hello");
    guest.describe(1, 0, 0x4000, 5, 0, 0);
    guest.offer(1, 0);
    guest.notify(1);
    let shown = screen.0.lock().expect("sound");
    assert_eq!((guest.used_index(1), &shown[..]), (1, &b"hello"[..]), "output arrives");
}
