//! Responses that are kept: read, continued, deleted, run in the background, streamed from any event on, and taken up by another server.

use std::io::{BufRead, BufReader};
use std::sync::LazyLock;
use std::time::Duration;

use engine::AsyncEngine;
use serde_json::{Value, json};
use server::{App, ServerOptions, Store};

use crate::common::{Reply, Server, config};

static SERVER: LazyLock<Server> = LazyLock::new(Server::start);

const RESPONSES: &str = "/v1/responses";

/// A server over the store of a folder.
pub fn over(folder: &std::path::Path, options: ServerOptions) -> Server {
    let store = Store::open(folder, options.state.limits()).unwrap();
    let engine = AsyncEngine::start(config(), &|_, _| {}).unwrap();
    Server::serving(App::new(engine, options).with_store(store), Duration::ZERO)
}

fn path(id: &Value) -> String {
    format!("{RESPONSES}/{}", id.as_str().unwrap())
}

/// Names, numbers and data of the events of a body.
pub fn events(body: &str) -> Vec<(u64, String)> {
    let events = body.split_terminator("\n\n").filter(|block| !block.starts_with(':'));
    let event = |block: &str| {
        let data = block.split_once("\ndata: ").unwrap().1;
        let json: Value = serde_json::from_str(data).unwrap();
        (json["sequence_number"].as_u64().unwrap(), block.to_string())
    };
    events.map(event).collect()
}

/// Waits until a response has ended.
pub fn ended(server: &Server, id: &Value) -> Value {
    server.until("the response has ended", |server| {
        let status = server.get(&path(id)).json()["status"].clone();
        // A disk that has just failed cannot be read at once.
        status.as_str().is_some_and(|status| !["queued", "in_progress"].contains(&status))
    });
    server.get(&path(id)).json()
}

#[test]
fn a_response_is_kept_unless_it_says_otherwise() {
    let body = json!({"input": "One", "max_output_tokens": 6, "temperature": 0, "metadata": {"k": "v"}});
    let answer = SERVER.ok(RESPONSES, body.clone());
    let reply = SERVER
        .post(RESPONSES, &json!({"input": "One", "max_output_tokens": 30, "top_logprobs": 5, "ignore_eos": true}));
    assert_eq!(SERVER.get(&path(&reply.json()["id"])).body, reply.body, "to the digit");
    assert_eq!(SERVER.get(&path(&answer["id"])).json(), answer);
    let items = SERVER.get(&format!("{}/input_items", path(&answer["id"]))).json();
    assert_eq!(items["data"][0]["content"], json!([{"type": "input_text", "text": "One"}]));
    assert_eq!((&items["has_more"], &items["first_id"]), (&json!(false), &items["data"][0]["id"]));
    // A stream is kept before its last event.
    let reply =
        SERVER.post(RESPONSES, &json!({"input": "One", "max_output_tokens": 6, "temperature": 0, "stream": true}));
    let last: Value = serde_json::from_str(reply.body.rsplit("data: ").next().unwrap()).unwrap();
    assert_eq!(SERVER.get(&path(&last["response"]["id"])).json(), last["response"]);
    assert_eq!(last["response"]["output"][0]["content"], answer["output"][0]["content"]);
    let refused = SERVER.get(&format!("{}?stream=true", path(&answer["id"])));
    assert_eq!((refused.status, &refused.error()["param"]), (400, &json!("stream")));
    assert_eq!(SERVER.get(&format!("{}?starting_after=1", path(&answer["id"]))).status, 400);
    // One that is not kept does not exist.
    let mut other = body;
    other["store"] = json!(false);
    let answer = SERVER.ok(RESPONSES, other);
    assert_eq!(answer["store"], false);
    assert_eq!(SERVER.get(&path(&answer["id"])).status, 404);
}

