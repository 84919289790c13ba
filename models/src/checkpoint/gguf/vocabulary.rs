//! The vocabulary in the metadata of a GGUF file, checked: every later use may trust counts and ids.
//!
//! It is serialised for whoever builds a tokenizer of it (the crate `text`).
//!
//! The cost is linear in the metadata. Limits keep what is built from it small: see the constants.

use std::collections::HashSet;

use serde::Serialize;

use super::file::Gguf;
use super::value::{Array, Value};
use crate::checkpoint::error::{LoadError, one_line};

/// Greatest number of tokens, eight times that of the largest published vocabularies.
const MAX_TOKENS: usize = 1 << 21;
/// Greatest size of a token, and of all tokens.
const MAX_TOKEN_BYTES: usize = 1 << 16;
const MAX_ALL_BYTES: usize = 64 << 20;
/// Greatest number and size of the tokens that are searched in texts: the search needs memory for each of their bytes.
const MAX_ADDED: usize = 1 << 16;
const MAX_ADDED_BYTES: usize = 2 << 20;
/// Greatest number of merges, and size of all.
const MAX_MERGES: usize = 1 << 22;
const MAX_MERGE_BYTES: usize = 256 << 20;

/// Greatest size of a map of characters, sixteen times that of NFKC with foldings.
const MAX_MAP_BYTES: usize = 4 << 20;

/// The space in SentencePiece's vocabularies.
const SPACE: &str = "\u{2581}";

/// Texts of control tokens that end a sequence.
const END_TEXTS: [&str; 22] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

/// Texts that end a sequence only in vocabularies without the others: in Harmony a message ends with `<|end|>`, and the reply goes on.
const NOT_END_BESIDE: [(&str, &[&str]); 3] = [
    ("<|end|>", &["<|return|>", "<|call|>"]),
    ("<|end|>", &["<|calls|>", "<|flush|>"]),
    ("</s>", &["<|tool_response>"]),
];

/// What a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) enum Role {
    /// Text.
    Normal,
    /// A special token: found in texts before anything else, and left out of decoded texts.
    Special,
    /// Text that is one token wherever it occurs.
    UserDefined,
    /// A row of the embedding without a token.
    Unused,
}

/// The model that splits pieces of text into tokens.
#[derive(Debug, Serialize)]
pub(super) enum Kind<'a> {
    /// Byte-level BPE.
    ByteLevel {
        /// Name of the way in which texts are split first.
        pre_tokenizer: &'a str,
        /// Pairs of tokens to join, most important first.
        merges: Vec<(&'a str, &'a str)>,
    },
    /// BPE of characters, whose spaces are those of SentencePiece.
    Characters {
        /// Pairs of tokens to join, most important first.
        merges: Vec<(&'a str, &'a str)>,
    },
    /// WordPiece, with the tokens that continue a word as `##x`.
    WordPiece {
        /// Whether texts are lowered, and lose their accents.
        lowercase: bool,
    },
    /// SentencePiece unigram.
    Unigram {
        /// A finite float32 number per token, exact also as text: the logarithm of its probability.
        scores: Vec<f64>,
        /// Whether a space is put before texts.
        space_prefix: bool,
        /// Whether several spaces become one.
        collapses: bool,
        /// The map of characters in SentencePiece's form; empty for none.
        map: Vec<u8>,
    },
    /// SentencePiece BPE.
    SentencePiece {
        /// A finite float32 number per token, exact also as text; of two possible joins, that with the higher score comes first.
        scores: Vec<f64>,
        /// Whether a space is put before texts, at the start and after special tokens.
        space_prefix: bool,
        /// Whether white space after a special token belongs to it.
        strip_after_special: bool,
    },
}

/// A vocabulary.
#[derive(Debug, Serialize)]
pub(super) struct Vocabulary<'a> {
    /// The file, for messages.
    pub file: String,
    pub kind: Kind<'a>,
    /// Texts by id: different from each other and not empty.
    pub texts: Vec<String>,
    pub roles: Vec<Role>,
    /// Special tokens, each an id of the vocabulary.
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub unknown: Option<u32>,
    #[serde(skip)]
    pub padding: Option<u32>,
    /// Whether texts begin with `bos`; `None` leaves it to the pre-tokenizer.
    pub add_bos: Option<bool>,
    /// Whether texts end with `eos`.
    pub add_eos: bool,
    /// Whether two texts are an encoder's input, with special tokens between them.
    pub pairs: bool,
    /// Tokens that end a sequence, in order.
    #[serde(skip)]
    pub end_tokens: Vec<u32>,
}

/// The keys that begin with `tokenizer.ggml.`.
struct Keys<'a> {
    gguf: &'a Gguf,
}

