//! Adapters of synthetic numbers against a checkpoint with the merged weights, for every way in which a family stores its modules.

use std::collections::BTreeMap;
use std::path::Path;

use models::decoder::Form;
use models::{ModelConfig, ModelFiles};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize_to_file};
use serde_json::json;
use testkit::adapters::{Matrix, factors, write};

use super::{Seq, kinds, load, modules};
use crate::common::{Copy, folder};

/// The checkpoint with `scale(module) * B * A` added to its weights.
fn merge(case: &str, matrices: &[Matrix], scale: &dyn Fn(&str) -> f32, transposed: bool) -> Copy {
    let copy = Copy::of(case);
    let bytes = std::fs::read(copy.path("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut data: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> = tensors
        .iter()
        .map(|(name, view)| (name.to_string(), (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
        .collect();
    for pair in matrices.chunks(2) {
        let [down, up] = pair else { panic!() };
        let module = down.name.strip_prefix("base_model.model.").unwrap().strip_suffix(".lora_A.weight").unwrap();
        let bare = module.split_once('.').unwrap().1;
        let name = [module, bare].map(|name| format!("{name}.weight")).into_iter().find(|name| data.contains_key(name));
        let (dtype, shape, weights) = data.get_mut(&name.unwrap()).unwrap();
        if *dtype == Dtype::F16 {
            let wide = weights.as_chunks::<2>().0.iter().map(|bytes| half::f16::from_le_bytes(*bytes).to_f32());
            (*dtype, *weights) = (Dtype::F32, wide.flat_map(|x| x.to_le_bytes()).collect());
        }
        if *dtype == Dtype::BF16 {
            let wide = weights.as_chunks::<2>().0.iter().map(|bytes| half::bf16::from_le_bytes(*bytes).to_f32());
            (*dtype, *weights) = (Dtype::F32, wide.flat_map(|x| x.to_le_bytes()).collect());
        }
        assert_eq!(*dtype, Dtype::F32);
        let ([rank, inputs], [outputs, _]) = (down.shape, up.shape);
        assert_eq!(shape[..], if transposed { [inputs, outputs] } else { [outputs, inputs] });
        for (i, weight) in weights.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let (output, input) = if transposed { (i % outputs, i / outputs) } else { (i / inputs, i % inputs) };
            let product = |r: usize| up.values[output * rank + r] * down.values[r * inputs + input];
            let sum = f32::from_le_bytes(*weight) + scale(module) * (0..rank).map(product).sum::<f32>();
            *weight = sum.to_le_bytes();
        }
    }
    let views = data
        .iter()
        .map(|(name, (dtype, shape, data))| (name.as_str(), TensorView::new(*dtype, shape.clone(), data).unwrap()));
    serialize_to_file(views, None, &copy.path("model.safetensors")).unwrap();
    copy
}

fn last_logits(folder: &Path, adapters: Option<&[std::path::PathBuf]>, tokens: &[u32]) -> Vec<f32> {
    let slot = adapters.map(|_| 0);
    load(folder, Form::Dense, 2, adapters).logits(vec![Seq::new(slot, tokens)], &[9]).remove(0)
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Compares an adapter with the merged weights, and checks that it changes the result. `chosen`: whether a module has factors.
fn check(
    case: &str,
    config: serde_json::Value,
    chosen: &dyn Fn(&str) -> bool,
    rank: &dyn Fn(&str) -> usize,
    scale: &dyn Fn(&str) -> f32,
) {
    let decoder = ModelConfig::load(&ModelFiles::open(&folder(case)).unwrap()).unwrap().decoder;
    let targets: Vec<_> = modules(&decoder).into_iter().filter(|(name, ..)| chosen(name)).collect();
    assert!(!targets.is_empty());
    let matrices = factors(&targets, rank, 5);
    let temporary = tempfile::TempDir::new().unwrap();
    write(temporary.path(), &config.to_string(), &matrices);
    let tokens: Vec<u32> = (3..40).collect();
    let adapted = last_logits(&folder(case), Some(&[temporary.path().to_path_buf()]), &tokens);
    let merged = merge(case, &matrices, scale, case == "gpt2");
    let want = last_logits(&merged.path(""), None, &tokens);
    let plain = last_logits(&folder(case), None, &tokens);
    let (error, change) = (distance(&adapted, &want), distance(&plain, &want));
    println!("{case}: error {error}, change {change}");
    assert!(error < 2e-3 && change > 0.05, "{case}: error {error}, change {change}");
}

#[test]
fn an_adapter_of_all_modules_equals_merged_weights_however_they_are_stored() {
    // Separate, packed by rows, transposed, packed by groups of heads; biases.
    for case in ["llama", "phi3-longrope", "gpt2", "gpt-neox", "qwen2"] {
        let decoder = ModelConfig::load(&ModelFiles::open(&folder(case)).unwrap()).unwrap().decoder;
        let config = json!({"peft_type": "LORA", "r": 7, "lora_alpha": 3, "target_modules": kinds(&modules(&decoder)),
                            "fan_in_fan_out": case == "gpt2"});
        check(case, config, &|_| true, &|_| 7, &|_| 3.0 / 7.0);
    }
}

#[test]
fn patterns_choose_modules_ranks_and_scales_as_peft_does() {
    let ends = |name: &str, end: &str| name.ends_with(end);
    // A list, some layers, a rank of one module's own, a scale of another's, rank-stabilised.
    let config = json!({
        "peft_type": "LORA", "r": 4, "lora_alpha": 6.5, "use_rslora": true, "target_modules": ["q_proj", "down_proj", "v_proj"],
        "exclude_modules": ["layers.1.self_attn.v_proj"], "layers_to_transform": [1, 2], "layers_pattern": "layers",
        "rank_pattern": {"layers.1.mlp.down_proj": 9, ".*down_proj": 2}, "alpha_pattern": {"^model.layers.[12].self_attn.q_proj": 4},
    });
    let chosen = |name: &str| {
        ["q_proj", "v_proj", "down_proj"].iter().any(|end| ends(name, end))
            && !name.contains("layers.0.")
            && !ends(name, "1.self_attn.v_proj")
    };
    let rank = |name: &str| match name {
        _ if ends(name, "1.mlp.down_proj") => 9,
        _ if ends(name, "down_proj") => 2,
        _ => 4,
    };
    let scale = |name: &str| (if ends(name, "q_proj") { 4.0 } else { 6.5 }) / (rank(name) as f32).sqrt();
    check("llama", config, &chosen, &rank, &scale);
    // One expression for whole names.
    let config = json!({"peft_type": "LORA", "r": 64, "lora_alpha": 16,
                        "target_modules": r"model\.layers\.\d+\.(?:self_attn\.o_proj|mlp\.(gate|up)_proj)"});
    let chosen = |name: &str| ["o_proj", "gate_proj", "up_proj"].iter().any(|end| ends(name, end));
    check("llama", config, &chosen, &|_| 64, &|_| 0.25);
}
