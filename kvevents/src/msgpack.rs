//! The part of MessagePack that events need. Integers and lengths take the shortest form, as in `msgspec`.

/// Appends nil.
pub fn nil(to: &mut Vec<u8>) {
    to.push(0xc0);
}

/// Appends a number in 8 bytes.
pub fn float(to: &mut Vec<u8>, value: f64) {
    to.push(0xcb);
    to.extend(value.to_be_bytes());
}

/// Appends a whole number.
pub fn uint(to: &mut Vec<u8>, value: u64) {
    match value {
        0..=0x7f => to.push(value as u8),
        0x80..=0xff => to.extend([0xcc, value as u8]),
        0x100..=0xffff => {
            to.push(0xcd);
            to.extend((value as u16).to_be_bytes());
        }
        0x1_0000..=0xffff_ffff => {
            to.push(0xce);
            to.extend((value as u32).to_be_bytes());
        }
        _ => {
            to.push(0xcf);
            to.extend(value.to_be_bytes());
        }
    }
}

/// Appends a text.
pub fn text(to: &mut Vec<u8>, value: &str) {
    match value.len() {
        len @ 0..=31 => to.push(0xa0 | len as u8),
        len @ 32..=0xff => to.extend([0xd9, len as u8]),
        len @ 0x100..=0xffff => {
            to.push(0xda);
            to.extend((len as u16).to_be_bytes());
        }
        len => {
            to.push(0xdb);
            to.extend((len as u32).to_be_bytes());
        }
    }
    to.extend_from_slice(value.as_bytes());
}

/// Appends the head of an array of `len` elements, which follow.
pub fn array(to: &mut Vec<u8>, len: usize) {
    head(to, len, (0x90, 0xdc, 0xdd));
}

/// Appends the head of a map of `len` pairs, which follow.
pub fn map(to: &mut Vec<u8>, len: usize) {
    head(to, len, (0x80, 0xde, 0xdf));
}

fn head(to: &mut Vec<u8>, len: usize, (short, medium, long): (u8, u8, u8)) {
    match len {
        0..=15 => to.push(short | len as u8),
        16..=0xffff => {
            to.push(medium);
            to.extend((len as u16).to_be_bytes());
        }
        _ => {
            to.push(long);
            to.extend((len as u32).to_be_bytes());
        }
    }
}
