//! Grammars that would take too much stack, memory or time, and the largest that are served.

use serde_json::{Map, Value, json};
use text::{Grammar, Matcher};

use crate::grammars::{bytes, matches};

fn compiled(grammar: Grammar) -> Result<Matcher, String> {
    bytes().compile_blocking(&grammar).map_err(|error| error.to_string())
}

fn schema(schema: &Value) -> Grammar {
    Grammar::JsonSchema(schema.to_string())
}

/// Rules or terminals of which each is the next one between these texts.
fn chain(count: usize, letter: char, [open, close]: [&str; 2]) -> Grammar {
    let rule = |i: usize| format!("{letter}{i}:{open}{letter}{}{close}\n", i + 1);
    let rules: String = (0..count).map(rule).collect();
    Grammar::Lark(format!("start:{letter}0\n{rules}{letter}{count}:\"x\"\n"))
}

/// Definitions of which each refers to the next one.
fn references(count: usize, one: impl Fn(String) -> Value) -> Grammar {
    let mut all: Map<String, Value> = (0..count).map(|i| (i.to_string(), one(format!("#/$defs/{}", i + 1)))).collect();
    all.insert(count.to_string(), json!({"type": "null"}));
    schema(&json!({"type": "object", "$ref": "#/$defs/0", "$defs": all}))
}

#[test]
fn what_would_overflow_the_stack_is_refused_in_one_line() {
    let names = |count: usize| (0..count).map(|i| format!("{i}")).collect::<Vec<_>>();
    let each = |count: usize| names(count).into_iter().map(|name| (name, json!(true))).collect::<Map<_, _>>();
    let elements: Vec<Value> =
        (1..20_000).map(|i| json!({"type": "null", "$ref": format!("#/prefixItems/0{i}")})).collect();
    for (grammar, named) in [
        (chain(40_000, 'a', ["", ""]), "rules, brackets and negations"),
        (chain(40_000, 'A', ["", ""]), "rules, brackets and negations"),
        (chain(5_000, 'a', ["(((((((((", ")))))))))"]), "rules, brackets and negations"),
        (Grammar::Lark(format!("start: {}\"a\"", "~".repeat(400_000))), "rules, brackets and negations"),
        (Grammar::Regex("(".repeat(400_000)), "nested"),
        (Grammar::Ebnf(format!("root ::= {}", "(".repeat(400_000))), "nested"),
        (references(20_000, |next| json!({"$ref": next})), "levels"),
        (references(20_000, |next| json!({"type": "null", "$ref": next})), "levels"),
        (references(9_000, |next| json!({"properties": {"a": {"type": "object", "$ref": next}}})), "levels"),
        (schema(&json!({"prefixItems": elements, "$ref": "#/prefixItems/00"})), "00"),
        (schema(&json!({"required": names(100_000)})), "names"),
        (schema(&json!({"properties": each(40_000)})), "names"),
        (schema(&json!({"const": each(40_000)})), "names"),
    ] {
        let shown: String = format!("{grammar:?}").chars().take(80).collect();
        let problem = compiled(grammar).err().unwrap_or_else(|| panic!("{shown} was compiled"));
        assert!(problem.contains(named) && !problem.contains('\n') && problem.len() < 400, "{shown}: {problem}");
    }
}

#[test]
fn the_longest_chains_that_are_not_refused_compile() {
    let count = 9_000;
    assert!(matches(&compiled(chain(count, 'a', ["(", ")"])).unwrap(), "x"));
    assert!(matches(&compiled(chain(2 * count, 'A', ["", ""])).unwrap(), "x"));
    for schema in [
        references(1_500, |next| json!({"properties": {"a": {"type": "object", "$ref": next}}})),
        references(3_000, |next| json!({"type": ["null", "object"], "$ref": next})),
    ] {
        // They may have other faults, which are found behind the recursion.
        let problem = compiled(schema).err().unwrap_or_default();
        assert!(!problem.contains("levels"), "{problem}");
    }
}

#[test]
fn what_would_take_long_or_much_memory_is_refused() {
    let patterns = |count: usize| (0..count).map(|i| (format!("^k{i:05}$"), json!({}))).collect::<Map<_, _>>();
    let strings = |count: usize| {
        let one = |i: usize| json!({"type": "string", "pattern": format!("a{i}"), "maxLength": 60});
        (0..count).map(|i| (format!("k{i}"), one(i))).collect::<Map<_, _>>()
    };
    let all: Vec<Value> = (0..90).map(|i| json!({"patternProperties": {format!("^k{i:05}$"): {}}})).collect();
    for (grammar, named) in [
        (schema(&json!({"patternProperties": patterns(300)})), "fewer patterns"),
        (schema(&json!({"allOf": all})), "fewer patterns"),
        (
            schema(&json!({"anyOf": (0..5).map(|_| json!({"properties": strings(900)})).collect::<Value>()})),
            "fewer patterns",
        ),
        (Grammar::Regex("[ab]?".repeat(20_000)), "repetitions and character classes"),
        (Grammar::Regex("\\W|\\D".repeat(20_000)), "repetitions and character classes"),
        (Grammar::Lark(format!("start: /{}/", "\\W|\\D".repeat(20_000))), "repetitions and character classes"),
        (schema(&json!({"pattern": "[ab]?".repeat(20_000)})), "repetitions and character classes"),
    ] {
        let shown: String = format!("{grammar:?}").chars().take(80).collect();
        let problem = compiled(grammar).err().unwrap_or_else(|| panic!("{shown} was compiled"));
        assert!(problem.contains(named), "{shown}: {problem}");
    }
    assert!(compiled(schema(&json!({"patternProperties": patterns(40)}))).is_ok());
}

#[test]
fn as_many_choices_and_optional_properties_as_are_accepted_are_served() {
    let choices: Vec<String> = (0..4096).map(|i| format!("choice {i}")).collect();
    let constraint = compiled(Grammar::Choice(choices)).unwrap();
    assert!(matches(&constraint, "choice 4095") && matches(&constraint, "choice 7"));
    assert!(!matches(&constraint, "choice 4096") && !matches(&constraint, "choice"));
    let properties: Map<String, Value> = (0..700).map(|i| (format!("k{i}"), json!({"type": "null"}))).collect();
    let constraint =
        compiled(schema(&json!({"type": "object", "properties": properties, "additionalProperties": false}))).unwrap();
    assert!(matches(&constraint, r#"{"k3":null,"k699":null}"#) && matches(&constraint, "{}"));
    assert!(!matches(&constraint, r#"{"k700":null}"#));
}
