//! Structured output: a text under a grammar always matches it, with any other parameters and under preemption.
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};

use engine::{
    Constraint, ConstraintError, Engine, EngineConfig, FinishReason, GenerationParams, GenerationRequest, Llm, Mask,
    SamplingParams, StopCause, StructuredOutput, SubmitError, TokenEvent, TokenSet,
};
use proptest::prelude::*;
use serde_json::{Value, json};
use text::Grammar;

fn config() -> EngineConfig {
    EngineConfig { kv_cache_memory_bytes: Some(64 << 20), threads: Some(2), ..EngineConfig::default() }
}

static LLM: LazyLock<Mutex<Llm>> = LazyLock::new(|| Mutex::new(Llm::new(config()).unwrap()));

fn held(grammar: Grammar) -> GenerationParams {
    let structured_outputs = Some(StructuredOutput { grammar, param: "structured_outputs" }.into());
    GenerationParams { max_tokens: Some(200), structured_outputs, ..Default::default() }
}

fn hot(seed: u64) -> SamplingParams {
    SamplingParams { temperature: 1.5, seed: Some(seed), ..Default::default() }
}

/// Schemas whose values are bounded.
fn schema() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        prop::collection::vec("[a-zé世🙂\"\\\\]{1,6}", 1..4).prop_map(|texts| json!({"type": "string", "enum": texts})),
        Just(json!({"type": "boolean"})),
        Just(json!({"type": "null"})),
        (-50i64..50, 0i64..100)
            .prop_map(|(low, more)| json!({"type": "integer", "minimum": low, "maximum": low + more})),
        (0usize..3, 0usize..3).prop_map(
            |(low, more)| json!({"type": "string", "pattern": "^[ab]*$", "minLength": low, "maxLength": low + more})
        ),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            (inner.clone(), 0usize..3, 0usize..3).prop_map(|(items, low, more)| {
                json!({"type": "array", "items": items, "minItems": low, "maxItems": low + more})
            }),
            prop::collection::vec(inner, 1..4).prop_map(|values| {
                let properties: HashMap<String, Value> =
                    values.into_iter().zip(0..).map(|(value, i)| (format!("k{i}"), value)).collect();
                let required: Vec<String> = (0..properties.len()).map(|i| format!("k{i}")).collect();
                json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
            }),
        ]
    })
}

fn fits(schema: &Value, value: &Value) -> bool {
    let count = |length: usize, low: &str, high: &str| {
        (schema[low].as_u64().unwrap()..=schema[high].as_u64().unwrap()).contains(&(length as u64))
    };
    match schema["type"].as_str().unwrap() {
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        // Of JSON Schema's integers: a number without a fraction, "-0" among them.
        "integer" => value.as_f64().is_some_and(|n| {
            n.fract() == 0.0 && (schema["minimum"].as_f64().unwrap()..=schema["maximum"].as_f64().unwrap()).contains(&n)
        }),
        "string" if schema["enum"].is_array() => schema["enum"].as_array().unwrap().contains(value),
        "string" => value
            .as_str()
            .is_some_and(|text| text.chars().all(|c| "ab".contains(c)) && count(text.len(), "minLength", "maxLength")),
        "array" => value.as_array().is_some_and(|items| {
            count(items.len(), "minItems", "maxItems") && items.iter().all(|item| fits(&schema["items"], item))
        }),
        _ => value.as_object().is_some_and(|object| {
            let properties = schema["properties"].as_object().unwrap();
            object.len() == properties.len() && properties.iter().all(|(key, schema)| fits(schema, &object[key]))
        }),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..Default::default() })]
    #[test]
    fn what_ends_by_itself_is_json_that_fits_its_schema(schema in schema(), seed: u64, best_of in 0usize..2) {
        let blanks: Vec<(u32, f32)> = {
            let llm = LLM.lock().unwrap();
            let blank = |id: &u32| {
                let bytes = llm.tokenizer().token_bytes(*id);
                !bytes.is_empty() && bytes.iter().all(u8::is_ascii_whitespace)
            };
            // Blanks between the parts of JSON are free, and this model likes them.
            (0..llm.tokenizer().vocab_size() as u32).filter(blank).map(|id| (id, -100.0)).collect()
        };
        let params = GenerationParams {
            n: 2,
            best_of: (best_of > 0).then_some(3),
            sampling: SamplingParams { logit_bias: blanks, logprobs: Some(2), ..hot(seed) },
            ..held(Grammar::JsonSchema(schema.to_string()))
        };
        let answers = LLM.lock().unwrap().generate(&["JSON:"], &params).unwrap();
        for output in &answers[0].outputs {
            match &output.finish_reason {
                Some(FinishReason::Length) => {}
                Some(FinishReason::Stop(_)) => {
                    let value: Value = serde_json::from_str(&output.text).unwrap_or_else(|e| panic!("{e}: {}", output.text));
                    prop_assert!(fits(&schema, &value), "{value} does not fit {schema}");
                }
                other => prop_assert!(false, "{other:?}: {:?} under {schema}", output.text),
            }
        }
    }
}

