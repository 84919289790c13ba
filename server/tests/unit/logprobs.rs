//! The bytes of log probabilities.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::app::{LogprobFormat, Sizes};

/// Bytes, and tokens of bytes that take much space as JSON, in the spelling of byte-level tokenizers.
fn tokenizer() -> Arc<Tokenizer> {
    let long = ["Ġ".repeat(128), "\"".repeat(99), "\\".repeat(97), "Ċ".repeat(95), "ð".repeat(93), "Ā".repeat(91)];
    let vocab: serde_json::Map<_, _> = long
        .iter()
        .map(String::as_str)
        .chain(["a", "b", "ðŁĺĢ", "é"])
        .zip(0..)
        .map(|(t, i)| (t.into(), json!(i)))
        .collect();
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let model = json!({"type": "BPE", "vocab": vocab, "merges": []});
    let file = json!({"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model});
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), file.to_string()).unwrap();
    Arc::new(Tokenizer::load(folder.path()).unwrap())
}

#[test]
fn log_probabilities_take_at_most_the_bytes_that_they_are_counted_as() {
    let tokenizer = tokenizer();
    let vocab = tokenizer.vocab_size();
    let sizes = Sizes::new(&tokenizer, vocab, vocab);
    for k in [0, 1, 4, vocab - 1] {
        for id in 0..vocab as u32 {
            let top = (0..k as u32).map(|id| (id, -0.700_123_4)).collect();
            let found = TokenLogprobs { logprob: -1_234.567_9, rank: 151_643, top };
            let tokens = vec![TokenOutput { id, logprobs: Some(found.clone()), text_offset: 1_048_576 }; 3];
            let prompt = Arc::new(Prompt { ids: vec![id; 3], logprobs: Some(vec![Some(found); 3]) });
            let chat = Logprobs::Chat { tokenizer: tokenizer.clone(), tokens: &tokens, k };
            let lists = |prompt, tokens| {
                let (shift, skip_special) = (1_048_576, false);
                let tokenizer = tokenizer.clone();
                Logprobs::Completion(Completion { tokenizer, prompt, shift, skip_special, tokens, k })
            };
            let of_prompt = PromptLogprobs { tokenizer: tokenizer.clone(), prompt: prompt.clone(), k };
            for (format, text) in [
                (LogprobFormat::Chat, serde_json::to_string(&chat)),
                (LogprobFormat::Completion, serde_json::to_string(&lists(None, &tokens))),
                (LogprobFormat::Completion, serde_json::to_string(&lists(Some(prompt), &[]))),
                (LogprobFormat::Completion, serde_json::to_string(&of_prompt)),
            ] {
                // What the engine holds, then the text.
                let held = size_of::<TokenOutput>() + 8 * k + text.unwrap().len() / 3;
                let counted = sizes.entries(k, format).bytes;
                assert!(held <= counted, "{format:?} {k} {id}: {held} bytes, counted as {counted}");
            }
        }
    }
    // The longest token counts, and not one length for all.
    let plain = |k| sizes.entries(k, LogprobFormat::Completion).bytes;
    assert!(plain(1) < 2_000 && plain(vocab - 1) - plain(vocab - 2) < 200, "{} {}", plain(1), plain(vocab - 1));
}
