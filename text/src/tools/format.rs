//! What a format of calls consists of.
//!
//! A format is data. The [parser](super::parser) reads every format of the [table](super::table::SPECS), and the
//! [grammar](super::grammar) of calls writes it, both from the same declaration.

/// The format in which a model writes its calls. [`ToolFormat::example`] has an example of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// JSON between tags: Hermes, Qwen and most templates in ChatML.
    Hermes,
    /// Bare JSON: Llama 3.1 and later.
    Llama3Json,
    /// JSON after a marker: Mistral.
    Mistral,
    /// A message to a function: gpt-oss.
    Harmony,
    /// JSON in Markdown: DeepSeek V3 and R1.
    DeepseekV3,
    /// JSON after a name: DeepSeek V3.1.
    DeepseekV31,
    /// Keys and values in tags: GLM 4.5.
    Glm45,
    /// JSON after a numbered name: Kimi K2.
    KimiK2,
    /// Functions and parameters in tags: Qwen3 Coder.
    Qwen3Coder,
    /// A list of Python calls.
    Pythonic,
    /// A list of Python calls, between markers: Llama 4.
    Llama4Pythonic,
    /// An object with bare keys: Gemma 4.
    Gemma4,
    /// An object with bare keys: FunctionGemma.
    FunctionGemma,
    /// Functions and parameters in tags: Seed-OSS.
    SeedOss,
    /// Functions and parameters in tags: MiniMax M2.
    MinimaxM2,
    /// Functions and parameters in tags that say which values are text: DeepSeek V3.2.
    DeepseekV32,
    /// A list of JSON objects between markers: Command A and R7B.
    CohereCommand3,
    /// A list of JSON objects after a marker: Granite 3.
    Granite,
    /// A list of JSON objects after a word: Phi-4-mini.
    Phi4Mini,
    /// JSON objects between tags: Hunyuan A13B, MiniMax M1.
    HunyuanA13b,
    /// A list of JSON objects between tags: Nemotron Nano 2.
    NemotronJson,
    /// JSON between markers: InternLM 2.
    Internlm,
    /// Python calls between tags, one on each line: OLMo 3.
    Olmo3,
    /// A list of Python calls between markers: LFM2.
    Lfm2,
    /// A name and JSON on two lines: GLM-4.
    Glm4,
}

/// A part of the text around a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// This text.
    Text(&'static str),
    /// This text, which models may leave out and grammars write.
    Usual(&'static str),
    /// This text, which models may write and grammars leave out.
    Maybe(&'static str),
    /// Any white space; grammars write this.
    Space(&'static str),
    /// Any white space, commas and semicolons; grammars write this.
    Separator(&'static str),
    /// The name of the function. It ends in front of one of these characters.
    Name(&'static str),
    /// This text and the number or the id of the call, which models may leave out. Grammars write any number: the model counts the
    /// calls of the whole conversation.
    Id(&'static str),
}

/// Text between a key and the word that says whether its value is text.
pub(super) const TYPED: &str = "\" string=\"";

/// How arguments are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    /// One JSON object.
    Json,
    /// One JSON object with the name of the function and the arguments.
    Object {
        /// Key of the name.
        name: &'static str,
        /// Key of the arguments.
        arguments: &'static str,
        /// An object whose first key is another one is text.
        name_first: bool,
    },
    /// A key and a value in tags, for each argument. The value is text if the function's schema says so, else JSON.
    Tags {
        /// Text in front of a key.
        key: &'static str,
        /// Text after a key.
        key_end: &'static str,
        /// Text in front of a value, after white space.
        value: &'static str,
        /// Text after a value.
        value_end: &'static str,
        /// A line break at either end of a value belongs to the tags.
        has_lines: bool,
        /// A key is followed by [`TYPED`] and `true` for text, `false` for JSON.
        typed: bool,
    },
    /// An object whose keys are bare and whose strings are between two copies of this text, without escapes.
    Bare(&'static str),
    /// Keyword arguments of Python, after the opening bracket.
    Python,
}

/// Where a call may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Anywhere: calls have markers.
    Anywhere,
    /// At the beginning of the answer, or behind this text. Only calls of known functions are recognised.
    StartOr(Option<&'static str>),
}

/// A format of calls.
#[derive(Debug)]
pub(super) struct Spec {
    /// The format.
    pub format: ToolFormat,
    /// vLLM's names of the parser, the preferred one first.
    pub names: &'static [&'static str],
    /// Models that write it.
    pub models: &'static str,
    /// A call.
    pub example: &'static str,
    /// Chat templates of such models contain all texts of one of these lists.
    pub template: &'static [&'static [&'static str]],
    /// In front of the first call.
    pub lead: &'static [Part],
    /// Between two calls.
    pub between: &'static [Part],
    /// From the beginning of a call to its arguments.
    pub head: &'static [Part],
    /// The arguments.
    pub arguments: Encoding,
    /// From the arguments to the end of the call.
    pub tail: &'static [Part],
    /// After the last call.
    pub end: &'static [Part],
    /// Where a call may begin.
    pub place: Place,
    /// Other ways to write calls. Grammars use those without a marker alone, beside text.
    pub variants: &'static [Spec],
}

impl Spec {
    /// The texts that mark calls.
    pub fn markers(&self) -> impl Iterator<Item = &'static str> {
        let specs = std::iter::once(self).chain(self.variants);
        specs.flat_map(|spec| {
            let within = match spec.arguments {
                Encoding::Bare(quote) => vec![quote],
                Encoding::Tags { key, key_end, value, value_end, .. } => vec![key, key_end, value, value_end],
                _ => Vec::new(),
            };
            let parts = [spec.lead, spec.head, spec.tail, spec.end].into_iter().flatten();
            within.into_iter().chain(parts.filter_map(Part::text))
        })
    }
}

impl Part {
    /// The text of a part, which may be optional.
    pub fn text(&self) -> Option<&'static str> {
        match self {
            Part::Text(text) | Part::Usual(text) | Part::Maybe(text) => Some(text),
            _ => None,
        }
    }
}
