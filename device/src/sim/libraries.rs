//! The host libraries of a `cuda-sim` device, opened on first use.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use simd::lock;

use super::{Library, Tally};
use crate::files::KernelFiles;
use crate::{DeviceError, Options};

const COMMAND: &str = "cargo xtask build-kernels --sim";
/// Builds the libraries that count, in a subfolder of this name.
const COUNTING: (&str, &str) = ("cargo xtask build-kernels --sim --counts", "counts");
const BEGINNING: &str = "libquire_sim_";
const END: &str = ".so";

/// The libraries by module.
pub(crate) struct Libraries {
    files: KernelFiles,
    folder: PathBuf,
    seed: u64,
    tally: Option<Arc<Tally>>,
    open: Mutex<BTreeMap<String, Arc<Library>>>,
}

impl Libraries {
    /// Returns an error if the folder has no library.
    pub fn find(options: &Options) -> Result<Libraries, DeviceError> {
        let named = options.kernels.as_deref();
        let files = match (&options.counts, named) {
            (None, _) => KernelFiles::new("cuda-sim", COMMAND, named),
            (Some(_), Some(_)) => KernelFiles::new("cuda-sim", COUNTING.0, named),
            (Some(_), None) => KernelFiles::new("cuda-sim", COUNTING.0, None).below(COUNTING.1),
        };
        let folder = files.folder_with(BEGINNING, END)?.to_owned();
        Ok(Libraries { files, folder, seed: options.seed, tally: options.counts.clone(), open: Mutex::default() })
    }

    /// Folder of the libraries.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Seed of the order in which threads run.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// What gets the counts of launches.
    pub fn tally(&self) -> Option<&Tally> {
        self.tally.as_deref()
    }

    /// Returns the library of a module if it is open.
    pub fn opened(&self, module: &str) -> Option<Arc<Library>> {
        lock(&self.open).get(module).cloned()
    }

    /// Returns the library of a module, which it opens on first use.
    pub fn library(&self, module: &str) -> Result<Arc<Library>, DeviceError> {
        // Entries are complete when they are inserted, so a poisoned lock holds a valid map.
        let mut open = lock(&self.open);
        if let Some(library) = open.get(module) {
            return Ok(Arc::clone(library));
        }
        let library = Arc::new(Library::open(&self.files.find(&format!("{BEGINNING}{module}{END}"))?)?);
        open.insert(module.to_owned(), Arc::clone(&library));
        Ok(library)
    }
}
