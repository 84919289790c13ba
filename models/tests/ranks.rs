//! Tensor-parallel groups: any number of ranks gives the bits of one.

pub mod sums;

use std::sync::Arc;

use attention_kernels::{Dtype, KernelChoice, KvCache, Needs, select};
use collective::{Collective, single, threads};
use device::{Device, Options};
use linear::Quantization;
use models::decoder::{Form, Reduce};
use models::{Decoder, Model, ModelConfig, ModelFiles, PageLayout, Weights, partition};
use testkit::reference::context;

use crate::common::{CASES, expected, files, forward, ids, list, needs};
use crate::naive::{kimi, states, tests};
use crate::support::opened;

const BLOCK_SIZE: usize = 8;
const NUM_BLOCKS: usize = 64;
const MAX_ROWS: usize = 192;

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

/// Number of ranks that matrices are cut over, and number of stages that layers are cut into.
type Grid = (usize, usize);

/// What one rank of a group has loaded.
struct Rank {
    model: Model,
    caches: Vec<KvCache>,
    block_size: usize,
}

/// Loads the part of one rank. `tensor` wraps the group that matrices are cut over.
fn load(
    (whole, weights): (&Decoder, &Weights),
    (device, needs): (Arc<dyn Device>, &Needs),
    (world, (tensor, stages), reduce): (Arc<dyn Collective>, Grid, Reduce),
    wrap: &dyn Fn(Arc<dyn Collective>) -> Arc<dyn Collective>,
) -> Rank {
    let (place, stage) = (world.rank() % tensor, world.rank() / tensor);
    let shard = whole.shard(place, tensor, reduce).unwrap();
    let partition = partition(whole, stages).unwrap();
    let first = partition[..stage].iter().sum();
    let decoder = shard.stage(first..first + partition[stage]).unwrap();
    let kernels = select(&KernelChoice::default(), needs).unwrap();
    let mut model = Model::load(&decoder, weights, device, kernels, MAX_ROWS, &|_, _| Ok(())).unwrap();
    assert_eq!(model.layout().groups.len(), PageLayout::new(whole).groups.len());
    model.join(wrap(world.split(stage).unwrap()));
    model.connect(world.split(place).unwrap());
    let least = [whole, &decoder].map(|decoder| PageLayout::least_block_size(decoder, &kernels.format));
    let block_size = world.values(least[1] as u64).unwrap().into_iter().max().unwrap() as usize;
    let block_size = block_size.max(least[0]).max(BLOCK_SIZE);
    let limits = models::StepLimits {
        max_rows: MAX_ROWS,
        max_seqs: 1,
        max_model_len: 256.max(block_size),
        block_size,
        num_blocks: NUM_BLOCKS,
    };
    model.reserve(&limits).unwrap();
    let caches = model.new_cache(NUM_BLOCKS, block_size).unwrap();
    Rank { model, caches, block_size }
}

/// The bits of the logits behind a prompt, whole and in chunks, as one rank of a group computes them; none from ranks that have no head.
fn bits(
    whole: &Decoder,
    weights: &Weights,
    prompt: &[u32],
    on: (Arc<dyn Device>, &Needs),
    (world, grid): (Arc<dyn Collective>, Grid),
) -> Option<Vec<u32>> {
    let loaded = load((whole, weights), on, (world, grid, Reduce::Gather), &|group| group);
    let Rank { mut model, mut caches, block_size } = loaded;
    let (mut bits, sends) = (Vec::new(), model.decoder().sends());
    for chunk in [prompt.len(), 7] {
        let last = forward(&mut model, &mut caches, (block_size, NUM_BLOCKS), prompt, chunk);
        if !sends {
            bits.extend(model.logits(&[last]).unwrap().iter().map(|logit| logit.to_bits()));
        }
    }
    (!sends).then_some(bits)
}

/// What each rank of a group of threads computes.
fn of_ranks(
    decoder: &Decoder,
    weights: &Weights,
    prompt: &[u32],
    (device, needs): (&(dyn Fn() -> Arc<dyn Device> + Sync), &Needs),
    grid: Grid,
) -> Vec<Vec<u32>> {
    let found: Vec<Option<Vec<u32>>> = std::thread::scope(|scope| {
        let start = |world| scope.spawn(move || bits(decoder, weights, prompt, (device(), needs), (world, grid)));
        let running: Vec<_> = threads(grid.0 * grid.1).into_iter().map(start).collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let found: Vec<Vec<u32>> = found.into_iter().flatten().collect();
    assert_eq!(found.len(), grid.0);
    found
}

/// What one rank computes.
fn of_one(decoder: &Decoder, weights: &Weights, prompt: &[u32], on: (Arc<dyn Device>, &Needs)) -> Vec<u32> {
    bits(decoder, weights, prompt, on, (single(), (1, 1))).unwrap()
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
            let one = of_one(&decoder, &weights, &prompt, (cpu(), &needs));
            // The parts are the same in every form.
            let counts = if form == Form::Dense { 2..=4 } else { 2..=3 };
            for ranks in counts {
                if let Err(error) = decoder.shard(0, ranks, Reduce::Gather) {
                    refused.push((name, ranks, error.to_string()));
                    continue;
                }
                for (rank, of_rank) in
                    of_ranks(&decoder, &weights, &prompt, (&cpu, &needs), (ranks, 1)).iter().enumerate()
                {
                    assert!(*of_rank == one, "{name} {form}: rank {rank} of {ranks} has other logits");
                }
            }
        }
    }
    refused.dedup();
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
    if opened::kernels().is_none() {
        return;
    }
    let open = || opened::open(Options { deterministic: true, ..Options::default() }).unwrap();
    // Dense, a mixture with shared experts and latent attention, sinks and biases of experts, recurrent layers of each kind.
    for name in ["llama", "deepseek-v2-lite", "gpt-oss", "qwen3-next", "lfm2-moe", "granite4-hybrid", "jamba"] {
        let files = files(name);
        let (decoder, weights, prompt) = declared(&files, name, Form::Dense);
        let dtype = if name == "llama" { Dtype::Bf16 } else { Dtype::F32 };
        let needs = Needs { dtype, row_invariant: true, ..needs(&*open(), &decoder) };
        let one = of_one(&decoder, &weights, &prompt, (open(), &needs));
        for of_rank in
            [(2, 1), (1, 2)].into_iter().flat_map(|grid| of_ranks(&decoder, &weights, &prompt, (&open, &needs), grid))
        {
            assert!(of_rank == one, "{name}: a rank of two has other logits");
        }
    }
}

