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

#[test]
fn prompts_of_sonnet_begin_alike_and_have_about_the_wanted_length() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sonnet.txt");
    let lines: Vec<String> = (0..50).map(|n| format!("line number {n:02} of the text, of equal length")).collect();
    std::fs::write(&file, lines.join("\n")).unwrap();
    let fixed = ["--dataset-name", "sonnet", "--dataset-path", file.to_str().unwrap(), "--num-prompts", "8"];
    let all = read(&args(&fixed)).unwrap();
    let texts: Vec<&str> = all
        .iter()
        .map(|question| match &question.prompt {
            Prompt::Text(text) => text.as_str(),
            Prompt::Tokens(_) => panic!("found tokens"),
        })
        .collect();
    let shared = texts[0].lines().zip(texts[1].lines()).take_while(|(a, b)| a == b).count();
    // 200 tokens of four characters, in lines of 45.
    assert!((15..=19).contains(&shared), "{shared}");
    assert!(all.iter().all(|question| question.output == 150 && question.length.abs_diff(550) < 30), "{all:?}");
    assert!(texts[2] != texts[3] && texts[0].starts_with("Pick as many lines"));
    let error = read(&args(&[&fixed[..], &["--sonnet-prefix-len", "600"]].concat())).unwrap_err().to_string();
    assert!(error.contains("--sonnet-prefix-len 600, expected at most --sonnet-input-len, 550"), "{error}");
}

#[test]
fn random_prompts_can_share_a_prefix_that_does_not_change_the_rest() {
    let of = |flags: &[&str]| {
        let fixed = ["--num-prompts", "3", "--random-input-len", "6", "--random-vocab-size", "1000"];
        let all = read(&args(&[&fixed[..], flags].concat())).unwrap();
        let tokens = |question: Question| match question.prompt {
            Prompt::Tokens(tokens) => tokens,
            Prompt::Text(_) => panic!("found text"),
        };
        all.into_iter().map(tokens).collect::<Vec<_>>()
    };
    let (plain, prefixed) = (of(&[]), of(&["--random-prefix-len", "4"]));
    for (plain, prefixed) in plain.iter().zip(&prefixed) {
        assert_eq!((&prefixed[..4], &prefixed[4..]), (&of(&["--random-prefix-len", "4"])[0][..4], &plain[..]));
    }
}

#[test]
fn lengths_of_answers_can_be_set_for_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompts.jsonl");
    std::fs::write(&file, "{\"prompt\": \"p\", \"max_tokens\": 3}\n").unwrap();
    let flags = ["--dataset-name", "custom", "--dataset-path", file.to_str().unwrap(), "--custom-output-len", "77"];
    assert_eq!(read(&args(&flags)).unwrap()[0].output, 77);
}
