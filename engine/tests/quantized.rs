//! The reference cases with weights in 8 and in 4 bits: how far the log-probabilities of 8 bits are from those of the full weights, and bit
//! for bit the same ones whatever the block size, the chunks, the companions, the prefix cache, the threads or the kernel.

use crate::common::cases::{Prompt, expected, folder, prompts};
use engine::{
    Dtype, EngineConfig, Event, GenerationParams, GenerationRequest, Llm, ModelSource, Quantization, SamplingParams,
    plan,
};
use testkit::reference::{self, CASES, FIRST, context};

fn config(case: &str, quantization: Quantization) -> EngineConfig {
    EngineConfig {
        model: ModelSource::Folder(folder(case)),
        // As all kernels compute, the reference too.
        dtype: Some(Dtype::F32),
        quantization: Some(quantization),
        max_num_seqs: 8,
        kv_cache_memory_bytes: Some(16 << 20),
        threads: Some(1),
        ..Default::default()
    }
}

/// Log-probabilities of the reference's own continuations, computed as parts of prompts.
fn teacher_forced(config: EngineConfig, prompts: &[Prompt]) -> Vec<Vec<f32>> {
    let mut llm = Llm::new(config).unwrap();
    let request = |p: &Prompt| GenerationRequest {
        prompt: [&p.ids[..], &p.greedy].concat(),
        params: GenerationParams { prompt_logprobs: Some(1), max_tokens: Some(0), ..Default::default() },
        ..Default::default()
    };
    let scores = |events: Vec<Event>, prompt: &Prompt| {
        let scored = events.into_iter().find_map(|e| if let Event::PromptLogprobs(s) = e { Some(s) } else { None });
        scored.unwrap()[prompt.ids.len()..].iter().map(|s| s.as_ref().unwrap().logprob).collect()
    };
    let done = llm.run_with_events(prompts.iter().map(request).collect()).unwrap();
    done.into_iter().zip(prompts).map(|((_, events), prompt)| scores(events, prompt)).collect()
}

/// Tokens and the bits of their log-probabilities, drawn greedily.
fn generated(config: EngineConfig, prompts: &[Prompt], together: bool) -> Vec<(Vec<u32>, Vec<u32>)> {
    let request = |p: &Prompt| GenerationRequest {
        prompt: p.ids.clone(),
        params: GenerationParams {
            sampling: SamplingParams { temperature: 0.0, logprobs: Some(3), ..Default::default() },
            max_tokens: Some(32),
            ignore_eos: true,
            ..Default::default()
        },
        ..Default::default()
    };
    let mut llm = Llm::new(config).unwrap();
    let requests: Vec<GenerationRequest> = prompts.iter().map(request).collect();
    let done = match together {
        true => llm.run_with_events(requests).unwrap(),
        false => requests.into_iter().flat_map(|r| llm.run_with_events(vec![r]).unwrap()).collect(),
    };
    let of = |(completion, events): (engine::Completion, Vec<Event>)| {
        let deltas = events.into_iter().filter_map(|e| if let Event::Delta(d) = e { Some(d.tokens) } else { None });
        let scores = deltas.flatten().map(|t| t.logprobs.unwrap());
        let bits = scores.flat_map(|l| l.top.into_iter().map(|t| t.1.to_bits()).chain([l.logprob.to_bits()]));
        (completion.outputs[0].token_ids.clone(), bits.collect())
    };
    done.into_iter().map(of).collect()
}

/// Greatest and mean difference of a log-probability from the reference that a case may have in 8 bits. Measured, over the
/// five cases: greatest 0.56 to 0.85, mean 0.067 to 0.109.
///
/// These checkpoints are harsh: random weights whose logits spread by 7, so that an error of 1 % in the last hidden state
/// moves a log-probability by 0.1. Rounding to 8 bits in blocks of 32 is an error of 0.54 % of a matrix's spread. With
/// the matrices rounded as in Q8_0 and everything else in float32, the means are 0.045 to 0.090; rounding the activations
/// in the same way is a second error of about the same size, and adds about what independent errors add: measured in four of the
/// cases, 1.2 to 1.5 times.
///
/// They are no test of 4 bits: an error of 8 % in every matrix turns them into different random models (mean 2.2). The effect of
/// 4 bits is measured on a trained model, in `perplexity.rs`.
const GREATEST: f64 = 1.0;
const MEAN: f64 = 0.13;

#[test]
fn log_probabilities_stay_near_those_of_the_full_weights() {
    for case in CASES {
        let mut prompts = prompts(case);
        prompts.retain(|prompt| context(case, prompt.ids.len()).is_none_or(|context| context > 96));
        let found = teacher_forced(config(case, Quantization::Q8), &prompts);
        assert!(
            found.len() == prompts.len()
                && found.iter().zip(&prompts).all(|(found, p)| found.len() == p.logprobs.len())
        );
        let pairs = found.iter().flatten().zip(prompts.iter().flat_map(|p| &p.logprobs));
        let errors: Vec<f64> = pairs.map(|(found, want)| (f64::from(*found) - want).abs()).collect();
        let (greatest, mean) =
            (errors.iter().fold(0.0f64, |m, e| m.max(*e)), errors.iter().sum::<f64>() / errors.len() as f64);
        println!("{case}: {} tokens, greatest {greatest:.4}, mean {mean:.4}", errors.len());
        // Where a router chooses another expert, a token's result moves as a whole: what 16 bits do to a case tells how much.
        let noise = &expected(case)["noise"]["bfloat16_compute"];
        let twice = |key: &str| 2.0 * noise[key].as_f64().unwrap();
        let of_noise = (twice("max_abs"), twice("mean_abs"));
        let most = if FIRST.contains(&case) { (GREATEST, MEAN) } else { of_noise };
        assert!(
            greatest < most.0 && mean < most.1,
            "{case}: greatest {greatest}, mean {mean}, expected below {most:?}"
        );
        assert!(greatest > 2e-3, "{case}: that is the error of float32: nothing was quantised");
    }
}

