//! The items of a response.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;

use serde_json::Value;

use super::{Part, ResponseWriter, Status, Usage};

/// One delta can hold the end of a call, text behind it, and another call.
#[test]
fn items_are_those_of_a_delta_in_the_order_of_its_text() {
    let mut writer = ResponseWriter {
        model: "m".to_string(),
        usage: Usage::default(),
        namespaces: Vec::new().into(),
        echoed: Vec::new(),
        id: "resp_1".to_string(),
        created: 0,
        queued: false,
        error: None,
        output: Vec::new(),
        open: None,
        scores: Vec::new(),
        ended: None,
        next_number: 0,
        streams: true,
        events: VecDeque::new(),
    };
    let call = |index: usize| Part::Call { index, id: format!("call_{index}"), name: "f".to_string() };
    let arguments = |index: usize, text: &str| Part::Arguments { index, text: text.to_string() };
    let text = |text: &str| Part::Text(text.to_string());
    writer.write(vec![text("Look: "), call(0), arguments(0, "{\"a\"")], std::iter::empty());
    writer.write(vec![arguments(0, ":1}"), text("and"), call(1), arguments(1, "{}")], std::iter::empty());
    writer.close(Status::Completed);
    let response: Value = serde_json::from_str(&serde_json::to_string(&writer.response()).unwrap()).unwrap();
    let items: Vec<(&str, &str)> = response["output"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| match item["type"].as_str().unwrap() {
            "message" => ("message", item["content"][0]["text"].as_str().unwrap()),
            other => (other, item["arguments"].as_str().unwrap()),
        })
        .collect();
    assert_eq!(
        items,
        [("message", "Look: "), ("function_call", "{\"a\":1}"), ("message", "and"), ("function_call", "{}")]
    );
}
