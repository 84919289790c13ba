//! The reference's adapters on its base model. They are not in the tree; `QUIRE_REFERENCE_FORMATS` names their folder.

use std::path::PathBuf;

use models::decoder::Form;
use safetensors::SafeTensors;
use serde_json::Value;
use testkit::capability::Capability;

use super::{Seq, greatest, load};
use crate::common::{ids, list, text};

/// Greatest absolute difference of a float32 logit (the reference's README).
const TOLERANCE: f32 = 2e-3;

const ADAPTERS: [&str; 3] = ["r4-qv", "r8-all", "r16-rslora"];

#[test]
fn adapters_and_none_in_one_batch_have_the_logits_and_tokens_of_the_merged_models() {
    let Some(folder) = testkit::reference::formats() else {
        testkit::not_run::report(Capability::ReferenceFormats, "QUIRE_REFERENCE_FORMATS is not set");
        return;
    };
    let folder = folder.join("lora-llama");
    let adapters = ADAPTERS.map(|name| folder.join("adapters").join(name));
    let mut loaded = load(&folder, Form::Dense, 2, Some(&adapters));
    let models: Vec<(Option<u32>, PathBuf)> = (0..).map(Some).zip(adapters).chain([(None, folder)]).collect();
    let (mut seqs, mut want, mut logits) = (Vec::new(), Vec::new(), Vec::new());
    for (slot, folder) in &models {
        let expected: Value = serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap();
        let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        for prompt in list(&expected["prompts"]) {
            seqs.push(Seq::new(*slot, &ids(&prompt["ids"])));
            want.push(ids(&prompt["greedy"]["ids"]));
            let tensor = tensors.tensor(text(&prompt["logits"])).unwrap();
            let all: Vec<f32> = tensor.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            logits.push(all[all.len() - tensor.shape()[tensor.shape().len() - 1]..].to_vec());
        }
    }
    assert_eq!(seqs.len(), 16);
    let chunks = vec![32; seqs.len()];
    let mut found = vec![Vec::new(); seqs.len()];
    let steps = want[0].len();
    while found.iter().any(|tokens| tokens.len() < steps) {
        for (i, new) in loaded.step(&mut seqs, &chunks).into_iter().enumerate() {
            let Some(new) = new else { continue };
            if found[i].is_empty() {
                let error = new.iter().zip(&logits[i]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                println!("{i}: error {error}");
                assert!(error < TOLERANCE, "sequence {i}: error {error}");
            }
            if found[i].len() < steps {
                found[i].push(greatest(&new));
                seqs[i].tokens.push(greatest(&new));
            }
        }
    }
    assert_eq!(found, want);
}
