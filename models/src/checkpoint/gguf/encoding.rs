//! How the values of a tensor are stored, and how they are undone from what conversion changed.

use std::borrow::Cow;

use device::Dtype;
use linear::{StoredFormat, StoredRow, StoredRows};

use super::types::{ElementType, Storage};

/// What conversion changed in the values of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Values {
    Same,
    /// 1 was added.
    PlusOne,
    /// Logarithms became the negative of their powers of e.
    LogNegative,
}

/// What conversion changed in the order of the rows of a tensor, or of its columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Same,
    /// Rows of heads of this size: rows i and i + size / 2 became neighbours.
    Pairs(usize),
    /// Rows of the queries of each key head, of its key and of its value became rows of all queries, all keys and all values.
    Groups(KeyHeads),
    /// Rows of value heads.
    Tiled(ValueHeads),
    /// Columns of value heads.
    TiledColumns(ValueHeads),
}

impl Order {
    /// Where in the file the row is that Hugging Face has in this place.
    fn stored(&self, row: usize) -> usize {
        match self {
            Order::Pairs(size) if *size > 1 => paired(row, *size),
            Order::Groups(heads) if heads.dim > 0 => heads.stored(row),
            Order::Tiled(heads) if heads.dim > 0 => heads.stored(row),
            _ => row,
        }
    }

    /// Whether a matrix of so many rows can have this order.
    fn fits(&self, rows: usize) -> bool {
        match self {
            Order::Pairs(size) => *size > 0 && size.is_multiple_of(2) && rows.is_multiple_of(*size),
            Order::Groups(heads) => heads.dim > 0 && heads.count * (heads.queries + 2) * heads.dim == rows,
            Order::Tiled(heads) => heads.fit(rows),
            Order::Same | Order::TiledColumns(_) => false,
        }
    }
}

/// Key heads, each with so many query heads, and the rows of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KeyHeads {
    pub count: usize,
    pub queries: usize,
    pub dim: usize,
}

impl KeyHeads {
    /// Where in the file the row is that Hugging Face has in this place.
    fn stored(&self, at: usize) -> usize {
        let KeyHeads { count, queries, dim } = *self;
        let (group, within) = (at / dim / (queries + 2), at / dim % (queries + 2));
        let head = match within.checked_sub(queries) {
            None => group * queries + within,
            Some(part) => count * (queries + part) + group,
        };
        head * dim + at % dim
    }
}

/// Value heads that are ordered by their number within a key head, then by the key head; Hugging Face has it the other way round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ValueHeads {
    /// Rows, or columns, before those of the heads.
    pub first: usize,
    /// Number of key heads, and of the value heads of each.
    pub keys: usize,
    pub per_key: usize,
    /// Rows of a head.
    pub dim: usize,
}

impl ValueHeads {
    /// Where in the file the row is that Hugging Face has in this place.
    fn stored(&self, at: usize) -> usize {
        let Some(inner) = at.checked_sub(self.first) else { return at };
        let (head, within) = (inner / self.dim, inner % self.dim);
        self.first + (head % self.per_key * self.keys + head / self.per_key) * self.dim + within
    }

    /// Whether so many rows are those of these heads.
    fn fit(&self, rows: usize) -> bool {
        self.dim > 0 && self.first + self.keys * self.per_key * self.dim == rows
    }
}

/// How the values of a tensor are stored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Encoding {
    pub(super) kind: &'static ElementType,
    pub(super) order: Order,
    pub(super) values: Values,
    /// Factor of all values, for types whose scales are in single precision; 1 for others.
    pub(super) factor: f32,
}

impl Encoding {
    /// As the file has it.
    pub(super) fn plain(kind: &'static ElementType) -> Encoding {
        Encoding { kind, order: Order::Same, values: Values::Same, factor: 1.0 }
    }

