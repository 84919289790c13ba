//! `csrc/kernels.toml`: which sources a crate has, and what their kernels may cost.
//!
//! ```
//! use testkit::kernels::manifest::Manifest;
//! let text = r#"
//!     include = ["."]                 # folders, beside those of the SIMT shim; default none
//!     max_spill_bytes = 0             # of each kernel, stores and loads together; default 0
//!     max_registers = 255             # of each thread; default 255, the most there is
//!
//!     [[source]]
//!     file = "paged.cu"
//!     shards = ["HEAD=64", "HEAD=128 WIDE"]   # compiled once for each, with these macros; default once, with none
//!     max_spill_bytes = 16            # for this source; default what stands above
//!     architectures = ["90a"]         # this source is compiled for these alone, without PTX; default for all
//! "#;
//! let manifest = Manifest::parse(text, "csrc".as_ref(), "demo")?;
//! assert_eq!(manifest.units[1].macros, ["HEAD=128", "WIDE"]);
//! assert_eq!(manifest.units[1].limits.spill_bytes, 16);
//! assert_eq!(manifest.units[1].architectures, ["90a"]);
//!
//! let problem = Manifest::parse("sources = []", "csrc".as_ref(), "demo").unwrap_err();
//! assert!(problem.starts_with("csrc/kernels.toml:1: unknown field `sources`, expected one of `include`"));
//! # Ok::<(), String>(())
//! ```

use std::path::{Path, PathBuf};

use serde::Deserialize;

/// The sources of one crate, ready to be compiled.
#[derive(Clone, Debug)]
pub struct Manifest {
    /// As it stands in file names: `attention_kernels`.
    pub name: String,
    /// Folders for `-I`.
    pub include: Vec<PathBuf>,
    /// What is compiled by one run of a compiler each.
    pub units: Vec<Unit>,
}

/// A source, or a shard of one.
#[derive(Clone, Debug)]
pub struct Unit {
    /// Unique in its manifest: `paged`, or `paged.1` for the second shard.
    pub name: String,
    /// The `.cu` file.
    pub source: PathBuf,
    /// For `-D`.
    pub macros: Vec<String>,
    /// Of each of its kernels.
    pub limits: Limits,
    /// What it uses instructions of, and is compiled for; empty: all.
    pub architectures: Vec<String>,
}

/// What a kernel may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of spilled registers, stores and loads together.
    pub spill_bytes: u32,
    /// Registers of each thread.
    pub registers: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    #[serde(default)]
    include: Vec<String>,
    #[serde(default)]
    max_spill_bytes: u32,
    #[serde(default = "most_registers")]
    max_registers: u32,
    #[serde(default)]
    source: Vec<Source>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Source {
    file: String,
    #[serde(default)]
    shards: Vec<String>,
    #[serde(default)]
    architectures: Vec<String>,
    max_spill_bytes: Option<u32>,
    max_registers: Option<u32>,
}

fn most_registers() -> u32 {
    255
}

impl Manifest {
    /// Reads a manifest and checks that its sources exist.
    ///
    /// # Errors
    /// The file with the line, and what is wrong there.
    pub fn load(file: &Path, name: &str) -> Result<Manifest, String> {
        let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        let manifest = Manifest::parse(&text, file.parent().unwrap_or(Path::new("")), name)?;
        match manifest.units.iter().find(|unit| !unit.source.is_file()) {
            Some(unit) => Err(format!("{}: there is no source {}", file.display(), unit.source.display())),
            None => Ok(manifest),
        }
    }

    /// Understands the text of the `kernels.toml` of a folder.
    ///
    /// # Errors
    /// The file with the line, and what is wrong there.
    pub fn parse(text: &str, folder: &Path, name: &str) -> Result<Manifest, String> {
        let written: Written = toml::from_str(text).map_err(|error| {
            let before = error.span().map_or("", |span| &text[..span.start.min(text.len())]);
            let line = before.lines().count().max(1) + usize::from(before.ends_with('\n'));
            format!("{}:{line}: {}", folder.join("kernels.toml").display(), error.message())
        })?;
        let units = written.source.iter().flat_map(|source| {
            let limits = Limits {
                spill_bytes: source.max_spill_bytes.unwrap_or(written.max_spill_bytes),
                registers: source.max_registers.unwrap_or(written.max_registers),
            };
            let stem = source.file.strip_suffix(".cu").unwrap_or(&source.file).replace('/', ".");
            let whole = [String::new()];
            let shards = if source.shards.is_empty() { &whole } else { source.shards.as_slice() };
            let several = shards.len() > 1;
            let unit = move |(index, macros): (usize, &String)| Unit {
                name: if several { format!("{stem}.{index}") } else { stem.clone() },
                source: folder.join(&source.file),
                macros: macros.split_whitespace().map(str::to_owned).collect(),
                limits,
                architectures: source.architectures.clone(),
            };
            shards.iter().enumerate().map(unit).collect::<Vec<_>>()
        });
        let include = written.include.iter().map(|path| folder.join(path)).collect();
        Ok(Manifest { name: name.to_owned(), include, units: units.collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(text: &str) -> String {
        Manifest::parse(text, Path::new("csrc"), "demo").err().unwrap_or_default()
    }

    #[test]
    fn a_mistake_is_named_with_its_line() {
        let found = problem("include = []\n\n[[source]]\nfile = \"a.cu\"\nmax_spil_bytes = 3\n");
        assert!(found.starts_with("csrc/kernels.toml:5: unknown field `max_spil_bytes`"), "{found}");
        let found = problem("[[source]]\nshards = []\n");
        assert!(found.starts_with("csrc/kernels.toml:1: missing field `file`"), "{found}");
        let found = problem("max_registers = -1\n");
        assert!(found.starts_with("csrc/kernels.toml:1: invalid value"), "{found}");
        assert!(!found.contains('\n'), "{found}");
    }

    #[test]
    fn a_source_that_does_not_exist_is_named() {
        let folder = std::env::temp_dir().join(format!("quire-manifest-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("kernels.toml");
        std::fs::write(&file, "[[source]]\nfile = \"gone.cu\"\n").unwrap();
        let found = Manifest::load(&file, "demo").unwrap_err();
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(found.contains("there is no source") && found.ends_with("gone.cu"), "{found}");
    }
}
