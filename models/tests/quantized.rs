//! Modules in every quantised format of safetensors files: the value of every weight on the CPU and on the simulator, and what is
//! refused.

use std::collections::HashMap;

use attention_kernels::{LinearArgs, LinearScratch, Operation, Rewritten, Rows, ScratchSizes, variants};
use device::{Device, Options};
use linear::{Gemm, Matrix, gemm};
use models::decoder::{Linear, Part, Pick, Role};
use models::{ModelFiles, Weights, load_matrix};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use simd::Isa;
use tempfile::TempDir;
use trial::numbers::{e4m3_sum_error, from_bytes, round, span, to_bytes};
use trial::{buffer, bytes};

use crate::support::opened;

mod fuzzed;

/// Tensors of one module `m` and its configuration.
#[derive(Clone)]
struct Module {
    config: Value,
    tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)>,
    /// The weights `[n, k]` that the format defines.
    values: Vec<f32>,
    n: usize,
    k: usize,
}

/// A source of pseudorandom numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as u32 % end
    }

    /// A half-precision scale, its bits and its value.
    fn half(&mut self) -> (u16, f32) {
        let scale = half::f16::from_f32((self.below(1000) + 1) as f32 / 1e5);
        (scale.to_bits(), scale.to_f32())
    }
}

fn halves(bits: &[u16]) -> Vec<u8> {
    bits.iter().flat_map(|bits| bits.to_le_bytes()).collect()
}

/// Words of codes: `count` words, the code of field j of word w is `code(w, j)`.
fn words(count: usize, bits: u32, code: impl Fn(usize, usize) -> u32) -> Vec<u8> {
    let word = |w| (0..32 / bits as usize).fold(0u32, |word, j| word | code(w, j) << (j as u32 * bits));
    (0..count).flat_map(|w| word(w).to_le_bytes()).collect()
}

impl Module {
    fn new(config: Value, n: usize, k: usize) -> Module {
        Module { config: json!({ "quantization_config": config }), tensors: Vec::new(), values: Vec::new(), n, k }
    }

    fn tensor(mut self, suffix: &str, dtype: Dtype, shape: &[usize], data: Vec<u8>) -> Module {
        self.tensors.push((format!("m{suffix}"), dtype, shape.to_vec(), data));
        self
    }

    /// Sets the weights, given those of an output and an input.
    fn values(mut self, value: impl Fn(usize, usize) -> f32) -> Module {
        self.values = (0..self.n).flat_map(|o| (0..self.k).map(|i| value(o, i)).collect::<Vec<_>>()).collect();
        self
    }

    fn open(&self) -> (TempDir, Result<Weights, String>) {
        let folder = TempDir::new().unwrap();
        std::fs::write(folder.path().join("config.json"), self.config.to_string()).unwrap();
        let views: HashMap<_, _> = self
            .tensors
            .iter()
            .map(|(name, dtype, shape, data)| (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap()))
            .collect();
        let file = safetensors::serialize(views, None).unwrap();
        std::fs::write(folder.path().join("model.safetensors"), file).unwrap();
        let weights = Weights::open(&ModelFiles::open(folder.path()).unwrap()).map_err(|error| error.to_string());
        (folder, weights)
    }