    /// Name of the type in the file.
    pub fn name(&self) -> &'static str {
        self.kind.name
    }

    /// Type of the values that [`Encoding::decode`] gives.
    pub fn dtype(&self) -> Dtype {
        match (self.kind.storage, self.values) {
            (Storage::Number(dtype), Values::Same) => dtype,
            _ => Dtype::F32,
        }
    }

    /// Whether rows can be read as they are stored: no change of values, and columns that move in whole blocks.
    fn has_blocks(&self) -> bool {
        let moves = |heads: &ValueHeads| heads.dim.is_multiple_of(self.kind.block) && heads.first == 0;
        self.values == Values::Same && !matches!(&self.order, Order::TiledColumns(heads) if !moves(heads))
    }

    /// The form and the rows of a matrix with rows of `k` weights; `None` for numbers.
    pub fn rows<'a>(&self, data: &'a [u8], k: usize) -> Option<(StoredFormat, Box<dyn StoredRows + Send + 'a>)> {
        match self.kind.storage {
            Storage::Codes(format, _) if self.has_blocks() => {
                Some((format, Box::new(Rows { encoding: *self, data, k })))
            }
            _ => None,
        }
    }

    /// Whether the values are the bytes in the file.
    pub fn is_plain(&self) -> bool {
        let is_number = matches!(self.kind.storage, Storage::Number(_));
        is_number && self.order == Order::Same && self.values == Values::Same
    }

    /// Little-endian values of [`Encoding::dtype`] of a tensor of this many rows.
    pub fn decode<'a>(&self, data: &'a [u8], rows: usize) -> Cow<'a, [u8]> {
        let data = self.in_order(data, rows);
        let is_number = matches!(self.kind.storage, Storage::Number(_));
        if is_number && self.values == Values::Same {
            return data;
        }
        let mut values = self.kind.scaled_values(&data, self.factor);
        if let Order::TiledColumns(heads) = self.order
            && !self.has_blocks()
        {
            values = move_columns(&values, rows, heads);
        }
        let undone = |value: f32| match self.values {
            Values::Same => value,
            Values::PlusOne => value - 1.0,
            Values::LogNegative => (-f64::from(value)).ln() as f32,
        };
        Cow::Owned(values.into_iter().flat_map(|value| undone(value).to_le_bytes()).collect())
    }

    /// The bytes with rows, and columns of whole blocks, in the order of Hugging Face.
    fn in_order<'a>(&self, data: &'a [u8], rows: usize) -> Cow<'a, [u8]> {
        if rows == 0 || !data.len().is_multiple_of(rows) || data.is_empty() {
            // The shape contradicts the configuration, which the caller reports.
            return Cow::Borrowed(data);
        }
        let width = data.len() / rows;
        let by_rows = |stored: &dyn Fn(usize) -> usize| -> Cow<'a, [u8]> {
            Cow::Owned((0..rows).flat_map(|row| &data[stored(row) * width..][..width]).copied().collect())
        };
        match self.order {
            order if order.fits(rows) => by_rows(&|row| order.stored(row)),
            Order::TiledColumns(heads) if self.has_blocks() => {
                data.chunks_exact(width).flat_map(|row| self.columns(row, heads).into_owned()).collect()
            }
            _ => Cow::Borrowed(data),
        }
    }

    /// A row of whole blocks with its columns in the order of Hugging Face.
    fn columns<'a>(&self, row: &'a [u8], heads: ValueHeads) -> Cow<'a, [u8]> {
        let bytes = heads.dim / self.kind.block * self.kind.bytes;
        let count = heads.keys * heads.per_key;
        if bytes == 0 || row.len() != count * bytes {
            return Cow::Borrowed(row);
        }
        let head = |head: usize| heads.stored(head * heads.dim) / heads.dim * bytes;
        Cow::Owned((0..count).flat_map(|number| &row[head(number)..][..bytes]).copied().collect())
    }
}

/// Values of rows with the columns of value heads in the order of Hugging Face.
fn move_columns(values: &[f32], rows: usize, heads: ValueHeads) -> Vec<f32> {
    let width = values.len() / rows.max(1);
    if !heads.fit(width) {
        return values.to_vec();
    }
    let moved = |row: &[f32]| (0..width).map(|column| row[heads.stored(column)]).collect::<Vec<f32>>();
    values.chunks_exact(width).flat_map(moved).collect()
}

/// Rows of blocks.
struct Rows<'a> {
    encoding: Encoding,
    data: &'a [u8],
    /// Weights of a row.
    k: usize,
}

impl StoredRows for Rows<'_> {
    fn read(&self, row: usize, out: &mut StoredRow) {
        let Encoding { kind, order, factor, .. } = self.encoding;
        let row = order.stored(row);
        let bytes = self.k / kind.block * kind.bytes;
        let row = self.data.get(row * bytes..(row + 1) * bytes).unwrap_or_default();
        match order {
            Order::TiledColumns(heads) => kind.unpack(&self.encoding.columns(row, heads), factor, out),
            _ => kind.unpack(row, factor, out),
        }
    }
}

/// The row of a GGUF tensor that is row `row` in the order of Hugging Face, in heads of `size` rows.
fn paired(row: usize, size: usize) -> usize {
    row / size * size + row % (size / 2) * 2 + row % size / (size / 2)
}
