//! Reads an adapter and packs its factors.
//!
//! ```text
//! base_model.model.<module>.lora_A.weight   [r, inputs]
//! base_model.model.<module>.lora_B.weight   [outputs, r]
//! ```
//!
//! The file must hold both tensors of each module that the configuration targets, and no other tensor.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use linear::{Arithmetic, DownFactor, LowRank, UpFactor};
use sha2::{Digest, Sha256};
use simd::Pool;

use super::AdapterLimits;
use super::config::AdapterConfig;
use super::error::AdapterError;
use super::modules::{Modules, Place};
use crate::checkpoint::error::one_line;
use crate::{Decoder, LoadError, ModelFiles, WeightView, Weights};

const FILE: &str = "adapter_model.safetensors";

/// What PEFT puts before the names of the base model's modules.
const PREFIX: &str = "base_model.model.";

/// Bytes of a file's header for each tensor, and for all else.
const HEADER_BYTES: u64 = 1 << 10;

/// An adapter that is ready to compute.
pub struct Adapter {
    digest: String,
    rank: usize,
    bytes: usize,
    /// In the order of [`Decoder::linears`]; `None` for those that it does not target.
    linears: Vec<Option<LowRank>>,
}

/// The factors of a module in the file.
struct Factors<'a> {
    name: &'a str,
    places: &'a [Place],
    rank: usize,
    scale: f32,
    down: WeightView<'a>,
    up: WeightView<'a>,
}

