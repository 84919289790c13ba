//! Encoders, embeddings, classifiers and rerankers over HTTP, from texts, against transformers: `/v1/embeddings`, `/pooling`, `/classify`,
//! `/score`, `/rerank`.
//!
//! The cases are in `models/tests/encoders`; `QUIRE_REFERENCE_ENCODERS` names a folder with more.

use std::path::Path;
use std::time::Duration;

use crate::common::{Server, config};
use engine::{EngineConfig, ModelSource};
use serde_json::{Map, Value, json};
use server::ServerOptions;

/// Greatest differences of elements of a normalised embedding, of others and of logits, and of scores.
const UNIT: f64 = 2e-5;
const OTHER: f64 = 1e-4;
const SCORE: f64 = 1e-5;

fn read(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// A case: its server and what is expected of it.
struct Case {
    name: String,
    expected: Value,
    server: Server,
    tensors: Map<String, Value>,
    bytes: Vec<u8>,
}

impl Case {
    fn open(folder: &Path) -> Case {
        let expected = read(&folder.join("expected.json"));
        let hf_overrides = match expected["inputs"][0]["logits_no_yes"].is_array() {
            true => r#"{"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": true}"#.parse().unwrap(),
            false => Default::default(),
        };
        let config = EngineConfig { model: ModelSource::Folder(folder.into()), hf_overrides, ..config() };
        let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
        let (length, rest) = bytes.split_first_chunk::<8>().unwrap();
        let length = u64::from_le_bytes(*length) as usize;
        let tensors: Map<String, Value> = serde_json::from_slice(&rest[..length]).unwrap();
        Case {
            name: folder.file_name().unwrap().to_string_lossy().into_owned(),
            expected,
            server: Server::with(config, ServerOptions::default(), Duration::ZERO),
            tensors,
            bytes: rest[length..].to_vec(),
        }
    }

    /// All cases of these tasks.
    fn all(task: &str) -> Vec<Case> {
        let of_task = |folder: &std::path::PathBuf| read(&folder.join("expected.json"))["task"] == task;
        let cases: Vec<Case> = testkit::reference::encoders()
            .iter()
            .filter(|folder| of_task(folder))
            .map(|folder| Case::open(folder))
            .collect();
        assert!(!cases.is_empty(), "no case of {task}");
        cases
    }

    fn tensor(&self, name: &Value) -> Vec<f64> {
        let at: Vec<usize> =
            serde_json::from_value(self.tensors[name.as_str().unwrap()]["data_offsets"].clone()).unwrap();
        self.bytes[at[0]..at[1]].as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect()
    }

    /// The inputs that are not longer than the folder allows.
    fn inputs(&self) -> Vec<&Value> {
        let most = self.server.get("/v1/models").json()["data"][0]["max_model_len"].as_u64().unwrap() as usize;
        let fits = |input: &&Value| input["ids"].as_array().unwrap().len() <= most;
        self.expected["inputs"].as_array().unwrap().iter().filter(fits).collect()
    }

    fn texts(&self) -> Vec<&Value> {
        self.inputs().iter().map(|input| &input["text"]).collect()
    }

    fn is_near(&self, found: &Value, want: &[f64], most: f64) {
        let found = numbers(found);
        assert_eq!(found.len(), want.len(), "{}", self.name);
        let worst = found.iter().zip(want).map(|(a, b)| (a - b).abs()).max_by(f64::total_cmp).unwrap();
        assert!(worst < most, "{}: off by {worst}", self.name);
    }

    fn refusal(&self, route: &str, body: Value, parts: &[&str]) {
        let reply = self.server.post(route, &body);
        assert_eq!(reply.status, 400, "{}: {route}: {}", self.name, reply.body);
        let message = reply.error()["message"].as_str().unwrap().to_string();
        assert!(!message.contains('\n'), "{message}");
        parts.iter().for_each(|part| assert!(message.contains(part), "{}: {route}: {message:?}: {part:?}", self.name));
    }
}

/// The usage of prompts of this many tokens.
fn usage(tokens: usize, cached: u64) -> Value {
    json!({"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": cached}})
}

fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

