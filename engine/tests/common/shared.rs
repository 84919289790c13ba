//! Engines on devices that the test has opened before: a GPU takes longer to open, with its kernels and the choice of its products,
//! than most tests to run. A test, which is a thread, opens one device for each setting of a device.

use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::Arc;

use device::Device;
use engine::{Engine, EngineConfig, EngineError, EngineParts, Llm, LoadOn, Loaded};
use testkit::kernels::host::device_for_tests;

/// What of a configuration a device depends on: its kernels, threads and determinism.
type Setting = (Option<PathBuf>, Option<usize>, bool);

thread_local! {
    static OPENED: RefCell<Vec<(Setting, Arc<dyn Device>)>> = const { RefCell::new(Vec::new()) };
}

/// The device of the tests for this configuration; `None` if it names another, or several ranks or a profile have their own.
fn device(config: &EngineConfig) -> Option<Arc<dyn Device>> {
    if config.device != device_for_tests() || config.parallel.ranks() > 1 || config.profile.is_some() {
        return None;
    }
    let setting = (config.kernels_dir.clone(), config.threads, config.deterministic);
    OPENED.with_borrow_mut(|opened| {
        if let Some((_, device)) = opened.iter().find(|(of, _)| *of == setting) {
            return Some(device.clone());
        }
        let (kernels, threads, deterministic) = setting.clone();
        let options = device::Options { kernels, threads, deterministic, ..Default::default() };
        // An error is for the engine to report.
        let device = device::open_with(&config.device, &options).ok()?;
        opened.push((setting, device.clone()));
        Some(device)
    })
}

fn load(config: &EngineConfig) -> Result<Loaded, EngineError> {
    engine::load(config, device(config).map_or(LoadOn::Configured, LoadOn::Device), &|_, _| {})
}

/// The parts of an engine on a shared device.
pub fn parts(config: &EngineConfig) -> Result<EngineParts, EngineError> {
    Ok(load(config)?.parts)
}

/// [`Engine::load`] on a shared device.
pub fn engine(config: &EngineConfig) -> Result<Engine, EngineError> {
    Engine::new(parts(config)?)
}

/// [`Llm::new`] on a shared device.
pub fn llm(config: EngineConfig) -> Result<Llm, EngineError> {
    Llm::of(&config, load(&config)?)
}
