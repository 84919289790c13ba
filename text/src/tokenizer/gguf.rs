//! The tokenizer of a GGUF file: the steps of the `tokenizer.json` from which its vocabulary was converted. The crate `models` reads
//! and checks the vocabulary, and serialises it.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl,
};

use super::model::{AnyModel, Pipeline};
use super::sentencepiece::{SPACE, SentencePiece};
use super::splits::{self, PreTokenizer, Split};
use crate::error::{LoadError, one_line};

/// What a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum Role {
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
#[derive(Deserialize)]
enum Kind {
    /// Byte-level BPE.
    ByteLevel {
        /// Name of the [`PreTokenizer`].
        pre_tokenizer: String,
        /// Pairs of tokens to join, most important first.
        merges: Vec<(String, String)>,
    },
    /// SentencePiece BPE.
    SentencePiece {
        /// A finite number per token; of two possible joins, that with the higher score comes first.
        scores: Vec<f32>,
        /// Whether a space is put before texts, at the start and after special tokens.
        space_prefix: bool,
        /// Whether white space after a special token belongs to it.
        strip_after_special: bool,
    },
}

/// The vocabulary of a GGUF file, as `models` serialises it.
#[derive(Deserialize)]
pub(super) struct Vocabulary {
    /// The file, for messages.
    pub file: String,
    kind: Kind,
    /// Texts by id: different from each other and not empty.
    texts: Vec<String>,
    roles: Vec<Role>,
    /// Special tokens, each an id of the vocabulary.
    bos: Option<u32>,
    eos: Option<u32>,
    unknown: Option<u32>,
    /// Whether texts begin with `bos`, if the file says so.
    add_bos: Option<bool>,
    /// Whether texts end with `eos`.
    add_eos: bool,
}

impl Vocabulary {
    /// A special token and its text.
    fn token(&self, id: Option<u32>) -> Option<(u32, &str)> {
        let id = id?;
        Some((id, self.texts.get(id as usize)?))
    }

    /// Texts and roles of the tokens that are found in texts before anything else.
    fn added(&self) -> impl Iterator<Item = (&str, Role)> {
        let tokens = self.texts.iter().map(String::as_str).zip(self.roles.iter().copied());
        tokens.filter(|(_, role)| matches!(role, Role::Special | Role::UserDefined))
    }
}

/// The steps around the model, as `tokenizer.json` has them.
struct Steps {
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
}

/// Builds the tokenizer of a vocabulary.
///
/// # Errors
/// The pre-tokenizer is unknown, or a merge names a token that the vocabulary does not have.
pub(super) fn build(vocabulary: Vocabulary) -> Result<Pipeline, LoadError> {
    let wrong = |key: &str, found: String, expected: String| LoadError::Setting {
        file: vocabulary.file.clone(),
        key: format!("tokenizer.ggml.{key}"),
        found,
        expected,
    };
    let pre_tokenizer = match &vocabulary.kind {
        Kind::ByteLevel { pre_tokenizer: name, .. } => {
            let known = splits::find(name);
            Some(known.ok_or_else(|| wrong("pre", format!("{name:?}"), format!("one of {}", splits::names())))?)
        }
        Kind::SentencePiece { .. } => None,
    };
    let unusable = "merges of tokens of its vocabulary: use another conversion of the model";
    assemble(&vocabulary, pre_tokenizer)
        .map_err(|error| wrong("merges", format!("not usable ({})", one_line(error)), unusable.to_string()))
}

