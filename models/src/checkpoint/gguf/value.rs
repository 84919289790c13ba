//! The values of GGUF metadata. They stay in the file; a [`Value`] is read from it on demand.

use std::fmt;
use std::ops::Range;

use super::cursor::{Cursor, Fault};

/// Greatest depth of arrays in arrays.
const MAX_DEPTH: usize = 4;

/// Type of a value in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind(u32);

impl Kind {
    const FLOAT: Kind = Kind(6);
    pub const STRING: Kind = Kind(8);
    pub const ARRAY: Kind = Kind(9);

    fn read(cursor: &mut Cursor<'_>, what: &dyn fmt::Display) -> Result<Kind, Fault> {
        match cursor.u32(format_args!("the type of {what}"))? {
            id @ 0..13 => Ok(Kind(id)),
            other => Err(Fault::new(format!("{what} of type {other}"), "types 0 to 12")),
        }
    }

    /// Bytes of a value; `None` for strings and arrays.
    fn bytes(self) -> Option<u64> {
        match self.0 {
            0 | 1 | 7 => Some(1),
            2 | 3 => Some(2),
            4..7 => Some(4),
            10..13 => Some(8),
            _ => None,
        }
    }
}

/// A value and where it is: of an array, the bytes of its elements.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    kind: Kind,
    /// Type and number of the elements of an array.
    elements: (Kind, usize),
    at: Range<usize>,
}

impl Stored {
    /// Skips a value with its type and checks it to its end. `what` names it in errors.
    pub fn read(cursor: &mut Cursor<'_>, what: &dyn fmt::Display) -> Result<Stored, Fault> {
        let kind = Kind::read(cursor, what)?;
        Stored::of_kind(cursor, kind, what, 0)
    }

    fn of_kind(cursor: &mut Cursor<'_>, kind: Kind, what: &dyn fmt::Display, depth: usize) -> Result<Stored, Fault> {
        let single = (kind, 1);
        if let Some(bytes) = kind.bytes() {
            return Ok(Stored { kind, elements: single, at: cursor.skip(bytes, what)? });
        }
        if kind == Kind::STRING {
            return Ok(Stored { kind, elements: single, at: cursor.string(what)? });
        }
        if depth == MAX_DEPTH {
            return Err(Fault::new(format!("{what} with arrays in arrays"), format!("at most {MAX_DEPTH} levels")));
        }
        let element = Kind::read(cursor, what)?;
        let count = cursor.u64(what)?;
        let start = cursor.at;
        // The least size of an element: a string has a length, an array a type and a length.
        let least = element.bytes().unwrap_or(if element == Kind::ARRAY { 12 } else { 8 });
        let Some(bytes) = count.checked_mul(least).filter(|bytes| *bytes <= cursor.rest() as u64) else {
            let expected = format!("at most {}, the rest of the file", cursor.rest());
            return Err(Fault::new(format!("{what} of {count} elements of at least {least} bytes"), expected));
        };
        if element.bytes().is_some() {
            cursor.skip(bytes, what)?;
        } else {
            for _ in 0..count {
                Stored::of_kind(cursor, element, what, depth + 1)?;
            }
        }
        Ok(Stored { kind, elements: (element, count as usize), at: start..cursor.at })
    }

    /// Where the numbers of an array of float32 are.
    pub fn floats(&self) -> Option<Range<usize>> {
        (self.kind == Kind::ARRAY && self.elements.0 == Kind::FLOAT).then(|| self.at.clone())
    }

    /// The value, in the file that it was read from.
    pub fn value<'a>(&self, file: &'a [u8]) -> Value<'a> {
        let bytes = file.get(self.at.clone()).unwrap_or_default();
        match self.kind {
            Kind::ARRAY => Value::Array(Array { kind: self.elements.0, count: self.elements.1, bytes }),
            Kind::STRING => Value::Text(bytes),
            kind => scalar(kind, bytes),
        }
    }
}

/// A number or truth value of this type.
fn scalar(kind: Kind, bytes: &[u8]) -> Value<'static> {
    let mut wide = [0; 8];
    wide.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    let bits = u64::from_le_bytes(wide);
    match kind.0 {
        1 => Value::Signed(i64::from(bits as i8)),
        3 => Value::Signed(i64::from(bits as i16)),
        5 => Value::Signed(i64::from(bits as i32)),
        11 => Value::Signed(bits as i64),
        6 => Value::Float(f64::from(f32::from_bits(bits as u32))),
        12 => Value::Float(f64::from_bits(bits)),
        7 => Value::Bool(bits != 0),
        _ => Value::Unsigned(bits),
    }
}

/// A value of the metadata.
#[derive(Clone, Copy, Debug)]
pub enum Value<'a> {
    /// u8, u16, u32 or u64.
    Unsigned(u64),
    /// i8, i16, i32 or i64.
    Signed(i64),
    /// f32 or f64.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A string, usually UTF-8.
    Text(&'a [u8]),
    /// An array.
    Array(Array<'a>),
}

impl<'a> Value<'a> {
    /// A number that is not negative.
    pub fn unsigned(&self) -> Option<u64> {
        match *self {
            Value::Unsigned(number) => Some(number),
            Value::Signed(number) => u64::try_from(number).ok(),
            _ => None,
        }
    }

    /// A number.
    pub fn float(&self) -> Option<f64> {
        match *self {
            Value::Float(number) => Some(number),
            Value::Unsigned(number) => Some(number as f64),
            Value::Signed(number) => Some(number as f64),
            _ => None,
        }
    }

    /// A string of UTF-8.
    pub fn text(&self) -> Option<&'a str> {
        match self {
            Value::Text(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }

    /// An array.
    pub fn array(&self) -> Option<Array<'a>> {
        match self {
            Value::Array(array) => Some(*array),
            _ => None,
        }
    }
}

/// What messages show of a value.
impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Unsigned(number) => write!(f, "{number}"),
            Value::Signed(number) => write!(f, "{number}"),
            Value::Float(number) => write!(f, "{number}"),
            Value::Bool(truth) => write!(f, "{truth}"),
            Value::Text(bytes) => write!(f, "{:?}", String::from_utf8_lossy(&bytes[..bytes.len().min(80)])),
            Value::Array(array) => write!(f, "an array of {}", array.count),
        }
    }
}

/// An array of the metadata.
#[derive(Clone, Copy, Debug)]
pub struct Array<'a> {
    kind: Kind,
    count: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The elements in order.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let Array { kind, count, bytes } = *self;
        let mut cursor = Cursor::whole(bytes);
        (0..count).map_while(move |_| {
            Stored::of_kind(&mut cursor, kind, &"an element", 0).ok().map(|stored| stored.value(bytes))
        })
    }
}
