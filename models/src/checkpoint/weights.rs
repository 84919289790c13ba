//! The tensors of a checkpoint: `model.safetensors`, shards listed by `model.safetensors.index.json`, or those of a GGUF file.
//!
//! Opening reads only the headers and checks every size in them against the file. Tensor data is mapped and read on first access.
//! Names match with and without the prefix of the decoder (`model.`), which checkpoints saved from the bare decoder lack, and with
//! the prefixes of multimodal models. Unused tensors (such as `rotary_emb.inv_freq`) are never read and may have any type.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::path::{Component, Path};

use device::Dtype;
use linear::{StoredFormat, StoredRows};
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use sha2::{Digest, Sha256};

use crate::checkpoint::beginning::{LENGTH_BYTES, header_end};
use crate::checkpoint::bytes::FileBytes;
use crate::checkpoint::error::{LoadError, one_line};
use crate::checkpoint::files::ModelFiles;
use crate::checkpoint::gguf::{Encoding, GgufModel, Named};
use crate::checkpoint::quantized::config::QuantizationConfig;
use crate::decoder::Part;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// A tensor in its file: row-major, little-endian.
#[derive(Clone, Debug)]
pub struct WeightView<'a> {
    /// Name in the checkpoint.
    pub name: String,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// The bytes in the file, possibly unaligned: the elements, unless the checkpoint stores them in another form.
    pub data: &'a [u8],
    /// The file, for messages.
    pub file: String,
    /// How `data` stands for the elements; `None` if it is the elements.
    encoding: Option<Encoding>,
}

impl<'a> WeightView<'a> {
    /// The elements, little-endian: a part of the file, or a copy if the checkpoint stores them in another form.
    pub fn elements(&self) -> Cow<'a, [u8]> {
        match self.encoding {
            None => Cow::Borrowed(self.data),
            Some(encoding) => encoding.decode(self.data, self.shape.first().copied().unwrap_or(1)),
        }
    }

    /// The elements in float32, which represents every value of the three types exactly.
    pub fn to_f32(&self) -> Vec<f32> {
        let elements = self.elements();
        let mut numbers = vec![0.0; elements.len() / self.dtype.bytes()];
        self.dtype.read_row(&elements, &mut numbers);
        numbers
    }
}

/// A tensor of any type in its file.
pub(crate) struct RawTensor<'a> {
    /// Name in the checkpoint.
    pub name: &'a str,
    pub dtype: safetensors::Dtype,
    pub shape: &'a [usize],
    pub data: &'a [u8],
    file: &'a str,
    encoding: Option<Encoding>,
}

impl<'a> RawTensor<'a> {
    /// Checks shape and type.
    pub fn expect(&self, shape: &[usize], dtype: Option<safetensors::Dtype>) -> Result<(), LoadError> {
        if self.shape != shape {
            return Err(LoadError::WrongShape {
                file: self.file.to_string(),
                tensor: quote(self.name),
                found: self.shape.to_vec(),
                expected: shape.to_vec(),
            });
        }
        match dtype.filter(|dtype| *dtype != self.dtype) {
            None => Ok(()),
            Some(dtype) => Err(self.wrong_dtype(&format!("{dtype:?}"))),
        }
    }

    /// The error for a type that is not `expected`.
    pub fn wrong_dtype(&self, expected: &str) -> LoadError {
        LoadError::WrongDtype {
            file: self.file.to_string(),
            tensor: quote(self.name),
            found: format!("{:?}", self.dtype),
            expected: expected.to_string(),
        }
    }

    /// Name of the form of its elements.
    pub fn stored_as(&self) -> String {
        self.encoding.map_or_else(|| format!("{:?}", self.dtype), |encoding| encoding.name().to_string())
    }

    /// The form and the rows of a matrix of a GGUF file with rows of `k` weights; `None` for numbers.
    pub fn encoded_rows(&self, k: usize) -> Option<(StoredFormat, Box<dyn StoredRows + Send + 'a>)> {
        self.encoding?.rows(self.data, k)
    }
}

/// Which activations are rounded before products with quantised weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RoundActivations {
    /// Those for which the checkpoint says so, as it says.
    #[default]
    Auto,
    /// None.
    #[serde(rename = "float")]
    Never,
    /// Those of all products that can be computed with integers: to 8 bits, with a scale for each 32.
    Int8,
}

/// All tensors of a checkpoint.
pub struct Weights {
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Entry>,
    /// The file that error messages name for a tensor in no shard.
    listing: String,
    /// How modules are stored in fewer bits.
    quantization: Option<QuantizationConfig>,
    rounds: RoundActivations,
}

