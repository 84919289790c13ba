//! The work that a body may ask for.

use super::*;
use serde_json::json;

#[test]
fn the_effort_is_that_of_the_texts_and_not_of_the_bytes() {
    let of = |body: serde_json::Value| super::effort(body.to_string().as_bytes(), &Limits::default());
    let turn = json!({"role": "user", "content": "What is the capital of France?"});
    assert!(of(json!({"messages": vec![turn; 5], "max_tokens": 5, "stop": ["a", "b"]})) <= INLINE);
    assert!(of(json!({"prompt": vec![7; 1000]})) <= INLINE, "ids are not tokenized");
    for (name, values) in [("bad_words", 700), ("prompt", 700), ("stop", 700)] {
        let body = json!({"prompt": "a", name: vec!["ab"; values]});
        assert!(body.to_string().len() <= INLINE && of(body) > 8 * INLINE, "{name}");
    }
    for name in compiled() {
        let effort = of(json!({"prompt": "a", name: "a"}));
        assert!(effort > INLINE && effort <= LANES[0].0, "{name}");
    }
    // A long prompt does not wait for a body that holds more than any text.
    let lane = |bytes: usize| LANES.iter().take_while(|(most, _)| *most < bytes).count();
    assert!(lane(300 << 10) < lane(4 << 20) && lane(4 << 20) < lane(16 << 20));
}