#[test]
fn what_is_deleted_is_gone() {
    let id = SERVER.ok(RESPONSES, json!({"input": "One", "max_output_tokens": 2}))["id"].clone();
    let delete = || SERVER.send("DELETE", &path(&id), &[], b"");
    assert_eq!(delete().json(), json!({"id": id, "object": "response", "deleted": true}));
    for reply in [delete(), SERVER.get(&path(&id)), SERVER.get(&format!("{}/input_items", path(&id)))] {
        assert_eq!(reply.status, 404);
        let error = reply.error();
        assert_eq!(error["type"], "invalid_request_error");
        assert!(
            error["message"].as_str().unwrap().starts_with(&format!("No response found with id {id}: ")),
            "{error}"
        );
    }
    let next = SERVER.post(RESPONSES, &json!({"input": "Two", "previous_response_id": id}));
    assert_eq!((next.status, &next.error()["code"]), (404, &json!("previous_response_not_found")));
}

/// The prompt that a request leads to.
fn prompt_tokens(body: &Value) -> u64 {
    SERVER.ok("/v1/responses/input_tokens", body.clone())["input_tokens"].as_u64().unwrap()
}

#[test]
fn a_response_continues_another_as_if_its_items_were_sent_again() {
    let first = SERVER
        .ok(RESPONSES, json!({"input": "One", "instructions": "Be brief.", "max_output_tokens": 8, "temperature": 0}));
    let body = json!({"input": "Two", "previous_response_id": first["id"], "max_output_tokens": 8, "temperature": 0});
    let second = SERVER.ok(RESPONSES, body.clone());
    assert_eq!(second["previous_response_id"], first["id"]);
    // The instructions of the first are not taken over.
    let mut items = vec![json!({"role": "user", "content": "One"})];
    items.extend(first["output"].as_array().unwrap().clone());
    items.push(json!({"role": "user", "content": "Two"}));
    let whole = json!({"input": items, "max_output_tokens": 8, "temperature": 0});
    assert_eq!(prompt_tokens(&body), prompt_tokens(&whole));
    let text = |response: &Value| response["output"][0]["content"][0]["text"].clone();
    assert_eq!(text(&second), text(&SERVER.ok(RESPONSES, whole)));
    // A third one has all of them, and lists what precedes it.
    let third =
        SERVER.ok(RESPONSES, json!({"input": "Three", "previous_response_id": second["id"], "max_output_tokens": 2}));
    let listed = SERVER.get(&format!("{}/input_items?order=asc&limit=3", path(&third["id"]))).json();
    let roles: Vec<&str> =
        listed["data"].as_array().unwrap().iter().map(|item| item["role"].as_str().unwrap()).collect();
    assert_eq!((roles, &listed["has_more"]), (vec!["user", "assistant", "user"], &json!(true)));
    let rest = SERVER
        .get(&format!("{}/input_items?order=asc&after={}", path(&third["id"]), listed["last_id"].as_str().unwrap()))
        .json();
    assert_eq!(rest["data"].as_array().unwrap().len(), 2);
    // An item that a response has can be named.
    let named = json!({"input": [{"type": "item_reference", "id": first["output"][0]["id"]}, {"role": "user", "content": "x"}], "previous_response_id": first["id"]});
    assert!(prompt_tokens(&named) > prompt_tokens(&json!({"input": "x", "previous_response_id": first["id"]})));
}

