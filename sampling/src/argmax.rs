//! The likeliest token of a row, in one pass.

/// Values compared side by side. Lanes do not depend on each other, so a comparison of all becomes a vector
/// instruction.
const LANES: usize = 16;
/// Values per block, few enough to stay in the first-level cache until the index of the largest is looked up.
const BLOCK: usize = 1024;

/// Returns the index of the largest value, the lowest on ties. Ignores NaN. Returns `None` if nothing is above −∞.
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

/// Returns the largest value. Ignores NaN. Returns −∞ if there is no other value.
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

/// Returns the larger of two values, `y` if `x` is NaN. `f32::max` handles NaN on both sides and takes two more
/// instructions.
#[inline]
fn larger(y: f32, x: f32) -> f32 {
    if x > y { x } else { y }
}
