//! The table of tool formats: the example of each is a call, arguments of every kind survive, and no split changes anything.

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use text::ToolEvent::{Arguments, Call, Text};
use text::{ReasoningFormat, Tool, ToolFormat};

/// What a text says: its text, and the names and arguments of its calls.
type Parsed = (String, Vec<(String, String)>);

fn tools() -> Vec<Tool> {
    let properties = json!({
        "s": {"type": "string"}, "n": {"type": "number"}, "i": {"type": "integer"}, "b": {"type": "boolean"},
        "o": {"type": "object"}, "a": {"type": "array"}, "x": {}, "m": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    });
    let parameters = Some(json!({"type": "object", "properties": properties}));
    vec![Tool { name: "f".into(), parameters }, Tool { name: "g".into(), parameters: None }]
}

fn parse<'a>(format: ToolFormat, pieces: impl IntoIterator<Item = &'a str>) -> Parsed {
    let mut parser = format.parser(tools().into());
    let mut events = Vec::new();
    pieces.into_iter().for_each(|piece| parser.push(piece, &mut events));
    parser.finish(&mut events);
    let mut parsed = Parsed::default();
    for event in events {
        match event {
            Text(text) => parsed.0 += &text,
            Call { name } => parsed.1.push((name, String::new())),
            Arguments(more) => parsed.1.last_mut().unwrap().1 += &more,
        }
    }
    parsed
}

/// Formats whose calls are JSON objects with the name: the beginning of one call may be the end of the text before.
fn is_object(format: ToolFormat) -> bool {
    use ToolFormat::{
        CohereCommand3, Granite, Hermes, HunyuanA13b, Internlm, Llama3Json, Mistral, NemotronJson, Phi4Mini,
    };
    let all = [CohereCommand3, Granite, Hermes, HunyuanA13b, Internlm, Llama3Json, Mistral, NemotronJson, Phi4Mini];
    all.contains(&format)
}

fn marked() -> impl Iterator<Item = ToolFormat> {
    ToolFormat::all().filter(|format| !is_object(*format))
}

fn anchored(format: ToolFormat) -> bool {
    matches!(format, ToolFormat::Pythonic | ToolFormat::Llama3Json | ToolFormat::Glm4)
}

/// A literal as a format writes it.
fn literal(value: &Value, format: ToolFormat) -> String {
    use ToolFormat::{Lfm2, Llama4Pythonic, Olmo3, Pythonic};
    let python = matches!(format, Pythonic | Llama4Pythonic | Olmo3 | Lfm2);
    let mark = if format == ToolFormat::Gemma4 { "<|\"|>" } else { "<escape>" };
    let list = |items: Vec<String>| items.join(if python { ", " } else { "," });
    match value {
        Value::Bool(true) if python => "True".into(),
        Value::Bool(false) if python => "False".into(),
        Value::Null if python => "None".into(),
        Value::String(text) if python && !text.contains(['\'', '\\', '\n', '\r']) => format!("'{text}'"),
        Value::String(text) if !python => format!("{mark}{text}{mark}"),
        Value::Array(items) => format!("[{}]", list(items.iter().map(|item| literal(item, format)).collect())),
        Value::Object(fields) => {
            let pair = |(key, value): (&String, &Value)| {
                let key = if python { json!(key).to_string() } else { key.clone() };
                format!("{key}:{}", literal(value, format))
            };
            format!("{{{}}}", list(fields.iter().map(pair).collect()))
        }
        other => other.to_string(),
    }
}