fn assemble(vocabulary: &Vocabulary, known: Option<&PreTokenizer>) -> Result<Pipeline, tokenizers::Error> {
    let tokens = vocabulary.texts.iter().zip(&vocabulary.roles);
    let texts = tokens.map(|(text, role)| (*role != Role::Unused).then(|| text.clone()));
    let PreTokenizer { splits, nfc, ignore_merges, add_bos, .. } = known.unwrap_or(&splits::BASE);
    let (model, steps, strip, add_bos) = match &vocabulary.kind {
        Kind::ByteLevel { merges, .. } => {
            let vocab: Vocab = texts.zip(0..).filter_map(|(text, id)| Some((text?, id))).collect();
            let model = BPE::builder().vocab_and_merges(vocab, merges.clone()).ignore_merges(*ignore_merges);
            (AnyModel::Library(model.build()?.into()), byte_level(splits, *nfc), false, *add_bos)
        }
        Kind::SentencePiece { scores, space_prefix, strip_after_special } => {
            let is_run = |text: &str| text.chars().count() > 1 && text.chars().all(|c| c == SPACE);
            let runs = vocabulary.added().map(|(text, _)| text).filter(|text| is_run(text)).map(str::len).collect();
            let model = SentencePiece::new(texts.collect(), scores.clone(), vocabulary.unknown, runs);
            (AnyModel::SentencePiece(model), sentence_piece(*space_prefix), *strip_after_special, true)
        }
    };
    let mut tokenizer: Pipeline = TokenizerImpl::new(model);
    tokenizer.with_normalizer(parse::<NormalizerWrapper>(steps.normalizer)?)?;
    tokenizer.with_pre_tokenizer(parse::<PreTokenizerWrapper>(steps.pre_tokenizer)?);
    tokenizer.with_decoder(parse::<DecoderWrapper>(steps.decoder)?);
    let token = |id: Option<u32>, added: bool| vocabulary.token(id).filter(|_| added);
    let (add_bos, add_eos) = (vocabulary.add_bos.unwrap_or(add_bos), vocabulary.add_eos);
    let around = around(token(vocabulary.bos, add_bos), token(vocabulary.eos, add_eos));
    tokenizer.with_post_processor(parse::<PostProcessorWrapper>(around)?);
    let added = vocabulary.added().map(|(text, role)| {
        let strips = strip && !["<unk>", "<s>", "<|endoftext|>"].contains(&text);
        AddedToken::from(text, role == Role::Special).normalized(false).rstrip(strips)
    });
    tokenizer.add_tokens(added)?;
    Ok(tokenizer)
}

/// A step of the library from its JSON; `None` for `null`.
fn parse<T: DeserializeOwned>(step: Value) -> Result<Option<T>, tokenizers::Error> {
    Ok(serde_json::from_value(step)?)
}

fn byte_level(splits: &[Split], nfc: bool) -> Steps {
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let split = |split: &Split| match split {
        Split::Regex(regex) => {
            json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})
        }
        Split::Digits => json!({"type": "Digits", "individual_digits": true}),
    };
    let steps: Vec<Value> = splits.iter().map(split).chain([level.clone()]).collect();
    Steps {
        normalizer: if nfc { json!({"type": "NFC"}) } else { Value::Null },
        pre_tokenizer: json!({"type": "Sequence", "pretokenizers": steps}),
        decoder: level,
    }
}

fn sentence_piece(space_prefix: bool) -> Steps {
    let mut normalizers = vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})];
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if space_prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": SPACE}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    Steps {
        normalizer: json!({"type": "Sequence", "normalizers": normalizers}),
        pre_tokenizer: Value::Null,
        decoder: json!({"type": "Sequence", "decoders": decoders}),
    }
}

/// The step that puts these special tokens around every text.
pub(super) fn around(before: Option<(u32, &str)>, after: Option<(u32, &str)>) -> Value {
    let special = |(_, text): (u32, &str)| json!({"SpecialToken": {"id": text, "type_id": 0}});
    let sequence = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let template = |sequences: &[&str]| {
        let texts = sequences.iter().map(|id| sequence(id));
        before.map(special).into_iter().chain(texts).chain(after.map(special)).collect::<Vec<_>>()
    };
    let tokens = before.iter().chain(&after);
    let tokens = tokens.map(|(id, text)| (text.to_string(), json!({"id": text, "ids": [id], "tokens": [text]})));
    json!({
        "type": "TemplateProcessing",
        "single": template(&["A"]),
        "pair": template(&["A", "B"]),
        "special_tokens": tokens.collect::<serde_json::Map<_, _>>(),
    })
}

#[cfg(test)]
mod tests {
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    use super::super::pieces::{Pieces, Rest};
    use super::*;

