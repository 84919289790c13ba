//! Keywords of JSON schemas: those that cannot be enforced are left out and named, or refused in a strict schema; and references.

use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use serde_json::{Value, json};
use text::{Grammar, Matcher, with_schema_options, with_white_space};

use crate::grammars::{bytes, matches, next};

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn compile(grammar: Grammar) -> Result<Matcher, String> {
    let grammars = bytes();
    let mut future = std::pin::pin!(grammars.compile(&grammar));
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(result) => return result.map_err(|error| error.to_string()),
            Poll::Pending => std::thread::park(),
        }
    }
}

#[track_caller]
fn check(schema: &Value, unenforced: &[&str], yes: &[&str], no: &[&str]) {
    let compiled = compile(Grammar::JsonSchema(schema.to_string())).unwrap();
    assert_eq!(**compiled.unenforced(), *unenforced, "{schema}");
    for (texts, expected) in [(yes, true), (no, false)] {
        for text in texts {
            assert_eq!(matches(&compiled, text), expected, "{text} in {schema}");
        }
    }
    let strict = compile(Grammar::StrictSchema(schema.to_string()));
    match strict {
        Ok(strict) => assert!(unenforced.is_empty() && strict.unenforced().is_empty(), "{schema} is served as strict"),
        Err(problem) => assert!(!unenforced.is_empty() && !problem.contains('\n'), "{schema}: {problem}"),
    }
}

