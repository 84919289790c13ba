//! The reference's GGUF files: configuration, names, logits, greedy tokens and texts. Two are in the tree, with what the tests need
//! of their expected results (`../reference/trim.py`); `QUIRE_REFERENCE_FORMATS` names the folder of all.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use attention_kernels::{KernelChoice, select};
use models::{GenerationDefaults, Model, ModelConfig, ModelFiles, Weights, check_weights};
use safetensors::SafeTensors;
use serde_json::Value;
use testkit::capability::Capability;
use text::{ChatInput, ChatTemplate, TemplateError, Tokenizer};

use crate::common::{ids, last_logits, list, needs, text};
use crate::texts::TextFiles;

/// Greatest absolute difference of a float32 logit (the reference's README).
const TOLERANCE: f32 = 2e-3;

/// Folders of the GGUF cases: those in the tree, and all others, with a report if the machine does not have them.
fn cases() -> Vec<PathBuf> {
    let here = testkit::workspace::root().join("models/tests/gguf/reference");
    let mut cases = BTreeMap::new();
    let others = testkit::reference::formats();
    if others.is_none() {
        testkit::not_run::report(Capability::ReferenceFormats, "QUIRE_REFERENCE_FORMATS is not set");
    }
    for folder in others.into_iter().chain([here]) {
        let found = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let named = found.map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), path));
        cases.extend(named.filter(|(name, _)| name.starts_with("gguf-")));
    }
    assert!(cases.len() >= 2);
    cases.into_values().collect()
}

fn expected(case: &Path) -> (Value, PathBuf) {
    let expected: Value = serde_json::from_slice(&std::fs::read(case.join("expected.json")).unwrap()).unwrap();
    let file = case.join(text(&expected["model_file"]));
    (expected, file)
}

#[test]
fn configurations_are_those_that_the_files_stand_for() {
    for case in cases() {
        let (expected, file) = expected(&case);
        let found = ModelConfig::load(&ModelFiles::open(&file).unwrap()).unwrap();
        let folder = tempfile::TempDir::new().unwrap();
        std::fs::write(folder.path().join("config.json"), expected["hf_config"].to_string()).unwrap();
        let mut want = ModelConfig::load(&ModelFiles::open(folder.path()).unwrap()).unwrap();
        // The factors of llama 3 are a tensor in the file, which the logits test.
        let ropes = want.decoder.layers.iter_mut().zip(&found.decoder.layers);
        for (want, found) in ropes.flat_map(|(want, found)| want.branches.iter_mut().zip(&found.branches)) {
            use models::decoder::{Mixer, RopeScaling};
            if let (Mixer::Attention(want), Mixer::Attention(found)) = (&mut want.mixer, &found.mixer)
                && let Some(rope) = &mut want.rope
                && matches!(rope.scaling, RopeScaling::Llama3 { .. })
            {
                rope.scaling = found.rope.as_ref().unwrap().scaling.clone();
                assert!(matches!(rope.scaling, RopeScaling::LongRope { .. }));
            }
        }
        assert_eq!(found.decoder, want.decoder, "{}", case.display());
        assert_eq!(found.max_position_embeddings, want.max_position_embeddings);
    }
}

