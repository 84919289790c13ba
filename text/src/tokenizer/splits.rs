//! The pre-tokenizers of byte-level BPE that GGUF files name: how a text is split before the merges.
//!
//! The names are those of llama.cpp; the expressions are those of the `tokenizer.json` files that its converter recognises, which
//! differ from llama.cpp's own only in how they are written. An unknown name is an error: a text split in another way has other
//! tokens, and the model's output degrades without a sign.

/// One step before the merges. Each applies to the pieces of the steps before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Split<T = &'static str> {
    /// Every match becomes a piece, and so does the text between two matches.
    Regex(T),
    /// Every character with a numeric value becomes a piece.
    Digits,
}

/// A pre-tokenizer.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    /// Values of `tokenizer.ggml.pre`.
    pub names: &'static [&'static str],
    /// The steps in order.
    pub splits: &'static [Split],
    /// A piece that is in the vocabulary becomes one token, even if no merges lead to it.
    pub ignore_merges: bool,
    /// Whether texts begin with the beginning-of-sequence token if the file does not say.
    pub add_bos: bool,
    /// Whether texts are normalized to NFC first. The files do not say; the tokenizers that they were converted from do.
    pub nfc: bool,
}

/// A pre-tokenizer of no name and no step.
pub(super) const BASE: PreTokenizer =
    PreTokenizer { names: &[], splits: &[], ignore_merges: false, add_bos: false, nfc: false };

const GPT2: Split = Split::Regex(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+");

const LLAMA3: Split = Split::Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

const QWEN2: Split = Split::Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

const CJK: Split = Split::Regex("[一-龥\u{3040}-ゟ゠-ヿ]+");

const DEEPSEEK: Split = Split::Regex(concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"##,
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
));

/// The scripts that AFMoE's pre-tokenizer takes out of texts.
macro_rules! asian {
    () => {
        concat!(
            r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}",
            r"\x{0E40}-\x{0EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}",
        )
    };
}

const BLOOM: Split = Split::Regex(r" ?[^(\s|.,!?…。，、।۔،)]+");

/// All known pre-tokenizers.
const PRE_TOKENIZERS: &[PreTokenizer] = &[
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"],
        splits: &[LLAMA3],
        ignore_merges: true,
        add_bos: true,
        ..BASE
    },
    PreTokenizer { names: &["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"], splits: &[LLAMA3], ..BASE },
    PreTokenizer {
        names: &["cl100k"],
        splits: &[Split::Regex(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
        )],
        ..BASE
    },
    PreTokenizer { names: &["qwen2"], splits: &[QWEN2], nfc: true, ..BASE },
    PreTokenizer {
        names: &["deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo", "f2llmv2", "solar-open", "grok-2"],
        splits: &[QWEN2],
        ..BASE
    },
    PreTokenizer {
        names: &["qwen35"],
        splits: &[Split::Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )],
        nfc: true,
        ..BASE
    },
    PreTokenizer {
        names: &["gpt-2", "phi-2", "jais", "exaone4", "gigachat", "a.x-4.0", "mellum", "trillion", "granite-docling"],
        splits: &[GPT2],
        ..BASE
    },
    PreTokenizer { names: &["mpt", "olmo"], splits: &[GPT2], nfc: true, ..BASE },
    PreTokenizer {
        names: &["starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"],
        splits: &[Split::Digits, GPT2],
        ..BASE
    },
    PreTokenizer { names: &["command-r"], splits: &[Split::Digits, GPT2], nfc: true, ..BASE },
    PreTokenizer {
        names: &["gpt-4o", "llama4", "kanana2", "minimax-m2"],
        splits: &[Split::Regex(concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
            r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ))],
        ..BASE
    },
    PreTokenizer {
        names: &["tekken"],
        splits: &[Split::Regex(concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
            r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ))],
        ignore_merges: true,
        add_bos: true,
        ..BASE
    },
    PreTokenizer {
        names: &["kimi-k2"],
        splits: &[Split::Regex(concat!(
            r"[\p{Han}]+|",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
            r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ))],
        ..BASE
    },
    PreTokenizer {
        names: &["deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"],
        splits: &[Split::Regex(r"\p{N}{1,3}"), CJK, DEEPSEEK],
        ..BASE
    },
    PreTokenizer {
        names: &["afmoe"],
        splits: &[
            Split::Regex(r"\p{N}+"),
            Split::Regex(concat!("[", asian!(), r"&&[^\p{N}]]+")),
            DEEPSEEK,
            // Three digits each, from the end. Steps that look so far ahead come last: texts are cut at the pieces of the others.
            Split::Regex(r"^\p{N}{1,2}(?=(?:\p{N}{3})*$)|\p{N}{3}"),
            Split::Regex(concat!("[", asian!(), "]+")),
        ],
        ..BASE
    },
    PreTokenizer {
        names: &["deepseek-llm"],
        splits: &[
            Split::Regex(r"[\r\n]"),
            Split::Regex(concat!(
                r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ\x{1F5F}-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌ",
                r"\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-\x{212D}ℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
            )),
            Split::Regex(r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
            Split::Regex(r"\s+$"),
            Split::Regex(r"[一-龥ࠀ-一가-퟿]+"),
            Split::Regex(r"\p{N}+"),
        ],
        ..BASE
    },
    PreTokenizer {
        names: &["deepseek-coder"],
        splits: &[
            Split::Regex(r"[\r\n]"),
            Split::Regex(r"\s?\p{L}+"),
            Split::Regex(r"\s?\p{P}+"),
            Split::Regex(r"[一-龥ࠀ-一가-퟿]+"),
            Split::Digits,
        ],
        ..BASE
    },
    PreTokenizer {
        names: &["falcon"],
        splits: &[Split::Regex(r"[\p{P}$+<=>^~|`]+"), GPT2, Split::Regex("[0-9][0-9][0-9]")],
        ..BASE
    },
    PreTokenizer { names: &["bloom", "poro-chat", "gpt3-finnish"], splits: &[BLOOM], ..BASE },
    PreTokenizer { names: &["viking"], splits: &[BLOOM, Split::Digits], ..BASE },
    PreTokenizer {
        names: &["bailingmoe", "bailingmoe2", "llada-moe"],
        splits: &[Split::Regex(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        )],
        ..BASE
    },
    PreTokenizer {
        names: &["seed-coder"],
        splits: &[Split::Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
        )],
        ..BASE
    },
    PreTokenizer {
        names: &["minicpm5"],
        splits: &[
            Split::Regex(r"\p{N}{1,3}"),
            Split::Regex(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ),
        ],
        ignore_merges: true,
        ..BASE
    },
    // Files that were converted before the key existed have no name.
    PreTokenizer {
        names: &["default", ""],
        splits: &[Split::Regex(r"[\p{P}$+<=>^~|]+"), GPT2, Split::Regex(r"\p{N}+"), Split::Regex("[0-9][0-9][0-9]")],
        ..BASE
    },
];

/// The pre-tokenizer with this name.
pub(super) fn find(name: &str) -> Option<&'static PreTokenizer> {
    PRE_TOKENIZERS.iter().find(|known| known.names.contains(&name))
}

/// All names, for messages.
pub(super) fn names() -> String {
    let names = PRE_TOKENIZERS.iter().flat_map(|known| known.names).filter(|name| !name.is_empty());
    names.copied().collect::<Vec<_>>().join(", ")
}
