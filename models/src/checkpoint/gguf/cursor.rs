//! Bounded reading of a GGUF header. Every length is compared with the rest of the file before anything is read or allocated.

use std::fmt::Display;
use std::ops::Range;

/// What is wrong in a file: what was found and what was expected.
#[derive(Debug)]
pub(super) struct Fault {
    pub found: String,
    pub expected: String,
    /// The file may be whole, but not all of its header has been read.
    pub is_cut: bool,
}

impl Fault {
    pub fn new(found: impl Into<String>, expected: impl Into<String>) -> Fault {
        Fault { found: found.into(), expected: expected.into(), is_cut: false }
    }
}

/// A position in a file.
pub(super) struct Cursor<'a> {
    /// The file, or its beginning.
    pub bytes: &'a [u8],
    pub at: usize,
    /// Bytes of the whole file.
    pub size: usize,
}

impl<'a> Cursor<'a> {
    /// The start of a file that is there as a whole.
    pub fn whole(bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { bytes, at: 0, size: bytes.len() }
    }

    /// Number of bytes of the file behind the position.
    pub fn rest(&self) -> usize {
        self.size - self.at
    }

    /// Skips `len` bytes and returns where they are. `what` names them in the error.
    pub fn skip(&mut self, len: u64, what: impl Display) -> Result<Range<usize>, Fault> {
        match usize::try_from(len) {
            Ok(len) if len <= self.rest() && len > self.bytes.len() - self.at => {
                Err(Fault { is_cut: true, ..Fault::new("the beginning of a header", "all of it") })
            }
            Ok(len) if len <= self.rest() => {
                self.at += len;
                Ok(self.at - len..self.at)
            }
            _ => Err(Fault::new(
                format!("{what} of {len} bytes at byte {}", self.at),
                format!("at most {}, the rest of the file", self.rest()),
            )),
        }
    }

    fn array<const N: usize>(&mut self, what: impl Display) -> Result<[u8; N], Fault> {
        let at = self.skip(N as u64, what)?;
        Ok(self.bytes[at].first_chunk().copied().unwrap_or([0; N]))
    }

    pub fn u32(&mut self, what: impl Display) -> Result<u32, Fault> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, what: impl Display) -> Result<u64, Fault> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// Skips a string: its length, then its bytes. Returns where the bytes are.
    pub fn string(&mut self, what: impl Display) -> Result<Range<usize>, Fault> {
        let len = self.u64(&what)?;
        self.skip(len, what)
    }

    /// A name: a string of UTF-8 of at most `most` bytes.
    pub fn name(&mut self, most: usize, what: impl Display) -> Result<&'a str, Fault> {
        let at = self.string(&what)?;
        let expected = || format!("at most {most} bytes of UTF-8");
        if at.len() > most {
            return Err(Fault::new(format!("{what} of {} bytes", at.len()), expected()));
        }
        let bytes: &'a [u8] = self.bytes;
        std::str::from_utf8(&bytes[at.clone()])
            .map_err(|_| Fault::new(format!("{what} at byte {} that is not UTF-8", at.start), expected()))
    }
}
