//! Why a model does not run on a GPU, one line each with numbers and what to do; over a driver of host code
//! (`device/tests/backends/driver.cpp`): this program once more, where that is the first `libcuda.so.1` that the loader finds.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use engine::{AsyncEngine, EngineConfig, plan};
use testkit::kernels::{self, host};
use testkit::workspace;

/// The device that the program is to start on, which is started for that alone.
const DEVICE: &str = "NO_GPU_DEVICE";
/// Where it finds the driver and kernels.
const FOLDER: &str = "LD_LIBRARY_PATH";

fn model_on(device: &str) -> EngineConfig {
    let kernels_dir = std::env::var_os(FOLDER).map(PathBuf::from);
    EngineConfig { device: device.into(), kernels_dir, kv_cache_memory_bytes: None, ..crate::common::config(64) }
}

/// The folder of the driver, which also contains some kernels; `None`, reported, without a compiler or
/// where another device is tested.
fn driver() -> Option<&'static PathBuf> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        host::compiler_for_tests("a driver in host code")?;
        let kernels = host::folder_for_tests()?.join("libquire_sim_models.so");
        let folder = kernels::target(&workspace::root()).join("tmp/no_gpu");
        std::fs::create_dir_all(&folder).unwrap();
        let over = folder.join("libquire_sim_models.so");
        crate::fake::copy(&kernels, &over);
        crate::fake::compile("driver.cpp", &over, &folder.join("libcuda.so.1"));
        // A plan looks for kernels and opens none.
        std::fs::write(folder.join("attention_kernels.fatbin"), "").unwrap();
        Some(folder)
    };
    BUILT.get_or_init(build).as_ref()
}

/// The output of a start on that device over a driver with these variables.
fn said(device: &str, variables: &[(&str, &str)]) -> Option<String> {
    let folder = driver()?;
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["no_gpu::starting", "--exact", "--include-ignored", "--nocapture"]).env(FOLDER, folder);
    let output = command.env(DEVICE, device).envs(variables.iter().copied()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    let begin = text.find("said: ").unwrap() + "said: ".len();
    Some(text[begin..text[begin..].find("\nend").unwrap() + begin].to_string())
}

/// Prints the result of a start, for the test below.
#[test]
#[ignore = "only as a program of its own, over a fake driver"]
fn starting() {
    let device = std::env::var(DEVICE).unwrap();
    let outcome = match device.as_str() {
        "auto" => AsyncEngine::start(model_on("auto"), &|_, _| {}).map(|engine| engine.info().notes.join("\n")),
        device => plan(&model_on(device)).map(|plan| plan.cache_line()),
    };
    println!("said: {}\nend", outcome.unwrap_or_else(|error| error.to_string()));
}

#[test]
fn an_unusable_gpu_is_reported_in_one_line_and_auto_uses_the_cpu_and_says_why() {
    for (variable, words) in [
        (
            ("FAKE_VERSION", "12040"),
            &["a driver for CUDA 12.4, expected 13.0 or newer; update the NVIDIA driver to 580"][..],
        ),
        (("FAKE_GPUS", "0"), &["the NVIDIA driver finds no GPU; check CUDA_VISIBLE_DEVICES"]),
        (("FAKE_CAPABILITY", "75"), &["found host code of compute capability 7.5, expected 8.0 or newer"]),
        (("FAKE_RETAIN", "2"), &["host code, 16.0 GiB, is in use", "end the programs that nvidia-smi lists"]),
    ] {
        let Some(line) = said("cuda", &[variable]) else { return };
        assert!(
            !line.contains('\n') && line.starts_with("--device cuda: ") && line.ends_with("use --device cpu"),
            "{line}"
        );
        assert!(words.iter().all(|words| line.contains(words)), "{line}");
        let notes = said("auto", &[variable]).unwrap();
        let why = line.trim_start_matches("--device cuda: ");
        assert!(notes.lines().any(|note| note == format!("no GPU is used: {why}")), "{notes}");
        assert!(notes.starts_with("device: cpu, "), "{notes}");
    }
    let notes = said("auto", &[("FAKE_CAPABILITY", "89")]).unwrap();
    let why = "no GPU of compute capability 8.9 has passed the tests; use --device cuda to select it";
    assert!(notes.starts_with("device: cpu, ") && notes.contains(why), "{notes}");
}

#[test]
fn a_model_that_does_not_fit_beside_other_programs_is_refused_in_one_line_with_numbers() {
    let Some(line) = said("cuda", &[("FAKE_FREE", "1")]) else { return };
    assert!(!line.contains('\n') && line.starts_with("--device: found cuda, expected a GPU with "), "{line}");
    for words in ["of 16.00 GiB the weights take ", "other programs 16.00 GiB; free some", "or use --device cpu"] {
        assert!(line.contains(words), "{words:?} is not in {line}");
    }
    // With more memory, but less than a step of that size needs under a share of 0.9.
    let fits = said("cuda", &[("FAKE_FREE", "8192")]).unwrap();
    assert!(fits.starts_with("cache: "), "{fits}");
    let share = said("cuda", &[("FAKE_FREE", "1024")]).unwrap();
    assert!(share.starts_with("--gpu-memory-utilization: found 0.9, expected at least 0."), "{share}");
}
