//! Architectures with transforms: a file that the converter's rules make of a checkpoint with random weights gives the logits of that
//! checkpoint, bit for bit.
//!
//! `names.txt` has the names of tensors in both forms and the architectures that have them, as gguf-py maps them. The rules are those of llama.cpp's converter.

use std::collections::BTreeMap;
use std::path::Path;

use attention_kernels::{KernelChoice, select};
use models::{Model, ModelConfig, ModelFiles, PageLayout, Weights, check_weights};
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::Value;

use super::converted_cases::cases;
use super::made::{Made, text_value, usual_keys};
use super::made_vocabulary::floats;
use crate::common::{last_logits, made_weight, needs};

/// A checkpoint to convert.
pub struct Case {
    pub name: &'static str,
    pub architecture: &'static str,
    pub config: Value,
    /// Keys of the architecture, without its name, that differ from those that most have.
    pub keys: Vec<(&'static str, Vec<u8>)>,
}

/// A tensor: its shape, outermost dimension first, and its values.
#[derive(Clone)]
pub struct Tensor {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

impl Tensor {
    fn new(shape: &[usize], values: Vec<f32>) -> Tensor {
        assert_eq!(shape.iter().product::<usize>(), values.len());
        Tensor { shape: shape.to_vec(), values }
    }

    /// The same values in another shape.
    fn reshaped(self, shape: &[usize]) -> Tensor {
        Tensor::new(shape, self.values)
    }

    fn map(mut self, f: impl Fn(f32) -> f32) -> Tensor {
        self.values.iter_mut().for_each(|value| *value = f(*value));
        self
    }

    /// These rows of its first dimension.
    fn rows(&self, rows: impl Iterator<Item = usize>) -> Tensor {
        let width = self.values.len() / self.shape[0];
        let rows: Vec<usize> = rows.collect();
        let values = rows.iter().flat_map(|row| &self.values[row * width..][..width]).copied().collect();
        Tensor::new(&[&[rows.len()], &self.shape[1..]].concat(), values)
    }

    /// The transposed matrix.
    fn transposed(&self) -> Tensor {
        let [n, k] = [self.shape[0], self.shape[1]];
        Tensor::new(&[k, n], (0..k).flat_map(|j| (0..n).map(move |i| self.values[i * k + j])).collect())
    }

    /// The tensors in the first dimension.
    fn matrices(&self) -> Vec<Tensor> {
        let shape = &self.shape[1..];
        let size = shape.iter().product::<usize>();
        self.values.chunks_exact(size).map(|values| Tensor::new(shape, values.to_vec())).collect()
    }

    fn stack(parts: &[Tensor]) -> Tensor {
        let shape = [&[parts.len()], &parts[0].shape[..]].concat();
        Tensor::new(&shape, parts.iter().flat_map(|part| part.values.clone()).collect())
    }

    /// The matrices of each of `count` parts of its first dimension, or of its second one.
    fn halves(&self) -> [Tensor; 2] {
        match self.shape[..] {
            [experts, rows, k] => [0, rows / 2].map(|first| {
                let of = (0..experts).flat_map(|expert| (0..rows / 2).map(move |row| expert * rows + first + row));
                Tensor::new(&[experts * rows, k], self.values.clone()).rows(of).reshaped(&[experts, rows / 2, k])
            }),
            _ => [0, self.shape[0] / 2].map(|first| self.rows(first..first + self.shape[0] / 2)),
        }
    }
}

/// Number `i` of a tensor. Norms are near 1, with few bits, so that 1 can be added without rounding. Logarithms of decays are in a range
/// in which their powers of e are undone without loss.
fn value(name: &str, i: usize) -> f32 {
    let unit = made_weight(name, i);
    match name {
        _ if name.ends_with("A_log") => 2.0 + 1.75 * unit,
        _ if name.contains("norm") || name.contains("scal") || name.ends_with(".D") => 0.5 + unit,
        _ => (unit - 0.5) / 2.0,
    }
}

/// Tensors by name.
pub type Tensors = BTreeMap<String, Tensor>;

/// The names of tensors in files of an architecture. Layers and experts are `{}`.
pub fn names(architecture: &str) -> BTreeMap<&'static str, &'static str> {
    let lines = include_str!("names.txt").lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let of = lines.filter(|line| line[2..].contains(&architecture));
    of.map(|line| (line[0], line[1])).collect()
}

/// The name with `{}` for its first number, and that number.
pub fn numbered(name: &str) -> (String, Option<usize>) {
    let parts: Vec<&str> = name.split('.').collect();
    let at = parts.iter().position(|part| part.parse::<usize>().is_ok());
    let number = at.map(|at| parts[at].parse().unwrap());
    let spelled = parts.iter().enumerate().map(|(i, part)| if Some(i) == at { "{}" } else { part });
    (spelled.collect::<Vec<_>>().join("."), number)
}

struct Converter<'a> {
    case: &'a Case,
    names: BTreeMap<&'static str, &'static str>,
    out: Tensors,
    /// Tensors of experts, to be stacked.
    experts: BTreeMap<String, BTreeMap<usize, Tensor>>,
    /// Parameters of activations, a number for each layer, which become keys.
    parameters: BTreeMap<String, Vec<f32>>,
    missing: Vec<String>,
}

impl Converter<'_> {
    fn size(&self, key: &str) -> usize {
        self.case.config[key].as_u64().unwrap_or_else(|| panic!("{key}")) as usize
    }