impl<'a> Vocabulary<'a> {
    /// Reads the vocabulary; `None` if the file has none.
    ///
    /// # Errors
    /// Its kind is not supported, or it contradicts itself.
    pub fn read(gguf: &'a Gguf) -> Result<Option<Vocabulary<'a>>, LoadError> {
        let keys = Keys { gguf };
        let Some(model) = keys.value("model") else { return Ok(None) };
        const SUPPORTED: &str = "gpt2 (byte-level BPE), llama (SentencePiece BPE), gemma4 (BPE of characters), bert (WordPiece) or t5 \
                                 (SentencePiece unigram)";
        let is_phi3 = gguf.value("general.architecture").and_then(|value| value.text()) == Some("phi3");
        let mut texts;
        let mut kind = match model.text() {
            Some("no_vocab" | "none") => return Ok(None),
            Some(name @ ("gpt2" | "llama" | "gemma4" | "bert" | "t5")) => {
                texts = keys.texts()?;
                let space_prefix = || Ok::<_, LoadError>(keys.flag("add_space_prefix")?.unwrap_or(true));
                match name {
                    "gpt2" => Kind::ByteLevel { pre_tokenizer: keys.pre_tokenizer()?, merges: keys.merges()? },
                    "gemma4" => Kind::Characters { merges: keys.merges()? },
                    "bert" => Kind::WordPiece { lowercase: false },
                    "t5" => Kind::Unigram {
                        scores: keys.scores(texts.len())?,
                        space_prefix: space_prefix()?,
                        collapses: keys.flag("remove_extra_whitespaces")?.unwrap_or(false),
                        map: keys.character_map()?,
                    },
                    _ => Kind::SentencePiece {
                        scores: keys.scores(texts.len())?,
                        space_prefix: space_prefix()?,
                        strip_after_special: is_phi3,
                    },
                }
            }
            _ => return Err(keys.wrong("model", SUPPORTED)),
        };
        let is_sentence_piece = matches!(kind, Kind::SentencePiece { .. });
        let mut roles = keys.roles(texts.len())?;
        if is_sentence_piece {
            spell_spaces(&mut texts, &roles);
        }
        if let Kind::WordPiece { lowercase } = &mut kind {
            *lowercase = spell_words(&mut texts, &roles);
        }
        // The ids that SentencePiece gives if it is not told.
        let default = |id: u32| Some(id).filter(|id| is_sentence_piece && (*id as usize) < texts.len());
        let id = |key: &str| keys.id(key, texts.len());
        // Encoders have names of their own for what is around texts.
        let either = |name: &str, other: &str| Ok::<_, LoadError>(id(name)?.or(id(other)?));
        let (bos, eos) = match kind {
            Kind::WordPiece { .. } => {
                (either("cls_token_id", "bos_token_id")?, either("seperator_token_id", "eos_token_id")?)
            }
            _ => (id("bos_token_id")?.or(default(1)), id("eos_token_id")?.or(default(2))),
        };
        let is_encoder = matches!(kind, Kind::WordPiece { .. } | Kind::Unigram { .. })
            || gguf.value("general.architecture").and_then(|value| value.text()) == Some("modern-bert");
        let unknown = id("unknown_token_id")?.or(default(0));
        let mut end_tokens: Vec<u32> = [eos, id("eot_token_id")?, id("eom_token_id")?].into_iter().flatten().collect();
        let has = |text: &str| texts.iter().any(|known| known == text);
        let stays_open = |text: &str| {
            NOT_END_BESIDE.iter().any(|(end, others)| *end == text && others.iter().all(|other| has(other)))
        };
        let ends: HashSet<&str> = END_TEXTS.into_iter().filter(|text| !stays_open(text)).collect();
        for ((id, text), role) in (0..).zip(&texts).zip(&mut roles) {
            // In other vocabularies such a text is text: `</s>` ends what HTML strikes through.
            let is_end = ends.contains(text.as_str()) && (*role == Role::Special || end_tokens.contains(&id));
            end_tokens.extend(is_end.then_some(id));
            // Some converters forget to mark them.
            if is_end || (*role == Role::Unused && [bos, eos, unknown].contains(&Some(id))) {
                *role = Role::Special;
            }
        }
        end_tokens.sort_unstable();
        end_tokens.dedup();
        let vocabulary = Vocabulary {
            file: gguf.file(0).to_string(),
            kind,
            bos,
            eos,
            unknown,
            // Files without padding state ids outside of the vocabulary.
            padding: id("padding_token_id").unwrap_or(None),
            add_bos: keys.flag("add_bos_token")?.or(is_encoder.then_some(true)),
            add_eos: keys.flag("add_eos_token")?.unwrap_or(is_encoder),
            pairs: is_encoder,
            end_tokens,
            texts,
            roles,
        };
        vocabulary.check_added(&keys)?;
        Ok(Some(vocabulary))
    }

    /// Text of a token.
    pub fn text(&self, id: u32) -> Option<&str> {
        self.texts.get(id as usize).map(String::as_str)
    }

    /// Bounds the tokens that are found in texts before anything else.
    fn check_added(&self, keys: &Keys<'_>) -> Result<(), LoadError> {
        let tokens = self.texts.iter().zip(&self.roles);
        let added = tokens.filter(|(_, role)| matches!(role, Role::Special | Role::UserDefined));
        let (count, bytes) = added.fold((0, 0), |(count, bytes), (text, _)| (count + 1, bytes + text.len()));
        if count > MAX_ADDED || bytes > MAX_ADDED_BYTES {
            let found = format!("{count} control and user-defined tokens of {bytes} bytes");
            let expected = format!("at most {MAX_ADDED} of {MAX_ADDED_BYTES} bytes");
            return Err(keys.setting("token_type", found, expected));
        }
        Ok(())
    }
}

impl<'a> Keys<'a> {
    fn value(&self, key: &str) -> Option<Value<'a>> {
        self.gguf.value(&full(key))
    }