#[test]
fn logits_and_greedy_tokens_of_gguf_files_are_the_reference_s() {
    for case in cases() {
        let (expected, file) = expected(&case);
        let files = ModelFiles::open(&file).unwrap();
        let config = ModelConfig::load(&files).unwrap();
        let weights = Weights::open(&files).unwrap();
        check_weights(&config.decoder, &weights).unwrap();
        let device = device::open("cpu", Some(2)).unwrap();
        let kernels = select(&KernelChoice::default(), &needs(&*device, &config.decoder)).unwrap();
        let progress = Cell::new((0, 0));
        let report = |done, total| {
            progress.set((done, total));
            Ok(())
        };
        let mut model = Model::load(&config.decoder, &weights, Arc::clone(&device), kernels, 256, &report).unwrap();
        let (done, total) = progress.get();
        assert!(done <= total && done > total / 2, "{}: {done} of {total} bytes", case.display());
        let mut caches = model.new_cache(64, 8).unwrap();
        let bytes = std::fs::read(case.join("expected.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        for prompt in list(&expected["prompts"]) {
            let (prompt_ids, greedy) = (ids(&prompt["ids"]), ids(&prompt["greedy"]["ids"]));
            let want = tensors.tensor(text(&prompt["logits"])).unwrap();
            let want: Vec<f32> =
                want.data().as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
            let want = &want[want.len() - config.decoder.vocab_size()..];
            // A row does not depend on the others, so one pass over the prompt with its continuation gives every step.
            let all = [&prompt_ids[..], &greedy[..greedy.len() - 1]].concat();
            last_logits(&mut model, &mut caches, (8, 64), &all, all.len());
            let mut row = |at: usize| model.logits(&[(prompt_ids.len() - 1 + at) as u32]).unwrap().to_vec();
            let found = row(0);
            let error = found.iter().zip(want).map(|(a, b)| (a - b).abs()).max_by(f32::total_cmp).unwrap();
            println!("{}: {} tokens, error {error}", case.display(), prompt_ids.len());
            assert!(error < TOLERANCE, "{}: {} tokens, error {error}", case.display(), prompt_ids.len());
            for (at, (&want, margin)) in greedy.iter().zip(list(&prompt["greedy"]["margins"])).enumerate() {
                let likeliest = row(at).iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
                let hesitates = margin.as_f64().unwrap() < f64::from(2.0 * TOLERANCE);
                assert!(likeliest as u32 == want || hesitates, "{}, step {at}", case.display());
            }
        }
    }
}

#[test]
fn texts_of_gguf_files_are_the_reference_s() {
    let (mut rendered, mut refused) = (0, 0);
    for case in cases() {
        let (expected, file) = expected(&case);
        let name = case.display();
        let files = ModelFiles::open(&file).unwrap();
        let config = ModelConfig::load(&files).unwrap();
        let mut want = ids(&expected["eos_token_ids"]);
        want.sort_unstable();
        assert_eq!(config.eos_token_ids, want, "{name}");
        assert_eq!(GenerationDefaults::load(&files, &[]).unwrap().eos_token_ids, want, "{name}");
        let tokenizer = Tokenizer::load(&TextFiles(&files)).unwrap();
        tokenizer.check(config.decoder.vocab_size()).unwrap();
        for entry in list(&expected["prompts"]).iter().chain(list(&expected["encode"])) {
            let text = text(&entry["text"]);
            let encoded = tokenizer.encode(text, entry["add_special_tokens"].as_bool().unwrap()).unwrap();
            assert_eq!(encoded, ids(&entry["ids"]), "{name}: {text:?}");
            assert!(tokenizer.least_tokens(text.len()) <= encoded.len(), "{name}: {text:?}");
        }
        for entry in list(&expected["detok"]) {
            for (key, skips) in [("skip_special_tokens", true), ("keep_special_tokens", false)] {
                let decoded = tokenizer.decode(&ids(&entry["ids"]), skips).unwrap();
                assert_eq!(decoded, text(&entry[key]), "{name} {}", entry["name"]);
            }
        }
        let template = ChatTemplate::load(&TextFiles(&files)).unwrap().unwrap();
        for entry in list(&expected["chat"]) {
            let found = template.render(&ChatInput {
                messages: list(&entry["messages"]),
                tools: Some(&entry["tools"]).filter(|tools| !tools.is_null()),
                add_generation_prompt: entry["add_generation_prompt"].as_bool().unwrap(),
                continue_final_message: false,
                kwargs: &entry["template_kwargs"].as_object().cloned().unwrap_or_default(),
            });
            if entry.get("error").is_some() {
                assert!(matches!(found, Err(TemplateError::Refused(_))), "{name} {}", entry["name"]);
                refused += 1;
                continue;
            }
            let found = found.unwrap();
            assert_eq!(found, text(&entry["text"]), "{name} {}", entry["name"]);
            assert_eq!(tokenizer.encode(&found, false).unwrap(), ids(&entry["ids"]), "{name} {}", entry["name"]);
            rendered += 1;
        }
    }
    assert!(rendered >= 20 && refused > 0, "{rendered} rendered, {refused} refused");
}
