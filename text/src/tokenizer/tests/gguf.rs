//! The tokenizers of GGUF files: how texts are split, and cut in pieces.
#![cfg(test)]

use tokenizers::{
    NormalizerWrapper, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, PreTokenizerWrapper,
    TokenizerImpl,
};

use super::super::parse;
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
        &["afmoe"],
        "I·'LL· it·'s· · DeVoid· ·123·45½· x·=`·y·`+·1·;/\n\n· ·\t·(·Été· q\u{301}· हिन्दी·)·你好です·A·.· ·한국·…\r\n· · end· ",
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

fn pieces(name: &str, whole: &str) -> Vec<String> {
    let splits = splits::find(name).unwrap().splits;
    let steps = steps::byte_level(splits, false);
    let pre_tokenizer: PreTokenizerWrapper = parse(&steps.pre_tokenizer).unwrap();
    let mut text = PreTokenizedString::from(whole);
    pre_tokenizer.pre_tokenize(&mut text).unwrap();
    let splits = text.get_splits(OffsetReferential::Original, OffsetType::Byte);
    splits.into_iter().map(|(_, (start, end), _)| whole[start..end].to_string()).collect()
}

#[test]
fn every_pre_tokenizer_splits_as_llama_cpp_does() {
    for (names, want) in PIECES {
        for name in *names {
            assert_eq!(pieces(name, TEXT), want.split('·').collect::<Vec<_>>(), "{name}");
        }
    }
}

#[test]
fn digits_of_afmoe_are_grouped_from_the_end() {
    let text = "1 12 123 1234 12345 123456 1234567 ๑๒๓๔ 12๓๔ไทย5";
    let want = "1· ·12· ·123· ·1·234· ·12·345· ·123·456· ·1·234·567· ·๑·๒๓๔· ·1·2·๓๔·ไ·ทย·5";
    assert_eq!(pieces("afmoe", text).join("·"), want);
    // The cost of a long run is linear.
    let run = "1234567890".repeat(20_000);
    assert_eq!(pieces("afmoe", &run).iter().map(String::len).max(), Some(3));
}

#[test]
fn every_name_of_a_pre_tokenizer_splits_without_loss() {
    for name in splits::names().split(", ").chain([""]) {
        assert_eq!(pieces(name, TEXT).concat(), TEXT, "{name}");
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
        let steps = steps::byte_level(known.splits, known.nfc);
        tokenizer.with_normalizer(parse::<Option<NormalizerWrapper>>(&steps.normalizer).unwrap()).unwrap();
        tokenizer.with_pre_tokenizer(parse::<Option<PreTokenizerWrapper>>(&steps.pre_tokenizer).unwrap());
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
        let entries = texts.into_iter().enumerate().map(|(id, text)| Some((text, Entry::Scored(-((id % 5) as f32)))));
        let whole = runs.iter().filter(|_| has_runs).map(|run| Some((run.clone(), Entry::Whole)));
        let model = Scored::bpe(entries.chain(whole).collect(), Missing::Bytes(Some(words.len() as u32)), None);
        let mut tokenizer: Pipeline = TokenizerImpl::new(AnyModel::Scored(model));
        let steps = steps::sentence_piece(Some(space_prefix), true);
        tokenizer.with_normalizer(parse::<Option<NormalizerWrapper>>(&steps.normalizer).unwrap()).unwrap();
        let added = ["<|im_end|>", "<tool>", "<s>"]
            .map(|text| AddedToken::from(text, true).normalized(false).rstrip(text == "<s>").lstrip(text == "<tool>"));
        tokenizer.add_tokens(added).unwrap();
        let name = format!("prefix {space_prefix}, bytes {has_bytes}, runs {has_runs}");
        let count = check_pieces(&tokenizer, &name);
        assert!(count > 6, "{name}: {count} pieces");
    }
}
