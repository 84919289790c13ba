//! Conversion of a checkpoint to one with quantised weights, in the layout of compressed-tensors that other engines read too
//! (`pack-quantized`): integers with a scale for each group of inputs.
//!
//! Linear layers of the decoder's layers are quantised. Embeddings, heads, routers, stacked experts and transposed matrices stay as
//! they are, as do layers whose rows are no multiple of the group; the configuration lists them as ignored.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::fs;
use std::path::Path;

use engine::{Dtype, EngineConfig, EngineError, Opened, Progress, open};
use linear::gptq::{IntegerForm, Inverse};
use linear::{Gemm, PackedMatrix, Rows, gemm};
use models::decoder::{Form, Linear, Role};
use models::{Model, ModelFiles, WeightView, Weights};
use safetensors::tensor::TensorView;
use serde_json::{Map, Value, json};
use simd::{Isa, Pool};

use super::Method;
use super::calibrate::{Hessians, LENGTH, MAX_TEXTS, calibrate};

/// Memory for the matrices of GPTQ that are summed in one pass over the calibration text, in bytes.
const HESSIAN_BYTES: usize = 2 << 30;

/// The text that layers are calibrated with unless another one is given.
const TEXT: &str = concat!(include_str!("../../../docs/guide.md"), include_str!("../../../docs/internals.md"));

/// Options of [`convert`].
#[derive(Clone, Debug)]
pub(super) struct ConvertOptions {
    /// How weights are quantised.
    pub method: Method,
    /// Inputs that share a scale.
    pub group_size: usize,
    /// Text for [`Method::Gptq4`]; `None`: pages of Quire's documentation.
    pub calibration: Option<String>,
}

/// What became of a module.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Converted {
    /// Its name.
    pub module: String,
    /// Number of rows.
    pub outputs: usize,
    /// Weights of a row.
    pub inputs: usize,
    /// Root of the squared error of the weights over their squares; `None` if the module stays as it is.
    pub weight_error: Option<f64>,
    /// The same of the outputs for the calibration text, if there is one.
    pub output_error: Option<f64>,
}

/// Writes the checkpoint of `config` to the new folder `to`, with quantised weights. Returns what became of each linear layer.
///
/// # Errors
/// The checkpoint cannot be read, is quantised already or is no folder; the folder `to` exists or cannot be written.
pub(super) fn convert(
    config: &EngineConfig,
    to: &Path,
    options: &ConvertOptions,
    progress: Progress<'_>,
) -> Result<Vec<Converted>, EngineError> {
    let opened = open(config)?;
    let ModelFiles::Folder(from) = &opened.files else {
        return Err(bad("SRC", opened.files.name(), "a folder in Hugging Face layout"));
    };
    if opened.config.decoder.all_linears().any(|linear| matches!(linear.form, Form::Stored { .. })) {
        return Err(bad("SRC", from.display(), "a checkpoint that is not quantised already"));
    }
    if to.exists() {
        return Err(bad("DST", to.display(), "a folder that does not exist yet"));
    }
    models::check_weights(&opened.config.decoder, &opened.weights)?;
    let plan = plan(&opened, options);
    let mut hessians = Hessians::new();
    let mut model = None;
    if options.method == Method::Gptq4 {
        let texts = options.calibration.as_deref().unwrap_or(TEXT);
        model = Some(Calibration::new(&opened, texts)?);
    }
    let mut written = Output::default();
    let (total, mut done) = (opened.weights.total_bytes(), 0);
    let mut report = Vec::new();
    for step in &plan.steps {
        let weight = expect(&opened.weights, &step.tensor)?;
        if let (Some(calibration), Some(layer)) = (&mut model, step.layer)
            && !hessians.contains_key(&layer)
        {
            hessians = calibration.next(&opened, &plan, layer)?;
        }
        let hessian = step.layer.and_then(|layer| hessians.get(&layer));
        report.push(quantise(opened.device.pool(), step, &weight, options, hessian, &mut written));
        done += weight.data.len() as u64;
        progress(done, total);
    }
    let quantised: BTreeSet<&str> = plan.steps.iter().map(|step| step.tensor.as_str()).collect();
    for name in opened.weights.names().filter(|name| !quantised.contains(name)) {
        if let Some(weight) = opened.weights.get(name) {
            let dtype = stored(weight.dtype);
            written.tensors.insert(name.to_string(), (dtype, weight.shape.clone(), Cow::Borrowed(weight.data)));
        }
    }
    report.extend(plan.kept.iter().cloned());
    written.save(from, to, &plan, options)?;
    progress(total, total);
    Ok(report)
}