#[test]
fn embeddings_of_texts_are_those_of_transformers_alone_and_in_a_batch() {
    for case in Case::all("embed") {
        let most = if case.name == "modernbert-embed" { OTHER } else { UNIT };
        let together = case.server.ok("/v1/embeddings", json!({"input": case.texts()}));
        let pooled = case.server.ok("/pooling", json!({"input": case.texts(), "task": "embed"}));
        assert_eq!((&together["object"], &pooled["object"]), (&json!("list"), &json!("list")));
        let tokens: usize = case.inputs().iter().map(|input| input["ids"].as_array().unwrap().len()).sum();
        assert_eq!(together["usage"], usage(tokens, 0), "{}", case.name);
        for (i, input) in case.inputs().iter().enumerate() {
            let alone = case.server.ok("/v1/embeddings", json!({"input": input["text"]}));
            assert_eq!(alone["data"][0]["embedding"], together["data"][i]["embedding"], "{}: {i}", case.name);
            assert_eq!(pooled["data"][i]["data"], together["data"][i]["embedding"]);
            assert_eq!(pooled["data"][i]["object"], "pooling");
            case.is_near(&alone["data"][0]["embedding"], &case.tensor(&input["embedding"]), most);
        }
        for prompt in case.expected["prompts"].as_array().into_iter().flatten() {
            let body = json!({"input": prompt["text"], "prompt_name": prompt["prompt_name"]});
            let found = case.server.ok("/v1/embeddings", body)["data"][0]["embedding"].clone();
            case.is_near(&found, &case.tensor(&prompt["embedding"]), most);
        }
        // Scores are cosines.
        let of = |i: usize| case.tensor(&case.inputs()[i]["embedding"]);
        let pairs = json!({"text_1": case.texts()[1], "text_2": [case.texts()[2], case.texts()[3]]});
        let scores = case.server.ok("/score", pairs);
        for (i, j) in [(0, 2), (1, 3)] {
            let found = scores["data"][i]["score"].as_f64().unwrap();
            assert!((found - cosine(&of(1), &of(j))).abs() < 5e-5, "{}: {found}", case.name);
        }
        let ranked = case.server.ok("/rerank", json!({"query": case.texts()[1], "documents": case.texts()}));
        assert_eq!(ranked["results"][0]["index"], 1, "a text is nearest to itself");
        case.refusal("/classify", json!({"input": "a"}), &["no labels", "/v1/embeddings"]);
        case.refusal("/v1/embeddings", json!({"input": "a", "prompt_name": "none"}), &["prompt_name", "\"none\""]);
        case.refusal("/v1/embeddings", json!({"input": "a", "dimensions": 3}), &["dimensions", "config.json"]);
    }
}

#[test]
fn a_long_text_is_refused_or_cut_before_its_last_special_token() {
    let case = Case::all("embed").into_iter().find(|case| case.name == "bert-embed").unwrap();
    let truncated = &case.expected["truncated"];
    let all = case.expected["inputs"].as_array().unwrap();
    let long = all.iter().find(|input| input["name"] == truncated["input"]).unwrap();
    // The folder limits texts to 64 tokens.
    assert!(long["ids"].as_array().unwrap().len() > 64);
    case.refusal("/v1/embeddings", json!({"input": long["text"]}), &["input", "110 tokens", "at most 64"]);
    let body = json!({"input": long["text"], "truncate_prompt_tokens": -1});
    let cut = case.server.ok("/v1/embeddings", body);
    assert_eq!(cut["usage"]["prompt_tokens"], 64);
    case.is_near(&cut["data"][0]["embedding"], &case.tensor(&truncated["embedding"]), UNIT);
    let ids: Vec<u32> = serde_json::from_value(truncated["ids"].clone()).unwrap();
    assert_eq!(case.server.ok("/v1/embeddings", json!({"input": ids}))["data"], cut["data"], "64 tokens fit");
    let left = json!({"input": long["text"], "truncate_prompt_tokens": 10, "truncation_side": "left"});
    let whole: Vec<u32> = serde_json::from_value(long["ids"].clone()).unwrap();
    let want: Vec<u32> = [&whole[..1], &whole[whole.len() - 9..]].concat();
    let by_ids = case.server.ok("/v1/embeddings", json!({"input": want}));
    assert_eq!(case.server.ok("/v1/embeddings", left)["data"], by_ids["data"]);
    case.refusal(
        "/v1/embeddings",
        json!({"input": "a", "truncate_prompt_tokens": 2}),
        &["truncate_prompt_tokens", "more than 2"],
    );
}

