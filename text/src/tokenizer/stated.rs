//! What files beside a vocabulary say of it, for the formats that are not `tokenizer.json`: added tokens, and the tokens around texts.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value};
use tokenizers::AddedToken;

use super::scored::Entry;
use super::{CONFIG, special_text, steps};
use crate::error::{LoadError, one_line};
use crate::files::{Files, object};

/// Greatest number of tokens, several times that of the largest published vocabularies.
const MAX_TOKENS: usize = 1 << 21;
/// Greatest size of a token.
const MAX_TOKEN_BYTES: usize = 1 << 10;
/// Greatest number and size of the tokens that are searched in texts: the search needs memory for each of their bytes.
const MAX_ADDED: usize = 1 << 16;
const MAX_ADDED_BYTES: usize = 2 << 20;

const ADDED: &str = "added_tokens.json";

/// `tokenizer_config.json` and `added_tokens.json`.
#[derive(Debug, Default)]
pub(super) struct Stated {
    /// The name of the tokenizer's class; empty if it is not stated.
    pub class: String,
    /// Only the beginning of a text gets a space, not each text behind a special token.
    pub is_first_only: bool,
    config: Map<String, Value>,
    file: String,
    added: Map<String, Value>,
}

/// What is around texts if nothing else is stated.
pub(super) struct Around<'a> {
    pub before: &'a [&'a str],
    pub after: &'a str,
    pub adds: (bool, bool),
}

/// The tokens of a vocabulary while it is read.
pub(super) struct Table<'a> {
    file: &'a str,
    tokens: Vec<Option<(String, Entry)>>,
    ids: HashMap<String, u32>,
    added: BTreeMap<u32, AddedToken>,
}

impl Stated {
    pub fn read(files: &(impl Files + ?Sized)) -> Result<Stated, LoadError> {
        let config = object(files, CONFIG)?;
        let auto = config.get("auto_map").and_then(|map| map["AutoTokenizer"][0].as_str());
        let class = config.get("tokenizer_class").filter(|class| !class.is_null());
        let name = class.map_or(auto, Value::as_str).unwrap_or_default();
        let name = name.rsplit('.').next().unwrap_or_default().trim_end_matches("Fast").to_string();
        let is_first_only = config.get("legacy") == Some(&Value::Bool(false));
        let is_broken = class.is_some_and(|class| !class.is_string());
        let added = object(files, ADDED)?;
        let stated = Stated { class: name, is_first_only, added, file: files.locate(CONFIG), config };
        if is_broken { Err(stated.wrong("tokenizer_class", "a string")) } else { Ok(stated) }
    }

    /// The added tokens by id.
    fn added(&self) -> Result<BTreeMap<u32, AddedToken>, LoadError> {
        let wrong = |id: &str| {
            let found = one_line(format!("found the added token {id:.40} that is not usable"));
            LoadError::file(self.file.clone(), found, format!("an id, and a text of at most {MAX_TOKEN_BYTES} bytes"))
        };
        let mut added = BTreeMap::new();
        // The ids are the values here, and the names there.
        for (text, id) in &self.added {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| wrong(text))?;
            added.insert(id, AddedToken::from(text.as_str(), false).normalized(false));
        }
        for (id, token) in self.config.get("added_tokens_decoder").and_then(Value::as_object).into_iter().flatten() {
            let flag = |name: &str| token[name] == true;
            let (number, text) = id.parse().ok().zip(special_text(Some(token))).ok_or_else(|| wrong(id))?;
            let token = AddedToken::from(text, flag("special"))
                .normalized(flag("normalized"))
                .lstrip(flag("lstrip"))
                .rstrip(flag("rstrip"))
                .single_word(flag("single_word"));
            added.insert(number, token);
        }
        Ok(added)
    }

    /// A flag of the configuration.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, LoadError> {
        let value = self.config.get(key).filter(|value| !value.is_null());
        value.map(|value| value.as_bool().ok_or_else(|| self.wrong(key, "true or false"))).transpose()
    }

    /// The text of a special token of the configuration.
    pub fn token(&self, key: &str) -> Option<&str> {
        special_text(self.config.get(key))
    }

    pub fn wrong(&self, key: &str, expected: &str) -> LoadError {
        let found = self.config.get(key).map_or("missing".to_string(), |value| format!("{:.80}", one_line(value)));
        LoadError::file(self.file.clone(), format!("`{key}` is {found}"), expected)
    }
}