    /// The name in the file of a name without `.weight` or `.bias`.
    fn mapped(&mut self, stem: &str) -> String {
        let (spelled, layer) = numbered(stem);
        match self.names.get(spelled.as_str()) {
            Some(name) => name.replace("{}", &layer.unwrap_or(0).to_string()),
            None => {
                self.missing.push(spelled);
                "?".to_string()
            }
        }
    }

    fn put(&mut self, name: &str, tensor: Tensor) {
        // BLOOM's converter maps the names of the bare model.
        let name = name.strip_prefix("transformer.").filter(|_| self.case.architecture == "bloom").unwrap_or(name);
        let (spelled, _) = numbered(name);
        // A few names are mapped as a whole.
        let is_whole = self.names.contains_key(spelled.as_str());
        let end = [".weight", ".bias"].into_iter().find(|end| name.ends_with(end) && !is_whole).unwrap_or("");
        let mapped = self.mapped(name.strip_suffix(end).unwrap());
        self.out.insert(format!("{mapped}{end}"), tensor);
    }

    /// The converter's rules, for a tensor that it does not only rename.
    fn add(&mut self, name: &str, tensor: Tensor) {
        let architecture = self.case.architecture;
        let is = |list: &[&str]| list.contains(&architecture);
        let stem = |end: &str| name.strip_suffix(end).map(str::to_string);
        if let Some((module, rest)) = name.split_once(".experts.")
            && let Some((expert, part)) = rest.split_once('.').filter(|(expert, _)| expert.parse::<usize>().is_ok())
        {
            let merged = format!("{}.experts.{part}", module.replace(".mixer", ".mlp").replace("backbone", "model"));
            self.experts.entry(merged).or_default().insert(expert.parse().unwrap(), tensor);
            return;
        }
        if is(&["qwen3next", "qwen35", "qwen35moe"]) {
            return self.add_delta(name, tensor);
        }
        if is(&["bloom", "falcon", "gptneox", "gpt2"])
            && ["query_key_value.", "c_attn."].iter().any(|part| name.contains(part))
        {
            return self.put(name, self.ungrouped(&tensor));
        }
        if let Some(stem) = stem(".experts.gate_up_proj").filter(|_| is(&["llama4"])) {
            let matrices: Vec<Tensor> = tensor.matrices().iter().map(Tensor::transposed).collect();
            let [gate, up] = Tensor::stack(&matrices).halves();
            self.put(&format!("{stem}.experts.gate_proj.weight"), gate);
            return self.put(&format!("{stem}.experts.up_proj.weight"), up);
        }
        if name.ends_with(".experts.down_proj") && is(&["llama4"]) {
            let matrices: Vec<Tensor> = tensor.matrices().iter().map(Tensor::transposed).collect();
            return self.put(&format!("{name}.weight"), Tensor::stack(&matrices));
        }
        if let Some((module, rest)) = name.split_once(".norms.") {
            let (head, end) = rest.split_once('.').unwrap();
            let merged = format!("{module}.{end}");
            self.experts.entry(merged).or_default().insert(head.parse().unwrap(), tensor);
            return;
        }
        if name.ends_with(".attention_sink_bias") {
            return self.put(&format!("{name}.weight"), tensor);
        }
        if let Some(stem) = stem(".expert_bias") {
            return self.put(&format!("{stem}.expert_bias.bias"), tensor);
        }
        if name.contains(".act_fn.") {
            let (key, layer) = (name.rsplit('.').next().unwrap(), numbered(name).1.unwrap());
            assert_eq!((tensor.shape.len(), self.parameters.entry(key.to_string()).or_default().len()), (1, layer));
            self.parameters.get_mut(key).unwrap().push(tensor.values[0]);
            return;
        }
        if is(&["bert", "nomic-bert", "modern-bert", "eurobert"]) {
            return self.add_encoder(name, tensor);
        }
        if is(&["kimi-linear"]) && !name.ends_with("kv_b_proj.weight") {
            return self.add_kimi(name, tensor);
        }
        if is(&["deepseek2", "kimi-linear", "deepseek32", "glm-dsa"])
            && let Some(stem) = stem("kv_b_proj.weight")
        {
            if self.case.config["older"] == true {
                return self.put(name, tensor);
            }
            let (keys, values, heads) =
                (self.size("qk_nope_head_dim"), self.size("v_head_dim"), self.size("num_attention_heads"));
            let rank = self.size("kv_lora_rank");
            let of_head = |head: usize| head * (keys + values);
            let k = (0..heads).flat_map(|head| tensor.rows(of_head(head)..of_head(head) + keys).transposed().values);
            let v = (0..heads).flat_map(|head| tensor.rows(of_head(head) + keys..of_head(head + 1)).values);
            let (k, v) =
                (Tensor::new(&[heads, rank, keys], k.collect()), Tensor::new(&[heads, values, rank], v.collect()));
            self.put(&format!("{stem}k_b_proj.weight"), k);
            return self.put(&format!("{stem}v_b_proj.weight"), v);
        }
        if let Some(stem) = stem("input_linear.weight") {
            let [gate, up] = tensor.halves();
            let (layer, module) = stem.trim_end_matches('.').rsplit_once('.').unwrap();
            let has_experts = self.case.config["num_local_experts"].as_u64() > Some(0);
            let part = match (module, has_experts) {
                ("block_sparse_moe", _) => "mlp.experts.",
                (_, true) => "mlp.shared_expert.",
                _ => "mlp.",
            };
            self.put(&format!("{layer}.{part}gate_proj.weight"), gate);
            return self.put(&format!("{layer}.{part}up_proj.weight"), up);
        }
        if let Some(stem) = stem("shared_mlp.output_linear.weight")
            && self.case.config["num_local_experts"].as_u64().unwrap_or(0) == 0
        {
            return self.put(&format!("{stem}mlp.down_proj.weight"), tensor);
        }
        if is(&["nemotron", "gemma-embedding"]) && name.ends_with("norm.weight") {
            return self.put(name, tensor.map(|weight| weight + 1.0));
        }
        if is(&["ernie4_5-moe"]) && name.ends_with("e_score_correction_bias") {
            let len = tensor.shape[1];
            return self.add_states(name, tensor.reshaped(&[len]));
        }
        if is(&["granitehybrid", "granitemoe", "olmo", "minicpm", "internlm2", "llama-embed"])
            && ["q_proj.", "k_proj."].iter().any(|part| name.contains(part))
        {
            let (dim, rows) = (self.size("head_dim"), tensor.shape[0]);
            let neighbours = (0..rows).map(|row| {
                let (head, within) = (row / dim, row % dim);
                head * dim + within % 2 * (dim / 2) + within / 2
            });
            let tensor = tensor.rows(neighbours);
            return self.put(name, tensor);
        }
        if is(&["gemma3n"]) && name.contains(".altup_") {
            let (module, rest) = name.split_once("projections.").unwrap();
            let (number, _) = rest.split_once('.').unwrap();
            let merged = format!("{module}projections.weight");
            self.experts.entry(merged).or_default().insert(number.parse().unwrap(), tensor);
            return;
        }
        if is(&["gemma4"]) {
            for (end, module, suffix) in
                [("router.scale", "router.proj", ".scale"), ("router.per_expert_scale", "experts.down_proj", ".scale")]
            {
                if let Some(stem) = stem(end) {
                    let mapped = self.mapped(&format!("{stem}{module}"));
                    self.out.insert(format!("{mapped}{suffix}"), tensor);
                    return;
                }
            }
        }
        if name.ends_with("scale")
            || name.ends_with("scalar")
            || name.ends_with("experts.gate_up_proj")
            || name.ends_with("experts.down_proj")
        {
            return self.put(&format!("{name}.weight"), tensor);
        }
        self.add_states(name, tensor);
    }

