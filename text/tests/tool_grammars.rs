//! Tool calls as grammars: what they allow, up to the marker, within the call and after it; and grammars behind reasoning.

use std::sync::{Arc, LazyLock};

use serde_json::{Map, Value, json};
use text::{Calls, Grammar, Grammars, Matcher, ReasoningFormat, Tokenizer, Tool, ToolEvent, ToolFormat};

use crate::grammars::next;

static TOKENIZER: LazyLock<Arc<Tokenizer>> =
    LazyLock::new(|| Arc::new(Tokenizer::load(&*testkit::workspace::root().join("models/demo")).unwrap()));

static GRAMMARS: LazyLock<Arc<Grammars>> = LazyLock::new(|| Arc::new(Grammars::new(TOKENIZER.clone(), 1 << 20)));

fn tools() -> Vec<Tool> {
    let parameters = json!({
        "type": "object",
        "properties": {"s": {"type": "string"}, "i": {"type": "integer"}, "e": {"enum": ["red", "blue"]}, "l": {"type": "array", "items": {"type": "boolean"}}},
        "required": ["s", "i"], "additionalProperties": false, "x-guidance": {"whitespace_flexible": false},
    });
    vec![Tool { name: "f".into(), parameters: Some(parameters) }, Tool { name: "g".into(), parameters: None }]
}

fn compile(grammar: Grammar) -> Matcher {
    GRAMMARS.compile_blocking(&grammar).unwrap_or_else(|error| panic!("{error}\n{grammar:?}"))
}

/// The constraint after a text; `None` if it does not allow the text, spelled in these tokens.
fn after(start: &Matcher, ids: &[u32]) -> Option<Matcher> {
    let mut constraint = start.clone();
    for id in ids {
        if !next(&mut constraint)?.0.contains(id) {
            return None;
        }
        constraint.accept(*id).ok()?;
    }
    Some(constraint)
}

/// The tokens of a text: as the tokenizer spells it, and character by character.
fn spellings(text: &str) -> [Vec<u32>; 2] {
    let encode = |text: &str| TOKENIZER.encode(text, false).unwrap();
    let letters = text.chars().flat_map(|c| encode(&c.to_string())).collect();
    [encode(text), letters]
}

/// Whether a text may be written, and end.
fn allows(start: &Matcher, text: &str) -> bool {
    let found = spellings(text)
        .map(|ids| after(start, &ids).is_some_and(|mut end| end.is_complete() || end.mask().unwrap().may_end));
    assert_eq!(found[0], found[1], "the spelling matters: {text}");
    found[0]
}

