//! Structural tags in both forms: which texts they match, and which are refused.

use serde_json::{Value, json};
use text::structural_tag;

use crate::grammars::{bytes, matches};

#[track_caller]
fn check(tag: &Value, yes: &[&str], no: &[&str]) {
    for tag in [tag.clone(), Value::from(tag.to_string())] {
        let constraint = bytes().compile_blocking(&structural_tag(&tag).unwrap()).unwrap();
        for (texts, expected) in [(yes, true), (no, false)] {
            for text in texts {
                assert_eq!(matches(&constraint, text), expected, "{text:?} in {tag}");
            }
        }
    }
}

#[test]
fn text_is_free_up_to_a_trigger_and_a_tag_has_its_form() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": false});
    let one = |name: &str| json!({"begin": format!("<f={name}>"), "schema": schema, "end": "</f>"});
    let old = json!({"type": "structural_tag", "structures": [one("x"), one("y")], "triggers": ["<f="]});
    let content = json!({"type": "json_schema", "json_schema": schema});
    let tag = |name: &str| json!({"type": "tag", "begin": format!("<f={name}>"), "content": content, "end": "</f>"});
    let format = json!({"type": "triggered_tags", "triggers": ["<f="], "tags": [tag("x"), tag("y")]});
    let new = json!({"type": "structural_tag", "format": format});
    for tag in [old, new] {
        check(
            &tag,
            &["", "free < text", "a<f=x>{\"a\": null}</f>b", "<f=y>{\"a\":null}</f><f=x>{\"a\":null}</f>"],
            &["a<f=", "<f=z>", "<f=x>{}</f>", "<f=x>{\"a\":null}"],
        );
    }
    let mut first = json!({"format": format});
    (first["format"]["at_least_one"], first["format"]["stop_after_first"]) = (json!(true), json!(true));
    check(&first, &["a<f=x>{\"a\":null}</f>"], &["a", "<f=x>{\"a\":null}</f>b"]);
}

#[test]
fn formats_are_combined() {
    let think = json!({"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"});
    let digit = json!({"type": "tag", "begin": "[", "content": {"type": "regex", "pattern": "[0-9]/"}, "end": "]"});
    let list = json!({"type": "tags_with_separator", "tags": [digit], "separator": ", "});
    let or = json!({"type": "or", "elements": [{"type": "const_string", "value": "none"}, list]});
    let whole = json!({"type": "structural_tag", "format": {"type": "sequence", "elements": [think, or]}});
    check(
        &whole,
        &["<t>any < text</t>none", "<t></t>[1/], [2/]", "<t></t>"],
        &["none", "<t>a</t>[1/] [2/]", "<t>a</t>[1]", "<t>a"],
    );
}

#[test]
fn an_invalid_tag_is_refused_in_one_line() {
    for (tag, named) in [
        (json!({"format": {"type": "qwen_xml_parameter"}}), "qwen_xml_parameter"),
        (json!({"format": {"type": "tag", "begin": "a", "content": {"type": "any_text"}}}), "end"),
        (json!({"format": {"type": "or", "elements": []}}), "elements"),
        (json!({"structures": [{"begin": "x", "schema": {}, "end": ""}], "triggers": ["y"]}), "trigger"),
        (json!({"structures": [{"begin": "x", "end": ""}], "triggers": ["x"]}), "JSON schema"),
        (json!("{"), "JSON"),
        (json!(5), "no type"),
    ] {
        let problem = structural_tag(&tag).unwrap_err();
        assert!(problem.contains(named) && !problem.contains('\n'), "{tag}: {problem}");
    }
}