    const TEXT: &str = "I'LL it's  DeVoid 12345½ x=`y`+1;/\n\n \t(Été q\u{301} हिन्दी)你好ですA. 한국…\r\n  end ";

    /// Pieces of the text, with dots between them: computed with Python's `regex` and the expressions in llama.cpp.
    const PIECES: &[(&[&str], &str)] = &[
        (
            &["llama-bpe", "dbrx", "minicpm5"],
            "I·'LL· it·'s· · DeVoid· ·123·45½· x·=`·y·`+·1·;/\n\n· ·\t·(Été· q·\u{301}· ह·िन·्द·ी)·你好ですA·.· 한국·…\r\n· · end· ",
        ),
        (
            &["qwen2", "deepseek-r1-qwen", "bailingmoe"],
            "I·'LL· it·'s· · DeVoid· ·1·2·3·4·5·½· x·=`·y·`+·1·;/\n\n· ·\t·(Été· q·\u{301}· ह·िन·्द·ी)·你好ですA·.· 한국·…\r\n· · end· ",
        ),
        (
            &["qwen35"],
            "I·'LL· it·'s· · DeVoid· ·1·2·3·4·5·½· x·=`·y·`+·1·;/\n\n· ·\t·(Été· q\u{301}· हिन्दी·)你好ですA·.· 한국·…\r\n· · end· ",
        ),
        (
            &["gpt-2", "mpt"],
            "I·'·LL· it·'s· · DeVoid· 12345½· x·=`·y·`+·1·;/·\n\n ·\t·(·Été· q·\u{301}· ह·ि·न·्·द·ी)·你好ですA·.· 한국·…·\r\n · end· ",
        ),
        (
            &["starcoder", "command-r"],
            "I·'·LL· it·'s· · DeVoid· ·1·2·3·4·5·½· x·=`·y·`+·1·;/·\n\n ·\t·(·Été· q·\u{301}· ह·ि·न·्·द·ी)·你好ですA·.· 한국·…·\r\n · end· ",
        ),
        (
            &["gpt-4o"],
            "I'LL· it's· · De·Void· ·123·45½· x·=`·y·`+·1·;/\n\n· ·\t·(Été· q\u{301}· हिन्दी·)你好です·A·.· 한국·…\r\n· · end· ",
        ),
        (
            &["tekken"],
            "I·'LL· it·'s· · De·Void· ·1·2·3·4·5·½· x·=`·y·`+·1·;/\n\n· ·\t·(Été· q\u{301}· हिन्दी·)你好です·A·.· 한국·…\r\n· · end· ",
        ),
        (
            &["kimi-k2"],
            "I'LL· it's· · De·Void· ·123·45½· x·=`·y·`+·1·;/\n\n· ·\t·(Été· q\u{301}· हिन्दी·)·你好·です·A·.· 한국·…\r\n· · end· ",
        ),
        (
            &["deepseek-v3"],
            "I·'LL· it·'s· · DeVoid· ·123·45½· x·=`·y·`+·1·;/\n\n· ·\t·(·Été· q\u{301}· हिन्दी·)·你好です·A·.· 한국·…\r\n· · end· ",
        ),
        (
            &["deepseek-llm"],
            "I·'·LL· it·'·s· · DeVoid· ·12345½· x·=`·y·`+·1·;/·\n·\n· ·\t(·É·t·é· q·\u{301} ·हिन्दी·)·你好です·A·.· ·한국…·\r·\n· · end· ",
        ),
        (
            &["deepseek-coder"],
            "I·'·LL· it·'·s· · DeVoid· ·1·2·3·4·5·½· x·=`·y·`+·1·;/·\n·\n· ·\t(·Été· q·\u{301}· ·ह·ि·न·्·द·ी·)·你好です·A·.· ·한국·…·\r·\n· · end· ",
        ),
        (
            &["falcon"],
            "I·'·LL· it·'·s· · DeVoid· ·123·45½· x·=`·y·`+·1·;/·\n\n \t·(·Été· q·\u{301}· ह·ि·न·्·द·ी·)·你好ですA·.· 한국·…·\r\n · end· ",
        ),
        (
            &["bloom"],
            "I'LL· it's· · DeVoid· 12345½· x=`y`+1;/·\n\n \t(·Été· q\u{301}· हिन्दी·)·你好ですA·.· 한국·…\r\n · end· ",
        ),
        (
            &["viking"],
            "I'LL· it's· · DeVoid· ·1·2·3·4·5·½· x=`y`+·1·;/·\n\n \t(·Été· q\u{301}· हिन्दी·)·你好ですA·.· 한국·…\r\n · end· ",
        ),
        (
            &["seed-coder"],
            "I·'LL· it·'s· · DeVoid· ·1·2·3·4·5·½· x·=`·y·`+·1·;/·\n\n· ·\t·(Été· q·\u{301}· ह·िन·्द·ी)·你好ですA·.· 한국·…·\r\n· · end· ",
        ),
        (
            &["default"],
            "I·'·LL· it·'·s· · DeVoid· ·123·45½· x·=·`·y·`·+·1·;/·\n\n \t·(·Été· q·\u{301}· ह·ि·न·्·द·ी·)·你好ですA·.· 한국·…·\r\n · end· ",
        ),
    ];

