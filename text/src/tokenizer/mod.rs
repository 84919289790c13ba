//! Conversion of text to token ids and back, with the `tokenizers` library.
//!
//! `tokenizer.json` decides if there is one: its post-processor which special tokens are added, its added tokens which texts become one
//! id. Only the tokens around texts may be stated by `tokenizer_config.json`, for the classes that read them there. Padding and
//! truncation saved in it are disabled: prompts are never padded or truncated here. Of a GGUF file, the metadata decide ([`GGUF_FILE`]).
//! Without both, the vocabulary of another format is read ([`OTHERS`]).
//!
//! | file | what it owns |
//! |---|---|
//! | `gguf`, `sentencepiece`, `tiktoken`, `wordpiece` | a reader per format, which gives the parts of a tokenizer |
//! | `stated`, `steps`, `splits` | what the readers share: added tokens, the steps around a model, how texts are split |
//! | `model`, `scored`, `bpe`, `unigram`, `rules` | the model: one of the library, or a vocabulary with scores |
//! | `pieces`, `spaces` | long texts in pieces |
//! | `frame` | special tokens around one text and around two |
//! | `bytes` | the bytes that a token represents |

use std::collections::HashSet;

use serde::de::DeserializeOwned;
use serde_json::Value;
use tokenizers::PostProcessorWrapper;

use crate::error::{LoadError, one_line};
use crate::files::{Files, read};

mod bpe;
mod bytes;
mod error;
mod frame;
mod gguf;
mod model;
mod pieces;
mod rules;
mod scored;
mod sentencepiece;
mod spaces;
mod splits;
mod stated;
mod steps;
mod tiktoken;
mod unigram;
mod wordpiece;

use bytes::TokenSpelling;
pub use error::TokenizeError;
pub use frame::Frame;
use gguf::Vocabulary;
use model::Pipeline;
use pieces::{Pieces, Rest};
use stated::Stated;

const FILE: &str = "tokenizer.json";

/// The vocabulary of a GGUF file as JSON, which the crate `models` reads of its metadata. It takes the place of `tokenizer.json`.
const GGUF_FILE: &str = "tokenizer.ggml.json";

/// Files of tokenizers in other formats, the preferred one first.
const OTHERS: [&str; 8] = [
    "tekken.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tiktoken.model",
    "qwen.tiktoken",
    "cl100k_base.tiktoken",
    "vocab.txt",
];

const CONFIG: &str = "tokenizer_config.json";

/// Classes whose tokenizers put special tokens around texts as [`CONFIG`] says, whatever `tokenizer.json` has.
const SURROUNDING: [&str; 3] = ["LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer"];

/// A checkpoint's tokenizer; may be shared between threads.
pub struct Tokenizer {
    inner: Pipeline,
    special: HashSet<u32>,
    vocab_size: usize,
    spelling: TokenSpelling,
    /// Greatest number of bytes that one token represents; `None` if there is no bound.
    bytes_per_token: Option<usize>,
    /// How to tokenize long texts in pieces; `None` if that is not possible.
    pieces: Option<Pieces>,
    file: String,
}

impl Tokenizer {
    /// Builds the tokenizer of `tokenizer.json`, of a GGUF file, or of a file in another format: `tokenizer.model`, `tekken.json`,
    /// tiktoken or `vocab.txt`.
    ///
    /// # Errors
    /// The file is missing or is not usable.
    pub fn load(files: &(impl Files + ?Sized)) -> Result<Self, LoadError> {
        let (file, mut inner) = match read(files, FILE)? {
            Some(bytes) => {
                let file = files.locate(FILE);
                let inner = Pipeline::from_bytes(bytes).map_err(|error| LoadError::tokenizer(&file, error))?;
                (file, surround(&Stated::read(files)?, inner)?)
            }
            None => match read(files, GGUF_FILE)? {
                Some(bytes) => {
                    let vocabulary: Vocabulary = serde_json::from_slice(&bytes)
                        .map_err(|error| LoadError::json(files.locate(GGUF_FILE), error))?;
                    (vocabulary.file.clone(), gguf::build(vocabulary)?)
                }
                None => read_other(files)?,
            },
        };
        let unusable = |problem: String| LoadError::tokenizer(&file, problem);
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| LoadError::tokenizer(&file, error))?;

