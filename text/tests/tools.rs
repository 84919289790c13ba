//! Tool calls in every format: whole calls, text that is no call, and any split.

use proptest::prelude::*;
use text::ToolEvent::{self, Arguments, Call, Text};
use text::{Tool, ToolFormat};

const FORMATS: [ToolFormat; 3] = [ToolFormat::Hermes, ToolFormat::Llama3Json, ToolFormat::Mistral];

/// Appends an event; neighbouring pieces of text, or of arguments, become one.
fn append(events: &mut Vec<ToolEvent>, event: ToolEvent) {
    match (events.last_mut(), event) {
        (Some(Text(text)), Text(more)) | (Some(Arguments(text)), Arguments(more)) => text.push_str(&more),
        (_, Text(empty) | Arguments(empty)) if empty.is_empty() => {}
        (_, event) => events.push(event),
    }
}

fn parse(format: ToolFormat, pieces: &[&str]) -> Vec<ToolEvent> {
    let tools = ["f", "get time"].map(|name| Tool { name: name.into(), parameters: None });
    let mut parser = format.parser(tools.into());
    let mut events = Vec::new();
    for piece in pieces {
        let mut news = Vec::new();
        parser.push(piece, &mut news);
        news.into_iter().for_each(|event| append(&mut events, event));
    }
    let mut news = Vec::new();
    parser.finish(&mut news);
    news.into_iter().for_each(|event| append(&mut events, event));
    events
}

fn text(text: &str) -> ToolEvent {
    Text(text.into())
}

fn call(name: &str) -> ToolEvent {
    Call { name: name.into() }
}

fn arguments(text: &str) -> ToolEvent {
    Arguments(text.into())
}

