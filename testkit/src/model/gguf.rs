//! GGUF files, version 3: header, settings, the list of tensors, then their data, each at a multiple of 32 bytes.
//!
//! The formats of blocks are those of llama.cpp: 32 weights share a scale in half precision.
//!
//! | | a block | integers |
//! |---|---|---|
//! | Q8_0 | scale, 32 bytes | `round(127·w / greatest \|w\|)`, scale `greatest / 127` |
//! | Q4_0 | scale, 16 bytes: weight i in the low half of byte i, i + 16 in the high one | `min(15, ⌊w / scale + 8.5⌋)`, scale: the weight of greatest magnitude over −8 |

use std::io::{self, Write};

use half::{bf16, f16};

const ALIGNMENT: u64 = 32;
const BLOCK: usize = 32;

/// How a tensor's numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// 4 bytes.
    F32,
    /// 2 bytes.
    Bf16,
    /// 8.5 bits.
    Q8_0,
    /// 4.5 bits.
    Q4_0,
}

impl Format {
    /// Its number in the list of tensors.
    fn code(self) -> u32 {
        match self {
            Format::F32 => 0,
            Format::Q4_0 => 2,
            Format::Q8_0 => 8,
            Format::Bf16 => 30,
        }
    }

    /// Its number in `general.file_type`, for a file whose matrices have it.
    pub fn file_type(self) -> u32 {
        match self {
            Format::F32 => 0,
            Format::Q4_0 => 2,
            Format::Q8_0 => 7,
            Format::Bf16 => 32,
        }
    }

    /// Bytes of `numbers` numbers.
    fn bytes(self, numbers: usize) -> u64 {
        (match self {
            Format::F32 => numbers * 4,
            Format::Bf16 => numbers * 2,
            Format::Q8_0 => numbers / BLOCK * (2 + BLOCK),
            Format::Q4_0 => numbers / BLOCK * (2 + BLOCK / 2),
        }) as u64
    }

    /// The numbers, which are whole blocks, as they are stored.
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

/// The value of a setting.
pub enum Value {
    /// A number.
    U32(u32),
    /// A number.
    F32(f32),
    /// A text.
    Text(String),
    /// Texts.
    Texts(Vec<String>),
    /// Numbers.
    I32s(Vec<i32>),
}

/// A tensor to come.
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Extents, outermost first.
    pub shape: Vec<usize>,
    /// How it is stored.
    pub format: Format,
}

/// Writes all that stands before the data, and gives the place of the first tensor.
///
/// # Errors
/// Those of the writer.
pub fn write_head(out: &mut impl Write, settings: &[(String, Value)], tensors: &[Entry]) -> io::Result<u64> {
    let mut head = b"GGUF".to_vec();
    head.extend(3u32.to_le_bytes());
    head.extend((tensors.len() as u64).to_le_bytes());
    head.extend((settings.len() as u64).to_le_bytes());
    for (key, value) in settings {
        text(&mut head, key);
        setting(&mut head, value);
    }
    let mut offset = 0u64;
    for Entry { name, shape, format } in tensors {
        text(&mut head, name);
        head.extend((shape.len() as u32).to_le_bytes());
        shape.iter().rev().for_each(|&extent| head.extend((extent as u64).to_le_bytes()));
        head.extend(format.code().to_le_bytes());
        head.extend(offset.to_le_bytes());
        offset += format.bytes(shape.iter().product()).next_multiple_of(ALIGNMENT);
    }
    pad(&mut head);
    out.write_all(&head)?;
    Ok(head.len() as u64)
}

/// Writes the data of the next tensor.
///
/// # Errors
/// Those of the writer.
pub fn write_tensor(out: &mut impl Write, format: Format, numbers: &[f32]) -> io::Result<()> {
    let mut data = format.encode(numbers);
    pad(&mut data);
    out.write_all(&data)
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT as usize), 0);
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn setting(out: &mut Vec<u8>, value: &Value) {
    const U32: u32 = 4;
    const I32: u32 = 5;
    const F32: u32 = 6;
    const TEXT: u32 = 8;
    const ARRAY: u32 = 9;
    let code = |out: &mut Vec<u8>, code: u32| out.extend(code.to_le_bytes());
    match value {
        Value::U32(number) => {
            code(out, U32);
            out.extend(number.to_le_bytes());
        }
        Value::F32(number) => {
            code(out, F32);
            out.extend(number.to_le_bytes());
        }
        Value::Text(value) => {
            code(out, TEXT);
            text(out, value);
        }
        Value::Texts(values) => {
            code(out, ARRAY);
            code(out, TEXT);
            out.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| text(out, value));
        }
        Value::I32s(values) => {
            code(out, ARRAY);
            code(out, I32);
            out.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| out.extend(value.to_le_bytes()));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn blocks_hold_what_the_formats_say() {
        let mut block: [f32; BLOCK] = std::array::from_fn(|i| i as f32 / 16.0 - 1.0);
        block[3] = 2.0;
        let q8 = Format::Q8_0.encode(&block);
        let scale = f16::from_le_bytes([q8[0], q8[1]]).to_f32();
        assert_eq!((q8.len(), q8[2 + 3] as i8), (34, 127));
        assert!(block.iter().zip(&q8[2..]).all(|(w, &q)| (w - scale * f32::from(q as i8)).abs() < 0.51 * 2.0 / 127.0));
        let q4 = Format::Q4_0.encode(&block);
        let scale = f16::from_le_bytes([q4[0], q4[1]]).to_f32();
        assert_eq!((q4.len(), scale, q4[2 + 3] & 15), (18, -0.25, 0));
        for (i, w) in block.iter().enumerate() {
            let integer = (q4[2 + i % 16] >> (i / 16 * 4)) & 15;
            assert!((w - scale * (f32::from(integer) - 8.0)).abs() <= 0.125, "{i}: {w} {integer}");
        }
        assert_eq!(Format::Q8_0.encode(&[0.0; BLOCK]), [0; 34]);
    }

    #[test]
    fn a_head_says_where_each_tensor_lies() {
        let entry = |name: &str, shape: &[usize], format| Entry { name: name.into(), shape: shape.to_vec(), format };
        let tensors = [entry("a", &[3], Format::F32), entry("b", &[2, 32], Format::Q4_0)];
        let settings = [("general.architecture".to_string(), Value::Text("llama".into()))];
        let mut file = Vec::new();
        let start = write_head(&mut file, &settings, &tensors).unwrap();
        write_tensor(&mut file, Format::F32, &[1.0, 2.0, 3.0]).unwrap();
        write_tensor(&mut file, Format::Q4_0, &[0.5; 64]).unwrap();
        assert_eq!(file[..4], *b"GGUF");
        assert_eq!(u64::from_le_bytes(file[8..16].try_into().unwrap()), 2);
        assert!(start.is_multiple_of(ALIGNMENT) && file.len().is_multiple_of(ALIGNMENT as usize));
        let first = &file[start as usize..];
        assert_eq!(first[..4], 1.0f32.to_le_bytes());
        // The second tensor lies behind the padding: its scale is 0.5 / −8.
        assert_eq!(f16::from_le_bytes([first[32], first[33]]).to_f32(), -0.0625);
        // Extents are innermost first: 32, then 2, format 2, offset 32.
        let mut second = 32u64.to_le_bytes().to_vec();
        second.extend(2u64.to_le_bytes());
        second.extend(2u32.to_le_bytes());
        second.extend(32u64.to_le_bytes());
        assert!(file.windows(second.len()).any(|window| window == second));
    }
}
