//! The effect of fewer bits on a trained model: the demo model's perplexity on held-out text.
//!
//! `held_out.jsonl` is made by `models/demo/train/held_out.py`: chats of held-out questions, one JSON string a line.

use engine::{Dtype, EngineConfig, Event, GenerationParams, GenerationRequest, Llm, Quantization};

/// Tokens of a row; the model's context is 1,024.
const ROW: usize = 960;

/// Tokens that were scored, and e to the power of their mean negative log-probability.
fn perplexity(dtype: Dtype, quantization: Option<Quantization>) -> (usize, f64) {
    let kv_cache_memory_bytes = Some(16 << 20);
    let mut llm =
        Llm::new(EngineConfig { dtype: Some(dtype), quantization, kv_cache_memory_bytes, ..Default::default() })
            .unwrap();
    let texts = include_str!("held_out.jsonl").lines().map(|line| serde_json::from_str::<String>(line).unwrap());
    let step = if testkit::everything() { 2 } else { 4 };
    let ids: Vec<u32> = texts.step_by(step).flat_map(|text| llm.tokenizer().encode(&text, false).unwrap()).collect();
    let row = |ids: &[u32]| GenerationRequest {
        prompt: ids.to_vec(),
        params: GenerationParams { prompt_logprobs: Some(0), max_tokens: Some(0), ..Default::default() },
        ..Default::default()
    };
    let done = llm.run_with_events(ids.chunks(ROW).map(row).collect()).unwrap();
    let scores = done.into_iter().flat_map(|(_, events)| events).filter_map(|event| match event {
        Event::PromptLogprobs(scores) => Some(scores),
        _ => None,
    });
    let logprobs: Vec<f64> = scores.flatten().flatten().map(|score| f64::from(score.logprob)).collect();
    (logprobs.len(), (-logprobs.iter().sum::<f64>() / logprobs.len() as f64).exp())
}

#[test]
fn fewer_bits_raise_the_perplexity_of_held_out_text_by_little() {
    let (tokens, full) = perplexity(Dtype::F32, None);
    assert!(tokens >= if testkit::everything() { 10_000 } else { 5_000 }, "{tokens} tokens");
    assert!((1.0..20.0).contains(&full), "a perplexity of {full}: the model does not know this text");
    for (dtype, form, bound) in [
        (Dtype::Bf16, None, 0.005),
        (Dtype::F32, Some(Quantization::Q8), 0.005),
        (Dtype::F32, Some(Quantization::Q4), 0.03),
    ] {
        let (_, found) = perplexity(dtype, form);
        let (more, name) = (found / full - 1.0, form.map_or(dtype.to_string(), |form| form.to_string()));
        println!("{tokens} tokens: {full:.4} in full, {found:.4} in {name}: {:+.2} %", more * 100.0);
        assert!(more.abs() <= bound, "{name}: {found} instead of {full}");
        assert!(found != full, "{name}: nothing was rounded");
    }
}
