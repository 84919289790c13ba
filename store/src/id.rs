//! Ids: `resp_` and the like, the time in 8 hexadecimal digits, and 128 random bits.
//!
//! The time is not secret: whoever asks for an id learns whether one that old can still exist, which says nothing about whether
//! it ever did.

use std::fmt::Write;

use crate::error::StoreError;

/// Hexadecimal digits of the time.
const TIME: usize = 8;
/// Hexadecimal digits of the random number.
const RANDOM: usize = 32;

/// Returns a new id that begins with `prefix` and tells the time `now`.
///
/// # Errors
/// The system has no random numbers.
pub fn fresh_id(prefix: &str, now: u64) -> Result<String, StoreError> {
    let mut random = [0; RANDOM / 2];
    getrandom::fill(&mut random).map_err(|error| StoreError::Random(error.to_string()))?;
    let mut id = format!("{prefix}_{:08x}", now & u64::from(u32::MAX));
    for byte in random {
        // Writing to a `String` cannot fail.
        let _ = write!(id, "{byte:02x}");
    }
    Ok(id)
}

/// When an id was made, in seconds; `None` if it is no id of this form.
pub fn created_at(id: &str) -> Option<u64> {
    let digits = id.rsplit('_').next()?;
    let is_hex = digits.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    if digits.len() != TIME + RANDOM || !is_hex {
        return None;
    }
    u64::from_str_radix(&digits[..TIME], 16).ok()
}