    fn setting(&self, key: &str, found: impl Into<String>, expected: impl Into<String>) -> LoadError {
        let file = self.gguf.file(0).to_string();
        LoadError::Setting { file, key: full(key), found: found.into(), expected: expected.into() }
    }

    fn wrong(&self, key: &str, expected: impl Into<String>) -> LoadError {
        self.setting(key, self.value(key).map_or("missing".to_string(), one_line), expected)
    }

    /// An array of `len` elements, or of 1 to `most` if `len` is `None`.
    fn array(&self, key: &str, len: Option<usize>, most: usize) -> Result<Array<'a>, LoadError> {
        let expected = len.map_or(format!("1 to {most} elements"), |len| format!("{len} elements, one per token"));
        let array = self.value(key).and_then(|value| value.array());
        array
            .filter(|array| len.map_or((1..=most).contains(&array.len()), |len| array.len() == len))
            .ok_or_else(|| self.wrong(key, format!("an array of {expected}")))
    }

    /// The elements of an array, of which `read` returns `None` if one is not `expected`.
    fn list<T>(
        &self,
        key: &str,
        array: Array<'a>,
        expected: &str,
        read: impl Fn(Value<'a>) -> Option<T>,
    ) -> Result<Vec<T>, LoadError> {
        let element = |(index, value): (usize, Value<'a>)| {
            read(value).ok_or_else(|| self.setting(key, format!("{} at index {index}", one_line(value)), expected))
        };
        array.iter().enumerate().map(element).collect()
    }

    /// The bytes of all strings of an array.
    fn check_bytes(&self, key: &str, texts: &[&str], each: usize, most: usize) -> Result<(), LoadError> {
        if let Some((index, text)) = texts.iter().enumerate().find(|(_, text)| text.len() > each) {
            let found = format!("a text of {} bytes at index {index}", text.len());
            return Err(self.setting(key, found, format!("at most {each} bytes")));
        }
        match texts.iter().map(|text| text.len()).sum::<usize>() {
            bytes if bytes > most => {
                Err(self.setting(key, format!("{bytes} bytes of text"), format!("at most {most}")))
            }
            _ => Ok(()),
        }
    }

    fn texts(&self) -> Result<Vec<String>, LoadError> {
        const KEY: &str = "tokens";
        let array = self.array(KEY, None, MAX_TOKENS)?;
        let texts = self.list(KEY, array, "UTF-8 text", |value| value.text())?;
        self.check_bytes(KEY, &texts, MAX_TOKEN_BYTES, MAX_ALL_BYTES)?;
        // Nothing can be an empty token; its id keeps a name of its own.
        let name =
            |(id, text): (usize, &&str)| if text.is_empty() { format!("[EMPTY_{id}]") } else { text.to_string() };
        let texts: Vec<String> = texts.iter().enumerate().map(name).collect();
        let mut seen = HashSet::with_capacity(texts.len());
        match texts.iter().enumerate().find(|(_, text)| !seen.insert(text.as_str())) {
            None => Ok(texts),
            Some((id, text)) => {
                let found = format!("{} again at index {id}", one_line(Value::Text(text.as_bytes())));
                Err(self.setting(KEY, found, "each token once"))
            }
        }
    }

    fn roles(&self, len: usize) -> Result<Vec<Role>, LoadError> {
        const KEY: &str = "token_type";
        if self.value(KEY).is_none() {
            return Ok(vec![Role::Normal; len]);
        }
        let array = self.array(KEY, Some(len), MAX_TOKENS)?;
        self.list(KEY, array, "types 0 to 6", |value| match value.unsigned()? {
            0 | 1 | 6 => Some(Role::Normal),
            2 | 3 => Some(Role::Special),
            4 => Some(Role::UserDefined),
            5 => Some(Role::Unused),
            _ => None,
        })
    }

    fn scores(&self, len: usize) -> Result<Vec<f64>, LoadError> {
        const KEY: &str = "scores";
        let array = self.array(KEY, Some(len), MAX_TOKENS)?;
        let finite =
            |value: Value<'_>| value.float().map(|score| f64::from(score as f32)).filter(|score| score.is_finite());
        self.list(KEY, array, "finite numbers", finite)
    }

    fn pre_tokenizer(&self) -> Result<&'a str, LoadError> {
        let name = self.value("pre").map_or(Some(""), |value| value.text());
        name.ok_or_else(|| self.wrong("pre", "one of the names that llama.cpp gives to pre-tokenizers"))
    }

    fn merges(&self) -> Result<Vec<(&'a str, &'a str)>, LoadError> {
        const KEY: &str = "merges";
        let array = match self.value(KEY).and_then(|value| value.array()) {
            // A vocabulary of bytes alone.
            Some(none) if none.is_empty() => return Ok(Vec::new()),
            _ => self.array(KEY, None, MAX_MERGES)?,
        };
        // The first token of a merge is not empty, but may begin with a space.
        let pair = |text: &'a str| {
            let space = text.char_indices().skip(1).find(|(_, c)| *c == ' ')?.0;
            Some((&text[..space], &text[space + 1..]))
        };
        let merges = self.list(KEY, array, "two tokens with a space between them", |value| pair(value.text()?))?;
        let bytes: usize = merges.iter().map(|(left, right)| left.len() + right.len()).sum();
        match bytes > MAX_MERGE_BYTES {
            true => Err(self.setting(KEY, format!("{bytes} bytes of text"), format!("at most {MAX_MERGE_BYTES}"))),
            false => Ok(merges),
        }
    }

    /// The map of characters of a unigram vocabulary; empty if there is none.
    fn character_map(&self) -> Result<Vec<u8>, LoadError> {
        const KEY: &str = "precompiled_charsmap";
        if self.value(KEY).is_none() {
            return Ok(Vec::new());
        }
        let array = match self.value(KEY).and_then(|value| value.array()) {
            Some(none) if none.is_empty() => return Ok(Vec::new()),
            _ => self.array(KEY, None, MAX_MAP_BYTES)?,
        };
        self.list(KEY, array, "bytes", |value| match value {
            Value::Unsigned(byte) => u8::try_from(byte).ok(),
            Value::Signed(byte) => i8::try_from(byte).ok().map(|byte| byte as u8),
            _ => None,
        })
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, LoadError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(_) => Err(self.wrong(key, "true or false")),
        }
    }

    /// A token id below `len`.
    fn id(&self, key: &str, len: usize) -> Result<Option<u32>, LoadError> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let id = value.unsigned().filter(|id| *id < len as u64);
        id.map(|id| Some(id as u32)).ok_or_else(|| self.wrong(key, format!("the id of a token, below {len}")))
    }
}