#[test]
fn a_model_that_generates_no_text_says_what_it_serves() {
    let served = [("embed", "/v1/embeddings, /pooling, /score and /rerank"), ("classify", "/classify and /pooling")];
    for (task, routes) in served {
        let case = Case::all(task).into_iter().find(|case| !case.name.ends_with("embedding")).unwrap();
        let messages = json!([{"role": "user", "content": "hi"}]);
        for (route, body) in [
            ("/v1/completions", json!({"prompt": "hi"})),
            ("/v1/chat/completions", json!({"messages": messages})),
            ("/v1/responses", json!({"input": "hi"})),
        ] {
            case.refusal(route, body, &["model", "generates no text", routes]);
        }
    }
}

#[test]
fn labels_of_texts_are_those_of_transformers() {
    for case in Case::all("classify") {
        let answer = case.server.ok("/classify", json!({"input": case.texts()}));
        let logits = case.server.ok("/classify", json!({"input": case.texts(), "use_activation": false}));
        let pooled = case.server.ok("/pooling", json!({"input": case.texts(), "task": "classify"}));
        for (i, input) in case.inputs().iter().enumerate() {
            let found = &answer["data"][i];
            let want = numbers(&input["probs"]);
            case.is_near(&found["probs"], &want, SCORE);
            case.is_near(&logits["data"][i]["probs"], &numbers(&input["logits"]), OTHER);
            assert_eq!(pooled["data"][i]["data"], found["probs"]);
            let best = (0..want.len()).max_by(|a, b| want[*a].total_cmp(&want[*b])).unwrap();
            assert_eq!(found["label"], ["negative", "neutral", "positive"][best]);
            assert_eq!((&found["num_classes"], &found["index"]), (&json!(want.len()), &json!(i)));
            let alone = case.server.ok("/classify", json!({"input": input["ids"]}));
            assert_eq!(alone["data"][0]["probs"], found["probs"]);
        }
        case.refusal("/v1/embeddings", json!({"input": "a"}), &["no embeddings", "/classify"]);
        case.refusal("/score", json!({"text_1": "a", "text_2": "b"}), &["3 labels", "/classify"]);
        case.refusal("/pooling", json!({"input": "a", "task": "embed"}), &["task", "classify"]);
    }
}