/// A call as a format writes it, without the markers around all calls.
fn call(format: ToolFormat, arguments: &Map<String, Value>) -> String {
    let object = Value::from(arguments.clone());
    let raw = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_string);
    let pairs = |write: &dyn Fn(&str, &Value) -> String| {
        arguments.iter().map(|(key, value)| write(key, value)).collect::<Vec<_>>()
    };
    match format {
        ToolFormat::Harmony => {
            format!("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{object}<|call|>")
        }
        ToolFormat::KimiK2 => {
            format!("<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{object}<|tool_call_end|>")
        }
        ToolFormat::DeepseekV3 => {
            format!("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{object}\n```<｜tool▁call▁end｜>")
        }
        ToolFormat::DeepseekV31 => format!("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{object}<｜tool▁call▁end｜>"),
        ToolFormat::Glm45 => {
            let pair =
                |key: &str, value: &Value| format!("<arg_key>{key}</arg_key>\n<arg_value>{}</arg_value>\n", raw(value));
            format!("<tool_call>f\n{}</tool_call>", pairs(&pair).concat())
        }
        ToolFormat::Qwen3Coder => {
            let pair = |key: &str, value: &Value| format!("<parameter={key}>\n{}\n</parameter>\n", raw(value));
            format!("<tool_call>\n<function=f>\n{}</function>\n</tool_call>", pairs(&pair).concat())
        }
        ToolFormat::Gemma4 => format!("<|tool_call>call:f{}<tool_call|>", literal(&object, format)),
        ToolFormat::FunctionGemma => {
            format!("<start_function_call>call:f{}<end_function_call>", literal(&object, format))
        }
        ToolFormat::Llama4Pythonic | ToolFormat::Pythonic | ToolFormat::Olmo3 | ToolFormat::Lfm2 => {
            let pair = |key: &str, value: &Value| format!("{key}={}", literal(value, format));
            let call = format!("f({})", pairs(&pair).join(", "));
            match format {
                ToolFormat::Olmo3 => format!("<function_calls>\n{call}\n</function_calls>"),
                ToolFormat::Lfm2 => format!("<|tool_call_start|>[{call}]<|tool_call_end|>"),
                _ => format!("[{call}]"),
            }
        }
        ToolFormat::SeedOss => {
            let pair = |key: &str, value: &Value| format!("<parameter={key}>\n{}\n</parameter>\n", raw(value));
            format!("<seed:tool_call>\n<function=f>\n{}</function>\n</seed:tool_call>", pairs(&pair).concat())
        }
        ToolFormat::MinimaxM2 => {
            let pair = |key: &str, value: &Value| format!("<parameter name=\"{key}\">{}</parameter>\n", raw(value));
            let all = pairs(&pair).concat();
            format!("<minimax:tool_call>\n<invoke name=\"f\">\n{all}</invoke>\n</minimax:tool_call>")
        }
        ToolFormat::DeepseekV32 => {
            let pair = |key: &str, value: &Value| {
                let (is_text, value) = (value.is_string(), raw(value));
                format!("<｜DSML｜parameter name=\"{key}\" string=\"{is_text}\">{value}</｜DSML｜parameter>\n")
            };
            let all = pairs(&pair).concat();
            let call = format!("<｜DSML｜invoke name=\"f\">\n{all}</｜DSML｜invoke>");
            format!("<｜DSML｜function_calls>\n{call}\n</｜DSML｜function_calls>")
        }
        ToolFormat::CohereCommand3 => {
            let id = "\"tool_call_id\": \"0\", \"tool_name\": \"f\"";
            format!("<|START_ACTION|>[\n    {{{id}, \"parameters\": {object}}}\n]<|END_ACTION|>")
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
        ToolFormat::Hermes => format!("<tool_call>\n{{\"name\": \"f\", \"arguments\": {object}}}\n</tool_call>"),
        ToolFormat::Llama3Json => format!("{{\"name\": \"f\", \"parameters\": {object}}}"),
        ToolFormat::Mistral => format!("[TOOL_CALLS][{{\"name\": \"f\", \"arguments\": {object}}}]"),
    }
}

#[test]
fn the_example_of_every_format_is_a_call_and_its_name_selects_it() {
    for format in ToolFormat::all() {
        let (text, calls) = parse(format, [format.example()]);
        assert_eq!(text, "", "{format:?}");
        assert_eq!(calls[0].0, "f", "{format:?}");
        let arguments: Value = serde_json::from_str(&calls[0].1).unwrap();
        assert_eq!(arguments["x"], 1, "{format:?}: {calls:?}");
        for name in format.names() {
            assert_eq!(name.parse(), Ok(format));
        }
    }
    assert!("nothing".parse::<ToolFormat>().unwrap_err().contains("deepseek_v31"));
}

