//! Effects of single fields on a response, and the forms of responses.

use serde_json::{Value, json};

use super::client::*;

/// Condition on the first choice.
type Check = Box<dyn Fn(&Value) -> bool>;

/// The text of a choice of a completion.
fn text_of(choice: &Value) -> &str {
    choice["text"].as_str().unwrap()
}

fn only(letters: &'static str) -> Check {
    Box::new(move |choice| !text_of(choice).is_empty() && text_of(choice).chars().all(|c| letters.contains(c)))
}

#[test]
fn a_field_does_what_it_says() {
    let (a, b) = (ids("a")[0].to_string(), ids("b")[0].to_string());
    let plain = text(COMPLETIONS, &with(&completion(), &json!({"max_tokens": 40})));
    let cut = |from: usize, to: usize| plain.chars().skip(from).take(to - from).collect::<String>();
    let before = |stop: &str| plain.split(stop).next().unwrap().to_string();
    let (early, late) = (cut(4, 7), cut(20, 24));
    let is = |expected: String| -> Check { Box::new(move |choice| text_of(choice) == expected) };
    let first = ids(&plain)[0];
    let ends = |reason: &'static str| -> Check { Box::new(move |choice| choice["finish_reason"] == reason) };
    let rows: Vec<(&str, Value, Check)> = vec![
        ("SMP-009", json!({"logit_bias": {a.clone(): 100}}), only("a")),
        ("SMP-010", json!({"logit_bias": {first.to_string(): -100}}), {
            let plain = plain.clone();
            Box::new(move |choice| !plain.starts_with(text_of(choice)))
        }),
        ("SMP-011", json!({"allowed_token_ids": [ids("a")[0], ids("b")[0]], "temperature": 1}), only("ab")),
        (
            "SMP-013",
            json!({"logit_bias": {a.clone(): 90, b.clone(): 90}, "frequency_penalty": 2}),
            Box::new(|choice| text_of(choice).contains('a') && text_of(choice).contains('b')),
        ),
        (
            "SMP-014",
            json!({"logit_bias": {a.clone(): 20, b.clone(): 20}, "frequency_penalty": -2}),
            Box::new(|choice| {
                let text = text_of(choice);
                ['a', 'b'].iter().any(|&letter| text.matches(letter).count() + 2 >= text.chars().count())
            }),
        ),
        ("SMP-015", json!({"presence_penalty": 2, "ignore_eos": true}), ends("length")),
        ("SMP-015", json!({"presence_penalty": -2, "ignore_eos": true}), ends("length")),
        (
            "SMP-018",
            json!({"stop_token_ids": [ids("a")[0]], "logit_bias": {a.clone(): 100}, "min_tokens": 4}),
            Box::new(|choice| choice["finish_reason"] == "length" || text_of(choice).chars().count() >= 4),
        ),
        ("SMP-020", json!({"ignore_eos": true, "max_tokens": 200}), ends("length")),
        ("STP-001", json!({"max_tokens": 40, "stop": early}), is(before(&early))),
        ("STP-002", json!({"max_tokens": 40, "stop": [late, early]}), is(before(&early))),
        (
            "STP-003",
            json!({"max_tokens": 40, "stop": [early], "include_stop_str_in_output": true}),
            is(before(&early) + &early),
        ),
        ("STP-004", json!({"max_tokens": 40, "stop": [early]}), {
            let early = early.clone();
            Box::new(move |choice| choice["stop_reason"] == early && choice["finish_reason"] == "stop")
        }),
        ("STP-005", json!({"stop_token_ids": [first]}), {
            Box::new(move |choice| choice["stop_reason"] == first && text_of(choice).is_empty())
        }),
        ("STP-011", json!({"guided_regex": "ab日本c", "stop": ["本"], "max_tokens": 40}), is("ab日".to_string())),
        (
            "STR-009",
            json!({"guided_regex": "[0-9]{3}-[0-9]{4}", "max_tokens": 40}),
            Box::new(|choice| text_of(choice).len() == 8),
        ),
        ("CMP-012", json!({"echo": true, "max_tokens": 0}), is("The red fox".to_string())),
        (
            "CMP-013",
            json!({"prompt": ids("The red fox"), "echo": true, "max_tokens": 0}),
            is("The red fox".to_string()),
        ),
    ];
    for (case, more, holds) in rows {
        let answer = ask(COMPLETIONS, &with(&completion(), &more));
        assert!(holds(&answer["choices"][0]), "{case}: {more}: {answer}");
    }
    // STP-010: each prompt of a list ends separately.
    let body =
        with(&completion(), &json!({"prompt": ["The red fox", "The red fox"], "max_tokens": 40, "stop": [early]}));
    assert_eq!(texts(&ask(COMPLETIONS, &body)), [before(&early), before(&early)]);
}

