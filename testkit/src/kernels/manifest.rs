//! `csrc/kernels.toml`: the sources of a crate and the limits of their kernels.
//!
//! ```
//! use testkit::kernels::manifest::Manifest;
//! let text = r#"
//!     include = ["."]                 # folders, beside those of the SIMT shim; default none
//!     max_spill_bytes = 0             # per kernel, stores and loads together; default 0
//!     max_registers = 255             # per thread; default 255, the hardware's limit
//!
//!     [[source]]
//!     file = "paged.cu"
//!     shards = ["HEAD=64", "HEAD=128 WIDE"]   # compiled once for each, with these macros; default once, with none
//!     max_spill_bytes = 16            # for this source; default as above
//!     architectures = ["90a"]         # only these, without PTX; default all
//!     entry_registers = 168           # exactly, for kernels that move registers between warps; default any
//! "#;
//! let manifest = Manifest::parse(text, "csrc".as_ref(), "demo")?;
//! assert_eq!(manifest.units[1].macros, ["HEAD=128", "WIDE"]);
//! assert_eq!(manifest.units[1].limits.spill_bytes, 16);
//! assert_eq!(manifest.units[1].architectures, ["90a"]);
//! assert_eq!(manifest.units[1].limits.entry_registers, Some(168));
//!
//! let problem = Manifest::parse("sources = []", "csrc".as_ref(), "demo").unwrap_err();
//! assert!(problem.starts_with("csrc/kernels.toml:1: unknown field `sources`, expected one of `include`"));
//! # Ok::<(), String>(())
//! ```

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::at;

/// The sources of a crate, ready to be compiled.
#[derive(Clone, Debug)]
pub struct Manifest {
    /// Name of the crate in file names: `attention_kernels`.
    pub name: String,
    /// Folders for `-I`.
    pub include: Vec<PathBuf>,
    /// One entry per run of the compiler.
    pub units: Vec<Unit>,
}

/// A source, or a shard of one.
#[derive(Clone, Debug)]
pub struct Unit {
    /// Unique in its manifest: `paged`, or `paged.1` for the second shard.
    pub name: String,
    /// The `.cu` file.
    pub source: PathBuf,
    /// Macros for `-D`.
    pub macros: Vec<String>,
    /// Limits of each kernel.
    pub limits: Limits,
    /// Architectures whose instructions the source uses, and which it is compiled for; empty: all.
    pub architectures: Vec<String>,
}

/// Limits of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of spilled registers, stores and loads together.
    pub spill_bytes: u32,
    /// Registers per thread.
    pub registers: u32,
    /// The exact number, if the kernel is right with no other.
    pub entry_registers: Option<u32>,
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
    entry_registers: Option<u32>,
}

fn most_registers() -> u32 {
    255
}

impl Manifest {
    /// Reads a manifest and checks that its sources exist.
    ///
    /// # Errors
    /// What is wrong, with the file and the line.
    pub fn load(file: &Path, name: &str) -> Result<Manifest, String> {
        let text = std::fs::read_to_string(file).map_err(at(file))?;
        let manifest = Manifest::parse(&text, file.parent().unwrap_or(Path::new("")), name)?;
        match manifest.units.iter().find(|unit| !unit.source.is_file()) {
            Some(unit) => {
                Err(format!("{}: found no source {}; correct its name", file.display(), unit.source.display()))
            }
            None => Ok(manifest),
        }
    }

    /// Parses the text of the `kernels.toml` of a folder.
    ///
    /// # Errors
    /// What is wrong, with the file and the line.
    pub fn parse(text: &str, folder: &Path, name: &str) -> Result<Manifest, String> {
        let written: Written = toml::from_str(text).map_err(|error| {
            let before = error.span().map_or("", |span| &text[..span.start.min(text.len())]);
            let line = before.lines().count().max(1) + usize::from(before.ends_with('\n'));
            format!("{}:{line}: {}", folder.join("kernels.toml").display(), error.message())
        })?;
        let mut units = Vec::new();
        for source in written.source {
            let limits = Limits {
                spill_bytes: source.max_spill_bytes.unwrap_or(written.max_spill_bytes),
                registers: source.max_registers.unwrap_or(written.max_registers),
                entry_registers: source.entry_registers,
            };
            let stem = source.file.strip_suffix(".cu").unwrap_or(&source.file).replace('/', ".");
            let shards = if source.shards.is_empty() { vec![String::new()] } else { source.shards };
            units.extend(shards.iter().enumerate().map(|(index, macros)| Unit {
                name: if shards.len() > 1 { format!("{stem}.{index}") } else { stem.clone() },
                source: folder.join(&source.file),
                macros: macros.split_whitespace().map(str::to_owned).collect(),
                limits,
                architectures: source.architectures.clone(),
            }));
        }
        let include = written.include.iter().map(|path| folder.join(path)).collect();
        Ok(Manifest { name: name.to_owned(), include, units })
    }
}
