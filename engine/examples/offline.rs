//! Continues a few prompts with the model inside the binary: `cargo run --release -p engine --example offline`.

use engine::{EngineConfig, GenerationParams, Llm, SamplingParams};

/// Prints a continuation of each prompt.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let prompts = ["The capital of France is", "Once upon a time", "A block table", "The sky is"];
    let sampling = SamplingParams { temperature: 0.8, top_p: 0.95, top_k: 50, ..Default::default() };
    let params = GenerationParams { sampling, max_tokens: Some(32), ..Default::default() };

    // The same for a checkpoint: `EngineConfig { model: ModelSource::Folder("path".into()), ..Default::default() }`.
    let mut llm = Llm::new(EngineConfig { seed: Some(0), ..Default::default() })?;
    for (prompt, completion) in prompts.iter().zip(llm.generate(&prompts, &params)?) {
        println!("{prompt:?} → {:?}", completion.outputs[0].text);
    }
    Ok(())
}