#[test]
fn a_keyword_that_cannot_be_enforced_is_named_and_the_others_hold() {
    let integers = json!({"type": "array", "items": {"type": "integer"}});
    let with = |mut schema: Value, key: &str, value: Value| {
        schema[key] = value;
        schema
    };
    let (yes, no) = (["[1,1]", "[]"], ["[true]"]);
    check(&with(integers.clone(), "uniqueItems", json!(true)), &["uniqueItems"], &yes, &no);
    check(&with(integers.clone(), "contains", json!({"const": 1})), &["contains"], &yes, &no);
    check(&with(integers.clone(), "not", json!({"const": []})), &["not"], &yes, &no);
    check(&with(with(integers.clone(), "if", json!({})), "then", json!({})), &["if", "then"], &yes, &no);
    check(&with(integers.clone(), "unevaluatedItems", json!(false)), &["unevaluatedItems"], &yes, &no);
    check(&integers, &[], &yes, &no);
    check(&json!({"type": "string", "format": "binary"}), &["format"], &["\"x\""], &["1"]);
    check(&json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}), &["oneOf"], &["1", "1.5"], &["\"\""]);
    let object = json!({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
        "additionalProperties": false});
    let (yes, no) = (["{}", r#"{"a":null,"b":null}"#], [r#"{"c":null}"#]);
    for (key, value) in [
        ("propertyNames", json!({"pattern": "^[a-z]+$"})),
        ("dependentRequired", json!({"a": ["b"]})),
        ("unevaluatedProperties", json!(false)),
        ("minProperties", json!(2)),
        ("maxProperties", json!(2)),
    ] {
        check(&with(object.clone(), key, value), &[key], &yes, &no);
    }
    check(&with(object, "minProperties", json!(1)), &[], &[r#"{"a":null}"#], &["{}"]);
}

#[test]
fn patterns_that_match_the_same_name_are_served_to_the_end_of_the_answer() {
    let patterns = json!({"^a": {"type": "integer"}, "b$": {"type": "null"}});
    let schema = json!({"type": "object", "patternProperties": patterns, "additionalProperties": false});
    check(&schema, &["patternProperties"], &["{}", r#"{"ab":1,"x":null}"#], &[r#"{"ab":"x"}"#]);
    let merged = json!({"allOf": [{"patternProperties": {"^a": true}}, {"patternProperties": {"b$": true}}]});
    assert!(compile(Grammar::JsonSchema(merged.to_string())).is_ok_and(|compiled| {
        **compiled.unenforced() == ["patternProperties"] && matches(&compiled, r#"{"ab":1}"#)
    }));
    let apart = json!({"type": "object", "patternProperties": {"^a": {"type": "integer"}, "^b": {"type": "null"}},
        "additionalProperties": false});
    check(&apart, &[], &[r#"{"ab":1,"ba":null}"#], &[r#"{"ab":null}"#, r#"{"c":1}"#]);
    let named = json!({"type": "object", "properties": {"score": {"type": "integer", "multipleOf": 5}},
        "patternProperties": {"^score$": {"type": "integer"}}, "required": ["score"], "additionalProperties": false});
    check(&named, &[], &[r#"{"score":15}"#], &[r#"{"score":3}"#, "{}"]);
}

#[test]
fn a_pattern_that_matches_only_named_properties_allows_no_further_one() {
    let schema = |pattern: &str, closed: bool| {
        json!({"type": "object", "properties": {"a1": {"type": "integer"}, "a2": {"type": "integer"}},
            "required": ["a1"], "patternProperties": {pattern: {"multipleOf": 5}}, "additionalProperties": !closed})
    };
    for pattern in ["^a[12]$", "^(a1|a2)$", "^a(1|2)?(1|2)$"] {
        let compiled = compile(Grammar::JsonSchema(schema(pattern, true).to_string())).unwrap();
        let is_exact = !pattern.contains('?');
        for text in [r#"{"a1":5"#, r#"{"a1":5,"a2":10"#] {
            let mut at = compiled.clone();
            text.bytes().for_each(|byte| at.accept(byte.into()).unwrap());
            let (tokens, _) = next(&mut at).unwrap();
            let may_follow = tokens.contains(&u32::from(b','));
            assert_eq!(may_follow, !is_exact || !text.contains("a2"), "{text} with {pattern}");
        }
        check(
            &schema(pattern, true),
            &[],
            &[r#"{"a1":5}"#, r#"{"a1":5, "a2":10}"#],
            &[r#"{"a1":4}"#, r#"{"a1":5,"a2":3}"#],
        );
        check(&schema(pattern, false), &[], &[r#"{"a1":5,"b":"x"}"#], &[r#"{"a1":4}"#]);
    }
}

#[test]
fn a_property_that_is_never_valid_does_not_appear() {
    let path = json!({"type": "string", "maxLength": 3});
    for never in [json!({"not": {}}), json!({"not": true}), json!({"not": {}, "description": "none"})] {
        let schema = json!({"type": "object", "properties": {"path": path, "head": never}, "required": ["path"]});
        check(&schema, &[], &[r#"{"path":"a"}"#, r#"{"path":"a","b":1}"#], &[r#"{"path":"a","head":1}"#]);
        let required = json!({"type": "object", "properties": {"head": never}, "required": ["head"]});
        assert!(compile(Grammar::JsonSchema(required.to_string())).is_err_and(|problem| problem.contains("head")));
    }
}

#[test]
fn bounds_of_any_size_compile() {
    for (kind, bounds) in [
        ("integer", json!({"minimum": i64::MIN, "maximum": i64::MAX})),
        ("integer", json!({"minimum": i64::MIN, "maximum": u64::MAX})),
        ("integer", json!({"exclusiveMinimum": -1e300, "exclusiveMaximum": 1e300})),
        ("number", json!({"minimum": i64::MIN, "maximum": i64::MAX})),
        ("number", json!({"minimum": -1e300})),
        ("number", json!({"maximum": f64::MAX})),
        ("number", json!({"exclusiveMinimum": f64::MIN, "exclusiveMaximum": u64::MAX})),
    ] {
        let mut schema = json!({"type": kind});
        schema.as_object_mut().unwrap().extend(bounds.as_object().unwrap().clone());
        check(&schema, &[], &["0", "7", "-123456789012345"], &["\"\"", "-"]);
    }
    let kinds = json!({"type": ["integer", "null"], "minimum": 5, "maximum": u64::MAX});
    check(&kinds, &[], &["5", "9007199254740993", "null"], &["4", "-7"]);
}

#[test]
fn a_grammar_that_matches_nothing_is_refused_in_plain_words() {
    let problems = [
        compile(Grammar::JsonSchema(json!({"$ref": "#"}).to_string())),
        compile(Grammar::Regex("[^\\s\\S]".to_string())),
        compile(Grammar::Lark("start: a\na: b\nb: a".to_string())),
    ];
    for problem in problems {
        assert_eq!(problem.err().unwrap(), "nothing can follow: no text matches the whole grammar");
    }
}

#[test]
fn references_by_path_anchor_and_id_are_followed() {
    let nil = json!({"type": "null"});
    let item = json!({"$id": "item", "$defs": {"n": {"type": "null"}}, "$ref": "#/$defs/n"});
    for (schema, yes) in [
        (json!({"$ref": "#/$defs/a~1b", "$defs": {"a/b": nil}}), "null"),
        (json!({"$ref": "#/$defs/a%20b", "$defs": {"a b": nil}}), "null"),
        (json!({"$ref": "#foo", "$defs": {"a": {"$anchor": "foo", "type": "null"}}}), "null"),
        (json!({"$ref": "#foo", "definitions": {"a": {"$id": "#foo", "type": "null"}}}), "null"),
        (json!({"$id": "http://x/y", "$ref": "http://x/y#/$defs/a", "$defs": {"a": nil}}), "null"),
        (json!({"$id": "http://x/y", "$ref": "#/$defs/a", "$defs": {"a": nil}}), "null"),
        (json!({"$ref": "z", "$defs": {"a": {"$id": "http://x/z", "type": "null"}}}), "null"),
        (json!({"$ref": "item", "$defs": {"i": item, "n": {"type": "integer"}}}), "null"),
        (json!({"properties": {"$ref": nil}, "type": "object", "additionalProperties": false}), r#"{"$ref":null}"#),
    ] {
        check(&schema, &[], &[yes], &["1", "\"\""]);
    }
    let tree = json!({"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#t"}}], "$anchor": "t"});
    check(&tree, &[], &["null", "[[],null]"], &["[1]"]);
    for (reference, named) in [("http://other/schema", "other"), ("#nowhere", "nowhere"), ("#/$defs/%zz", "%zz")] {
        let problem = compile(Grammar::JsonSchema(json!({"$ref": reference}).to_string())).err().unwrap();
        assert!(problem.contains(named), "{problem}");
    }
}

#[test]
fn options_of_the_compiler_in_a_schema_have_no_effect_except_those_of_white_space() {
    let dense = json!({"type": "array", "items": {"type": "null"}, "x-guidance": {"whitespace_flexible": false}});
    check(&dense, &[], &["[null,null]"], &["[null, null]"]);
    let wide = json!({"type": "array", "items": {"type": "null"}, "x-guidance": {"whitespace_pattern": "_{2}"}});
    check(&wide, &[], &["[null,null]", "[null,__null]"], &["[null, null]", "[null,_null]"]);
    let huge = json!({"type": "null", "x-guidance": {"whitespace_pattern": "a?".repeat(10_001)}});
    assert!(compile(Grammar::JsonSchema(huge.to_string())).is_err_and(|problem| problem.contains("repetitions")));
    let schema = json!({"type": "null", "not": {}, "x-guidance": {"lenient": true, "zzz": 1}});
    check(&schema, &["not"], &["null"], &["1"]);
    assert!(compile(Grammar::StrictSchema(schema.to_string())).is_err_and(|problem| problem.contains("not")));
}

#[test]
fn white_space_is_none_or_what_a_pattern_matches_also_where_a_schema_allows_everything() {
    for schema in
        [json!({"type": "object"}), json!({}), json!(true), json!({"x-guidance": {"whitespace_flexible": true}})]
    {
        for pattern in [None, Some("")] {
            let none = with_white_space(schema.clone(), pattern);
            let (yes, no) = (r#"{"a b":[1,{"c":null}]}"#, [r#"{"a": 1}"#, r#"{"a":1 }"#, r#"{ "a":1}"#, "{\"a\":\n1}"]);
            check(&none, &[], &[yes], &no);
        }
        let tabs = with_white_space(schema, Some(r"\t"));
        check(&tabs, &[], &["{\"a\":1}", "{\t\"a\":\t1\t}"], &["{\"a\": 1}", "{\"a\":\t\t1}"]);
    }
}

#[test]
fn a_schema_in_lark_follows_the_same_rule() {
    let lark = |schema: &Value| Grammar::Lark(format!("start: \"<\" %json {schema}\n"));
    let schema = json!({"type": "array", "uniqueItems": true, "items": {"$ref": "#i"}, "$defs": {"i": {"$anchor": "i", "type": "null"}}});
    let compiled = compile(lark(&schema)).unwrap();
    assert_eq!(**compiled.unenforced(), ["uniqueItems"]);
    assert!(matches(&compiled, "<[null]") && !matches(&compiled, "<[1]"));
    assert!(compile(lark(&with_schema_options(schema, true))).is_err_and(|problem| problem.contains("uniqueItems")));
}
