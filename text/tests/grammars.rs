//! Grammars compiled to constraints over vocabularies of a few words, and grammars that are refused.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Map, Value, json};
use text::{Grammar, Grammars, Matcher, Tokenizer};

/// A byte as a byte-level tokenizer spells it.
fn spelled(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    match printable(byte) {
        true => char::from(byte),
        false => char::from_u32(256 + (0..byte).filter(|byte| !printable(*byte)).count() as u32).unwrap(),
    }
}

/// A byte-level tokenizer whose token `i` is `words[i]`.
fn tokenizer(words: &[Vec<u8>]) -> Tokenizer {
    let like = testkit::workspace::root().join("models/tests/reference/qwen2/tokenizer.json");
    let mut file: Value = serde_json::from_slice(&std::fs::read(like).unwrap()).unwrap();
    let word = |word: &Vec<u8>| word.iter().map(|&byte| spelled(byte)).collect::<String>();
    let vocabulary: BTreeMap<String, usize> = words.iter().map(word).zip(0..).collect();
    assert_eq!(vocabulary.len(), words.len(), "no word twice");
    (file["added_tokens"], file["model"]["merges"]) = (json!([]), json!([]));
    file["model"]["vocab"] = json!(vocabulary);
    let folder = tempfile::TempDir::new().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
    Tokenizer::load(folder.path()).unwrap()
}

fn grammars(words: &[Vec<u8>]) -> Arc<Grammars> {
    Arc::new(Grammars::new(Arc::new(tokenizer(words)), 10 << 20))
}

/// The matcher at the start of a grammar over these words, or why it is refused.
fn compile(words: &[&str], grammar: Grammar) -> Result<Matcher, String> {
    let words: Vec<Vec<u8>> = words.iter().map(|word| word.as_bytes().to_vec()).collect();
    grammars(&words).compile_blocking(&grammar).map_err(|error| error.to_string())
}

/// Why a schema is refused over a vocabulary of single bytes, if it is.
fn refusal(schema: &Value) -> Option<String> {
    let grammar = Grammar::JsonSchema(schema.to_string());
    bytes().compile_blocking(&grammar).err().map(|error| error.to_string())
}

/// The tokens that a matcher allows next, in ascending order, and whether the text may end.
pub(crate) fn next(matcher: &mut Matcher) -> Option<(Vec<u32>, bool)> {
    let mask = matcher.mask().ok()?;
    let is_set = |token: &u32| mask.words[*token as usize / 32] >> (token % 32) & 1 == 1;
    Some(((0..matcher.vocab_size() as u32).filter(is_set).collect(), mask.may_end))
}

/// A compiler over a vocabulary of single bytes.
pub(crate) fn bytes() -> Arc<Grammars> {
    grammars(&(0..=255).map(|byte| vec![byte]).collect::<Vec<_>>())
}

/// Whether a grammar over single bytes matches a whole text.
pub(crate) fn matches(start: &Matcher, text: &str) -> bool {
    let mut constraint = start.clone();
    let accepted = text.bytes().map(u32::from).all(|byte| {
        next(&mut constraint).is_some_and(|(tokens, _)| tokens.contains(&byte)) && constraint.accept(byte).is_ok()
    });
    accepted && (constraint.is_complete() || next(&mut constraint).is_some_and(|(_, may_end)| may_end))
}

#[test]
fn a_choice_allows_every_spelling_of_its_texts() {
    let words = ["a", "b", "ab", "abc", "c", "\u{e9}", "x", "abab"];
    let choices = Grammar::Choice(vec!["ab".into(), "abc".into(), "\u{e9}\"".into()]);
    let mut constraint = compile(&words, choices).unwrap();
    assert_eq!(next(&mut constraint).unwrap(), (vec![0, 2, 3, 5], false));
    constraint.accept(2).unwrap();
    assert_eq!(next(&mut constraint).unwrap(), (vec![4], true));
    assert!(!constraint.is_complete());
    let mut fork = constraint.clone();
    fork.accept(4).unwrap();
    assert!(fork.is_complete() && !constraint.is_complete());
    assert_eq!(next(&mut fork).unwrap(), (vec![], true));
    assert!(constraint.accept(0).is_err());
}

