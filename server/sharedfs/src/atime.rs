//! Opening without a new access time, which the host grants to a file's owner and to root only.
//!
//! A guest's overlayfs asks for it with every file it opens and reads, rightly: its root may. To an ordinary user's server it is a
//! wish that would have the whole request refused, so it is taken out.

use fuse_backend_rs::abi::fuse_abi::Opcode;

const O_NOATIME: u32 = 0o1_000_000;
/// Requests with flags as of open(2), and where those are: behind the header, or behind what is read or written as well.
const WITH_FLAGS: [(Opcode, usize); 5] = [
    (Opcode::Open, 40),
    (Opcode::Opendir, 40),
    (Opcode::Create, 40),
    (Opcode::Read, 72),
    (Opcode::Write, 72),
];

/// The request without the wish; nothing if it has none.
pub(crate) fn without_wish(request: &[u8]) -> Option<Vec<u8>> {
    let opcode = word(request, 4)?;
    let (_, at) = WITH_FLAGS.iter().find(|(known, _)| *known as u32 == opcode)?;
    let flags = word(request, *at).filter(|flags| flags & O_NOATIME != 0)?;
    let mut plain = request.to_vec();
    plain.get_mut(*at..*at + 4)?.copy_from_slice(&(flags & !O_NOATIME).to_le_bytes());
    Some(plain)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at + 4)?.try_into().ok()?;
    Some(u32::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(opcode: Opcode, at: usize, flags: u32) -> Vec<u8> {
        let mut bytes = vec![0; 96];
        bytes[4..8].copy_from_slice(&(opcode as u32).to_le_bytes());
        bytes[at..at + 4].copy_from_slice(&flags.to_le_bytes());
        bytes
    }

    #[test]
    fn only_the_wish_is_taken_out() {
        for (opcode, at) in WITH_FLAGS {
            let wished = request(opcode, at, 0o100_000 | O_NOATIME);
            assert_eq!(without_wish(&wished), Some(request(opcode, at, 0o100_000)));
            assert_eq!(without_wish(&request(opcode, at, 0o100_000)), None);
            assert_eq!(without_wish(&wished[..at + 3]), None, "cut off");
        }
        assert_eq!(without_wish(&request(Opcode::Lookup, 40, O_NOATIME)), None, "a name");
    }
}
