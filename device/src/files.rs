//! Where compiled kernels are: files that `cargo xtask build-kernels` wrote, found by name.
//!
//! A folder that the user names is the only one that is searched. Otherwise they are beside the executable, or in
//! `kernels/` of the cargo target folder that the executable stands in. The working directory is not searched: a host
//! library is code, and who starts a program in a folder does not mean to run what lies there.

use std::path::{Path, PathBuf};

use crate::DeviceError;

/// What cargo leaves in a target folder, also in one that was there before.
const MARK: &str = ".rustc_info.json";

/// The folders for one backend.
#[derive(Debug)]
pub(crate) struct KernelFiles {
    folders: Vec<PathBuf>,
    device: &'static str,
    /// What builds the files.
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

    /// The first folder that has a file of this beginning and end.
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

    /// A file, in the first folder that has it.
    pub fn find(&self, file: &str) -> Result<PathBuf, DeviceError> {
        let paths = self.folders.iter().map(|folder| folder.join(file));
        paths.into_iter().find(|path| path.is_file()).ok_or_else(|| self.missing(file.to_owned()))
    }

    fn missing(&self, file: String) -> DeviceError {
        let (device, searched, command) = (self.device, self.folders.clone(), self.command);
        DeviceError::NoKernelFiles { device, file, searched, command }
    }
}

/// The folders that belong to an executable.
fn around(program: &Path) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = program.parent().map(Path::to_owned).into_iter().collect();
    // Cargo marks its target folder so. A program is at most four folders below: target/<triple>/<profile>/deps.
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
    fn files_are_found_beside_the_program_then_in_its_target_folder() {
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
        // Without the mark a folder of that name is anybody's.
        std::fs::remove_file(root.path().join("target").join(MARK)).unwrap();
        std::fs::remove_file(near).unwrap();
        assert!(files(&program).find("a.fatbin").is_err());
    }

    #[test]
    fn a_named_folder_is_the_only_one_and_a_missing_file_says_what_builds_it() {
        let files = KernelFiles::new("cuda-sim", "cargo xtask build-kernels --sim", Some("no/such/folder".as_ref()));
        assert_eq!(
            files.find("libquire_sim_x.so").unwrap_err().to_string(),
            "cuda-sim: found no libquire_sim_x.so in no/such/folder; `cargo xtask build-kernels --sim` builds it, \
             --kernels-dir names a folder that has it"
        );
        let error = files.folder_with("lib", ".so").unwrap_err().to_string();
        assert!(error.contains("found no lib*.so in no/such/folder"), "{error}");
    }
}