impl Adapter {
    /// Reads the adapter in a folder. Products with it are in an arithmetic; a device that launches kernels needs an exact one.
    ///
    /// # Errors
    /// The files are missing or damaged, state something that is not supported, exceed the limits, or are for another model: the
    /// error names the first tensor that does not fit.
    pub fn read(
        folder: &Path,
        decoder: &Decoder,
        limits: &AdapterLimits,
        arithmetic: Arithmetic,
    ) -> Result<Adapter, AdapterError> {
        if !folder.is_dir() {
            return Err(AdapterError::NoFolder { path: one_line(folder.display()) });
        }
        let files = ModelFiles::Folder(folder.to_path_buf());
        let config = AdapterConfig::load(&files, limits.rank)?;
        let modules = Modules::new(decoder);
        check_size(&files, &modules, limits)?;
        let weights = Weights::open_file(&files, FILE)?;
        let factors = factors(&files.locate(FILE), &config, &modules, &weights, limits)?;
        let mut adapter = Adapter {
            digest: digest(&factors),
            rank: factors.iter().map(|factors| factors.rank).max().unwrap_or(0),
            bytes: 0,
            linears: Vec::new(),
        };
        let mut by_linear: BTreeMap<usize, Vec<(&Factors<'_>, &Place)>> = BTreeMap::new();
        for (factors, place) in factors.iter().flat_map(|factors| factors.places.iter().map(move |it| (factors, it))) {
            by_linear.entry(place.linear).or_default().push((factors, place));
        }
        for linear in 0..decoder.linears().count() {
            let packed = by_linear.get(&linear).map(|parts| pack(arithmetic, parts)).transpose()?;
            adapter.bytes += packed.as_ref().map_or(0, LowRank::bytes);
            adapter.linears.push(packed);
        }
        factors.iter().flat_map(|it| [it.down.data, it.up.data]).for_each(|data| weights.release(data));
        Ok(adapter)
    }

    /// SHA-256 of everything that its results depend on, in hexadecimal. Adapters with equal digests compute equal results, whatever
    /// their names are.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Greatest rank of a module.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Size in memory.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The addition to a linear layer, by its index in [`Decoder::linears`].
    pub(crate) fn linear(&self, index: usize) -> Option<&LowRank> {
        self.linears.get(index)?.as_ref()
    }
}

/// Refuses a file that is larger than an adapter can be, before its header is parsed.
fn check_size(files: &ModelFiles, modules: &Modules, limits: &AdapterLimits) -> Result<(), AdapterError> {
    let found = files.bytes(FILE)?.len() as u64;
    let sizes = modules.places.values().filter_map(|places| places.first());
    let elements: usize = sizes.map(|place| limits.rank * (place.module_inputs() + place.pick.total)).sum();
    let most = (elements * size_of::<f32>()) as u64 + HEADER_BYTES * (2 * modules.places.len() as u64 + 64);
    match found > most {
        true => Err(AdapterError::TooLarge { file: files.locate(FILE), found, most, rank: limits.rank }),
        false => Ok(()),
    }
}

/// The factors of all targeted modules in the order of their names, after checking every tensor of the file.
fn factors<'a>(
    file: &str,
    config: &AdapterConfig,
    modules: &'a Modules,
    weights: &'a Weights,
    limits: &AdapterLimits,
) -> Result<Vec<Factors<'a>>, AdapterError> {
    let quote = |name: &str| one_line(format!("{name:?}"));
    let unfit = |tensor: &str, problem: &str| AdapterError::Unfit {
        file: file.to_string(),
        tensor: quote(tensor),
        problem: problem.to_string(),
    };
    // Maps each module to its name in the file, whose prefix may differ from the decoder's.
    let mut found: BTreeMap<&str, (&[Place], &str)> = BTreeMap::new();
    let mut read = BTreeSet::new();
    for tensor in weights.names() {
        let Some((module, _)) = split(tensor) else {
            let problem = match tensor {
                name if name.contains("lora_magnitude_vector") => "belongs to DoRA, which is not supported",
                name if name.contains("lora_embedding") => "adapts an embedding, which is not supported",
                name if name.contains(".modules_to_save.") => "replaces a module, which is not supported",
                _ => "is no factor of LoRA (base_model.model.<module>.lora_A.weight or lora_B.weight)",
            };
            return Err(unfit(tensor, problem));
        };
        let Some((name, places)) = modules.find(module) else {
            let problem = match modules.is_other(module) {
                true => "adapts a module for which adapters are not supported (embedding, head, experts)",
                false => "fits no module of this model",
            };
            return Err(unfit(tensor, problem));
        };
        if !config.is_targeted(module)? {
            return Err(unfit(tensor, "adapter_config.json does not target"));
        }
        match found.get(name) {
            Some((_, other)) if *other != module => return Err(unfit(tensor, "adapts a module for the second time")),
            _ => drop(found.insert(name, (places, module))),
        }
        read.insert(name);
    }
    // A checkpoint has either the packed module or those of its parts, so only one of them need have tensors.
    let is_covered = |places: &[Place]| {
        let has = |place: &Place| {
            let same = |other: &Place| other.linear == place.linear && other.first_output == place.first_output;
            found.values().any(|(places, _)| places.iter().any(same))
        };
        places.iter().any(has)
    };
    for (name, places) in &modules.places {
        if config.is_targeted(name)? && !read.contains(name.as_str()) && !is_covered(places) {
            let (rank, _) = config.rank_and_scale(name, limits.rank)?;
            let expected = vec![rank, places.first().map_or(0, Place::module_inputs)];
            let tensor = quote(&format!("{PREFIX}{name}.lora_A.weight"));
            return Err(AdapterError::Tensor { file: file.to_string(), tensor, found: "not found", expected });
        }
    }
    if found.is_empty() {
        return Err(unfit("", "does not exist: the file has no tensors"));
    }
    let factors = found.into_iter().map(|(name, (places, module))| {
        let (rank, scale) = config.rank_and_scale(module, limits.rank)?;
        let Some(place) = places.first() else { return Err(unfit(module, "fits no module of this model")) };
        let expect = |factor: &str, expected: [usize; 2]| {
            let tensor = format!("{PREFIX}{module}.{factor}.weight");
            let expected = expected.to_vec();
            let problem = |found| AdapterError::Tensor {
                file: file.to_string(),
                tensor: quote(&tensor),
                found,
                expected: expected.clone(),
            };
            if !weights.names().any(|name| name == tensor) {
                return Err(problem("not found"));
            }
            let view = weights.get(&tensor).ok_or_else(|| problem("has another type"))?;
            if view.shape != expected {
                let (file, tensor) = (file.to_string(), quote(&tensor));
                return Err(AdapterError::Shape { file, tensor, found: view.shape, expected });
            }
            Ok(view)
        };
        let down = expect("lora_A", [rank, place.module_inputs()])?;
        let up = expect("lora_B", [place.pick.total, rank])?;
        Ok(Factors { name, places, rank, scale, down, up })
    });
    factors.collect()
}

