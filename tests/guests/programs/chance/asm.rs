//! Instructions by chance: those that read and write memory, by all the ways programs use.

use crate::random::Random;

const MOST: usize = 512;

/// Instructions, one after the other.
pub struct Asm {
    bytes: [u8; MOST],
    len: usize,
}

/// op reg, [mem]: opcode bytes; an immediate byte count.
const PLAIN: [(&[u8], usize); 58] = [
    (&[0x88], 0),
    (&[0x89], 0),
    (&[0x8a], 0),
    (&[0x8b], 0),
    (&[0x01], 0),
    (&[0x03], 0),
    (&[0x29], 0),
    (&[0x2b], 0),
    (&[0x11], 0),
    (&[0x31], 0),
    (&[0x33], 0),
    (&[0x21], 0),
    (&[0x09], 0),
    (&[0x39], 0),
    (&[0x3b], 0),
    (&[0x38], 0),
    (&[0x85], 0),
    (&[0x84], 0),
    (&[0x87], 0),
    (&[0x86], 0),
    (&[0x63], 0),
    (&[0x0f, 0xb6], 0),
    (&[0x0f, 0xb7], 0),
    (&[0x0f, 0xbe], 0),
    (&[0x0f, 0xbf], 0),
    (&[0x0f, 0xb0], 0),
    (&[0x0f, 0xb1], 0),
    (&[0x0f, 0xc0], 0),
    (&[0x0f, 0xc1], 0),
    (&[0x0f, 0x10], 0),
    (&[0x0f, 0x11], 0),
    (&[0x0f, 0x28], 0),
    (&[0x0f, 0x29], 0),
    (&[0x0f, 0xc3], 0),
    (&[0x0f, 0x12], 0),
    (&[0x0f, 0x13], 0),
    (&[0x0f, 0x16], 0),
    (&[0x0f, 0x17], 0),
    (&[0x0f, 0x2b], 0),
    (&[0x0f, 0x57], 0),
    (&[0x0f, 0x6f], 0),
    (&[0x0f, 0x7f], 0),
    (&[0x0f, 0xd6], 0),
    (&[0x0f, 0xe7], 0),
    (&[0x0f, 0xef], 0),
    (&[0x0f, 0x6e], 0),
    (&[0x0f, 0x7e], 0),
    (&[0x0f, 0x38, 0xf0], 0),
    (&[0x0f, 0x38, 0xf1], 0),
    (&[0x0f, 0xc6], 1),
    (&[0x0f, 0x4f], 0),
    (&[0x0f, 0x44], 0),
    (&[0x0f, 0x14], 0),
    (&[0x0f, 0x60], 0),
    (&[0x8d], 0),
    (&[0x13], 0),
    (&[0x1b], 0),
    (&[0x19], 0),
];

/// op [mem] with the opcode's rest in the reg field: opcode bytes, that field, an immediate byte count.
const GROUPS: [(&[u8], u8, usize); 34] = [
    (&[0xc6], 0, 1),
    (&[0x80], 0, 1),
    (&[0x83], 5, 1),
    (&[0x83], 7, 1),
    (&[0x80], 1, 1),
    (&[0x83], 4, 1),
    (&[0xfe], 0, 0),
    (&[0xff], 0, 0),
    (&[0xff], 1, 0),
    (&[0xf6], 2, 0),
    (&[0xf7], 3, 0),
    (&[0xf6], 0, 1),
    (&[0xff], 6, 0),
    (&[0x8f], 0, 0),
    (&[0x0f, 0xc7], 1, 0),
    (&[0x0f, 0x18], 1, 0),
    (&[0x0f, 0x0d], 1, 0),
    (&[0x0f, 0xba], 4, 1),
    (&[0x0f, 0xba], 5, 1),
    (&[0x0f, 0xba], 6, 1),
    (&[0x0f, 0xae], 3, 0),
    (&[0x0f, 0xae], 7, 0),
    (&[0xd9], 0, 0),
    (&[0xd9], 3, 0),
    (&[0xdd], 0, 0),
    (&[0xdd], 3, 0),
    (&[0xdb], 7, 0),
    (&[0xdb], 5, 0),
    (&[0xdf], 7, 0),
    (&[0xd9], 7, 0),
    (&[0xff], 2, 0),
    (&[0xff], 4, 0),
    (&[0x0f, 0x90], 0, 0),
    (&[0xd1], 4, 0),
];

