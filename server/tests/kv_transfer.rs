//! `kv_transfer_params`: a router sends a prompt to one replica and its answer's parameters to another, as for vLLM.

use std::time::Duration;

use engine::EngineConfig;
use serde_json::{Value, json};
use server::ServerOptions;
use tempfile::TempDir;

use crate::common::{Server, config};

fn replica(folder: &TempDir) -> Server {
    let transfer = json!({
        "kv_connector": "SharedFolder",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": folder.path()},
    });
    let kv_transfer = Some(transfer.to_string().parse().unwrap());
    let config = EngineConfig { kv_offloading_bytes: 8 << 20, kv_transfer, ..config() };
    Server::with(config, ServerOptions::default(), Duration::ZERO)
}

#[test]
fn b12_a_prompt_computed_on_one_server_is_continued_on_another_with_the_same_text() {
    let folder = TempDir::new().unwrap();
    let [prefill, decode] = [replica(&folder), replica(&folder)];
    let text = "The quick brown fox jumps over the lazy dog. ".repeat(4);
    let completion = json!({"prompt": text, "max_tokens": 8, "ignore_eos": true, "temperature": 0, "logprobs": 2});
    let chat = json!({
        "messages": [{"role": "user", "content": text}], "max_tokens": 8, "ignore_eos": true, "temperature": 0, "logprobs": true
    });
    for (path, body) in [("/v1/completions", completion), ("/v1/chat/completions", chat)] {
        let with = |params: Value, max_tokens: usize| {
            let mut body = body.clone();
            body["kv_transfer_params"] = params;
            body["max_tokens"] = max_tokens.into();
            body
        };
        let alone = Server::with(config(), ServerOptions::default(), Duration::ZERO);
        let want = alone.post(path, &body).json();
        assert!(want.get("kv_transfer_params").is_none());
        // As the sidecar of llm-d asks for it.
        let asked = json!({
            "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null, "remote_block_ids": null,
            "remote_host": null, "remote_port": null
        });
        let answer = prefill.post(path, &with(asked, 1)).json();
        let params = answer["kv_transfer_params"].clone();
        assert_eq!((&params["do_remote_prefill"], &params["do_remote_decode"]), (&json!(true), &json!(false)));
        assert_eq!(params["remote_request_id"], answer["id"]);
        let tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap();
        let blocks = params["remote_block_ids"].as_array().unwrap().len() as u64;
        assert!(params["remote_engine_id"].is_string() && blocks == tokens / 16, "{params}");

        let got = decode.post(path, &with(params, 8)).json();
        assert_eq!(got["choices"], want["choices"]);
        assert_eq!(got["usage"]["prompt_tokens_details"]["cached_tokens"], (tokens - 1) / 16 * 16);
        assert!(got.get("kv_transfer_params").is_none());
    }
    assert!(decode.metric("vllm:external_prefix_cache_hits_total") > 0.0);
    let wrong = decode.post("/v1/completions", &json!({"prompt": "a", "kv_transfer_params": {"do_remote_decode": 1}}));
    assert_eq!(wrong.status, 400, "{}", wrong.body);
}

#[test]
fn a_server_without_a_connector_ignores_the_parameters() {
    let server = Server::with(config(), ServerOptions::default(), Duration::ZERO);
    let params = json!({"do_remote_decode": true, "do_remote_prefill": true, "unknown": [1]});
    let reply = server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 1, "kv_transfer_params": params}));
    assert_eq!((reply.status, reply.json().get("kv_transfer_params")), (200, None));
}