#[test]
fn hermes_calls_are_between_tags_with_text_around_them() {
    let parse = |text: &str| parse(ToolFormat::Hermes, &[text]);
    let one = r#"<tool_call>{"name": "f", "arguments": {"x": [1, "}\"]"], "y": {}}}</tool_call>"#;
    let args = r#"{"x": [1, "}\"]"], "y": {}}"#;
    assert_eq!(parse(one), [call("f"), arguments(args)]);
    let two = format!("Let me see.\n\n{one}\n{one} \n");
    assert_eq!(parse(&two), [text("Let me see."), call("f"), arguments(args), call("f"), arguments(args)]);
    // Any order, a name alone, arguments as a JSON string, other fields, no closing tag.
    assert_eq!(parse(r#"<tool_call>{"arguments": {"a":1}, "name": "f"}"#), [call("f"), arguments(r#"{"a":1}"#)]);
    assert_eq!(parse(r#"<tool_call> {"name": "f"} </tool_call> done"#), [call("f"), arguments("{}"), text(" done")]);
    let quoted = r#"<tool_call>{"name": "f", "arguments": "{\"a\": 1}", "id": 12}</tool_call>"#;
    assert_eq!(parse(quoted), [call("f"), arguments(r#"{"a": 1}"#)]);
    // Truncated by the token limit: the arguments so far are returned.
    assert_eq!(parse(r#"<tool_call>{"name": "f", "arguments": {"a": "#), [call("f"), arguments(r#"{"a": "#)]);
}

#[test]
fn what_only_looks_like_a_call_is_text_to_the_letter() {
    for (format, texts) in [
        (
            ToolFormat::Hermes,
            &[
                "a < b <tool",
                "see <tool_call>docs",
                "see \n<tool_call> {\"name\": 5} docs",
                "<tool_call>{}",
                " \n x \n",
                "<tool_call><tool_call>",
            ][..],
        ),
        (
            ToolFormat::Llama3Json,
            &["{\"name\": \"Bob\", \"age\": 5} is JSON", "{\"a\": 1}", " {", "<|python", " \n", "x {\"name\": \"f\"}"],
        ),
        (
            ToolFormat::Mistral,
            &[
                "[TOOL",
                "[1, 2] [TOOL_CALL]",
                " \n x \n",
                "see [TOOL_CALLS] docs",
                "see [TOOL_CALLS] the docs {1}",
                "see [TOOL_CALLS] [1, 2] docs",
                "see [TOOL_CALLS] [] docs",
                "see [TOOL_CALLS] [{\"name\": 5}] docs",
                "see [TOOL_CALLS] f[ARG]{}",
                "see [TOOL_CALLS]\n",
                "[TOOL_CALLS]!",
            ],
        ),
    ] {
        for whole in texts {
            assert_eq!(parse(format, &[whole]), [text(whole)], "{format:?}");
        }
    }
}

#[test]
fn llama_calls_are_recognised_only_for_known_functions() {
    let parse = |text: &str| parse(ToolFormat::Llama3Json, &[text]);
    let one = r#"{"name": "f", "parameters": {"x": "é;{"}}"#;
    let args = r#"{"x": "é;{"}"#;
    assert_eq!(parse(one), [call("f"), arguments(args)]);
    assert_eq!(
        parse(&format!(" <|python_tag|>{one}; {one}")),
        [call("f"), arguments(args), call("f"), arguments(args)]
    );
    for behind in [" and so on", "; and so on", ";, {x", "; {\"a\": 1}"] {
        assert_eq!(parse(&format!("{one}{behind}")), [call("f"), arguments(args), text(behind)]);
    }
    assert_eq!(parse(&format!("{one};\n")), [call("f"), arguments(args)], "a separator at the end is none of the text");
}

#[test]
fn mistral_calls_are_a_list_or_a_name_with_arguments() {
    let parse = |text: &str| parse(ToolFormat::Mistral, &[text]);
    let list = r#"Sure. [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "get time", "arguments": {}}] "#;
    assert_eq!(parse(list), [text("Sure."), call("f"), arguments(r#"{"a": 1}"#), call("get time"), arguments("{}")]);
    assert_eq!(
        parse(r#"[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": [{}]}[TOOL_CALLS]g{"b": 2}"#),
        [call("f"), arguments(r#"{"a": [{}]}"#), call("g"), arguments(r#"{"b": 2}"#)]
    );
}

#[test]
fn text_after_a_truncated_call_is_kept() {
    let (hermes, mistral) = (ToolFormat::Hermes, ToolFormat::Mistral);
    let args = r#"{"a": 1}"#;
    for (format, whole, behind) in [
        (hermes, r#"<tool_call>{"name": "f", "arguments": {"a": 1} see docs"#, " see docs"),
        (hermes, r#"<tool_call>{"name": "f", "arguments": {"a": 1}} </tool"#, " </tool"),
        (hermes, r#"<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> <tool_call>x"#, " <tool_call>x"),
        (mistral, r#"[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, see docs"#, ", see docs"),
        (mistral, r#"[TOOL_CALLS] {"name": "f", "arguments": {"a": 1}} ] docs"#, " ] docs"),
        (mistral, r#"[TOOL_CALLS]f[ARGS]{"a": 1} see docs"#, " see docs"),
    ] {
        assert_eq!(parse(format, &[whole]), [call("f"), arguments(args), text(behind)], "{whole}");
    }
    // Cut by the token limit within arguments that are a JSON string.
    for (cut, told) in [(r#""{\"a\": \"b"#, r#"{"a": "b"#), (r#""{\"a\": \"\u00e"#, r#"{"a": ""#)] {
        let whole = format!(r#"<tool_call>{{"name": "f", "arguments": {cut}"#);
        assert_eq!(parse(hermes, &[&whole]), [call("f"), arguments(told)], "{whole}");
    }
}

#[test]
fn arguments_that_are_no_object_and_fields_that_repeat_give_one_object() {
    for format in FORMATS {
        let one = |object: &str| match format {
            ToolFormat::Hermes => format!("<tool_call>{object}</tool_call>"),
            ToolFormat::Mistral => format!("[TOOL_CALLS][{object}]"),
            _ => object.to_string(),
        };
        for (object, told) in [
            (r#"{"name": "f", "arguments": null}"#, "{}"),
            (r#"{"name": "f", "arguments": ""}"#, "{}"),
            (r#"{"name": "f", "arguments": " "}"#, "{}"),
            (r#"{"name": "f", "arguments": {}}"#, "{}"),
            (r#"{"name": "f"}"#, "{}"),
            (r#"{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}}"#, r#"{"a": 1}"#),
            (
                r#"{"name": "f", "arguments": {"a": "</tool_call>[TOOL_CALLS]{\"}"}}"#,
                r#"{"a": "</tool_call>[TOOL_CALLS]{\"}"}"#,
            ),
        ] {
            assert_eq!(parse(format, &[&one(object)]), [call("f"), arguments(told)], "{format:?}: {object}");
        }
        for object in [r#"{"name": ""}"#, r#"{"name": }"#, r#"{"arguments": , "name": "f"}"#] {
            assert_eq!(parse(format, &[&one(object)]), [text(&one(object))], "{format:?}: {object}");
        }
    }
}

#[test]
fn a_name_may_be_as_long_as_the_api_allows() {
    let name = "n".repeat(256);
    for (format, whole) in [
        (ToolFormat::Mistral, format!("[TOOL_CALLS]{name}[CALL_ID]a1b2c3d4e[ARGS]{{}}")),
        (
            ToolFormat::Harmony,
            format!("<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{{}}<|call|>"),
        ),
        (
            ToolFormat::KimiK2,
            format!("<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>"),
        ),
    ] {
        assert_eq!(parse(format, &[&whole]), [call(&name), arguments("{}")], "{format:?}");
    }
}

/// Pieces of which both calls and near misses are made.
fn stream() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        prop::sample::select(vec![
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "<|python_tag|>",
            "{\"name\": \"f\", \"arguments\": {\"a\": 1}}",
            "{\"name\": \"get time\", \"parameters\": {\"b\": \"x\\\"}é\"}}",
            "{\"name\": ",
            "\"arguments\": ",
            "\"{\\\"a\\\": 2}\"",
            "f",
            "{",
            "}",
            "[",
            "]",
            ", ",
            ": ",
            ";",
            "\"",
            "\\",
            " ",
            "\n",
            "世🙂",
            "12",
            "null",
        ])
        .prop_map(str::to_string),
        "[<{a ]{0,4}",
    ];
    prop::collection::vec(piece, 0..14).prop_map(|pieces| pieces.concat())
}

/// Calls of all formats and markup that leads nowhere, with numbered words between them.
fn words() -> impl Strategy<Value = (String, usize)> {
    let piece = prop::sample::select(vec![
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>",
        "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"get time\"}]",
        "[TOOL_CALLS]f[ARGS]{\"a\": 1}",
        "{\"name\": \"f\", \"parameters\": {\"b\": 2}}; ",
        "<tool_call>",
        "</tool_call>",
        "<tool_c",
        "[TOOL_CALLS]",
        " [TOOL",
        "[ARGS]",
        "<|python_tag|>",
        "{\"name\": \"f\", ",
        "{",
        "}",
        "[",
        "]",
        ",",
        ";",
        " ",
        "\n",
        "\u{e9}",
    ]);
    prop::collection::vec((piece, any::<bool>()), 0..14).prop_map(|pieces| {
        let mut words = 0;
        let mut whole = String::new();
        for (piece, word) in pieces {
            whole += piece;
            if word {
                whole += &format!(" word{words}. ");
                words += 1;
            }
        }
        (whole, words)
    })
}

proptest! {
    #[test]
    fn no_word_is_lost_and_text_without_a_call_is_returned_unchanged((whole, words) in words(), other in stream()) {
        for format in FORMATS {
            for (whole, words) in [(&whole, words), (&other, 0)] {
                let events = parse(format, &[whole]);
                let told: String = events.iter().map(|event| match event {
                    Text(told) | Arguments(told) | Call { name: told } => told.as_str(),
                }).collect();
                for word in 0..words {
                    prop_assert!(told.contains(&format!("word{word}.")), "{format:?} of {whole:?}: {events:?}");
                }
                if !events.iter().any(|event| matches!(event, Call { .. })) {
                    prop_assert_eq!(&told, whole, "{:?}", format);
                }
            }
        }
    }

    #[test]
    fn every_split_of_a_stream_gives_the_same_calls(whole in stream(), cuts in prop::collection::vec(0usize..200, 0..12)) {
        let bounds: Vec<usize> = (0..=whole.len()).filter(|&at| whole.is_char_boundary(at)).collect();
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| bounds[cut % bounds.len()]).chain([0, whole.len()]).collect();
        cuts.sort_unstable();
        let pieces: Vec<&str> = cuts.windows(2).map(|cut| &whole[cut[0]..cut[1]]).collect();
        let letters: Vec<&str> = bounds.windows(2).map(|cut| &whole[cut[0]..cut[1]]).collect();
        for format in FORMATS {
            let expected = parse(format, &[&whole]);
            prop_assert_eq!(&parse(format, &pieces), &expected);
            prop_assert_eq!(&parse(format, &letters), &expected);
        }
    }
}