        let vocab_size = inner.get_vocab(true).into_values().max().map_or(0, |greatest| greatest as usize + 1);
        if vocab_size == 0 {
            return Err(unusable("it has no tokens".to_string()));
        }
        let special = inner.get_added_tokens_decoder().into_iter().filter(|(_, token)| token.special).map(|(id, _)| id);
        let special = special.collect();
        let spelling = TokenSpelling::of(inner.get_decoder()).map_err(unusable)?;
        let bytes_per_token = bytes::per_token(&inner);
        let pieces = Pieces::of(&inner);
        Ok(Tokenizer { inner, special, vocab_size, spelling, bytes_per_token, pieces, file })
    }

    /// Checks that every id has a row in an embedding of `vocab_size` rows.
    ///
    /// # Errors
    /// The tokenizer has greater ids, so it belongs to another model.
    pub fn check(&self, vocab_size: usize) -> Result<(), LoadError> {
        if self.vocab_size > vocab_size {
            let found = format!("found token id {}", self.vocab_size - 1);
            let below = format!("ids below {vocab_size}, the `vocab_size` of config.json");
            let expected = format!("{below}: the tokenizer belongs to another model");
            return Err(LoadError::file(self.file.clone(), found, expected));
        }
        Ok(())
    }

    /// The token ids of `text`. Text that spells a special token becomes that token. `add_special` also adds the special tokens
    /// that every prompt of this model gets, such as a beginning-of-sequence token.
    ///
    /// # Errors
    /// The vocabulary cannot represent the text.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizeError> {
        self.encode_while(text, add_special, usize::MAX, |_| true)
    }

    /// Like [`Tokenizer::encode`], but between the pieces of a long text `go_on` is called with the number of tokens so far, and
    /// can stop. A text of more than `most_at_once` bytes without a place to cut it is refused, because tokenizing takes hundreds
    /// of bytes of memory per byte of text.
    ///
    /// # Errors
    /// The vocabulary cannot represent the text, the text is too long, or `go_on` returned false.
    pub fn encode_while(
        &self,
        text: &str,
        add_special: bool,
        most_at_once: usize,
        mut go_on: impl FnMut(usize) -> bool,
    ) -> Result<Vec<u32>, TokenizeError> {
        let (mut ids, mut rest) = (Vec::new(), Rest::new(text));
        if let Some(pieces) = &self.pieces {
            while let Some(later) = pieces.encode_next(&self.inner, rest, most_at_once, &mut ids)? {
                rest = later;
                if !go_on(ids.len()) {
                    return Err(TokenizeError::Stopped(ids.len()));
                }
            }
        }
        if rest.text.len() > most_at_once {
            return Err(TokenizeError::TooLong { found: rest.text.len(), most: most_at_once });
        }
        match &self.pieces {
            Some(pieces) if rest.text.len() < text.len() => ids.extend(pieces.encode_rest(&self.inner, rest)?),
            _ => return self.encode_whole(text, add_special),
        }
        if add_special {
            ids = self.frame()?.single(&ids);
        }
        Ok(ids)
    }

    fn encode_whole(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizeError> {
        let encoding =
            self.inner.encode_fast(text, add_special).map_err(|error| TokenizeError::Encode(one_line(error)))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Lower bound on the number of tokens of any text with this many bytes; 0 if no bound is known.
    ///
    /// The bound is far below the real number but costs nothing: texts that cannot fit a context are refused before they are
    /// tokenized.
    pub fn least_tokens(&self, bytes: usize) -> usize {
        self.bytes_per_token.map_or(0, |most| bytes.div_ceil(most))
    }

    /// The text of `ids`. Invalid UTF-8 becomes U+FFFD. Unknown ids are skipped, and so are special tokens with `skip_special`.
    ///
    /// # Errors
    /// The library's decoder failed.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizeError> {
        if matches!(self.inner.get_decoder(), Some(tokenizers::DecoderWrapper::ByteLevel(_))) {
            // The library would allocate a string per token first.
            let shown = ids.iter().filter(|&&id| !(skip_special && self.is_special(id)));
            let bytes = shown.fold(Vec::new(), |mut bytes, &id| {
                bytes.extend(self.token_bytes(id));
                bytes
            });
            return Ok(
                String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into())
            );
        }
        self.inner.decode(ids, skip_special).map_err(|error| TokenizeError::Decode(one_line(error)))
    }

    /// The greatest id plus one, including added tokens.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The vocabulary's spelling of a token.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a token in the vocabulary's spelling.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Whether `id` is a special token, which [`Tokenizer::decode`] can skip.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// Whether tokens such as `<0x0A>` are bytes.
    pub(crate) fn has_byte_fallback(&self) -> bool {
        matches!(self.spelling, TokenSpelling::Text { byte_fallback: true, .. })
    }

    /// The bytes that a token adds to a text, possibly part of a character; empty for an unknown id.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.id_to_token(id).map_or_else(Vec::new, |token| self.spelling.bytes(&token))
    }
}

