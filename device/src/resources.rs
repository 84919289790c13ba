//! Registers and spills of the kernels that `cargo xtask build-kernels` has compiled.
//!
//! `<crate>.resources.tsv`, beside `<crate>.fatbin`, has a line per kernel and architecture:
//!
//! ```text
//! kernel <tab> architecture <tab> registers <tab> bytes of static shared memory <tab> of stack <tab> of spills
//! ```

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::driver::CudaError;
use crate::files::KernelFiles;
use crate::{DeviceError, Options};

const END: &str = ".resources.tsv";

/// What a thread or a block of a kernel needs, as ptxas has counted it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of static shared memory of a block.
    pub shared_bytes: u32,
    /// Bytes of the stack of a thread: arrays in local memory, and spills.
    pub stack_bytes: u32,
    /// Bytes of spilled registers of a thread, stores and loads together.
    pub spill_bytes: u32,
}

impl Resources {
    /// Returns the resources of all compiled kernels on an architecture such as `"sm_90a"`, by kernel. Searches the folder of the
    /// options and the one above it, or the folders that a device searches; empty if there are no compiled kernels.
    ///
    /// # Errors
    /// A file that cannot be read, or that is damaged.
    pub fn find(options: &Options, architecture: &str) -> Result<BTreeMap<String, Resources>, DeviceError> {
        let named = options.kernels.as_deref();
        let folders = [named, named.and_then(Path::parent)];
        let files = folders.map(|folder| KernelFiles::new("cuda", "cargo xtask build-kernels", folder));
        // A folder without such a file is none.
        let Some(folder) = files.iter().find_map(|files| files.folder_with("", END).ok()) else {
            return Ok(BTreeMap::new());
        };
        let mut found = BTreeMap::new();
        for file in listed(folder)? {
            let damaged = |problem| CudaError::Damaged { file: file.clone(), problem };
            let text = std::fs::read_to_string(&file).map_err(|error| damaged(error.to_string()))?;
            for (number, line) in text.lines().enumerate() {
                let expected = || {
                    damaged(format!(
                        "line {} {line:?}, expected a kernel, an architecture and four numbers",
                        number + 1
                    ))
                };
                let (kernel, of, resources) = parse(line).ok_or_else(expected)?;
                if of == architecture {
                    found.insert(kernel.to_owned(), resources);
                }
            }
        }
        Ok(found)
    }
}

/// Returns the files of a folder that list resources.
fn listed(folder: &Path) -> Result<Vec<PathBuf>, CudaError> {
    let entries = std::fs::read_dir(folder)
        .map_err(|error| CudaError::Damaged { file: folder.to_owned(), problem: error.to_string() })?;
    let paths = entries.flatten().map(|entry| entry.path());
    Ok(paths.filter(|path| path.to_string_lossy().ends_with(END)).collect())
}

/// Returns the kernel, the architecture and the resources of a line.
fn parse(line: &str) -> Option<(&str, &str, Resources)> {
    let (names, numbers) = line.match_indices('\t').nth(1).map(|(at, _)| (&line[..at], &line[at + 1..]))?;
    let (kernel, architecture) = names.split_once('\t')?;
    let numbers: Vec<u32> = numbers.split('\t').map(str::parse).collect::<Result<_, _>>().ok()?;
    let [registers, shared_bytes, stack_bytes, spill_bytes] = numbers[..] else { return None };
    Some((kernel, architecture, Resources { registers, shared_bytes, stack_bytes, spill_bytes }))
}
