//! `cargo xtask build-kernels`: compiles the `.cu` sources of the workspace.

use std::path::Path;

use testkit::kernels::{cuda, folder, host, manifests, resources, toolkit};

/// What to build.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Compile for the oldest architecture only, and write no fat binary.
    pub check: bool,
    /// Build the host libraries instead.
    pub sim: bool,
    /// With `sim`: libraries that count.
    pub counts: bool,
    /// Install the pinned compiler under `target/` if none is found.
    pub fetch: bool,
    /// Compilers that run at once.
    pub jobs: usize,
}

/// Builds the kernels of every crate and prints their resources.
///
/// # Errors
/// One line: what is missing, what does not compile, or which kernel is above a limit of its manifest.
pub fn run(root: &Path, options: Options) -> Result<(), String> {
    let manifests = manifests(root)?;
    if options.sim {
        let compiler = host::compiler()?;
        if options.counts && compiler.is_clang() {
            return Err("--counts: found clang++, expected g++: clang++ splits loads of vectors; set CXX".to_owned());
        }
        let instrument = if options.counts { host::Instrument::Counts } else { host::Instrument::None };
        for manifest in &manifests {
            let library = host::library(root, manifest, &compiler, instrument, options.jobs)?;
            println!("xtask: {}", library.display());
        }
        return Ok(());
    }
    let toolkit = toolkit::find(root, options.fetch)?;
    let target = if options.check { cuda::CHECK } else { cuda::RELEASE };
    for manifest in &manifests {
        let built = cuda::build(root, manifest, &toolkit, target, options.jobs)?;
        print!("{}", resources::table(&built.kernels));
        resources::within_limits(&built.kernels)?;
        if !options.check {
            let file = cuda::write(root, &folder(root), manifest, &built)?;
            println!("xtask: {}", file.display());
        }
    }
    Ok(())
}