/// Spells user-defined tokens of several spaces as SentencePiece does, which finds them after it has replaced spaces.
fn spell_spaces(texts: &mut [String], roles: &[Role]) {
    let is_run = |(text, role): (&String, &Role)| {
        *role == Role::UserDefined && text.len() > 1 && text.bytes().all(|byte| byte == b' ')
    };
    let runs: Vec<usize> = (0..texts.len()).filter(|id| is_run((&texts[*id], &roles[*id]))).collect();
    if runs.is_empty() {
        return;
    }
    let known: HashSet<String> = texts.iter().filter(|text| text.starts_with(SPACE)).cloned().collect();
    for id in runs {
        let spelled = SPACE.repeat(texts[id].len());
        if !known.contains(&spelled) {
            texts[id] = spelled;
        }
    }
}

/// Spells the tokens of WordPiece as BERT does: files have a space before those that begin a word, and nothing before others. Returns
/// whether none has an upper letter, so that texts are lowered.
fn spell_words(texts: &mut [String], roles: &[Role]) -> bool {
    let mut is_lower = true;
    for (text, _) in texts.iter_mut().zip(roles).filter(|(_, role)| matches!(role, Role::Normal | Role::UserDefined)) {
        is_lower &= !text.chars().any(char::is_uppercase);
        *text = match text.strip_prefix(SPACE) {
            Some(word) if !word.is_empty() => word.to_string(),
            _ => format!("##{text}"),
        };
    }
    is_lower
}

fn full(key: &str) -> String {
    format!("tokenizer.ggml.{key}")
}