#[test]
fn an_item_of_any_kept_response_may_be_named_in_place_of_the_item() {
    let ask = |body: &Value| SERVER.ok(RESPONSES, body.clone());
    let body = |items: &[Value], more: Value| {
        let mut body = json!({"input": items, "max_output_tokens": 4, "temperature": 0});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let (one, two) = (json!({"role": "user", "content": "One"}), json!({"role": "user", "content": "Two"}));
    let item = |response: &Value| response["output"][0].clone();
    let named = |response: &Value| json!({"type": "item_reference", "id": response["output"][0]["id"]});
    let first = ask(&body(std::slice::from_ref(&one), json!({})));
    let other = ask(&body(std::slice::from_ref(&two), json!({})));
    let whole = [one.clone(), item(&first), two.clone(), item(&other), item(&first), one.clone()];
    let short = [one.clone(), named(&first), two.clone(), named(&other), named(&first), one.clone()];
    let expected = ask(&body(&whole, json!({})));
    for more in [json!({}), json!({"store": false}), json!({"background": true})] {
        let is_background = more["background"] == true;
        let mut found = ask(&body(&short, more));
        if is_background {
            found = ended(&SERVER, &found["id"]);
        }
        assert_eq!(found["usage"]["input_tokens"], expected["usage"]["input_tokens"]);
        assert_eq!(found["output"][0]["content"], expected["output"][0]["content"]);
        if found["store"] == true {
            // What continues it does not need the named responses any more.
            let listed = SERVER.get(&format!("{}/input_items?order=asc", path(&found["id"]))).json();
            assert_eq!(listed["data"][1], item(&first));
        }
    }
    let gone = ask(&body(std::slice::from_ref(&one), json!({"store": false})));
    let deleted = ask(&body(std::slice::from_ref(&one), json!({})));
    assert_eq!(SERVER.send("DELETE", &path(&deleted["id"]), &[], b"").status, 200);
    for response in [gone, deleted] {
        let reply = SERVER.post(RESPONSES, &body(&[named(&response), two.clone()], json!({})));
        assert_eq!((reply.status, &reply.error()["param"]), (400, &json!("input[0].id")), "{}", reply.body);
    }
}

#[test]
fn a_conversation_gets_the_items_of_its_responses() {
    let conversation = SERVER.ok(
        "/v1/conversations",
        json!({"items": [{"role": "user", "content": "My name is Ann."}], "metadata": {"a": "b"}}),
    );
    let id = conversation["id"].as_str().unwrap();
    assert_eq!((&conversation["object"], &conversation["metadata"]), (&json!("conversation"), &json!({"a": "b"})));
    let ask = |input: &str, more: Value| {
        let mut body = json!({"input": input, "conversation": id, "max_output_tokens": 4, "temperature": 0});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        SERVER.ok(RESPONSES, body)
    };
    let first = ask("One", json!({}));
    assert_eq!(first["conversation"], json!({"id": id}));
    let before = prompt_tokens(&json!({"input": "Two", "conversation": {"id": id}}));
    let second = ask("Two", json!({"background": true}));
    assert_eq!(ended(&SERVER, &second["id"])["usage"]["input_tokens"], before);
    let items = SERVER.get(&format!("/v1/conversations/{id}/items?order=asc")).json();
    let texts: Vec<String> = items["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| match &item["content"] {
            Value::String(text) => text.clone(),
            parts => parts[0]["text"].as_str().unwrap().to_string(),
        })
        .collect();
    assert_eq!((texts.len(), &*texts[0], &*texts[1], &*texts[3]), (5, "My name is Ann.", "One", "Two"));
    assert_eq!(texts[2], first["output"][0]["content"][0]["text"].as_str().unwrap());
    let ids: std::collections::HashSet<&str> =
        items["data"].as_array().unwrap().iter().map(|item| item["id"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), 5);
    // What a response continued does not grow with the conversation.
    let body = json!({"input": "x", "previous_response_id": first["id"]});
    let then = prompt_tokens(&body);
    SERVER.ok(
        &format!("/v1/conversations/{id}/items"),
        json!({"items": [{"role": "user", "content": "More and more."}]}),
    );
    assert_eq!(prompt_tokens(&body), then);
    assert_eq!(
        SERVER.ok(&format!("/v1/conversations/{id}"), json!({"metadata": {"c": "d"}}))["metadata"],
        json!({"c": "d"})
    );
    let deleted = SERVER.send("DELETE", &format!("/v1/conversations/{id}"), &[], b"").json();
    assert_eq!(deleted["object"], "conversation.deleted");
    assert_eq!(SERVER.post(RESPONSES, &json!({"input": "x", "conversation": id})).status, 404);
}

