//! Reasoning split off the answer, however the text is split.

use std::path::Path;
use std::sync::{Arc, LazyLock};

use proptest::prelude::*;
use text::{ReasoningFormat, ReasoningParser, ThinkingBudget, Thought, Tokenizer};

static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/reference/qwen3");
    Arc::new(Tokenizer::load(Path::new(folder)).unwrap())
});

fn split(thinking: bool, pieces: &[&str]) -> (String, String) {
    split_by(ReasoningParser::new(thinking), pieces)
}

fn split_by(mut parser: ReasoningParser, pieces: &[&str]) -> (String, String) {
    let mut thoughts: Vec<Thought> = pieces.iter().map(|piece| parser.push(piece)).collect();
    thoughts.push(parser.finish());
    (
        thoughts.iter().map(|thought| thought.reasoning.as_str()).collect(),
        thoughts.iter().map(|thought| thought.content.as_str()).collect(),
    )
}

#[test]
fn the_reasoning_ends_with_its_marker_whatever_the_pieces() {
    let ends = |mut parser: ReasoningParser, text: &str| {
        let mut found = Vec::new();
        for c in text.chars() {
            parser.push(c.encode_utf8(&mut [0; 4]));
            found.push(parser.num_reasoning_chars());
        }
        assert_eq!(parser.num_decided_chars(), text.chars().count());
        assert!(found.is_sorted(), "{text}: {found:?}");
        found.last().copied().unwrap_or(0)
    };
    let end_of = |text: &str, marker: &str| text[..text.find(marker).unwrap() + marker.len()].chars().count();
    let text = " <think>é世</think>\n\nc <think>d</think>";
    assert_eq!(ends(ReasoningParser::new(false), text), end_of(text, "</think>"));
    assert_eq!(ends(ReasoningParser::new(true), "a</think>b"), 9);
    assert_eq!(ends(ReasoningParser::new(false), "a <think>b</think>"), 0);
    assert_eq!(ends(ReasoningParser::new(false), "<think>endless"), 14);
    let harmony = "<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>final<|message|>y";
    assert_eq!(ends(ReasoningFormat::GptOss.parser("").unwrap(), harmony), end_of(harmony, "<|end|>"));
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
fn markers_around_the_answer_are_no_part_of_it() {
    let format = ReasoningFormat::CohereCommand3;
    let call = "<|START_ACTION|>[{\"tool_name\": \"f\"}]<|END_ACTION|>";
    let thought = "<|START_THINKING|>a <b<|END_THINKING|>";
    for (text, reasoning, content) in [
        (format!("{thought}<|START_RESPONSE|>c <| d<|END_RESPONSE|>"), "a <b", "c <| d"),
        ("<|START_RESPONSE|>c<|END_RESPONSE|>".to_string(), "", "c"),
        (format!("{thought}{call}"), "a <b", call),
        (format!("{thought}c<|END_RESP"), "a <b", "c<|END_RESP"),
        ("c <|START_THINKING|>".to_string(), "", "c <|START_THINKING|>"),
    ] {
        let pieces: Vec<&str> = text.split("").collect();
        for pieces in [&[text.as_str()][..], &pieces] {
            let found = split_by(format.parser("user").unwrap(), pieces);
            assert_eq!(found, (reasoning.to_string(), content.to_string()), "{text:?}");
        }
    }
    let seed = ReasoningFormat::SeedOss.parser("user").unwrap();
    assert_eq!(split_by(seed, &["<seed:think>a</seed:think>b"]), ("a".to_string(), "b".to_string()));
}

#[test]
fn a_prompt_may_end_within_the_reasoning() {
    for (prompt, text, reasoning) in [
        ("<|im_start|>assistant\n<think>\n", "a</think>c", "a"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "a</think>c", ""),
        ("What does <think> mean?<|im_start|>assistant\n", "a</think>c", ""),
        ("What does <think> mean?<|im_start|>assistant\n", "<think>a</think>c", "a"),
    ] {
        let parser = ReasoningFormat::Qwen3.parser(prompt).unwrap();
        assert_eq!(split_by(parser, &[text]).0, reasoning, "{prompt:?}");
    }
    // Without a tag in the prompt this format begins with reasoning, unless the prompt closes it.
    for (prompt, reasoning) in [("assistant\n", "a"), ("assistant\n<think>", "a"), ("<think>\n\n</think>\n\n", "")] {
        let parser = ReasoningFormat::DeepseekR1.parser(prompt).unwrap();
        assert_eq!(split_by(parser, &["a</think>c"]).0, reasoning, "{prompt:?}");
    }
    assert!(ReasoningFormat::Off.parser("<think>").is_none());
}

#[test]
fn every_format_has_its_markers_and_vllms_name() {
    for (name, text) in [
        ("qwen3", "<think>a</think>c"),
        ("deepseek_r1", "a</think>c"),
        ("mistral", "[THINK]a[/THINK]c"),
        ("gemma4", "<|channel>thought\na<channel|>c"),
        (
            "openai_gptoss",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>c<|return|>",
        ),
    ] {
        let parser = name.parse::<ReasoningFormat>().unwrap().parser("user: Hi.").unwrap();
        assert_eq!(split_by(parser, &[text]), ("a".to_string(), "c".to_string()), "{name}");
    }
    assert!("nothing".parse::<ReasoningFormat>().unwrap_err().contains("openai_gptoss"));
}

#[test]
fn messages_of_harmony_are_reasoning_answer_and_calls() {
    let call = "<|channel|>commentary to=functions.f<|message|>{\"x\": 1}<|call|>";
    let parser = || ReasoningFormat::GptOss.parser("<|start|>assistant").unwrap();
    for (text, reasoning, content) in [
        ("<|channel|>final<|message|>c <|end", "", "c <|end"),
        ("<|channel|>analysis<|message|>a", "a", ""),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b", "a\nb", ""),
        ("<|channel|>commentary<|message|>Let me see.<|end|>", "", "Let me see."),
        ("plain <|text", "", "plain <|text"),
        ("<|channel|>analysis<|mess", "", "<|channel|>analysis<|mess"),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"x\": 1}<|call|>", "", call),
        (" to=functions.f<|channel|>commentary json<|message|>{\"x\": 1}<|call|>", "", call),
        ("<|channel|>analysis to=python<|message|>print()<|call|>", "print()", ""),
        ("<|channel|>commentary to=functions.f code<|message|>{\"x\": 1}<|call|>", "", call),
        // A marker in a string of JSON is text.
        (
            "<|channel|>commentary to=functions.f<|message|>{\"x\": \"<|end|>\\\"<|call|>\"}<|call|><|start|>assistant<|channel|>final<|message|>c",
            "",
            "<|channel|>commentary to=functions.f<|message|>{\"x\": \"<|end|>\\\"<|call|>\"}<|call|>c",
        ),
    ] {
        assert_eq!(split_by(parser(), &[text]), (reasoning.to_string(), content.to_string()), "{text}");
    }
    let mut without = parser();
    without.ignore_calls();
    assert_eq!(split_by(without, &[call]).1, "{\"x\": 1}");
    let within = ReasoningFormat::GptOss.parser("<|start|>assistant<|channel|>final<|message|>It").unwrap();
    assert_eq!(split_by(within, &[" is."]).1, " is.");
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

    #[test]
    fn every_split_of_harmony_gives_the_same_thoughts_and_answer(
        parts in prop::collection::vec(prop::sample::select(vec![
            "<|channel|>", "analysis", "final", "commentary", " to=functions.f", "<|constrain|>", "json", "<|message|>", "<|end|>", "<|start|>",
            "assistant", "<|call|>", "<|return|>", "<|", "a", " ", "\n", "世",
        ]), 0..14),
        cuts in prop::collection::vec(0usize..200, 0..12),
    ) {
        let whole = parts.concat();
        let bounds: Vec<usize> = (0..=whole.len()).filter(|&at| whole.is_char_boundary(at)).collect();
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| bounds[cut % bounds.len()]).chain([0, whole.len()]).collect();
        cuts.sort_unstable();
        let pieces: Vec<&str> = cuts.windows(2).map(|cut| &whole[cut[0]..cut[1]]).collect();
        let parser = || ReasoningFormat::GptOss.parser("").unwrap();
        prop_assert_eq!(split_by(parser(), &pieces), split_by(parser(), &[&whole]));
    }

    #[test]
    fn no_reasoning_is_longer_than_its_budget_and_nothing_else_is_forced(
        parts in prop::collection::vec(prop::sample::select(vec![
            "<think>", "</think>", "<|channel|>", "analysis", "final", "<|message|>", "<|end|>", "<|start|>assistant", "</", " so", " world",
            "\n", "a", "世", "🙂",
        ]), 0..16),
        format in prop::sample::select(vec![ReasoningFormat::Qwen3, ReasoningFormat::DeepseekR1, ReasoningFormat::GptOss]),
        prompt in prop::sample::select(vec!["Hi", "Hi<think>", "<|start|>assistant<|channel|>analysis<|message|>", "</think>"]),
        most in 0usize..6,
    ) {
        let encode = |text: &str| TOKENIZER.encode(text, false).unwrap();
        let decode = |ids: &[u32]| TOKENIZER.decode(ids, false).unwrap();
        let (prompt, parser) = (encode(prompt), format.parser(prompt).unwrap());
        // What a definition says: the next character is reasoning.
        let is_within = |answer: &[u32]| {
            let mut parser = parser.clone();
            parser.push(&decode(&[&prompt[..], answer].concat())[decode(&prompt).len()..]);
            parser.push("xx").reasoning.ends_with('x')
        };
        let limit = format.limit(&TOKENIZER, &prompt, most).unwrap().unwrap();
        let mut budget = ThinkingBudget::new(limit, TOKENIZER.clone(), &prompt);
        let (mut answer, mut drawn, mut thought, mut forced) = (Vec::new(), 0, 0, Vec::new());
        let wanted = encode(&parts.concat());
        while drawn < wanted.len() {
            let within = is_within(&answer);
            match budget.forced() {
                Some(token) => {
                    prop_assert!(within && thought == most, "{}", decode(&answer));
                    forced.push(token);
                    answer.push(token);
                }
                None => {
                    prop_assert!(!within || thought < most, "{}", decode(&answer));
                    forced.clear();
                    thought += usize::from(within);
                    answer.push(wanted[drawn]);
                    drawn += 1;
                }
            }
            budget.accept(answer[answer.len() - 1]);
            if !forced.is_empty() && !is_within(&answer) {
                prop_assert_eq!(decode(&forced), format.markers().1);
            }
        }
    }
}
