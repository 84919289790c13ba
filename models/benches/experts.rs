//! Time of a mixture of experts on a CPU by the number of experts that its rows touch. A step reads the weights of each touched
//! expert once, so with equal rows its time grows with that number, not with the number of experts.
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use attention_kernels::{KernelChoice, select};
use criterion::{Criterion, criterion_group, criterion_main};
use half::bf16;
use linear::Quantization;
use models::decoder::Form;
use models::{ForwardBatch, Model, ModelConfig, ModelFiles, Weights};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

const EXPERTS: usize = 64;
const TOP_K: usize = 2;
const HIDDEN: usize = 512;
const INNER: usize = 512;
const ROWS: usize = 64;

/// Writes a model of one layer, whose attention adds nothing and whose token t goes to the experts t and t + 1.
fn checkpoint(folder: &std::path::Path) {
    let config = serde_json::json!({
        "architectures": ["MixtralForCausalLM"], "vocab_size": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 1, "max_position_embeddings": 4096,
        "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "tie_word_embeddings": true,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut state = 1u32;
    let mut random = || {
        state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    let mut tensors: BTreeMap<String, (Vec<usize>, Vec<u8>)> = BTreeMap::new();
    let mut add = |name: &str, shape: &[usize], number: &mut dyn FnMut(usize) -> f32| {
        let numbers = (0..shape.iter().product()).map(|i| bf16::from_f32(number(i)));
        tensors.insert(name.to_string(), (shape.to_vec(), numbers.flat_map(bf16::to_le_bytes).collect()));
    };
    // Element e of a row is 1 for token e; the router scores expert e by it and by the element before.
    let unit = |i: usize| if i / HIDDEN == i % HIDDEN { 1.0 } else { 0.0 };
    let next = |i: usize| if i / HIDDEN == (i % HIDDEN + 1) % EXPERTS && i % HIDDEN < EXPERTS { 0.5 } else { 0.0 };
    add("model.embed_tokens.weight", &[EXPERTS, HIDDEN], &mut { unit });
    for norm in ["norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"] {
        add(&format!("model.{norm}.weight"), &[HIDDEN], &mut |_| 1.0);
    }
    for (name, rows) in [("q", HIDDEN), ("k", HIDDEN / 8), ("v", HIDDEN / 8), ("o", HIDDEN)] {
        add(&format!("model.layers.0.self_attn.{name}_proj.weight"), &[rows, HIDDEN], &mut |_| 0.0);
    }
    let moe = "model.layers.0.block_sparse_moe";
    add(&format!("{moe}.gate.weight"), &[EXPERTS, HIDDEN], &mut |i| unit(i) + next(i));
    for expert in 0..EXPERTS {
        for (name, shape) in [("w1", [INNER, HIDDEN]), ("w2", [HIDDEN, INNER]), ("w3", [INNER, HIDDEN])] {
            add(&format!("{moe}.experts.{expert}.{name}.weight"), &shape, &mut |_| random() * 0.05);
        }
    }
    let views = tensors.iter();
    let views = views.map(|(name, (shape, data))| (name, TensorView::new(Dtype::BF16, shape.clone(), data).unwrap()));
    std::fs::write(folder.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
}

fn touched_experts(c: &mut Criterion) {
    let folder = tempfile::tempdir().unwrap();
    checkpoint(folder.path());
    let files = ModelFiles::open(folder.path()).unwrap();
    let weights = Weights::open(&files).unwrap();
    let device = device::open("cpu", None).unwrap();
    for form in [Form::Dense, Form::Quantized(Quantization::Q8)] {
        let decoder = ModelConfig::load(&files).unwrap().decoder.in_form(form);
        let kernels = select(&KernelChoice::default(), &Model::needs(&decoder, &*device)).unwrap();
        let mut model = Model::load(&decoder, &weights, device.clone(), kernels, ROWS, &|_, _| Ok(())).unwrap();
        let mut caches = model.new_cache(ROWS / 16, 16).unwrap();
        let (slots, table): (Vec<i64>, Vec<i32>) = ((0..ROWS as i64).collect(), (0..ROWS as i32 / 16).collect());
        let mut group = c.benchmark_group(format!("{ROWS} rows, {EXPERTS} experts, {form}"));
        group.sample_size(20).measurement_time(Duration::from_secs(3));
        for touched in [2, 4, 8, 16, 32, 64] {
            let tokens: Vec<u32> = (0..ROWS).map(|row| (row * TOP_K % touched) as u32).collect();
            let mut batch = ForwardBatch::default();
            batch.clear(1);
            batch.push(0, &tokens, [(&slots[..], &table[..])]);
            let mut best = Duration::MAX;
            group.bench_function(format!("{touched} touched"), |b| {
                b.iter(|| {
                    let start = Instant::now();
                    model.forward(&batch, &mut caches).unwrap();
                    best = best.min(start.elapsed());
                });
            });
            if best < Duration::MAX {
                let numbers = touched * 3 * HIDDEN * INNER;
                let bytes = numbers as f64 * if form == Form::Dense { 2.0 } else { 1.0625 };
                let rate = bytes / best.as_secs_f64() / 1e9;
                println!("{touched} experts touched: {best:?}, {:.1} MB of their weights, {rate:.1} GB/s", bytes / 1e6);
            }
        }
    }
}

criterion_group!(benches, touched_experts);
criterion_main!(benches);
