//! `quantization_config`: which modules of a checkpoint are stored in fewer bits, and how.
//!
//! A scheme says how the tensors of a module are to be read. Whether a module is quantised at all follows from the tensors that it
//! has, so lists of ignored modules are not needed.

use safetensors::Dtype;
use serde_json::{Map, Value};

use crate::checkpoint::error::{LoadError, one_line};
use crate::checkpoint::fields::Fields;
use crate::checkpoint::files::ModelFiles;
use crate::checkpoint::pattern::Pattern;

/// Files that may hold the configuration, and the key in each; without a key, the file is the configuration.
const FILES: [(&str, &str); 3] =
    [("config.json", "quantization_config"), ("hf_quant_config.json", "quantization"), ("quantize_config.json", "")];

/// The format of compressed-tensors for NVFP4, and the weights that share a scale of 8 bits.
const NVFP4: &str = "nvfp4-pack-quantized";
pub(super) const NVFP4_GROUP: usize = 16;

/// How the modules of a checkpoint are stored.
#[derive(Clone, Debug)]
pub(crate) struct QuantizationConfig {
    /// The file, for messages.
    pub file: String,
    /// Schemes, each with the modules that it is for.
    groups: Vec<(Targets, Scheme)>,
}

/// Modules of a scheme.
#[derive(Clone, Debug)]
enum Targets {
    All,
    Some(Vec<Target>),
}

#[derive(Clone, Debug)]
enum Target {
    /// All linear layers.
    Linear,
    /// Modules by their names.
    Named(Pattern),
}

/// How a module is stored, and how its activations are rounded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scheme {
    pub kind: Kind,
    pub activations: Activations,
}

/// The tensors of a quantised module.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    /// GPTQ: `qweight`, `qzeros`, `scales`, `g_idx`. `group`: inputs in a group; `None`: all. `stored_less_one`: zero points are
    /// stored less one (version 1).
    Gptq { bits: u32, group: Option<usize>, stored_less_one: bool },
    /// AWQ (GEMM version): `qweight`, `qzeros`, `scales`.
    Awq { group: Option<usize> },
    /// compressed-tensors: `weight_packed`, `weight_scale`, `weight_zero_point`, `weight_g_idx`.
    Packed { bits: u32, group: Option<usize>, symmetric: bool },
    /// Integers of 8 bits: `weight`, `weight_scale`, `weight_zero_point`.
    Int8 { group: Option<usize>, symmetric: bool },
    /// Floats of 8 bits: `weight`, and `weight_scale` or `weight_scale_inv`, of blocks of weights (outputs, inputs) or of rows.
    Fp8 { block: Option<[usize; 2]> },
    /// Floats of 4 bits with an exponent for each 32: `_blocks`, `_scales`.
    Mxfp4,
    /// Floats of 4 bits with a scale of 8 bits for each 16 and one for all, which `divides` in compressed-tensors (`weight_packed`,
    /// `weight_scale`, `weight_global_scale`) and multiplies in ModelOpt (`weight`, `weight_scale`, `weight_scale_2`).
    Nvfp4 { divides: bool },
    /// ModelOpt with a form for each module: floats of 8 bits or NVFP4, as the type of `weight` says.
    Mixed,
    /// bitsandbytes: 4-bit indices of normally distributed floats.
    Nf4,
}

/// How a scheme rounds activations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Activations {
    /// Not at all.
    None,
    /// To 8-bit integers, with a scale for each row.
    Int8,
    /// To floats of 8 bits, with a scale for each so many inputs; `None`: for each row.
    Fp8(Option<usize>),
    /// To floats of 8 bits, with the scale in `input_scale`.
    Static,
}

impl QuantizationConfig {
    /// Reads the configuration; `None` for a checkpoint that is not quantised.
    ///
    /// # Errors
    /// A method, format or value that is not supported.
    pub fn load(files: &ModelFiles) -> Result<Option<QuantizationConfig>, LoadError> {
        for (file, key) in FILES {
            if !files.exists(file) {
                continue;
            }
            let map: Map<String, Value> = files.read_json(file)?;
            let fields = Fields::new(files.locate(file), String::new(), &map);
            if key.is_empty() {
                return gptq(&fields).map(|kind| Some(QuantizationConfig::of_all(&fields, Scheme::of(kind))));
            }
            let found = match fields.object(key)? {
                None => fields.object("text_config")?.map(|text| text.object(key)).transpose()?.flatten(),
                some => some,
            };
            if let Some(found) = found {
                return parse(&found).map(Some);
            }
        }
        Ok(None)
    }