/// Without operands that are to be chosen.
const STRINGS: [&[u8]; 20] = [
    &[0xa4],
    &[0xa5],
    &[0x48, 0xa5],
    &[0xaa],
    &[0xab],
    &[0x48, 0xab],
    &[0xa6],
    &[0xa7],
    &[0xac],
    &[0xad],
    &[0xae],
    &[0xaf],
    &[0xd7],
    &[0x50],
    &[0x58],
    &[0xc3],
    &[0xc9],
    &[0xc8, 0x10, 0, 0],
    &[0x66, 0x0f, 0xf7, 0xc1],
    &[0x9c],
];

impl Asm {
    pub const fn new() -> Self {
        Self { bytes: [0; MOST], len: 0 }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn add(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes[self.len..self.len + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
        self
    }

    /// mov r64, imm64
    pub fn load(&mut self, register: u8, value: u64) -> &mut Self {
        self.add(&[0x48 | register >> 3, 0xb8 | register & 7]);
        self.add(&value.to_le_bytes())
    }

    /// mov eax, number; syscall
    pub fn system_call(&mut self, number: u32) -> &mut Self {
        self.add(&[0xb8]);
        self.add(&number.to_le_bytes());
        self.add(&[0x0f, 0x05])
    }

    /// An instruction that uses memory, mostly at [base], any register holding an address.
    pub fn memory(&mut self, random: &mut Random) -> &mut Self {
        match random.below(10) {
            0 | 1 => self.string(random),
            2 => self.vector(random),
            3 | 4 => {
                let (opcode, field, immediate) = random.pick(&GROUPS);
                self.modified(random, opcode, Some(field), immediate)
            }
            _ => {
                let (opcode, immediate) = random.pick(&PLAIN);
                self.modified(random, opcode, None, immediate)
            }
        }
    }

    fn string(&mut self, random: &mut Random) -> &mut Self {
        let prefix: &[u8] = random.pick(&[&[], &[], &[0xf3][..], &[0xf2], &[0x66]]);
        let bytes = random.pick(&STRINGS);
        // REP means something else or nothing where there is no string.
        let prefix = if bytes[0] & 0xf0 == 0xa0 || bytes == [0x48, 0xa5] { prefix } else { &[] };
        self.add(prefix).add(bytes)
    }

    /// VMOVUPS, VMOVDQU, VMOVAPS of 32 bytes, VBROADCAST, VPMASKMOV.
    fn vector(&mut self, random: &mut Random) -> &mut Self {
        let opcode: &[u8] = random.pick(&[
            &[0xc5, 0xfc, 0x10][..],
            &[0xc5, 0xfc, 0x11],
            &[0xc5, 0xfe, 0x6f],
            &[0xc5, 0xfe, 0x7f],
            &[0xc5, 0xfc, 0x28],
            &[0xc5, 0xfc, 0x29],
            &[0xc4, 0xe2, 0x7d, 0x1a],
            &[0xc5, 0xf5, 0xef],
            &[0xc5, 0xfb, 0x10],
            &[0xc5, 0xfd, 0xe7],
        ]);
        let rest = [random.bits() as u8 & 0x38 | random.pick(&[0, 1, 2, 3, 6, 7])];
        self.add(opcode).add(&rest)
    }

    fn modified(
        &mut self,
        random: &mut Random,
        opcode: &[u8],
        field: Option<u8>,
        immediate: usize,
    ) -> &mut Self {
        let locks = field.is_some()
            || matches!(opcode, [0x01 | 0x29 | 0x31 | 0x86 | 0x87] | [0x0f, 0xb0..=0xc1]);
        if locks && random.chance(20) {
            self.add(&[0xf0]);
        }
        // Makers differ in what 16 bits are to a near branch.
        let branches = opcode == [0xff] && matches!(field, Some(2 | 4));
        if random.chance(15) && !branches {
            self.add(&[0x66]);
        }
        let base = random.below(16) as u8;
        let register = random.below(16) as u8;
        let rex = 0x40 | u8::from(random.chance(50)) << 3 | register >> 3 << 2 | base >> 3;
        self.add(&[rex]).add(opcode);
        let field = field.unwrap_or(register & 7) << 3;
        let displacement = (random.below(64) as i8 - 32) as u8;
        match base & 7 {
            4 => self.add(&[0x44 | field, 0x24, displacement]),
            low => self.add(&[0x40 | field | low, displacement]),
        };
        (0..immediate).for_each(|_| {
            self.add(&[random.bits() as u8]);
        });
        self
    }
}
