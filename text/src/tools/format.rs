//! The table of formats: how each family of models writes its calls.
//!
//! A format is data. The [parser](super::parser) reads every format of [`SPECS`], and the [grammar](super::grammar) of calls writes
//! it, both from the same declaration.

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

/// How arguments are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    /// One JSON object.
    Json,
    /// One JSON object with the name of the function and, under this key, the arguments.
    Object(&'static str),
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
    /// Other ways to write calls, which grammars do not use.
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
            Text(text) | Usual(text) | Maybe(text) => Some(text),
            _ => None,
        }
    }
}

use Part::{Id, Maybe, Name, Separator, Space, Text, Usual};

/// The arguments of Qwen3 Coder, and of formats after it.
const PARAMETERS: Encoding =
    Encoding::Tags { key: "<parameter=", key_end: ">", value: "", value_end: "</parameter>", has_lines: true };

/// A format whose fields are left out has markers that occur in no other text, and one call after another.
const PLAIN: Spec = Spec {
    format: ToolFormat::Hermes,
    names: &["hermes"],
    models: "Hermes, Qwen 2.5, Qwen 3",
    example: "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 1}}</tool_call>",
    template: &[],
    lead: &[],
    between: &[],
    head: &[],
    arguments: Encoding::Json,
    tail: &[],
    end: &[],
    place: Place::Anywhere,
    variants: &[],
};

const PYTHONIC: Spec = Spec {
    format: ToolFormat::Pythonic,
    names: &["pythonic"],
    models: "Llama 3.2, Gemma 3 and others with such a prompt",
    example: "[f(x=1), g()]",
    template: &[&["[func_name1(params_name1=params_value1"]],
    lead: &[Text("["), Space("")],
    between: &[Text(","), Space(" ")],
    head: &[Name("("), Text("("), Space("")],
    arguments: Encoding::Python,
    end: &[Maybe(","), Space(""), Text("]")],
    place: Place::StartOr(None),
    ..PLAIN
};

