//! The table of formats: how each family of models writes its calls.

use super::format::Part::{Id, Maybe, Name, Separator, Space, Text, Usual};
use super::format::{Encoding, Place, Spec, ToolFormat};

/// The arguments of Qwen3 Coder, and of formats after it.
const PARAMETERS: Encoding = Encoding::Tags {
    key: "<parameter=",
    key_end: ">",
    value: "",
    value_end: "</parameter>",
    has_lines: true,
    typed: false,
};

/// One JSON object as most formats have it.
const OBJECT: Encoding = Encoding::Object { name: "name", arguments: "arguments", name_first: false };

/// A call that stands alone, without a marker.
const BARE: Spec = Spec {
    lead: &[Space("")],
    between: &[Separator("\n")],
    arguments: Encoding::Object { name: "name", arguments: "arguments", name_first: true },
    place: Place::StartOr(None),
    ..PLAIN
};

/// A format whose fields are left out has markers that occur in no other text, and one call after another.
const PLAIN: Spec = Spec {
    format: ToolFormat::Hermes,
    names: &["hermes", "granite4"],
    models: "Hermes, Qwen 2.5, Qwen 3, Granite 4",
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
pub(super) const SPECS: [Spec; 25] = [
    Spec {
        format: ToolFormat::Mistral,
        names: &["mistral"],
        models: "Mistral",
        example: "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"x\": 1}}]",
        template: &[&["[TOOL_CALLS]"]],
        lead: &[Text("[TOOL_CALLS]"), Space(""), Text("["), Space("")],
        between: &[Separator(", ")],
        arguments: OBJECT,
        end: &[Separator(""), Text("]")],
        variants: &[
            Spec { lead: &[Text("[TOOL_CALLS]"), Space("")], between: &[Separator(", ")], arguments: OBJECT, ..PLAIN },
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
            typed: false,
        },
        tail: &[Space(""), Text("</tool_call>")],
        ..PLAIN
    },
    Spec {
        format: ToolFormat::Glm4,
        names: &["glm4"],
        models: "GLM-4",
        example: "f\n{\"x\": 1}",
        template: &[&["<|observation|>"]],
        between: &[Space("\n"), Maybe("<|assistant|>")],
        head: &[Name("\n{"), Text("\n"), Space("")],
        place: Place::StartOr(None),
        ..PLAIN
    },
    Spec {
        format: ToolFormat::DeepseekV32,
        names: &["deepseek_v32"],
        models: "DeepSeek V3.2",
        example: "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"x\" string=\"false\">1\
                  </｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        template: &[&["｜DSML｜function_calls>"]],
        lead: &[Text("<｜DSML｜function_calls>"), Space("\n")],
        between: &[Space("\n")],
        head: &[Text("<｜DSML｜invoke name=\""), Name("\"\n"), Text("\">"), Space("\n")],
        arguments: Encoding::Tags {
            key: "<｜DSML｜parameter name=\"",
            key_end: "\">",
            value: "",
            value_end: "</｜DSML｜parameter>",
            has_lines: false,
            typed: true,
        },
        tail: &[Space(""), Text("</｜DSML｜invoke>")],
        end: &[Space("\n"), Text("</｜DSML｜function_calls>")],
        ..PLAIN
    },
    Spec {
        format: ToolFormat::MinimaxM2,
        names: &["minimax_m2"],
        models: "MiniMax M2",
        example: "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"x\">1</parameter>\n</invoke>\n\
                  </minimax:tool_call>",
        template: &[&["<minimax:tool_call>"]],
        lead: &[Text("<minimax:tool_call>"), Space("\n")],
        between: &[Space("\n")],
        head: &[Text("<invoke name=\""), Name("\"\n"), Text("\">"), Space("\n")],
        arguments: Encoding::Tags {
            key: "<parameter name=\"",
            key_end: "\">",
            value: "",
            value_end: "</parameter>",
            has_lines: false,
            typed: false,
        },
        tail: &[Space(""), Text("</invoke>")],
        end: &[Space("\n"), Text("</minimax:tool_call>")],
        ..PLAIN
    },
    Spec {
        format: ToolFormat::SeedOss,
        names: &["seed_oss"],
        models: "Seed-OSS",
        example: "<seed:tool_call>\n<function=f>\n<parameter=x>1</parameter>\n</function>\n</seed:tool_call>",
        template: &[&["<seed:tool_call>"]],
        between: &[Space("\n")],
        head: &[Text("<seed:tool_call>"), Space("\n"), Text("<function="), Name(">\n"), Text(">"), Space("\n")],
        arguments: PARAMETERS,
        tail: &[Space(""), Text("</function>"), Space("\n"), Text("</seed:tool_call>")],
        ..PLAIN
    },
    Spec {
        format: ToolFormat::CohereCommand3,
        names: &["cohere_command3"],
        models: "Command A, Command R7B",
        example: "<|START_ACTION|>[{\"tool_name\": \"f\", \"parameters\": {\"x\": 1}}]<|END_ACTION|>",
        template: &[&["<|START_ACTION|>"]],
        lead: &[Text("<|START_ACTION|>"), Space(""), Text("["), Space("")],
        between: &[Separator(", ")],
        arguments: Encoding::Object { name: "tool_name", arguments: "parameters", name_first: false },
        end: &[Separator(""), Text("]"), Space(""), Usual("<|END_ACTION|>")],
        ..PLAIN
    },
    Spec {
        format: ToolFormat::Phi4Mini,
        names: &["phi4_mini_json"],
        models: "Phi-4-mini",
        example: "functools[{\"name\": \"f\", \"arguments\": {\"x\": 1}}]",
        template: &[&["functools["], &["<|/tool|>"]],
        lead: &[Text("functools"), Text("["), Space("")],
        between: &[Separator(", ")],
        arguments: OBJECT,
        end: &[Separator(""), Text("]")],
        variants: &[Spec {
            lead: &[Text("<|tool_call|>"), Space(""), Text("["), Space("")],
            between: &[Separator(", ")],
            arguments: OBJECT,
            end: &[Separator(""), Text("]"), Space(""), Usual("<|/tool_call|>")],
            ..PLAIN
        }],
        ..PLAIN
    },
    Spec {
        format: ToolFormat::Granite,
        names: &["granite"],
        models: "Granite 3",
        example: "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"x\": 1}}]",
        template: &[&["<|tool_call|>"]],
        lead: &[Text("<|tool_call|>"), Space(""), Text("["), Space("")],
        between: &[Separator(", ")],
        arguments: OBJECT,
        end: &[Separator(""), Text("]")],
        variants: &[Spec {
            lead: &[Text("<tool_call>"), Space(""), Text("["), Space("")],
            between: &[Separator(", ")],
            arguments: OBJECT,
            end: &[Separator(""), Text("]"), Space(""), Usual("</tool_call>")],
            ..PLAIN
        }],
        ..PLAIN
    },
    Spec {
        format: ToolFormat::HunyuanA13b,
        names: &["hunyuan_a13b", "minimax"],
        models: "Hunyuan A13B, MiniMax M1",
        example: "<tool_calls>[{\"name\": \"f\", \"arguments\": {\"x\": 1}}]</tool_calls>",
        template: &[&["<tool_calls>"]],
        lead: &[Text("<tool_calls>"), Space(""), Text("["), Space("")],
        between: &[Separator(", ")],
        arguments: OBJECT,
        end: &[Separator(""), Text("]"), Space(""), Text("</tool_calls>")],
        // One on each line.
        variants: &[Spec {
            lead: &[Text("<tool_calls>"), Space("\n")],
            between: &[Separator("\n")],
            arguments: OBJECT,
            end: &[Space("\n"), Text("</tool_calls>")],
            ..PLAIN
        }],
        ..PLAIN
    },
    Spec {
        format: ToolFormat::NemotronJson,
        names: &["nemotron_json"],
        models: "Nemotron Nano 2",
        example: "<TOOLCALL>[{\"name\": \"f\", \"arguments\": {\"x\": 1}}]</TOOLCALL>",
        template: &[&["<TOOLCALL>"]],
        lead: &[Text("<TOOLCALL>"), Space(""), Text("["), Space("")],
        between: &[Separator(", ")],
        arguments: OBJECT,
        end: &[Separator(""), Text("]"), Space(""), Text("</TOOLCALL>")],
        ..PLAIN
    },
    Spec {
        format: ToolFormat::Internlm,
        names: &["internlm"],
        models: "InternLM 2",
        example: "<|action_start|><|plugin|>\n{\"name\": \"f\", \"parameters\": {\"x\": 1}}<|action_end|>",
        template: &[&["<|action_start|>"], &["<|plugin|>"]],
        between: &[Space("\n")],
        head: &[Text("<|action_start|>"), Text("<|plugin|>"), Space("\n")],
        arguments: Encoding::Object { name: "name", arguments: "parameters", name_first: false },
        tail: &[Space(""), Text("<|action_end|>")],
        ..PLAIN
    },
    Spec {
        format: ToolFormat::Olmo3,
        names: &["olmo3"],
        models: "OLMo 3",
        example: "<function_calls>\nf(x=1)\ng()\n</function_calls>",
        template: &[&["<function_calls>"]],
        lead: &[Text("<function_calls>"), Space("\n")],
        between: &[Space("\n")],
        end: &[Space("\n"), Text("</function_calls>")],
        place: Place::Anywhere,
        ..PYTHONIC
    },
    Spec {
        format: ToolFormat::Lfm2,
        names: &["lfm2"],
        models: "LFM2",
        example: "<|tool_call_start|>[f(x=1), g()]<|tool_call_end|>",
        template: &[&["<|tool_call_start|>"], &["<|tool_list_start|>"]],
        lead: &[Text("<|tool_call_start|>"), Space(""), Text("["), Space("")],
        end: &[Maybe(","), Space(""), Text("]"), Space(""), Usual("<|tool_call_end|>")],
        place: Place::Anywhere,
        ..PYTHONIC
    },
    Spec {
        format: ToolFormat::Qwen3Coder,
        names: &["qwen3_coder", "qwen3_xml", "mimo"],
        models: "Qwen3 Coder, Qwen3 Next and later, Nemotron 3, MiMo",
        example: "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
        template: &[&["<function=", "<parameter="]],
        between: &[Space("\n")],
        head: &[Usual("<tool_call>"), Space("\n"), Text("<function="), Name(">\n"), Text(">"), Space("\n")],
        arguments: PARAMETERS,
        tail: &[Space(""), Text("</function>"), Space("\n"), Usual("</tool_call>")],
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
        arguments: OBJECT,
        tail: &[Space("\n"), Text("</tool_call>")],
        // Qwen2.5-Coder leaves the tags out, and puts the object between the lines of Markdown.
        variants: &[
            BARE,
            Spec { lead: &[Text("```"), Maybe("json"), Space("\n")], end: &[Space("\n"), Text("```")], ..BARE },
        ],
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
        arguments: Encoding::Object { name: "name", arguments: "parameters", name_first: false },
        place: Place::StartOr(None),
        ..PLAIN
    },
];