    fn pieces(name: &str) -> Vec<String> {
        let splits = splits::find(name).unwrap().splits;
        let steps = byte_level(splits, false);
        let pre_tokenizer: PreTokenizerWrapper = parse(steps.pre_tokenizer).unwrap().unwrap();
        let mut text = PreTokenizedString::from(TEXT);
        pre_tokenizer.pre_tokenize(&mut text).unwrap();
        let splits = text.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.into_iter().map(|(_, (start, end), _)| TEXT[start..end].to_string()).collect()
    }

    #[test]
    fn every_pre_tokenizer_splits_as_llama_cpp_does() {
        for (names, want) in PIECES {
            for name in *names {
                assert_eq!(pieces(name), want.split('·').collect::<Vec<_>>(), "{name}");
            }
        }
    }

    #[test]
    fn every_name_of_a_pre_tokenizer_splits_without_loss() {
        for name in splits::names().split(", ").chain([""]) {
            assert_eq!(pieces(name).concat(), TEXT, "{name}");
        }
    }

    /// A text of words, runs, other scripts, white space and added tokens.
    fn text(seed: u64, bytes: usize) -> String {
        const PARTS: [&str; 32] = [
            "the",
            " the",
            " quick",
            "brown ",
            "\n",
            "\r\n\n",
            "   ",
            " ",
            "\t",
            "it's",
            "1234567",
            " 42",
            "é",
            "e\u{301}",
            "\u{301}",
            "世界",
            "你好。",
            "🦀",
            "<|im_end|>",
            "<tool>",
            "<s>",
            " <s>  ",
            "!?",
            "…",
            "WE'LL",
            "AbC",
            "\u{a0}",
            "▁",
            "▁▁",
            "हिन्दी",
            "한국",
            "{\"a\": [1, 2]}",
        ];
        let (mut state, mut text) = (seed, String::new());
        while text.len() < bytes {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let draw = (state >> 33) as usize;
            // Now and then a run that is longer than a window.
            let times = if draw.is_multiple_of(211) { 250 } else { 1 };
            text += &PARTS[draw / 211 % PARTS.len()].repeat(times);
        }
        text
    }

    /// Compares texts in pieces with the same texts as a whole. Returns the number of pieces.
    fn check_pieces(tokenizer: &Pipeline, name: &str) -> usize {
        let pieces = Pieces::of(tokenizer).unwrap_or_else(|| panic!("{name} is not cut"));
        let mut count = 0;
        for seed in 0..2 {
            let text = text(seed, 8_000);
            let (mut ids, mut rest) = (Vec::new(), Rest::new(&text));
            while let Some(later) = pieces.encode_next(tokenizer, rest, usize::MAX, &mut ids).unwrap() {
                rest = later;
                count += 1;
            }
            ids.extend(pieces.encode_rest(tokenizer, rest).unwrap());
            let want = tokenizer.encode_fast(text.as_str(), false).unwrap();
            let differs = ids.iter().zip(want.get_ids()).position(|(a, b)| a != b);
            assert!(ids == want.get_ids(), "{name}, seed {seed}: from token {differs:?} on");
        }
        count
    }

