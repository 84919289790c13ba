//! `quire chat`: which messages are in the prompt of each turn, as its recording shows it.
use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::Value;

/// For each turn of a conversation: the tokens of its prompt that were found in the cache, and all of them.
fn prompts(turns: usize, max_model_len: &str) -> (Vec<(usize, usize)>, String) {
    let folder = tempfile::tempdir().unwrap();
    let recording = folder.path().join("run");
    let quire = || Command::new(env!("CARGO_BIN_EXE_quire"));
    let flags = ["chat", "--system", "Answer briefly.", "--max-tokens", "8", "--temperature", "0", "--block-size", "8"];
    let engine = ["--max-model-len", max_model_len, "--threads", "1", "--kv-cache-memory-bytes", "16M", "--record"];
    let mut chat = quire()
        .args(flags)
        .args(engine)
        .arg(&recording)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = chat.stdin.take().unwrap();
    (0..turns).for_each(|turn| writeln!(input, "What is the capital of France? ({turn})").unwrap());
    drop(input);
    let output = chat.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let replayed = quire().args(["replay", "--print"]).arg(&recording).output().unwrap();
    let steps = String::from_utf8(replayed.stdout).unwrap();
    let prompt = |turn: usize| {
        let request = format!("  request {turn}, sequence 0: positions ");
        let (start, rest) = steps.lines().find_map(|line| line.strip_prefix(&request)?.split_once("..")).unwrap();
        let end = rest.split([',', ';']).next().unwrap();
        (start.parse().unwrap(), end.parse().unwrap())
    };
    ((0..turns).map(prompt).collect(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn both_sides_of_a_conversation_are_in_the_next_prompt() {
    let (prompts, notes) = prompts(3, "512");
    for pair in prompts.windows(2) {
        let [(_, before), (cached, now)] = pair else { unreachable!() };
        // The keys of the earlier prompt are found, and those of the answer behind it, but for a part of a block.
        assert!(*cached > *before && now > cached, "{prompts:?}");
    }
    assert!(!notes.contains("was dropped"), "{notes}");
}

#[test]
fn a_conversation_that_exceeds_the_context_drops_its_oldest_turns_but_not_the_system_message() {
    let (prompts, notes) = prompts(8, "96");
    assert!(prompts.iter().all(|(_, tokens)| *tokens <= 96 - 8), "{prompts:?}");
    assert_eq!(prompts[2..], vec![prompts[2]; 6], "two turns fit");
    assert_eq!(notes.matches("its oldest turn was dropped").count(), 6, "{notes}");
    // The prompts still begin with the system message: its keys are found in the cache.
    assert!(prompts[2].0 >= 16, "{prompts:?}");
}

#[test]
fn the_system_message_can_be_changed_and_the_conversation_saved() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("saved.json");
    let mut chat = Command::new(env!("CARGO_BIN_EXE_quire"))
        .args(["chat", "--system", "Old.", "--max-tokens", "4", "--temperature", "0"])
        .args(["--threads", "1", "--kv-cache-memory-bytes", "16M"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = chat.stdin.take().unwrap();
    let save = format!("/save {}\n", path.display());
    write!(input, "One\\\ntwo\n/system Answer briefly.\n\"\"\"Three\nfour\"\"\"\n{save}{save}/help\n").unwrap();
    drop(input);
    let output = chat.wait_with_output().unwrap();
    let notes = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && notes.contains("expected a file that does not exist yet"), "{notes}");
    assert!(notes.contains("/system TEXT"), "{notes}");
    let saved: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let of = |index: usize, key: &str| saved["messages"][index][key].as_str().unwrap().to_string();
    let roles: Vec<String> = (0..5).map(|index| of(index, "role")).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant"]);
    assert_eq!(
        (of(0, "content"), of(1, "content"), of(3, "content")),
        ("Answer briefly.".into(), "One\ntwo".into(), "Three\nfour".into())
    );
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{}\n{}\n", of(2, "content"), of(4, "content")));
}
