//! Latent caches, beside what the other tests compare: shapes of published models, refusals, and the selection.

use attention_kernels::{
    CacheFormat, Dtype, KernelChoice, KvCache, KvDtype, KvShape, Layout, Needs, Operation, PARTITION, Values, Variant,
    select,
};
use trial::{Look, Problem};

use super::attention::is_the_same_alone;
use super::devices::{self, variants_on};
use super::failures::{Looks, of_look};

/// Whether a variant supports latents with so many elements of a key and of a value.
fn takes(variant: &Variant, key: usize, value: usize) -> bool {
    variant.capabilities.latent.misfit(key, Some(value)).is_none()
}

#[test]
fn a_step_of_a_model_with_latent_attention_equals_float64_and_its_rows_alone() {
    let mut failures = Looks::default();
    for device in devices::all() {
        for variant in variants_on(&*device, &[Operation::Decode, Operation::Prefill]) {
            if !takes(variant, 576, 512) {
                continue;
            }
            for &dtype in variant.capabilities.dtypes {
                let lens = match variant.operation {
                    Operation::Decode => vec![(1, 530), (1, 0), (1, 33)],
                    _ => vec![(3, 530), (2, 0), (20, 20)],
                };
                // 16 heads over one vector per token, as in DeepSeek-V2-Lite.
                let format = CacheFormat { dtype, ..CacheFormat::default() };
                let look = Look { heads: (16, 1), dim: 576, latent: Some(512), ..Look::plain(format, lens) };
                failures.look(&*device, variant, &of_look(11, &look), || {
                    let problem = Problem::new(11, &look);
                    let on_device = problem.on(&device)?;
                    let got = on_device.run(variant, 0..3, true)?;
                    got.check(variant, &problem, &problem.truth())?;
                    is_the_same_alone(variant, &problem, &on_device, 2..3, &got, true)
                });
            }
        }
    }
}

/// Without space a block computes all partitions, in smaller tiles.
#[test]
fn space_for_partial_results_changes_no_bit_of_latents() {
    for device in devices::gpus(2) {
        for (name, kv_dtype) in [
            ("cuda.latent_64", KvDtype::Same),
            ("cuda.latent_64", KvDtype::Int8PerToken),
            ("cuda.latent_64", KvDtype::Fp8E4m3),
            ("cuda.latent_16", KvDtype::Same),
        ] {
            let variant = variants_on(&*device, &[Operation::Decode]).into_iter().find(|it| it.name == name);
            let Some(variant) = variant else { continue };
            let format = CacheFormat { dtype: Dtype::F16, kv_dtype, ..CacheFormat::default() };
            // 5 rows of 13 heads are two tiles of 64, or three of 32, or five of 16.
            let long = [(1, PARTITION + 40), (5, PARTITION + 9), (1, 0)];
            // More units than the simulator runs at once: blocks go on to units of the other tiles.
            let lens: Vec<_> = long.into_iter().chain([(1, 30); 7]).collect();
            let (seqs, sinks) = (0..lens.len(), true);
            let look = Look { heads: (13, 1), dim: 576, latent: Some(512), sinks, ..Look::plain(format, lens) };
            let problem = Problem::new(9, &look);
            let [none, all] = [0, usize::MAX]
                .map(|space| problem.with_partials(&device, space).unwrap().run(variant, seqs.clone(), true).unwrap());
            none.check(variant, &problem, &problem.truth()).unwrap();
            assert!(none == all, "{name}, {kv_dtype}");
            // In partitions of 64 tokens.
            let further = problem.on(&device).unwrap().split_for(40).unwrap();
            further.run(variant, seqs.clone(), true).unwrap().check(variant, &problem, &problem.truth()).unwrap();
        }
    }
}

#[test]
fn the_values_of_a_latent_cache_are_what_separate_values_with_the_same_numbers_are() {
    for device in devices::all() {
        for variant in variants_on(&*device, &[Operation::Decode, Operation::Prefill]) {
            if !takes(variant, 48, 48) {
                continue;
            }
            let format = CacheFormat { dtype: variant.capabilities.dtypes[0], ..CacheFormat::default() };
            let look = Look { dim: 48, latent: Some(48), ..Look::plain(format, vec![(1, 600), (1, 7)]) };
            let latent = Problem::new(2, &look);
            let separate = Problem { latent: None, ..latent.clone() };
            let [latent, separate] =
                [latent, separate].map(|problem| problem.on(&device).unwrap().run(variant, 0..2, true).unwrap());
            assert!(latent == separate, "{} {} on {}", variant.name, variant.operation, device.name());
        }
    }
}

#[test]
fn a_latent_cache_that_no_kernel_supports_is_refused() {
    let device = device::open("cpu", Some(1)).unwrap();
    let shape = KvShape { num_blocks: 2, num_kv_heads: 1, block_size: 16, head_dim: 96 };
    let said = |kv_dtype, dim| {
        let format = CacheFormat { kv_dtype, ..CacheFormat::default() };
        KvCache::latent(&*device, shape, format, dim).err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert_eq!(said(KvDtype::Same, 96), "");
    assert_eq!(said(KvDtype::Same, 97), "elements of a latent key: found 96, expected 97");
    assert_eq!(said(KvDtype::Same, 0), "elements of a latent value: found 0, expected 1");
    assert_eq!(said(KvDtype::Fp8E4m3, 64), "");

    for name in ["cpu", "cuda-sim"] {
        let needs = Needs { device: name.into(), head_dim: 576, latent: Some(512), ..Needs::default() };
        let set = select(&KernelChoice::default(), &needs).unwrap();
        assert!(set.all()[..4].iter().all(|variant| takes(variant, 576, 512)), "{name}");
    }
    let half = Needs { device: "cuda-sim".into(), dtype: Dtype::F16, latent: Some(48), ..Needs::default() };
    let tiles = KernelChoice { prefill: "cuda.paged_prefill".into(), ..KernelChoice::default() };
    let error = select(&tiles, &half).err().unwrap().to_string();
    assert!(error.contains("\"cuda.paged_prefill\" cannot serve: the model has a latent cache"), "{error}");
}

/// A plug-in or a kernel for separate values would read past the vectors.
#[test]
fn a_variant_that_does_not_support_latent_caches_is_not_called_with_one() {
    for device in devices::gpus(0) {
        let format = CacheFormat { dtype: Dtype::F16, kv_dtype: KvDtype::Same, layout: Layout::Hnd };
        let problem = Problem::new(1, &Look::plain(format, vec![(1, 20)]));
        let mut on_device = problem.on(&device).unwrap();
        on_device.cache.values = Values::InKeys { dim: 64 };
        for variant in variants_on(&*device, &[Operation::Decode, Operation::Prefill]) {
            let result = on_device.run(variant, 0..1, false);
            assert_eq!(result.is_ok(), takes(variant, 64, 64), "{}", variant.name);
            if let Err(error) = result {
                assert!(error.to_string().contains("was called with a latent cache"), "{error}");
            }
        }
    }
}