/// Every format. Where templates are ambiguous, the first that matches is chosen.
pub(super) const SPECS: [Spec; 13] = [
    Spec {
        format: ToolFormat::Mistral,
        names: &["mistral"],
        models: "Mistral",
        example: "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"x\": 1}}]",
        template: &[&["[TOOL_CALLS]"]],
        lead: &[Text("[TOOL_CALLS]"), Space(""), Text("["), Space("")],
        between: &[Separator(", ")],
        arguments: Encoding::Object("arguments"),
        end: &[Separator(""), Text("]")],
        variants: &[
            Spec {
                lead: &[Text("[TOOL_CALLS]"), Space("")],
                between: &[Separator(", ")],
                arguments: Encoding::Object("arguments"),
                ..PLAIN
            },
            Spec {
                head: &[Text("[TOOL_CALLS]"), Space(""), Name("[{"), Id("[CALL_ID]"), Usual("[ARGS]"), Space("")],
                ..PLAIN
            },
        ],
        ..PLAIN
    },
    Spec {
        format: ToolFormat::Harmony,
        names: &["openai", "openai_gptoss"],
        models: "gpt-oss",
        example: "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"x\": 1}<|call|>",
        template: &[&["<|channel|>"]],
        lead: &[Maybe("<|start|>"), Maybe("assistant")],
        between: &[Maybe("<|start|>"), Maybe("assistant")],
        head: &[
            Text("<|channel|>"),
            Text("commentary to="),
            Usual("functions."),
            Name("<\n"),
            Space(" "),
            Usual("<|constrain|>"),
            Usual("json"),
            Text("<|message|>"),
            Space(""),
        ],
        tail: &[Space(""), Maybe("<|call|>")],
        ..PLAIN
    },
    Spec {
        format: ToolFormat::KimiK2,
        names: &["kimi_k2"],
        models: "Kimi K2",
        example: "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"x\": 1}\
                  <|tool_call_end|><|tool_calls_section_end|>",
        template: &[&["<|tool_calls_section_begin|>"]],
        lead: &[Usual("<|tool_calls_section_begin|>"), Space("")],
        head: &[
            Text("<|tool_call_begin|>"),
            Space(""),
            Usual("functions."),
            Name(":<"),
            Id(":"),
            Space(""),
            Text("<|tool_call_argument_begin|>"),
            Space(""),
        ],
        tail: &[Space(""), Text("<|tool_call_end|>")],
        end: &[Space(""), Text("<|tool_calls_section_end|>")],
        ..PLAIN
    },
    Spec {
        format: ToolFormat::DeepseekV3,
        names: &["deepseek_v3"],
        models: "DeepSeek V3, R1",
        example: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"x\": 1}\n```\
                  <｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        template: &[&["<｜tool▁sep｜>", "```json"]],
        lead: &[Usual("<｜tool▁calls▁begin｜>"), Space("")],
        between: &[Space("\n")],
        head: &[
            Text("<｜tool▁call▁begin｜>"),
            Usual("function"),
            Text("<｜tool▁sep｜>"),
            Name("\n`{"),
            Space("\n"),
            Usual("```json"),
            Space("\n"),
        ],
        tail: &[Space("\n"), Usual("```"), Space(""), Text("<｜tool▁call▁end｜>")],
        end: &[Space(""), Text("<｜tool▁calls▁end｜>")],
        ..PLAIN
    },
    Spec {
        format: ToolFormat::DeepseekV31,
        names: &["deepseek_v31"],
        models: "DeepSeek V3.1",
        example: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"x\": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        template: &[&["<｜tool▁sep｜>"]],
        lead: &[Usual("<｜tool▁calls▁begin｜>"), Space("")],
        head: &[Text("<｜tool▁call▁begin｜>"), Space(""), Name("<\n"), Text("<｜tool▁sep｜>"), Space("")],
        tail: &[Space(""), Text("<｜tool▁call▁end｜>")],
        end: &[Space(""), Text("<｜tool▁calls▁end｜>")],
        ..PLAIN
    },
    Spec {
        format: ToolFormat::Glm45,
        names: &["glm45", "glm47"],
        models: "GLM 4.5 and later",
        example: "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        template: &[&["<arg_key>"]],
        between: &[Space("\n")],
        head: &[Text("<tool_call>"), Space(""), Name("\n<"), Space("\n")],
        arguments: Encoding::Tags {
            key: "<arg_key>",
            key_end: "</arg_key>",
            value: "<arg_value>",
            value_end: "</arg_value>",
            has_lines: false,
        },
        tail: &[Space(""), Text("</tool_call>")],
        ..PLAIN
    },
    Spec {
        format: ToolFormat::Qwen3Coder,
        names: &["qwen3_coder", "qwen3_xml"],
        models: "Qwen3 Coder, Qwen3 Next and later",
        example: "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
        template: &[&["<function=", "<parameter="]],
        between: &[Space("\n")],
        head: &[Usual("<tool_call>"), Space("\n"), Text("<function="), Name(">\n"), Text(">"), Space("\n")],
        arguments: PARAMETERS,
        tail: &[Space(""), Text("</function>"), Space("\n"), Usual("</tool_call>")],
        // Seed-OSS.
        variants: &[Spec {
            between: &[Space("\n")],
            head: &[Text("<seed:tool_call>"), Space("\n"), Text("<function="), Name(">\n"), Text(">"), Space("\n")],
            arguments: PARAMETERS,
            tail: &[Space(""), Text("</function>"), Space("\n"), Text("</seed:tool_call>")],
            ..PLAIN
        }],
        ..PLAIN
    },
    Spec {
        format: ToolFormat::Gemma4,
        names: &["gemma4"],
        models: "Gemma 4",
        example: "<|tool_call>call:f{x:1,s:<|\"|>text<|\"|>}<tool_call|>",
        template: &[&["<|tool_call>"]],
        head: &[Text("<|tool_call>"), Text("call:"), Name("{\n"), Space("")],
        arguments: Encoding::Bare("<|\"|>"),
        tail: &[Space(""), Text("<tool_call|>")],
        ..PLAIN
    },
    Spec {
        format: ToolFormat::FunctionGemma,
        names: &["functiongemma"],
        models: "FunctionGemma",
        example: "<start_function_call>call:f{x:1,s:<escape>text<escape>}<end_function_call>",
        template: &[&["<start_function_call>"]],
        head: &[Text("<start_function_call>"), Text("call:"), Name("{\n"), Space("")],
        arguments: Encoding::Bare("<escape>"),
        tail: &[Space(""), Text("<end_function_call>")],
        ..PLAIN
    },
    Spec {
        format: ToolFormat::Llama4Pythonic,
        names: &["llama4_pythonic"],
        models: "Llama 4",
        example: "<|python_start|>[f(x=1), g()]<|python_end|>",
        template: &[&["<|python_start|>"]],
        lead: &[Usual("<|python_start|>"), Space(""), Text("["), Space("")],
        end: &[Maybe(","), Space(""), Text("]"), Usual("<|python_end|>")],
        place: Place::StartOr(Some("<|python_start|>")),
        ..PYTHONIC
    },
    PYTHONIC,
    Spec {
        format: ToolFormat::Hermes,
        template: &[&["<tool_call>"]],
        between: &[Space("\n")],
        head: &[Text("<tool_call>"), Space("\n")],
        arguments: Encoding::Object("arguments"),
        tail: &[Space("\n"), Text("</tool_call>")],
        ..PLAIN
    },
    Spec {
        format: ToolFormat::Llama3Json,
        names: &["llama3_json", "llama4_json"],
        models: "Llama 3.1 and later",
        example: "{\"name\": \"f\", \"parameters\": {\"x\": 1}}",
        template: &[&["<|python_tag|>"], &["Environment: ipython"]],
        lead: &[Maybe("<|python_tag|>"), Space("")],
        between: &[Separator("; ")],
        arguments: Encoding::Object("parameters"),
        place: Place::StartOr(None),
        ..PLAIN
    },
];
