//! The reference's checkpoints with weights in fewer bits: logits, and single layers with rounded activations. The checkpoints are not
//! in the tree; `QUIRE_REFERENCE_FORMATS` names their folder. One layer of each is in `formats/`, cut out by `formats/layers.py`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use attention_kernels::{KernelChoice, select};
use device::Device;
use linear::{Gemm, Rows, gemm};
use models::decoder::{Linear, Part, Pick, Role};
use models::{
    Model, ModelConfig, ModelFiles, RoundActivations, Weights, check_weights, gguf, in_stored_forms, load_matrix,
};
use safetensors::SafeTensors;
use serde_json::Value;
use simd::Isa;
use testkit::capability::Capability;

use crate::common::{ids, last_logits, list, needs, text};

/// Greatest absolute difference of a float32 logit (the reference's README).
const TOLERANCE: f32 = 2e-3;
/// Rows of inputs of a single layer.
const ROWS: usize = 6;

/// Folders of the cases in Hugging Face layout; none, with a report, if the machine does not have them.
fn cases() -> Vec<PathBuf> {
    let Some(folder) = testkit::reference::formats() else {
        testkit::not_run::report(Capability::ReferenceFormats, "QUIRE_REFERENCE_FORMATS is not set");
        return Vec::new();
    };
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut cases: Vec<_> = entries.filter(|path| path.join("config.json").is_file()).collect();
    cases.sort();
    assert!(cases.len() >= 15);
    cases
}

struct Case {
    name: String,
    expected: Value,
    tensors: Vec<u8>,
    config: ModelConfig,
    weights: Weights,
}

impl Case {
    fn open(folder: &Path, rounds: RoundActivations) -> Case {
        let files = ModelFiles::open(folder).unwrap();
        let mut config = ModelConfig::load(&files).unwrap();
        let mut weights = Weights::open(&files).unwrap();
        weights.round_activations(rounds);
        check_weights(&config.decoder, &weights).unwrap();
        config.decoder = in_stored_forms(config.decoder, &weights).unwrap();
        Case {
            name: folder.file_name().unwrap().to_string_lossy().into_owned(),
            expected: serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap(),
            tensors: std::fs::read(folder.join("expected.safetensors")).unwrap(),
            config,
            weights,
        }
    }

    fn numbers(&self, name: &str) -> Vec<f32> {
        numbers(&self.tensors, name)
    }

    /// Greatest and mean difference of the last logits of the prompts, whose expected ones are listed in `from`.
    fn errors(&self, device: &Arc<dyn Device>, from: &Value) -> (f32, f32) {
        let kernels = select(&KernelChoice::default(), &needs(&**device, &self.config.decoder)).unwrap();
        let (decoder, nothing) = (&self.config.decoder, |_, _| Ok(()));
        let mut model = Model::load(decoder, &self.weights, Arc::clone(device), kernels, 256, &nothing).unwrap();
        let mut caches = model.new_cache(64, 8).unwrap();
        let mut errors = Vec::new();
        for (prompt, expected) in list(&self.expected["prompts"]).iter().zip(list(from)) {
            let ids = ids(&prompt["ids"]);
            let want = self.numbers(text(&expected["logits"]));
            let want = &want[want.len() - decoder.vocab_size()..];
            let found = last_logits(&mut model, &mut caches, (8, 64), &ids, ids.len());
            errors.extend(found.iter().zip(want).map(|(a, b)| (a - b).abs()));
        }
        (errors.iter().copied().fold(0.0, f32::max), errors.iter().sum::<f32>() / errors.len() as f32)
    }
}

