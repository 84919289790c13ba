//! The two files of a crate's kernels, as `cargo xtask build-kernels` writes them, parsed without a driver.
//!
//! `<crate>.kernels.tsv` has a line per kernel: its name, and the offset and length in bytes of its fat binary in
//! `<crate>.fatbin`. A fat binary is a header and entries, each with code for one architecture, all little-endian:
//!
//! ```text
//! header  u32 magic 0xba55ed50   u16 version   u16 bytes of the header   u64 bytes of all entries
//! entry   u16 1: PTX, 2: code    u16           u32 bytes of this header  u64 bytes after it
//!         u32 u32                u16 u16       u32 architecture (90)     ...
//! ```
//!
//! NVIDIA does not document the format. nvcc 13.0 writes these fields; they are read only to find which architectures
//! a file has code for.

use std::collections::BTreeMap;
use std::fmt;

/// Position of a fat binary in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub offset: u64,
    pub len: usize,
}

/// Parses the index: positions by kernel name. The error describes the first wrong line.
pub(super) fn index(text: &str) -> Result<BTreeMap<String, Place>, String> {
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

/// Architecture of an entry of a fat binary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Code {
    /// Machine code, for GPUs of this major version and at least this minor version.
    Machine(u32),
    /// PTX, which the driver compiles for this and every later GPU.
    Ptx(u32),
}

impl Code {
    fn runs_on(self, (major, minor): (u32, u32)) -> bool {
        match self {
            Code::Machine(architecture) => architecture / 10 == major && architecture % 10 <= minor,
            Code::Ptx(architecture) => architecture <= 10 * major + minor,
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Code::Machine(architecture) => write!(f, "sm_{architecture}"),
            Code::Ptx(architecture) => write!(f, "PTX of compute_{architecture}"),
        }
    }
}

const MAGIC: u32 = 0xba55_ed50;

/// Returns the architectures of a fat binary; `None` if it is not a fat binary or is truncated.
pub(super) fn codes(binary: &[u8]) -> Option<Vec<Code>> {
    if u32::from_le_bytes(bytes_at(binary, 0)?) != MAGIC {
        return None;
    }
    let header = usize::from(u16::from_le_bytes(bytes_at(binary, 6)?));
    let end = header.checked_add(usize::try_from(u64::from_le_bytes(bytes_at(binary, 8)?)).ok()?)?;
    let mut entries = binary.get(header..end)?;
    let mut codes = Vec::new();
    while !entries.is_empty() {
        let architecture = u32::from_le_bytes(bytes_at(entries, 28)?);
        match u16::from_le_bytes(bytes_at(entries, 0)?) {
            1 => codes.push(Code::Ptx(architecture)),
            2 => codes.push(Code::Machine(architecture)),
            // Other kinds of entries hold no code for a GPU.
            _ => {}
        }
        let bytes = u64::from(u32::from_le_bytes(bytes_at(entries, 4)?))
            .checked_add(u64::from_le_bytes(bytes_at(entries, 8)?))?;
        // An entry is at least as long as the part that was read, so the loop ends.
        entries = entries.get(usize::try_from(bytes).ok()?.max(32)..)?;
    }
    Some(codes)
}

/// Returns `None` if some code runs on a GPU of this capability, otherwise a description of the architectures.
pub(super) fn lacks(codes: &[Code], capability: (u32, u32)) -> Option<String> {
    if codes.iter().any(|code| code.runs_on(capability)) {
        return None;
    }
    let mut codes = codes.to_vec();
    codes.sort();
    codes.dedup();
    let words: Vec<String> = codes.iter().map(ToString::to_string).collect();
    Some(if words.is_empty() { "no GPU".into() } else { words.join(", ") })
}

fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// A fat binary of empty entries.
    fn binary(entries: &[(u16, u32)]) -> Vec<u8> {
        let mut bytes = MAGIC.to_le_bytes().to_vec();
        bytes.extend([1, 0, 16, 0]);
        bytes.extend((entries.len() as u64 * 72).to_le_bytes());
        for (kind, architecture) in entries {
            let mut entry = [0u8; 72];
            entry[..2].copy_from_slice(&kind.to_le_bytes());
            entry[4..8].copy_from_slice(&64u32.to_le_bytes());
            entry[8..16].copy_from_slice(&8u64.to_le_bytes());
            entry[28..32].copy_from_slice(&architecture.to_le_bytes());
            bytes.extend(entry);
        }
        bytes
    }

    #[test]
    fn the_index_finds_kernels_and_names_a_bad_line() {
        let found = index("a\t0\t16\nb_f16\t16\t5\n").unwrap();
        assert_eq!(found["b_f16"], Place { offset: 16, len: 5 });
        assert_eq!(found.len(), 2);
        for bad in ["a\t0", "a\t0\t1\t2", "a\t-1\t3", "\t1\t2", "a 1 2", ""] {
            let problem = index(&format!("a\t0\t16\n{bad}\nc\t1\t2\n")).unwrap_err();
            assert!(problem.starts_with(&format!("line 2 {bad:?}")), "{problem}");
        }
    }

    #[test]
    fn a_gpu_takes_code_of_its_major_version_or_older_ptx() {
        let found = codes(&binary(&[(2, 80), (2, 89), (2, 90), (1, 90), (64, 0)])).unwrap();
        assert_eq!(found, [Code::Machine(80), Code::Machine(89), Code::Machine(90), Code::Ptx(90)]);
        for good in [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 1)] {
            assert_eq!(lacks(&found, good), None, "{good:?}");
        }
        assert_eq!(lacks(&found, (7, 5)).unwrap(), "sm_80, sm_89, sm_90, PTX of compute_90");
        assert_eq!(lacks(&found[1..3], (8, 6)).unwrap(), "sm_89, sm_90");
        assert_eq!(lacks(&codes(&binary(&[])).unwrap(), (9, 0)).unwrap(), "no GPU");
    }

    #[test]
    fn truncated_and_foreign_files_are_detected() {
        let whole = binary(&[(2, 80), (1, 80)]);
        for len in 0..whole.len() {
            assert_eq!(codes(&whole[..len]), None, "{len}");
        }
        assert_eq!(codes(&[0; 64]), None);
        // Sizes that would end before, or far beyond, the file.
        for size in [0u8, 255] {
            let mut bad = whole.clone();
            bad[16 + 8..16 + 16].fill(size);
            bad[16 + 4..16 + 8].fill(size);
            codes(&bad);
        }
    }
}
