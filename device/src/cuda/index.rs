//! The two files of a crate's kernels, as `cargo xtask build-kernels` writes them, parsed without a driver.
//!
//! `<crate>.kernels.tsv` has a line per kernel: its name, and the offset and length in bytes of its fat binary in
//! `<crate>.fatbin`. A fat binary is a header and entries, each with code for one architecture. The driver chooses an entry; only
//! the header is read here, so that it gets no truncated file. All numbers are little-endian:
//!
//! ```text
//! header  u32 magic 0xba55ed50   u16 version   u16 bytes of the header   u64 bytes of all entries
//! ```
//!
//! NVIDIA does not document the format. nvcc 13.0 writes these fields.

use std::collections::BTreeMap;

/// Position of a fat binary in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub offset: u64,
    pub len: usize,
}

/// Parses the index: positions by kernel name. The error describes the first wrong line.
pub(super) fn parse(text: &str) -> Result<BTreeMap<String, Place>, String> {
    let entry = |(number, line): (usize, &str)| {
        let mut fields = line.split('\t');
        let (name, offset, len) = (fields.next(), fields.next(), fields.next());
        let number_of = |field: Option<&str>| field.and_then(|field| field.parse::<u64>().ok());
        match (name, number_of(offset), number_of(len).map(usize::try_from), fields.next()) {
            (Some(name), Some(offset), Some(Ok(len)), None) if !name.is_empty() => {
                Ok((name.to_owned(), Place { offset, len }))
            }
            _ => Err(format!("line {} {line:?}, expected a kernel, an offset and a length between tabs", number + 1)),
        }
    };
    text.lines().enumerate().map(entry).collect()
}

const MAGIC: u32 = 0xba55_ed50;

/// Whether these bytes begin with a fat binary that is not truncated, as the driver needs.
pub(super) fn is_whole(binary: &[u8]) -> bool {
    let fields = || {
        let magic = u32::from_le_bytes(bytes_at(binary, 0)?);
        let header = usize::from(u16::from_le_bytes(bytes_at(binary, 6)?));
        let entries = usize::try_from(u64::from_le_bytes(bytes_at(binary, 8)?)).ok()?;
        Some((magic, header.checked_add(entries)?))
    };
    fields().is_some_and(|(magic, bytes)| magic == MAGIC && bytes <= binary.len())
}

fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_index_finds_kernels_and_names_a_bad_line() {
        let found = parse("a\t0\t16\nb_f16\t16\t5\n").unwrap();
        assert_eq!(found["b_f16"], Place { offset: 16, len: 5 });
        assert_eq!(found.len(), 2);
        for bad in ["a\t0", "a\t0\t1\t2", "a\t-1\t3", "\t1\t2", "a 1 2", ""] {
            let problem = parse(&format!("a\t0\t16\n{bad}\nc\t1\t2\n")).unwrap_err();
            assert!(problem.starts_with(&format!("line 2 {bad:?}")), "{problem}");
        }
    }

    #[test]
    fn truncated_and_foreign_files_are_detected() {
        let mut whole = MAGIC.to_le_bytes().to_vec();
        whole.extend([1, 0, 16, 0, 72, 0, 0, 0, 0, 0, 0, 0]);
        whole.resize(16 + 72, 0);
        assert!(is_whole(&whole) && !is_whole(&[0; 88]));
        for len in 0..whole.len() {
            assert!(!is_whole(&whole[..len]), "{len}");
        }
        // A size far beyond the file.
        whole[8..16].fill(255);
        assert!(!is_whole(&whole));
    }
}
