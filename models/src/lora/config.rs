//! `adapter_config.json` of PEFT.

use serde_json::{Map, Value};

use super::error::AdapterError;
use crate::checkpoint::error::one_line;
use crate::checkpoint::fields::Fields;
use crate::checkpoint::pattern::Pattern;
use crate::{LoadError, ModelFiles};

/// Name of the file.
pub(super) const FILE: &str = "adapter_config.json";

/// Greatest size of the file in bytes.
const MOST_BYTES: usize = 4 << 20;

/// Greatest number of entries of a list or a map of patterns.
const MOST_PATTERNS: usize = 1 << 14;

/// Settings of methods that change the result in a way that is not supported. They must be absent, null, false or empty.
const REFUSED: [&str; 10] = [
    "use_dora",
    "use_qalora",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "megatron_config",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "arrow_config",
];

/// Which modules an adapter targets, and with which ranks and scales.
pub(super) struct AdapterConfig {
    file: String,
    rank: usize,
    alpha: f64,
    rank_stabilized: bool,
    targets: Vec<Pattern>,
    excluded: Vec<Pattern>,
    /// Numbers of the layers that are targeted; `None`: all.
    layers: Option<Vec<u64>>,
    /// Names of the lists of layers; empty: any.
    layer_lists: Vec<String>,
    ranks: Vec<(Pattern, usize)>,
    alphas: Vec<(Pattern, f64)>,
}

impl AdapterConfig {
    /// Reads the file. `most_rank` is the greatest rank allowed.
    pub fn load(files: &ModelFiles, most_rank: usize) -> Result<AdapterConfig, AdapterError> {
        let bytes = files.bytes(FILE)?;
        let file = files.locate(FILE);
        if bytes.len() > MOST_BYTES {
            let (key, found) = ("size".to_string(), format!("{} bytes", bytes.len()));
            return Err(LoadError::Setting { file, key, found, expected: format!("at most {MOST_BYTES}") }.into());
        }
        let map: Map<String, Value> = serde_json::from_slice(&bytes)
            .map_err(|error| LoadError::Json { file: file.clone(), problem: one_line(error) })?;
        let fields = Fields::new(file.clone(), String::new(), &map);
        if let Some(kind) = fields.string("peft_type")?
            && kind != "LORA"
        {
            return Err(fields.wrong("peft_type", "LORA").into());
        }
        if let Some(bias) = fields.string("bias")?
            && bias != "none"
        {
            return Err(fields.wrong("bias", "none: biases of adapters are not supported").into());
        }
        for key in REFUSED {
            let is_off = |value: &Value| match value {
                Value::Bool(on) => !on,
                Value::Array(list) => list.is_empty(),
                Value::Object(map) => map.is_empty(),
                _ => false,
            };
            if fields.get(key).is_some_and(|value| !is_off(value)) {
                return Err(fields.wrong(key, "none: this is not supported").into());
            }
        }
        let alpha_range = "a finite number";
        let ranks = patterns(&fields, "rank_pattern", "a rank of at least 1 for each pattern", |value| {
            value.as_u64().filter(|rank| *rank > 0).and_then(|rank| usize::try_from(rank).ok())
        })?;
        let config = AdapterConfig {
            rank: fields.integer("r", 1..=u64::from(u32::MAX))?.map_or(8, |rank| rank as usize),
            alpha: fields.float("lora_alpha", alpha_range, |_| true)?.unwrap_or(8.0),
            rank_stabilized: fields.boolean("use_rslora")?.unwrap_or(false),
            targets: targets(&fields, "target_modules")?.ok_or_else(|| {
                fields.wrong("target_modules", "a list of modules, or a regular expression for their names")
            })?,
            excluded: targets(&fields, "exclude_modules")?.unwrap_or_default(),
            layers: layers(&fields)?,
            layer_lists: names(&fields, "layers_pattern")?,
            ranks,
            alphas: patterns(&fields, "alpha_pattern", "a number for each pattern", |value| {
                value.as_f64().filter(|alpha| alpha.is_finite())
            })?,
            file,
        };
        let is_expression = fields.get("target_modules").is_some_and(Value::is_string);
        if is_expression && config.layers.is_some() {
            let expected = "null, because target_modules is a regular expression for whole names";
            return Err(fields.wrong("layers_to_transform", expected).into());
        }
        config.check_rank("r", config.rank, most_rank)?;
        Ok(config)
    }

    /// Whether a module with this name is targeted.
    ///
    /// # Errors
    /// A regular expression takes too many steps.
    pub fn is_targeted(&self, module: &str) -> Result<bool, AdapterError> {
        let any = |patterns: &[Pattern]| Ok::<_, AdapterError>(self.first(module, patterns, |it| it)?.is_some());
        Ok(any(&self.targets)? && !any(&self.excluded)? && self.has_layer(module))
    }

