//! What the host does for a step on a device that launches kernels: the products that it plans, and its uploads.

use std::sync::{Arc, Mutex};

use device::{Device, DeviceError, Factor, FactorType, Launch, Options, Product, ProductShape};
use linear::Quantization;

use crate::common::{Opened, files, last_logits, needs};
use crate::support::hooked::{Hooked, Hooks, Transfer};
use crate::support::opened;
use attention_kernels::{Dtype, KernelChoice, KvCache, Needs, select};
use models::decoder::Form;
use models::{ForwardBatch, Model, ModelConfig, ModelFiles, StepLimits, Weights, in_stored_forms};

use crate::forward_codes::quantised_copy;

const LIMITS: StepLimits = StepLimits { max_rows: 64, max_seqs: 4, max_model_len: 256, block_size: 16, num_blocks: 64 };

/// What a device was asked for.
#[derive(Default)]
struct Calls {
    planned: Vec<(ProductShape, usize)>,
    products: Vec<(ProductShape, usize)>,
    /// Sizes of uploads.
    uploads: Vec<usize>,
    /// Names of kernels without their type, and `product`.
    launches: Vec<String>,
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Calls>>);

impl Hooks for Log {
    fn before_plan(&self, shape: &ProductShape, max_rows: usize) {
        self.0.lock().unwrap().planned.push((*shape, max_rows));
    }
    fn product(&self, device: &dyn Device, product: Product<'_>) -> Result<(), DeviceError> {
        let Product { weights: Factor { format, n, k, .. }, rows, y_format, columns, slices, .. } = product;
        let stride = columns.map_or(n, |columns| columns.stride);
        let shape = ProductShape {
            n,
            k,
            format,
            y_format,
            bias: product.bias.is_some(),
            stride,
            slices: slices.map_or(1, |slices| slices.count),
        };
        let mut calls = self.0.lock().unwrap();
        calls.products.push((shape, rows));
        calls.launches.push("product".to_owned());
        drop(calls);
        device.product(product)
    }
    fn launch(&self, device: &dyn Device, launch: &Launch<'_>) -> Result<(), DeviceError> {
        let name = launch.kernel.split("_f16").next().unwrap_or_default();
        self.0.lock().unwrap().launches.push(name.to_owned());
        device.launch(launch)
    }
    fn before_transfer(&self, _: &dyn Device, transfer: &Transfer) -> Result<(), DeviceError> {
        if transfer.upload {
            self.0.lock().unwrap().uploads.push(transfer.bytes);
        }
        Ok(())
    }
}

fn load(files: &ModelFiles, form: Form, dtype: Dtype, max_rows: usize) -> Option<(Model, Vec<KvCache>, Log)> {
    load_with(KernelChoice::default(), files, form, dtype, max_rows)
}

fn load_with(
    choice: KernelChoice,
    files: &ModelFiles,
    form: Form,
    dtype: Dtype,
    max_rows: usize,
) -> Option<(Model, Vec<KvCache>, Log)> {
    let log = Log::default();
    let device = Hooked { device: opened::open(Options::default())?, hooks: log.clone() };
    let device: Arc<dyn Device> = Arc::new(device);
    let weights = Weights::open(files).unwrap();
    let decoder = in_stored_forms(ModelConfig::load(files).unwrap().decoder, &weights).unwrap();
    let decoder = if form == Form::Dense { decoder } else { decoder.in_form(form) };
    let needs = Needs { dtype, ..needs(&*device, &decoder) };
    let set = select(&choice, &needs).unwrap();
    let mut model = Model::load(&decoder, &weights, device, set, max_rows, &|_, _| Ok(())).unwrap();
    model.use_graphs(LIMITS.max_seqs, 0);
    model.reserve(&StepLimits { max_rows, ..LIMITS }).unwrap();
    let caches = model.new_cache(LIMITS.num_blocks, LIMITS.block_size).unwrap();
    Some((model, caches, log))
}

