//! The likeliest token of a row, in one pass.

/// Values compared side by side: a comparison per lane has no dependency on its neighbours and becomes a vector instruction.
const LANES: usize = 16;
/// Values per block: small enough to still be in the first-level cache when the winner's place is looked up.
const BLOCK: usize = 1024;

/// Index of the largest value, the lowest on ties. NaN never wins. `None` where nothing is above −∞.
pub(crate) fn argmax(row: &[f32]) -> Option<u32> {
    let mut best = f32::NEG_INFINITY;
    let mut index = None;
    for (number, block) in row.chunks(BLOCK).enumerate() {
        let largest = max(block);
        if largest > best {
            best = largest;
            index = block.iter().position(|&x| x == largest).map(|at| (number * BLOCK + at) as u32);
        }
    }
    index
}

/// The largest value, NaN aside; −∞ where there is none.
pub(crate) fn max(row: &[f32]) -> f32 {
    let (groups, rest) = row.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for group in groups {
        for (lane, &x) in lanes.iter_mut().zip(group) {
            *lane = larger(*lane, x);
        }
    }
    lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, larger)
}

/// `x` where it is above `y`. Not `f32::max`, whose care for NaN on both sides costs two more instructions.
#[inline]
fn larger(y: f32, x: f32) -> f32 {
    if x > y { x } else { y }
}

#[cfg(test)]
mod tests {
    use super::argmax;

    #[test]
    fn the_lowest_of_equal_values_wins() {
        let mut row = vec![0.0; 5000];
        assert_eq!(argmax(&row), Some(0));
        (row[4321], row[1234]) = (2.0, 2.0);
        assert_eq!(argmax(&row), Some(1234));
    }

    #[test]
    fn nan_and_minus_infinity_never_win() {
        assert_eq!(argmax(&[f32::NAN, -3.0, f32::NAN, f32::NEG_INFINITY]), Some(1));
        assert_eq!(argmax(&[f32::NAN, f32::NEG_INFINITY]), None);
        assert_eq!(argmax(&[1.0, f32::INFINITY, f32::INFINITY]), Some(1));
        assert_eq!(argmax(&[]), None);
    }
}
