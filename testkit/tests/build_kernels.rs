//! Kernels of a small crate: what is compiled again, and what the messages about mistakes are.

use std::path::{Path, PathBuf};

use testkit::capability::Capability;
use testkit::kernels::manifest::Manifest;
use testkit::kernels::{self, cuda, host, resources, toolkit};
use testkit::{not_run, workspace};

const MANIFEST: &str = "include = [\".\"]\n[[source]]\nfile = \"scale.cu\"\nshards = [\"BY=2\", \"BY=3\"]\n";
const SOURCE: &str = r#"
#include <quire/export.cuh>
#include <cuda_fp16.h>
#include "index.cuh"
#define NAME_(by) scale_by_##by
#define NAME(by) NAME_(by)
extern "C" __global__ void NAME(BY)(__half* x, int n) {
    if (index() < n) x[index()] = __float2half(__half2float(x[index()]) * BY);
}
QUIRE_EXPORT(NAME(BY));
"#;
const HEADER: &str = "__device__ __forceinline__ int index() { return blockIdx.x * blockDim.x + threadIdx.x; }\n";

/// A folder of sources that is deleted at the end of the test.
struct Sources(PathBuf);

impl Sources {
    fn new(name: &str) -> Sources {
        let folder = std::env::temp_dir().join(format!("quire-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let sources = Sources(folder);
        sources.write("kernels.toml", MANIFEST);
        sources.write("scale.cu", SOURCE);
        sources.write("index.cuh", HEADER);
        sources
    }

    fn write(&self, file: &str, text: &str) {
        std::fs::write(self.0.join(file), text).unwrap();
    }

    fn manifest(&self, name: &str) -> Manifest {
        Manifest::load(&self.0.join("kernels.toml"), name).unwrap()
    }
}

impl Drop for Sources {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Returns the times at which the objects of a host build, and its library, were written.
fn written(library: &Path, name: &str) -> Vec<std::time::SystemTime> {
    let cache = library.with_file_name("cache").join(format!("{name}.host.none"));
    let objects = ["scale.0.o", "scale.1.o", "simt.launch.o"].map(|object| cache.join(object));
    let files = objects.iter().map(PathBuf::as_path).chain([library]);
    files.map(|file| std::fs::metadata(file).unwrap().modified().unwrap()).collect()
}

#[test]
fn a_host_library_is_compiled_again_only_where_something_changed() {
    let compiler = match host::compiler() {
        Ok(compiler) => compiler,
        Err(missing) => return not_run::report(Capability::Cxx, &missing),
    };
    let sources = Sources::new("incremental");
    let name = format!("incremental_{}", std::process::id());
    let build = || {
        let manifest = sources.manifest(&name);
        host::library(&workspace::root(), &manifest, &compiler, host::Instrument::None, 2)
    };
    let library = build().unwrap();
    let first = written(&library, &name);
    assert_eq!(build().unwrap(), library);
    assert_eq!(written(&library, &name), first, "nothing changed");

    // A changed header compiles both shards again, a changed shard only that shard, and neither the runtime of the shim.
    sources.write("index.cuh", &HEADER.replace("blockIdx.x * blockDim.x + threadIdx.x", "threadIdx.x"));
    build().unwrap();
    let second = written(&library, &name);
    assert!(first[0] < second[0] && first[1] < second[1] && first[2] == second[2] && first[3] < second[3]);
    sources.write("kernels.toml", &MANIFEST.replace("BY=3", "BY=4"));
    build().unwrap();
    let third = written(&library, &name);
    assert!(second[0] == third[0] && second[1] < third[1]);

    sources.write("scale.cu", &SOURCE.replace("n) x[", "m) x["));
    let problem = build().unwrap_err();
    assert!(problem.contains("did not compile") && problem.contains("scale.cu"), "{problem}");
    let folder = library.parent().unwrap();
    std::fs::remove_dir_all(folder.join(format!("cache/{name}.host.none"))).unwrap();
    for extension in ["so", "so.record", "so.log"] {
        std::fs::remove_file(library.with_extension(extension)).unwrap();
    }
}

#[test]
fn a_fat_binary_holds_a_module_for_each_unit_and_a_list_of_their_kernels() {
    let root = workspace::root();
    let toolkit = match toolkit::find(&root, false) {
        Ok(toolkit) => toolkit,
        Err(missing) => return not_run::report(Capability::Nvcc, &missing),
    };
    let sources = Sources::new("fatbin");
    let manifest = sources.manifest("xtask_test");
    let built = cuda::build(&root, &manifest, &toolkit, cuda::CHECK, 2).unwrap();
    resources::within_limits(&built.kernels).unwrap();
    let names: Vec<&str> = built.kernels.iter().map(|kernel| kernel.name.as_str()).collect();
    assert_eq!(names, ["scale_by_2", "scale_by_3"]);
    assert!(built.kernels.iter().all(|kernel| kernel.needs["sm_80"].registers > 0));

    let file = cuda::write(&root, &kernels::folder(&root), &manifest, &built).unwrap();
    let binary = std::fs::read(&file).unwrap();
    let index = std::fs::read_to_string(file.with_extension("kernels.tsv")).unwrap();
    assert_eq!(index.lines().count(), 2);
    let resources = std::fs::read_to_string(file.with_extension("resources.tsv")).unwrap();
    assert!(resources.lines().all(|line| line.contains("\tsm_80\t")) && resources.lines().count() == 2, "{resources}");
    for line in index.lines() {
        let numbers: Vec<usize> = line.split('\t').skip(1).map(|number| number.parse().unwrap()).collect();
        // The header of a fat binary: a magic number, version 1, its own size, and that of what follows.
        let module = &binary[numbers[0]..][..numbers[1]];
        assert_eq!(module[..8], [0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0]);
        assert_eq!(u64::from_le_bytes(module[8..16].try_into().unwrap()), numbers[1] as u64 - 16);
    }

    let mut tight = built.kernels;
    tight[0].limits.registers = 1;
    let problem = resources::within_limits(&tight).unwrap_err();
    assert!(problem.starts_with("scale_by_2 (scale.0): found "), "{problem}");
}
