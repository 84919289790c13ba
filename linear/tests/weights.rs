//! Random weights in the forms in which checkpoints store them.

use linear::{Codes, Offset, Rounding, Scale, StoredFormat, StoredPart, StoredRow, StoredRows};

const TABLE: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
const FLOATS: [f32; 16] =
    [-1.0, -0.7, -0.5, -0.4, -0.3, -0.2, -0.1, 0.0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1.0];

/// A form for each kind of codes, scales and offsets that formats of checkpoints have.
pub fn formats() -> Vec<StoredFormat> {
    let integers = |bits, zero| Codes::Integers { bits, zero };
    let form = |codes, group, scale, offset| StoredFormat { codes, group, scale, offset };
    vec![
        form(integers(4, 8), 128, Scale::Bf16, Offset::None),
        form(integers(4, 0), 64, Scale::F16, Offset::ZeroPoint),
        form(integers(8, 0), 32, Scale::F16, Offset::ZeroPoint),
        form(integers(8, 128), usize::MAX, Scale::F32, Offset::None),
        form(integers(5, 0), 32, Scale::F16, Offset::Minimum),
        form(integers(5, 16), 32, Scale::F16, Offset::None),
        form(integers(2, 0), 16, Scale::Byte, Offset::ByteMinimum),
        form(integers(3, 4), 16, Scale::SignedByte, Offset::None),
        form(integers(6, 32), 16, Scale::SignedByte, Offset::None),
        form(integers(5, 0), 32, Scale::Byte, Offset::ByteMinimum),
        form(Codes::Table(&TABLE), 32, Scale::F16, Offset::None),
        form(Codes::Table(&TABLE), 32, Scale::Exponent, Offset::None),
        form(Codes::Floats(&FLOATS), 64, Scale::F32, Offset::None),
        form(Codes::E4m3, 128, Scale::Bf16, Offset::None),
        form(Codes::Table(&TABLE), 16, Scale::F32, Offset::None),
    ]
}

/// Random rows of a form.
pub struct Random {
    pub format: StoredFormat,
    pub rows: Vec<StoredRow>,
}

impl StoredRows for Random {
    fn read(&self, row: usize, out: &mut StoredRow) {
        out.clone_from(&self.rows[row]);
    }
}

impl Random {
    pub fn new(format: StoredFormat, n: usize, k: usize, seed: u64) -> Random {
        let draws: Vec<u32> =
            values(n * k * 4, seed).into_iter().map(|x| ((x + 1.0) * (1 << 23) as f32) as u32).collect();
        let mut draws = draws.into_iter().cycle();
        let mut draw = |below: u32| draws.next().unwrap() % below;
        let half = |x: f32| half::f16::from_f32(x).to_bits();
        let number = |draw: u32| (draw % 200 + 1) as f32 / 1e4;
        let rows = (0..n).map(|_| {
            let mut row = StoredRow::new(&format, k);
            let code = |draw: u32| if format.codes == Codes::E4m3 && draw & 0x7f == 0x7f { 3 } else { draw as u8 };
            row.codes.iter_mut().for_each(|x| *x = code(draw(1 << format.codes.bits())));
            let scale = |d: u32| match format.scale {
                Scale::F32 => number(d).to_bits(),
                Scale::F16 => half(number(d)).into(),
                Scale::Bf16 => half::bf16::from_f32(number(d)).to_bits().into(),
                // Some are subnormal.
                Scale::Exponent => {
                    if d.is_multiple_of(8) {
                        d / 8 % 3
                    } else {
                        118 + d % 9
                    }
                }
                Scale::Byte | Scale::SignedByte => d % 256,
            };
            row.scales.iter_mut().for_each(|x| *x = scale(draw(1 << 20)));
            let greatest = if format.codes.bits() == 8 { 256 } else { 17 };
            let offset = |d: u32| if format.offset == Offset::Minimum { half(number(d)).into() } else { d % greatest };
            row.offsets.iter_mut().for_each(|x| *x = offset(draw(1 << 20)));
            row.outer.iter_mut().for_each(|x| *x = [draw(99), draw(99)].map(|d| half(number(d) / 50.0)));
            row
        });
        Random { format, rows: rows.collect() }
    }

    pub fn part<'a>(&'a self, order: Option<&'a [u32]>, rounding: Rounding) -> StoredPart<'a> {
        StoredPart { rows: self.rows.len(), format: self.format, source: self, order, rounding }
    }

    /// The weights `[n, k]` in the order of the inputs.
    pub fn values(&self, order: Option<&[u32]>, k: usize) -> Vec<f32> {
        let mut all = Vec::new();
        for row in &self.rows {
            let mut columns = vec![f32::NAN; k];
            row.values(&self.format, &mut columns);
            let mut out = columns.clone();
            if let Some(order) = order {
                order.iter().zip(&columns).for_each(|(input, value)| out[*input as usize] = *value);
            }
            all.extend(out);
        }
        all
    }
}

/// Numbers from -1 to 1.
pub fn values(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed | 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 24) as f32 * 2.0 - 1.0
    };
    (0..len).map(|_| next()).collect()
}