#[test]
fn the_formats_are_those_of_the_documentation() {
    let docs = std::fs::read_to_string(testkit::workspace::root().join("docs/api.md")).unwrap();
    let names = |names: &[&str]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let code = |text: &str| format!("`{}`", text.replace('|', "\\|").replace('\n', "\u{23ce}"));
    let mut rows: Vec<String> = ToolFormat::all()
        .map(|format| format!("| {} | {} | {} |", names(format.names()), format.models(), code(format.example())))
        .collect();
    rows.extend(ReasoningFormat::all().filter(|format| *format != ReasoningFormat::Off).map(|format| {
        let (open, close) = format.markers();
        format!("| {} | {} | {} |", names(format.names()), code(open), code(close))
    }));
    for row in &rows {
        assert!(docs.contains(row), "docs/api.md: expected the rows\n{}", rows.join("\n"));
    }
}

#[test]
fn a_template_tells_its_format() {
    for (template, format) in [
        ("{{'<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json'}}", ToolFormat::DeepseekV3),
        ("{{'<｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>'}}", ToolFormat::DeepseekV31),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", ToolFormat::KimiK2),
        ("<tool_call>{{name}}<arg_key>", ToolFormat::Glm45),
        ("<tool_call>\n<function=example>\n<parameter=p>", ToolFormat::Qwen3Coder),
        ("<|start|>assistant<|channel|>final<|message|>", ToolFormat::Harmony),
        ("<|tool_call>call:", ToolFormat::Gemma4),
        ("<start_function_call>", ToolFormat::FunctionGemma),
        ("<|python_start|>", ToolFormat::Llama4Pythonic),
        ("<tool_call>", ToolFormat::Hermes),
        ("<tool_call> Environment: ipython", ToolFormat::Hermes),
        ("Environment: ipython", ToolFormat::Llama3Json),
        ("[TOOL_CALLS]", ToolFormat::Mistral),
        ("<seed:tool_call>\n<function=example>\n<parameter=p>", ToolFormat::SeedOss),
        ("<minimax:tool_call>\n<invoke name=", ToolFormat::MinimaxM2),
        ("<｜DSML｜function_calls>", ToolFormat::DeepseekV32),
        ("<|START_ACTION|>[", ToolFormat::CohereCommand3),
        ("<|tool|>{{tools}}<|/tool|>", ToolFormat::Phi4Mini),
        ("<|tool_call|>", ToolFormat::Granite),
        ("<tool_calls>", ToolFormat::HunyuanA13b),
        ("<TOOLCALL>", ToolFormat::NemotronJson),
        ("<|action_start|><|plugin|>", ToolFormat::Internlm),
        ("<function_calls>", ToolFormat::Olmo3),
        ("<|tool_list_start|>", ToolFormat::Lfm2),
        ("<|observation|>", ToolFormat::Glm4),
        ("<|observation|><arg_key>", ToolFormat::Glm45),
    ] {
        let found = ToolFormat::of_texts(|text| template.contains(text)).map(|(format, _)| format);
        assert_eq!(found, Some(format), "{template}");
    }
    assert_eq!(ToolFormat::of_texts(|_| false), None);
}

