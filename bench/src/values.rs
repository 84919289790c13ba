//! Parsers of flag values. The command line parser names the flag and what was found; the errors here say what was expected.

use std::str::FromStr;

/// Parses a number of an unsigned type.
///
/// # Errors
/// The text is no whole number of this type.
pub fn whole<T: FromStr>(text: &str) -> Result<T, String> {
    let most = u64::MAX >> (64 - 8 * size_of::<T>());
    text.parse().map_err(|_| format!("expected a whole number from 0 to {most}"))
}

/// Parses `--api-key`. White space around a key would be lost in the header, so no client could send it.
///
/// # Errors
/// The key is empty, or begins or ends with white space.
pub fn key(text: &str) -> Result<String, String> {
    if text.is_empty() || text.trim() != text {
        return Err("expected at least one character, and no white space at the beginning or end".to_string());
    }
    Ok(text.to_string())
}