/// What is quantised and what is not.
struct Plan {
    steps: Vec<Step>,
    kept: Vec<Converted>,
    /// Modules that readers of the result must not expect to be quantised.
    ignored: Vec<String>,
}

/// A tensor to quantise.
struct Step {
    tensor: String,
    /// The layer whose inputs are its inputs, and their number.
    layer: Option<usize>,
    form: IntegerForm,
}

fn plan(opened: &Opened, options: &ConvertOptions) -> Plan {
    let decoder = &opened.config.decoder;
    let mut plan = Plan { steps: Vec::new(), kept: Vec::new(), ignored: Vec::new() };
    let in_layers: Vec<&Linear> = decoder.branches().flat_map(|branch| branch.mixer.linears()).collect();
    let of_experts = decoder.experts().flat_map(|experts| &experts.experts).flat_map(|mlp| [&mlp.gate_up, &mlp.down]);
    let indexed = decoder.linears().enumerate().map(|(index, linear)| (Some(index), linear));
    let bits = if options.method == Method::Q8 { 8 } else { 4 };
    let mut seen = BTreeSet::new();
    for (layer, linear) in indexed.chain(of_experts.map(|linear| (None, linear))) {
        let is_table = layer.is_some() && !in_layers.iter().any(|inner| std::ptr::eq(*inner, linear));
        for part in linear.parts.iter().map(|part| opened.weights.stored_part(part)) {
            let Some(weight) = opened.weights.get(&part.weight()) else { continue };
            let module = weight.name.trim_end_matches(".weight").to_string();
            if !seen.insert(module.clone()) {
                continue;
            }
            let plain = !part.bare && !part.pick.transposed && part.pick.inputs.is_none() && part.pick.matrix.is_none();
            let fits = linear.inputs.is_multiple_of(options.group_size);
            if is_table || linear.role == Role::Replicated || !plain || !fits {
                let (outputs, inputs) = (part.pick.total, linear.inputs);
                plan.ignored.push(module.clone());
                plan.kept.push(Converted { module, outputs, inputs, weight_error: None, output_error: None });
                continue;
            }
            let form = IntegerForm { bits, group: options.group_size, scale: weight.dtype };
            plan.steps.push(Step { tensor: weight.name, layer, form });
        }
    }
    plan
}

/// The type of a tensor in the file.
fn stored(dtype: Dtype) -> safetensors::Dtype {
    match dtype {
        Dtype::F32 => safetensors::Dtype::F32,
        Dtype::F16 => safetensors::Dtype::F16,
        Dtype::Bf16 => safetensors::Dtype::BF16,
    }
}

/// The error for an argument that cannot be used.
fn bad(flag: &'static str, found: impl Display, expected: impl Into<String>) -> EngineError {
    EngineError::Config { flag, found: found.to_string(), expected: expected.into() }
}

fn expect<'a>(weights: &'a Weights, name: &str) -> Result<WeightView<'a>, EngineError> {
    weights.get(name).ok_or_else(|| bad("SRC", name, "a tensor of floats"))
}