/// No reference case has these layers.
#[test]
fn ranks_have_the_bits_of_one_with_decays_of_channels_and_narrow_experts() {
    let sim = || opened::open(Options { deterministic: true, ..Options::default() }).unwrap();
    let narrow: Vec<_> = states::cases().into_iter().filter(|case| case.name.contains("narrow experts")).collect();
    assert_eq!(narrow.len(), 2);
    for (seed, case) in kimi::cases().into_iter().chain(narrow).enumerate() {
        let (prompt, tensors, _) = tests::make_of(&case.config, seed as u64, 20);
        let folder = tests::write(&case.config, tensors.to_bytes(|name, _| Some(name.to_string())));
        let files = ModelFiles::open(folder.path()).unwrap();
        let (decoder, weights) = (ModelConfig::load(&files).unwrap().decoder, Weights::open(&files).unwrap());
        let check = |open: &(dyn Fn() -> Arc<dyn Device> + Sync), grids: &[Grid]| {
            let needs = Needs { row_invariant: true, ..needs(&*open(), &decoder) };
            let one = of_one(&decoder, &weights, &prompt, (open(), &needs));
            for of_rank in grids.iter().flat_map(|grid| of_ranks(&decoder, &weights, &prompt, (open, &needs), *grid)) {
                assert!(of_rank == one, "{}: a rank has other logits", case.name);
            }
        };
        check(&cpu, &[(2, 1), (1, 2)]);
        if opened::kernels().is_some() && [0, 4].contains(&seed) {
            check(&sim, &[(2, 1)]);
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
        let one = of_one(&decoder, &weights, &prompt, (cpu(), &needs));
        let possible = [2, 3].into_iter().filter(|ranks| decoder.shard(0, *ranks, Reduce::Gather).is_ok());
        for of_rank in possible.flat_map(|n| of_ranks(&decoder, &weights, &prompt, (&cpu, &needs), (n, 1))) {
            assert!(of_rank == one, "{}: a rank has other logits", folder.display());
        }
        cases += 1;
    }
    assert!(cases >= 15, "{cases}");
}

#[test]
fn stages_have_the_bits_of_one_rank_in_every_architecture() {
    let mut refused = Vec::new();
    for name in CASES {
        let files = files(name);
        let (decoder, weights, prompt) = declared(&files, name, Form::Dense);
        let needs = needs(&*cpu(), &decoder);
        let one = of_one(&decoder, &weights, &prompt, (cpu(), &needs));
        for grid in [(1, 2), (1, 3), (2, 2)] {
            let first = partition(&decoder, grid.1).and_then(|layers| decoder.stage(0..layers[0]));
            if let Err(error) = first {
                refused.push((name, grid, error.to_string()));
                continue;
            }
            for of_rank in of_ranks(&decoder, &weights, &prompt, (&cpu, &needs), grid) {
                assert!(of_rank == one, "{name}: {grid:?} ranks and stages have other logits");
            }
        }
    }
    let is_expected = |(name, grid, error): &(&str, (usize, usize), String)| match *name {
        "gemma3n" => error.contains("the layers of this model read more than the stream"),
        _ => grid.1 == 3 && error == "found 3, expected 1 to 2, the number of layers",
    };
    assert!(refused.iter().all(is_expected), "{refused:?}");
    assert!(refused.len() < CASES.len() / 2);
}

#[test]
fn stages_have_about_equal_costs_and_the_last_one_the_head() {
    let (mut decoder, ..) = declared(&files("llama"), "llama", Form::Dense);
    let layer = decoder.layers[0].clone();
    decoder.layers = vec![layer; 12];
    // The head costs about as much as a layer and a half.
    let weights = |linear: &models::decoder::Linear| linear.rows() * linear.inputs;
    let of_layer: usize = decoder.layers[0].branches.iter().flat_map(|it| it.mixer.linears()).map(weights).sum();
    let head = weights(decoder.head.linear.as_ref().unwrap());
    for stages in 1..=12 {
        let found = partition(&decoder, stages).unwrap();
        assert_eq!((found.len(), found.iter().sum::<usize>()), (stages, 12));
        assert!(found.iter().all(|layers| *layers > 0), "{found:?}");
        let cost = |found: &[usize]| {
            let all =
                found.iter().enumerate().map(|(at, layers)| layers * of_layer + usize::from(at + 1 == stages) * head);
            all.max().unwrap()
        };
        // No other cut between two neighbours is better.
        for at in 1..stages {
            for (from, to) in [(at, at - 1), (at - 1, at)] {
                let mut other = found.clone();
                other[from] -= 1;
                other[to] += 1;
                assert!(other[from] == 0 || cost(&other) >= cost(&found), "{found:?}, {other:?}");
            }
        }
    }
    assert!(partition(&decoder, 13).is_err() && partition(&decoder, 0).is_err());
}