struct Shard {
    file: String,
    bytes: FileBytes,
}

struct Entry {
    shard: usize,
    dtype: safetensors::Dtype,
    shape: Vec<usize>,
    data: Range<usize>,
    /// How a GGUF file stores the elements.
    encoding: Option<Encoding>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Hashes names, types, shapes and the first bytes of each tensor: enough to tell checkpoints apart without reading them.
impl Hash for Weights {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        for (name, Entry { shard, dtype, shape, data, encoding }) in &self.tensors {
            let data = &self.shards[*shard].bytes[data.clone()];
            (name, format!("{dtype:?}"), shape, &data[..data.len().min(64)]).hash(hasher);
            encoding.iter().for_each(|encoding| format!("{encoding:?}").hash(hasher));
        }
    }
}

impl Weights {
    /// SHA-256 of all tensors: names, types, shapes and bytes. Reads all of them.
    pub fn digest(&self) -> [u8; 32] {
        let mut digest = Sha256::new();
        for (name, Entry { shard, dtype, shape, data, encoding }) in &self.tensors {
            let data = &self.shards[*shard].bytes[data.clone()];
            digest.update(format!("{name:?} {dtype:?} {shape:?} {encoding:?} {}", data.len()));
            digest.update(data);
        }
        digest.finalize().into()
    }

    /// Maps the weight files and reads their headers.
    ///
    /// # Errors
    /// A file is missing, truncated or damaged, or a shard lacks a tensor that the index lists.
    pub fn open(files: &ModelFiles) -> Result<Weights, LoadError> {
        if let ModelFiles::Gguf { model, .. } = files {
            return Ok(Weights::of_gguf(model));
        }
        let sharded = !files.exists(SINGLE) && files.exists(INDEX);
        let mut weights = Weights {
            shards: Vec::new(),
            tensors: BTreeMap::new(),
            listing: files.locate(if sharded { INDEX } else { SINGLE }),
            quantization: QuantizationConfig::load(files)?,
            rounds: RoundActivations::default(),
        };
        if sharded {
            weights.read_shards(files)?;
        } else if files.exists(SINGLE) {
            weights.read_shard(files, SINGLE)?;
        } else {
            return Err(files.missing(
                SINGLE,
                &format!("this file, or shards with {INDEX} (convert other formats to safetensors)"),
            ));
        }
        Ok(weights)
    }

    /// Maps one weight file and reads its header.
    ///
    /// # Errors
    /// It is missing, truncated or damaged.
    pub(crate) fn open_file(files: &ModelFiles, name: &str) -> Result<Weights, LoadError> {
        let listing = files.locate(name);
        let (quantization, rounds) = (None, RoundActivations::default());
        let mut weights = Weights { shards: Vec::new(), tensors: BTreeMap::new(), listing, quantization, rounds };
        weights.read_shard(files, name)?;
        Ok(weights)
    }

    fn of_gguf(model: &GgufModel) -> Weights {
        let shards: Vec<Shard> = model.parts().map(|(file, bytes)| Shard { file: file.to_string(), bytes }).collect();
        let entry = |Named { name, part, encoding, shape, data }: Named| {
            let dtype = match encoding.dtype() {
                Dtype::F32 => safetensors::Dtype::F32,
                Dtype::F16 => safetensors::Dtype::F16,
                Dtype::Bf16 => safetensors::Dtype::BF16,
            };
            let encoding = (!encoding.is_plain()).then_some(encoding);
            (name, Entry { shard: part, dtype, shape, data, encoding })
        };
        let listing = shards.first().map_or_else(String::new, |shard| shard.file.clone());
        let tensors = model.tensors().into_iter().map(entry).collect();
        Weights { shards, tensors, listing, quantization: None, rounds: RoundActivations::default() }
    }

    fn read_shards(&mut self, files: &ModelFiles) -> Result<(), LoadError> {
        let index: Index = files.read_json(INDEX)?;
        let mut shards: Vec<&String> = index.weight_map.values().collect();
        shards.sort();
        shards.dedup();
        for shard in shards {
            let plain = Path::new(shard).components().map(|part| matches!(part, Component::Normal(_))).eq([true]);
            if !plain {
                return Err(LoadError::Setting {
                    file: self.listing.clone(),
                    key: "weight_map".into(),
                    found: format!("{shard:?}"),
                    expected: "names of files in the folder of the index".into(),
                });
            }
            if !files.exists(shard) {
                return Err(files.missing(shard, &format!("this shard, which {INDEX} lists: download it")));
            }
            self.read_shard(files, shard)?;
        }
        match index.weight_map.iter().find(|(tensor, _)| !self.tensors.contains_key(*tensor)) {
            None => Ok(()),
            Some((tensor, shard)) => Err(LoadError::MissingTensor {
                file: files.locate(shard),
                tensor: quote(tensor),
                expected: format!("as {INDEX} lists it"),
            }),
        }
    }

