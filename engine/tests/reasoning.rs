//! Reasoning split off the answer, however the text is split.

use engine::text::{ReasoningParser, Thought};
use proptest::prelude::*;

fn split(thinking: bool, pieces: &[&str]) -> (String, String) {
    let mut parser = ReasoningParser::new(thinking);
    let mut thoughts: Vec<Thought> = pieces.iter().map(|piece| parser.push(piece)).collect();
    thoughts.push(parser.finish());
    (
        thoughts.iter().map(|thought| thought.reasoning.as_str()).collect(),
        thoughts.iter().map(|thought| thought.content.as_str()).collect(),
    )
}

#[test]
fn reasoning_is_recognised_only_in_front_of_the_answer() {
    for (thinking, text, reasoning, content) in [
        (false, "<think>a b</think>c", "a b", "c"),
        (false, " \n<think>\na\n\nb\n</think>\n\nc <think>d</think>\n", "a\n\nb", "c <think>d</think>\n"),
        (false, "<think>\n\n</think>\n\nc", "", "c"),
        (false, "c <think>d</think>", "", "c <think>d</think>"),
        (false, "<thinker> x", "", "<thinker> x"),
        (false, " <thi", "", " <thi"),
        (false, "", "", ""),
        (true, "a </thin k></think>c", "a </thin k>", "c"),
        (true, "\n a", "a", ""),
        (true, "a </thi", "a </thi", ""),
        (true, "<think>a</think>c", "<think>a", "c"),
    ] {
        assert_eq!(split(thinking, &[text]), (reasoning.to_string(), content.to_string()), "{text:?}");
    }
}

#[test]
fn a_prompt_may_end_within_the_reasoning() {
    assert!(ReasoningParser::is_opened_by("<|im_start|>assistant\n<think>\n"));
    assert!(!ReasoningParser::is_opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
    assert!(!ReasoningParser::is_opened_by("What does <think> mean?<|im_start|>assistant\n"));
}

proptest! {
    #[test]
    fn every_split_gives_the_same_thoughts_and_answer(
        parts in prop::collection::vec(prop::sample::select(vec!["<think>", "</think>", "<", "/", "th", " ", "\n", "a", "世"]), 0..14),
        cuts in prop::collection::vec(0usize..200, 0..12),
        thinking: bool,
    ) {
        let whole = parts.concat();
        let bounds: Vec<usize> = (0..=whole.len()).filter(|&at| whole.is_char_boundary(at)).collect();
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| bounds[cut % bounds.len()]).chain([0, whole.len()]).collect();
        cuts.sort_unstable();
        let pieces: Vec<&str> = cuts.windows(2).map(|cut| &whole[cut[0]..cut[1]]).collect();
        prop_assert_eq!(split(thinking, &pieces), split(thinking, &[&whole]));
    }
}