#[test]
fn each_kind_of_grammar_constrains_the_text_and_ends_it() {
    let choice = |text: &str| ["alpha", "beta gamma", "世界"].contains(&text);
    let shape = |text: &str| {
        let (letters, digits) = text.split_once('-').unwrap();
        letters.len() == 3
            && letters.chars().all(|c| "abc".contains(c))
            && digits.len() == 2
            && digits.parse::<u32>().is_ok()
    };
    let sum = |text: &str| text.split('+').all(|part| part == "1" || part == "2") && text.len() <= 5;
    let object = |text: &str| serde_json::from_str::<Value>(text).is_ok_and(|value| value.is_object());
    type Check<'a> = &'a dyn Fn(&str) -> bool;
    let grammars: [(Grammar, Check); 4] = [
        (Grammar::Choice(["alpha", "beta gamma", "世界"].map(String::from).to_vec()), &choice),
        (Grammar::Regex("[a-c]{3}-[0-9]{2}".into()), &shape),
        (Grammar::Lark("start: n (\"+\" n){0,2}\nn: \"1\" | \"2\"".into()), &sum),
        (Grammar::JsonObject, &object),
    ];
    let mut llm = LLM.lock().unwrap();
    for (grammar, holds) in grammars {
        for (seed, ignore_eos) in [(1, false), (2, false), (3, true)] {
            let params = GenerationParams { sampling: hot(seed), n: 3, ignore_eos, ..held(grammar.clone()) };
            for output in &llm.generate(&["The answer is"], &params).unwrap()[0].outputs {
                let ended = matches!(output.finish_reason, Some(FinishReason::Stop(_)));
                assert!(
                    ended && holds(&output.text) || output.finish_reason == Some(FinishReason::Length),
                    "{output:?}"
                );
                assert!(ended || grammar == Grammar::JsonObject, "{output:?}");
            }
        }
    }
}

#[test]
fn a_text_ends_with_its_last_possible_token_and_shows_it() {
    let mut llm = LLM.lock().unwrap();
    let params = GenerationParams { ignore_eos: true, ..held(Grammar::Choice(vec!["Paris".into()])) };
    let answers = llm.generate(&["The capital of France is"], &params).unwrap();
    let output = &answers[0].outputs[0];
    assert_eq!(output.text, "Paris");
    assert_eq!(output.finish_reason, Some(FinishReason::Stop(Some(StopCause::Complete))));
    assert_eq!(llm.tokenizer().decode(&output.token_ids, false).unwrap(), "Paris");
    // The grammar takes precedence over min_tokens.
    let sampling = SamplingParams { min_tokens: 50, ..Default::default() };
    let params = GenerationParams { sampling, ..params };
    assert_eq!(llm.generate(&["The capital of France is"], &params).unwrap()[0].outputs[0].text, "Paris");
    // A grammar of the empty text produces it, and a stop string may cut a text short.
    let params = GenerationParams { ignore_eos: true, ..held(Grammar::Regex(String::new())) };
    assert_eq!(llm.generate(&["x"], &params).unwrap()[0].outputs[0].text, "");
    let params = GenerationParams { stop: ["ri".into()].into(), ..held(Grammar::Choice(vec!["Paris".into()])) };
    let answers = llm.generate(&["x"], &params).unwrap();
    assert_eq!(answers[0].outputs[0].text, "Pa");
    assert_eq!(answers[0].outputs[0].finish_reason, Some(FinishReason::Stop(Some(StopCause::Text("ri".into())))));
}

