//! The oracle against transformers, and the crate against the oracle.

use std::path::Path;
use std::sync::Arc;

use attention_kernels::{KernelChoice, KvDtype, Needs, select};
use device::{Device, Options};
use models::decoder::{Attention, Mixer, Norm, NormKind};
use models::{LoadError, Model, ModelConfig, ModelFiles, PageLayout, StepLimits, Weights, check_weights};
use safetensors::SafeTensors;
use serde_json::Value;
use tempfile::TempDir;
use testkit::reference::context;

use super::case::Case;
use super::cases::all;
use super::last_logits;
use super::tensors::Tensors;
use crate::common;

/// Greatest absolute difference of a logit.
const TOLERANCE: f64 = 2e-3;

/// The greatest difference, or NaN if there is one. Equal infinities do not differ.
pub fn difference(a: &[f32], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let one = |(a, b): (&f32, &f64)| if f64::from(*a) == *b { 0.0 } else { (f64::from(*a) - b).abs() };
    a.iter().zip(b).map(one).max_by(f64::total_cmp).unwrap()
}

#[test]
fn the_oracle_gives_the_logits_of_the_reference_cases() {
    for name in common::CASES {
        let files = common::files(name);
        let config: Value = files.read_json("config.json").unwrap();
        let w = Tensors::stored(Weights::open(&files).unwrap());
        let bytes = std::fs::read(common::folder(name).join("expected.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        for prompt in common::list(&common::expected(name)["prompts"]) {
            let ids = common::ids(&prompt["ids"]);
            let quick = common::text(&prompt["name"]) == "short";
            if !quick && !testkit::everything() {
                continue;
            }
            let want = tensors.tensor(common::text(&prompt["logits"])).unwrap();
            let want: Vec<f32> = want.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            let error = difference(&want, &last_logits(&config, &w, &ids, context(name, ids.len())));
            println!("{name}: {} tokens, error {error}", ids.len());
            assert!(error < TOLERANCE, "{name}: {} tokens, error {error}", ids.len());
        }
    }
}

/// Length of the prompt, which is longer than any window.
const PROMPT: usize = 40;

fn prompt(vocab: u64, len: usize) -> Vec<u32> {
    (0..len as u64).map(|i| ((i * i * 7 + 3 * i + 5) % vocab) as u32).collect()
}

/// The tensors that the oracle reads, and its logits of the first `len` tokens of the prompt.
pub fn make(config: &Value, seed: u64, len: usize) -> (Tensors, Vec<f64>) {
    let (_, tensors, logits) = make_of(config, seed, len);
    (tensors, logits)
}

/// [`make`] for a prompt of any length, which is the first result.
pub fn make_of(config: &Value, seed: u64, len: usize) -> (Vec<u32>, Tensors, Vec<f64>) {
    let narrow = [&config["torch_dtype"], &config["dtype"]].into_iter().any(|dtype| dtype == "bfloat16");
    let tensors = Tensors::made(seed, narrow);
    let prompt = prompt(config["vocab_size"].as_u64().unwrap(), len);
    let logits = last_logits(config, &tensors, &prompt, None);
    (prompt, tensors, logits)
}

pub fn write(config: &Value, weights: Vec<u8>) -> TempDir {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    std::fs::write(folder.path().join("model.safetensors"), weights).unwrap();
    folder
}

/// Reads a folder and checks that every tensor of its file is used, and no other is needed.
pub fn checked(folder: &Path) -> Result<(ModelConfig, Weights), LoadError> {
    let files = ModelFiles::open(folder)?;
    let config = ModelConfig::load(&files)?;
    let weights = Weights::open(&files)?;
    check_weights(&config.decoder, &weights)?;
    Ok((config, weights))
}

pub fn computed(folder: &Path) -> Result<Vec<f32>, String> {
    computed_on(device::open("cpu", Some(1)).unwrap(), folder, |_| {})
}

/// Loads a folder and computes the last logits of the prompt whole and in chunks of 7, which must agree in every bit.
pub fn computed_on(
    device: Arc<dyn Device>,
    folder: &Path,
    change: impl Fn(&mut Attention),
) -> Result<Vec<f32>, String> {
    computed_keeping(device, folder, KvDtype::Same, PROMPT, change)
}

/// [`computed_on`] with a cache of this type. The first step sets its scales, if it takes some.
fn computed_keeping(
    device: Arc<dyn Device>,
    folder: &Path,
    kv_dtype: KvDtype,
    len: usize,
    change: impl Fn(&mut Attention),
) -> Result<Vec<f32>, String> {
    let (config, weights) = checked(folder).map_err(|e| e.to_string())?;
    let mut decoder = config.decoder.clone().for_context(config.max_position_embeddings);
    for branch in decoder.layers.iter_mut().flat_map(|layer| &mut layer.branches) {
        if let Mixer::Attention(attention) = &mut branch.mixer {
            change(attention);
        }
    }
    let block_size = decoder.sparse_block().unwrap_or(16);
    let needs = Needs { row_invariant: true, kv_dtype, block_size, ..common::needs(&*device, &decoder) };
    let kernels = select(&KernelChoice::default(), &needs).map_err(|e| e.to_string())?;
    let mut model =
        Model::load(&decoder, &weights, Arc::clone(&device), kernels, 64, &|_, _| Ok(())).map_err(|e| e.to_string())?;
    let block_size = PageLayout::least_block_size(&decoder, &kernels.format).max(8);
    let limits = StepLimits { max_rows: 64, max_seqs: 1, max_model_len: 64, block_size, num_blocks: 48 };
    model.calculate_kv_scales().map_err(|e| e.to_string())?;
    model.reserve(&limits).map_err(|e| e.to_string())?;
    let blocks = (limits.block_size, limits.num_blocks);
    let mut caches = model.new_cache(blocks.1, blocks.0).map_err(|e| e.to_string())?;
    let prompt = prompt(decoder.vocab_size() as u64, len);
    let whole = common::last_logits(&mut model, &mut caches, blocks, &prompt, prompt.len());
    let chunked = common::last_logits(&mut model, &mut caches, blocks, &prompt, 7);
    if whole != chunked {
        return Err("chunks of 7 change a bit".into());
    }
    Ok(whole)
}

#[test]
fn every_option_of_every_family_gives_the_logits_of_the_oracle() {
    compare(all(), PROMPT, || device::open("cpu", Some(1)).unwrap());
}

#[test]
fn layers_that_share_keys_and_values_share_their_scales() {
    let case =
        all().into_iter().find(|case| case.name == "gemma4, inputs of layers, shared keys, wide networks").unwrap();
    let (tensors, want) = make(&case.config, 1, PROMPT);
    let folder = write(&case.config, tensors.to_bytes(|name, _| Some(name.to_string())));
    let devices = [Some(device::open("cpu", Some(1)).unwrap()), launching_device()];
    for device in devices.into_iter().flatten() {
        let logits = computed_keeping(device, folder.path(), KvDtype::Fp8E4m3, PROMPT, |_| {}).unwrap();
        // Eight bits round by up to 6 %; other scales move logits by their size.
        let error = difference(&logits, &want);
        assert!(error < 0.25, "error {error}");
    }
}

/// The simulator, or the device of the tests; `None` without a C++ compiler.
pub fn launching_device() -> Option<Arc<dyn Device>> {
    crate::support::opened::open(Options { deterministic: true, ..Options::default() })
}

#[test]
fn parts_of_attention_that_no_family_combines_are_the_same_on_every_device() {
    let Some(device) = launching_device() else { return };
    let case = all().into_iter().find(|case| case.name == "ministral3").unwrap();
    let (tensors, _) = make(&case.config, 1, 1);
    let folder = write(&case.config, tensors.to_bytes(|name, _| Some(name.to_string())));
    let norm = |width: usize| {
        let (weight, shape) = (Vec::new(), vec![width]);
        Norm {
            kind: NormKind::Layer,
            weight,
            bias: None,
            shape,
            part: None,
            width,
            eps: 1e-5,
            plus_one: false,
            factor: 1.0,
        }
    };
    for after in [false, true] {
        let change = |attention: &mut Attention| {
            (attention.query_norm, attention.norm_after_rope) = (Some(norm(attention.heads.head_dim)), after);
            (attention.key_norm, attention.clip) = (attention.query_norm.clone(), Some(1.5));
        };
        let [cpu, launched] = [device::open("cpu", Some(1)).unwrap(), Arc::clone(&device)]
            .map(|device| computed_on(device, folder.path(), change).unwrap());
        let cpu: Vec<f64> = cpu.into_iter().map(f64::from).collect();
        let error = difference(&launched, &cpu);
        assert!(error < TOLERANCE, "norms after the rotation: {after}; error {error}");
    }
}

#[test]
fn options_without_a_reference_case_give_the_logits_of_the_oracle_on_cuda_sim() {
    compare_on_cuda_sim(0);
}

#[test]
fn the_rest_of_the_options_give_the_logits_of_the_oracle_on_cuda_sim() {
    compare_on_cuda_sim(1);
}

/// Every second one of the cases without a reference, on a device of its own.
fn compare_on_cuda_sim(part: usize) {
    let Some(device) = launching_device() else { return };
    let has_reference =
        |family: &str| models::supported().any(|it| it.architectures.contains(&family) && !it.reference.is_empty());
    let class = |case: &Case| case.config["architectures"][0].as_str().unwrap().to_string();
    // One case of each family, but all of Gemma 4, whose pages differ. Kernels write heads to the cache in pieces of 8 elements.
    let mut seen = Vec::new();
    let mut first = |case: &Case| {
        let folder = write(&case.config, Vec::new());
        let config = ModelConfig::load(&ModelFiles::open(folder.path()).unwrap()).unwrap();
        let serves = config.decoder.heads().head_dim.is_multiple_of(8);
        let class = class(case);
        let is_new = serves && !seen.contains(&class) && !has_reference(&class);
        if is_new {
            seen.push(class);
        }
        is_new || serves && (testkit::everything() || case.name.starts_with("gemma4"))
    };
    let cases: Vec<Case> = all().into_iter().filter(|case| first(case)).skip(part).step_by(2).collect();
    // Some windows are shorter than this.
    compare(cases, 20, || Arc::clone(&device));
    let missing = all().iter().map(class).find(|class| !has_reference(class) && !seen.contains(class));
    assert_eq!(missing, None, "every such family has a case that ran");
}

fn compare(cases: Vec<Case>, len: usize, device: impl Fn() -> Arc<dyn Device>) {
    let mut wrong = Vec::new();
    for (seed, Case { name, config }) in cases.into_iter().enumerate() {
        let (tensors, want) = make(&config, seed as u64, len);
        let folder = write(&config, tensors.to_bytes(|name, _| Some(name.to_string())));
        match computed_keeping(device(), folder.path(), KvDtype::Same, len, |_| {}) {
            Ok(logits) => {
                let error = difference(&logits, &want);
                println!("{name}: error {error:.1e}");
                if error.is_nan() || error >= TOLERANCE {
                    wrong.push(format!("{name}: error {error}"));
                }
            }
            Err(error) => wrong.push(format!("{name}: {error}")),
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}
