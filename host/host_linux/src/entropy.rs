//! Randomness from the kernel.

use rustix::rand::{GetRandomFlags, getrandom};

/// getrandom(2).
#[derive(Clone, Copy, Debug, Default)]
pub struct LinuxEntropy;

impl host::Entropy for LinuxEntropy {
    fn fill(&self, data: &mut [u8]) -> bool {
        let mut done = 0;
        while let Some(rest) = data.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match getrandom(rest, GetRandomFlags::empty()) {
                Ok(count) => done += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return false,
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::Entropy;

    #[test]
    fn fills_all_of_it_and_differently() {
        let (mut a, mut b) = ([0; 1000], [0; 1000]);
        assert!(LinuxEntropy.fill(&mut a) && LinuxEntropy.fill(&mut b));
        assert_ne!(a, b);
        assert!(a[900..].iter().any(|&byte| byte != 0));
    }
}
