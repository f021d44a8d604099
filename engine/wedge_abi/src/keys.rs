// Bytes that let a program load the protection-key register. The wedge is built without crates and includes
// this file, so it names nothing but core.
//
// WRPKRU is 0F 01 EF; XRSTOR from memory is 0F AE with 5 in the middle of the byte that follows. Prefixes
// before, and whatever else belongs to the operand behind, change nothing of these three. There is no other
// way that is a program's: XRSTORS is the kernel's, FXRSTOR and the VEX forms of 0F AE know nothing of keys.
// So bytes that have none of these anywhere, at whatever byte decoding begins, have no instruction that opens
// keys.

/// Whoever executes code that has these bytes can load protection keys.
pub const fn opens(bytes: [u8; 3]) -> bool {
    match bytes {
        [0x0f, 0x01, 0xef] => true,
        [0x0f, 0xae, operand] => operand >> 3 & 7 == 5 && operand >> 6 != 3,
        _ => false,
    }
}

/// Bytes that begin with a code page's last two can do so together with what follows it.
pub const fn may_begin(last: [u8; 2]) -> bool {
    matches!(last, [_, 0x0f] | [0x0f, 0x01 | 0xae])
}

/// New bytes at an offset into code have them, alone or with those beside. `old` is what lies there now.
pub fn opened(offset: u64, bytes: &[u8], old: impl Fn(u64) -> u8) -> bool {
    let before = [2, 1].map(|far| offset.checked_sub(far).map_or(0, &old));
    let behind = [0, 1].map(|far| old(offset + bytes.len() as u64 + far));
    let byte = |at: usize| match at.checked_sub(2) {
        None => before[at],
        Some(at) => bytes.get(at).copied().unwrap_or_else(|| behind[at - bytes.len()]),
    };
    let open = |first: usize| opens([0, 1, 2].map(|n| byte(first + n)));
    // Three bytes cross a border of the new ones if they begin in the last two bytes before it.
    let across = |border: usize| (border..border + 2).any(open);
    find(bytes).is_some() || across(0) || across(bytes.len())
}

/// Where the first of them is.
pub fn find(code: &[u8]) -> Option<usize> {
    let mut bytes = code.windows(3);
    bytes.position(|bytes| matches!(bytes, [a, b, c] if opens([*a, *b, *c])))
}
