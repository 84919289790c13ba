//! Which GNU C library a program needs: the newest symbol version that it names.

use std::fmt;

/// A version of the C library, for example 2.34.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

const MARK: &[u8] = b"GLIBC_";

/// Returns the newest symbol version, such as `GLIBC_2.34`, in the bytes of a program: a text that ends in 0, as in its string
/// table. A program that has such a text for another reason is taken to need it, which is safe.
pub fn newest(program: &[u8]) -> Version {
    let starts = program.windows(MARK.len()).enumerate().filter(|(_, window)| *window == MARK);
    let version = |(at, _): (usize, &[u8])| {
        let text = program[at + MARK.len()..].split(|byte| *byte == 0).next()?;
        let (major, minor) = std::str::from_utf8(text).ok()?.split_once('.')?;
        // `2.2.5` is older than any 2.3, so its third number does not matter.
        let minor = minor.split('.').next()?;
        Some(Version(major.parse().ok()?, minor.parse().ok()?))
    };
    starts.filter_map(version).max().unwrap_or_default()
}