    /// Rows of each key head, as rows of all queries, all keys and all values.
    fn ungrouped(&self, tensor: &Tensor) -> Tensor {
        let size = |keys: &[&str]| keys.iter().find_map(|key| self.case.config[*key].as_u64()).unwrap() as usize;
        let heads = size(&["n_head", "num_attention_heads"]);
        let groups = size(&["num_kv_heads", "n_head", "num_attention_heads"]);
        let (per, dim) = (heads / groups + 2, size(&["n_embd", "hidden_size"]) / heads);
        let head = |group: usize, within: usize| (group * per + within) * dim..(group * per + within + 1) * dim;
        let queries = (0..groups).flat_map(|group| (0..per - 2).flat_map(move |within| head(group, within)));
        let others = [per - 2, per - 1].into_iter().flat_map(|within| (0..groups).flat_map(move |at| head(at, within)));
        tensor.rows(queries.chain(others).collect::<Vec<_>>().into_iter())
    }

    /// Mamba.
    fn add_states(&mut self, name: &str, tensor: Tensor) {
        let is_first = self.case.architecture == "jamba";
        let len = tensor.shape[0];
        if name.ends_with("conv1d.weight") {
            let shape = [len, tensor.shape[2]];
            return self.put(name, tensor.reshaped(&shape));
        }
        if name.ends_with(".A_log") {
            let shape = if is_first { tensor.shape.clone() } else { vec![len, 1] };
            return self.put(name, tensor.map(|log| -log.exp()).reshaped(&shape));
        }
        if name.ends_with(".D") && !is_first {
            return self.put(name, tensor.reshaped(&[len, 1]));
        }
        if let Some(stem) = name.strip_suffix("dt_bias") {
            let module = if self.case.architecture == "nemotron_h_moe" { "dt" } else { "dt_proj" };
            return self.put(&format!("{stem}{module}.bias"), tensor);
        }
        if name.ends_with("mamba.norm.weight") || name.ends_with("mixer.norm.weight") {
            let key = if self.case.config["n_groups"].is_u64() { "n_groups" } else { "mamba_n_groups" };
            let groups = self.size(key);
            return self.put(name, tensor.reshaped(&[groups, len / groups]));
        }
        if name.ends_with("e_score_correction_bias") {
            return self.put(&name.replace("_bias", ".bias"), tensor);
        }
        self.put(name, tensor);
    }