    /// Checks the weights of a part on both kinds of device; row r of the part is row `row(r)` of the module.
    fn check(&self, name: &str, part: Part, row: impl Fn(usize) -> usize) {
        let (_folder, weights) = self.open();
        let weights = weights.unwrap_or_else(|error| panic!("{name}: {error}"));
        let (k, rows) = (self.k, part.rows);
        let linear = Linear::new(k, Role::Column, [part]);
        let want: Vec<f32> = (0..rows).flat_map(|r| self.values[row(r) * k..][..k].to_vec()).collect();
        let host = device::open("cpu", Some(1)).unwrap();
        let matrix = load_matrix(&linear, &weights, &*host, device::Dtype::F32)
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut found = vec![f32::NAN; want.len()];
        found.chunks_mut(k).enumerate().for_each(|(r, out)| matrix.host().unwrap().copy_row(r, out));
        assert!(found == want, "{name}: {:?}", found.iter().zip(&want).position(|(a, b)| a != b));
        // Load a slice of the inputs, at boundaries where the form can be cut and where it cannot.
        for inputs in [0..32, 32..k, 64..k.max(96), 8..40].into_iter().filter(|inputs| inputs.end <= k) {
            let mut piece = Linear { inputs: inputs.len(), ..linear.clone() };
            piece.parts.iter_mut().for_each(|part| part.pick.inputs = Some((inputs.start, k)));
            let matrix = load_matrix(&piece, &weights, &*host, device::Dtype::F32).unwrap();
            let mut found = vec![f32::NAN; inputs.len()];
            for (row, want) in want.chunks(k).enumerate() {
                matrix.host().unwrap().copy_row(row, &mut found);
                assert!(found == want[inputs.clone()], "{name}: row {row}, inputs {inputs:?}");
            }
        }
        let Some(launching) = opened::open(Options::default()) else { return };
        let dense = load_matrix(&linear, &weights, &*launching, device::Dtype::F32).unwrap();
        let mut bytes = vec![0; want.len() * 4];
        launching.download(dense.numbers().unwrap(), 0, &mut bytes).unwrap();
        let found: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        assert!(found == want, "{name} on {}", launching.name());
        for dtype in [device::Dtype::F16, device::Dtype::Bf16] {
            let matrix = load_matrix(&linear, &weights, &*launching, dtype).unwrap();
            let rounded = want.iter().map(|weight| round(dtype, *weight));
            let found = match matrix.numbers() {
                Some(numbers) => {
                    let mut bytes = vec![0; want.len() * 2];
                    launching.download(numbers, 0, &mut bytes).unwrap();
                    from_bytes(dtype, &bytes)
                }
                None => columns(&*launching, &matrix),
            };
            assert!(found.into_iter().eq(rounded), "{name} on {} in {dtype}", launching.name());
        }
    }

    fn check_whole(&self, name: &str) {
        self.check(name, Part::new("m", self.n), |row| row);
    }

    /// Checks that it is refused with a line that has these words.
    fn refused(&self, words: &[&str]) {
        let (_folder, weights) = self.open();
        let host = device::open("cpu", Some(1)).unwrap();
        let linear = Linear::new(self.k, Role::Column, [Part::new("m", self.n)]);
        let error = weights.and_then(|weights| {
            load_matrix(&linear, &weights, &*host, device::Dtype::F32).map(|_| ()).map_err(|error| error.to_string())
        });
        let line = error.err().unwrap_or_default();
        assert!(words.iter().all(|word| line.contains(word)) && !line.contains('\n'), "{line:?}, expected {words:?}");
    }

    fn without(mut self, suffix: &str) -> Module {
        self.tensors.retain(|(name, ..)| *name != format!("m{suffix}"));
        self
    }
}

/// The products in float32 of rows of `x` with the kernel of codes.
fn multiply(device: &dyn Device, weights: &Matrix, x: &[f32], scratch: Option<&mut LinearScratch>) -> Vec<f32> {
    let (n, dtype, rows, output) = (weights.n(), weights.dtype(), x.len() / weights.k(), device::Dtype::F32);
    let (x, mut y) = (buffer(device, &to_bytes(dtype, x)).unwrap(), device.alloc(rows * n * 4).unwrap());
    let variant = variants(Operation::Linear).into_iter().find(|variant| variant.capabilities.takes_codes).unwrap();
    let args =
        LinearArgs { x: Rows::Numbers(&x), rows, weights, bias: None, y: &mut y, output, activation: None, scratch };
    variant.linear(device, args).unwrap();
    from_bytes(output, &bytes(device, &y).unwrap())
}

/// The weights `[n, k]` of a matrix that has the form of codes: its products with the rows of a unit matrix.
fn columns(device: &dyn Device, weights: &Matrix) -> Vec<f32> {
    let (n, k) = (weights.n(), weights.k());
    let unit: Vec<f32> = (0..k * k).map(|at| if at / k == at % k { 1.0 } else { 0.0 }).collect();
    let y = multiply(device, weights, &unit, None);
    (0..n * k).map(|at| y[at % k * n + at / k]).collect()
}

