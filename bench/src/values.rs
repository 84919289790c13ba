//! How values of flags are written. The parser shows what was found and names the flag; the errors here say what was expected.

use std::str::FromStr;

/// A number of an unsigned type.
pub fn whole<T: FromStr>(text: &str) -> Result<T, String> {
    let most = u64::MAX >> (64 - 8 * size_of::<T>());
    text.parse().map_err(|_| format!("expected a whole number from 0 to {most}"))
}

/// `--api-key`. Space around a key is lost in a header: no client could send it.
pub fn key(text: &str) -> Result<String, String> {
    if text.is_empty() || text.trim() != text {
        return Err("expected at least one character, and no space around it".to_string());
    }
    Ok(text.to_string())
}