#[test]
fn a_background_response_has_the_bits_of_one_on_its_connection() {
    let body = json!({"input": "Tell me a story", "temperature": 1, "seed": 7, "max_output_tokens": 24, "ignore_eos": true,
        "include": ["message.output_text.logprobs"], "top_logprobs": 2});
    let whole = SERVER.ok(RESPONSES, body.clone());
    let mut other = body;
    other["background"] = json!(true);
    let queued = SERVER.ok(RESPONSES, other.clone());
    assert_eq!(
        (&queued["status"], &queued["background"], &queued["output"]),
        (&json!("queued"), &json!(true), &json!([]))
    );
    let answer = ended(&SERVER, &queued["id"]);
    assert_eq!((&answer["status"], &answer["id"]), (&whole["status"], &queued["id"]));
    assert_eq!(answer["output"][0]["content"], whole["output"][0]["content"]);
    assert_eq!(answer["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
    // As a stream: every event, from any number on.
    other["stream"] = json!(true);
    let live = SERVER.post(RESPONSES, &other).body;
    let live = events(&live);
    assert!(live.iter().zip(0..).all(|((number, _), expected)| *number == expected));
    let names: Vec<&str> = live.iter().map(|(_, event)| event.lines().next().unwrap()).collect();
    assert_eq!(names[..3], ["event: response.created", "event: response.queued", "event: response.in_progress"]);
    assert_eq!(*names.last().unwrap(), "event: response.incomplete");
    let last: Value = serde_json::from_str(live.last().unwrap().1.rsplit("data: ").next().unwrap()).unwrap();
    assert_eq!(last["response"]["output"][0]["content"], whole["output"][0]["content"]);
    let id = path(&last["response"]["id"]);
    assert_eq!(SERVER.get(&id).json(), last["response"]);
    for after in [0, 5, live.len() as u64 - 2] {
        let rest = events(&SERVER.get(&format!("{id}?stream=true&starting_after={after}")).body);
        assert_eq!(rest, live[after as usize + 1..]);
    }
    assert_eq!(events(&SERVER.get(&format!("{id}?stream=true")).body), live);
    assert!(SERVER.get(&format!("{id}?stream=true&starting_after={}", live.len())).body.is_empty());
}

#[test]
fn a_background_response_is_cancelled_once_and_for_all() {
    let server = Server::with(crate::common::slow(config()), ServerOptions::default(), Duration::ZERO);
    let body =
        json!({"input": "One", "max_output_tokens": 900, "ignore_eos": true, "background": true, "stream": true});
    let mut stream = BufReader::new(server.open(
        "POST",
        RESPONSES,
        &[("Content-Type", "application/json")],
        body.to_string().as_bytes(),
    ));
    let mut line = String::new();
    while !line.contains("output_text.delta") {
        line.clear();
        stream.read_line(&mut line).unwrap();
    }
    assert_eq!(server.metric("vllm:num_requests_running"), 1.0);
    let listed = server.post(RESPONSES, &json!({"input": "x", "max_output_tokens": 1})).json();
    assert_eq!(listed["status"], "incomplete");
    // Not in the background, so it cannot be cancelled.
    let refused = server.post(&format!("{}/cancel", path(&listed["id"])), &json!({}));
    assert_eq!((refused.status, &refused.error()["param"]), (400, &json!("id")));
    drop(stream);
    let second =
        server.ok(RESPONSES, json!({"input": "Two", "max_output_tokens": 900, "ignore_eos": true, "background": true}));
    let cancel = |server: &Server| server.post(&format!("{}/cancel", path(&second["id"])), &json!({})).json();
    let cancelled = cancel(&server);
    assert_eq!((&cancelled["status"], &cancelled["id"]), (&json!("cancelled"), &second["id"]));
    assert_eq!(cancel(&server), cancelled);
    assert_eq!(server.get(&path(&second["id"])).json(), cancelled);
    assert_eq!(server.post("/v1/responses/resp_none/cancel", &json!({})).status, 404);
    // A running one that is deleted ends too.
    let third = server
        .ok(RESPONSES, json!({"input": "Three", "max_output_tokens": 900, "ignore_eos": true, "background": true}));
    assert_eq!(server.send("DELETE", &path(&third["id"]), &[], b"").status, 200);
    assert_eq!(server.get(&path(&third["id"])).status, 404);
    // The reader of the first has gone, and it runs on.
    server.until("only the first is left", |server| server.metric("vllm:num_requests_running") == 1.0);
}

#[test]
fn another_server_takes_up_what_one_left_with_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let body = |i: u64, stream: bool| {
        json!({"input": format!("Story {i}"), "temperature": 1, "max_output_tokens": 40, "ignore_eos": true,
        "background": true, "stream": stream, "include": ["message.output_text.logprobs"]})
    };
    // Where each is left: after so many events.
    for (i, events_read) in [(0, 4_usize), (1, 9), (2, 30)] {
        let slow = |folder: &std::path::Path| {
            let store = Store::open(folder, ServerOptions::default().state.limits()).unwrap();
            let engine = AsyncEngine::start(crate::common::slow(config()), &|_, _| {}).unwrap();
            Server::serving(App::new(engine, ServerOptions::default()).with_store(store), Duration::ZERO)
        };
        let server = slow(folder.path());
        let mut stream = BufReader::new(server.open(
            "POST",
            RESPONSES,
            &[("Content-Type", "application/json")],
            body(i, true).to_string().as_bytes(),
        ));
        let quiet = server.ok(RESPONSES, body(i + 10, false));
        let (mut seen, mut line) = (String::new(), String::new());
        while seen.matches("\n\n").count() < events_read {
            line.clear();
            assert!(stream.read_line(&mut line).unwrap() > 0);
            // The lines of a chunked body, without its sizes.
            if line.starts_with("event: ")
                || line.starts_with("data: ")
                || (line == "\n" && !seen.is_empty() && !seen.ends_with("\n\n"))
            {
                seen += &line;
            }
        }
        server.wait();
        let server = over(folder.path(), ServerOptions::default());
        let seen = events(&seen);
        let first: Value = serde_json::from_str(seen[0].1.rsplit("data: ").next().unwrap()).unwrap();
        let id = first["response"]["id"].clone();
        let last = seen.last().unwrap().0;
        let rest = events(&server.get(&format!("{}?stream=true&starting_after={last}", path(&id))).body);
        assert_eq!(rest[0].0, last + 1, "no gap and no repeat");
        let all = events(&server.get(&format!("{}?stream=true", path(&id))).body);
        assert_eq!([seen, rest].concat(), all);
        // The same request with the seed that was drawn, never cut.
        let answer = ended(&server, &id);
        assert_eq!(answer["status"], "incomplete");
        let text: String = all
            .iter()
            .filter(|(_, event)| event.starts_with("event: response.output_text.delta"))
            .map(|(_, event)| {
                serde_json::from_str::<Value>(event.rsplit("data: ").next().unwrap()).unwrap()["delta"]
                    .as_str()
                    .unwrap()
                    .to_string()
            })
            .collect();
        assert_eq!(answer["output"][0]["content"][0]["text"], text);
        assert_eq!(answer["output"][0]["content"][0]["logprobs"].as_array().unwrap().len(), 40);
        assert_eq!(ended(&server, &quiet["id"])["usage"]["output_tokens"], 40);
        server.wait();
    }
}

#[test]
fn what_one_key_stores_does_not_exist_for_another() {
    let options = ServerOptions { api_keys: vec!["ann".into(), "ben".into()], ..ServerOptions::default() };
    let server = Server::with(config(), options, Duration::ZERO);
    let send = |key: &str, method: &str, path: &str, body: &Value| {
        let authorization = format!("Bearer {key}");
        let headers = [("Authorization", &*authorization), ("Content-Type", "application/json")];
        server.send(method, path, &headers, if body.is_null() { String::new() } else { body.to_string() }.as_bytes())
    };
    let own =
        send("ann", "POST", RESPONSES, &json!({"input": "One", "max_output_tokens": 2, "background": true})).json();
    let conversation = send("ann", "POST", "/v1/conversations", &json!({})).json();
    let (mine, chat) = (path(&own["id"]), format!("/v1/conversations/{}", conversation["id"].as_str().unwrap()));
    let random = |id: &Value| {
        let id = id.as_str().unwrap();
        format!("{}{}", &id[..id.len() - 6], "000000")
    };
    let attempts = |mine: &str, chat: &str, id: &Value| -> Vec<Reply> {
        vec![
            send("ben", "GET", mine, &Value::Null),
            send("ben", "GET", &format!("{mine}?stream=true"), &Value::Null),
            send("ben", "GET", &format!("{mine}/input_items"), &Value::Null),
            send("ben", "POST", &format!("{mine}/cancel"), &json!({})),
            send("ben", "DELETE", mine, &Value::Null),
            send("ben", "POST", RESPONSES, &json!({"input": "x", "previous_response_id": id})),
            send("ben", "GET", chat, &Value::Null),
            send("ben", "GET", &format!("{chat}/items"), &Value::Null),
            send("ben", "POST", &format!("{chat}/items"), &json!({"items": [{"role": "user", "content": "x"}]})),
            send("ben", "DELETE", chat, &Value::Null),
        ]
    };
    let foreign = attempts(&mine, &chat, &own["id"]);
    // Ids of the same time that were never given out are answered alike.
    let unknown = (random(&own["id"]), random(&conversation["id"]));
    let never =
        attempts(&format!("{RESPONSES}/{}", unknown.0), &format!("/v1/conversations/{}", unknown.1), &json!(unknown.0));
    for (foreign, never) in foreign.iter().zip(&never) {
        assert_eq!((foreign.status, never.status), (404, 404), "{}", foreign.body);
        let plain = |reply: &Reply, id: &str| reply.body.replace(id, "ID");
        let plain = |reply: &Reply| {
            plain(reply, own["id"].as_str().unwrap())
                .replace(conversation["id"].as_str().unwrap(), "ID")
                .replace(&unknown.0, "ID")
                .replace(&unknown.1, "ID")
        };
        assert_eq!(plain(foreign), plain(never));
    }
    assert_eq!(send("ann", "GET", &mine, &Value::Null).status, 200);
    assert_eq!(send("ann", "GET", &chat, &Value::Null).status, 200);
}

#[test]
fn an_expired_response_says_so_and_a_full_store_names_its_flag() {
    let mut options = ServerOptions::default();
    options.state.state_ttl = Duration::from_secs(1);
    options.state.state_max_bytes = Some(100_000);
    let server = Server::with(config(), options, Duration::ZERO);
    let answer = server.ok(RESPONSES, json!({"input": "One", "max_output_tokens": 2}));
    server.until("it has expired", |server| server.get(&path(&answer["id"])).status == 404);
    let message = server.get(&path(&answer["id"])).error()["message"].clone();
    assert!(
        message.as_str().unwrap().contains("it has expired: a response is kept for 1 s (--state-ttl)"),
        "{message}"
    );
    let long = "x ".repeat(150_000);
    let refused = server.post("/v1/conversations", &json!({"items": [{"role": "user", "content": long}]}));
    assert_eq!(refused.status, 400);
    assert!(refused.error()["message"].as_str().unwrap().contains("--state-max-bytes"));
    // An answer that cannot be kept says that it is not.
    let long = "x ".repeat(400);
    let items: Vec<Value> = (0..1).map(|_| json!({"role": "user", "content": long})).collect();
    let answer = server.ok(RESPONSES, json!({"input": items, "max_output_tokens": 2}));
    assert_eq!(answer["store"], true);
}

#[test]
fn numbers_of_items_keep_their_digits() {
    let server = Server::start();
    // Doubles of any size, as Python and JavaScript write them.
    let mut noise = 1_u64;
    let mut random = || {
        noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        f64::from_bits(noise)
    };
    let numbers: Vec<f64> = std::iter::repeat_with(&mut random).filter(|x| x.is_finite()).take(500).collect();
    let entries: Vec<String> = numbers.iter().map(|x| format!("{{\"token\":\"a\",\"logprob\":{x:?}}}")).collect();
    let text = format!(
        "{{\"type\":\"output_text\",\"text\":\"Yes.\",\"annotations\":[],\"logprobs\":[{}]}}",
        entries.join(",")
    );
    let items = format!(
        "[{{\"type\":\"message\",\"role\":\"assistant\",\"content\":[{text}]}},{{\"role\":\"user\",\"content\":\"And now?\"}}]"
    );
    let body = format!("{{\"input\":{items},\"max_output_tokens\":2}}");
    let reply = server.send("POST", RESPONSES, &[("Content-Type", "application/json")], body.as_bytes());
    assert_eq!(reply.status, 200, "{}", reply.body);
    let listed = server.get(&format!("{}/input_items?order=asc", path(&reply.json()["id"]))).json();
    let kept = listed["data"][0]["content"][0]["logprobs"].as_array().unwrap();
    assert_eq!(kept.len(), numbers.len());
    for (kept, number) in kept.iter().zip(&numbers) {
        assert_eq!(kept["logprob"].as_f64().unwrap().to_bits(), number.to_bits(), "{number:?}");
    }
}