    /// Encoders, whose tensors have the names of the bare model.
    fn add_encoder(&mut self, name: &str, tensor: Tensor) {
        let bare = ["bert.", "model."].iter().find_map(|root| name.strip_prefix(root)).unwrap_or(name);
        // As the converter has the classifiers of all families.
        let bare = bare.replace("pooler.dense", "classifier.dense");
        let bare = if bare.starts_with("classifier.dense") {
            bare
        } else {
            bare.replace("classifier.", "classifier.out_proj.")
        };
        self.put(&bare, tensor);
    }

    /// Kimi-Linear.
    fn add_kimi(&mut self, name: &str, tensor: Tensor) {
        if name.contains("_conv1d.") {
            let shape = [1, tensor.shape[0], 1, tensor.shape[2]];
            return self.put(name, tensor.reshaped(&shape));
        }
        if name.ends_with(".A_log") {
            return self.put(name, tensor.map(|log| -log.exp()));
        }
        self.add_states(name, tensor);
    }

    /// Qwen's gated delta nets.
    fn add_delta(&mut self, name: &str, tensor: Tensor) {
        let [nk, nv, dk, dv] = ["num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"]
            .map(|key| self.size(&format!("linear_{key}")));
        let per = nv / nk;
        let keys = nk * dk;
        // From the order (key head, number) to (number, key head), behind `first` rows.
        let tiled = |first: usize, dim: usize| {
            let heads = (0..per).flat_map(move |number| (0..nk).map(move |key| key * per + number));
            (0..first)
                .chain(heads.flat_map(move |head| first + head * dim..first + (head + 1) * dim))
                .collect::<Vec<_>>()
        };
        let reorders = self.case.architecture != "qwen3next" && nk != nv;
        let reorder = |tensor: Tensor, first: usize, dim: usize| match reorders {
            true => tensor.rows(tiled(first, dim).into_iter()),
            false => tensor,
        };
        if name.ends_with("in_proj_qkvz.weight") {
            let group = 2 * dk + 2 * per * dv;
            let part =
                |first: usize, run: usize| (0..nk).flat_map(move |key| key * group + first..key * group + first + run);
            let qkv = part(0, dk).chain(part(dk, dk)).chain(part(2 * dk, per * dv));
            let stem = name.replace("in_proj_qkvz", "in_proj_qkv");
            self.put(&stem, tensor.rows(qkv));
            return self
                .put(&name.replace("in_proj_qkvz", "in_proj_z"), tensor.rows(part(2 * dk + per * dv, per * dv)));
        }
        let tensor = match name {
            _ if name.ends_with("in_proj_qkv.weight") => reorder(tensor, 2 * keys, dv),
            _ if name.ends_with("in_proj_z.weight") => reorder(tensor, 0, dv),
            _ if name.ends_with("in_proj_b.weight") || name.ends_with("in_proj_a.weight") => reorder(tensor, 0, 1),
            _ if name.ends_with("A_log") || name.ends_with("dt_bias") => reorder(tensor, 0, 1),
            _ if name.ends_with("conv1d.weight") => reorder(tensor, 2 * keys, dv),
            _ if name.ends_with("linear_attn.out_proj.weight") => reorder(tensor.transposed(), 0, dv).transposed(),
            _ => tensor,
        };
        if let Some(stem) = name.strip_suffix(".experts.gate_up_proj") {
            let [gate, up] = tensor.halves();
            self.put(&format!("{stem}.experts.gate_proj.weight"), gate);
            return self.put(&format!("{stem}.experts.up_proj.weight"), up);
        }
        if name.ends_with(".experts.down_proj") {
            return self.put(&format!("{name}.weight"), tensor);
        }
        if name.ends_with("shared_expert_gate.weight") {
            let len = tensor.shape[1];
            return self.put(name, tensor.reshaped(&[len]));
        }
        if name.ends_with("A_log") {
            return self.put(name, tensor.map(|log| -log.exp()));
        }
        if name.ends_with("norm.weight") && !name.ends_with("linear_attn.norm.weight") {
            return self.put(name, tensor.map(|weight| weight + 1.0));
        }
        self.add_states(name, tensor);
    }
}

