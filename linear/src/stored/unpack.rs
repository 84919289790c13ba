//! Stored weights as floats.
//!
//! The floats are the weights themselves, so a product has the bits of one with unpacked weights.

use std::ops::Range;

use simd::int8::{IntLanes, WithInts};
use simd::pairs::PairLanes;
use simd::small_float::{bf16_to_f32, f32_to_bf16};
use simd::{LANES, Lanes, Pairs, prefetch};

use super::format::{Codes, Offset};
use super::group::Group;
use super::panels::{FOURS, StoredPanels, code, codes};
use crate::blocks::PAIR;
use crate::form::Line;
use crate::quantize::BLOCK;

/// Distance of prefetched lines, in bytes.
pub(super) const AHEAD: usize = 4 << 10;

/// How numbers come from the codes of a block.
pub(super) trait Cut: 'static {
    /// Lines of a panel in a block, or 0 where formats differ.
    const LINES: usize;
    /// Whether the numbers lack the zero point that all groups have.
    const OFF: bool = false;
    /// What [`Cut::whole`] multiplies numbers with, a power of two.
    const UNIT: f32 = 1.0;
    /// What takes its place for integers where those are converted faster than looked up.
    type Integers: Cut;
    /// The numbers that inputs 4g..4g+4 of a panel stand for.
    fn load<L: WithInts>(lines: &[Line], g: usize, codebook: &Codebook) -> [L; 4];
    /// The same numbers in bfloat16, with the zero point of all groups subtracted, times [`Cut::UNIT`].
    #[inline(always)]
    fn whole<L: WithInts>(lines: &[Line], g: usize, codebook: &Codebook) -> [L; 4] {
        Self::load(lines, g, codebook)
    }
    /// The same numbers in pairs; `table` is that of the codes.
    fn pairs<D: PairLanes>(codes: Codes, table: D::Table, lines: &[Line], g: usize, to: &mut [Pairs; 2]);
}

/// What codes stand for.
pub(super) struct Codebook {
    codes: Codes,
    /// Numbers of the first 32 codes.
    table: [[f32; LANES]; 2],
}

/// Integers in registers of the floats that go with pairs.
type Ints<D> = <<D as PairLanes>::Floats as WithInts>::Ints;

/// Pairs up numbers that are bfloat16 after the addition of `add`.
#[inline(always)]
fn join<D: PairLanes>([a, b, c, d]: [D::Floats; 4], add: f32, to: &mut [Pairs; 2]) {
    let add = D::Floats::splat(add);
    D::join(a.add(add), b.add(add), &mut to[0]);
    D::join(c.add(add), d.add(add), &mut to[1]);
}

fn round(number: f32) -> f32 {
    bf16_to_f32(f32_to_bf16(number))
}

impl Codebook {
    pub fn new(codes: Codes) -> Codebook {
        let mut table = [[0.0; LANES]; 2];
        for (code, number) in table.as_flattened_mut().iter_mut().enumerate().take(1 << codes.bits()) {
            *number = codes.number(code as u8);
        }
        Codebook { codes, table }
    }

    /// The numbers are rounded to bfloat16.
    pub fn in_bf16(codes: Codes) -> Codebook {
        let mut codebook = Codebook::new(codes);
        codebook.table = codebook.table.map(|numbers| numbers.map(round));
        codebook
    }
}

/// Integers in one plane or two.
pub(super) struct Planes<const LOW: u32, const HIGH: u32>;

