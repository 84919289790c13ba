//! What a sink does to a row, beside the comparisons with float64.

use std::sync::Arc;

use attention_kernels::{Dtype, KvDtype, Operation, PARTITION, Variant};
use device::Device;
use trial::numbers::from_bytes;
use trial::{Look, Problem, Results};

use super::attention::at_the_borders;
use super::devices::{self, variants_on};
use super::looks;

const ATTENTION: [Operation; 2] = [Operation::Decode, Operation::Prefill];

/// Calls `each` for every variant with sinks on every device.
fn each_variant(each: impl Fn(&Arc<dyn Device>, &Variant)) {
    for device in devices::all() {
        let with_sinks = variants_on(&*device, &ATTENTION).into_iter().filter(|variant| variant.capabilities.sinks);
        with_sinks.for_each(|variant| each(&device, variant));
    }
}

fn run(device: &Arc<dyn Device>, variant: &Variant, problem: &Problem) -> Results {
    problem.on(device).unwrap().run(variant, 0..problem.batch.num_seqs(), true).unwrap()
}

#[test]
fn a_sink_of_minus_infinity_changes_no_bit() {
    each_variant(|device, variant| {
        let look = at_the_borders(variant.capabilities.dtypes[0], KvDtype::Same, None, 1);
        let look = looks::fitting(&variant.capabilities, look);
        let lens = vec![(1, 2 * PARTITION + 1), (1, 0), (1, 40)];
        let without = Problem::new(8, &Look { lens, ..look });
        let with = Problem { sinks: Some(vec![f32::NEG_INFINITY; without.num_heads]), ..without.clone() };
        let [without, with] = [&without, &with].map(|problem| run(device, variant, problem));
        assert_eq!(with, without, "{} {} on {}", variant.name, variant.operation, device.name());
    });
}

/// The lse includes the sink, so the weights of merged parts are right if one part alone has the sink.
#[test]
fn parts_of_a_context_of_which_one_has_the_sinks_merge_into_the_whole() {
    each_variant(|device, variant| {
        let dtype = variant.capabilities.dtypes[0];
        let look = looks::fitting(&variant.capabilities, at_the_borders(dtype, KvDtype::Same, None, 1));
        let whole = Problem::new(5, &Look { lens: vec![(1, PARTITION + 64)], sinks: true, ..look });
        let part = |tokens: std::ops::Range<usize>, sinks: &Option<Vec<f32>>| {
            let mut part = Problem { sinks: sinks.clone(), ..whole.clone() };
            let blocks = tokens.start / 16..tokens.end / 16;
            part.batch.context_lens = vec![tokens.len() as u32];
            part.batch.block_tables = [&whole.batch.table(0)[blocks]].into_iter().collect();
            let results = run(device, variant, &part);
            (from_bytes(dtype, &results.output), from_bytes(Dtype::F32, &results.lse.unwrap()))
        };
        let parts = [part(0..512 + 16, &whole.sinks), part(512 + 16..512 + 64, &None)];
        let (truth, dim) = (whole.truth(), whole.value_dim());
        for (head, want) in truth.output.chunks(dim).enumerate() {
            let lse = parts.iter().map(|part| f64::from(part.1[head]).exp()).sum::<f64>().ln();
            for (d, want) in want.iter().enumerate() {
                let weighted = |part: &(Vec<f32>, Vec<f32>)| {
                    f64::from(part.0[head * dim + d]) * (f64::from(part.1[head]) - lse).exp()
                };
                let got: f64 = parts.iter().map(weighted).sum();
                let what = format!("{} {} on {}: head {head}", variant.name, variant.operation, device.name());
                assert!((got - want).abs() < 2e-3, "{what}: {got}, want {want}");
            }
        }
    });
}