/// The tensors of a file, and the parameters of its activations.
fn convert(case: &Case, tensors: &Tensors) -> (Tensors, BTreeMap<String, Vec<f32>>) {
    let mut converter = Converter {
        case,
        names: names(case.architecture),
        out: Tensors::new(),
        experts: BTreeMap::new(),
        parameters: BTreeMap::new(),
        missing: Vec::new(),
    };
    for (name, tensor) in tensors {
        converter.add(&behind(case, name), tensor.clone());
    }
    for (name, parts) in std::mem::take(&mut converter.experts) {
        let shape = parts[&0].shape.clone();
        let count = parts.len();
        let values = parts.into_values().flat_map(|part| part.values).collect();
        converter.put(&name, Tensor::new(&[&[count], &shape[..]].concat(), values));
    }
    converter.missing.sort();
    converter.missing.dedup();
    assert!(converter.missing.is_empty(), "{}: no names of {}", case.architecture, converter.missing.join(" "));
    let Converter { mut out, parameters, .. } = converter;
    let is_latent = case.config["kv_lora_rank"].is_u64();
    if case.config["older"] == true && !is_latent {
        join(&mut out);
    }
    (out, parameters)
}

/// The name of a tensor, those of a predictor as in the layer behind the last one.
fn behind(case: &Case, name: &str) -> String {
    const ALL: [(&str, &str); 11] = [
        ("mtp.fc.", "model.layers.{}.eh_proj."),
        ("mtp.pre_fc_norm_embedding.", "model.layers.{}.enorm."),
        ("mtp.pre_fc_norm_hidden.", "model.layers.{}.hnorm."),
        ("mtp.norm.", "model.layers.{}.shared_head.norm."),
        ("model.mtp.layers.0.", "model.layers.{}."),
        ("mtp.layers.0.norm.", "backbone.layers.{}.norm."),
        ("mtp.layers.0.mixer.", "backbone.layers.{}.mixer."),
        ("mtp.layers.1.norm.", "model.layers.{}.post_attention_layernorm."),
        ("mtp.layers.1.final_layernorm.", "model.layers.{}.shared_head.norm."),
        ("mtp.layers.1.mixer.", "backbone.layers.{}.mixer."),
        ("mtp.layers.0.", "model.layers.{}."),
    ];
    let known = ALL.iter().find(|(from, _)| name.starts_with(from));
    let Some((from, to)) = known else { return name.to_string() };
    let layers = case.config["num_hidden_layers"].to_string();
    format!("{}{}", to.replace("{}", &layers), &name[from.len()..])
}