impl<const LOW: u32, const HIGH: u32> Cut for Planes<LOW, HIGH> {
    const LINES: usize = (LOW + HIGH) as usize;
    const OFF: bool = true;
    const UNIT: f32 = if LOW + HIGH < 6 { 1.0 } else { (1u32 << (32 - LOW - HIGH)) as f32 };
    type Integers = Self;
    #[inline(always)]
    fn load<L: WithInts>(lines: &[Line], g: usize, _: &Codebook) -> [L; 4] {
        let codes = codes::<L::Ints, LOW, HIGH>(lines, g);
        let byte = L::Ints::byte;
        [byte(codes, 0), byte(codes, 1), byte(codes, 2), byte(codes, 3)]
    }
    #[inline(always)]
    fn whole<L: WithInts>(lines: &[Line], g: usize, codebook: &Codebook) -> [L; 4] {
        let (codes, zero) = (codes::<L::Ints, LOW, HIGH>(lines, g), codebook.codes.zero());
        if LOW + HIGH < 6 {
            let (number, table) = (L::Ints::number, &codebook.table);
            return [
                number(codes, 0, table),
                number(codes, 1, table),
                number(codes, 2, table),
                number(codes, 3, table),
            ];
        }
        if zero == 1 << (LOW + HIGH - 1) {
            let (high, bits) = (L::Ints::high_byte, LOW + HIGH);
            return [high(codes, 0, bits), high(codes, 1, bits), high(codes, 2, bits), high(codes, 3, bits)];
        }
        let (byte, zero, unit) = (L::Ints::byte, L::splat(-zero as f32), L::splat(Self::UNIT));
        let [a, b, c, d] = [byte(codes, 0), byte(codes, 1), byte(codes, 2), byte(codes, 3)];
        [a.add(zero).mul(unit), b.add(zero).mul(unit), c.add(zero).mul(unit), d.add(zero).mul(unit)]
    }
    #[inline(always)]
    fn pairs<D: PairLanes>(codes: Codes, table: D::Table, lines: &[Line], g: usize, to: &mut [Pairs; 2]) {
        let of_inputs = self::codes::<Ints<D>, LOW, HIGH>(lines, g);
        if LOW == 8 {
            let [a, b, c, d] = [0, 1, 2, 3];
            let byte = Ints::<D>::byte;
            let numbers = [byte(of_inputs, a), byte(of_inputs, b), byte(of_inputs, c), byte(of_inputs, d)];
            join::<D>(numbers, -codes.zero() as f32, to);
        } else {
            D::look_up(of_inputs, table, LOW + HIGH > 5, to);
        }
    }
}

/// Codes of 4 bits.
pub(super) struct Table;

impl Cut for Table {
    const LINES: usize = 4;
    type Integers = Planes<4, 0>;
    #[inline(always)]
    fn load<L: WithInts>(lines: &[Line], g: usize, Codebook { table, .. }: &Codebook) -> [L; 4] {
        let (words, shift, look_up) = (&lines[g / 2].0, g as u32 % 2 * 4, L::lookup_floats);
        [
            look_up(words, shift, &table[0]),
            look_up(words, shift + 8, &table[0]),
            look_up(words, shift + 16, &table[0]),
            look_up(words, shift + 24, &table[0]),
        ]
    }
    #[inline(always)]
    fn pairs<D: PairLanes>(_: Codes, table: D::Table, lines: &[Line], g: usize, to: &mut [Pairs; 2]) {
        D::look_up(codes::<Ints<D>, 4, 0>(lines, g), table, false, to);
    }
}

/// Floats of 8 bits.
pub(super) struct E4m3;

impl Cut for E4m3 {
    const LINES: usize = 8;
    type Integers = Self;
    #[inline(always)]
    fn load<L: WithInts>(lines: &[Line], g: usize, _: &Codebook) -> [L; 4] {
        let (codes, load) = (lines[g].0.as_chunks::<LANES>().0, L::load_e4m3);
        [load(&codes[0]), load(&codes[1]), load(&codes[2]), load(&codes[3])]
    }
    #[inline(always)]
    fn pairs<D: PairLanes>(codes: Codes, _: D::Table, lines: &[Line], g: usize, to: &mut [Pairs; 2]) {
        join::<D>(Self::load(lines, g, &Codebook { codes, table: [[0.0; LANES]; 2] }), 0.0, to);
    }
}

/// Codes of every kind, one at a time: slower, and one function instead of seven.
pub(super) struct Any;

