//! Readers of tiktoken files and of `tekken.json`: tokens are bytes with ranks, and the lowest rank is joined first.
//!
//! A tiktoken file has a line `BASE64 RANK` for each token. How texts are split, and the special tokens, are in the code of its
//! tokenizer: [`KNOWN`] has what is published. A `tekken.json` says both itself.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::Value;

use super::bytes::char_of;
use super::model::AnyModel;
use super::scored::{Entry, Missing, Scored};
use super::splits::{self, PreTokenizer, Split};
use super::stated::{Around, Stated, Table};
use super::steps::{self, Parts};
use crate::error::LoadError;

/// Greatest rank: scores are float32, which are exact up to here.
const MOST_RANKS: usize = 1 << 20;

/// A published tokenizer.
struct Known {
    /// Its class in `tokenizer_config.json`.
    class: &'static str,
    /// Files that only this one has.
    file: &'static str,
    /// Number of its ranks: it may lack a class.
    ranks: usize,
    /// Name of the pre-tokenizer.
    splits: &'static str,
    /// Its special tokens, from this id on or from the end of the ranks. `*` stands for numbers from the first to the second on.
    special: &'static [(Option<u32>, &'static str, u32, u32)],
    /// Special tokens in front of texts.
    before: &'static [&'static str],
}

/// A token without numbers, behind the one before it.
const fn next(text: &'static str) -> (Option<u32>, &'static str, u32, u32) {
    (None, text, 0, 1)
}

const KNOWN: [Known; 6] = [
    Known {
        class: "QWenTokenizer",
        file: "qwen.tiktoken",
        ranks: 151643,
        splits: "qwen2",
        special: &[next("<|endoftext|>"), next("<|im_start|>"), next("<|im_end|>"), (None, "<|extra_*|>", 0, 205)],
        before: &[],
    },
    Known {
        class: "Phi3SmallTokenizer",
        file: "cl100k_base.tiktoken",
        ranks: 100256,
        splits: "cl100k",
        special: &[
            (Some(100256), "<|dummy_id_2|>", 0, 1),
            next("<|endoftext|>"),
            next("<|fim_prefix|>"),
            next("<|fim_middle|>"),
            next("<|fim_suffix|>"),
            next("<|system|>"),
            next("<|user|>"),
            next("<|assistant|>"),
            next("<|dummy_id_0|>"),
            next("<|dummy_id_1|>"),
            next("<|end|>"),
            (None, "<|dummy_id_*|>", 3, 12),
            next("<|endofprompt|>"),
            (None, "<|dummy_id_*|>", 12, 87),
        ],
        before: &[],
    },
    Known {
        class: "ChatGLM4Tokenizer",
        file: "",
        ranks: 151329,
        splits: "glm4",
        special: &[
            next("<|endoftext|>"),
            next("[MASK]"),
            next("[gMASK]"),
            next("[sMASK]"),
            next("<sop>"),
            next("<eop>"),
            next("<|system|>"),
            next("<|user|>"),
            next("<|assistant|>"),
            next("<|observation|>"),
            next("<|begin_of_image|>"),
            next("<|end_of_image|>"),
            next("<|begin_of_video|>"),
            next("<|end_of_video|>"),
        ],
        before: &["[gMASK]", "<sop>"],
    },
    // Their special tokens are in `tokenizer_config.json`.
    Known {
        class: "TikTokenTokenizer",
        file: "tiktoken.model",
        ranks: 163584,
        splits: "kimi-k2",
        special: &[],
        before: &[],
    },
    Known { class: "", file: "", ranks: 128000, splits: "llama-bpe", special: &[], before: &["<|begin_of_text|>"] },
    Known { class: "", file: "", ranks: 200000, splits: "llama4", special: &[], before: &["<|begin_of_text|>"] },
];

/// Builds the tokenizer of a tiktoken file, of which `name` is the name without folders.
///
/// # Errors
/// A line is broken, a rank occurs twice, the bytes are not complete, or the tokenizer is unknown.
pub(super) fn read(file: &str, name: &str, text: &[u8], stated: &Stated) -> Result<Parts, LoadError> {
    let wrong = |found: String, expected: &str| LoadError::file(file.to_string(), format!("found {found}"), expected);
    let mut ranks: Vec<Option<Vec<u8>>> = Vec::new();
    for (number, line) in text.split(|byte| *byte == b'\n').enumerate() {
        let line = line.trim_ascii();
        if line.is_empty() {
            continue;
        }
        let mut words = line.split(|byte| *byte == b' ');
        let token = words.next().and_then(|word| STANDARD.decode(word).ok());
        let rank = words.next().and_then(|word| std::str::from_utf8(word).ok()?.parse::<usize>().ok());
        let (token, rank) = token.zip(rank).filter(|(_, rank)| *rank < MOST_RANKS).ok_or_else(|| {
            wrong(format!("line {} that is no token", number + 1), "base64, a space, and a rank below 1048576")
        })?;
        if rank >= ranks.len() {
            ranks.resize(rank + 1, None);
        }
        if ranks[rank].replace(token).is_some() {
            return Err(wrong(format!("the rank {rank} twice, again in line {}", number + 1), "ranks that differ"));
        }
    }
    let find = |is_it: &dyn Fn(&Known) -> bool| KNOWN.iter().find(|known| is_it(known));
    let known = find(&|known| known.class == stated.class && !known.class.is_empty())
        .or_else(|| find(&|known| known.file == name))
        .or_else(|| find(&|known| known.ranks == ranks.len()));
    let known = known.ok_or_else(|| {
        let classes = KNOWN.map(|known| known.class).into_iter().filter(|class| !class.is_empty());
        let expected = format!("`tokenizer_class` one of {}", classes.collect::<Vec<_>>().join(", "));
        wrong(format!("{} ranks of an unknown tokenizer", ranks.len()), &expected)
    })?;
    let mut table = Table::new(file);
    fill(&mut table, ranks)?;
    for (id, text, first, end) in known.special {
        for number in *first..*end {
            table.add_special(*id, &text.replace('*', &number.to_string()))?;
        }
    }
    table.extend(stated)?;
    let PreTokenizer { splits, nfc, .. } = splits::find(known.splits).unwrap_or(&splits::BASE);
    let around = Around { before: known.before, after: "", adds: (!known.before.is_empty(), false) };
    Ok(parts(table.around(stated, around)?, table, splits, *nfc))
}

