//! Files of prompts.

use bench::serve::dataset::{Prompt, Question, read};

use crate::args;

fn parse(text: &str) -> Result<Vec<Question>, String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompts");
    std::fs::write(&file, text).unwrap();
    read(&args(&["--dataset", file.to_str().unwrap(), "--random-output-len", "9"])).map_err(|error| error.to_string())
}

#[test]
fn every_format_of_file_is_read() {
    let text = |prompt: &str, length, output| Question { prompt: Prompt::Text(prompt.into()), length, output };
    let sharegpt = r#"[{"conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "12345678"}]}, {"conversations": []}]"#;
    assert_eq!(parse(sharegpt).unwrap(), [text("a b", 2, 2)]);
    let lines = "{\"messages\": [{\"role\": \"system\", \"content\": \"s\"}, {\"role\": \"user\", \"content\": \"q\"}]}\n\n{\"prompt\": \"p\", \"max_tokens\": 3}\n";
    assert_eq!(parse(lines).unwrap(), [text("q", 1, 9), text("p", 1, 3)]);
    let workload = r#"{"name": "w", "requests": [{"id": 0, "prompt": [1, 2, 3], "output_len": 5}]}"#;
    assert_eq!(parse(workload).unwrap(), [Question { prompt: Prompt::Tokens(vec![1, 2, 3]), length: 3, output: 5 }]);
    assert!(parse("{\"prompt\": 1}\nnothing").unwrap_err().contains(": line 2: "));
    assert!(
        parse("[]")
            .unwrap_err()
            .ends_with("found no requests, expected at least one: check the file and --num-prompts")
    );
}