/// Joins the queries, keys and values of each layer, as files of older checkpoints have them.
fn join(tensors: &mut Tensors) {
    let queries: Vec<String> = tensors.keys().filter(|name| name.contains(".attn_q.")).cloned().collect();
    for name in queries {
        let parts = ["attn_q", "attn_k", "attn_v"].map(|part| tensors.remove(&name.replace("attn_q", part)).unwrap());
        let rows = parts.iter().map(|part| part.shape[0]).sum();
        let shape = [&[rows], &parts[0].shape[1..]].concat();
        let values = parts.into_iter().flat_map(|part| part.values).collect();
        tensors.insert(name.replace("attn_q", "attn_qkv"), Tensor::new(&shape, values));
    }
}

/// The keys that most architectures have, and those of the case.
pub fn keys(case: &Case) -> Made {
    let own = |key: &str| case.keys.iter().any(|(own, _)| *own == key);
    let shared = usual_keys(&case.config).filter(|(key, _)| !own(key));
    let made = Made::new().key("general.architecture", text_value(case.architecture));
    let all = shared.chain(case.keys.iter().filter(|(_, value)| !value.is_empty()).cloned());
    all.fold(made, |made, (key, value)| made.key(&format!("{}.{key}", case.architecture), value))
}

/// Writes a checkpoint in Hugging Face layout and the file that it becomes.
fn write(case: &Case, folder: &Path) -> (ModelFiles, ModelFiles) {
    let mut config = case.config.clone();
    config.as_object_mut().unwrap().remove("older");
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let files = ModelFiles::open(folder).unwrap();
    let config = ModelConfig::load(&files).unwrap();
    let declared: BTreeMap<String, Vec<usize>> = config.decoder.tensors().collect();
    let predicted = predicted(&config);
    let tensor = |(name, shape): (String, Vec<usize>)| {
        let values = (0..shape.iter().product()).map(|i| value(&name, i)).collect();
        (name, Tensor { shape, values })
    };
    let tensors: Tensors = declared.into_iter().chain(predicted).map(tensor).collect();
    let bytes = |tensor: &Tensor| tensor.values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let stored: Vec<(&String, &Tensor, Vec<u8>)> =
        tensors.iter().map(|(name, tensor)| (name, tensor, bytes(tensor))).collect();
    let views = stored
        .iter()
        .map(|(name, tensor, bytes)| (name, TensorView::new(Dtype::F32, tensor.shape.clone(), bytes).unwrap()));
    std::fs::write(folder.join("model.safetensors"), serialize(views, None).unwrap()).unwrap();
    let mut made = keys(case);
    let (converted, parameters) = convert(case, &tensors);
    for (key, values) in parameters {
        made = made.key(&format!("xielu.{key}"), floats(&values));
    }
    for (name, tensor) in converted {
        let dims: Vec<u64> = tensor.shape.iter().rev().map(|dim| *dim as u64).collect();
        made = made.floats(&name, &dims, &tensor.values);
    }
    if case.architecture == "gemma4" {
        let of_full = &case.config["rope_parameters"]["full_attention"];
        let pairs = case.config["global_head_dim"].as_u64().unwrap() as usize / 2;
        let turning = (of_full["partial_rotary_factor"].as_f64().unwrap() * pairs as f64) as usize;
        let factors: Vec<f32> = (0..pairs).map(|pair| if pair < turning { 1.0 } else { 1e30 }).collect();
        made = made.floats("rope_freqs.weight", &[pairs as u64], &factors);
    }
    let path = folder.join("m.gguf");
    std::fs::write(&path, made.bytes()).unwrap();
    (files, ModelFiles::open(&path).unwrap_or_else(|error| panic!("{}: {error}", case.name)))
}