#[test]
fn a_text_ends_where_its_grammar_and_the_lists_leave_no_token() {
    let mut llm = LLM.lock().unwrap();
    let mut run = |allowed: Option<Vec<u32>>, bad_words: Vec<Vec<u32>>| {
        let (allowed_token_ids, bad_words) = (allowed.map(Into::into), bad_words.into());
        let sampling = SamplingParams { allowed_token_ids, bad_words, temperature: 0.0, ..Default::default() };
        let params = GenerationParams { sampling, ..held(Grammar::Choice(vec!["Paris is far away".into()])) };
        llm.generate(&["The capital of France is"], &params).unwrap().remove(0).outputs.remove(0)
    };
    let whole = run(None, Vec::new());
    let ids = whole.token_ids.clone();
    assert!(ids.len() > 2 && whole.text == "Paris is far away", "{whole:?}");
    assert_eq!(run(Some(ids.clone()), Vec::new()).token_ids, ids);
    let last = vec![ids.clone()];
    for (allowed, bad_words, count) in
        [(vec![5], vec![], 0), (vec![ids[0]], vec![], 1), (ids.clone(), last, ids.len() - 1)]
    {
        let found = run(Some(allowed), bad_words);
        let why = |reason: &FinishReason| matches!(reason, FinishReason::Grammar(why) if why.contains("bad_words"));
        assert!(found.finish_reason.as_ref().is_some_and(why), "{found:?}");
        assert_eq!(found.token_ids, ids[..count], "{found:?}");
    }
}

#[test]
fn a_preempted_text_goes_on_where_its_grammar_stood() {
    // The pool holds a fraction of the requests: each is preempted, and ends as if it ran alone.
    let layout = EngineConfig { max_num_seqs: 8, max_model_len: Some(256), ..config() };
    let plan = engine::plan(&layout).unwrap();
    let pool = EngineConfig {
        kv_cache_memory_bytes: Some(20 * 16 * plan.kv_bytes_per_token),
        enable_prefix_caching: false,
        ..layout.clone()
    };
    let grammar = Grammar::Regex("([a-z]{1,9}[0-9]{2} ){20}".into());
    let request = |seed| GenerationRequest {
        prompt: vec![300 + seed as u32; 20],
        params: GenerationParams { sampling: hot(seed), ..held(grammar.clone()) },
        ..Default::default()
    };
    let mut roomy = Llm::new(layout).unwrap();
    let alone: Vec<_> = (0..6).map(|seed| roomy.run(vec![request(seed)]).unwrap().remove(0).outputs).collect();
    let mut narrow = Llm::new(pool).unwrap();
    let together: Vec<_> = narrow.run((0..6).map(request).collect()).unwrap().into_iter().map(|c| c.outputs).collect();
    assert!(narrow.stats().scheduler.preemptions > 0, "the pool is too large for this test");
    assert_eq!(together, alone);
}

#[test]
fn an_invalid_grammar_is_refused_with_the_name_of_its_field() {
    let mut llm = LLM.lock().unwrap();
    let mut refused = |params: GenerationParams| match llm.generate(&["x"], &params) {
        Err(SubmitError::Invalid { param, message }) => {
            assert!(message.starts_with("structured_outputs: ") && !message.contains('\n'), "{message}");
            param
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(held(Grammar::Regex("(".into()))), "structured_outputs");
    let beam = GenerationParams { beam: Some(engine::BeamSearch::new(2)), ..held(Grammar::JsonObject) };
    assert_eq!(refused(beam), "structured_outputs");
}

/// Allows one id after another, from the first; the text may end after the third.
#[derive(Clone)]
struct Counting(u32);

impl Constraint for Counting {
    fn mask(&mut self) -> Result<Mask, ConstraintError> {
        let mut tokens = TokenSet::new(400);
        if self.0 == 305 {
            return Err(ConstraintError("five is too many".into()));
        }
        tokens.insert(self.0);
        Ok(Mask { tokens, may_end: self.0 > 303 })
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        assert_eq!(token, self.0, "a token outside of the mask");
        self.0 += 1;
        Ok(())
    }

    fn is_complete(&self) -> bool {
        false
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

#[test]
fn any_constraint_restricts_the_token_ids_of_an_engine() {
    let mut engine = Engine::load(&config(), &|_, _| {}).unwrap();
    let params = GenerationParams { max_tokens: Some(9), ignore_eos: true, n: 2, ..Default::default() };
    let request = GenerationRequest { prompt: vec![0, 1], params, ..Default::default() };
    engine.submit_constrained(request, Box::new(Counting(301))).unwrap();
    let (mut tokens, mut ends) = ([Vec::new(), Vec::new()], Vec::new());
    while engine.has_work() {
        engine.step(|_, event| {
            if let TokenEvent::Token { index, token, finish, .. } = event {
                tokens[index as usize].extend(token.map(|token| token.token));
                ends.extend(finish);
            }
        });
    }
    assert_eq!(tokens, [vec![301, 302, 303, 304], vec![301, 302, 303, 304]]);
    assert_eq!(ends, vec![FinishReason::Grammar("five is too many".into()); 2]);
}
