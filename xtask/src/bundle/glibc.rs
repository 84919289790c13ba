//! Which GNU C library a program needs: the newest symbol version among those that it names.

use std::fmt;

/// Of the C library: 2.34.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

const MARK: &[u8] = b"GLIBC_";

/// Looks for the names of symbol versions, `GLIBC_2.34`, in the bytes of a program: texts that end in 0, as they stand in its
/// string table. A program that has such a text for another reason is taken to need it, which errs on the safe side.
pub fn newest(program: &[u8]) -> Version {
    let starts = program.windows(MARK.len()).enumerate().filter(|(_, window)| *window == MARK);
    let version = |(at, _): (usize, &[u8])| {
        let text = program[at + MARK.len()..].split(|byte| *byte == 0).next()?;
        let (major, minor) = std::str::from_utf8(text).ok()?.split_once('.')?;
        // `2.2.5` is older than any 2.3: its third number does not matter.
        let minor = minor.split('.').next()?;
        Some(Version(major.parse().ok()?, minor.parse().ok()?))
    };
    starts.filter_map(version).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_of_the_named_versions_counts_by_its_numbers() {
        assert_eq!(newest(b"..GLIBC_2.4\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_PRIVATE\0GLIBC_2.9\0"), Version(2, 34));
        assert_eq!(newest(b"nothing GLIBC_"), Version(0, 0));
        assert!(Version(2, 9) < Version(2, 34));
        assert_eq!(Version(2, 34).to_string(), "2.34");
    }
}