/// GPTQ with the zero point `zero` for all groups, or random ones.
fn gptq(bits: u32, group: Option<usize>, version: &str, act_order: bool, zero: Option<u32>) -> Module {
    let (n, k, per) = (64, 128, 32 / bits as usize);
    let (size, mut random) = (group.unwrap_or(k), Random(bits.into()));
    let groups = k / size;
    let codes: Vec<u32> = (0..n * k).map(|_| random.below(1 << bits)).collect();
    let stored: Vec<u32> = (0..n * groups).map(|_| zero.unwrap_or_else(|| random.below(1 << bits))).collect();
    // A zero point of 256 does not exist.
    let stored: Vec<u32> = stored.into_iter().map(|zero| if zero == 255 { 254 } else { zero }).collect();
    let scales: Vec<_> = (0..n * groups).map(|_| random.half()).collect();
    let mut index: Vec<u32> = (0..k as u32).map(|i| i / size as u32).collect();
    if act_order {
        (0..k).for_each(|i| index.swap(i, random.below(k as u32) as usize));
    }
    let plus = if version == "gptq_v2" { 0 } else { 1 };
    let mut config = json!({"quant_method": "gptq", "bits": bits, "group_size": group.map_or(-1, |it| it as i64), "desc_act": act_order});
    if version != "absent" {
        config["checkpoint_format"] = version.into();
    }
    Module::new(config, n, k)
        .tensor(
            ".qweight",
            Dtype::I32,
            &[k / per, n],
            words(n * k / per, bits, |w, j| codes[w % n * k + w / n * per + j]),
        )
        .tensor(
            ".qzeros",
            Dtype::I32,
            &[groups, n / per],
            words(groups * n / per, bits, |w, j| stored[(w % (n / per) * per + j) * groups + w / (n / per)]),
        )
        .tensor(".scales", Dtype::F16, &[groups, n], {
            halves(&(0..groups * n).map(|at| scales[at % n * groups + at / n].0).collect::<Vec<_>>())
        })
        .tensor(".g_idx", Dtype::I32, &[k], index.iter().flat_map(|group| group.to_le_bytes()).collect())
        .values(|o, i| {
            let at = o * groups + index[i] as usize;
            scales[at].1 * (codes[o * k + i] as f32 - (stored[at] + plus) as f32)
        })
}

fn awq() -> Module {
    const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
    let (n, k, group) = (32, 96, 32);
    let (groups, mut random) = (k / group, Random(1));
    let codes: Vec<u32> = (0..n * k).map(|_| random.below(16)).collect();
    let zeros: Vec<u32> = (0..n * groups).map(|_| random.below(16)).collect();
    let scales: Vec<_> = (0..groups * n).map(|_| random.half()).collect();
    let config = json!({"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": true, "version": "gemm"});
    let outputs = |w: usize, j: usize| (w / (n / 8), w % (n / 8) * 8 + ORDER[j]);
    Module::new(config, n, k)
        .tensor(
            ".qweight",
            Dtype::I32,
            &[k, n / 8],
            words(k * n / 8, 4, |w, j| {
                let (i, o) = outputs(w, j);
                codes[o * k + i]
            }),
        )
        .tensor(
            ".qzeros",
            Dtype::I32,
            &[groups, n / 8],
            words(groups * n / 8, 4, |w, j| {
                let (group, o) = outputs(w, j);
                zeros[o * groups + group]
            }),
        )
        .tensor(".scales", Dtype::F16, &[groups, n], halves(&scales.iter().map(|it| it.0).collect::<Vec<_>>()))
        .values(|o, i| scales[i / group * n + o].1 * (codes[o * k + i] as f32 - zeros[o * groups + i / group] as f32))
}

