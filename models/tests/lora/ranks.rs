//! Adapters in a tensor-parallel group: each rank reads the rows of B that belong to its outputs.

use device::collective::threads;
use models::decoder::Reduce;
use models::{ModelConfig, ModelFiles};
use testkit::adapters::simple;

use super::mixes::FORMS;
use super::{Seq, load, load_on, modules};
use crate::common::folder;

#[test]
fn rows_with_adapters_have_the_same_bits_on_two_three_and_four_ranks() {
    // Separate projections and four heads; packed ones and three.
    for (name, all_ranks) in [("llama", &[2, 3, 4][..]), ("qwen2", &[2, 3])] {
        let case = folder(name);
        let modules = modules(&ModelConfig::load(&ModelFiles::open(&case).unwrap()).unwrap().decoder);
        let temporary = tempfile::TempDir::new().unwrap();
        let folders = ["a", "b"].map(|name| temporary.path().join(name));
        simple(&folders[0], &modules, 3, 1);
        simple(&folders[1], &modules[1..4], 20, 2);
        let tokens: Vec<u32> = (5..30).collect();
        let seqs = || [None, Some(0), Some(1)].map(|slot| Seq::new(slot, &tokens)).to_vec();
        for form in FORMS {
            let one = load(&case, form, 1, Some(&folders)).logits(seqs(), &[9, 40, 11]);
            for ranks in all_ranks {
                let of_ranks = std::thread::scope(|scope| {
                    let start = |group| {
                        let work = || load_on(&case, form, 1, Some(&folders), (group, Reduce::Gather)).logits(seqs(), &[9, 40, 11]);
                        scope.spawn(work)
                    };
                    let running: Vec<_> = threads(*ranks).into_iter().map(start).collect();
                    running.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
                });
                assert!(of_ranks.iter().all(|logits| *logits == one), "{name} {form} on {ranks} ranks");
            }
        }
    }
}
