//! `/v1/embeddings`: all forms of input, both encodings, and errors. `engine/tests/embeddings.rs` compares the numbers with
//! `transformers`.

use std::sync::LazyLock;
use std::time::Duration;

use crate::common::{Server, config};
use engine::{EngineConfig, ModelSource, Pooling};
use serde_json::{Value, json};
use server::ServerOptions;

static SERVER: LazyLock<Server> = LazyLock::new(Server::start);

const EMBEDDINGS: &str = "/v1/embeddings";

fn vectors(body: Value) -> Vec<Vec<f64>> {
    let answer = SERVER.ok(EMBEDDINGS, body);
    assert_eq!(answer["object"], "list");
    let data = answer["data"].as_array().unwrap();
    assert!(data.iter().enumerate().all(|(i, one)| one["index"] == i && one["object"] == "embedding"));
    data.iter().map(|one| numbers(&one["embedding"])).collect()
}

fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

#[test]
fn a_text_has_one_embedding_in_any_form_and_batch() {
    let ids = |text: &str| SERVER.ok("/tokenize", json!({"prompt": text}))["tokens"].clone();
    let (one, two) = ("The capital of France", "A red fox");
    let alone = [vectors(json!({"input": one})).remove(0), vectors(json!({"input": two})).remove(0)];
    assert_ne!(alone[0], alone[1]);
    for input in [json!([one, two]), json!([ids(one), ids(two)]), json!([ids(one), two])] {
        assert_eq!(vectors(json!({"input": input})), alone);
    }
    assert_eq!(vectors(json!({"input": ids(one)})), [alone[0].clone()]);
    for vector in alone {
        let length = vector.iter().map(|x| x * x).sum::<f64>().sqrt();
        assert!((length - 1.0).abs() < 1e-6, "{length}");
        // The model's own number of dimensions may be given.
        assert_eq!(vectors(json!({"input": one, "dimensions": vector.len()}))[0].len(), vector.len());
    }
}

#[test]
fn base64_is_the_same_numbers() {
    let floats = vectors(json!({"input": "hello", "encoding_format": "float"})).remove(0);
    let answer = SERVER.ok(EMBEDDINGS, json!({"input": "hello", "encoding_format": "base64"}));
    let letters = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bytes, mut bits, mut count) = (Vec::new(), 0_u32, 0);
    for letter in answer["data"][0]["embedding"].as_str().unwrap().bytes().take_while(|&letter| letter != b'=') {
        bits = bits << 6 | letters.iter().position(|&l| l == letter).unwrap() as u32;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    // Each number is the shortest decimal of a float32.
    let text = SERVER.post(EMBEDDINGS, &json!({"input": "hello"})).body;
    let list = text.split("\"embedding\":[").nth(1).unwrap().split(']').next().unwrap();
    for number in list.split(',') {
        let shortest = number.parse::<f32>().unwrap().to_string();
        assert_eq!(number, json!(shortest.parse::<f64>().unwrap()).to_string());
    }
    assert!(answer["data"][0]["embedding"].as_str().unwrap().len().is_multiple_of(4), "padded");
    let decoded: Vec<f64> =
        bytes.chunks_exact(4).map(|four| f64::from(f32::from_le_bytes(four.try_into().unwrap()))).collect();
    assert_eq!(
        decoded.iter().map(|&x| x as f32).collect::<Vec<_>>(),
        floats.iter().map(|&x| x as f32).collect::<Vec<_>>()
    );
}

#[test]
fn the_usage_counts_the_tokens_of_all_inputs() {
    let count = SERVER.ok("/tokenize", json!({"prompt": "hello there"}))["count"].as_u64().unwrap();
    let usage = SERVER.ok(EMBEDDINGS, json!({"input": ["hello there", "hello there", "hello there"]}))["usage"].clone();
    assert_eq!((&usage["prompt_tokens"], &usage["total_tokens"]), (&json!(3 * count), &json!(3 * count)));
    assert_eq!((&usage["completion_tokens"], &usage["prompt_tokens_details"]["cached_tokens"]), (&json!(0), &json!(0)));
    // Whole blocks of a prompt that was computed before are cached.
    let long = json!({"input": vec![7; 200]});
    SERVER.ok(EMBEDDINGS, long.clone());
    let cached = SERVER.ok(EMBEDDINGS, long)["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!((128..200).contains(&cached), "{cached}");
    let cut = SERVER.ok(EMBEDDINGS, json!({"input": vec![5; 3000], "truncate_prompt_tokens": -1}))["usage"].clone();
    assert_eq!(cut["prompt_tokens"], 1023);
}

#[test]
fn mean_pooling_differs_from_last_token_pooling() {
    let options = ServerOptions { pooling_type: Some(Pooling::Mean), ..ServerOptions::default() };
    let server = Server::with(config(), options, Duration::ZERO);
    let mean = server.ok(EMBEDDINGS, json!({"input": "hello there"}));
    assert_ne!(numbers(&mean["data"][0]["embedding"]), vectors(json!({"input": "hello there"}))[0]);
    // For one token, both are that token's.
    let one = server.ok(EMBEDDINGS, json!({"input": [40]}));
    assert_eq!(numbers(&one["data"][0]["embedding"]), vectors(json!({"input": [40]}))[0]);
}

#[test]
fn a_checkpoint_with_an_unsupported_pooling_is_a_clear_error() {
    let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/reference/llama");
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(source).unwrap().flatten() {
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    std::fs::create_dir(folder.path().join("1_Pooling")).unwrap();
    std::fs::write(folder.path().join("1_Pooling/config.json"), r#"{"pooling_mode": "attention"}"#).unwrap();
    let config = EngineConfig { model: ModelSource::Folder(folder.path().into()), ..config() };
    let server = Server::with(config, ServerOptions::default(), Duration::ZERO);
    let reply = server.post(EMBEDDINGS, &json!({"input": "a"}));
    assert_eq!(reply.status, 400);
    assert!(reply.error()["message"].as_str().unwrap().contains("1_Pooling"), "{}", reply.body);
}

#[test]
fn invalid_embeddings_requests_name_the_field() {
    for (fields, param) in [
        (json!({"input": null}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": [[]]}), "input"),
        (json!({"input": [1.5]}), "input"),
        (json!({"input": [99_999_999]}), "input"),
        (json!({"input": {"text": "a"}}), "input"),
        (json!({"input": "word ".repeat(3000)}), "input"),
        (json!({"encoding_format": "int8"}), "encoding_format"),
        (json!({"encoding_format": 5}), "encoding_format"),
        (json!({"dimensions": 0}), "dimensions"),
        (json!({"dimensions": 3}), "dimensions"),
        (json!({"truncate_prompt_tokens": 0}), "truncate_prompt_tokens"),
        (json!({"priority": "high"}), "priority"),
    ] {
        let mut body = json!({"input": "a"});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let reply = SERVER.post(EMBEDDINGS, &body);
        assert_eq!((reply.status, &reply.error()["param"]), (400, &json!(param)), "{}", reply.body);
    }
}