#[test]
fn white_space_between_parts_of_json_is_bounded() {
    let words = ["{", "}", " ", "\n", "\t"];
    let after = |taken: &[u32]| {
        let mut constraint = compile(&words, Grammar::JsonObject).unwrap();
        taken.iter().for_each(|&token| constraint.accept(token).unwrap());
        next(&mut constraint).unwrap().0
    };
    assert_eq!(after(&[0]), [1, 2, 3], "a blank or a line break");
    assert_eq!(after(&[0, 2]), [1], "one blank");
    assert_eq!(after(&[0, 3]), [1, 2, 4], "a line break and its indentation");
    let deep: Vec<u32> = [vec![0, 3], vec![2; 64]].concat();
    assert_eq!(after(&deep), [1]);
}

#[test]
fn a_grammar_of_the_empty_text_is_complete_at_once() {
    assert!(compile(&["a"], Grammar::Regex(String::new())).unwrap().is_complete());
}

#[test]
fn an_invalid_grammar_is_refused_in_one_line() {
    for (grammar, named) in [
        (Grammar::Regex("(a".into()), "regex"),
        (Grammar::Regex("(?=a)b".into()), "look-around, including look-ahead and look-behind, is not supported"),
        (Grammar::Regex("(a)\\1".into()), "backreferences are not supported"),
        (Grammar::Lark("start: nowhere".into()), "nowhere"),
        (Grammar::Lark("".into()), ""),
        (Grammar::JsonSchema("{".into()), "EOF"),
        (Grammar::JsonSchema(r#"{"type": "banana"}"#.into()), "banana"),
        (Grammar::JsonSchema(r##"{"$ref": "#/nowhere"}"##.into()), "nowhere"),
        (Grammar::JsonSchema("false".into()), "false"),
        (Grammar::JsonSchema(r#"{"allOf": [{"type": "string"}, {"type": "null"}]}"#.into()), ""),
    ] {
        let problem = compile(&["a", "\"", "{"], grammar.clone()).err();
        let problem = problem.unwrap_or_else(|| panic!("{grammar:?} was compiled"));
        assert!(problem.contains(named) && !problem.contains('\n') && !problem.is_empty(), "{grammar:?}: {problem}");
    }
}

#[test]
fn size_and_nesting_are_refused_before_anything_is_compiled() {
    let grammars = Arc::new(Grammars::new(Arc::new(tokenizer(&[b"a".to_vec()])), 1000));
    let problem = |grammar| grammars.compile_blocking(&grammar).err().unwrap().to_string();
    assert!(problem(Grammar::Regex("a".repeat(1001))).starts_with("found a grammar of"));
    assert!(problem(Grammar::Regex("(".repeat(200))).contains("200 deep"));
    assert!(problem(Grammar::Choice(vec![])).contains("at least one"));
}

fn list(count: usize, one: impl Fn(usize) -> Value) -> Value {
    (0..count).map(one).collect()
}

#[test]
fn schemas_as_people_write_them_are_within_the_bound() {
    let variant = |i: usize| {
        let properties: Map<String, Value> = (0..20)
            .map(|p| (format!("p{p}"), json!({"type": "string", "description": "text", "maxLength": 20})))
            .chain([("kind".to_string(), json!({"const": format!("kind {i}")}))])
            .collect();
        json!({"type": "object", "properties": properties, "required": ["kind", "p1", "p2"]})
    };
    let defs: Map<String, Value> = (0..150).map(|i| (format!("d{i}"), variant(i))).collect();
    for schema in [
        json!({"oneOf": list(100, variant)}),
        json!({"$defs": defs, "anyOf": list(150, |i| json!({"$ref": format!("#/$defs/d{i}")}))}),
        json!({"$defs": defs, "oneOf": list(100, |i| json!({"$ref": format!("#/$defs/d{i}")}))}),
        json!({"$defs": defs, "allOf": list(10, |i| json!({"$ref": format!("#/$defs/d{i}")}))}),
        json!({"type": "object", "properties": {"x": {"type": "string", "enum": list(2000, |i| json!(format!("{i}")))}}}),
        json!({"type": "array", "items": {"oneOf": [{"type": "string"}, {"type": "null"}, variant(1)]}}),
    ] {
        let shown: String = schema.to_string().chars().take(100).collect();
        // Some have another fault, which is found only when they are compiled.
        let problem = refusal(&schema).filter(|problem| problem.contains("fewer options"));
        assert_eq!(problem, None, "{shown}");
    }
}

#[test]
fn products_of_alternatives_and_pairs_of_many_options_are_refused() {
    let consts = |count| json!({"oneOf": list(count, |i| json!({"const": i}))});
    let names: Map<String, Value> = (0..4000).map(|i| (format!("p{i}"), json!(true))).collect();
    let set = |i: usize| json!({"enum": list(100, |v| json!(format!("{i} {v}")))});
    let twice = |value: Value| json!([value.clone(), value]);
    for schema in [
        consts(12_000),
        json!({"oneOf": list(100, set)}),
        json!({"allOf": twice(consts(300))}),
        json!({"allOf": twice(json!({"properties": {"x": consts(300)}}))}),
        json!({"allOf": twice(json!({"items": consts(300)}))}),
        json!({"allOf": [{"properties": {"x": consts(300)}}, {"additionalProperties": consts(300)}]}),
        json!({"properties": names, "enum": list(10_000, |i| json!(i))}),
        json!({"$defs": {"big": {"properties": names}}, "anyOf": list(6000, |_| json!({"$ref": "#/$defs/big", "type": "object"}))}),
        json!({"allOf": list(9000, |i| if i == 0 { json!({"properties": names}) } else { json!({"minProperties": i}) })}),
        json!({"allOf": [consts(2000), list(5000, |_| json!({})), {"allOf": list(5000, |_| json!({}))}]}),
    ] {
        let problem = refusal(&schema);
        assert!(
            problem.is_some_and(|problem| problem.contains("fewer options")),
            "{}",
            schema.to_string().chars().take(100).collect::<String>()
        );
    }
}

/// Not a check but a measurement: `cargo test -p text --release --test all mask_times -- --ignored --nocapture`.
#[test]
#[ignore = "only a measurement"]
fn mask_times_over_a_vocabulary_of_50_000() {
    // Pronounceable words, with and without a space before them, beside every single byte.
    let mut words: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    let syllables: Vec<String> =
        "bdfgklmnprstvz".chars().flat_map(|c| "aeiou".chars().map(move |v| format!("{c}{v}"))).collect();
    let digits = (0..1000).map(|n: u32| n.to_string());
    let marks = ["{\"", "\":", "\", \"", "\"}", ": {", "[{", "}]", "\n  ", "\n    ", ", "].map(str::to_string);
    words.extend(digits.chain(marks).map(String::into_bytes));
    for i in 0.. {
        let word = format!(
            "{}{}{}",
            syllables[i % 70],
            syllables[i / 70 % 70],
            if i < 4900 { "" } else { &syllables[i / 4900] }
        );
        for space in ["", " "] {
            words.push(format!("{space}{word}").into_bytes());
        }
        if words.len() >= 50_000 {
            break;
        }
    }
    let start = Instant::now();
    let grammars = grammars(&words);
    grammars.compile_blocking(&Grammar::Regex("a".into())).unwrap();
    println!("{} tokens, indexed in {:?}", words.len(), start.elapsed());
    let schema = serde_json::json!({"type": "object", "properties": {
        "name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}, "mail": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}}, "kind": {"enum": ["cat", "dog"]}},
        "required": ["name", "age", "tags", "kind"], "additionalProperties": false});
    let (mut all, mut seed) = (Vec::new(), 1u64);
    for grammar in [
        Grammar::JsonSchema(schema.to_string()),
        Grammar::JsonObject,
        Grammar::Regex("[a-z ]{5,200}[0-9]{3}".into()),
        Grammar::Lark("start: item (\", \" item)*\nitem: /[a-z]+/ \"=\" /[0-9]+/".into()),
    ] {
        let start = Instant::now();
        let first = grammars.compile_blocking(&grammar).unwrap();
        let compiled = start.elapsed();
        let mut times = Vec::new();
        for _ in 0..20 {
            let mut matcher = first.clone();
            for _ in 0..100 {
                let start = Instant::now();
                matcher.clone().mask().unwrap();
                times.push(start.elapsed());
                let tokens = next(&mut matcher).unwrap().0;
                if tokens.is_empty() {
                    break;
                }
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                matcher.accept(tokens[(seed >> 33) as usize % tokens.len()]).unwrap();
                if matcher.is_complete() {
                    break;
                }
            }
        }
        times.sort_unstable();
        let at = |share: usize| times[(times.len() - 1) * share / 1000];
        let mean = times.iter().sum::<std::time::Duration>() / times.len() as u32;
        let shown: String = format!("{grammar:?}").chars().take(30).collect();
        let (masks, median, p99, most) = (times.len(), at(500), at(990), at(1000));
        println!(
            "{shown}: compiled in {compiled:?}; {masks} masks, mean {mean:?}, p50 {median:?}, p99 {p99:?}, max {most:?}"
        );
        all.extend(times);
    }
    all.sort_unstable();
    println!("all: p50 {:?} p99 {:?}", all[all.len() / 2], all[all.len() * 99 / 100]);
}