    fn of_all(fields: &Fields<'_>, scheme: Scheme) -> QuantizationConfig {
        QuantizationConfig { file: fields.file().to_string(), groups: vec![(Targets::All, scheme)] }
    }

    /// Name of the form, that of the first scheme if there are several.
    pub fn name(&self) -> Option<String> {
        let (_, scheme) = self.groups.first()?;
        let name = match scheme.kind {
            Kind::Gptq { bits, .. } => return Some(format!("GPTQ-Int{bits}")),
            Kind::Packed { bits, .. } => return Some(format!("Int{bits}")),
            Kind::Awq { .. } => "AWQ-Int4",
            Kind::Int8 { .. } => "Int8",
            Kind::Fp8 { .. } => "FP8",
            Kind::Mxfp4 => "MXFP4",
            Kind::Nvfp4 { .. } => "NVFP4",
            Kind::Mixed => "FP8 and NVFP4",
            Kind::Nf4 => "NF4",
        };
        Some(name.to_string())
    }

    /// The scheme of a module, if it is quantised.
    ///
    /// # Errors
    /// It cannot be told whether a target names the module.
    pub fn scheme(&self, module: &str) -> Result<Option<Scheme>, LoadError> {
        let problem = |found: String| LoadError::QuantizedModule {
            file: self.file.clone(),
            module: module.to_string(),
            found: one_line(found),
            expected: "a shorter expression in `targets`".to_string(),
        };
        let mut general = None;
        for (targets, scheme) in &self.groups {
            let targets = match targets {
                Targets::All => &[Target::Linear][..],
                Targets::Some(targets) => targets,
            };
            for target in targets {
                match target {
                    Target::Linear => general = general.or(Some(*scheme)),
                    // A target that names modules comes before one that names all.
                    Target::Named(pattern) if pattern.matches(module).map_err(problem)? => return Ok(Some(*scheme)),
                    Target::Named(_) => {}
                }
            }
        }
        Ok(general)
    }
}

impl Scheme {
    fn of(kind: Kind) -> Scheme {
        Scheme { kind, activations: Activations::None }
    }

    /// The scheme of a module whose weights have this type.
    pub fn of_type(self, dtype: Dtype) -> Scheme {
        match (self.kind, dtype) {
            (Kind::Mixed, Dtype::U8) => Scheme::of(Kind::Nvfp4 { divides: false }),
            (Kind::Mixed, _) => Scheme { kind: Kind::Fp8 { block: None }, activations: Activations::Static },
            _ => self,
        }
    }
}

fn parse(fields: &Fields<'_>) -> Result<QuantizationConfig, LoadError> {
    const METHODS: &str =
        "gptq, awq, compressed-tensors, fp8, fbgemm_fp8, mxfp4, bitsandbytes (NF4) or modelopt (FP8, NVFP4, both)";
    let method = match (fields.string("quant_method")?, fields.get("quant_algo")) {
        (Some(method), _) => method,
        (None, Some(_)) => "modelopt",
        (None, None) => return Err(fields.wrong("quant_method", METHODS)),
    };
    let all = |scheme| Ok(QuantizationConfig::of_all(fields, scheme));
    match method {
        "gptq" => all(Scheme::of(gptq(fields)?)),
        "awq" => all(Scheme::of(awq(fields)?)),
        "compressed-tensors" => compressed_tensors(fields),
        "fp8" | "fbgemm_fp8" => all(fp8(fields)?),
        "mxfp4" => all(Scheme::of(Kind::Mxfp4)),
        "bitsandbytes" => {
            if fields.boolean("load_in_4bit")? != Some(true) {
                return Err(fields.wrong("load_in_4bit", "true: 8-bit weights of bitsandbytes are not supported"));
            }
            expect(fields, "bnb_4bit_quant_type", &["nf4"])?;
            all(Scheme::of(Kind::Nf4))
        }
        "modelopt" => {
            expect(fields, "quant_algo", &["FP8", "NVFP4", "MIXED_PRECISION"])?;
            match fields.string("quant_algo")? {
                Some("NVFP4") => all(Scheme::of(Kind::Nvfp4 { divides: false })),
                Some("MIXED_PRECISION") => all(Scheme::of(Kind::Mixed)),
                _ => all(Scheme { kind: Kind::Fp8 { block: None }, activations: Activations::Static }),
            }
        }
        _ => Err(fields.wrong("quant_method", METHODS)),
    }
}

