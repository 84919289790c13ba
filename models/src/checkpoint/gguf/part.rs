//! The header of one GGUF file, checked to its end.
//!
//! ```text
//! "GGUF", version, tensor count, key count | keys and values | tensor infos | padding | tensors, each at a multiple of the alignment
//! ```
//!
//! Opening costs time linear in the header and memory of a small multiple of it: counts are compared with the rest of the file, and
//! values stay where they are.

use std::collections::BTreeMap;
use std::ops::Range;

use super::super::beginning::pointer;
use super::cursor::{Cursor, Fault};
use super::types::{ElementType, TYPES};
use super::value::{Stored, Value};

const MAGIC: [u8; 4] = *b"GGUF";
const ALIGNMENT: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_ALIGNMENT: u64 = 1 << 20;
/// Greatest lengths of names, in bytes. Tensors have fewer than 64 in published files.
const MAX_KEY: usize = 1 << 16;
const MAX_TENSOR_NAME: usize = 256;
const MAX_DIMS: u32 = 4;
/// Least sizes in the file: of a key with its value, and of a tensor's info with one dimension.
const LEAST_KEY: u64 = 8 + 4 + 1;
const LEAST_TENSOR: u64 = 8 + 4 + 8 + 4 + 8;

/// A tensor in a GGUF file.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Which of the files of a split checkpoint holds it.
    pub part: usize,
    /// Type of its elements.
    pub kind: &'static ElementType,
    /// Dimensions, outermost first (the file has them innermost first).
    pub shape: Vec<usize>,
    /// Its bytes in the file.
    pub data: Range<usize>,
}

/// The contents of a header.
pub(super) struct Header {
    pub keys: BTreeMap<String, Stored>,
    pub tensors: BTreeMap<String, Tensor>,
}

impl Header {
    /// Reads and checks the header of file number `part`.
    pub fn read(bytes: &[u8], part: usize) -> Result<Header, Fault> {
        Header::read_beginning(bytes, bytes.len(), part).map(|(header, _)| header)
    }

    /// Reads and checks the header of a file of `size` bytes, of which those at the beginning are here. Returns its length too.
    pub fn read_beginning(bytes: &[u8], size: usize, part: usize) -> Result<(Header, usize), Fault> {
        let mut cursor = Cursor { bytes, at: 0, size: size.max(bytes.len()) };
        let magic = cursor.skip(4, "the magic number")?;
        if let Some((found, expected)) = pointer(&bytes[magic.clone()]) {
            return Err(Fault::new(found, expected));
        }
        if bytes[magic.clone()] != MAGIC {
            return Err(Fault::new(format!("a file that begins with {:?}", &bytes[magic]), "\"GGUF\""));
        }
        match cursor.u32("the version")? {
            2 | 3 => {}
            other if matches!(other.swap_bytes(), 1..=3) => {
                return Err(Fault::new(
                    "a big-endian file",
                    "a little-endian file: convert it again without --bigendian",
                ));
            }
            other => return Err(Fault::new(format!("version {other}"), "version 2 or 3")),
        }
        let tensors = cursor.u64("the number of tensors")?;
        let keys = cursor.u64("the number of keys")?;
        check_count(&cursor, "keys", keys, LEAST_KEY)?;
        check_count(&cursor, "tensors", tensors, LEAST_TENSOR)?;
        let keys = read_keys(&mut cursor, keys)?;
        let alignment = match keys.get(ALIGNMENT).map(|stored| stored.value(bytes)) {
            None => DEFAULT_ALIGNMENT,
            Some(value) => {
                let fits = |size: &u64| size.is_power_of_two() && *size <= MAX_ALIGNMENT;
                value.unsigned().filter(fits).ok_or_else(|| {
                    let expected = format!("a power of two, 1 to {MAX_ALIGNMENT}");
                    Fault::new(format!("{ALIGNMENT} {value}"), expected)
                })?
            }
        };
        let tensors = read_tensors(&mut cursor, tensors, alignment, part)?;
        Ok((Header { keys, tensors }, cursor.at))
    }
}

/// Checks that a count is possible in the rest of the file.
fn check_count(cursor: &Cursor<'_>, what: &str, count: u64, least: u64) -> Result<(), Fault> {
    let most = cursor.rest() as u64 / least;
    match count <= most {
        true => Ok(()),
        false => Err(Fault::new(format!("{count} {what}"), format!("at most {most}, for which the file has bytes"))),
    }
}

fn read_keys(cursor: &mut Cursor<'_>, count: u64) -> Result<BTreeMap<String, Stored>, Fault> {
    let mut keys = BTreeMap::new();
    for number in 0..count {
        let name = cursor.name(MAX_KEY, format_args!("the name of key {number}"))?;
        let stored = Stored::read(cursor, &format_args!("key {:?}", short(name)))?;
        if keys.insert(name.to_owned(), stored).is_some() {
            return Err(Fault::new(format!("key {:?} twice", short(name)), "each key once"));
        }
    }
    Ok(keys)
}