impl Cut for Any {
    const LINES: usize = 0;
    type Integers = Self;
    #[inline(always)]
    fn load<L: WithInts>(lines: &[Line], g: usize, &Codebook { codes, .. }: &Codebook) -> [L; 4] {
        std::array::from_fn(|i| L::load(&std::array::from_fn(|lane| codes.number(code(codes, lines, 4 * g + i, lane)))))
    }
    #[inline(always)]
    fn whole<L: WithInts>(lines: &[Line], g: usize, &Codebook { codes, .. }: &Codebook) -> [L; 4] {
        let number = |i, lane| round(codes.number(code(codes, lines, 4 * g + i, lane)));
        std::array::from_fn(|i| L::load(&std::array::from_fn(|lane| number(i, lane))))
    }
    #[inline(always)]
    fn pairs<D: PairLanes>(codes: Codes, _: D::Table, lines: &[Line], g: usize, to: &mut [Pairs; 2]) {
        join::<D>(Self::whole(lines, g, &Codebook { codes, table: [[0.0; LANES]; 2] }), 0.0, to);
    }
}

/// What takes the weights of a pair.
pub(super) trait Sink<L> {
    /// Takes inputs `input..input + 4` of a panel.
    fn take(&mut self, panel: usize, input: usize, weights: [L; 4]);
}

/// Floats in memory, `[inputs][16]` for each panel.
pub(super) struct Unpacked<'a>(pub [&'a mut [[f32; LANES]]; PAIR]);

impl<L: Lanes> Sink<L> for Unpacked<'_> {
    #[inline(always)]
    fn take(&mut self, panel: usize, input: usize, weights: [L; 4]) {
        let out = &mut self.0[panel][input..][..4];
        for i in 0..4 {
            weights[i].store(&mut out[i]);
        }
    }
}

/// Sums of products with M rows, each from the first of the inputs on.
pub(super) struct Sums<'a, L, const M: usize> {
    pub x: [&'a [f32]; M],
    pub sums: [[L; PAIR]; M],
}

impl<L: Lanes, const M: usize> Sink<L> for Sums<'_, L, M> {
    #[inline(always)]
    fn take(&mut self, panel: usize, input: usize, weights: [L; 4]) {
        for m in 0..M {
            let x = &self.x[m][input..][..4];
            for i in 0..4 {
                self.sums[m][panel] = L::splat(x[i]).mul_add(weights[i], self.sums[m][panel]);
            }
        }
    }
}

/// Passes some blocks of a pair to `sink`.
// The loops over registers share one index between several arrays.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
pub(super) fn unpack<L: WithInts, C: Cut>(
    panels: &StoredPanels,
    pair: usize,
    blocks: Range<usize>,
    sink: &mut impl Sink<L>,
) {
    let StoredPanels { format, layout, .. } = panels;
    let (header, lines) = panels.pair(pair);
    let codebook = Codebook::new(format.codes);
    let zero = L::splat(if C::OFF { format.codes.zero() as f32 } else { 0.0 });
    let subtract = C::OFF && format.codes.zero() != 0 || format.offset == Offset::ZeroPoint;
    let minima = format.has_minimum();
    // Fours of inputs that share a group.
    let part = if format.halves() { FOURS / 2 } else { FOURS };
    let mut group = Group::ZERO;
    for (to, block) in blocks.enumerate() {
        let lines = &lines[block * PAIR * layout.block..][..PAIR * layout.block];
        for line in lines {
            prefetch(line.0.as_ptr().wrapping_byte_add(AHEAD));
        }
        let lines = lines.split_at(layout.block);
        for first in (0..FOURS).step_by(part) {
            group.read::<L>(panels, header, (block * BLOCK + first * 4) / format.group);
            for g in first..first + part {
                for (panel, lines) in [lines.0, lines.1].into_iter().enumerate() {
                    let mut weights = C::load::<L>(lines, g, &codebook);
                    let zeros = L::load(&group.points[panel]).add(zero).mul(L::splat(-1.0));
                    let (scales, least) = (L::load(&group.scales[panel]), L::load(&group.minima[panel]));
                    for weight in &mut weights {
                        if subtract {
                            *weight = weight.add(zeros);
                        }
                        *weight = weight.mul(scales);
                        if minima {
                            *weight = weight.add(least);
                        }
                    }
                    sink.take(panel, to * BLOCK + g * 4, weights);
                }
            }
        }
    }
}