/// A token of `tekken.json`.
#[derive(Deserialize)]
struct Ranked {
    rank: usize,
    token_bytes: String,
}

#[derive(Deserialize)]
struct Special {
    rank: usize,
    token_str: String,
}

#[derive(Deserialize)]
struct Config {
    pattern: String,
    default_vocab_size: usize,
    default_num_special_tokens: usize,
}

#[derive(Deserialize)]
struct Tekken {
    config: Config,
    vocab: Vec<Ranked>,
    special_tokens: Option<Vec<Special>>,
}

/// The special tokens of files that do not list theirs.
const TEKKEN_SPECIAL: [&str; 20] = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
];

/// Builds the tokenizer of a `tekken.json`.
///
/// # Errors
/// The file is broken, a rank occurs twice, or the bytes are not complete.
pub(super) fn read_tekken(file: &str, json: &[u8], stated: &Stated) -> Result<Parts, LoadError> {
    let wrong = |found: String, expected: &str| LoadError::file(file.to_string(), format!("found {found}"), expected);
    let tekken: Tekken = serde_json::from_slice(json).map_err(|error| LoadError::json(file.to_string(), error))?;
    let Config { pattern, default_vocab_size, default_num_special_tokens: special } = tekken.config;
    let used = default_vocab_size.checked_sub(special).filter(|used| *used <= MOST_RANKS && special <= MOST_RANKS);
    let used = used.ok_or_else(|| {
        wrong(format!("{special} special tokens of {default_vocab_size}"), "fewer special tokens than tokens")
    })?;
    let mut names: Vec<Option<String>> = vec![None; special];
    let listed = tekken.special_tokens.map(|all| all.into_iter().map(|one| (one.rank, one.token_str)).collect());
    let fixed = || TEKKEN_SPECIAL.iter().map(|text| text.to_string()).enumerate().collect();
    let listed: Vec<(usize, String)> = listed.unwrap_or_else(fixed);
    for (rank, text) in listed {
        let place = names.get_mut(rank);
        if place.is_none_or(|place| place.replace(text).is_some()) {
            return Err(wrong(format!("the special token {rank} twice or above {special}"), "ranks that differ"));
        }
    }
    let mut ranks: Vec<Option<Vec<u8>>> = vec![None; used.min(tekken.vocab.len())];
    for Ranked { rank, token_bytes } in tekken.vocab {
        // The file has more tokens than the model.
        let Some(place) = ranks.get_mut(rank) else { continue };
        let token = STANDARD.decode(&token_bytes);
        let token = token.map_err(|_| wrong(format!("the token {rank} that is no base64"), "base64"))?;
        if place.replace(token).is_some() {
            return Err(wrong(format!("the rank {rank} twice"), "ranks that differ"));
        }
    }
    let names = (0..).zip(names).map(|(rank, name): (usize, _)| name.unwrap_or_else(|| format!("<SPECIAL_{rank}>")));
    let mut table = Table::new(file);
    for name in names {
        table.push(&name, Entry::Named, true)?;
    }
    fill(&mut table, ranks)?;
    table.extend(stated)?;
    let around = table.around(stated, Around { before: &["<s>"], after: "</s>", adds: (true, false) })?;
    Ok(parts(around, table, &[Split::Regex(pattern.as_str())], false))
}

/// Adds the tokens in the order of their ranks. All bytes must be tokens, so that every text has some.
fn fill(table: &mut Table<'_>, ranks: Vec<Option<Vec<u8>>>) -> Result<(), LoadError> {
    let spelled = |bytes: &[u8]| bytes.iter().map(|byte| char_of(*byte)).collect::<String>();
    for (rank, token) in ranks.into_iter().enumerate() {
        match token {
            Some(token) => table.push(&spelled(&token), Entry::Scored(-(rank as f32)), false)?,
            None => table.push_hole(),
        }
    }
    match (0..=u8::MAX).find(|byte| table.id(&spelled(&[*byte])).is_none()) {
        Some(byte) => Err(table.wrong(format!("no token for the byte {byte}"), "all 256 bytes".to_string())),
        None => Ok(()),
    }
}

fn parts<T: AsRef<str>>(around: Value, table: Table<'_>, splits: &[Split<T>], nfc: bool) -> Parts {
    let (tokens, added) = table.finish();
    let model = AnyModel::Scored(Scored::bpe(tokens, Missing::Bytes(None), None).with_whole_texts());
    Parts { model, steps: steps::byte_level(splits, nfc), added, around }
}
