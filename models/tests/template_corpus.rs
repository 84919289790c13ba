//! Families of chat templates that no reference checkpoint of the tree has (Gemma 2 and 3, Phi 3, Mixtral's list with one for
//! tools), in our own wording, against the texts that transformers renders from them: `corpus/templates.json`.

use crate::common::{Copy, list, text};
use models::{ChatInput, ChatTemplate};
use serde_json::Value;

#[test]
fn p31_templates_of_every_family_render_as_transformers_renders_them() {
    let families: Value = serde_json::from_str(include_str!("corpus/templates.json")).unwrap();
    let (mut rendered, mut refused) = (0, 0);
    for family in list(&families) {
        let copy = Copy::of("llama").set("tokenizer_config.json", family["tokenizer_config"].clone());
        let template = ChatTemplate::load(&copy.files()).unwrap().unwrap();
        for case in list(&family["cases"]) {
            let kwargs = case["template_kwargs"].as_object().cloned().unwrap_or_default();
            let found = template.render(&ChatInput {
                messages: list(&case["messages"]),
                tools: case.get("tools"),
                add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
                continue_final_message: false,
                kwargs: &kwargs,
            });
            let name = format!("{} {}", family["name"], case["name"]);
            if case.get("error").is_some() {
                let message = found.unwrap_err().to_string();
                assert!(!message.is_empty() && !message.contains('\n'), "{name}: {message}");
                refused += 1;
            } else {
                assert_eq!(found.unwrap(), text(&case["text"]), "{name}");
                rendered += 1;
            }
        }
    }
    assert_eq!((rendered, refused), (33, 8));
}
