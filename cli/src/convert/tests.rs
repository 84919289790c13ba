//! Conversion of a checkpoint to quantised weights: the result is served, its errors are those of its form, and bad input is refused.

#![cfg(test)]
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use engine::{AsyncEngine, EngineConfig, GenerationParams, Llm, ModelSource, ParallelConfig, Reduce, SamplingParams};
use tempfile::TempDir;

use super::Method;
use super::checkpoint::{ConvertOptions, Converted, convert};

fn demo() -> PathBuf {
    testkit::workspace::root().join("models/demo")
}

fn config(model: &Path) -> EngineConfig {
    let model = ModelSource::Folder(model.to_path_buf());
    EngineConfig { model, device: "cpu".into(), kv_cache_memory_bytes: Some(16 << 20), ..Default::default() }
}

fn converted(from: &Path, to: &Path, method: Method, group_size: usize) -> Result<Vec<Converted>, String> {
    let text = std::fs::read_to_string(demo().join("README.md")).unwrap();
    let options = ConvertOptions { method, group_size, calibration: Some(text) };
    convert(&config(from), to, &options, &|_, _| {}).map_err(|error| error.to_string())
}

/// Mean error of the quantised modules.
fn mean(report: &[Converted], error: fn(&Converted) -> Option<f64>) -> f64 {
    let errors: Vec<f64> = report.iter().filter_map(error).collect();
    errors.iter().sum::<f64>() / errors.len() as f64
}

#[test]
fn a_converted_checkpoint_is_served_and_its_errors_are_reported() {
    let folder = TempDir::new().unwrap();
    for (method, group, weights, bits) in
        [(Method::Q8, 32, 0.006, 8.7), (Method::Q4, 32, 0.1, 4.7), (Method::Gptq4, 64, 0.14, 4.5)]
    {
        let to = folder.path().join(format!("{method:?}"));
        let report = converted(&demo(), &to, method, group).unwrap();
        let quantised = report.iter().filter(|it| it.weight_error.is_some()).count();
        assert!(quantised > 0 && report.iter().any(|it| it.weight_error.is_none()), "{report:?}");
        let error = mean(&report, |it| it.weight_error);
        assert!(error < weights && error > weights / 4.0, "{method:?}: {error}");
        if method == Method::Gptq4 {
            // It changes weights more than rounding does, so that outputs change less.
            let outputs = mean(&report, |it| it.output_error);
            assert!(outputs < 0.8 * error, "{outputs}, {error}");
        }
        let plan = engine::plan(&config(&to)).unwrap();
        assert!(plan.stored);
        let of_layers: usize =
            report.iter().filter(|it| it.weight_error.is_some()).map(|it| it.outputs * it.inputs).sum();
        let file = std::fs::metadata(to.join("model.safetensors")).unwrap().len() as f64;
        let dense = std::fs::metadata(demo().join("model.safetensors")).unwrap().len() as f64;
        let stored = (file - (dense - 2.0 * of_layers as f64)) * 8.0 / of_layers as f64;
        assert!(stored < bits, "{method:?}: {stored} bits per weight");
        let params = GenerationParams { max_tokens: Some(8), ..Default::default() };
        let answers = Llm::new(config(&to)).unwrap().generate(&["The capital of France is"], &params).unwrap();
        assert!(answers[0].outputs[0].text.contains("Paris"), "{method:?}: {}", answers[0].outputs[0].text);
        let again = converted(&to, &folder.path().join("again"), method, group).unwrap_err();
        assert!(again.contains("not quantised already"), "{again}");
    }
}

#[test]
fn conversions_that_cannot_be_done_are_refused_in_one_line() {
    let folder = TempDir::new().unwrap();
    let exists = converted(&demo(), folder.path(), Method::Q8, 32).unwrap_err();
    assert!(exists.contains("DST") && exists.contains("does not exist yet") && !exists.contains('\n'), "{exists}");
    let to = folder.path().join("to");
    let missing = converted(&folder.path().join("nowhere"), &to, Method::Q8, 32).unwrap_err();
    assert!(missing.contains("nowhere") && !to.exists(), "{missing}");
    let options = ConvertOptions { method: Method::Gptq4, group_size: 64, calibration: Some("short".into()) };
    let short = convert(&config(&demo()), &to, &options, &|_, _| {}).unwrap_err().to_string();
    assert!(short.contains("--calibration") && !to.exists(), "{short}");
}

#[test]
fn products_of_a_quantised_checkpoint_that_cannot_be_cut_are_gathered_and_counted() {
    let folder = TempDir::new().unwrap();
    let to = folder.path().join("q4");
    // Groups of 64: the 6 heads of 32 are cut in the middle of one, the 384 inputs of a network between two.
    converted(&demo(), &to, Method::Q4, 64).unwrap();
    let on_ranks = |tensor_parallel_size, tp_reduce| {
        let parallel = ParallelConfig { tensor_parallel_size, tp_reduce, ..Default::default() };
        EngineConfig { parallel, threads: Some(1), seed: Some(1), ..config(&to) }
    };
    let tokens = |config: &EngineConfig| {
        let sampling = SamplingParams { temperature: 0.0, ..Default::default() };
        let params = GenerationParams { sampling, max_tokens: Some(24), ignore_eos: true, ..Default::default() };
        let prompts = ["The capital of France is", "A quire is", "The cache of a request holds"];
        let mut llm = Llm::new(config.clone()).unwrap();
        let mut run = |prompts: &[&str]| llm.generate(prompts, &params).unwrap();
        (run(&prompts), prompts.map(|prompt| run(&[prompt])))
    };
    let (one, two) = (on_ranks(1, Reduce::Gather), on_ranks(2, Reduce::Sum));
    assert_eq!(tokens(&two), tokens(&one));
    let line = |config: EngineConfig| {
        let engine = AsyncEngine::start(config, &|_, _| {}).unwrap();
        engine.info().notes.iter().find(|line| line.starts_with("sums over ranks")).cloned()
    };
    let counts =
        "sums over ranks: 5 products, 5 gathered, whose stored form cannot be cut between the inputs of the ranks";
    assert_eq!(line(two).as_deref(), Some(counts));
    assert_eq!(line(on_ranks(2, Reduce::Gather)), None);
}