fn read_tensors(
    cursor: &mut Cursor<'_>,
    count: u64,
    alignment: u64,
    part: usize,
) -> Result<BTreeMap<String, Tensor>, Fault> {
    let mut tensors = BTreeMap::new();
    for number in 0..count {
        let (name, tensor) = read_tensor(cursor, number, alignment, part)?;
        if tensors.insert(name.to_owned(), tensor).is_some() {
            return Err(Fault::new(format!("tensor {name:?} twice"), "each tensor once"));
        }
    }
    // Offsets count from the first aligned byte behind the infos.
    let start = cursor.at.next_multiple_of(alignment as usize);
    let mut ranges = Vec::with_capacity(tensors.len());
    for (name, tensor) in &mut tensors {
        let shift = |at: usize| at.checked_add(start).filter(|at| *at <= cursor.size);
        let (Some(first), Some(end)) = (shift(tensor.data.start), shift(tensor.data.end)) else {
            return Err(Fault::new(
                format!("tensor {name:?} of {} bytes at byte {} of the data", tensor.data.len(), tensor.data.start),
                format!("its end within the {} bytes of the data", cursor.size.saturating_sub(start)),
            ));
        };
        tensor.data = first..end;
        ranges.push((first, end, name));
    }
    ranges.sort();
    match ranges.windows(2).find(|pair| pair[1].0 < pair[0].1) {
        None => Ok(tensors),
        Some(pair) => Err(Fault::new(
            format!("tensor {:?} at byte {}, inside of {:?}", pair[1].2, pair[1].0, pair[0].2),
            "tensors that do not overlap",
        )),
    }
}

/// Reads the info of a tensor. Its data counts from the start of the data.
fn read_tensor<'a>(
    cursor: &mut Cursor<'a>,
    number: u64,
    alignment: u64,
    part: usize,
) -> Result<(&'a str, Tensor), Fault> {
    let name = cursor.name(MAX_TENSOR_NAME, format_args!("the name of tensor {number}"))?;
    let what = format_args!("tensor {name:?}").to_string();
    let dims = cursor.u32(&what)?;
    if !(1..=MAX_DIMS).contains(&dims) {
        return Err(Fault::new(format!("{what} of {dims} dimensions"), format!("1 to {MAX_DIMS}")));
    }
    let mut shape = Vec::with_capacity(MAX_DIMS as usize);
    for _ in 0..dims {
        shape.push(cursor.u64(&what)?);
    }
    let id = cursor.u32(&what)?;
    let offset = cursor.u64(&what)?;
    let kind = ElementType::of_id(id).ok_or_else(|| {
        let names = TYPES.map(|known| known.name).join(", ");
        Fault::new(format!("{what} of type {id}"), format!("one of {names}: use a file of another quantisation"))
    })?;
    let row = shape[0];
    let elements = shape.iter().try_fold(1_u64, |product, dim| product.checked_mul(*dim)).filter(|all| *all > 0);
    let bytes = elements.and_then(|all| (all / kind.block as u64).checked_mul(kind.bytes as u64));
    let (Some(bytes), Ok(sizes)) = (bytes, shape.iter().rev().map(|dim| usize::try_from(*dim)).collect()) else {
        return Err(Fault::new(
            format!("{what} of dimensions {shape:?}"),
            "numbers above 0 whose product is in 64 bits",
        ));
    };
    if !row.is_multiple_of(kind.block as u64) {
        let expected = format!("a multiple of {}, the block of {}", kind.block, kind.name);
        return Err(Fault::new(format!("{what} with rows of {row}"), expected));
    }
    if !offset.is_multiple_of(alignment) {
        let expected = format!("a multiple of {alignment}, the alignment");
        return Err(Fault::new(format!("{what} at byte {offset} of the data"), expected));
    }
    // Compared before the sum: both are at most the file's size afterwards.
    let len = cursor.size as u64;
    if bytes > len || offset > len {
        let expected = format!("its end within the file of {len} bytes");
        return Err(Fault::new(format!("{what} of {bytes} bytes at byte {offset} of the data"), expected));
    }
    let data = offset as usize..(offset + bytes) as usize;
    Ok((name, Tensor { part, kind, shape: sizes, data }))
}

/// The beginning of a long name.
fn short(name: &str) -> &str {
    name.char_indices().nth(80).map_or(name, |(end, _)| &name[..end])
}

impl Header {
    /// The value of a key.
    pub fn value<'a>(&self, key: &str, bytes: &'a [u8]) -> Option<Value<'a>> {
        self.keys.get(key).map(|stored| stored.value(bytes))
    }
}