/// Rounds the weights of a tensor and writes them as codes.
fn quantise(
    pool: &Pool,
    step: &Step,
    weight: &WeightView<'_>,
    options: &ConvertOptions,
    hessian: Option<&Vec<f32>>,
    out: &mut Output<'_>,
) -> Converted {
    let (n, k) = (weight.shape[0], weight.shape[1]);
    let (form, groups) = (step.form, k / step.form.group);
    let original = weight.to_f32();
    let (mut rounded, mut scales) = (original.clone(), vec![0.0; n * groups]);
    let inverse = hessian.filter(|_| options.method == Method::Gptq4).and_then(|h| Inverse::new(h, k));
    match inverse {
        Some(inverse) => inverse.round(pool, form, &mut rounded, &mut scales),
        None => pool.zip_chunks_mut((&mut rounded, k), (&mut scales, groups), 64 * k, |_, row, scales| {
            form.nearest(row, scales)
        }),
    }
    let per = 32 / form.bits as usize;
    let mut words = vec![0u32; n * k / per];
    pool.chunks_mut(&mut words, k / per, 8 * k, |row, words| {
        for (i, word) in words.iter_mut().enumerate() {
            for j in 0..per {
                let column = i * per + j;
                let scale = scales[row * groups + column / form.group];
                *word |= form.code(rounded[row * k + column], scale) << (j as u32 * form.bits);
            }
        }
    });
    let module = weight.name.trim_end_matches(".weight").to_string();
    let mut tensor = |suffix: &str, dtype, shape: Vec<usize>, data: Vec<u8>| {
        out.tensors.insert(format!("{module}.{suffix}"), (dtype, shape, Cow::Owned(data)));
    };
    let packed = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    tensor("weight_packed", safetensors::Dtype::I32, vec![n, k / per], packed);
    tensor(
        "weight_scale",
        stored(form.scale),
        vec![n, groups],
        scales.iter().flat_map(|scale| form.bytes(*scale)).collect(),
    );
    let shape = [n as i64, k as i64].iter().flat_map(|size| size.to_le_bytes()).collect();
    tensor("weight_shape", safetensors::Dtype::I64, vec![2], shape);
    let mut difference = rounded;
    difference.iter_mut().zip(&original).for_each(|(d, w)| *d -= w);
    let squares = |numbers: &[f32]| numbers.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
    let ratio = |error: f64, whole: f64| if whole > 0.0 { (error / whole).max(0.0).sqrt() } else { 0.0 };
    let outputs = hessian.map(|h| ratio(weighted(pool, &difference, h, k), weighted(pool, &original, h, k)));
    let weight_error = Some(ratio(squares(&difference), squares(&original)));
    Converted { module, outputs: n, inputs: k, weight_error, output_error: outputs }
}

/// The trace of W·H·Wᵀ: the squares of the outputs.
fn weighted(pool: &Pool, rows: &[f32], h: &[f32], k: usize) -> f64 {
    let bytes: Vec<u8> = h.iter().flat_map(|x| x.to_le_bytes()).collect();
    let Ok(weights) = PackedMatrix::pack(pool, k, &[(Dtype::F32, &bytes)]) else { return 0.0 };
    let mut products = vec![0.0; rows.len()];
    gemm(Isa::best(), pool, Gemm { x: Rows::Numbers(rows), weights: &weights, bias: None, y: &mut products });
    rows.iter().zip(products).map(|(a, b)| f64::from(*a) * f64::from(b)).sum()
}

/// A model that reads the calibration text.
struct Calibration {
    model: Model,
    tokens: Vec<u32>,
}

impl Calibration {
    fn new(opened: &Opened, text: &str) -> Result<Calibration, EngineError> {
        let tokenizer = opened.tokenizer()?;
        let mut tokens = Vec::new();
        // By paragraphs, so that no part of a text costs more than its length.
        for part in text.split_inclusive("\n\n") {
            if tokens.len() < LENGTH * MAX_TEXTS {
                tokens.extend(
                    tokenizer.encode(part, false).map_err(|error| bad("--calibration", "a text", error.to_string()))?,
                );
            }
        }
        tokens.truncate(LENGTH * MAX_TEXTS);
        if tokens.len() < LENGTH / 8 {
            let expected = format!("at least {} tokens of text", LENGTH / 8);
            return Err(bad("--calibration", format!("{} tokens", tokens.len()), expected));
        }
        let Opened { config, weights, device, kernels, .. } = opened;
        let model = Model::load(&config.decoder, weights, device.clone(), *kernels, LENGTH, &|_, _| Ok(()))?;
        Ok(Calibration { model, tokens })
    }