impl<'a> Table<'a> {
    pub fn new(file: &'a str) -> Table<'a> {
        Table { file, tokens: Vec::new(), ids: HashMap::new(), added: BTreeMap::new() }
    }

    pub fn wrong(&self, found: String, expected: String) -> LoadError {
        LoadError::file(self.file.to_string(), format!("found {found}"), expected)
    }

    /// Adds the next token. A special token is found in texts before anything else.
    pub fn push(&mut self, text: &str, entry: Entry, is_special: bool) -> Result<(), LoadError> {
        let id = self.tokens.len() as u32;
        if let Some(other) = self.ids.get(text) {
            return Err(self.wrong(format!("the token {text:?} as {other} and {id}"), "tokens that differ".into()));
        }
        if is_special {
            self.added.insert(id, AddedToken::from(text, true).normalized(false));
        }
        self.put(id, text, entry)
    }

    /// Adds an id without a token.
    pub fn push_hole(&mut self) {
        self.tokens.push(None);
    }

    /// Gives a token this id, in place of another one. Between it and the last token there are none.
    fn put(&mut self, id: u32, text: &str, entry: Entry) -> Result<(), LoadError> {
        let index = id as usize;
        if index >= MAX_TOKENS {
            return Err(self.wrong(format!("the token id {id}"), format!("at most {MAX_TOKENS} tokens")));
        }
        if text.is_empty() || text.len() > MAX_TOKEN_BYTES {
            let found = format!("a token of {} bytes with the id {id}", text.len());
            return Err(self.wrong(found, format!("1 to {MAX_TOKEN_BYTES} bytes")));
        }
        if index >= self.tokens.len() {
            self.tokens.resize(index + 1, None);
        }
        if let Some((old, _)) = self.tokens[index].replace((text.to_string(), entry)) {
            self.ids.remove(&old);
        }
        self.ids.insert(text.to_string(), id);
        Ok(())
    }

    /// Adds a special token behind all others, or with an id of its own.
    pub fn add_special(&mut self, id: Option<u32>, text: &str) -> Result<(), LoadError> {
        let id = id.unwrap_or(self.tokens.len() as u32);
        self.added.insert(id, AddedToken::from(text, true).normalized(false));
        self.put(id, text, Entry::Named)
    }

    /// Adds the added tokens that are stated, which replace those with their ids.
    pub fn extend(&mut self, stated: &Stated) -> Result<(), LoadError> {
        for (id, token) in stated.added()? {
            if self.ids.get(&token.content).is_none_or(|known| *known != id) {
                if let Some(old) = self.ids.get(&token.content).copied() {
                    self.tokens[old as usize] = None;
                    self.added.remove(&old);
                }
                self.put(id, &token.content, Entry::Named)?;
            }
            self.added.insert(id, token);
        }
        let bytes: usize = self.added.values().map(|token| token.content.len()).sum();
        if self.added.len() > MAX_ADDED || bytes > MAX_ADDED_BYTES {
            let found = format!("{} special and added tokens of {bytes} bytes", self.added.len());
            return Err(self.wrong(found, format!("at most {MAX_ADDED} of {MAX_ADDED_BYTES} bytes")));
        }
        Ok(())
    }

    pub fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    pub fn text(&self, id: u32) -> Option<&str> {
        self.tokens.get(id as usize)?.as_ref().map(|(text, _)| text.as_str())
    }

    /// The step that puts tokens around texts: those that are stated, or `default`.
    pub fn around(&self, stated: &Stated, default: Around<'_>) -> Result<Value, LoadError> {
        let Around { before, after, adds } = default;
        let bos = stated.flag("add_bos_token")?;
        let eos = stated.flag("add_eos_token")?;
        let token = |key: &str, text: &str| {
            let text = stated.token(key).unwrap_or(text);
            let found = self.id(text).map(|id| vec![(id, text.to_string())]);
            found.ok_or_else(|| stated.wrong(key, "a token of the vocabulary, because it is added to texts"))
        };
        let before = match bos {
            None if before.len() > 1 => {
                before.iter().filter_map(|text| Some((self.id(text)?, text.to_string()))).collect()
            }
            // A vocabulary without the token that is usual does not get one.
            None if !adds.0
                || stated.token("bos_token").or(before.first().copied()).and_then(|t| self.id(t)).is_none() =>
            {
                Vec::new()
            }
            Some(false) => Vec::new(),
            _ => token("bos_token", before.first().copied().unwrap_or_default())?,
        };
        let after = if eos.unwrap_or(adds.1) { token("eos_token", after)? } else { Vec::new() };
        Ok(steps::around(&before, &after))
    }

    /// The tokens by id, and those that are found in texts before anything else.
    pub fn finish(self) -> (Vec<Option<(String, Entry)>>, Vec<AddedToken>) {
        (self.tokens, self.added.into_values().collect())
    }
}
