//! Sums over the ranks of a group, added in the order of the ranks by those who exchange bytes only.
//!
//! ```text
//! few values, or two ranks   all values of all ranks ─▶ every rank adds them
//! many values                each rank gets its part of the values of all ranks ─▶ adds it ─▶ the sums of all parts are gathered
//! ```
//!
//! A rank of n receives n − 1 times the bytes in the first form, and 2 (n − 1) / n times in the second. Both add alike.

use std::ops::Range;

use device::bytes_of;

use super::{Collective, CollectiveError};

/// Numbers that are added at a time, which bounds the memory.
const PIECE: usize = 1 << 18;
/// Most numbers that every rank adds: one exchange of more bytes then costs less than two of fewer.
const FEW: usize = 1 << 13;

/// Replaces values with their sums over all ranks ([`Collective::sum`]).
pub(super) fn sum<C: Collective + ?Sized>(group: &C, values: &mut [f32]) -> Result<(), CollectiveError> {
    for values in values.chunks_mut(PIECE) {
        match group.size() <= 2 || values.len() <= FEW {
            true => of_all(group, values)?,
            false => of_parts(group, values)?,
        }
    }
    Ok(())
}

/// The values of every rank are added by every rank.
fn of_all<C: Collective + ?Sized>(group: &C, values: &mut [f32]) -> Result<(), CollectiveError> {
    let mut all = vec![0; group.size() * size_of_val(values)];
    group.all_gather(bytes_of(values), 1, &vec![size_of_val(values); group.size()], &mut all)?;
    add(&all, values);
    Ok(())
}

/// Each rank adds a part of the values of every rank.
fn of_parts<C: Collective + ?Sized>(group: &C, values: &mut [f32]) -> Result<(), CollectiveError> {
    let (rank, size, len) = (group.rank(), group.size(), values.len());
    let part = |rank: usize| -> Range<usize> { len * rank / size..len * (rank + 1) / size };
    let others = || (0..size).filter(|other| *other != rank);
    others().try_for_each(|to| group.send(to, bytes_of(&values[part(to)])))?;
    let own = &mut values[part(rank)];
    let bytes = size_of_val(own);
    let mut all = vec![0; size * bytes];
    all[rank * bytes..][..bytes].copy_from_slice(bytes_of(own));
    others().try_for_each(|from| group.receive(from, &mut all[from * bytes..][..bytes]))?;
    add(&all, own);
    let widths: Vec<usize> = (0..size).map(|rank| part(rank).len() * size_of::<f32>()).collect();
    let mut sums = vec![0; len * size_of::<f32>()];
    group.all_gather(bytes_of(own), 1, &widths, &mut sums)?;
    add(&sums, values);
    Ok(())
}

/// `values` = the sum of the slices of as many numbers that follow each other.
fn add(slices: &[u8], values: &mut [f32]) {
    for (number, slice) in slices.chunks_exact(size_of_val(values).max(1)).enumerate() {
        let given = slice.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes));
        let pairs = values.iter_mut().zip(given);
        pairs.for_each(|(sum, value)| *sum = if number == 0 { value } else { *sum + value });
    }
}