fn compressed(format: &str, weights: Value, inputs: Value) -> Value {
    let group = json!({"targets": ["Linear"], "weights": weights, "input_activations": inputs});
    json!({"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}, "ignore": ["lm_head"]})
}

fn packed(bits: u32, group: Option<usize>, symmetric: bool, act_order: bool) -> Module {
    // Without groups, a row ends in the middle of a word.
    let (n, k, per) = (40, if group.is_some() { 160 } else { 157 }, 32 / bits as usize);
    let (size, mut random) = (group.unwrap_or(k), Random(7 + u64::from(bits)));
    let groups = k / size;
    let half = 1 << (bits - 1);
    let codes: Vec<u32> = (0..n * k).map(|_| random.below(1 << bits)).collect();
    let zeros: Vec<u32> = (0..n * groups).map(|_| if symmetric { half } else { random.below(1 << bits) }).collect();
    let scales: Vec<_> = (0..n * groups).map(|_| random.half()).collect();
    let mut index: Vec<u32> = (0..k as u32).map(|i| i / size as u32).collect();
    if act_order {
        (0..k).for_each(|i| index.swap(i, random.below(k as u32) as usize));
    }
    let columns = k.div_ceil(per);
    let code = |w: usize, j| match w % columns * per + j {
        i if i < k => codes[w / columns * k + i],
        _ => 0,
    };
    let strategy = if group.is_some() { "group" } else { "channel" };
    let scheme =
        json!({"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group});
    let mut module = Module::new(compressed("pack-quantized", scheme, Value::Null), n, k)
        .tensor(".weight_packed", Dtype::I32, &[n, columns], words(n * columns, bits, code))
        .tensor(
            ".weight_shape",
            Dtype::I64,
            &[2],
            [n as u64, k as u64].iter().flat_map(|it| it.to_le_bytes()).collect(),
        )
        .tensor(".weight_scale", Dtype::F16, &[n, groups], halves(&scales.iter().map(|it| it.0).collect::<Vec<_>>()));
    if !symmetric {
        let zero = |w: usize, j: usize| zeros[(w / groups * per + j) * groups + w % groups];
        module =
            module.tensor(".weight_zero_point", Dtype::I32, &[n / per, groups], words(n / per * groups, bits, zero));
    }
    if act_order {
        module =
            module.tensor(".weight_g_idx", Dtype::I32, &[k], index.iter().flat_map(|it| it.to_le_bytes()).collect());
    }
    module.values(|o, i| {
        let at = o * groups + index[i] as usize;
        scales[at].1 * (codes[o * k + i] as f32 - zeros[at] as f32)
    })
}

/// Integers of 8 bits with a scale for each of `n` outputs.
fn int8(n: usize, symmetric: bool, inputs: Value) -> Module {
    let (k, mut random) = (64, Random(3));
    let codes: Vec<i8> = (0..n * k).map(|_| random.below(256) as u8 as i8).collect();
    let zeros: Vec<i8> = (0..n).map(|_| if symmetric { 0 } else { random.below(256) as u8 as i8 }).collect();
    let scales: Vec<_> = (0..n).map(|_| random.half()).collect();
    let scheme = json!({"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel"});
    let mut module = Module::new(compressed("int-quantized", scheme, inputs), n, k)
        .tensor(".weight", Dtype::I8, &[n, k], codes.iter().map(|it| *it as u8).collect())
        .tensor(".weight_scale", Dtype::F16, &[n, 1], halves(&scales.iter().map(|it| it.0).collect::<Vec<_>>()));
    if !symmetric {
        module = module.tensor(".weight_zero_point", Dtype::I8, &[n, 1], zeros.iter().map(|it| *it as u8).collect());
    }
    module.values(|o, i| scales[o].1 * (f32::from(codes[o * k + i]) - f32::from(zeros[o])))
}

/// Random codes of finite e4m3 numbers.
fn e4m3(count: usize) -> Vec<u8> {
    let mut random = Random(4);
    (0..count).map(|_| random.below(127) as u8 | (random.below(2) as u8) << 7).collect()
}

/// FP8 with scales `[rows, columns]` under a name, which `scale` chooses for each weight.
fn fp8(config: Value, suffix: &str, shape: &[usize], scale: impl Fn(usize, usize) -> usize) -> Module {
    fp8_of(150, config, suffix, shape, scale)
}

/// The same with `n` outputs.
fn fp8_of(n: usize, config: Value, suffix: &str, shape: &[usize], scale: impl Fn(usize, usize) -> usize) -> Module {
    let (k, mut random) = (160, Random(5));
    let codes = e4m3(n * k);
    let scales: Vec<f32> = (0..shape.iter().product()).map(|_| (random.below(1000) + 1) as f32 / 512.0).collect();
    let config = Module::new(config, n, k);
    config
        .tensor(".weight", Dtype::F8_E4M3, &[n, k], codes.clone())
        .tensor(suffix, Dtype::F32, shape, scales.iter().flat_map(|it| it.to_le_bytes()).collect())
        .values(|o, i| scales[scale(o, i)] * simd::small_float::e4m3_to_f32(codes[o * k + i]))
}

/// Two experts of MXFP4.
fn mxfp4() -> Module {
    let (experts, n, k, mut random) = (2, 6, 64, Random(6));
    let codes: Vec<u8> = (0..experts * n * k / 2).map(|_| random.below(256) as u8).collect();
    let scales: Vec<u8> = (0..experts * n * k / 32).map(|_| 120 + random.below(16) as u8).collect();
    let table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    Module::new(json!({"quant_method": "mxfp4"}), experts * n, k)
        .tensor("_blocks", Dtype::U8, &[experts, n, k / 32, 16], codes.clone())
        .tensor("_scales", Dtype::U8, &[experts, n, k / 32], scales.clone())
        .values(|row, i| {
            let code = codes[row * k / 2 + i / 2] >> (i % 2 * 4) & 15;
            let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
            sign * table[usize::from(code & 7)] * 2f32.powi(i32::from(scales[row * k / 32 + i / 32]) - 127)
        })
}

/// NVFP4: a scale of 8 bits for each 16 weights, and one for all, which divides in compressed-tensors and multiplies in ModelOpt.
fn nvfp4(divides: bool, of_all: f32) -> Module {
    let (n, k, mut random) = (24, 160, Random(9));
    let codes: Vec<u8> = (0..n * k / 2).map(|_| random.below(256) as u8).collect();
    // Scales have no sign.
    let scales: Vec<u8> = (0..n * k / 16).map(|_| random.below(127) as u8).collect();
    let table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let inputs =
        json!({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"});
    let (config, names) = match divides {
        true => (
            compressed("nvfp4-pack-quantized", inputs.clone(), inputs),
            [".weight_packed", ".weight_global_scale", ".input_global_scale"],
        ),
        false => (
            json!({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": null}),
            [".weight", ".weight_scale_2", ".input_scale"],
        ),
    };
    let shape: &[usize] = if divides { &[1] } else { &[] };
    Module::new(config, n, k)
        .tensor(names[0], Dtype::U8, &[n, k / 2], codes.clone())
        .tensor(".weight_scale", Dtype::F8_E4M3, &[n, k / 16], scales.clone())
        .tensor(names[1], Dtype::F32, shape, of_all.to_le_bytes().to_vec())
        .tensor(names[2], Dtype::F32, shape, 7f32.to_le_bytes().to_vec())
        .values(|o, i| {
            let code = codes[(o * k + i) / 2] >> (i % 2 * 4) & 15;
            let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
            let scale = simd::small_float::e4m3_to_f32(scales[o * k / 16 + i / 16]);
            let scale = if divides { scale / of_all } else { scale * of_all };
            sign * table[usize::from(code & 7)] * scale
        })
}

fn nf4(nested: bool) -> Module {
    #[rustfmt::skip]
    const TABLE: [f32; 16] = [
        -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0, 0.0795803, 0.1609302,
        0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
    ];
    let (n, k, mut random) = (12, 128, Random(8));
    let codes: Vec<u8> = (0..n * k / 2).map(|_| random.below(256) as u8).collect();
    let blocks: usize = n * k / 64;
    let bytes: Vec<u8> = (0..blocks).map(|_| random.below(256) as u8).collect();
    let table: Vec<f32> = (0..256).map(|i| i as f32 / 255.0).collect();
    let outer: Vec<f32> = (0..blocks.div_ceil(16)).map(|i| 0.5 + i as f32).collect();
    let scale = |block: usize| table[usize::from(bytes[block])] * outer[block / 16] + 0.25;
    let floats = |numbers: &[f32]| numbers.iter().flat_map(|it| it.to_le_bytes()).collect::<Vec<u8>>();
    let mut state = json!({"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [n, k]});
    let config = json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4"});
    let mut module = Module::new(config, n, k).tensor(".weight", Dtype::U8, &[n * k / 2, 1], codes.clone()).tensor(
        ".weight.quant_map",
        Dtype::F32,
        &[16],
        floats(&TABLE),
    );
    if nested {
        state["nested_blocksize"] = 16.into();
        state["nested_offset"] = 0.25.into();
        module = module
            .tensor(".weight.absmax", Dtype::U8, &[blocks], bytes.clone())
            .tensor(".weight.nested_absmax", Dtype::F32, &[outer.len()], floats(&outer))
            .tensor(".weight.nested_quant_map", Dtype::F32, &[256], floats(&table));
    } else {
        module =
            module.tensor(".weight.absmax", Dtype::F32, &[blocks], floats(&(0..blocks).map(scale).collect::<Vec<_>>()));
    }
    let state = state.to_string().into_bytes();
    module.tensor(".weight.quant_state.bitsandbytes__nf4", Dtype::U8, &[state.len()], state.clone()).values(|o, i| {
        let at = o * k + i;
        TABLE[usize::from(codes[at / 2] >> (4 - at % 2 * 4) & 15)] * scale(at / 64)
    })
}

#[test]
fn every_weight_of_gptq_and_awq_has_the_value_of_its_definition() {
    for bits in [2, 4, 8] {
        for group in [Some(32), Some(64), None] {
            for (version, act_order, zero) in [
                ("absent", false, None),
                ("gptq", true, Some((1 << (bits - 1)) - 1)),
                ("gptq_v2", group.is_some(), None),
            ] {
                gptq(bits, group, version, act_order, zero).check_whole(&format!("gptq {bits} {group:?} {version}"));
            }
        }
    }
    gptq(4, Some(32), "gptq", false, None).without(".g_idx").check_whole("gptq without g_idx");
    awq().check_whole("awq");
}

#[test]
fn every_weight_of_compressed_tensors_has_the_value_of_its_definition() {
    for (bits, group, symmetric, act_order) in
        [(4, Some(32), true, true), (4, Some(160), false, false), (8, Some(32), true, false), (8, None, false, false)]
    {
        packed(bits, group, symmetric, act_order).check_whole(&format!("packed {bits} {group:?} {symmetric}"));
    }
    int8(24, true, Value::Null).check_whole("int8");
    int8(24, false, Value::Null).check_whole("int8 with zero points");
    let weights =
        |strategy: &str| json!({"num_bits": 8, "type": "float", "strategy": strategy, "block_structure": [128, 64]});
    let config = |strategy| compressed("float-quantized", weights(strategy), Value::Null);
    fp8(config("channel"), ".weight_scale", &[150, 1], |o, _| o).check_whole("fp8 by rows");
    fp8(config("tensor"), ".weight_scale", &[1], |_, _| 0).check_whole("fp8 by tensor");
    fp8(config("block"), ".weight_scale", &[2, 3], |o, i| o / 128 * 3 + i / 64).check_whole("fp8 by blocks");
}

#[test]
fn every_weight_of_nvfp4_has_both_of_its_scales() {
    for of_all in [1.0, 2688.0, 0.37] {
        nvfp4(true, of_all).check_whole(&format!("compressed-tensors, {of_all}"));
        nvfp4(false, 1.0 / of_all).check_whole(&format!("modelopt, {of_all}"));
    }
    let mixed = |mut module: Module| {
        module.config["quantization_config"]["quant_algo"] = json!("MIXED_PRECISION");
        module
    };
    mixed(nvfp4(false, 0.3)).check_whole("modelopt, mixed, nvfp4");
    let config = json!({"quant_method": "modelopt", "quant_algo": "FP8"});
    let floats = fp8(config, ".weight_scale", &[], |_, _| 0);
    let floats = floats.tensor(".input_scale", Dtype::F32, &[], 0.5f32.to_le_bytes().to_vec());
    floats.check_whole("modelopt, fp8");
    mixed(floats).check_whole("modelopt, mixed, fp8");
    // Without the scale of activations, which are not rounded.
    nvfp4(true, 3.0).without(".input_global_scale").check_whole("nvfp4 of weights alone");
    let wrong = |key: &str, value: Value| {
        let mut module = nvfp4(true, 3.0);
        module.config["quantization_config"]["config_groups"]["group_0"]["weights"][key] = value;
        module
    };
    wrong("group_size", json!(32)).refused(&["group_size", "32", "expected 16"]);
    wrong("num_bits", json!(8)).refused(&["num_bits", "8", "expected 4"]);
    wrong("type", json!("int")).refused(&["format", "nvfp4-pack-quantized"]);
    nvfp4(true, 0.0).refused(&["weight_global_scale = 0", "a positive number"]);
    nvfp4(false, f32::NAN).refused(&["weight_scale_2 = NaN", "a positive number"]);
    nvfp4(false, 3.0).without(".weight_scale_2").refused(&["m.weight_scale_2", "not found"]);
    let mut other = nvfp4(false, 3.0);
    other.config["quantization_config"]["quant_algo"] = json!("NVFP4_AWQ");
    other.refused(&["quant_algo", "NVFP4_AWQ", "FP8 or NVFP4 or MIXED_PRECISION"]);
}

#[test]
fn rows_are_rounded_on_the_simulator_as_on_the_cpu() {
    let Some(launching) = opened::open(Options::default()) else { return };
    let host = device::open("cpu", Some(1)).unwrap();
    let inputs = |kind: &str| json!({"num_bits": 8, "type": kind, "dynamic": true, "strategy": "token"});
    let weights = json!({"num_bits": 8, "type": "float", "strategy": "channel"});
    let by_rows = compressed("float-quantized", weights, inputs("float"));
    let config = json!({"quant_method": "fp8", "activation_scheme": "static"});
    let by_tensor = fp8_of(64, config, ".weight_scale", &[], |_, _| 0);
    let scale = 0.01f32.to_le_bytes().to_vec();
    for (name, module) in [
        ("int8", int8(32, true, inputs("int"))),
        ("fp8 by rows", fp8_of(64, by_rows, ".weight_scale", &[64, 1], |o, _| o)),
        ("fp8 by tensor", by_tensor.tensor(".input_scale", Dtype::F32, &[], scale)),
    ] {
        let (_folder, weights) = module.open();
        let (weights, (n, k)) = (weights.unwrap(), (module.n, module.k));
        let linear = Linear::new(k, Role::Column, [Part::new("m", n)]);
        let mut random = Random(8);
        let x: Vec<f32> = (0..5 * k).map(|_| random.half().1 * 1000.0 - 5.0).collect();
        for dtype in [device::Dtype::F16, device::Dtype::Bf16] {
            let x: Vec<f32> = x.iter().map(|x| round(dtype, *x)).collect();
            let on_host = load_matrix(&linear, &weights, &*host, device::Dtype::F32).unwrap();
            let (packed, mut want) = (on_host.host().unwrap(), vec![f32::NAN; 5 * n]);
            let args = Gemm { x: linear::Rows::Numbers(&x), weights: packed, bias: None, y: &mut want };
            gemm(Isa::best(), host.pool(), args);
            let matrix = load_matrix(&linear, &weights, &*launching, dtype).unwrap();
            let mut sizes = ScratchSizes::default();
            sizes.add(Rewritten::Rows, [n, k], 2);
            let mut scratch = LinearScratch::new(&*launching, sizes).unwrap();
            let found = multiply(&*launching, &matrix, &x, Some(&mut scratch));
            let greatest = want.iter().fold(0.0f32, |greatest, x| greatest.max(x.abs()));
            let mut row_of_weights = vec![0.0; k];
            for (at, (found, want)) in found.iter().zip(&want).enumerate() {
                on_host.host().unwrap().copy_row(at % n, &mut row_of_weights);
                let products = x[at / n * k..][..k].iter().zip(&row_of_weights).map(|(x, w)| f64::from(x * w));
                // A row rounded to e4m3 differs by up to a sixteenth, and by its scale.
                let is_fp8_on_gpu = name != "int8" && launching.name() == "cuda";
                let sums = if is_fp8_on_gpu { e4m3_sum_error(k, 1.1 * span(products)) as f32 } else { 0.0 };
                assert!((found - want).abs() <= 2e-6 * greatest + sums, "{name} in {dtype}: {found}, not {want}");
            }
        }
    }
}

#[test]
fn every_weight_of_fp8_mxfp4_and_nf4_has_the_value_of_its_definition() {
    let config = json!({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 128]});
    let blocks = fp8(config, ".weight_scale_inv", &[3, 2], |o, i| o / 64 * 2 + i / 128);
    blocks.check_whole("fp8 blocks");
    // The heads of latent attention are rows and columns of one module.
    let columns = Pick { transposed: false, inputs: Some((0, 160)), ..Pick::rows(150, 20, 7) };
    blocks.check("cut out", Part::picked("m", 7, columns), |row| row + 20);
    let mut modelopt = fp8(json!({}), ".weight_scale", &[], |_, _| 0).tensor(
        ".input_scale",
        Dtype::F32,
        &[],
        0.01f32.to_le_bytes().to_vec(),
    );
    modelopt.config = json!({"quantization_config": {"quant_algo": "FP8", "producer": {"name": "modelopt"}}});
    modelopt.check_whole("modelopt");
    // The names of transformers.
    let config = json!({"quant_method": "fp8", "activation_scheme": "static"});
    let scale = 0.01f32.to_le_bytes().to_vec();
    let transformers =
        fp8(config, ".weight_scale_inv", &[], |_, _| 0).tensor(".activation_scale", Dtype::F32, &[], scale);
    transformers.check_whole("static fp8");
    nf4(false).check_whole("nf4");
    nf4(true).check_whole("nested nf4");
    let experts = mxfp4();
    for expert in 0..2 {
        // Odd rows are those of up projections.
        let pick = Pick { matrix: Some((expert, 2)), transposed: true, ..Pick::runs(6, 1, 1, 2) };
        let part = Part { bare: true, ..Part::picked("m", 3, pick) };
        experts.check(&format!("expert {expert}"), part, |row| expert * 6 + 1 + 2 * row);
    }
}

#[test]
fn what_contradicts_its_configuration_is_refused_in_one_line() {
    let good = gptq(4, Some(32), "gptq", false, None);
    let changed = |key: &str, value: Value| {
        let mut module = good.clone();
        module.config["quantization_config"][key] = value;
        module
    };
    changed("quant_method", json!("hqq")).refused(&["quant_method", "hqq", "compressed-tensors"]);
    changed("bits", json!(3)).refused(&["bits", "3", "2 or 4 or 8"]);
    changed("group_size", json!(48)).refused(&["group_size", "48", "multiple of 32"]);
    changed("group_size", json!(96)).refused(&["\"m\"", "128", "96"]);
    changed("group_size", json!(64)).refused(&["m.qzeros", "[4, 8]", "[2, 8]"]);
    changed("checkpoint_format", json!("marlin")).refused(&["checkpoint_format", "marlin"]);
    good.clone().without(".scales").refused(&["m.scales", "not found"]);
    good.clone().without(".qweight").refused(&["m.weight", "not found"]);
    good.clone()
        .without(".scales")
        .tensor(".scales", Dtype::I16, &[4, 64], vec![0; 512])
        .refused(&["m.scales", "I16", "F16"]);
    let uneven = good.clone().without(".g_idx").tensor(".g_idx", Dtype::I32, &[128], vec![0; 512]);
    uneven.refused(&["g_idx", "32 inputs"]);
    let wild = good.clone().without(".g_idx").tensor(".g_idx", Dtype::I32, &[128], vec![0xff; 512]);
    wild.refused(&["g_idx"]);
    let infinite = good.clone().without(".scales").tensor(".scales", Dtype::F16, &[4, 64], halves(&[0x7c00; 256]));
    infinite.refused(&["not finite"]);
    gptq(8, Some(32), "gptq", false, None)
        .without(".qzeros")
        .tensor(".qzeros", Dtype::I32, &[4, 16], vec![0xff; 256])
        .refused(&["zero point of 256"]);
    let weights = json!({"num_bits": 4, "type": "float", "strategy": "tensor_group"});
    Module {
        config: json!({"quantization_config": compressed("pack-quantized", weights, Value::Null)}),
        ..packed(4, None, true, false)
    }
    .refused(&["strategy", "tensor_group"]);
    let static_inputs = json!({"num_bits": 8, "type": "int", "dynamic": false, "strategy": "tensor"});
    let weights = json!({"num_bits": 8, "type": "int", "strategy": "channel"});
    Module {
        config: json!({"quantization_config": compressed("int-quantized", weights, static_inputs)}),
        ..int8(24, true, Value::Null)
    }
    .refused(&["input_activations"]);
    let state = br#"{"blocksize": 48, "shape": [12, 128]}"#.to_vec();
    let name = ".weight.quant_state.bitsandbytes__nf4";
    nf4(false).without(name).tensor(name, Dtype::U8, &[state.len()], state).refused(&["blocks of 48"]);
    let long = json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": {
        "targets": [format!("re:{}", "a".repeat(20_000))], "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}}});
    Module { config: json!({ "quantization_config": long }), ..packed(4, None, true, false) }.refused(&["targets"]);
}

#[test]
fn schemes_are_those_of_the_modules_that_their_targets_name() {
    let module = packed(4, Some(32), true, false);
    let four = module.config["quantization_config"]["config_groups"]["group_0"].clone();
    let with = |name: &str, first: &str| {
        let mut eight = four.clone();
        (eight["targets"], eight["weights"]["num_bits"]) = (json!([first]), json!(8));
        let groups = json!({"group_0": eight, "group_1": four});
        let config = json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups});
        let rename = |name: &str, (from, a, b, c): &(String, Dtype, Vec<usize>, Vec<u8>)| {
            (from.replacen('m', name, 1), *a, b.clone(), c.clone())
        };
        let tensors = module.tensors.iter().map(|tensor| rename(name, tensor)).collect();
        let module = Module { config: json!({ "quantization_config": config }), tensors, ..module.clone() };
        module.check(name, Part::new(name, module.n), |row| row);
    };
    with("layers.10.down", "re:.*layers\\.1\\.down");
    with("layers.10.down", "up");
    with("layers.10.down", "re:10\\.down");
    with("layers.10.down", "re:layers\\.10\\.down_");
}

#[test]
fn any_change_of_the_bytes_of_a_module_is_accepted_or_refused_in_one_line() {
    let modules = [
        gptq(4, Some(32), "gptq", true, None),
        awq(),
        packed(4, Some(32), false, true),
        int8(24, false, Value::Null),
        nf4(true),
        nvfp4(true, 5.0),
    ];
    let mut random = Random(5);
    let folder = TempDir::new().unwrap();
    for module in modules {
        let (source, _) = module.open();
        let file = |name: &str| std::fs::read(source.path().join(name)).unwrap();
        let (config, tensors) = (file("config.json"), file("model.safetensors"));
        let whole = [&(config.len() as u16).to_le_bytes()[..], &config, &tensors].concat();
        assert!(fuzzed::read(folder.path(), &whole));
        // The settings and the header are where changes matter.
        let ends = 2 + config.len() + 900;
        for _ in 0..60 {
            let mut bytes = whole.clone();
            (0..1 + random.below(3)).for_each(|_| bytes[random.below(ends as u32) as usize] = random.below(256) as u8);
            fuzzed::read(folder.path(), &bytes);
        }
    }
}
