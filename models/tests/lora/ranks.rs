//! Adapters in a tensor-parallel group: each rank reads the rows of B that belong to its outputs, or the columns of A that belong to its
//! inputs.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use attention_kernels::Dtype;
use collective::{Collective, single, threads};
use models::decoder::{Form, Reduce};
use models::{ModelConfig, ModelFiles};
use testkit::adapters::simple;

use super::mixes::FORMS;
use super::{Seq, load, load_on, modules};
use crate::common::folder;
use crate::ranks::sums::{ROUNDING, difference};

/// What each rank of a group computes.
fn on_ranks<T: Send>(ranks: usize, work: impl Fn(Arc<dyn Collective>) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let running: Vec<_> = threads(ranks).into_iter().map(|group| scope.spawn(move || work(group))).collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Two adapters for a model: one of all modules, one of some with a greater rank.
fn adapters(case: &Path) -> (tempfile::TempDir, [PathBuf; 2]) {
    let modules = modules(&ModelConfig::load(&ModelFiles::open(case).unwrap()).unwrap().decoder);
    let temporary = tempfile::TempDir::new().unwrap();
    let folders = ["a", "b"].map(|name| temporary.path().join(name));
    simple(&folders[0], &modules, 3, 1);
    simple(&folders[1], &modules[1..4], 20, 2);
    (temporary, folders)
}

#[test]
fn sums_of_rows_with_adapters_are_those_of_one_rank_but_for_rounding() {
    let case = folder("llama");
    let (_temporary, folders) = adapters(&case);
    let tokens: Vec<u32> = (5..30).collect();
    let seqs = [None, Some(0), Some(1)].map(|slot| Seq::new(slot, &tokens));
    let one = load(&case, Form::Dense, 1, Some(&folders)).logits(seqs.to_vec(), &[9, 40, 11]);
    assert!(difference(&one[1..2], &one[..1]) > 0.01, "the adapter has no effect");
    for ranks in [2, 3, 4] {
        let of_ranks = on_ranks(ranks, |group| {
            let mut loaded = load_on(&case, (Form::Dense, Dtype::F32), 1, Some(&folders), (group, Reduce::Sum));
            let together = loaded.logits(seqs.to_vec(), &[9, 40, 11]);
            let alone: Vec<_> = seqs.iter().flat_map(|seq| loaded.logits(vec![seq.clone()], &[64])).collect();
            assert!(together == alone, "a sequence has other logits alone");
            together
        });
        assert!(of_ranks.iter().all(|logits| *logits == of_ranks[0]), "{ranks} ranks differ");
        let difference = difference(&of_ranks[0], &one);
        assert!(difference <= ROUNDING, "{ranks} ranks: {difference:e}");
    }
}

#[test]
fn rows_with_adapters_have_the_same_bits_on_two_three_and_four_ranks() {
    // Separate projections and four heads; packed ones and three.
    for (name, all_ranks) in [("llama", &[2, 3, 4][..]), ("qwen2", &[2, 3])] {
        let case = folder(name);
        let (_temporary, folders) = adapters(&case);
        let tokens: Vec<u32> = (5..30).collect();
        let seqs = || [None, Some(0), Some(1)].map(|slot| Seq::new(slot, &tokens)).to_vec();
        for form in FORMS {
            let on =
                |group| load_on(&case, form, 1, Some(&folders), (group, Reduce::Gather)).logits(seqs(), &[9, 40, 11]);
            let one = on(single());
            for ranks in all_ranks {
                let of_ranks = on_ranks(*ranks, on);
                assert!(of_ranks.iter().all(|logits| *logits == one), "{name} {form:?} on {ranks} ranks");
            }
        }
    }
}