/// A valid call in each format, and one that breaks the schema.
fn written(format: ToolFormat, valid: bool) -> String {
    let object = if valid { "{\"s\":\"a\",\"i\":1}" } else { "{\"s\":\"a\",\"i\":\"x\"}" };
    let i = if valid { "1" } else { "x" };
    match format {
        ToolFormat::Hermes => format!("<tool_call>\n{{\"name\": \"f\", \"arguments\": {object}}}\n</tool_call>"),
        ToolFormat::Llama3Json => format!("{{\"name\": \"f\", \"parameters\": {object}}}"),
        ToolFormat::Mistral => format!("[TOOL_CALLS][{{\"name\": \"f\", \"arguments\": {object}}}]"),
        ToolFormat::Harmony => format!("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{object}"),
        ToolFormat::KimiK2 => format!(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{object}<|tool_call_end|><|tool_calls_section_end|>"
        ),
        ToolFormat::DeepseekV3 => format!(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{object}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        ToolFormat::DeepseekV31 => format!(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{object}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        ToolFormat::Glm45 => format!(
            "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a</arg_value>\n<arg_key>i</arg_key>\n<arg_value>{i}</arg_value>\n</tool_call>"
        ),
        ToolFormat::Qwen3Coder => format!(
            "<tool_call>\n<function=f>\n<parameter=s>\na\n</parameter>\n<parameter=i>\n{i}\n</parameter>\n</function>\n</tool_call>"
        ),
        ToolFormat::Gemma4 => format!("<|tool_call>call:f{{s:<|\"|>a<|\"|>,i:{i}}}<tool_call|>"),
        ToolFormat::FunctionGemma => {
            format!("<start_function_call>call:f{{s:<escape>a<escape>,i:{i}}}<end_function_call>")
        }
        ToolFormat::Llama4Pythonic => format!("<|python_start|>[f(s=\"a\", i={i})]<|python_end|>"),
        ToolFormat::Pythonic => format!("[f(s=\"a\", i={i})]"),
        ToolFormat::Olmo3 => format!("<function_calls>\nf(s=\"a\", i={i})\n</function_calls>"),
        ToolFormat::Lfm2 => format!("<|tool_call_start|>[f(s=\"a\", i={i})]<|tool_call_end|>"),
        ToolFormat::SeedOss => format!(
            "<seed:tool_call>\n<function=f>\n<parameter=s>\na\n</parameter>\n<parameter=i>\n{i}\n</parameter>\n</function>\n</seed:tool_call>"
        ),
        ToolFormat::MinimaxM2 => format!(
            "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"s\">a</parameter>\n<parameter name=\"i\">{i}</parameter>\n</invoke>\n</minimax:tool_call>"
        ),
        ToolFormat::DeepseekV32 => format!(
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"s\" string=\"true\">a</｜DSML｜parameter>\n<｜DSML｜parameter name=\"i\" string=\"false\">{i}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
        ),
        ToolFormat::CohereCommand3 => {
            format!("<|START_ACTION|>[{{\"tool_name\": \"f\", \"parameters\": {object}}}]<|END_ACTION|>")
        }
        ToolFormat::Glm4 => format!("f\n{object}"),
        ToolFormat::Granite => format!("<|tool_call|>[{{\"name\": \"f\", \"arguments\": {object}}}]"),
        ToolFormat::Phi4Mini => format!("functools[{{\"name\": \"f\", \"arguments\": {object}}}]"),
        ToolFormat::HunyuanA13b => {
            format!("<tool_calls>[{{\"name\": \"f\", \"arguments\": {object}}}]</tool_calls>")
        }
        ToolFormat::NemotronJson => format!("<TOOLCALL>[{{\"name\": \"f\", \"arguments\": {object}}}]</TOOLCALL>"),
        ToolFormat::Internlm => {
            format!("<|action_start|><|plugin|>\n{{\"name\": \"f\", \"parameters\": {object}}}<|action_end|>")
        }
    }
}

#[test]
fn required_calls_are_calls_of_the_schema_in_every_format() {
    for format in ToolFormat::all() {
        for calls in [Calls::One, Calls::Several] {
            let start = compile(format.grammar(&tools(), calls, &TOKENIZER).unwrap());
            assert!(allows(&start, &written(format, true)), "{format:?}");
            assert!(!allows(&start, &written(format, false)), "{format:?}");
            assert!(!allows(&start, "text"), "{format:?}");
        }
    }
}

#[test]
fn a_call_may_be_of_one_of_128_functions_in_every_format() {
    let [parameters, _] = tools().try_into().map(|all: [Tool; 2]| all.map(|tool| tool.parameters)).unwrap();
    let tool = |i: usize| Tool {
        name: format!("f{}", if i == 0 { String::new() } else { i.to_string() }),
        parameters: parameters.clone(),
    };
    let many: Vec<Tool> = (0..128).map(tool).collect();
    for format in ToolFormat::all() {
        for calls in [Calls::Several, Calls::Optional(None)] {
            let start = compile(format.grammar(&many, calls, &TOKENIZER).unwrap());
            assert!(allows(&start, &written(format, true)), "{format:?}");
            assert!(!allows(&start, &written(format, false)), "{format:?}");
        }
    }
}

#[test]
fn with_optional_calls_text_is_free_up_to_the_marker_and_after_the_call() {
    for format in ToolFormat::all() {
        let start = compile(format.grammar(&tools(), Calls::Optional(None), &TOKENIZER).unwrap());
        let bare = matches!(format, ToolFormat::Llama3Json | ToolFormat::Pythonic | ToolFormat::Glm4);
        let free = if format == ToolFormat::Harmony { "<|channel|>final<|message|>" } else { "" };
        for text in ["", "Some text, <b>世</b> {\"a\": [1]} and [2].", "[1, 2]", "{\"a\": 1}", "< <t <tool [x"] {
            assert!(allows(&start, &format!("{free}{text}")), "{format:?}: {text}");
        }
        let (valid, broken) = (written(format, true), written(format, false));
        assert!(allows(&start, &valid) && !allows(&start, &broken), "{format:?}");
        if !bare && format != ToolFormat::Harmony {
            assert!(allows(&start, &format!("Let me see.\n{valid}")), "{format:?}");
            assert!(!allows(&start, &format!("Let me see.\n{broken}")), "{format:?}");
            assert!(allows(&start, &format!("One {valid} two {valid}\nthree")), "{format:?}");
            assert!(!allows(&start, &format!("One {valid} two {broken}")), "{format:?}");
        }
    }
}

#[test]
fn text_around_optional_calls_is_never_a_call_that_breaks_the_schema() {
    for format in ToolFormat::all() {
        let start = compile(format.grammar(&tools(), Calls::Optional(None), &TOKENIZER).unwrap());
        let (valid, broken) = (written(format, true), written(format, false));
        let (outer, other) = (valid.split("functions").next().unwrap(), format!("{broken} {valid}"));
        let mut texts = vec![format!("\n {broken}"), format!("{broken}{broken}"), format!("{valid}{broken}"), other];
        texts.extend(match format {
            ToolFormat::Llama3Json => vec![
                r#"<|python_tag|>{"name": "f", "parameters": {}}"#.to_string(),
                r#"{"parameters": {"s": 1}, "name": "f"}"#.to_string(),
                r#"{"type": "function", "name" : "\u0066", "parameters": {}}"#.to_string(),
                format!(r#"{valid},{{"name": "f", "parameters": {{}}}}"#),
                format!(r#"{valid} {{"x": 1, "name": "f"}}"#),
            ],
            ToolFormat::Mistral => {
                vec![r#"a [TOOL_CALLS]f[ARGS]{"s": 1}"#.to_string(), r#"[TOOL_CALLS] {"name": "f"}"#.to_string()]
            }
            ToolFormat::Harmony => vec![format!("<|channel|>final<|message|>a {broken}"), format!("a {broken}")],
            ToolFormat::Qwen3Coder => {
                vec![format!("a {}", broken.replace("<tool_call>\n", "")), format!("a <function=f> {valid}")]
            }
            // Calls are only at the start.
            ToolFormat::Pythonic => Vec::new(),
            ToolFormat::Glm4 => vec![format!("{valid}<|assistant|>{broken}")],
            // Without tags.
            ToolFormat::Hermes => {
                let bare = r#"{"name": "f", "arguments": {"s": 1}}"#;
                vec![bare.to_string(), format!("```json\n{bare}\n```"), format!("a {outer} b {broken}")]
            }
            _ => vec![format!("a {outer} b {broken}")],
        });
        for text in texts {
            assert!(!allows(&start, &text), "{format:?}: {text}");
        }
    }
    // Another object is an answer.
    let start = compile(ToolFormat::Llama3Json.grammar(&tools(), Calls::Optional(None), &TOKENIZER).unwrap());
    assert!(allows(&start, r#"{"name": "Bob", "user": {"name": "h"}}"#));
}

#[test]
fn a_call_without_tags_is_one_of_the_schema_too() {
    let start = compile(ToolFormat::Hermes.grammar(&tools(), Calls::Optional(None), &TOKENIZER).unwrap());
    let calls = [
        r#"{"name": "f", "arguments": {"s":"a","i":1}}"#,
        "{\n  \"name\": \"f\",\n  \"arguments\": {\"s\":\"a\",\"i\":1}}",
        r#"{"name":"g","arguments":{}}"#,
    ];
    for call in calls {
        for text in [
            call.to_string(),
            format!("\n{call}\n"),
            format!("```json\n{call}\n```"),
            format!("```\n{call}\n``` Done."),
            format!("{call}\n{}", calls[0]),
        ] {
            assert!(allows(&start, &text), "{text}");
            let (mut parser, mut events) = (ToolFormat::Hermes.parser(tools().into()), Vec::new());
            parser.push(&text, &mut events);
            parser.finish(&mut events);
            let called = events.iter().filter(|event| matches!(event, ToolEvent::Call { .. })).count();
            assert_eq!(called, text.matches("\"arguments\"").count(), "{text}: {events:?}");
        }
        assert!(!allows(&start, &call.replace("\"s\"", "\"t\"").replace("{}}", "[]}")), "{call}");
    }
    // Another object is an answer.
    assert!(allows(&start, r#"{"name": "Bob", "age": 3}"#));
}

#[test]
fn the_number_of_a_kimi_call_counts_on() {
    let one = |name: &str, number: &str, object: &str| {
        format!("<|tool_call_begin|>functions.{name}{number}<|tool_call_argument_begin|>{object}<|tool_call_end|>")
    };
    let all = |calls: &[String]| format!("<|tool_calls_section_begin|>{}<|tool_calls_section_end|>", calls.concat());
    for calls in [Calls::Several, Calls::Optional(None)] {
        let start = compile(ToolFormat::KimiK2.grammar(&tools(), calls, &TOKENIZER).unwrap());
        let object = "{\"s\":\"a\",\"i\":1}";
        for (first, second, allowed) in
            [(":0", ":1", true), (":7", ":8", true), (":11", ":12", true), ("", ":1", false), (":", ":1", false)]
        {
            let text = all(&[one("f", first, object), one("g", second, "{}")]);
            assert_eq!(allows(&start, &text), allowed, "{calls:?}: {text}");
        }
    }
}

#[test]
fn definitions_bounds_and_types_hold_in_arguments_that_are_not_json() {
    let parameters = json!({
        "$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"], "additionalProperties": false}},
        "properties": {"n": {"$ref": "#/$defs/node"}, "l": {"type": "array"}, "b": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}},
        "additionalProperties": false,
    });
    let tools = [Tool { name: "f".into(), parameters: Some(parameters) }];
    for (format, allowed, refused) in [
        (
            ToolFormat::Pythonic,
            &[
                "[f()]",
                "[f(n={\"v\": 1, \"next\": {\"v\": 2, \"next\": None}})]",
                "[f(l=[])]",
                "[f(b=[True, False])]",
                "[f(b=[True, False, True])]",
            ][..],
            &[
                "[f(n=1)]",
                "[f(n={\"v\": 1, \"next\": {\"v\": \"x\", \"next\": None}})]",
                "[f(l=1)]",
                "[f(b=[True])]",
                "[f(b=[True, True, True, True])]",
            ][..],
        ),
        (
            ToolFormat::FunctionGemma,
            &["call:f{}", "call:f{n:{v:1,next:{v:2,next:null}}}", "call:f{l:[]}", "call:f{b:[true,false]}"],
            &[
                "call:f1",
                "call:f{n:1}",
                "call:f{n:{v:1,next:{v:<escape>x<escape>,next:null}}}",
                "call:f{l:1}",
                "call:f{b:[true]}",
                "call:f{b:[true,true,true,true]}",
            ],
        ),
    ] {
        let start = compile(format.grammar(&tools, Calls::One, &TOKENIZER).unwrap());
        let whole = |text: &str| match format {
            ToolFormat::FunctionGemma => format!("<start_function_call>{text}<end_function_call>"),
            _ => text.to_string(),
        };
        for text in allowed {
            assert!(allows(&start, &whole(text)), "{format:?}: {text}");
        }
        for text in refused {
            assert!(!allows(&start, &whole(text)), "{format:?}: {text}");
        }
    }
    // A value of several types is text, or JSON of the schema.
    let parameters = json!({"properties": {"m": {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "array", "items": {"type": "integer"}}]}}});
    let tools = [Tool { name: "f".into(), parameters: Some(parameters) }];
    let start = compile(ToolFormat::Glm45.grammar(&tools, Calls::One, &TOKENIZER).unwrap());
    for (value, allowed) in [("some text", true), ("null", true), ("[1,2]", true), ("[\"x\"]", false), ("{}", false)] {
        let text = format!("<tool_call>f\n<arg_key>m</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>");
        assert_eq!(allows(&start, &text), allowed, "{text}");
    }
}

#[test]
fn hostile_schemas_of_tools_take_bounded_time_and_memory() {
    let start = std::time::Instant::now();
    // Each level names a type again and again.
    let mut deep = json!({"type": "integer"});
    for _ in 0..40 {
        deep = json!({"type": vec!["object"; 8], "properties": {"a": deep}});
    }
    // Large definitions that many properties refer to.
    let enumeration: Vec<String> = (0..5000).map(|i| format!("value number {i}")).collect();
    let properties: Map<String, Value> =
        (0..3000).map(|i| (format!("p{i}"), json!({"type": "integer", "enum": [i], "$ref": "#/$defs/d"}))).collect();
    let wide = json!({"$defs": {"d": {"enum": enumeration}}, "properties": properties});
    // Pairs of many options.
    let pairs = json!({"properties": {"x": {"oneOf": (0..12_000).map(|i| json!({"const": i})).collect::<Vec<_>>()}}});
    for (name, schema) in [("deep", deep), ("wide", wide), ("pairs", pairs)] {
        let tools = [Tool { name: "f".into(), parameters: Some(schema) }];
        for format in ToolFormat::all() {
            let grammar = match format.grammar(&tools, Calls::One, &TOKENIZER) {
                Ok(grammar) => grammar,
                Err(problem) => {
                    assert!(problem.contains("fewer references") && !problem.contains('\n'), "{problem}");
                    continue;
                }
            };
            assert!(grammar.num_bytes() <= 17 << 20, "{format:?}: {name}");
            if name == "pairs" && matches!(format, ToolFormat::Hermes | ToolFormat::Qwen3Coder) {
                assert!(GRAMMARS.compile_blocking(&grammar).is_err(), "{format:?}: {name}");
            }
        }
    }
    assert!(start.elapsed().as_secs() < 60, "{:?}", start.elapsed());
}

/// A pseudo-random walk through a grammar.
fn walk(start: &Matcher, mut seed: u64) -> Option<String> {
    let (mut constraint, mut ids) = (start.clone(), Vec::new());
    for _ in 0..400 {
        let (tokens, may_end) = next(&mut constraint).unwrap();
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        if tokens.is_empty() || may_end && seed >> 60 == 0 {
            return Some(TOKENIZER.decode(&ids, false).unwrap());
        }
        let token = tokens[(seed >> 33) as usize % tokens.len()];
        ids.push(token);
        constraint.accept(token).unwrap();
        if constraint.is_complete() {
            return Some(TOKENIZER.decode(&ids, false).unwrap());
        }
    }
    None
}

#[test]
fn whatever_a_grammar_allows_parses_as_calls_of_the_schema() {
    let properties = json!({"b": {"type": "boolean"}, "e": {"enum": ["red", "b\"lue"]}, "n": {"type": ["integer", "null"], "minimum": 1, "maximum": 9},
        "o": {"type": "object", "properties": {"k": {"type": "array", "items": {"enum": [1, true, null, "x"]}}}, "required": ["k"], "additionalProperties": false}});
    let parameters =
        json!({"type": "object", "properties": properties, "required": ["b", "o"], "additionalProperties": false});
    let tools = [Tool { name: "f".into(), parameters: Some(parameters) }];
    for format in ToolFormat::all() {
        let start = compile(format.grammar(&tools, Calls::One, &TOKENIZER).unwrap());
        let mut ended = 0;
        for seed in 0..6 {
            let Some(text) = walk(&start, seed) else { continue };
            ended += 1;
            let (mut parser, mut events) = (format.parser(tools.to_vec().into()), Vec::new());
            parser.push(&text, &mut events);
            parser.finish(&mut events);
            let arguments: String = events
                .iter()
                .filter_map(|event| match event {
                    ToolEvent::Arguments(more) => Some(more.as_str()),
                    _ => None,
                })
                .collect();
            assert!(!events.iter().any(|event| matches!(event, ToolEvent::Text(_))), "{format:?}: {text}: {events:?}");
            let arguments: Value =
                serde_json::from_str(&arguments).unwrap_or_else(|e| panic!("{e}: {text}: {events:?}"));
            assert!(arguments["b"].is_boolean() && arguments["o"]["k"].is_array(), "{format:?}: {text}");
            assert!(arguments.get("n").is_none_or(|n| n.is_null() || n.is_i64()), "{format:?}: {text}");
            assert!(
                arguments.get("e").is_none_or(|e| ["red", "b\"lue"].contains(&e.as_str().unwrap())),
                "{format:?}: {text}"
            );
        }
        assert!(ended > 0, "{format:?}");
    }
}

#[test]
fn a_grammar_binds_after_the_reasoning() {
    let answer = || Grammar::JsonSchema(json!({"enum": [true, {"a": 1}]}).to_string());
    let (closed, open) = ("user\n<think>\n\n</think>\n\n", "assistant\n<think>\n");
    let harmony = "<|channel|>analysis<|message|>Let me see {<|end|><|start|>assistant<|channel|>final<|message|>true";
    for (format, prompt, allowed, refused) in [
        (
            ReasoningFormat::Qwen3,
            "assistant\n",
            &["true", "<think>x</think>true", "<think>\nx {\n</think>\n\n{\"a\": 1}"][..],
            &["<think>x", "x</think>true", "x"][..],
        ),
        (ReasoningFormat::Qwen3, open, &["x</think>\n\ntrue", "</think>true"], &["true", "x</think>x"]),
        (ReasoningFormat::Qwen3, closed, &["true"], &["x</think>true", "<think>x</think>true"]),
        (ReasoningFormat::DeepseekR1, "assistant\n", &["x</think>\n\ntrue"], &["true", "<think>x</think>x"]),
        (ReasoningFormat::DeepseekR1, closed, &["true"], &["x</think>true"]),
        (ReasoningFormat::Mistral, "assistant\n", &["true", "[THINK]x[/THINK]true"], &["[THINK]x"]),
        (
            ReasoningFormat::Gemma4,
            "assistant\n",
            &["true", "<|channel>thought\nx<channel|>true"],
            &["<|channel>thought\nx"],
        ),
        (
            ReasoningFormat::GptOss,
            "<|start|>assistant",
            &[harmony, "<|channel|>final<|message|>true"],
            &["true", "<|channel|>final<|message|>x"],
        ),
        (
            ReasoningFormat::GptOss,
            "",
            &[],
            &["<|channel|>commentary<|message|>x<|end|><|start|>assistant<|channel|>final<|message|>true"],
        ),
        (ReasoningFormat::Off, open, &["true"], &["x</think>true"]),
    ] {
        let start = compile(format.grammar(prompt, answer(), false, &TOKENIZER));
        for text in allowed {
            assert!(allows(&start, text), "{format:?} after {prompt:?}: {text}");
        }
        for text in refused {
            assert!(!allows(&start, text), "{format:?} after {prompt:?}: {text}");
        }
    }
    // A marker that ends a thought ends it, however often it comes.
    let start = compile(ReasoningFormat::Qwen3.grammar("<think>", answer(), false, &TOKENIZER));
    assert!(!allows(&start, "x</think>x</think>true") && allows(&start, "x </thin </think>true"));
    let start = compile(ReasoningFormat::GptOss.grammar("", answer(), false, &TOKENIZER));
    let nested = "<|channel|>analysis<|message|>a<|channel|>final<|message|>b<|end|><|start|>assistant<|channel|>final<|message|>true";
    assert!(!allows(&start, nested));
    // A grammar that allows the marker applies from the first token.
    let own = Grammar::Choice(vec!["<think>a</think>b".into()]);
    let start = compile(ReasoningFormat::Qwen3.grammar("assistant\n", own, false, &TOKENIZER));
    assert!(allows(&start, "<think>a</think>b") && !allows(&start, "<think>x</think><think>a</think>b"));
    // Calls are messages beside the reasoning.
    let calls = ToolFormat::Harmony.grammar(&tools(), Calls::Optional(None), &TOKENIZER).unwrap();
    let start = compile(ReasoningFormat::GptOss.grammar("", calls, true, &TOKENIZER));
    let thought = "<|channel|>analysis<|message|>x<|end|><|start|>assistant";
    assert!(allows(&start, &format!("{thought}{}", written(ToolFormat::Harmony, true))));
    assert!(!allows(&start, &format!("{thought}{}", written(ToolFormat::Harmony, false))));
    assert!(allows(&start, &format!("{thought}<|channel|>final<|message|>free")));
    // A call in the reasoning is text, with or without a marker of its own.
    for format in [ToolFormat::Hermes, ToolFormat::Glm45, ToolFormat::Llama3Json] {
        let reasoning = ReasoningFormat::Qwen3;
        let (valid, broken) = (written(format, true), written(format, false));
        for (calls, is_free) in [(Calls::Optional(reasoning.opening_text(&TOKENIZER)), true), (Calls::One, false)] {
            let grammar = format.grammar(&tools(), calls, &TOKENIZER).unwrap();
            for (prompt, opening) in [("assistant\n", "<think>"), ("assistant\n<think>\n", "")] {
                let start = compile(reasoning.grammar(prompt, grammar.clone(), true, &TOKENIZER));
                let thought = format!("{opening}hm {broken}</think>\n\n");
                assert!(allows(&start, &format!("{thought}{valid}")), "{format:?} {calls:?}");
                assert!(!allows(&start, &format!("{thought}{broken}")), "{format:?} {calls:?}");
                assert_eq!(allows(&start, &format!("{thought}text")), is_free, "{format:?} {calls:?}");
                assert!(!allows(&start, &broken));
            }
        }
    }
}
