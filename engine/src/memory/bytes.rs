//! Formats a number of bytes in binary units.

use std::fmt;

/// See the [module](self).
pub(crate) struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        match self.0 {
            0..1024 => write!(f, "{} B", self.0),
            1024..1_048_576 => write!(f, "{:.1} KiB", bytes / 1024.0),
            1_048_576..1_073_741_824 => write!(f, "{:.1} MiB", bytes / 1_048_576.0),
            _ => write!(f, "{:.2} GiB", bytes / 1_073_741_824.0),
        }
    }
}