#[test]
fn rankings_of_documents_are_those_of_transformers() {
    for case in Case::all("rerank") {
        let is_causal = case.inputs()[0]["logits_no_yes"].is_array();
        for (number, ranking) in case.expected["rankings"].as_array().unwrap().iter().enumerate() {
            let of_query = format!("q{number}_");
            let inputs: Vec<&Value> = case
                .inputs()
                .into_iter()
                .filter(|input| input["name"].as_str().unwrap().starts_with(&of_query))
                .collect();
            let (query, documents) =
                (&inputs[0]["text"], inputs.iter().map(|input| &input["text_pair"]).collect::<Vec<_>>());
            let body = json!({"query": query, "documents": documents});
            let answer = case.server.ok("/rerank", body.clone());
            for route in ["/v1/rerank", "/v2/rerank"] {
                assert_eq!(case.server.ok(route, body.clone())["results"], answer["results"]);
            }
            let results = answer["results"].as_array().unwrap();
            let order: Vec<&Value> = results.iter().map(|result| &result["index"]).collect();
            assert_eq!(json!(order), *ranking, "{}", case.name);
            assert!(answer["id"].as_str().unwrap().starts_with("rerank-"));
            let tokens: usize = inputs.iter().map(|input| input["ids"].as_array().unwrap().len()).sum();
            let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
            assert_eq!(answer["usage"], usage(tokens, cached), "{}", case.name);
            // The form of text-embeddings-inference and llama-server.
            let mut bare = json!({"query": query, "texts": documents, "return_text": true});
            let list = case.server.ok("/rerank", bare.clone());
            let of = |result: &Value| json!({"index": result["index"], "text": result["document"]["text"], "score": result["relevance_score"]});
            assert_eq!(list, results.iter().map(of).collect::<Value>());
            (bare["return_text"], bare["top_n"], bare["raw_scores"]) = (json!(false), json!(2), json!(true));
            let logits = case.server.ok("/rerank", bare);
            let mut body = body.clone();
            body["use_activation"] = json!(false);
            let whole = case.server.ok("/rerank", body)["results"].clone();
            let two = |of: &dyn Fn(&Value) -> Value| whole.as_array().unwrap()[..2].iter().map(of).collect::<Value>();
            assert_eq!(logits, two(&|one| json!({"index": one["index"], "score": one["relevance_score"]})));
            for result in results {
                let input = inputs[result["index"].as_u64().unwrap() as usize];
                let (found, want) = (result["relevance_score"].as_f64().unwrap(), input["score"].as_f64().unwrap());
                assert!((found - want).abs() < SCORE, "{}: {found}, {want}", case.name);
                assert_eq!(result["document"]["text"], input["text_pair"]);
            }
            let top = json!({"query": query, "documents": documents, "top_n": 2, "return_documents": false});
            let top = case.server.ok("/rerank", top)["results"].clone();
            assert_eq!(top.as_array().unwrap().len(), 2);
            assert!(top[0].get("document").is_none() && top[0]["index"] == ranking[0]);
            let logits = json!({"queries": query, "documents": documents, "use_activation": false});
            let logits = case.server.ok("/v1/score", logits);
            for (i, input) in inputs.iter().enumerate() {
                let both = numbers(&input[if is_causal { "logits_no_yes" } else { "logits" }]);
                let want = if is_causal { both[1] - both[0] } else { both[0] };
                let found = logits["data"][i]["score"].as_f64().unwrap();
                assert!((found - want).abs() < 2.0 * OTHER, "{}: {found}, {want}", case.name);
            }
            // As many first texts as second ones, and one pair alone.
            let pairs = json!({"data_1": vec![query; documents.len()], "data_2": documents});
            let all = case.server.ok("/score", pairs)["data"].clone();
            let one = case.server.ok("/score", json!({"text_1": query, "text_2": documents[3]}))["data"][0].clone();
            assert_eq!(all[3]["score"], one["score"]);
            assert_eq!(one["object"], "score");
        }
        case.refusal("/score", json!({"text_1": ["a", "b"], "text_2": ["c"]}), &["text_1", "as many as text_2"]);
        case.refusal("/rerank", json!({"query": ["a", "b"], "documents": ["c"]}), &["query", "one text"]);
        case.refusal("/rerank", json!({"query": "a", "documents": []}), &["documents", "list"]);
        case.refusal("/rerank", json!({"query": "a", "documents": [5]}), &["documents", "list"]);
        case.refusal("/rerank", json!({"query": "a"}), &["documents"]);
        let parts = json!([{"text": "b"}, {"content": [{"type": "text", "text": "b"}]}, "b"]);
        let same = case.server.ok("/score", json!({"text_1": "a", "documents": parts}))["data"].clone();
        assert_eq!((&same[0]["score"], &same[1]["score"]), (&same[2]["score"], &same[2]["score"]));
    }
}

#[test]
fn of_a_long_pair_the_document_alone_is_cut() {
    let case = Case::all("rerank").into_iter().find(|case| case.name == "xlm-roberta-rerank").unwrap();
    let long = "purple quiet ".repeat(200);
    let body = |more: Value| {
        let mut body = json!({"text_1": "simple paper", "text_2": long});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    case.refusal("/score", body(json!({})), &["text_2", "at most 192"]);
    let cut = case.server.ok("/score", body(json!({"truncate_prompt_tokens": -1})));
    assert_eq!(cut["usage"]["prompt_tokens"], 192);
    // A few tokens of the document: the same as that document.
    let few = case.server.ok("/score", body(json!({"max_tokens_per_doc": 2})));
    let same = case.server.ok("/score", json!({"text_1": "simple paper", "text_2": "purple quiet"}));
    assert_eq!(few["usage"], same["usage"]);
    assert_eq!(few["data"], same["data"]);
    let query = case.server.ok("/score", json!({"text_1": long, "text_2": "a", "max_tokens_per_query": 2}));
    assert_eq!(query["usage"]["prompt_tokens"].as_u64().unwrap(), same["usage"]["prompt_tokens"].as_u64().unwrap() - 1);
    case.refusal(
        "/score",
        json!({"text_1": long, "text_2": "a", "truncate_prompt_tokens": 20}),
        &["truncate_prompt_tokens"],
    );
    case.refusal("/score", body(json!({"instruction": "judge"})), &["instruction"]);
}
