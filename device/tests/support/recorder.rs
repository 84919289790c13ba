//! Records the launches of a program to a file, so that they can be replayed.

use std::sync::Mutex;

use device::{Device, DeviceError, Launch};

use super::hooked::Hooks;

/// Writes each launch to a file before it runs.
pub struct Recorder {
    seeds: Vec<u64>,
    file: Mutex<tempfile::NamedTempFile>,
    launches: Mutex<Vec<String>>,
}

impl Recorder {
    pub fn new(seeds: &[u64]) -> Recorder {
        let file = Mutex::new(tempfile::NamedTempFile::new().unwrap());
        Recorder { seeds: seeds.to_vec(), file, launches: Mutex::default() }
    }

    /// Returns the file and the names of the kernels in it.
    pub fn into_parts(self) -> (tempfile::NamedTempFile, Vec<String>) {
        (self.file.into_inner().unwrap(), self.launches.into_inner().unwrap())
    }
}

impl Hooks for Recorder {
    fn launch(&self, device: &dyn Device, launch: &Launch<'_>) -> Result<(), DeviceError> {
        launch.record(&self.seeds, &mut *self.file.lock().unwrap()).unwrap();
        self.launches.lock().unwrap().push(launch.kernel.to_owned());
        device.launch(launch)
    }
}