    fn read_shard(&mut self, files: &ModelFiles, name: &str) -> Result<(), LoadError> {
        let file = files.locate(name);
        let bytes = files.bytes(name)?;
        let (metadata, data_start) = read_header(&bytes).map_err(|(found, expected)| LoadError::DamagedWeights {
            file: file.clone(),
            found,
            expected,
        })?;
        let shard = self.shards.len();
        self.tensors.extend(metadata.tensors().into_iter().map(|(name, info)| {
            let data = data_start + info.data_offsets.0..data_start + info.data_offsets.1;
            (name, Entry { shard, dtype: info.dtype, shape: info.shape.clone(), data, encoding: None })
        }));
        self.shards.push(Shard { file, bytes });
        Ok(())
    }

    /// Names of all tensors of any type, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The tensor `name`, with another prefix if need be; `None` if it does not exist or its type is not a [`Dtype`].
    pub fn get(&self, name: &str) -> Option<WeightView<'_>> {
        let (name, entry) = self.find(name)?;
        self.view(name, entry).ok()
    }

    /// The tensor `name`, with another prefix if need be, which must have this shape.
    ///
    /// # Errors
    /// It is missing, has another shape, or its type is not a [`Dtype`].
    pub fn expect(&self, name: &str, shape: &[usize]) -> Result<WeightView<'_>, LoadError> {
        let (name, entry) = self.find(name).ok_or_else(|| self.missing(name, &format!("{shape:?}")))?;
        self.raw_of(name, entry).expect(shape, None)?;
        self.view(name, entry)
    }

    /// The part as the checkpoint stores it: in a tensor of its own if the module of that tensor exists and the other does not.
    pub fn stored_part(&self, part: &Part) -> Part {
        let has = |module: &str| {
            let starts = |prefix: &String| {
                self.tensors.range(prefix.clone()..).next().is_some_and(|(n, _)| n.starts_with(prefix))
            };
            spellings(module).iter().any(starts)
        };
        let parent = |name: &str| name.rsplit_once('.').map(|(module, _)| module.to_string());
        // A module that has both tensors says nothing.
        let module = |own: &str| {
            let is_apart = |module: &String| parent(&part.name).as_ref() != Some(module);
            has(&format!("{own}.")) || parent(own).filter(is_apart).is_some_and(|module| has(&format!("{module}.")))
        };
        let own = part.own.as_ref().filter(|(own, _)| self.find(&part.weight()).is_none() && module(own));
        own.map_or_else(|| part.clone(), |(own, pick)| Part::picked(own, part.rows, *pick))
    }

    /// The tensor `name` of any type, with another prefix if need be.
    pub(crate) fn raw(&self, name: &str) -> Option<RawTensor<'_>> {
        self.find(name).map(|(name, entry)| self.raw_of(name, entry))
    }

    /// The tensor of exactly this name.
    pub(crate) fn raw_exactly(&self, name: &str) -> Option<RawTensor<'_>> {
        self.tensors.get_key_value(name).map(|(name, entry)| self.raw_of(name, entry))
    }

    fn raw_of<'a>(&'a self, name: &'a str, entry: &'a Entry) -> RawTensor<'a> {
        let Shard { file, bytes } = &self.shards[entry.shard];
        let Entry { dtype, shape, data, encoding, .. } = entry;
        RawTensor { name, dtype: *dtype, shape, data: &bytes[data.clone()], file, encoding: *encoding }
    }

    /// The error for a missing tensor.
    pub(crate) fn missing(&self, name: &str, shape: &str) -> LoadError {
        let (file, tensor) = (self.listing.clone(), quote(name));
        LoadError::MissingTensor { file, tensor, expected: shape.to_string() }
    }

    /// How modules are stored in fewer bits; `None` if the checkpoint does not say.
    pub(crate) fn quantization(&self) -> Option<&QuantizationConfig> {
        self.quantization.as_ref()
    }

    /// Which activations are rounded.
    pub(crate) fn rounds(&self) -> RoundActivations {
        self.rounds
    }

    /// Chooses which activations are rounded before products with quantised weights.
    pub fn round_activations(&mut self, rounds: RoundActivations) {
        self.rounds = rounds;
    }

    /// Total size of all tensors in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.values().map(|entry| entry.data.len() as u64).sum()
    }

    /// Releases the memory of numbers that have been read.
    pub(crate) fn release(&self, data: &[u8]) {
        self.shards.iter().for_each(|shard| shard.bytes.release(data));
    }

    /// The error for a tensor that nobody reads.
    pub(crate) fn unused(&self, name: &str) -> LoadError {
        let (file, shape) = self.tensors.get(name).map_or((self.listing.clone(), Vec::new()), |entry| {
            (self.shards[entry.shard].file.clone(), entry.shape.clone())
        });
        LoadError::UnusedTensor { file, tensor: quote(name), shape }
    }

    fn find(&self, name: &str) -> Option<(&str, &Entry)> {
        let found = spellings(name).into_iter().find_map(|name| self.tensors.get_key_value(&name));
        found.map(|(name, entry)| (name.as_str(), entry))
    }

    fn view(&self, name: &str, entry: &Entry) -> Result<WeightView<'_>, LoadError> {
        let shard = &self.shards[entry.shard];
        let dtype = match entry.dtype {
            safetensors::Dtype::F32 => Dtype::F32,
            safetensors::Dtype::F16 => Dtype::F16,
            safetensors::Dtype::BF16 => Dtype::Bf16,
            _ => return Err(self.raw_of(name, entry).wrong_dtype("F32, F16 or BF16 (an unquantised tensor)")),
        };
        Ok(WeightView {
            name: name.to_string(),
            dtype,
            shape: entry.shape.clone(),
            data: &shard.bytes[entry.data.clone()],
            file: shard.file.clone(),
            encoding: entry.encoding,
        })
    }
}

