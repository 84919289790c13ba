//! Tensor-parallel groups: any number of ranks gives the bits of one.

use std::sync::Arc;

use attention_kernels::{Dtype, KernelChoice, Needs, select};
use device::collective::threads;
use device::gemm::Quantization;
use device::{Collective, Device, Options};
use models::decoder::Form;
use models::{Decoder, Model, ModelConfig, ModelFiles, PageLayout, Weights};
use testkit::reference::context;

use crate::common::{CASES, expected, files, ids, last_logits, list, needs};

const BLOCK_SIZE: usize = 8;
const NUM_BLOCKS: usize = 64;

/// The decoder of a case in a form, and one of its prompts.
fn declared(files: &ModelFiles, name: &str, form: Form) -> (Decoder, Weights, Vec<u32>) {
    let config = ModelConfig::load(files).unwrap();
    let weights = Weights::open(files).unwrap();
    let prompts: Vec<Vec<u32>> = list(&expected(name)["prompts"]).iter().map(|prompt| ids(&prompt["ids"])).collect();
    let prompt = prompts.into_iter().min_by_key(|prompt| prompt.len().abs_diff(24)).unwrap();
    let context = context(name, prompt.len()).unwrap_or(config.max_position_embeddings);
    let decoder = config.decoder.in_form(form).for_context(context);
    (models::in_stored_forms(decoder, &weights).unwrap(), weights, prompt)
}

/// The bits of the logits behind a prompt, whole and in chunks, as one rank of a group computes them.
fn bits(
    decoder: &Decoder,
    weights: &Weights,
    prompt: &[u32],
    device: Arc<dyn Device>,
    needs: &Needs,
    group: Option<Arc<dyn Collective>>,
) -> Vec<u32> {
    let whole = decoder;
    let shard = group.as_ref().map(|group| decoder.shard(group.rank(), group.size()).unwrap());
    let decoder = shard.as_ref().unwrap_or(decoder);
    let kernels = select(&KernelChoice::default(), needs).unwrap();
    let mut model = Model::load(decoder, weights, device, kernels, 64, &|_, _| Ok(())).unwrap();
    assert_eq!(model.layout().groups, PageLayout::new(whole).groups);
    model.join(group.unwrap_or_else(device::collective::single));
    let least = [whole, decoder].map(|decoder| PageLayout::least_block_size(decoder, &kernels.format));
    let block_size = least.into_iter().max().unwrap().max(BLOCK_SIZE);
    let limits = models::StepLimits {
        max_rows: 64,
        max_seqs: 1,
        max_model_len: 256.max(block_size),
        block_size,
        num_blocks: NUM_BLOCKS,
    };
    model.reserve(&limits).unwrap();
    let mut caches = model.new_cache(NUM_BLOCKS, block_size).unwrap();
    let chunks = [prompt.len(), 7];
    let logits = chunks.map(|chunk| last_logits(&mut model, &mut caches, (block_size, NUM_BLOCKS), prompt, chunk));
    logits.concat().iter().map(|logit| logit.to_bits()).collect()
}

/// What each rank of a group of threads computes.
fn of_ranks(
    decoder: &Decoder,
    weights: &Weights,
    prompt: &[u32],
    (device, needs): (&(dyn Fn() -> Arc<dyn Device> + Sync), &Needs),
    ranks: usize,
) -> Vec<Vec<u32>> {
    std::thread::scope(|scope| {
        let start = |group| scope.spawn(move || bits(decoder, weights, prompt, device(), needs, Some(group)));
        let running: Vec<_> = threads(ranks).into_iter().map(start).collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn cpu() -> Arc<dyn Device> {
    device::open("cpu", Some(1)).unwrap()
}

#[test]
fn two_three_and_four_ranks_have_the_bits_of_one_in_every_architecture_and_form() {
    let mut refused = Vec::new();
    for name in CASES {
        let files = files(name);
        for form in [Form::Dense, Form::Quantized(Quantization::Q8), Form::Quantized(Quantization::Q4)] {
            let (decoder, weights, prompt) = declared(&files, name, form);
            let needs = needs(&*cpu(), &decoder);
            let one = bits(&decoder, &weights, &prompt, cpu(), &needs, None);
            // The parts are the same in every form.
            let counts = if form == Form::Dense { 2..=4 } else { 2..=3 };
            for ranks in counts {
                if let Err(error) = decoder.shard(0, ranks) {
                    refused.push((name, ranks, error.to_string()));
                    continue;
                }
                for (rank, of_rank) in of_ranks(&decoder, &weights, &prompt, (&cpu, &needs), ranks).iter().enumerate() {
                    assert!(*of_rank == one, "{name} {form}: rank {rank} of {ranks} has other logits");
                }
            }
        }
    }
    refused.dedup();
    println!("{refused:?}");
    // Two and three query heads.
    let heads = |ranks, most| format!("found {ranks}, expected at most {most}: each rank needs a query head");
    let expected = [("qwen2", 4, heads(4, 3)), ("qwen3", 3, heads(3, 2)), ("qwen3", 4, heads(4, 2))];
    for expected in expected {
        assert!(
            refused.iter().any(|(name, ranks, error)| (*name, *ranks, error) == (expected.0, expected.1, &expected.2))
        );
    }
}

#[test]
fn two_ranks_on_cuda_sim_have_the_bits_of_one() {
    let Some(kernels) = testkit::kernels::host::folder_for_tests() else { return };
    let open = || {
        let kernels = Some(kernels.clone());
        let options = Options { threads: Some(1), kernels, deterministic: true, ..Options::default() };
        device::open_with("cuda-sim", &options).unwrap()
    };
    // Dense, a mixture with shared experts and latent attention, sinks and biases of experts, recurrent layers.
    for name in ["llama", "deepseek-v2-lite", "gpt-oss", "qwen3-next"] {
        let files = files(name);
        let (decoder, weights, prompt) = declared(&files, name, Form::Dense);
        let dtype = if name == "llama" { Dtype::Bf16 } else { Dtype::F32 };
        let needs = Needs { dtype, row_invariant: true, ..needs(&*open(), &decoder) };
        let one = bits(&decoder, &weights, &prompt, open(), &needs, None);
        for of_rank in of_ranks(&decoder, &weights, &prompt, (&open, &needs), 2) {
            assert!(of_rank == one, "{name}: a rank of two has other logits");
        }
    }
}

#[test]
fn ranks_have_the_bits_of_one_in_every_stored_form() {
    let Some(folder) = testkit::reference::formats() else {
        testkit::not_run::report(
            testkit::capability::Capability::ReferenceFormats,
            "QUIRE_REFERENCE_FORMATS is not set",
        );
        return;
    };
    let mut cases = 0;
    for folder in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        let Ok(files) = ModelFiles::open(&folder) else { continue };
        let Ok(config) = ModelConfig::load(&files) else { continue };
        let weights = Weights::open(&files).unwrap();
        let decoder = models::in_stored_forms(config.decoder, &weights).unwrap();
        let (prompt, needs) = ((3..20).collect::<Vec<u32>>(), needs(&*cpu(), &decoder));
        let one = bits(&decoder, &weights, &prompt, cpu(), &needs, None);
        let possible = [2, 3].into_iter().filter(|ranks| decoder.shard(0, *ranks).is_ok());
        for of_rank in possible.flat_map(|n| of_ranks(&decoder, &weights, &prompt, (&cpu, &needs), n)) {
            assert!(of_rank == one, "{}: a rank has other logits", folder.display());
        }
        cases += 1;
    }
    assert!(cases >= 15, "{cases}");
}
