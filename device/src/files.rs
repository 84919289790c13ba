//! Search for files of compiled kernels, which `cargo xtask build-kernels` writes.
//!
//! If the user names a folder, only that folder is searched. Otherwise the folder of the executable is searched, then
//! `kernels/` of the cargo target folder that contains it. The working directory is not searched: a host library is code, and
//! starting a program in a folder must not execute what happens to be there.

use std::path::{Path, PathBuf};

use crate::DeviceError;

/// File that cargo writes into every target folder.
const MARK: &str = ".rustc_info.json";

/// Folders to search for the kernels of one backend.
#[derive(Debug)]
pub(crate) struct KernelFiles {
    folders: Vec<PathBuf>,
    device: &'static str,
    command: &'static str,
}

impl KernelFiles {
    pub fn new(device: &'static str, command: &'static str, named: Option<&Path>) -> KernelFiles {
        let folders = match named {
            Some(folder) => vec![folder.to_owned()],
            None => std::env::current_exe().map(|program| around(&program)).unwrap_or_default(),
        };
        KernelFiles { folders, device, command }
    }

    /// Searches the subfolders of this name instead.
    pub fn below(mut self, name: &str) -> KernelFiles {
        self.folders.iter_mut().for_each(|folder| folder.push(name));
        self
    }

    /// Returns the first folder that has a file whose name starts with `beginning` and ends with `end`.
    pub fn folder_with(&self, beginning: &str, end: &str) -> Result<&Path, DeviceError> {
        let has = |folder: &&PathBuf| {
            std::fs::read_dir(folder).is_ok_and(|entries| {
                entries.flatten().any(|entry| {
                    let name = entry.file_name();
                    name.to_str().is_some_and(|name| name.starts_with(beginning) && name.ends_with(end))
                })
            })
        };
        self.folders.iter().find(has).map(PathBuf::as_path).ok_or_else(|| self.missing(format!("{beginning}*{end}")))
    }

    /// Returns the path of a file in the first folder that has it.
    pub fn find(&self, file: &str) -> Result<PathBuf, DeviceError> {
        let paths = self.folders.iter().map(|folder| folder.join(file));
        paths.into_iter().find(|path| path.is_file()).ok_or_else(|| self.missing(file.to_owned()))
    }

    fn missing(&self, file: String) -> DeviceError {
        let (device, searched, command) = (self.device, self.folders.clone(), self.command);
        DeviceError::NoKernelFiles { device, file, searched, command }
    }
}

/// Returns the folders to search for an executable.
fn around(program: &Path) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = program.parent().map(Path::to_owned).into_iter().collect();
    // A program is at most four folders below the target folder: target/<triple>/<profile>/deps.
    let target = program.ancestors().skip(1).take(4).find(|folder| folder.join(MARK).is_file());
    folders.extend(target.map(|folder| folder.join("kernels")));
    folders
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn touch(path: &Path) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "").unwrap();
    }

    #[test]
    fn files_are_found_next_to_the_program_then_in_its_target_folder() {
        let root = tempfile::tempdir().unwrap();
        let program = root.path().join("target/debug/deps/quire");
        touch(&root.path().join("target").join(MARK));
        let (near, far) = (program.with_file_name("a.fatbin"), root.path().join("target/kernels/a.fatbin"));
        touch(&far);
        let files = |program: &Path| KernelFiles { folders: around(program), device: "cuda", command: "build" };
        assert_eq!(files(&program).find("a.fatbin").unwrap(), far);
        assert_eq!(files(&program).folder_with("a", ".fatbin").unwrap(), far.parent().unwrap());
        touch(&near);
        assert_eq!(files(&program).find("a.fatbin").unwrap(), near);
        // Without the mark it is not a target folder of cargo.
        std::fs::remove_file(root.path().join("target").join(MARK)).unwrap();
        std::fs::remove_file(near).unwrap();
        assert!(files(&program).find("a.fatbin").is_err());
    }
}