/// Reads the header of a safetensors file and the offset of its data. The file is an 8-byte length, a JSON header of that length,
/// then the tensors without gaps. An error is what was found and what was expected.
fn read_header(bytes: &[u8]) -> Result<(Metadata, usize), (String, String)> {
    let found = format!("{} bytes", bytes.len());
    let Some(data_start) = header_end(bytes, bytes.len() as u64)? else {
        return Err((found, format!("at least {LENGTH_BYTES}, the length of a safetensors header")));
    };
    let data_start = data_start as usize;
    let header = &bytes[LENGTH_BYTES..data_start];
    let broken = |problem: String| (format!("a header that cannot be read ({problem})"), "a safetensors header".into());
    let HeaderTensors(mut tensors) = serde_json::from_slice(header).map_err(|error| broken(one_line(error)))?;
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let metadata = Metadata::new(None, tensors).map_err(|error| broken(one_line(error)))?;
    let expected = data_start.saturating_add(metadata.data_len());
    if expected != bytes.len() {
        return Err((found, format!("{expected} bytes according to its header")));
    }
    Ok((metadata, data_start))
}

/// The tensors in a header. The library's own type keeps a second form of the whole header while it reads.
struct HeaderTensors(Vec<(String, TensorInfo)>);

impl<'de> Deserialize<'de> for HeaderTensors {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<HeaderTensors, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = HeaderTensors;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from names to tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<HeaderTensors, A::Error> {
        let mut tensors = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
            } else {
                tensors.push((name, map.next_value()?));
            }
        }
        Ok(HeaderTensors(tensors))
    }
}

/// Names of a tensor in checkpoints saved from the whole model, from the bare decoder, and as the text part of a multimodal model
/// (two generations of names).
pub(crate) fn spellings(name: &str) -> Vec<String> {
    let root = ["model", "transformer", "gpt_neox", "backbone", "bert", "roberta", "distilbert", "mpnet", "new"]
        .into_iter()
        .find(|root| name.strip_prefix(root).is_some_and(|rest| rest.starts_with('.')));
    let mut spellings = match root {
        Some(root) => {
            let rest = &name[root.len() + 1..];
            let others: &[&str] = match root {
                "backbone" => &["", "model.", "language_model.backbone."],
                _ => &["", "model.language_model.", "language_model.model.", "language_model."],
            };
            std::iter::once(name.to_string()).chain(others.iter().map(|prefix| format!("{prefix}{rest}"))).collect()
        }
        None => {
            let head = name.replace("embed_out", "lm_head");
            vec![name.to_string(), format!("model.{name}"), format!("language_model.{head}"), head]
        }
    };
    // Norms of early checkpoints of BERT.
    let early =
        |name: &String| name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta");
    if name.contains("LayerNorm.") {
        spellings.extend(spellings.iter().map(early).collect::<Vec<_>>());
    }
    spellings
}

/// A tensor's name for a message: quoted, with special characters escaped.
fn quote(name: &str) -> String {
    format!("{name:?}")
}