fn numbers(file: &[u8], name: &str) -> Vec<f32> {
    let tensors = SafeTensors::deserialize(file).unwrap();
    let data = tensors.tensor(name).unwrap().data().to_vec();
    data.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Multiplies rows of inputs by the weights of a module and compares with the expected rows.
fn check_layer(name: &str, part: Part, weights: &Weights, input: &[f32], want: &[f32]) {
    let device = device::open("cpu", Some(2)).unwrap();
    let linear = Linear::new(input.len() / ROWS, Role::Column, [part]);
    let matrix = load_matrix(&linear, weights, &*device, device::Dtype::F32).unwrap();
    let mut y = vec![f32::NAN; want.len()];
    let weights = matrix.host().unwrap();
    gemm(Isa::best(), device.pool(), Gemm { x: Rows::Numbers(input), weights, bias: None, y: &mut y });
    let scale = want.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let error = y.iter().zip(want).map(|(a, b)| (a - b).abs()).max_by(f32::total_cmp).unwrap();
    println!("{name}: relative error {}", error / scale);
    assert!(error <= 1e-4 * scale, "{name}: {error} of {scale}");
}

#[test]
fn a_layer_of_every_format_is_that_of_the_reference() {
    let entries = std::fs::read_dir(testkit::workspace::root().join("models/tests/formats")).unwrap();
    let cases: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).collect();
    assert_eq!(cases.len(), 15);
    for folder in cases {
        let mut weights = Weights::open(&ModelFiles::open(&folder).unwrap()).unwrap();
        weights.round_activations(RoundActivations::Auto);
        let expected = std::fs::read(folder.join("expected.safetensors")).unwrap();
        let (input, want) = (numbers(&expected, "input"), numbers(&expected, "output"));
        let rows = want.len() / ROWS;
        let name = folder.file_name().unwrap().to_string_lossy();
        let part = if name.starts_with("mxfp4") {
            let pick = Pick { transposed: true, matrix: Some((1, 4)), ..Pick::all(rows) };
            Part { bare: true, ..Part::picked("model.layers.0.mlp.experts.down_proj", rows, pick) }
        } else {
            Part::new("model.layers.0.self_attn.k_proj", rows)
        };
        check_layer(&name, part, &weights, &input, &want);
    }
}

#[test]
fn logits_are_those_of_the_weights_that_the_formats_define() {
    for folder in cases() {
        let case = Case::open(&folder, RoundActivations::Never);
        let (greatest, _) = case.errors(&device::open("cpu", Some(2)).unwrap(), &case.expected["prompts"]);
        println!("{}: error {greatest}", case.name);
        assert!(greatest < TOLERANCE, "{}: error {greatest}", case.name);
    }
}

#[test]
fn activations_are_rounded_as_checkpoints_say() {
    for folder in cases() {
        let case = Case::open(&folder, RoundActivations::Auto);
        let act_quant = &case.expected["act_quant"];
        if act_quant.is_null() {
            continue;
        }
        let device = device::open("cpu", Some(2)).unwrap();
        let (greatest, mean) = case.errors(&device, &act_quant["prompts"]);
        let bound = |key: &str| act_quant["tolerance"][key].as_f64().unwrap() as f32;
        println!("{}: error {greatest}, mean {mean}", case.name);
        assert!(greatest <= bound("max_abs") && mean <= bound("mean_abs"), "{}: {greatest}, {mean}", case.name);
        for layer in list(&act_quant["linear"]) {
            let module = text(&layer["module"]);
            let want = case.numbers(&format!("linear.{module}.output"));
            let input = case.numbers(&format!("linear.{module}.input"));
            let part = Part::new(module, want.len() / ROWS);
            check_layer(&format!("{} {module}", case.name), part, &case.weights, &input, &want);
        }
    }
}

#[test]
fn a_checkpoint_says_in_which_form_it_stores_its_weights() {
    let root = testkit::workspace::root().join("models/tests");
    let name = |files: &ModelFiles| models::stored_as(files, &Weights::open(files).unwrap());
    for (folder, expected) in [
        ("formats/awq-int4-g128", "AWQ-Int4"),
        ("formats/ct-fp8-channel", "FP8"),
        ("formats/ct-w4a16-g128", "Int4"),
        ("formats/ct-w8a8-int8", "Int8"),
        ("formats/fp8-block128", "FP8"),
        ("formats/gptq-int8-g128", "GPTQ-Int8"),
        ("formats/gptq-v2-int4-g64-asym", "GPTQ-Int4"),
        ("formats/mxfp4-gpt-oss", "MXFP4"),
        ("../demo", "BF16"),
    ] {
        assert_eq!(name(&ModelFiles::open(&root.join(folder)).unwrap()), expected, "{folder}");
    }
    let path = root.join("gguf/reference/gguf-qwen2-iq4_nl/tiny-qwen2-IQ4_NL.gguf");
    assert_eq!(name(&ModelFiles::open(&path).unwrap()), "IQ4_NL");
    let bytes = std::fs::read(&path).unwrap();
    let key = b"general.file_type";
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap();
    let with = |change: &dyn Fn(&mut [u8])| {
        let mut bytes = bytes.clone();
        change(&mut bytes[at..]);
        let model = gguf::GgufModel::new(gguf::Gguf::from_bytes("made.gguf", bytes.into()).unwrap()).unwrap();
        ModelFiles::Gguf { path: path.clone(), model: Arc::new(model) }
    };
    // A number is the name of a mixture of types; without one that is known, most of the elements count.
    assert_eq!(name(&with(&|key| key[21] = 15)), "Q4_K_M");
    assert_eq!(name(&with(&|key| key[21] = 200)), "IQ4_NL");
    assert_eq!(name(&with(&|key| key[8] = b'x')), "IQ4_NL");
}
