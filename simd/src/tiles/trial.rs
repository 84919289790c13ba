//! Random tiles that tell the right definition of the bits from wrong ones, for a self-test at start and for longer tests.

use super::{ByteLines, ByteRows, LANES, Pairs, Registers, Tile};

/// Pseudorandom numbers (SplitMix64).
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, n: u32) -> u32 {
        ((self.bits() >> 40) % u64::from(n)) as u32
    }

    /// Bits of a bfloat16 number with an exponent of a range; in `special` of 256 cases a zero, a subnormal number, an infinity or a
    /// NaN of either kind.
    fn half(&mut self, exponents: [u32; 2], special: u32) -> u32 {
        let (sign, mantissa) = (self.below(2) << 15, self.below(128));
        if self.below(256) < special {
            return sign
                | [0, 0, mantissa | 1, 0x7f80, 0x7f81 + mantissa / 2, 0x7fc0 + mantissa / 2][self.below(6) as usize];
        }
        sign | (exponents[0] + self.below(exponents[1] - exponents[0])) << 7 | mantissa
    }
}

/// A kind of numbers.
struct Kind {
    /// Biased exponents of A and of B, each from the first to before the second.
    exponents: [[u32; 2]; 2],
    /// How many of 256 numbers are zero, subnormal, infinite or NaN.
    special: u32,
    /// Exponents of the sums to start from.
    sums: [u32; 2],
}

const fn kind(a: [u32; 2], b: [u32; 2], special: u32, sums: [u32; 2]) -> Kind {
    Kind { exponents: [a, b], special, sums }
}

/// Numbers of a network; all exponents; few special numbers, and many; products and sums around 2^-126, and closer to it; subnormal
/// sums of normal factors; overflow; results that are one rounding away from 2^-126.
const KINDS: [Kind; 9] = [
    kind([117, 128], [117, 128], 0, [110, 128]),
    kind([0, 256], [0, 256], 0, [0, 256]),
    kind([118, 140], [118, 140], 2, [0, 256]),
    kind([118, 140], [118, 140], 64, [0, 256]),
    kind([60, 70], [57, 67], 0, [0, 4]),
    kind([63, 65], [63, 66], 3, [0, 4]),
    kind([120, 124], [1, 6], 0, [0, 4]),
    kind([186, 192], [186, 193], 0, [250, 255]),
    kind([50, 53], [50, 53], 0, [0, 4]),
];

/// Number of kinds of [`operands`].
pub const NUM_KINDS: usize = KINDS.len();

/// An A tile, a B tile and sums to start from, which are zeros in half of the cases. `kind`: which numbers they are of.
pub fn operands(random: &mut Random, kind: usize) -> [Tile; 3] {
    let Kind { exponents: [a, b], special, sums } = &KINDS[kind];
    let mut tile = |exponents: [u32; 2], is_a: bool| -> Tile {
        let mut half = |pair: usize| match (kind, pair % 4) {
            // Products of ±2^-126, then smaller ones, then two zeros.
            (8, 0) => random.half([64, 65], 0) & 0xff80,
            (8, 2..) => 0,
            _ => random.half(exponents, *special),
        };
        let mut word = |pair| half(pair) | half(pair) << 16;
        std::array::from_fn(|i| Pairs(std::array::from_fn(|j| word(if is_a { j } else { i }))))
    };
    let (a, b) = (tile(*a, true), tile(*b, false));
    let from_zero = random.below(2) == 0;
    let mut sum = || match from_zero {
        true => 0,
        false => random.below(2) << 31 | (sums[0] + random.below(sums[1] - sums[0])) << 23 | random.below(1 << 23),
    };
    [a, b, std::array::from_fn(|_| Pairs(std::array::from_fn(|_| sum())))]
}

/// The sums of a product, of which the first `rows` are computed.
pub fn product(registers: &mut impl Registers, [a, b, sums]: &[Tile; 3]) -> Tile {
    let mut out = *sums;
    registers.load::<0>(sums);
    registers.stream::<4>(a);
    registers.load::<6>(b);
    registers.add_products::<0, 4, 6>();
    registers.store::<0>(&mut out);
    out
}

/// Random rows and lines of bytes, and sums to start from.
pub fn byte_operands(random: &mut Random) -> (ByteRows, ByteLines, Tile) {
    let mut bytes = || random.bits() as u8;
    let rows = std::array::from_fn(|_| std::array::from_fn(|_| bytes() as i8));
    let lines = std::array::from_fn(|_| std::array::from_fn(|_| bytes()));
    (ByteRows(rows), ByteLines(lines), std::array::from_fn(|_| Pairs(std::array::from_fn(|_| random.bits() as u32))))
}

/// The sums of a product of bytes.
pub fn byte_product(registers: &mut impl Registers, (rows, lines, sums): &(ByteRows, ByteLines, Tile)) -> Tile {
    let mut out = *sums;
    registers.load::<0>(sums);
    registers.load_rows::<4>(rows);
    registers.load_lines::<6>(lines);
    registers.add_byte_products::<0, 4, 6>();
    registers.store::<0>(&mut out);
    out
}

/// Number of words that differ between two tiles.
pub fn differences(a: &Tile, b: &Tile) -> usize {
    (0..LANES * LANES).filter(|i| a[i / LANES].0[i % LANES] != b[i / LANES].0[i % LANES]).count()
}
