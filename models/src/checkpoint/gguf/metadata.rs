//! The metadata of a GGUF file under the keys of its architecture.

use serde_json::{Value as Json, json};

use super::architectures::{Architecture, PREDICTORS, WINDOWED};
use super::file::Gguf;
use super::value::Value;
use crate::checkpoint::error::{LoadError, one_line};

/// Greatest number of layers for which one number is repeated, or whose numbers are tensors.
pub(super) const MAX_LAYERS: u64 = 1 << 12;

/// The metadata with the prefix of an architecture.
pub(super) struct Metadata<'a> {
    pub gguf: &'a Gguf,
    pub architecture: &'static Architecture,
}

impl<'a> Metadata<'a> {
    pub fn value(&self, key: &str) -> Option<Value<'a>> {
        self.gguf.value(&self.full(key))
    }

    pub fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture.name)
    }

    /// A number; a list of the numbers of the layers counts as one if they are equal.
    pub fn number(&self, key: &str) -> Result<Option<Json>, LoadError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let number = |value: Value<'_>| match value.unsigned() {
            Some(number) => Some(json!(number)),
            None => match value {
                Value::Bool(truth) => Some(json!(truth)),
                _ => value.float().and_then(serde_json::Number::from_f64).map(Json::Number),
            },
        };
        let found = match value.array() {
            None => number(value),
            Some(list) => {
                let first = list.iter().next().and_then(number);
                first.filter(|first| list.iter().all(|other| number(other).as_ref() == Some(first)))
            }
        };
        found.map(Some).ok_or_else(|| self.wrong(key, "a finite number, the same for every layer"))
    }

    pub fn count(&self, key: &str) -> Result<Option<u64>, LoadError> {
        match self.number(key)? {
            None => Ok(None),
            Some(number) => number.as_u64().map(Some).ok_or_else(|| self.wrong(key, "a number of at least 0")),
        }
    }

    pub fn wrong(&self, key: &str, expected: impl Into<String>) -> LoadError {
        self.wrong_of(&self.full(key), expected)
    }

    /// [`Metadata::wrong`] for a key without the prefix.
    pub fn wrong_of(&self, key: &str, expected: impl Into<String>) -> LoadError {
        LoadError::Setting {
            file: self.gguf.file(0).to_string(),
            key: key.to_string(),
            found: self.gguf.value(key).map_or("missing".to_string(), one_line),
            expected: expected.into(),
        }
    }

    /// True or false.
    pub fn truth(&self, key: &str) -> Result<Option<bool>, LoadError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Bool(truth)) => Ok(Some(truth)),
            Some(_) => Err(self.wrong(key, "true or false")),
        }
    }

    /// A number of at least 0 for each of these layers: a list of them, or one for all.
    ///
    /// # Errors
    /// It is missing, or a list of another length.
    pub fn of_layers(&self, key: &str, layers: u64) -> Result<Vec<u64>, LoadError> {
        let expected = || format!("a number of at least 0, or a list of one for each of {layers} layers");
        let found = self.value(key).and_then(|value| match value.array() {
            Some(list) if list.len() as u64 == layers => list.iter().map(|number| number.unsigned()).collect(),
            Some(_) => None,
            None if layers <= MAX_LAYERS => Some(vec![value.unsigned()?; layers as usize]),
            None => None,
        });
        found.ok_or_else(|| self.wrong(key, expected()))
    }

    /// Number of layers without those that predict further tokens.
    ///
    /// # Errors
    /// All layers predict.
    pub fn layers(&self) -> Result<u64, LoadError> {
        let predictors = self.count(PREDICTORS)?.unwrap_or(0);
        let layers = self.count("block_count")?.unwrap_or(0).checked_sub(predictors);
        layers
            .filter(|layers| *layers > 0 || predictors == 0)
            .ok_or_else(|| self.wrong(PREDICTORS, "fewer than block_count"))
    }

    /// True or false, or 1 or 0, for each layer, of which those that predict further tokens are left out; `None` if there is no list.
    ///
    /// # Errors
    /// A list of another length, or of other values.
    pub fn flags(&self, key: &str) -> Result<Option<Vec<bool>>, LoadError> {
        let Some(list) = self.value(key).and_then(|value| value.array()) else { return Ok(None) };
        let flag = |value: Value<'_>| match value {
            Value::Bool(flag) => Some(flag),
            number => number.unsigned().filter(|number| *number <= 1).map(|number| number == 1),
        };
        let flags: Option<Vec<bool>> = list.iter().map(flag).collect();
        let (layers, all) = (self.layers()?, self.count("block_count")?);
        let flags = flags.filter(|flags| [Some(layers), all].contains(&Some(flags.len() as u64)));
        let mut flags = flags.ok_or_else(|| self.wrong(key, "true or false for each layer"))?;
        flags.truncate(layers as usize);
        Ok(Some(flags))
    }

    /// Which layers have a window, if there is a list of them.
    ///
    /// # Errors
    /// The value is malformed, as in [`Metadata::flags`].
    pub fn slides(&self) -> Result<Option<Vec<bool>>, LoadError> {
        self.flags(WINDOWED)
    }

    /// Numbers of the layers that have this tensor.
    pub fn in_layers(&self, tensor: &str) -> impl Iterator<Item = u64> {
        let layer = move |name: &String| {
            let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
            (rest == tensor).then(|| layer.parse().ok())?
        };
        self.gguf.tensors().keys().filter_map(layer)
    }

    /// The shape of a tensor.
    pub fn shape(&self, tensor: &str) -> Option<&'a [usize]> {
        self.gguf.tensors().get(tensor).map(|tensor| &tensor.shape[..])
    }

    /// One size divided by another, under these keys.
    ///
    /// # Errors
    /// One is missing, or they do not divide.
    pub fn quotient(&self, size: &str, by: &str) -> Result<u64, LoadError> {
        let number = |key: &str| {
            self.count(key)?.filter(|number| *number > 0).ok_or_else(|| self.wrong(key, "a number above 0"))
        };
        let (size_of, by_of) = (number(size)?, number(by)?);
        match size_of.is_multiple_of(by_of) {
            true => Ok(size_of / by_of),
            false => Err(self.wrong(size, format!("a multiple of `{}`, {by_of}", self.full(by)))),
        }
    }
}