/// Builds the tokenizer of a file in another format.
fn read_other(files: &(impl Files + ?Sized)) -> Result<(String, Pipeline), LoadError> {
    for name in OTHERS {
        let Some(bytes) = read(files, name)? else { continue };
        let (file, stated) = (files.locate(name), Stated::read(files)?);
        // Some files of this name are of tiktoken, which begins with base64 and not with the first field of a message.
        let is_message = name.ends_with(".model") && bytes.first() == Some(&0x0A);
        let parts = match name {
            "tekken.json" => tiktoken::read_tekken(&file, &bytes, &stated),
            "vocab.txt" => wordpiece::read(&file, &bytes, &stated),
            _ if is_message => sentencepiece::read(&file, &bytes, &stated),
            _ => tiktoken::read(&file, name, &bytes, &stated),
        };
        let pipeline = parts?.build().map_err(|error| LoadError::tokenizer(&file, error))?;
        return Ok((file, pipeline));
    }
    let expected = format!("this file or one of {}", OTHERS.join(", "));
    Err(LoadError::file(files.locate(FILE), "not found".to_string(), expected))
}

/// The text of a special token of `tokenizer_config.json`, which is a string or an object with `content`.
pub(crate) fn special_text(token: Option<&Value>) -> Option<&str> {
    let token = token?;
    token.as_str().or_else(|| token.get("content")?.as_str())
}

/// The tokenizer with the special tokens around texts that `tokenizer_config.json` states for some classes, as transformers has it.
fn surround(stated: &Stated, mut inner: Pipeline) -> Result<Pipeline, LoadError> {
    let (Some(bos), eos) = (stated.flag("add_bos_token")?, stated.flag("add_eos_token")?) else { return Ok(inner) };
    if !SURROUNDING.contains(&stated.class.as_str()) {
        return Ok(inner);
    }
    let token = |key: &str, is_added: bool| {
        if !is_added {
            return Ok(Vec::new());
        }
        let text = stated.token(key);
        let found = text.and_then(|text| Some(vec![(inner.token_to_id(text)?, text.to_string())]));
        found.ok_or_else(|| stated.wrong(key, "a token of tokenizer.json, because it is added to texts"))
    };
    let around = steps::around(&token("bos_token", bos)?, &token("eos_token", eos.unwrap_or(false))?);
    let steps = parse(&around).map_err(|error| LoadError::tokenizer(FILE, error))?;
    inner.with_post_processor(Some::<PostProcessorWrapper>(steps));
    Ok(inner)
}

/// A step of the library from its JSON. Only the deserializer of texts is used, so that the library's readers are compiled once.
fn parse<T: DeserializeOwned>(step: &Value) -> serde_json::Result<T> {
    serde_json::from_slice(step.to_string().as_bytes())
}

#[cfg(test)]
#[path = "tests/formats.rs"]
mod tests;