    /// The first entry whose pattern matches a name.
    fn first<'a, T>(
        &self,
        module: &str,
        entries: &'a [T],
        pattern: impl Fn(&T) -> &Pattern,
    ) -> Result<Option<&'a T>, AdapterError> {
        for entry in entries {
            let matches = pattern(entry).matches(module).map_err(|found| LoadError::Setting {
                file: self.file.clone(),
                key: "target_modules, rank_pattern or alpha_pattern".to_string(),
                found: one_line(found),
                expected: "a shorter expression".to_string(),
            })?;
            if matches {
                return Ok(Some(entry));
            }
        }
        Ok(None)
    }

    /// The rank of a module and the factor s of its product.
    pub fn rank_and_scale(&self, module: &str, most_rank: usize) -> Result<(usize, f32), AdapterError> {
        let rank = self.first(module, &self.ranks, |(pattern, _)| pattern)?.map_or(self.rank, |(_, rank)| *rank);
        self.check_rank(module, rank, most_rank)?;
        let alpha = self.first(module, &self.alphas, |(pattern, _)| pattern)?;
        let alpha = alpha.map_or(self.alpha, |(_, alpha)| *alpha);
        let divisor = if self.rank_stabilized { (rank as f64).sqrt() } else { rank as f64 };
        Ok((rank, (alpha / divisor) as f32))
    }

    fn check_rank(&self, module: &str, found: usize, most: usize) -> Result<(), AdapterError> {
        if found <= most {
            return Ok(());
        }
        Err(AdapterError::Rank { file: self.file.clone(), module: one_line(module), found, most })
    }

    /// Whether the module is in a layer of `layers_to_transform`: the last number in its name behind the name of a list.
    fn has_layer(&self, module: &str) -> bool {
        let Some(layers) = &self.layers else { return true };
        let parts: Vec<&str> = module.split('.').collect();
        let is_list = |name: &str| self.layer_lists.is_empty() || self.layer_lists.iter().any(|list| list == name);
        // The list lies within another module, and the layer has modules.
        let inner = 2..parts.len().saturating_sub(1).max(2);
        let number = inner.rev().filter(|&i| is_list(parts[i - 1])).find_map(|i| parts[i].parse::<u64>().ok());
        number.is_some_and(|number| layers.contains(&number))
    }
}

/// A list of last parts of names, or one expression for whole names.
fn targets(fields: &Fields<'_>, key: &str) -> Result<Option<Vec<Pattern>>, LoadError> {
    if let Some(Value::String(expression)) = fields.get(key) {
        let problem = |problem: String| fields.wrong(key, format!("a regular expression; found {}", one_line(problem)));
        return Ok(Some(vec![Pattern::whole(expression).map_err(problem)?]));
    }
    let listed = names(fields, key)?;
    Ok((!listed.is_empty()).then(|| listed.iter().map(|name| Pattern::suffix(name)).collect()))
}

/// A list of names, one name, or nothing.
fn names(fields: &Fields<'_>, key: &str) -> Result<Vec<String>, LoadError> {
    let names = fields.read(key, &format!("a list of at most {MOST_PATTERNS} names"), |value| match value {
        Value::String(name) => Some(vec![name.clone()]),
        Value::Array(names) if names.len() <= MOST_PATTERNS => {
            names.iter().map(|name| name.as_str().filter(|name| !name.is_empty()).map(str::to_string)).collect()
        }
        _ => None,
    })?;
    Ok(names.unwrap_or_default())
}

/// `layers_to_transform`: a number or a list of numbers.
fn layers(fields: &Fields<'_>) -> Result<Option<Vec<u64>>, LoadError> {
    let layers = fields.read("layers_to_transform", "a number or a list of numbers", |value| match value {
        Value::Array(layers) if layers.len() <= MOST_PATTERNS => layers.iter().map(Value::as_u64).collect(),
        other => other.as_u64().map(|layer| vec![layer]),
    })?;
    Ok(layers.filter(|layers: &Vec<u64>| !layers.is_empty()))
}

/// A map from patterns to values, in its order.
fn patterns<T>(
    fields: &Fields<'_>,
    key: &str,
    expected: &str,
    parse: impl Fn(&Value) -> Option<T>,
) -> Result<Vec<(Pattern, T)>, LoadError> {
    let entries = fields.read(key, expected, |value| {
        let map = value.as_object().filter(|map| map.len() <= MOST_PATTERNS)?;
        map.iter().map(|(pattern, value)| Some((pattern, parse(value)?))).collect::<Option<Vec<_>>>()
    })?;
    let compile = |(pattern, value): (&String, T)| match Pattern::last_parts(pattern) {
        Ok(pattern) => Ok((pattern, value)),
        Err(problem) => Err(fields.wrong(key, format!("regular expressions; found {}", one_line(problem)))),
    };
    entries.unwrap_or_default().into_iter().map(compile).collect()
}
