//! GGUF files, version 3: a header, settings, the list of tensors, and their data, each at a multiple of 32 bytes.
//!
//! The block formats are those of llama.cpp: 32 weights share a scale in half precision.
//!
//! | | block | integers |
//! |---|---|---|
//! | Q8_0 | scale, 32 bytes | `round(127·w / greatest \|w\|)`, scale `greatest / 127` |
//! | Q4_0 | scale, 16 bytes: weight i in the low half of byte i, i + 16 in the high half | `min(15, ⌊w / scale + 8.5⌋)`, scale: the weight of greatest magnitude over −8 |

use std::io::{self, Write};

use half::{bf16, f16};

/// Multiple of bytes at which the data of a tensor begins.
pub const ALIGNMENT: usize = 32;
const BLOCK: usize = 32;

/// Storage format of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// 4 bytes per number.
    F32,
    /// 2 bytes per number.
    Bf16,
    /// 8.5 bits per number.
    Q8_0,
    /// 4.5 bits per number.
    Q4_0,
}

impl Format {
    /// Returns the number in the list of tensors.
    fn code(self) -> u32 {
        match self {
            Format::F32 => 0,
            Format::Q4_0 => 2,
            Format::Q8_0 => 8,
            Format::Bf16 => 30,
        }
    }

    /// Returns the number in `general.file_type` of a file whose matrices have this format.
    pub fn file_type(self) -> u32 {
        match self {
            Format::F32 => 0,
            Format::Q4_0 => 2,
            Format::Q8_0 => 7,
            Format::Bf16 => 32,
        }
    }

    /// Returns the size of `numbers` numbers in bytes.
    fn bytes(self, numbers: usize) -> usize {
        match self {
            Format::F32 => numbers * 4,
            Format::Bf16 => numbers * 2,
            Format::Q8_0 => numbers / BLOCK * (2 + BLOCK),
            Format::Q4_0 => numbers / BLOCK * (2 + BLOCK / 2),
        }
    }

    /// Returns the bytes of these numbers, which must be whole blocks.
    pub fn encode(self, numbers: &[f32]) -> Vec<u8> {
        let blocks = numbers.as_chunks::<BLOCK>().0.iter();
        match self {
            Format::F32 => numbers.iter().flat_map(|w| w.to_le_bytes()).collect(),
            Format::Bf16 => numbers.iter().flat_map(|&w| bf16::from_f32(w).to_le_bytes()).collect(),
            Format::Q8_0 => blocks.flat_map(q8_0).collect(),
            Format::Q4_0 => blocks.flat_map(q4_0).collect(),
        }
    }
}

fn q8_0(block: &[f32; BLOCK]) -> impl Iterator<Item = u8> {
    let greatest = block.iter().fold(0.0f32, |m, w| m.max(w.abs()));
    let scale = greatest / 127.0;
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    f16::from_f32(scale).to_le_bytes().into_iter().chain(block.map(|w| (w * inverse).round() as i8 as u8))
}

fn q4_0(block: &[f32; BLOCK]) -> impl Iterator<Item = u8> {
    let peak = block.iter().fold(0.0f32, |m, &w| if w.abs() > m.abs() { w } else { m });
    let scale = peak / -8.0;
    let inverse = if scale != 0.0 { 1.0 / scale } else { 0.0 };
    let integers = block.map(|w| ((w * inverse + 8.5) as u8).min(15));
    let bytes: [u8; BLOCK / 2] = std::array::from_fn(|i| integers[i] | (integers[i + BLOCK / 2] << 4));
    f16::from_f32(scale).to_le_bytes().into_iter().chain(bytes)
}

/// Value of a setting.
pub enum Value {
    /// An unsigned integer.
    U32(u32),
    /// A floating-point number.
    F32(f32),
    /// A text.
    Text(String),
    /// A list of texts.
    Texts(Vec<String>),
    /// A list of integers.
    I32s(Vec<i32>),
}

/// A tensor whose data follows the head.
pub struct Entry {
    /// Name.
    pub name: String,
    /// Extents, outermost first.
    pub shape: Vec<usize>,
    /// Storage format.
    pub format: Format,
}

/// Writes everything before the data, and returns its length.
///
/// # Errors
/// The writer fails.
pub fn write_head(out: &mut impl Write, settings: &[(String, Value)], tensors: &[Entry]) -> io::Result<usize> {
    let mut head = b"GGUF".to_vec();
    head.extend(3u32.to_le_bytes());
    add_u64(&mut head, tensors.len());
    add_u64(&mut head, settings.len());
    for (key, value) in settings {
        add_text(&mut head, key);
        add_value(&mut head, value);
    }
    let mut offset = 0;
    for Entry { name, shape, format } in tensors {
        add_text(&mut head, name);
        head.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|&extent| add_u64(&mut head, extent));
        head.extend(format.code().to_le_bytes());
        add_u64(&mut head, offset);
        offset += format.bytes(shape.iter().product()).next_multiple_of(ALIGNMENT);
    }
    write_padded(out, head)
}

/// Writes the data of the next tensor, and returns its length.
///
/// # Errors
/// The writer fails.
pub fn write_tensor(out: &mut impl Write, format: Format, numbers: &[f32]) -> io::Result<usize> {
    write_padded(out, format.encode(numbers))
}

fn write_padded(out: &mut impl Write, mut bytes: Vec<u8>) -> io::Result<usize> {
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
    out.write_all(&bytes)?;
    Ok(bytes.len())
}

fn add_u64(out: &mut Vec<u8>, number: usize) {
    out.extend((number as u64).to_le_bytes());
}

fn add_text(out: &mut Vec<u8>, text: &str) {
    add_u64(out, text.len());
    out.extend(text.as_bytes());
}

/// Adds the code of a value's type, and the value. A list has the code 9 before that of its elements.
fn add_value(out: &mut Vec<u8>, value: &Value) {
    let codes: &[u32] = match value {
        Value::U32(_) => &[4],
        Value::F32(_) => &[6],
        Value::Text(_) => &[8],
        Value::Texts(_) => &[9, 8],
        Value::I32s(_) => &[9, 5],
    };
    codes.iter().for_each(|code| out.extend(code.to_le_bytes()));
    match value {
        Value::U32(number) => out.extend(number.to_le_bytes()),
        Value::F32(number) => out.extend(number.to_le_bytes()),
        Value::Text(text) => add_text(out, text),
        Value::Texts(texts) => {
            add_u64(out, texts.len());
            texts.iter().for_each(|text| add_text(out, text));
        }
        Value::I32s(numbers) => {
            add_u64(out, numbers.len());
            numbers.iter().for_each(|number| out.extend(number.to_le_bytes()));
        }
    }
}
