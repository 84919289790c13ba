//! `cargo xtask build-kernels`: compiles the `.cu` sources of the workspace.

use std::path::Path;

use testkit::kernels::{cuda, folder, host, manifests, resources, toolkit};

/// What to build.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Compile for one architecture only and write no fat binary.
    pub check: bool,
    /// Build the host library instead.
    pub sim: bool,
    /// Install the pinned compiler under `target/` where none is found.
    pub fetch: bool,
    /// Compilers that run at once.
    pub jobs: usize,
}

/// Builds the kernels of every crate of the workspace and prints what each needs.
///
/// # Errors
/// One line: what is missing, what did not compile, or which kernel is over a limit of its manifest.
pub fn run(root: &Path, options: Options) -> Result<(), String> {
    let manifests = manifests(root)?;
    if manifests.is_empty() {
        println!("xtask: no crate has a csrc/kernels.toml; nothing to build");
        return Ok(());
    }
    if options.sim {
        let compiler = host::compiler()?;
        for manifest in &manifests {
            let library = host::library(root, manifest, &compiler, host::Sanitizer::None, options.jobs)?;
            println!("xtask: {}", library.display());
        }
        return Ok(());
    }
    let toolkit = toolkit::find(root, options.fetch)?;
    let architectures = if options.check { cuda::CHECKED } else { cuda::ARCHITECTURES };
    for manifest in &manifests {
        let built = cuda::build(root, manifest, &toolkit, architectures, options.jobs)?;
        print!("{}", resources::table(&built.kernels));
        resources::within_limits(&built.kernels)?;
        if !options.check {
            let file = cuda::write(root, &folder(root), manifest, &built)?;
            println!("xtask: {}", file.display());
        }
    }
    Ok(())
}
