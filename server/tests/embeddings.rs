//! `/v1/embeddings`: all forms of input, both encodings, and errors. `engine/tests/embeddings.rs` compares the numbers with
//! `transformers`.

use std::io::Read;
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

/// The number of a code of `exponent` and `mantissa` bits, by the definition of floats.
fn float(code: u32, exponent: u32, mantissa: u32) -> f64 {
    let bias = (1 << (exponent - 1)) - 1;
    let fraction = f64::from(code & ((1 << mantissa) - 1)) / f64::from(1 << mantissa);
    let power = (code >> mantissa & ((1 << exponent) - 1)) as i32;
    let magnitude = match power {
        0 => fraction * 2.0_f64.powi(1 - bias),
        _ => (1.0 + fraction) * 2.0_f64.powi(power - bias),
    };
    if code >> (exponent + mantissa) == 1 { -magnitude } else { magnitude }
}

/// Status, headers and bytes of an answer.
fn bytes(body: &Value) -> (String, Vec<u8>) {
    let mut answer = Vec::new();
    let headers = [("Content-Type", "application/json")];
    SERVER.open("POST", EMBEDDINGS, &headers, body.to_string().as_bytes()).read_to_end(&mut answer).unwrap();
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").unwrap() + 4;
    (String::from_utf8(answer[..end].to_vec()).unwrap(), answer[end..].to_vec())
}

#[test]
fn bytes_have_the_numbers_in_every_form_and_order_and_the_header_says_where() {
    let input = json!(["hello", "a red fox"]);
    let expected = vectors(json!({"input": input}));
    let usage = SERVER.ok(EMBEDDINGS, json!({"input": input}))["usage"].clone();
    let width = expected[0].len();
    for (name, size, exponent, mantissa) in [
        ("float32", 4, 8, 23),
        ("float16", 2, 5, 10),
        ("bfloat16", 2, 8, 7),
        ("fp8_e4m3", 1, 4, 3),
        ("fp8_e5m2", 1, 5, 2),
    ] {
        for order in ["native", "little", "big"] {
            let body = json!({"input": input, "encoding_format": "bytes", "embed_dtype": name, "endianness": order});
            let (head, found) = bytes(&body);
            assert!(head.starts_with("HTTP/1.1 200") && head.contains("application/octet-stream"), "{head}");
            let metadata = head.lines().find_map(|line| line.strip_prefix("metadata: ")).unwrap();
            let metadata: Value = serde_json::from_str(metadata).unwrap();
            let tokens = &metadata["usage"]["prompt_tokens"];
            assert_eq!((&metadata["model"], tokens), (&json!("quire-demo"), &usage["prompt_tokens"]));
            assert_eq!(found.len(), 2 * width * size);
            for (i, vector) in expected.iter().enumerate() {
                let at = i * width * size;
                let native = if order == "big" { "big" } else { "little" };
                let item = json!({"index": i, "embed_dtype": name, "endianness": native, "start": at, "end": at + width * size,
                    "shape": [width]});
                assert_eq!(metadata["data"][i], item);
                for (code, &x) in found[at..at + width * size].chunks(size).zip(vector) {
                    let number = |code: u32, &byte: &u8| code << 8 | u32::from(byte);
                    let code =
                        if order == "big" { code.iter().fold(0, number) } else { code.iter().rev().fold(0, number) };
                    // Half of the last place, or of the smallest step.
                    let place = 2.0_f64.powi(x.abs().log2().floor().max(f64::from(2 - (1 << (exponent - 1)))) as i32);
                    let error = (float(code, exponent, mantissa) - x).abs();
                    assert!(error <= place * 0.5001 / f64::from(1 << mantissa), "{name} {x} {error}");
                }
            }
            let only =
                json!({"input": input, "encoding_format": "bytes_only", "embed_dtype": name, "endianness": order});
            let (head, same) = bytes(&only);
            assert!(same == found && !head.contains("metadata"), "{head}");
        }
    }
    let many = json!({"input": vec!["a"; 401], "encoding_format": "bytes"});
    let reply = SERVER.post(EMBEDDINGS, &many);
    assert!(reply.status == 400 && reply.message().contains("bytes_only"), "{}", reply.body);
}

#[test]
fn a_conversation_is_embedded_as_its_template_writes_it() {
    let messages = json!([{"role": "user", "content": [{"type": "text", "text": "hello"}]}]);
    for more in [json!({}), json!({"add_generation_prompt": true})] {
        let mut body = json!({"messages": messages, "add_generation_prompt": false});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let ids = SERVER.ok("/tokenize", body.clone())["tokens"].clone();
        if more == json!({}) {
            body.as_object_mut().unwrap().remove("add_generation_prompt");
        }
        let expected = vectors(json!({"input": ids}));
        assert_eq!(vectors(body.clone()), expected);
        let pooled = SERVER.ok("/pooling", body)["data"][0]["data"].clone();
        assert_eq!(numbers(&pooled), expected[0]);
    }
    let long = json!({"messages": [{"role": "user", "content": "word ".repeat(3000)}]});
    assert_eq!(SERVER.post(EMBEDDINGS, &long).status, 400);
    let mut cut = long;
    cut["truncate_prompt_tokens"] = json!(5);
    assert_eq!(SERVER.ok(EMBEDDINGS, cut)["usage"]["prompt_tokens"], 5);
    let both = SERVER.post(EMBEDDINGS, &json!({"messages": messages, "input": "a"}));
    assert_eq!((both.status, &both.error()["param"]), (400, &json!("messages")), "{}", both.body);
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
        (json!({"embed_dtype": "int8"}), "embed_dtype"),
        (json!({"endianness": "middle"}), "endianness"),
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