/// The tensors of the predictor, whose embedding and head are those of the model.
fn predicted(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let own: BTreeMap<String, Vec<usize>> = config.decoder.tensors().collect();
    let all = config.predictor.iter().flat_map(|predictor| predictor.tensors());
    all.filter(|(name, _)| !own.contains_key(name)).collect()
}

fn logits(files: &ModelFiles, name: &str) -> (ModelConfig, Vec<f32>) {
    let config = ModelConfig::load(files).unwrap_or_else(|error| panic!("{name}: {error}"));
    let weights = Weights::open(files).unwrap();
    check_weights(&config.decoder, &weights).unwrap_or_else(|error| panic!("{name}: {error}"));
    // Files may have the matrices of heads apart.
    for (tensor, shape) in predicted(&config).into_iter().filter(|(tensor, _)| !tensor.contains("kv_b_proj")) {
        weights.expect(&tensor, &shape).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    let device = device::open("cpu", Some(1)).unwrap();
    let kernels = select(&KernelChoice::default(), &needs(&*device, &config.decoder)).unwrap();
    // States are as large as a block of keys and values.
    let block = PageLayout::least_block_size(&config.decoder, &kernels.format).max(8);
    let mut model = Model::load(&config.decoder, &weights, device, kernels, 64, &|_, _| Ok(())).unwrap();
    let mut caches = model.new_cache(8, block).unwrap();
    let prompt: Vec<u32> = (0..11).map(|i| (i * 7 + 3) % 40).collect();
    let logits = last_logits(&mut model, &mut caches, (block, 8), &prompt, prompt.len());
    (config, logits)
}

/// Compares the declarations and the tensors of both forms, which have the same names.
fn check_tensors(files: &ModelFiles, gguf: &ModelFiles) {
    let [want, found] = [files, gguf].map(|files| ModelConfig::load(files).unwrap());
    assert_eq!((found.architecture, &found.decoder), (want.architecture, &want.decoder));
    assert_eq!(found.max_position_embeddings, want.max_position_embeddings);
    assert!(found.unread.is_empty(), "{:?}", found.unread);
    let [a, b] = [files, gguf].map(|files| Weights::open(files).unwrap());
    check_weights(&found.decoder, &b).unwrap();
    for (name, shape) in want.decoder.tensors() {
        let [a, b] = [&a, &b].map(|weights| weights.expect(&name, &shape).unwrap().to_f32());
        assert!(a == b, "{name}");
    }
}

/// Compares a checkpoint with the file that is made of it.
fn check(case: &Case) {
    let folder = tempfile::TempDir::new().unwrap();
    let (files, gguf) = write(case, folder.path());
    if ModelConfig::load(&files).unwrap().decoder.is_encoder() {
        return check_tensors(&files, &gguf);
    }
    let (want, expected) = logits(&files, case.name);
    let (found, logits) = logits(&gguf, case.name);
    // The cases have keys of norms of both kinds.
    assert!(found.unread.iter().all(|key| want.unread.contains(key)), "{:?}", found.unread);
    assert_eq!(found.architecture, want.architecture);
    assert_eq!(found.decoder, want.decoder);
    assert_eq!(found.predictor, want.predictor);
    assert!(expected.iter().all(|logit| logit.is_finite()), "{expected:?}");
    assert!(expected.iter().any(|logit| logit.abs() > 1e-3), "{expected:?}");
    assert_eq!(logits, expected);
}

#[test]
fn a_converted_checkpoint_gives_the_logits_of_the_one_it_was_made_from() {
    // All cases are tried, so that one run names all that fail.
    let failed = |case: &Case| {
        let architecture = case.architecture;
        println!("{} as {architecture}", case.name);
        std::panic::catch_unwind(|| check(case)).is_err().then_some(case.name)
    };
    let failed: Vec<&str> = cases().iter().filter_map(failed).collect();
    assert!(failed.is_empty(), "{failed:?}");
}
