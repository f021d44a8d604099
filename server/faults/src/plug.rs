//! A network interface whose cable can be pulled: its driver is told that the link is down. What happens to frames meanwhile is up to
//! the network's own process ([`crate::NetControl::set_link`]). A disk's driver, too, can be told that its
//! configuration has changed, although it has not.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, Ordering},
};

use virtio::{Doorbell, Net, Queue, RingError, VirtioDevice};

use crate::forward::forward_rest;

/// The end of a cable, in and out.
#[derive(Clone, Default)]
pub struct Plug(Arc<Inner>);

#[derive(Default)]
struct Inner {
    out: AtomicBool,
    doorbell: OnceLock<Doorbell>,
}

impl Plug {
    /// Tells the driver of the interface whether there is a link from now on.
    pub fn set_link(&self, up: bool) {
        self.0.out.store(!up, Ordering::SeqCst);
        self.announce();
    }

    /// Tells the driver of a device that its configuration has changed, which need not be so.
    pub fn announce(&self) {
        self.0.doorbell.get().into_iter().for_each(Doorbell::config_changed);
    }

    /// By this doorbell.
    pub fn connect(&self, doorbell: Doorbell) {
        // An interface has one, and is connected once.
        let _ = self.0.doorbell.set(doorbell);
    }
}

/// An interface with such a cable.
pub struct PluggedNet {
    device: Box<dyn VirtioDevice>,
    plug: Plug,
}

impl PluggedNet {
    /// `device` is a network interface.
    pub fn new(device: Box<dyn VirtioDevice>, plug: Plug) -> Self {
        Self { device, plug }
    }
}

impl VirtioDevice for PluggedNet {
    fn config(&self) -> Vec<u8> {
        let mut config = self.device.config();
        if self.plug.0.out.load(Ordering::SeqCst) {
            Net::unlink(&mut config);
        }
        config
    }

    fn process(&mut self, index: usize, queue: &mut Queue) -> Result<(), RingError> {
        self.device.process(index, queue)
    }

    forward_rest!();
}

#[cfg(test)]
mod tests {
    use super::*;
    use virtio::NetBackend;

    struct Nothing;

    impl NetBackend for Nothing {
        fn send(&mut self, _: &[u8]) {}
        fn receive(&mut self, _: &mut Vec<u8>) -> bool {
            false
        }
    }

    #[test]
    fn a_pulled_cable_is_seen_in_the_configuration() {
        let (net, plug) = (Net::new(Box::new(Nothing), [2, 0, 0, 0, 0, 1]), Plug::default());
        let whole = net.config();
        let plugged = PluggedNet::new(Box::new(net), plug.clone());
        assert_eq!(plugged.config(), whole);
        plug.set_link(false);
        let pulled = plugged.config();
        assert_eq!((pulled[6], whole[6]), (0, 1));
        assert_eq!(
            (&pulled[..6], &pulled[7..]),
            (&whole[..6], &whole[7..]),
            "all else is the same"
        );
        plug.set_link(true);
        assert_eq!(plugged.config(), whole);
    }
}