#[test]
fn several_calls_stand_between_markers_with_text_around_them() {
    let one = |name: &str| (name.to_string(), r#"{"x": 1}"#.to_string());
    let (f, g) = (one("f"), one("g"));
    for (format, text) in [
        (
            ToolFormat::KimiK2,
            "Hi. <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"x\": 1}<|tool_call_end|>\
             <|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{\"x\": 1}<|tool_call_end|><|tool_calls_section_end|>",
        ),
        (
            ToolFormat::DeepseekV3,
            "Hi.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"x\": 1}\n```<｜tool▁call▁end｜>\n\
             <｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{\"x\": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            ToolFormat::DeepseekV31,
            "Hi.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"x\": 1}<｜tool▁call▁end｜>\
             <｜tool▁call▁begin｜>g<｜tool▁sep｜>{\"x\": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            ToolFormat::Glm45,
            "Hi.\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n\
             <tool_call>g<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>\n",
        ),
        (
            ToolFormat::Qwen3Coder,
            "Hi.\n\n<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>\n\
             <function=g><parameter=x>1</parameter></function>",
        ),
        (
            ToolFormat::SeedOss,
            "Hi.\n<seed:tool_call>\n<function=f>\n<parameter=x>1</parameter>\n</function>\n</seed:tool_call>\n\
             <seed:tool_call><function=g><parameter=x>1</parameter></function></seed:tool_call>",
        ),
        (ToolFormat::Gemma4, "Hi.<|tool_call>call:f{x:1}<tool_call|><|tool_call>call:g{x:1}<tool_call|>"),
        (ToolFormat::Llama4Pythonic, "Hi.<|python_start|>[f(x=1), g(x=1)]<|python_end|>"),
        (ToolFormat::Lfm2, "Hi.<|tool_call_start|>[f(x=1), g(x=1)]<|tool_call_end|>"),
        (ToolFormat::Olmo3, "Hi.\n<function_calls>\nf(x=1)\ng(x=1)\n</function_calls>"),
        (
            ToolFormat::MinimaxM2,
            "Hi.\n<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"x\">1</parameter>\n</invoke>\n\
             <invoke name=\"g\">\n<parameter name=\"x\">1</parameter>\n</invoke>\n</minimax:tool_call>",
        ),
        (
            ToolFormat::DeepseekV32,
            "Hi.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"x\" string=\"false\">1\
             </｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"g\">\n\
             <｜DSML｜parameter name=\"x\" string=\"false\">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ),
        (
            ToolFormat::CohereCommand3,
            "Hi.<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": {\"x\": 1}},\n\
             {\"tool_call_id\": \"1\", \"tool_name\": \"g\", \"parameters\": {\"x\": 1}}\n]<|END_ACTION|>",
        ),
        (
            ToolFormat::Granite,
            concat!(
                "Hi.<tool_call>[",
                r#"{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {"x": 1}}]"#
            ),
        ),
        (
            ToolFormat::Phi4Mini,
            concat!(
                "Hi.<|tool_call|>[",
                r#"{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {"x": 1}}]<|/tool_call|>"#
            ),
        ),
        (
            ToolFormat::HunyuanA13b,
            "Hi.<tool_calls>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n{\"name\": \"g\", \"arguments\": {\"x\": 1}}\n</tool_calls>",
        ),
        (
            ToolFormat::Internlm,
            "Hi.<|action_start|><|plugin|>\n{\"name\": \"f\", \"parameters\": {\"x\": 1}}<|action_end|>\n\
             <|action_start|><|plugin|>{\"name\": \"g\", \"parameters\": {\"x\": 1}}<|action_end|>\n",
        ),
    ] {
        assert_eq!(parse(format, [text]), ("Hi.".to_string(), vec![f.clone(), g.clone()]), "{format:?}");
    }
    for format in [ToolFormat::Pythonic, ToolFormat::Llama4Pythonic] {
        assert_eq!(parse(format, ["[f(x = 1 ), g(x=1,),]\n"]), (String::new(), vec![f.clone(), g.clone()]));
        assert_eq!(parse(format, ["[f(x=1)] done"]), (" done".to_string(), vec![f.clone()]));
    }
}

#[test]
fn a_call_without_tags_is_a_call_of_a_known_function() {
    let call = r#"{"name": "f", "arguments": {"x": 1}}"#;
    let one = vec![("f".to_string(), r#"{"x": 1}"#.to_string())];
    let fenced = format!("```json\n{call}\n```");
    for (text, told) in
        [(call.to_string(), ""), (format!("\n{call}\n"), ""), (fenced.clone(), ""), (format!("```\n{call}\n```\n"), "")]
    {
        assert_eq!(parse(ToolFormat::Hermes, text.split("")), (told.to_string(), one.clone()), "{text}");
    }
    let two = format!("{call}\n{call}");
    assert_eq!(parse(ToolFormat::Hermes, two.split("")).1, [one.clone(), one].concat());
    for text in [
        r#"{"name": "unknown", "arguments": {"x": 1}}"#,
        r#"{"x": 1, "name": "f"}"#,
        r#"Text {"name": "f", "arguments": {}}"#,
        "```json\n{\"x\": 1}\n```",
        "```python\nf(x=1)\n```",
        "An example:\n```json\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n```",
    ] {
        assert_eq!(parse(ToolFormat::Hermes, text.split("")), (text.to_string(), vec![]));
    }
}

#[test]
fn the_file_says_which_values_are_text_in_the_format_of_deepseek() {
    let parameter = |key: &str, is_text: bool, value: &str| {
        format!("<｜DSML｜parameter name=\"{key}\" string=\"{is_text}\">{value}</｜DSML｜parameter>\n")
    };
    let all = [
        parameter("x", true, "12"),
        parameter("s", true, " [1]"),
        parameter("i", false, "12"),
        parameter("a", false, "[1, {}]"),
    ];
    let text = format!("<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n{}</｜DSML｜invoke>\n", all.concat());
    let (_, calls) = parse(ToolFormat::DeepseekV32, text.split(""));
    assert_eq!(
        serde_json::from_str::<Value>(&calls[0].1).unwrap(),
        json!({"x": "12", "s": " [1]", "i": 12, "a": [1, {}]})
    );
}

#[test]
fn what_only_looks_like_a_call_is_text_in_every_format() {
    for format in marked() {
        for whole in [
            "",
            " \n x \n",
            "[1, 2]",
            "[f]",
            "[f(x)]",
            "[f(1)]",
            "[unknown(x=1)]",
            "see [f(x=1)]",
            "<tool_call>",
            "<tool_call>{}",
            "<tool_call>\n<function=>",
            "<｜tool▁calls▁begin｜> and",
            "<|tool_call>call:{}",
            "<|channel|>final<|message|>",
            "<func",
            "<tool_call>f and more",
            "<|tool_call_begin|>f:0<|tool_call_argument_begin|>[1]",
        ] {
            let is_call = format == ToolFormat::Llama4Pythonic && whole.contains("<|python_start|>");
            if !is_call {
                assert_eq!(parse(format, [whole]), (whole.to_string(), vec![]), "{format:?}");
            }
        }
    }
}

#[test]
fn values_without_types_have_those_of_the_schema() {
    for (written, expected) in [
        ("s:12", json!("12")),
        ("s:true", json!("true")),
        ("s:{\"a\": 1}", json!("{\"a\": 1}")),
        ("s: a ", json!(" a ")),
        ("n:1.5", json!(1.5)),
        ("i:7", json!(7)),
        ("b:True", json!(true)),
        ("b:false", json!(false)),
        ("o:{\"a\": [1]}", json!({"a": [1]})),
        ("a:[1, \"x\"]", json!([1, "x"])),
        ("x:3", json!(3)),
        ("x:word", json!("word")),
        ("m:null", json!(null)),
        ("m:12", json!("12")),
        ("i:many", json!("many")),
        ("o:{broken", json!("{broken")),
        ("unknown:[1]", json!([1])),
    ] {
        let (key, value) = written.split_once(':').unwrap();
        for (format, text) in [
            (
                ToolFormat::Glm45,
                format!("<tool_call>f<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"),
            ),
            (ToolFormat::Qwen3Coder, format!("<function=f><parameter={key}>\n{value}\n</parameter></function>")),
        ] {
            let (rest, calls) = parse(format, [text.as_str()]);
            let arguments: Value = serde_json::from_str(&calls[0].1).unwrap();
            assert_eq!((rest.as_str(), &arguments[key]), ("", &expected), "{format:?}: {text}");
        }
    }
}

#[test]
fn literals_of_python_become_json() {
    for (written, expected) in [
        ("'it\\'s \"x\"'", json!("it's \"x\"")),
        ("\"\"", json!("")),
        ("''", json!("")),
        ("'''a'b\n''c'''", json!("a'b\n''c")),
        ("\"\\x41\\u00e9\\U0001F642\\n\"", json!("A\u{e9}\u{1f642}\n")),
        ("\"\\ud83d\\ude42\"", json!("\u{1f642}")),
        ("'\\d'", json!("\\d")),
        ("1_000", json!(1000)),
        ("-.5", json!(-0.5)),
        ("1e3", json!(1000.0)),
        ("+2.", json!(2.0)),
        ("None", json!(null)),
        ("(1, 'a', [])", json!([1, "a", []])),
        ("{'a': {1: True}, }", json!({"a": {"1": true}})),
        ("{}", json!({})),
        ("word", json!("word")),
    ] {
        let text = format!("[f(x={written}, b=False)]");
        let (rest, calls) = parse(ToolFormat::Pythonic, [text.as_str()]);
        let arguments: Value = serde_json::from_str(&calls[0].1).unwrap_or_else(|e| panic!("{text}: {e}: {calls:?}"));
        assert_eq!((rest.as_str(), arguments), ("", json!({"x": expected, "b": false})), "{text}");
    }
}

#[test]
fn a_call_cut_by_the_token_limit_keeps_what_it_has() {
    let arguments = json!({"s": "a\u{e9}\"\n", "n": 1.5, "o": {"k": [true, null]}});
    for format in marked() {
        let whole = call(format, arguments.as_object().unwrap());
        for end in (0..whole.len()).filter(|&end| whole.is_char_boundary(end)) {
            let (text, calls) = parse(format, [&whole[..end]]);
            match &calls[..] {
                [] => assert_eq!(text, whole[..end], "{format:?}"),
                [(name, _)] => assert!(name == "f" && whole[..end].contains(name)),
                _ => panic!("{format:?}: {calls:?}"),
            }
        }
    }
}

#[test]
fn a_near_miss_of_a_mark_is_a_part_of_the_string() {
    for (format, mark) in [(ToolFormat::Gemma4, "<|\"|>"), (ToolFormat::FunctionGemma, "<escape>")] {
        for at in 1..mark.len() {
            let (half, rest) = mark.split_at(at);
            for value in [
                half.to_string(),
                format!("{half}{half}"),
                format!("a{half}\u{e9}"),
                format!("{rest}{half}"),
                half.repeat(3),
            ] {
                let whole = call(format, json!({"s": value.clone(), "i": 7}).as_object().unwrap());
                let (text, calls) = parse(format, whole.split(""));
                let found: Value =
                    serde_json::from_str(&calls[0].1).unwrap_or_else(|e| panic!("{whole}: {e}: {calls:?}"));
                assert_eq!((text.as_str(), found), ("", json!({"s": value, "i": 7})), "{format:?}: {whole}");
            }
        }
    }
}

#[test]
fn a_near_miss_of_a_marker_is_text_and_the_marker_after_it_begins_a_call() {
    for format in marked().filter(|format| !anchored(*format)) {
        let whole = call(format, json!({"i": 7}).as_object().unwrap());
        let whole = if format == ToolFormat::Llama4Pythonic { format!("<|python_start|>{whole}") } else { whole };
        let marker = &whole[..=whole.find('>').unwrap()];
        for at in (1..marker.len()).filter(|at| marker.is_char_boundary(*at)) {
            let near = &marker[..at];
            for text in
                [near.to_string(), format!("a {near}"), format!("{near}{near}"), format!("{near} {{\"i\": 7}}{near}")]
            {
                let (told, calls) = parse(format, format!("{text}{whole}").split(""));
                assert_eq!((told, calls.len()), (text, 1), "{format:?}: {near}");
            }
        }
    }
}

#[test]
fn calls_without_arguments_have_an_empty_object() {
    for (format, text) in [
        (ToolFormat::Harmony, "<|channel|>commentary to=functions.f<|message|><|call|>"),
        (ToolFormat::KimiK2, "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|> <|tool_call_end|>"),
        (ToolFormat::DeepseekV3, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n```<｜tool▁call▁end｜>"),
        (ToolFormat::DeepseekV31, "<｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>"),
        (ToolFormat::Glm45, "<tool_call>f</tool_call>"),
        (ToolFormat::Qwen3Coder, "<function=f></function>"),
        (ToolFormat::Gemma4, "<|tool_call>call:f{}<tool_call|>"),
        (ToolFormat::Pythonic, "[f()]"),
    ] {
        assert_eq!(parse(format, text.split("")), (String::new(), vec![("f".into(), "{}".into())]), "{format:?}");
    }
}

#[test]
fn text_that_ends_a_call_too_early_is_kept() {
    let key = "k".repeat(300);
    let (text, calls) = parse(ToolFormat::Glm45, [format!("<tool_call>f<arg_key>{key}").as_str()]);
    assert_eq!((text, calls), (format!("<arg_key>{key}"), vec![("f".into(), "{}".into())]));
    let (_, calls) = parse(ToolFormat::Pythonic, ["[f(x='\\xzz \\u12 \\q')]"]);
    assert_eq!(serde_json::from_str::<Value>(&calls[0].1).unwrap()["x"], "\\xzz \\u12 \\q");
    // A name that is no identifier.
    let (_, calls) = parse(ToolFormat::Pythonic, ["[f(my-key=1, a.b=2)]"]);
    assert_eq!(serde_json::from_str::<Value>(&calls[0].1).unwrap(), json!({"my-key": 1, "a.b": 2}));
}

#[test]
fn references_in_a_schema_take_bounded_time() {
    // Eight levels of 60 alternatives, and a definition that refers to itself.
    let level = |i: usize| json!({"anyOf": vec![json!({"$ref": format!("#/$defs/d{}", i + 1)}); 60]});
    let mut defs: Map<String, Value> = (0..8).map(|i| (format!("d{i}"), level(i))).collect();
    defs.insert("d8".into(), json!({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/d0"}]}));
    let parameters = json!({"$defs": defs, "properties": {"x": {"$ref": "#/$defs/d0"}}});
    let tools = [Tool { name: "f".into(), parameters: Some(parameters) }];
    let start = std::time::Instant::now();
    let (mut parser, mut events) = (ToolFormat::Glm45.parser(tools.into()), Vec::new());
    parser.push("<tool_call>f<arg_key>x</arg_key><arg_value>12</arg_value></tool_call>", &mut events);
    assert!(events.contains(&Arguments("{\"x\": \"12\"}".into())), "{events:?}");
    assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
}

#[test]
fn hostile_text_costs_time_in_proportion_to_its_length() {
    let start = std::time::Instant::now();
    for format in ToolFormat::all() {
        let head = &format.example()[..format.example().find('x').unwrap()];
        for one in ["[", "{", "(", " ", "<", "<|", "<tool_call>", "f(", "'", "<｜tool▁call▁begin｜>", head] {
            for before in ["", head] {
                let whole = format!("{before}{}", one.repeat(2_000 / one.len()));
                let told: usize = parse(format, [whole.as_str()]).1.iter().map(|call| call.1.len()).sum();
                assert!(told <= 8 * whole.len(), "{format:?}: {one:?}");
            }
        }
    }
    assert!(start.elapsed().as_secs() < 30, "{:?}", start.elapsed());
}

fn value(format: ToolFormat) -> impl Strategy<Value = Value> {
    // In these formats nothing escapes the text after a value.
    let text = prop_oneof![
        "[a-z é世🙂\"'\\\\{}\\[\\](),:=\n<>|/_]{0,12}",
        prop::sample::select(vec![
            "<tool_call>",
            "</tool_cal",
            "<|call|",
            "<arg_key>",
            "</arg_value",
            "</parameter",
            "<function=f>",
            "```",
            "<｜tool▁call▁end｜>",
            "<|\"|",
            "<escape",
            "[f(x=1)]",
            "null",
            "12",
            "<|tool_call_end|>",
            "'''",
            "\n\n",
        ])
        .prop_map(str::to_string),
    ];
    let leaf = prop_oneof![
        text.prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        any::<bool>().prop_map(Value::from),
        Just(Value::Null),
        (-1000i32..1000).prop_map(|n| json!(f64::from(n) / 8.0)),
    ];
    let depth = if format == ToolFormat::Hermes { 0 } else { 3 };
    leaf.prop_recursive(depth, 12, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::btree_map("[a-z_]{1,4}", inner, 0..3)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

/// Arguments whose types fit the schema of `f`.
fn arguments() -> impl Strategy<Value = Map<String, Value>> {
    let values = || value(ToolFormat::Mistral);
    prop::collection::vec(values(), 0..5).prop_map(|values| {
        let key = |value: &Value| match value {
            Value::String(_) => "s",
            Value::Number(number) if number.is_f64() => "n",
            Value::Number(_) => "i",
            Value::Bool(_) => "b",
            Value::Null => "m",
            Value::Array(_) => "a",
            Value::Object(_) => "o",
        };
        values.into_iter().map(|value| (key(&value).to_string(), value)).collect()
    })
}

/// The pieces of a text between cuts.
fn pieces<'a>(whole: &'a str, cuts: &[usize]) -> Vec<&'a str> {
    let bounds: Vec<usize> = (0..=whole.len()).filter(|&at| whole.is_char_boundary(at)).collect();
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| bounds[cut % bounds.len()]).chain([0, whole.len()]).collect();
    cuts.sort_unstable();
    cuts.windows(2).map(|cut| &whole[cut[0]..cut[1]]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..Default::default() })]
    #[test]
    fn every_call_gives_its_arguments_however_it_is_cut(
        arguments in arguments(), cuts in prop::collection::vec(0usize..400, 0..12), before in "[a-z<|\\[ \n]{0,6}", after in "[a-z<]{0,4}",
    ) {
        for format in ToolFormat::all() {
            let before = if anchored(format) || format == ToolFormat::Llama4Pythonic { String::new() } else { before.clone() };
            let whole = format!("{before}{}{after}", call(format, &arguments));
            let (text, calls) = parse(format, pieces(&whole, &cuts));
            prop_assert_eq!(calls.len(), 1, "{:?}: {}", format, whole);
            let found: Value = serde_json::from_str(&calls[0].1).map_err(|e| TestCaseError::fail(format!("{format:?} {whole}: {e} {calls:?}")))?;
            prop_assert_eq!(found, Value::Object(arguments.clone()), "{:?}: {}", format, whole);
            prop_assert_eq!(text, format!("{}{after}", before.trim_end()), "{:?}: {}", format, whole);
        }
    }

    #[test]
    fn no_text_panics_and_every_cut_of_it_gives_the_same(
        parts in prop::collection::vec(prop::sample::select(vec![
            "<|channel|>", "commentary to=", "functions.", "f", "<|constrain|>json", "<|message|>", "<|call|>", "<|start|>assistant", "{\"x\": 1}",
            "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
            "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "\n```json\n", "\n```", "<｜tool▁call▁end｜>",
            "<tool_call>", "<arg_key>", "s", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>", "<function=f>", "<parameter=s>",
            "</parameter>", "</function>", "<|tool_call>", "call:f", "{", "}", "x:", "<|\"|>", "<tool_call|>", "<start_function_call>", "<escape>",
            "[", "f(", "x=", "'", "\"", "\\", "\\u12", "'''", "]", ")", ",", "1", " ", "\n", "世", "<|python_start|>", "<|python_end|>", "None",
        ]), 0..16),
        cuts in prop::collection::vec(0usize..400, 0..12),
    ) {
        let whole = parts.concat();
        for format in marked() {
            let expected = parse(format, [whole.as_str()]);
            prop_assert_eq!(&parse(format, pieces(&whole, &cuts)), &expected, "{:?}", format);
            prop_assert_eq!(&parse(format, whole.split("")), &expected, "{:?}", format);
            if expected.1.is_empty() {
                prop_assert_eq!(&expected.0, &whole, "{:?}", format);
            }
        }
    }
}