/// Checks that a key has one of some values.
fn expect(fields: &Fields<'_>, key: &str, values: &[&str]) -> Result<(), LoadError> {
    match fields.string(key)? {
        Some(found) if values.contains(&found) => Ok(()),
        _ => Err(fields.wrong(key, values.join(" or "))),
    }
}

/// `bits`, which is one of these.
fn bits(fields: &Fields<'_>, key: &str, known: &[u64]) -> Result<u32, LoadError> {
    let expected = known.iter().map(u64::to_string).collect::<Vec<_>>().join(" or ");
    let found = fields.read(key, &expected, |value| value.as_u64().filter(|bits| known.contains(bits)))?;
    found.map(|bits| bits as u32).ok_or_else(|| fields.wrong(key, expected))
}

/// `group_size`: −1 or `null` for the whole row.
fn group(fields: &Fields<'_>) -> Result<Option<usize>, LoadError> {
    let parse = |value: &Value| match value.as_i64() {
        Some(-1) => Some(None),
        Some(size) if size > 0 && size % 32 == 0 && size <= 1 << 20 => Some(Some(size as usize)),
        _ => None,
    };
    Ok(fields.read("group_size", "-1 or a multiple of 32", parse)?.flatten())
}

fn gptq(fields: &Fields<'_>) -> Result<Kind, LoadError> {
    let bits = bits(fields, "bits", &[2, 4, 8])?;
    let stored_less_one = match fields.string("checkpoint_format")? {
        None | Some("gptq") => true,
        Some("gptq_v2") => false,
        _ => return Err(fields.wrong("checkpoint_format", "gptq or gptq_v2")),
    };
    Ok(Kind::Gptq { bits, group: group(fields)?, stored_less_one })
}

fn awq(fields: &Fields<'_>) -> Result<Kind, LoadError> {
    let key = if fields.is_absent("bits") { "w_bit" } else { "bits" };
    bits(fields, key, &[4])?;
    if let Some(version) = fields.string("version")?
        && !version.eq_ignore_ascii_case("gemm")
    {
        return Err(fields.wrong("version", "gemm"));
    }
    let group = if fields.is_absent("group_size") {
        fields.integer("q_group_size", 32..=1 << 20)?.map(|size| size as usize)
    } else {
        group(fields)?
    };
    Ok(Kind::Awq { group })
}

fn fp8(fields: &Fields<'_>) -> Result<Scheme, LoadError> {
    let block = fields.read("weight_block_size", "two sizes, such as [128, 128]", |value| {
        let sizes = value.as_array()?;
        let size =
            |value: &Value| value.as_u64().filter(|size| (32..=1 << 16).contains(size)).map(|size| size as usize);
        let [outputs, inputs] = sizes.as_slice() else { return None };
        Some([size(outputs)?, size(inputs).filter(|size| size % 32 == 0)?])
    })?;
    if let Some(format) = fields.string("fmt")?
        && format != "e4m3"
    {
        return Err(fields.wrong("fmt", "e4m3"));
    }
    let activations = match fields.string("activation_scheme")? {
        None | Some("dynamic") => Activations::Fp8(block.map(|[_, inputs]| inputs)),
        Some("static") => Activations::Static,
        _ => return Err(fields.wrong("activation_scheme", "dynamic or static")),
    };
    Ok(Scheme { kind: Kind::Fp8 { block }, activations })
}

fn compressed_tensors(fields: &Fields<'_>) -> Result<QuantizationConfig, LoadError> {
    let Some(groups) = fields.object("config_groups")? else {
        return Err(fields.wrong("config_groups", "groups of modules with the form of their weights"));
    };
    let default = fields.string("format")?;
    if let Some(sparsity) = fields.object("sparsity_config")?
        && !sparsity.is_empty()
    {
        expect(&sparsity, "format", &["dense"])?;
    }
    let mut all = Vec::new();
    for name in groups.keys() {
        let Some(group) = groups.object(name)? else { continue };
        let targets = group.read("targets", "a list of modules", |value| {
            value.as_array()?.iter().map(target).collect::<Option<Vec<_>>>()
        })?;
        let targets = targets.map_or(Targets::All, Targets::Some);
        let format = group.string("format")?.or(default).unwrap_or_default();
        let Some(weights) = group.object("weights")? else { continue };
        let kind = weights_of(&weights, format, fields)?;
        all.push((targets, Scheme { kind, activations: inputs_of(&group, kind)? }));
    }
    Ok(QuantizationConfig { file: fields.file().to_string(), groups: all })
}