/// The module and the factor in the name of a tensor.
fn split(tensor: &str) -> Option<(&str, &str)> {
    let rest = tensor.strip_prefix(PREFIX)?.strip_suffix(".weight")?;
    let (module, factor) = rest.rsplit_once('.')?;
    matches!(factor, "lora_A" | "lora_B").then_some((module, factor))
}

fn digest(factors: &[Factors<'_>]) -> String {
    let mut hasher = Sha256::new();
    for Factors { name, rank, scale, down, up, .. } in factors {
        let mut field = |bytes: &[u8]| {
            hasher.update((bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        field(name.as_bytes());
        field(&(*rank as u64).to_le_bytes());
        field(&scale.to_bits().to_le_bytes());
        for factor in [down, up] {
            field(factor.dtype.name().as_bytes());
            field(factor.data);
        }
    }
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Packs the modules of one linear layer.
fn pack(arithmetic: Arithmetic, parts: &[(&Factors<'_>, &Place)]) -> Result<LowRank, LoadError> {
    // Parts of one module share A, unless they have different inputs of it.
    let mut downs: Vec<(&Factors<'_>, &Place, Cow<'_, [u8]>)> = Vec::new();
    let mut ups = Vec::new();
    for &(factors, place) in parts {
        let known =
            downs.iter().position(|(it, of, _)| std::ptr::eq(*it, factors) && of.pick.inputs == place.pick.inputs);
        let down = known.unwrap_or_else(|| {
            downs.push((factors, place, columns(&factors.down, place)));
            downs.len() - 1
        });
        ups.push((down, place, factors, rows(&factors.up, place)));
    }
    let down: Vec<DownFactor<'_>> =
        downs.iter().map(|(it, _, data)| DownFactor { dtype: it.down.dtype, data, scale: it.scale }).collect();
    let up: Vec<UpFactor<'_>> = ups
        .iter()
        .map(|(down, place, it, data)| UpFactor {
            dtype: it.up.dtype,
            data,
            first_output: place.first_output,
            down: *down,
        })
        .collect();
    let inputs = parts.first().map_or(0, |(_, place)| place.inputs);
    // The threads of the pool that steps use are not disturbed.
    Ok(LowRank::pack(&Pool::alone(), arithmetic, inputs, &down, &up)?)
}

/// The columns of A that a place reads.
fn columns<'a>(down: &WeightView<'a>, place: &Place) -> Cow<'a, [u8]> {
    let Some((first, all)) = place.pick.inputs else { return Cow::Borrowed(down.data) };
    let size = down.dtype.bytes();
    let row = |row: &[u8]| row[first * size..][..place.inputs * size].to_vec();
    Cow::Owned(down.data.chunks_exact(all * size).flat_map(row).collect())
}

/// The rows of B of a place.
fn rows<'a>(up: &WeightView<'a>, place: &Place) -> Cow<'a, [u8]> {
    let row = up.data.len() / place.pick.total.max(1);
    let Place { pick, rows, .. } = *place;
    if pick.run >= rows {
        return Cow::Borrowed(&up.data[pick.first * row..][..rows * row]);
    }
    Cow::Owned((0..rows).flat_map(|i| &up.data[pick.row(i) * row..][..row]).copied().collect())
}