    /// H of `layer` and of those behind it that fit the memory.
    fn next(&mut self, opened: &Opened, plan: &Plan, layer: usize) -> Result<Hessians, EngineError> {
        let linears: Vec<&Linear> = opened.config.decoder.linears().collect();
        let wanted: BTreeSet<usize> =
            plan.steps.iter().filter_map(|step| step.layer).filter(|at| *at >= layer).collect();
        let mut left = HESSIAN_BYTES;
        let mut layers = Vec::new();
        for at in wanted {
            let k = linears[at].inputs;
            match left.checked_sub(k * k * size_of::<f32>()) {
                None if !layers.is_empty() => break,
                rest => left = rest.unwrap_or(0),
            }
            layers.push((at, k));
        }
        let longest = opened.config.max_position_embeddings.clamp(1, LENGTH);
        let texts: Vec<&[u32]> = self.tokens.chunks(longest).filter(|text| text.len() > 1).collect();
        calibrate(&mut self.model, opened.device.pool(), &texts, &layers)
    }
}

/// The new checkpoint.
#[derive(Default)]
struct Output<'a> {
    tensors: BTreeMap<String, Tensor<'a>>,
}

/// Type, shape and bytes.
type Tensor<'a> = (safetensors::Dtype, Vec<usize>, Cow<'a, [u8]>);

impl Output<'_> {
    /// Writes the folder: weights, configuration, and the other small files of the old folder.
    fn save(&self, from: &Path, to: &Path, plan: &Plan, options: &ConvertOptions) -> Result<(), EngineError> {
        let failed = |what: &Path| {
            let what = what.display().to_string();
            move |error: std::io::Error| bad("DST", format!("{what} ({error})"), "a folder that can be written")
        };
        fs::create_dir_all(to).map_err(failed(to))?;
        let is_small = |name: &str| {
            let kept = [".json", ".jinja", ".txt", ".model", ".md"].iter().any(|end| name.ends_with(end));
            kept && !name.ends_with(".index.json") && name != "config.json"
        };
        for entry in fs::read_dir(from).map_err(failed(from))? {
            let path = entry.map_err(failed(from))?.path();
            if let Some(name) = path.file_name().map(|name| name.to_string_lossy().into_owned())
                && is_small(&name)
            {
                fs::copy(&path, to.join(&name)).map_err(failed(&path))?;
            }
        }
        let mut config: Map<String, Value> = ModelFiles::open(from)?.read_json("config.json")?;
        config.insert("quantization_config".into(), scheme(plan, options));
        let text = serde_json::to_string_pretty(&config).unwrap_or_default();
        fs::write(to.join("config.json"), text).map_err(failed(&to.join("config.json")))?;
        let mut views = Vec::new();
        for (name, (dtype, shape, data)) in &self.tensors {
            let view = TensorView::new(*dtype, shape.clone(), data)
                .map_err(|error| bad("SRC", format!("{name} ({error})"), "a whole tensor"))?;
            views.push((name, view));
        }
        let metadata = [("format".to_string(), "pt".to_string())].into();
        let file = to.join("model.safetensors");
        safetensors::serialize_to_file(views, Some(metadata), &file)
            .map_err(|error| bad("DST", format!("{} ({error})", file.display()), "a folder that can be written"))
    }
}

/// `quantization_config` of compressed-tensors.
fn scheme(plan: &Plan, options: &ConvertOptions) -> Value {
    let weights = json!({
        "num_bits": if options.method == Method::Q8 { 8 } else { 4 },
        "type": "int",
        "symmetric": true,
        "strategy": "group",
        "group_size": options.group_size,
        "actorder": null,
        "block_structure": null,
        "dynamic": false,
        "observer": "minmax",
        "observer_kwargs": {},
    });
    let group =
        json!({"targets": ["Linear"], "weights": weights, "input_activations": null, "output_activations": null});
    json!({
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": null,
        "kv_cache_scheme": null,
        "ignore": plan.ignored,
        "config_groups": {"group_0": group},
    })
}