/// SMP-019 CMP-030 CHT-008 STP-012.
#[test]
fn the_end_of_sequence_ends_a_text_unless_told_otherwise() {
    let body = json!({"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 60});
    let answer = ask(CHAT, &body);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let made = answer["usage"]["completion_tokens"].as_u64().unwrap();
    let longer = ask(CHAT, &with(&body, &json!({"min_tokens": made + 3})));
    assert!(longer["usage"]["completion_tokens"].as_u64().unwrap() >= made + 3, "SMP-019");
    let on = ask(CHAT, &with(&body, &json!({"ignore_eos": true, "max_tokens": made + 5})));
    assert_eq!(
        (&on["usage"]["completion_tokens"], &on["choices"][0]["finish_reason"]),
        (&json!(made + 5), &json!("length"))
    );
    // STP-012: special tokens are returned if requested.
    let shown = with(&body, &json!({"ignore_eos": true, "max_tokens": made, "skip_special_tokens": false}));
    assert!(text(CHAT, &shown).len() > text(CHAT, &body).len());
}

/// SMP-012: words that the model would generate are not generated.
#[test]
fn a_banned_word_is_not_generated() {
    let words: Vec<String> = text(COMPLETIONS, &completion()).split(' ').skip(1).map(str::to_string).collect();
    let without = text(COMPLETIONS, &with(&completion(), &json!({"bad_words": [words[0]]})));
    assert!(!without.split(' ').any(|word| word == words[0]), "{without}");
}

/// SMP-023: two letters whose biases differ by ln 3 are sampled about 3:1, relative to the model's own probabilities.
#[test]
fn samples_follow_the_probabilities() {
    let (a, b) = (ids("a")[0], ids("b")[0]);
    let gap = |bias_a: f64| {
        let more = json!({"logit_bias": {a.to_string(): bias_a, b.to_string(): 0}, "allowed_token_ids": [a, b], "max_tokens": 1,
            "temperature": 1, "n": 100, "seed": 8});
        let found = texts(&ask(COMPLETIONS, &with(&completion(), &more)));
        found.iter().filter(|text| *text == "a").count()
    };
    // The bias at which both are about as likely, by bisection on what is sampled.
    let (mut low, mut high) = (-20.0, 20.0);
    for _ in 0..12 {
        let middle = (low + high) / 2.0;
        if gap(middle) < 50 { low = middle } else { high = middle }
    }
    let tripled = gap(low + 3.0_f64.ln());
    // Binomial(100, 3/4): 4.3 is the deviation, and the balance above is off by 5 at most.
    assert!((52..=93).contains(&tripled), "{tripled} of 100");
}

/// LPB-001 LPB-002 LPB-010 LPB-011 LPB-012 LPB-015.
#[test]
fn log_probabilities_have_the_shape_that_was_asked_for() {
    for k in [0_usize, 1, 5] {
        let answer = ask(COMPLETIONS, &with(&completion(), &json!({"logprobs": k})));
        let found = &answer["choices"][0]["logprobs"];
        let list = |name: &str| found[name].as_array().unwrap().clone();
        let count = answer["usage"]["completion_tokens"].as_u64().unwrap() as usize;
        for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            assert_eq!(list(name).len(), count, "LPB-001 {name}");
        }
        assert!(list("token_logprobs").iter().all(|score| score.as_f64().unwrap() <= 0.0));
        assert!(list("top_logprobs").iter().all(|top| (k.max(1)..=k + 1).contains(&top.as_object().unwrap().len())));
        let answer = ask(CHAT, &with(&chat(), &json!({"logprobs": true, "top_logprobs": k})));
        let entries = answer["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
        assert_eq!(entries.len(), answer["usage"]["completion_tokens"].as_u64().unwrap() as usize);
        assert!(
            entries
                .iter()
                .all(|entry| entry["top_logprobs"].as_array().unwrap().len() == k && entry["bytes"].is_array())
        );
    }
    for (path, body) in [(COMPLETIONS, completion()), (CHAT, chat())] {
        assert!(ask(path, &body)["choices"][0]["logprobs"].is_null());
    }
    // LPB-015: the form that evaluation harnesses send.
    let (one, two) = (ids("The red fox"), ids("One two"));
    let harness = json!({"prompt": [one, two], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": true});
    let answer = ask(COMPLETIONS, &harness);
    for (choice, prompt) in answer["choices"].as_array().unwrap().iter().zip([&one, &two]) {
        let scores = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        assert!(scores.len() == prompt.len() + 1 && scores[0].is_null() && scores[1].is_number());
    }
}

/// LPB-005: log probabilities of generated tokens equal those of the same tokens as a prompt.
#[test]
fn prefill_and_decoding_agree_on_log_probabilities() {
    let body = with(&completion(), &json!({"logprobs": 0, "return_token_ids": true, "add_special_tokens": false}));
    let made = ask(COMPLETIONS, &body)["choices"][0].clone();
    let both: Vec<Value> = [&made["prompt_token_ids"], &made["token_ids"]]
        .iter()
        .flat_map(|ids| ids.as_array().unwrap().clone())
        .collect();
    let again =
        ask(COMPLETIONS, &json!({"prompt": both, "echo": true, "max_tokens": 0, "logprobs": 0}))["choices"][0].clone();
    let scores = |choice: &Value| -> Vec<f64> {
        choice["logprobs"]["token_logprobs"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap_or(0.0)).collect()
    };
    let (decoded, prefilled) = (scores(&made), scores(&again));
    for (a, b) in decoded.iter().zip(&prefilled[prefilled.len() - decoded.len()..]) {
        assert!((a - b).abs() < 1e-3, "{a} {b}");
    }
}

/// CMP-001 CMP-003 CMP-007 CMP-024 CMP-027 CMP-028 CMP-029 CHT-001 CHT-002 CHT-007 CHT-010 CHT-011 CHT-021 CHT-024 CHT-025.
#[test]
fn token_counts_and_envelopes_are_right() {
    for n in [1, 7, 40] {
        let answer = ask(COMPLETIONS, &with(&completion(), &json!({"max_tokens": n, "ignore_eos": true})));
        assert_eq!((&answer["usage"]["completion_tokens"], &answer["model"]), (&json!(n), &json!("quire-demo")));
        assert_eq!(answer["usage"]["prompt_tokens"], ask("/tokenize", &json!({"prompt": "The red fox"}))["count"]);
    }
    let (one, two) = (ask(CHAT, &chat()), ask(CHAT, &chat()));
    assert_ne!(one["id"], two["id"]);
    assert_eq!(one["choices"][0]["message"]["role"], "assistant");
    // CMP-028: the whole context.
    let full = json!({"prompt": vec![ids("a")[0]; 1000], "max_tokens": 24, "ignore_eos": true});
    assert_eq!(ask(COMPLETIONS, &full)["usage"]["total_tokens"], 1024);
    // CHT-010: without a limit, the rest of the context.
    let endless = with(&chat(), &json!({"max_tokens": null, "ignore_eos": true}));
    assert_eq!(ask(CHAT, &endless)["usage"]["total_tokens"], 1024);
    // CHT-002 CHT-024 CHT-025: histories.
    let history = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<|im_end|>"},
        {"role": "assistant", "content": null}, {"role": "user", "content": "Go on."}]);
    assert_eq!(
        ask(CHAT, &with(&chat(), &json!({"messages": history, "n": 2, "temperature": 1})))["choices"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
    // CHT-021: the role `developer` is `system` for a template that knows only this.
    let prompt = |role: &str| {
        let messages = json!([{"role": role, "content": "Be brief."}, {"role": "user", "content": "hi"}]);
        ask("/v1/chat/completions/render", &json!({"messages": messages}))["token_ids"].clone()
    };
    assert_eq!(prompt("developer"), prompt("system"));
    let blended = with(
        &chat(),
        &json!({"logit_bias": {ids("a")[0].to_string(): 100}, "repetition_penalty": 1.1, "max_tokens": 3}),
    );
    assert!(text(CHAT, &blended).starts_with('a'), "CHT-027");
}

/// TOK-001 TOK-004 TOK-006 TOK-007 TOK-008 TOK-009 TOK-010.
#[test]
fn tokens_can_be_counted_and_read() {
    let found = ask("/tokenize", &json!({"prompt": "hello"}));
    assert_eq!(
        (found["count"].as_u64().unwrap() as usize, &found["max_model_len"]),
        (found["tokens"].as_array().unwrap().len(), &json!(1024))
    );
    assert_eq!(ask("/tokenize", &json!({"prompt": "", "add_special_tokens": false}))["count"], 0);
    assert!(ask("/tokenize", &json!({"prompt": "a b ".repeat(2000)}))["count"].as_u64().unwrap() > 1024);
    assert_eq!(ask("/detokenize", &json!({"tokens": []}))["prompt"], "");
    let messages = json!([{"role": "user", "content": "hi"}]);
    let chat = ask("/tokenize", &json!({"messages": messages}));
    let bare = ask("/tokenize", &json!({"messages": messages, "add_generation_prompt": false}));
    assert!(chat["count"].as_u64() > bare["count"].as_u64());
    assert!(ask("/detokenize", &json!({"tokens": chat["tokens"]}))["prompt"].as_str().unwrap().contains("hi"));
    for bad in [
        &br#"{"tokens": ["a"]}"#[..],
        br#"{"tokens": 5}"#,
        br#"{}"#,
        br#"{"tokens": [-1]}"#,
        br#"{"tokens": [99999999]}"#,
    ] {
        assert_eq!(send("/detokenize", bad).status, 400, "TOK-007");
    }
}
