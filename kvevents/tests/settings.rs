//! Settings, and what is wrong with them.

use kvevents::{Format, KvEventsConfig, Layout, Publisher};

use super::config;

#[test]
fn b24_the_json_of_vllm_is_read_unchanged() {
    let text = r#"{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558", "buffer_steps": 100, "hwm": 200, "max_queue_size": 300,
        "topic": "kv@pod-1@model"}"#;
    let expected = KvEventsConfig {
        enabled: true,
        endpoint: "tcp://*:5557".into(),
        replay_endpoint: Some("tcp://*:5558".into()),
        buffer_steps: 100,
        hwm: 200,
        max_queue_size: 300,
        topic: "kv@pod-1@model".into(),
        format: Format::Map,
    };
    assert_eq!(text.parse(), Ok(expected));
    assert_eq!("{}".parse(), Ok(KvEventsConfig::default()));
    let parse = |text: &str| text.parse::<KvEventsConfig>().unwrap();
    assert!(!parse(r#"{"enable_kv_cache_events": true, "publisher": "null"}"#).enabled);
    assert!(parse(r#"{"enable_kv_cache_events": true, "publisher": null, "replay_endpoint": null}"#).enabled);
    assert_eq!(parse(r#"{"format": "array"}"#).format, Format::Array);
}

#[test]
fn a_wrong_setting_is_one_line_with_what_was_found_and_what_is_expected() {
    let cases = [
        ("", "not valid JSON"),
        ("[]", "expected a JSON object such as"),
        (r#"{"topics": ""}"#, r#"unknown key "topics", expected one of enable_kv_cache_events, publisher"#),
        (r#"{"topics": ""}"#, r#"did you mean "topic"?"#),
        (r#"{"enable_kv_cache_events": 1}"#, "enable_kv_cache_events: found 1, expected true or false"),
        (r#"{"publisher": "nats"}"#, r#"publisher: found "nats", expected "zmq" or "null""#),
        (r#"{"hwm": 0}"#, "hwm: found 0, expected a whole number from 1 to"),
        (r#"{"buffer_steps": -1}"#, "buffer_steps: found -1, expected"),
        (r#"{"max_queue_size": 1e3}"#, "max_queue_size: found 1000.0, expected"),
        (r#"{"format": "dynamo"}"#, r#"format: found "dynamo", expected "map" or "array""#),
        (r#"{"topic": 3}"#, "topic: found 3, expected a text"),
        (r#"{"endpoint": null}"#, "endpoint: found null, expected an address"),
    ];
    for (text, expected) in cases {
        let error = text.parse::<KvEventsConfig>().unwrap_err();
        assert!(error.contains(expected) && !error.contains('\n'), "{text}: {error}");
    }
    for endpoint in
        ["", "tcp://*", "tcp://*:x", "tcp://*:70000", "*:5557", "ipc:///tmp/kv", "tcp://:5557", "tcp://a b:1"]
    {
        for key in ["endpoint", "replay_endpoint"] {
            let error = format!(r#"{{"{key}": "{endpoint}"}}"#).parse::<KvEventsConfig>().unwrap_err();
            let expected = format!("{key}: found {endpoint:?}, expected tcp://HOST:PORT, such as \"tcp://*:5557\"");
            assert!(error.starts_with(&expected) && !error.contains('\n'), "{error}");
        }
    }
}

#[test]
fn a_port_in_use_is_one_line_that_names_the_key_and_the_address() {
    let first = Publisher::start(&config(), Layout::new(16)).unwrap();
    let taken = format!("tcp://*:{}", first.address().unwrap().port());
    let error = |config: KvEventsConfig| Publisher::start(&config, Layout::new(16)).err().unwrap().to_string();
    let of_events = error(KvEventsConfig { endpoint: taken.clone(), ..config() });
    let of_replay = error(KvEventsConfig { replay_endpoint: Some(taken.clone()), ..config() });
    for (error, key) in [(of_events, "endpoint"), (of_replay, "replay_endpoint")] {
        assert!(error.starts_with(&format!("{key}: cannot listen at {taken} (")), "{error}");
        assert!(error.contains("choose another port") && !error.contains('\n'), "{error}");
    }
    let no_port = error(KvEventsConfig { endpoint: "tcp://10.0.0.1:0".into(), ..config() });
    assert!(no_port.starts_with("endpoint: found tcp://10.0.0.1:0, expected a port"), "{no_port}");
}