fn target(value: &Value) -> Option<Target> {
    let name = value.as_str()?;
    match name.strip_prefix("re:") {
        Some(expression) => Pattern::start(expression).ok().map(Target::Named),
        None if name == "Linear" => Some(Target::Linear),
        None => Some(Target::Named(Pattern::suffix(name))),
    }
}

fn weights_of(weights: &Fields<'_>, format: &str, all: &Fields<'_>) -> Result<Kind, LoadError> {
    let symmetric = weights.boolean("symmetric")?.unwrap_or(true);
    let block = || {
        weights.read("block_structure", "two sizes, such as [128, 128]", |value| {
            let sizes: Vec<usize> =
                value.as_array()?.iter().filter_map(|size| size.as_u64().map(|it| it as usize)).collect();
            <[usize; 2]>::try_from(sizes)
                .ok()
                .filter(|[outputs, inputs]| *outputs > 0 && *inputs > 0 && inputs % 32 == 0)
        })
    };
    let is_float = weights.string("type")? == Some("float");
    let group = match weights.string("strategy")? {
        Some("group") => group(weights)?,
        Some("channel" | "tensor") => None,
        Some("block") if is_float => None,
        Some("tensor_group") if format == NVFP4 => {
            let expected = NVFP4_GROUP.to_string();
            weights.read("group_size", &expected, |value| (*value == NVFP4_GROUP).then_some(NVFP4_GROUP))?
        }
        _ => return Err(weights.wrong("strategy", "tensor, channel, group, or block of floats")),
    };
    match (format, is_float) {
        ("pack-quantized", false) => {
            Ok(Kind::Packed { bits: bits(weights, "num_bits", &[2, 4, 8])?, group, symmetric })
        }
        ("int-quantized" | "naive-quantized", false) => {
            bits(weights, "num_bits", &[8])?;
            Ok(Kind::Int8 { group, symmetric })
        }
        ("float-quantized" | "naive-quantized", true) => {
            bits(weights, "num_bits", &[8])?;
            Ok(Kind::Fp8 { block: if weights.string("strategy")? == Some("block") { block()? } else { None } })
        }
        (NVFP4, true) if weights.string("strategy")? == Some("tensor_group") => {
            bits(weights, "num_bits", &[4])?;
            Ok(Kind::Nvfp4 { divides: true })
        }
        _ => Err(all.wrong("format", "pack-quantized, int-quantized, float-quantized or nvfp4-pack-quantized")),
    }
}

fn inputs_of(group: &Fields<'_>, kind: Kind) -> Result<Activations, LoadError> {
    let Some(inputs) = group.object("input_activations")? else { return Ok(Activations::None) };
    // Beside weights of 4 bits, activations of as few are not rounded.
    if matches!(kind, Kind::Nvfp4 { .. }) && inputs.get("num_bits").is_some_and(|bits| *bits == 4) {
        return Ok(Activations::None);
    }
    bits(&inputs, "num_bits", &[8])?;
    let dynamic = inputs.read("dynamic", "true, false or \"local\"", |value| {
        value.as_bool().or_else(|| (value.as_str() == Some("local")).then_some(true))
    })?;
    let dynamic = dynamic.unwrap_or(false);
    match (inputs.string("type")?, dynamic, inputs.string("strategy")?) {
        (Some("int"), true, Some("token" | "tensor")) => Ok(Activations::Int8),
        (Some("float"), true, Some("token" | "tensor")) => Ok(Activations::Fp8(None)),
        (Some("float"), true, Some("group")) => {
            let size = inputs.integer("group_size", 1..=1 << 20)?;
            Ok(Activations::Fp8(size.map(|size| size as usize)))
        }
        (Some("float"), false, Some("tensor")) => Ok(Activations::Static),
        _ => Err(group.wrong(
            "input_activations",
            "8-bit integers or floats with dynamic scales of tokens, or floats with a static scale",
        )),
    }
}
