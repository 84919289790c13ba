//! The device that runs the kernels of tests: `cuda` where `QUIRE_TEST_DEVICE` names it, else `cuda-sim`.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use device::{Device, Options};
use testkit::kernels::host::{device_for_tests, folder_for_tests};

/// Opens the device with these options, one thread of the host and its kernels. `None`, reported, without a C++ compiler.
pub fn open(options: Options) -> Option<Arc<dyn Device>> {
    Some(
        device::open_with(device_for_tests(), &Options { threads: Some(1), kernels: Some(kernels()?), ..options })
            .unwrap(),
    )
}

/// Returns the folder of the kernels. `None`, reported, without a C++ compiler.
///
/// Keeps one open GPU until the process ends: its context, which all others share, takes longer to create than a test to run.
pub fn kernels() -> Option<PathBuf> {
    static GPU: OnceLock<Arc<dyn Device>> = OnceLock::new();
    let folder = folder_for_tests()?;
    if device_for_tests() == "cuda" {
        let options = Options { threads: Some(1), kernels: Some(folder.clone()), ..Options::default() };
        GPU.get_or_init(|| device::open_with("cuda", &options).unwrap());
    }
    Some(folder)
}