#[test]
fn every_bit_is_the_same_in_every_setting() {
    // The reference kernels sum dense layers in another order, and routers and tables of positions stay dense.
    const SETTINGS: [(usize, usize, bool, bool, usize, &str); 6] = [
        (8, 16, true, false, 2, "auto"),
        (32, 2048, true, true, 1, "auto"),
        (16, 64, false, true, 3, "auto"),
        (16, 2048, true, false, 2, "cpu.reference"),
        (8, 16, false, true, 1, "cpu.reference"),
        (16, 24, true, true, 2, "cpu.portable"),
    ];
    let both = CASES.into_iter().flat_map(|case| [(case, Quantization::Q8), (case, Quantization::Q4)]);
    // The differences between families do not interact with the form: an ordinary run tests most families with one form.
    let some = |at: usize| testkit::everything() || at < 2 || at % 4 == 2 || at % 4 == 1;
    for (_, (case, form)) in both.enumerate().filter(|(at, _)| some(*at)) {
        let prompts = prompts(case);
        let want = generated(config(case, form), &prompts, false);
        assert!(want.iter().all(|(tokens, bits)| tokens.len() == 32 && bits.len() == 32 * 4), "{case} {form}");
        let settings = if FIRST.contains(&case) { &SETTINGS[..] } else { &SETTINGS[..2] };
        for &(block_size, budget, together, enable_prefix_caching, threads, linear) in settings {
            let mut config = EngineConfig {
                block_size: Some(reference::block_size(case, block_size)),
                max_num_batched_tokens: budget,
                enable_prefix_caching,
                threads: Some(threads),
                ..config(case, form)
            };
            config.kernels.linear = linear.into();
            let got = generated(config, &prompts, together);
            assert!(
                got == want,
                "{case} {form}: blocks of {block_size}, budget {budget}, together {together}, {threads} threads, linear {linear}"
            );
        }
    }
}

#[test]
fn a_plan_counts_the_packed_bytes() {
    let bytes = |quantization| plan(&EngineConfig { quantization, ..config("llama", Quantization::Q8) }).unwrap();
    let (full, q8, q4) = (bytes(None), bytes(Some(Quantization::Q8)), bytes(Some(Quantization::Q4)));
    // 560 embeddings and outputs of 64; per layer q, k, v (256 outputs of 64), output (64 of 128), gate and up (256 of
    // 64), down (64 of 128); 7 norms of 64 in float32. In integers 17 or 9 bytes for 16 weights, and whole pairs of panels: 576
    // outputs.
    let layers = 3 * (256 * 64 + 64 * 128 + 256 * 64 + 64 * 128);
    let (matrices, pairs) = (2 * 560 * 64 + layers, 2 * 576 * 64 + layers);
    assert_eq!(full.weight_bytes, (matrices + 7 * 64) * 4);
    assert_eq!(q8.weight_bytes, pairs / 16 * 17 + 7 * 64 * 4);
    assert_eq!(q4.weight_bytes, pairs / 16 * 9 + 7 * 64 * 4);
    // Tied, 608 of 96; per layer q, k, v (160 of 96, with biases), output (96 of 96), gate and up (256 of 96), down (96 of 128).
    let qwen2 = plan(&EngineConfig { quantization: None, ..config("qwen2", Quantization::Q8) }).unwrap();
    let layer = 160 * 96 + 160 + 96 * 96 + 256 * 96 + 96 * 128;
    assert_eq!(qwen2.weight_bytes, (608 * 96 + 3 * layer + 7 * 96) * 4);
    assert!(q8.weights_line().ends_with("matrices in q8"), "{}", q8.weights_line());
}

#[test]
fn a_device_without_such_products_refuses_the_weights_in_one_line_before_reading_any() {
    let Some(on_sim) = crate::common::on_sim(config("llama", Quantization::Q8)) else { return };
    for form in [Quantization::Q8, Quantization::Q4] {
        let config = EngineConfig { quantization: Some(form), ..on_sim.clone() };
        let said = plan(&config).unwrap_err().to_string();
        assert_eq!(
            said,
            format!(
                "--quantization: device {} has no {form} weights for products in float32; leave it out, or use \
                 --dtype bfloat16 or --device cpu",
                config.device
            )
        );
        assert_eq!(Llm::new(config).err().unwrap().to_string(), said);
    }
    assert!(plan(&EngineConfig { quantization: None, ..on_sim }).is_ok());
}
