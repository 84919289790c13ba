//! Which files of a repository a text model needs: a pure function of their names.
//!
//! Files of settings, tokenizer and chat template, and one form of weights: `model.safetensors`, the shards that
//! `model.safetensors.index.json` names, the adapter of a repository without a model, or a GGUF file with all its parts. Nothing else,
//! and never a format that can hold code (`*.bin`, `*.pt`, `*.pth`, pickles).

use std::collections::BTreeSet;

use crate::path::RepoPath;

pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
const ADAPTER: &str = "adapter_model.safetensors";
const CONFIG: &str = "config.json";
const ADAPTER_CONFIG: &str = "adapter_config.json";

const TOKENIZER: &str = "tokenizer.json";

/// Vocabularies in other formats, which are read where a repository has no [`TOKENIZER`].
const VOCABULARIES: [&str; 9] = [
    "tekken.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tiktoken.model",
    "qwen.tiktoken",
    "cl100k_base.tiktoken",
    "vocab.txt",
    "added_tokens.json",
];

/// Files that are downloaded where a repository has them.
const SETTINGS: [&str; 12] = [
    CONFIG,
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "1_Pooling/config.json",
    "quantize_config.json",
    "hf_quant_config.json",
    ADAPTER_CONFIG,
];

/// The weights of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Weights {
    /// One safetensors file.
    Single(RepoPath),
    /// The shards that the index file names.
    Sharded { index: RepoPath },
    /// A GGUF file, or all files of a split one. The first one stands for all.
    Gguf(Vec<RepoPath>),
}

/// Reason why a repository has no weights to load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Unusable {
    /// It has none in a supported format; the names of some files.
    NoWeights(String),
    /// A GGUF file must be named; what there is.
    SeveralGguf(String),
    /// No GGUF file, or not just one, has the wanted name; what there is.
    NoGguf(String),
    /// A part of a split GGUF file is not listed.
    NoPart(String),
    /// A wanted file has a name that cannot be a path in the cache.
    Name(String),
}

/// The files that settings come from, and those which the repository does not have.
pub(crate) fn settings(names: &BTreeSet<&str>) -> (Vec<RepoPath>, Vec<RepoPath>) {
    let vocabularies = VOCABULARIES.into_iter().filter(|_| !names.contains(TOKENIZER));
    let wanted = SETTINGS.into_iter().chain(vocabularies);
    wanted.map(RepoPath::known).partition(|name| names.contains(name.as_str()))
}

/// The weights to load: `gguf` names a GGUF file, or the quantisation that its name contains.
pub(crate) fn weights(names: &BTreeSet<&str>, gguf: Option<&str>) -> Result<Weights, Unusable> {
    let single = |name| Ok(Weights::Single(RepoPath::known(name)));
    match gguf {
        Some(wanted) => return named_gguf(names, wanted),
        None if names.contains(SINGLE) => return single(SINGLE),
        None if names.contains(INDEX) => return Ok(Weights::Sharded { index: RepoPath::known(INDEX) }),
        None if names.contains(ADAPTER_CONFIG) && !names.contains(CONFIG) && names.contains(ADAPTER) => {
            return single(ADAPTER);
        }
        None => {}
    }
    let choices: Vec<&str> = ggufs(names).collect();
    match choices[..] {
        [] => Err(Unusable::NoWeights(listed(
            names.iter().filter(|name| !name.ends_with(".md") && !name.starts_with('.')),
        ))),
        [one] => split_gguf(names, one),
        _ => Err(Unusable::SeveralGguf(listed(&choices))),
    }
}

/// GGUF files that are a language model, or the first file of one.
fn ggufs<'a>(names: &BTreeSet<&'a str>) -> impl Iterator<Item = &'a str> {
    let is_model = |name: &str| {
        let file = name.rsplit('/').next().unwrap_or(name);
        let is_first = Split::of(name).is_none_or(|split| split.number == 1);
        // Vision towers and importance matrices.
        name.ends_with(".gguf") && is_first && !file.starts_with("mmproj") && !file.contains("imatrix")
    };
    names.iter().copied().filter(move |name| is_model(name))
}

fn named_gguf(names: &BTreeSet<&str>, wanted: &str) -> Result<Weights, Unusable> {
    let all = || Unusable::NoGguf(listed(ggufs(names)));
    if wanted.ends_with(".gguf") {
        return if names.contains(wanted) { split_gguf(names, wanted) } else { Err(all()) };
    }
    let matching: Vec<&str> = ggufs(names).filter(|name| has_tag(name, wanted)).collect();
    match matching[..] {
        [one] => split_gguf(names, one),
        [] => Err(all()),
        _ => Err(Unusable::SeveralGguf(listed(&matching))),
    }
}

/// Whether a file name contains a quantisation such as `Q4_K_M` between its ends and the characters `-` and `.`.
fn has_tag(name: &str, tag: &str) -> bool {
    let (name, tag) = (name.to_ascii_lowercase(), tag.to_ascii_lowercase());
    let is_edge = |c: Option<char>| c.is_none_or(|c| matches!(c, '-' | '.' | '/'));
    name.match_indices(&tag).any(|(start, found)| {
        let (before, after) = (&name[..start], &name[start + found.len()..]);
        is_edge(before.chars().next_back()) && is_edge(after.chars().next())
    })
}

/// The place of a file in a split one: `STEM-00001-of-00003.gguf`.
struct Split<'a> {
    stem: &'a str,
    number: usize,
    count: usize,
}

impl<'a> Split<'a> {
    fn of(name: &'a str) -> Option<Split<'a>> {
        let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let digits =
            |text: &str| text.parse().ok().filter(|_| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit()));
        Some(Split { stem, number: digits(number)?, count: digits(count)? })
    }
}

/// The file `name`, and the other parts if it is one of several.
fn split_gguf(names: &BTreeSet<&str>, name: &str) -> Result<Weights, Unusable> {
    // Checked first: the names of parts are as long as this one, and there may be many.
    let path = RepoPath::parse(name).ok_or_else(|| Unusable::Name(name.to_string()))?;
    let Some(Split { stem, count, .. }) = Split::of(name) else { return Ok(Weights::Gguf(vec![path])) };
    let parts = (1..=count).map(|number| {
        let part = format!("{stem}-{number:05}-of-{count:05}.gguf");
        let listed = names.contains(part.as_str()).then(|| RepoPath::parse(&part)).flatten();
        listed.ok_or(Unusable::NoPart(part))
    });
    parts.collect::<Result<_, _>>().map(Weights::Gguf)
}

/// The first names of a list.
fn listed(names: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    const MAX: usize = 12;
    let mut names = names.into_iter();
    let first: Vec<String> = names.by_ref().take(MAX).map(|name| crate::error::shown(name.as_ref())).collect();
    let rest = names.count();
    match (first.is_empty(), rest) {
        (true, _) => "none".to_string(),
        (false, 0) => first.join(", "),
        (false, _) => format!("{} and {rest} more", first.join(", ")),
    }
}
