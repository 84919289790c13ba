//! The memory plan of a start, and the errors that are found without reading a weight.

use crate::common::{TOKEN_BYTES, config};
use engine::{Engine, EngineConfig, ModelSource, Quantization, Roofline, WorkCounts, plan};

#[test]
fn the_pool_has_the_blocks_that_fit_the_bytes_and_limits_the_context() {
    let plan = plan(&config(10)).unwrap();
    assert_eq!((plan.num_blocks, plan.block_size, plan.kv_bytes_per_token), (10, 8, TOKEN_BYTES));
    assert_eq!((plan.max_model_len, plan.limited_by_pool), (80, true), "the model itself has 512");
    let page = plan.to_string();
    assert!(
        page.contains("10 blocks of 8 tokens = 80 tokens") && page.contains("cut to what the cache holds"),
        "{page}"
    );
    assert!(page.lines().any(|line| line.split_whitespace().eq(["80", "1"])), "one sequence of 80 tokens: {page}");
}

#[test]
fn impossible_sizes_are_refused_with_their_flag() {
    let error = |change: &dyn Fn(&mut EngineConfig)| {
        let mut config = config(10);
        change(&mut config);
        plan(&config).unwrap_err().to_string()
    };
    let too_long = error(&|c| c.max_model_len = Some(100));
    assert!(too_long.starts_with("--max-model-len: found 100, expected at most 80 tokens"), "{too_long}");
    assert!(too_long.contains(&format!("--kv-cache-memory-bytes {}", 13 * 8 * TOKEN_BYTES)), "{too_long}");
    assert!(error(&|c| c.max_model_len = Some(513)).contains("expected 1 to 512"));
    assert!(error(&|c| c.kv_cache_memory_bytes = Some(100)).starts_with("--kv-cache-memory-bytes: found 100"));
    assert!(error(&|c| c.kv_cache_memory_bytes = Some(1 << 60)).contains("the memory of the device"));
    assert!(error(&|c| c.block_size = Some(24)).starts_with("--block-size: found 24"));
    assert!(error(&|c| c.max_num_seqs = 0).starts_with("--max-num-seqs: found 0"));
    assert!(error(&|c| c.gpu_memory_utilization = Some(1.5)).starts_with("--gpu-memory-utilization"));
    assert!(error(&|c| c.device = "abacus".into()).starts_with("--device: found \"abacus\""));
}

#[test]
fn a_plan_reports_a_folder_that_cannot_be_loaded() {
    let ModelSource::Folder(source) = crate::common::model() else { unreachable!() };
    let copy = tempfile::tempdir().unwrap();
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        std::fs::copy(source.join(file), copy.path().join(file)).unwrap();
    }
    let planned = || plan(&EngineConfig { model: ModelSource::Folder(copy.path().into()), ..config(10) });
    planned().unwrap();
    let config_json = std::fs::read_to_string(source.join("config.json")).unwrap();
    let deeper = config_json.replace("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 4");
    assert_ne!(deeper, config_json);
    std::fs::write(copy.path().join("config.json"), deeper).unwrap();
    let error = planned().unwrap_err().to_string();
    assert!(error.contains("model.layers.3.") && error.contains("model.safetensors"), "{error}");
    std::fs::write(copy.path().join("config.json"), config_json).unwrap();
    std::fs::remove_file(copy.path().join("tokenizer.json")).unwrap();
    assert!(planned().unwrap_err().to_string().contains("tokenizer.json"));
    // The tokenizer is read beside the weights.
    std::fs::write(copy.path().join("tokenizer.json"), "{}").unwrap();
    let loaded =
        Engine::load(&EngineConfig { model: ModelSource::Folder(copy.path().into()), ..config(10) }, &|_, _| {});
    let error = loaded.err().unwrap().to_string();
    assert!(error.contains("tokenizer.json") && !error.contains("stopped"), "{error}");
}

#[test]
fn the_roofline_of_the_demo_model_follows_from_its_shape() {
    let config = EngineConfig { quantization: Some(Quantization::Q8), threads: Some(1), ..EngineConfig::default() };
    let (roofline, _) = Roofline::measure(&config).unwrap();
    // 5 layers of width 192 with 6 + 2·2 heads of 32 and 512 in between; 1,536 tokens, tied; norms are counted too.
    assert_eq!(roofline.logit_operations, 2 * 1536 * 192);
    assert_eq!(roofline.layer_operations + roofline.logit_operations, 2 * 1_894_464);
    assert_eq!(roofline.threads, 1);
    let decode = WorkCounts { steps: 10, tokens: 10, logits: 10, context: 0 };
    let bytes = 10.0 * roofline.weight_bytes as f64 / roofline.read;
    assert_eq!(roofline.seconds(&decode), bytes.max(20.0 * 1_894_464.0 / roofline.peak));
    let long = WorkCounts { context: 1 << 40, ..decode };
    assert!(roofline.seconds(&long) > 1000.0 * roofline.seconds(&decode));
}