    #[test]
    fn every_pre_tokenizer_gives_the_ids_of_the_whole_text_in_pieces() {
        let bytes = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
        let merges = [
            ("Ġ", "t"),
            ("t", "h"),
            ("th", "e"),
            ("Ġt", "h"),
            ("Ġth", "e"),
            ("Ċ", "Ċ"),
            ("1", "2"),
            ("Ġ", "Ġ"),
            ("ä", "¸"),
        ];
        let mut tokens: Vec<String> = bytes.iter().map(|byte| byte.to_string()).collect();
        tokens.sort();
        tokens.extend(merges.map(|(left, right)| format!("{left}{right}")));
        let mut seen = std::collections::HashSet::new();
        for name in splits::names().split(", ").chain([""]) {
            let known = splits::find(name).unwrap();
            if !seen.insert((format!("{:?}", known.splits.as_ptr()), known.nfc)) {
                continue;
            }
            let vocab: Vocab = tokens.iter().zip(0..).map(|(token, id)| (token.clone(), id)).collect();
            let model = BPE::builder().vocab_and_merges(vocab, merges.map(|(a, b)| (a.into(), b.into())).to_vec());
            let mut tokenizer: Pipeline = TokenizerImpl::new(AnyModel::Library(model.build().unwrap().into()));
            let steps = byte_level(known.splits, known.nfc);
            tokenizer.with_normalizer(parse::<NormalizerWrapper>(steps.normalizer).unwrap()).unwrap();
            tokenizer.with_pre_tokenizer(parse::<PreTokenizerWrapper>(steps.pre_tokenizer).unwrap());
            let added = ["<|im_end|>", "<tool>", "<s>"].map(|text| AddedToken::from(text, true).rstrip(text == "<s>"));
            tokenizer.add_tokens(added).unwrap();
            let count = check_pieces(&tokenizer, name);
            assert!(count > 6, "{name}: {count} pieces");
        }
        assert!(seen.len() > 15, "{}", seen.len());
    }

    #[test]
    fn sentence_piece_gives_the_ids_of_the_whole_text_in_pieces() {
        let words = ["▁", "t", "h", "e", "▁t", "he", "▁the", "1", "2", "12", "世", "界", "世界", "\n", "b", "ab"];
        let bytes: Vec<String> = (0..=u8::MAX).map(|byte| format!("<0x{byte:02X}>")).collect();
        let runs: Vec<String> = (2..6).map(|count| "▁".repeat(count)).collect();
        for (space_prefix, has_bytes, has_runs) in
            [(false, true, true), (true, true, false), (true, false, true), (false, false, false)]
        {
            let mut texts: Vec<String> = words.map(String::from).to_vec();
            texts.push("<unk>".to_string());
            texts.extend(has_bytes.then_some(&bytes).into_iter().flatten().cloned());
            let lengths = runs.iter().filter(|_| has_runs).map(String::len).collect();
            texts.extend(runs.iter().filter(|_| has_runs).cloned());
            let scores = (0..texts.len()).map(|id| -((id % 5) as f32)).collect();
            let texts = texts.into_iter().map(Some).collect();
            let model = SentencePiece::new(texts, scores, Some(words.len() as u32), lengths);
            let mut tokenizer: Pipeline = TokenizerImpl::new(AnyModel::SentencePiece(model));
            let steps = sentence_piece(space_prefix);
            tokenizer.with_normalizer(parse::<NormalizerWrapper>(steps.normalizer).unwrap()).unwrap();
            let added = ["<|im_end|>", "<tool>", "<s>"].map(|text| {
                AddedToken::from(text, true).normalized(false).rstrip(text == "<s>").lstrip(text == "<tool>")
            });
            tokenizer.add_tokens(added).unwrap();
            let name = format!("prefix {space_prefix}, bytes {has_bytes}, runs {has_runs}");
            let count = check_pieces(&tokenizer, &name);
            assert!(count > 6, "{name}: {count} pieces");
        }
    }
}