#[test]
fn every_product_of_a_step_was_planned_for_its_number_of_rows() {
    let numbers = |dtype| (Form::Dense, dtype, FactorType::Numbers(dtype), 64);
    let to_int8 = |x: f32| x.round_ties_even() as i8 as u8;
    let int8 = quantised_copy("llama", "int", 127.0, to_int8);
    // Weights that are unpacked for 270 rows.
    let unpacked = (Form::Quantized(Quantization::Q4), Dtype::F16, FactorType::Numbers(Dtype::F16), 270);
    for (name, files, (form, dtype, factors, max_rows)) in [
        ("qwen2", files("qwen2"), numbers(Dtype::F32)),
        ("qwen3-moe", files("qwen3-moe"), numbers(Dtype::F16)),
        ("deepseek-v2-lite", files("deepseek-v2-lite"), numbers(Dtype::Bf16)),
        ("llama in q4", files("llama"), unpacked),
        ("llama in int8", int8.files(), (Form::Dense, Dtype::Bf16, FactorType::Int8, 64)),
    ] {
        let Some((mut model, mut caches, log)) = load(&files, form, dtype, max_rows) else { return };
        model.warm_up(&mut caches).unwrap();
        let planned = std::mem::take(&mut log.0.lock().unwrap().planned);
        last_logits(&mut model, &mut caches, (LIMITS.block_size, LIMITS.num_blocks), &[5; 60], 33);
        last_logits(&mut model, &mut caches, (LIMITS.block_size, LIMITS.num_blocks), &[6], 1);
        let calls = log.0.lock().unwrap();
        assert!(calls.planned.is_empty(), "{name}: planned in a step");
        for (kind, rows) in &calls.products {
            let found = planned.iter().any(|(of, max_rows)| of == kind && max_rows >= rows);
            assert!(found, "{name}: {kind:?} with {rows} rows");
        }
        let of_factors = || calls.products.iter().filter(|(shape, _)| shape.format == factors);
        let rows = |wanted| of_factors().any(|(_, rows)| *rows == wanted);
        // Fewer rows are multiplied with codes.
        assert!(rows(max_rows) && (max_rows > 256 || rows(1) && rows(33)), "{name}: nothing to show");
    }
}

#[test]
fn a_decode_step_uploads_once_whatever_changes_and_however_many_groups_it_has() {
    // One group of layers, and several with windows.
    for case in ["llama", "gemma3-text"] {
        let Some((mut model, mut caches, log)) = load(&files(case), Form::Dense, Dtype::F32, 64) else { return };
        let (groups, size) = (model.layout().groups.len(), LIMITS.block_size);
        let mut batch = ForwardBatch::default();
        // The first steps also capture a graph. A new sequence, and the first token of a block.
        for (step, seqs) in [3, 3, 3, 4, 2].into_iter().enumerate() {
            batch.clear(groups);
            for seq in 0..seqs {
                let start = size - 3 + step;
                let table = |group: usize| [seq, 4 + seq].map(|block| (block * groups + group) as i32);
                let tables: Vec<[i32; 2]> = (0..groups).map(table).collect();
                let slot = |table: &[i32; 2]| i64::from(table[start / size]) * size as i64 + (start % size) as i64;
                let slots: Vec<[i64; 1]> = tables.iter().map(|table| [slot(table)]).collect();
                batch.push(start, &[7 + step as u32], slots.iter().zip(&tables).map(|(s, t)| (&s[..], &t[..])));
            }
            log.0.lock().unwrap().uploads.clear();
            model.forward(&batch, &mut caches).unwrap();
            let uploads = std::mem::take(&mut log.0.lock().unwrap().uploads);
            assert_eq!(uploads.len(), 1, "{case}: step {step}");
            // Tables of four sequences are sent at their first step.
            assert!(step == 0 || uploads[0] <= 200 * groups + 400, "{case}: step {step} uploads {uploads:?} bytes");
        }
        model.copy_blocks(&[(0, 9), (1, 10)], &mut caches).unwrap();
        assert_eq!(log.0.lock().unwrap().uploads.len(), 1, "{case}: copies of blocks");
    }
}

#[test]
fn experts_of_many_rows_are_grouped_if_the_variant_is_chosen() {
    let choice = KernelChoice { linear: "cuda.grouped_experts".into(), ..KernelChoice::default() };
    let case = files("qwen3-moe");
    let Some((mut model, mut caches, log)) = load_with(choice, &case, Form::Dense, Dtype::F16, 64) else { return };
    log.0.lock().unwrap().launches.clear();
    // 33 rows, then one, for 8 experts of which each row has 3; 64 inputs are a whole tile, 32 are not.
    for (tokens, gate_up) in [(33, vec!["order_rows", "experts_sm90_numbers"]), (1, vec!["linear_numbers"])] {
        last_logits(&mut model, &mut caches, (LIMITS.block_size, LIMITS.num_blocks), &vec![5; tokens], 33);
        let launches = std::mem::take(&mut log.0.lock().unwrap().launches);
        let products = launches.iter().filter(|name| name.contains("numbers") || *name == "order_rows");
        let found: Vec<&str> = products.map(String::as_str).collect();
        let layer = [gate_up, vec!["linear_numbers"]].concat();
        assert_eq!(found, layer.repeat(found.len() / layer.len()), "{tokens} rows");
        assert!(!found.is_empty());
    }
}
