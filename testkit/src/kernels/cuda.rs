//! Fat binaries: every source compiled for every architecture, in one file per crate.
//!
//! `<crate>.fatbin` holds the fat binaries of all units, one after the other, as a linker puts them into the section `.nv_fatbin`.
//! Each begins with a header that has its size, and is a separate module for the driver. `<crate>.kernels.tsv` lists the module of
//! each kernel, so that only the modules of launched kernels are loaded:
//!
//! ```text
//! kernel <tab> offset in bytes <tab> length in bytes
//! ```
//!
//! `<crate>.resources.tsv` lists the resources of each kernel ([`resources::lines`]), which `quire bench kernels --counts` prints.

use std::path::{Path, PathBuf};

use super::compile::{Compile, run_all};
use super::manifest::Manifest;
use super::resources::{self, Kernel};
use super::toolkit::Toolkit;
use crate::at;

/// What the compiler makes.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// A GPU runs code for its own major version up to its own minor version; 90a is Hopper with the instructions that only Hopper
    /// has. `+ptx` adds PTX, which the driver compiles for every later GPU. A source that names its own architectures is compiled for
    /// those.
    pub architectures: &'a [&'a str],
    /// Whether each fat binary is compressed, to a third of the compiler's default size. Every driver that runs this code can
    /// decompress it. An archive of fat binaries is smaller if they are not.
    pub is_compressed: bool,
}

/// The code of a release.
pub const RELEASE: Target = Target { architectures: &["80+ptx", "86", "89", "90a", "100", "120"], is_compressed: true };
/// The code of `--check`: what compiles for the oldest GPU uses nothing that only a newer one has.
pub const CHECK: Target = Target { architectures: &["80"], is_compressed: true };

const FLAGS: &[&str] = &[
    "-std=c++17",
    "-O3",
    "-fatbin",
    "--expt-relaxed-constexpr",
    // Tools such as compute-sanitizer name lines of the sources. A fat binary is 1.9 to 2.8 times as large.
    "-lineinfo",
    // Prints the resources of each kernel, for the table and the limits.
    "-Xptxas",
    "-v",
];

/// The compiled units of a crate.
#[derive(Debug)]
pub struct Built {
    /// All kernels, by unit and name.
    pub kernels: Vec<Kernel>,
    /// The fat binary of each unit of the manifest.
    outputs: Vec<PathBuf>,
}

/// Compiles all units of a manifest.
///
/// # Errors
/// The messages of the compiler, a pipeline that ptxas gives up, or two kernels with the same name.
pub fn build(
    root: &Path,
    manifest: &Manifest,
    toolkit: &Toolkit,
    target: Target<'_>,
    jobs: usize,
) -> Result<Built, String> {
    let _lock = super::lock(root)?;
    let Target { architectures, is_compressed } = target;
    let compression = if is_compressed { "size" } else { "none" };
    // Each target has its own outputs, so a check does not delete those of a release.
    let outputs = format!("{}.{}.{compression}", manifest.name, architectures.join("-"));
    let folder = super::folder(root).join("cache").join(outputs);
    let include = std::iter::once(root.join("device/simt/include")).chain(manifest.include.iter().cloned());
    let mut common: Vec<String> = FLAGS.iter().map(ToString::to_string).collect();
    common.push(format!("--compress-mode={compression}"));
    common.extend(include.map(|path| format!("-I{}", path.display())));
    let code = |name: &str| match name.strip_suffix("+ptx") {
        Some(name) => format!("-gencode=arch=compute_{name},code=[sm_{name},compute_{name}]"),
        None => format!("-gencode=arch=compute_{name},code=sm_{name}"),
    };
    let compile = |unit: &super::manifest::Unit| Compile {
        action: "compile",
        program: toolkit.nvcc.clone(),
        version: toolkit.version.clone(),
        args: match unit.architectures.as_slice() {
            [] => architectures.iter().map(|name| code(name)).collect::<Vec<_>>(),
            own => own.iter().map(|name| code(name)).collect(),
        }
        .into_iter()
        .chain(common.iter().cloned())
        .chain(unit.macros.iter().map(|name| format!("-D{name}")))
        .collect(),
        inputs: vec![unit.source.clone()],
        output: folder.join(format!("{}.fatbin", unit.name)),
    };
    let compiles: Vec<Compile> = manifest.units.iter().map(compile).collect();
    let logs = run_all(&compiles, jobs)?;
    let units = manifest.units.iter().zip(&logs);
    units.clone().try_for_each(|(unit, log)| resources::keeps_pipelines(log, &unit.name))?;
    let kernels: Vec<Kernel> = units.flat_map(|(unit, log)| resources::kernels(log, &unit.name, unit.limits)).collect();
    for (index, kernel) in kernels.iter().enumerate() {
        if let Some(other) = kernels[..index].iter().find(|other| other.name == kernel.name) {
            return Err(format!(
                "found a kernel {2} in {0} and in {1}, expected unique names in a crate; rename one",
                other.unit, kernel.unit, kernel.name
            ));
        }
    }
    Ok(Built { kernels, outputs: compiles.into_iter().map(|compile| compile.output).collect() })
}

/// Writes the fat binary of a crate, the list of its kernels and that of their resources into a folder, and returns the path of the binary.
///
/// # Errors
/// A file that cannot be read or written.
pub fn write(root: &Path, folder: &Path, manifest: &Manifest, built: &Built) -> Result<PathBuf, String> {
    let _lock = super::lock(root)?;
    let (mut binary, mut index) = (Vec::new(), String::new());
    for (unit, output) in manifest.units.iter().zip(&built.outputs) {
        let module = std::fs::read(output).map_err(at(output))?;
        // The header's fields are 8 bytes wide.
        binary.resize(binary.len().next_multiple_of(8), 0);
        for kernel in built.kernels.iter().filter(|kernel| kernel.unit == unit.name) {
            index += &format!("{}\t{}\t{}\n", kernel.name, binary.len(), module.len());
        }
        binary.extend(module);
    }
    let resources = resources::lines(&built.kernels);
    let files =
        [("kernels.tsv", index.as_bytes()), ("resources.tsv", resources.as_bytes()), ("fatbin", binary.as_slice())];
    for (extension, contents) in files {
        let file = folder.join(format!("{}.{extension}", manifest.name));
        std::fs::write(&file, contents).map_err(at(&file))?;
    }
    Ok(folder.join(format!("{}.fatbin", manifest.name)))
}
