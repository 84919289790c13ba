//! Sliding windows: blocks before a window are freed, also if only some layers have one, and no bit changes.

use std::path::Path;

use crate::common::{prompt, request, tokens};
use engine::{EngineConfig, Event, GenerationParams, GenerationRequest, Llm, ModelSource};

fn case(name: &str) -> std::path::PathBuf {
    testkit::reference::folder(name)
}

/// The `qwen2` case with a window of 24 in two of its three layers.
pub fn mixed() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(case("qwen2")).unwrap() {
        let file = file.unwrap().path();
        std::fs::copy(&file, folder.path().join(file.file_name().unwrap())).unwrap();
    }
    let path = folder.path().join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let text = text.replace("\"use_sliding_window\": false", "\"use_sliding_window\": true");
    std::fs::write(&path, text.replace("\"sliding_window\": 32", "\"sliding_window\": 24")).unwrap();
    folder
}

pub fn config(folder: &Path, bytes: u64) -> EngineConfig {
    EngineConfig {
        model: ModelSource::Folder(folder.to_path_buf()),
        kv_cache_memory_bytes: Some(bytes),
        ..crate::common::config(1)
    }
}

/// Bytes of a block of 8 tokens in a page of one layer with one head of 32, float32.
const LAYER_BLOCK: u64 = 2 * 32 * 4 * 8;

#[test]
fn a_sequence_of_windowed_layers_owns_its_window_alone() {
    let long = |which| request(which, 20, 300, 1);
    let mut llm = Llm::new(config(&case("mistral-sliding"), 3 * LAYER_BLOCK * 64)).unwrap();
    let want: Vec<_> = (0..6).map(|i| tokens(&mut llm, vec![long(i)]).remove(0)).collect();
    // 319 tokens are 40 blocks; the window of 32 is in 5, and one more is written.
    assert!(llm.stats().scheduler.blocks_peak <= 6, "{:?}", llm.stats());
    // All six in a pool that would hold one and a half without the window.
    assert_eq!(tokens(&mut llm, (0..6).map(long).collect()), want);
    assert_eq!(llm.stats().scheduler.preemptions, 0);
}

#[test]
fn a_prompt_longer_than_the_pool_of_its_windows_is_computed_block_by_block() {
    let long = || vec![request(1, 300, 40, 1)];
    let case = case("mistral-sliding");
    let want = tokens(&mut Llm::new(config(&case, 3 * LAYER_BLOCK * 64)).unwrap(), long());
    // 48 tokens of the window of 32 and the block that is written.
    let small = config(&case, 3 * LAYER_BLOCK * 6);
    let plan = engine::plan(&small).unwrap();
    assert_eq!((plan.num_blocks, plan.max_model_len, plan.limited_by_pool), (6, 512, false));
    let mut small = Llm::new(small).unwrap();
    assert_eq!(tokens(&mut small, long()), want);
    assert!(
        small.stats().scheduler.blocks_peak <= 6 && small.stats().scheduler.preemptions == 0,
        "{:?}",
        small.stats()
    );
}

#[test]
fn a_model_with_windows_in_some_layers_scores_its_text_as_it_made_it() {
    let folder = mixed();
    // Three groups of one layer. The text is generated token by token, with freed blocks before the window; scored alone in one
    // pass, it has all its blocks.
    let bytes = |blocks| 3 * LAYER_BLOCK * blocks;
    let mut llm = Llm::new(config(folder.path(), bytes(60))).unwrap();
    let made = llm.run_with_events(vec![request(3, 50, 90, 1)]).unwrap().remove(0);
    let whole: Vec<u32> = made.0.prompt_token_ids.iter().chain(&made.0.outputs[0].token_ids).copied().collect();
    let params = GenerationParams { prompt_logprobs: Some(2), max_tokens: Some(0), ..Default::default() };
    let score = GenerationRequest { prompt: whole, params, ..Default::default() };
    let mut wide = Llm::new(EngineConfig { max_num_batched_tokens: 512, ..config(folder.path(), bytes(60)) }).unwrap();
    let (_, events) = wide.run_with_events(vec![score]).unwrap().remove(0);
    let Event::PromptLogprobs(scores) = &events[0] else { panic!("{events:?}") };
    let generated = made.1.iter().filter_map(|e| if let Event::Delta(d) = e { d.tokens.first() } else { None });
    let generated: Vec<_> = generated.collect();
    assert_eq!((scores.len(), generated.len()), (140, 90));
    for (score, token) in scores[50..].iter().zip(generated) {
        assert_eq!(score.as_ref(), token.logprobs.as_ref());
    }
}

#[test]
fn a_small_pool_changes_no_token_of_a_model_with_windows_in_some_layers() {
    let folder = mixed();
    let requests: Vec<GenerationRequest> = (0..8)
        .map(|i| GenerationRequest {
            prompt: prompt(i % 3, 20 + 9 * i as usize),
            ..request(i, 1, 40, 1 + i as usize % 2)
        })
        .collect();
    let bytes = |blocks| 3 * LAYER_BLOCK * blocks;
    let mut llm = Llm::new(config(folder.path(), bytes(200))).unwrap();
    let want: Vec<_> = requests.iter().map(|r| tokens(&mut llm, vec![r.clone()]).remove(0)).collect();
    for swap_space_bytes in [0, bytes(40)] {
        let small = EngineConfig { swap_space_bytes, ..config(folder.path(), bytes(26)) };
        let mut llm = Llm::new(small).unwrap();
        assert_eq!(tokens(&mut llm, requests.clone()), want);
        let stats = llm.stats();
        assert!(
            stats.scheduler.preemptions > 0 && (stats.scheduler.swap_preemptions > 0) == (swap_space_bytes > 0),
            "{stats:?}"
        );
        assert_eq!((stats.scheduler.kv_cache_usage(), stats.scheduler.host_cache_usage()), (0.0, 0.0));
    }
}
