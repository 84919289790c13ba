//! The first layer at which a model differs from the oracle: what `cargo xtask first-difference` runs, and a test that it names the
//! layer of a planted fault.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use attention_kernels::{KernelChoice, Needs, select};
use device::{Device, Dtype};
use models::decoder::{Attention, Mixer};
use models::{Model, ModelConfig, ModelFiles, PageLayout, StepLimits, Weights};
use serde::Deserialize;
use serde_json::Value;

use super::cases::all;
use super::last_logits;
use super::math::Rows;
use super::tensors::Tensors;
use super::tests::{make, write};
use crate::common;

/// The environment variable in which `cargo xtask first-difference` passes its [`Question`], as JSON.
const QUESTION: &str = "QUIRE_FIRST_DIFFERENCE";

#[derive(Deserialize)]
struct Question {
    model: PathBuf,
    ids: Vec<u32>,
    device: String,
    dtype: Dtype,
    kernels: KernelChoice,
    tolerance: f64,
}

/// The input rows of every linear layer of one request, with the names of the layer's tensors, and the last logits.
struct Pass {
    layers: Vec<(Vec<String>, Rows)>,
    logits: Vec<f64>,
}

impl Pass {
    fn of_oracle(config: &Value, tensors: &Tensors, ids: &[u32]) -> Pass {
        tensors.record();
        let logits = last_logits(config, tensors, ids, None);
        Pass { layers: tensors.recorded().into_iter().map(|(name, rows)| (vec![name], rows)).collect(), logits }
    }

    /// Computes a request with some kernels. `change` gets the number of each attention layer.
    fn of_model(
        device: Arc<dyn Device>,
        folder: &Path,
        ids: &[u32],
        dtype: Dtype,
        kernels: &KernelChoice,
        change: impl Fn(usize, &mut Attention),
    ) -> Result<Pass, String> {
        let text = |error: &dyn std::error::Error| error.to_string();
        let files = ModelFiles::open(folder).map_err(|e| text(&e))?;
        let config = ModelConfig::load(&files).map_err(|e| text(&e))?;
        let weights = Weights::open(&files).map_err(|e| text(&e))?;
        let mut decoder = config.decoder.clone().for_context(config.max_position_embeddings);
        let branches = decoder.layers.iter_mut().flat_map(|layer| &mut layer.branches);
        let attention = branches.filter_map(|branch| match &mut branch.mixer {
            Mixer::Attention(attention) => Some(attention),
            _ => None,
        });
        attention.enumerate().for_each(|(number, attention)| change(number, attention));
        let block_size = decoder.sparse_block().unwrap_or(16);
        let (cpu, common) = (device.features().packs_matrices, common::needs(&*device, &decoder));
        // Buffers of a CPU are float32, and bfloat16 is how its products round.
        let needs = match cpu {
            true => Needs { arithmetic: dtype, block_size, ..common },
            false => Needs { dtype, arithmetic: dtype, block_size, ..common },
        };
        let set = select(kernels, &needs).map_err(|e| text(&e))?;
        let (format, rows) = (set.format, ids.len());
        let mut model = Model::load(&decoder, &weights, device, set, rows, &|_, _| Ok(())).map_err(|e| text(&e))?;
        let block_size = PageLayout::least_block_size(&decoder, &format).max(block_size);
        let num_blocks = rows.div_ceil(block_size) * model.layout().groups.len();
        let limits = StepLimits { max_rows: rows, max_seqs: 1, max_model_len: rows, block_size, num_blocks };
        model.reserve(&limits).map_err(|e| text(&e))?;
        let mut caches = model.new_cache(num_blocks, block_size).map_err(|e| text(&e))?;
        let seen = Arc::new(Mutex::new(Vec::new()));
        let observed = Arc::clone(&seen);
        model.observe(Some(Box::new(move |layer, numbers| {
            let wide = |row: &[f32]| row.iter().map(|x| f64::from(*x)).collect();
            let rows: Rows = numbers.chunks_exact(numbers.len() / rows).map(wide).collect();
            observed.lock().unwrap().push((layer, rows));
        })));
        let logits = common::last_logits(&mut model, &mut caches, (block_size, num_blocks), ids, rows);
        model.observe(None);
        let linears: Vec<_> = decoder.linears().collect();
        let names = |layer: usize| linears[layer].parts.iter().map(|part| part.name.clone()).collect();
        let layers = seen.lock().unwrap().drain(..).map(|(layer, rows)| (names(layer), rows)).collect();
        Ok(Pass { layers, logits: logits.into_iter().map(f64::from).collect() })
    }

    /// The input rows of the layer that has one of these tensors.
    fn inputs(&self, names: &[String]) -> Option<&Rows> {
        let is_it = |layer: &&(Vec<String>, Rows)| layer.0.iter().any(|name| names.contains(name));
        self.layers.iter().find(is_it).map(|(_, rows)| rows)
    }
}

/// The greatest difference between rows, as a share of the root mean square of the row that is right.
struct Difference {
    share: f64,
    row: usize,
    element: usize,
    found: f64,
    right: f64,
}

fn difference(found: &Rows, right: &Rows) -> Difference {
    assert_eq!((found.len(), found[0].len()), (right.len(), right[0].len()));
    let mut greatest = Difference { share: -1.0, row: 0, element: 0, found: 0.0, right: 0.0 };
    for (row, (found, right)) in found.iter().zip(right).enumerate() {
        let size = (right.iter().map(|x| x * x).sum::<f64>() / right.len() as f64).sqrt().max(f64::MIN_POSITIVE);
        for (element, (&found, &right)) in found.iter().zip(right).enumerate() {
            let share = if found == right { 0.0 } else { (found - right).abs() / size };
            // NaN is the greatest difference.
            if share.total_cmp(&greatest.share).is_gt() && !greatest.share.is_nan() {
                greatest = Difference { share, row, element, found, right };
            }
        }
    }
    greatest
}

/// A pass whose numbers are right, and passes to compare with it, each with its name.
struct Comparison<'a> {
    right: (&'static str, &'a Pass),
    others: Vec<(String, &'a Pass)>,
    ids: &'a [u32],
}

impl Comparison<'_> {
    /// Prints a line for each layer that all passes have. Returns for each pass the first layer whose inputs differ by more than
    /// `tolerance`, in words.
    fn print(&self, tolerance: f64) -> Vec<Option<String>> {
        let (name, right) = self.right;
        let columns: String = self.others.iter().map(|(name, _)| format!(" {name:>16}")).collect();
        println!("{:<60}{columns}", format!("greatest difference from {name} in the inputs of"));
        let mut first = vec![None; self.others.len()];
        let mut before = "the embedding".to_string();
        let all = right.layers.iter().map(|(names, rows)| (names.clone(), rows.clone()));
        let logits = (vec!["logits".to_string()], vec![right.logits.clone()]);
        for (names, rows) in all.chain([logits]) {
            let of = |pass: &Pass| match &names[0][..] {
                "logits" => Some(vec![pass.logits.clone()]),
                _ => pass.inputs(&names).cloned(),
            };
            let Some(found) = self.others.iter().map(|(_, pass)| of(pass)).collect::<Option<Vec<_>>>() else {
                continue;
            };
            let differences: Vec<_> = found.iter().map(|found| difference(found, &rows)).collect();
            let columns: String = differences.iter().map(|it| format!(" {:>16.1e}", it.share)).collect();
            println!("{:<60}{columns}", names[0]);
            for ((first, it), (pass, _)) in first.iter_mut().zip(&differences).zip(&self.others) {
                if first.is_none() && (it.share.is_nan() || it.share > tolerance) {
                    let Difference { row, element, found, right, .. } = it;
                    let position = if names[0] == "logits" { self.ids.len() - 1 } else { *row };
                    *first = Some(format!(
                        "{pass} first differs in the inputs of {}, position {position} (token {}), element {element}: \
                         {found:e}, {name} has {right:e}; the last inputs that agree are those of {before}",
                        names[0], self.ids[position]
                    ));
                }
            }
            before.clone_from(&names[0]);
        }
        first
    }
}

/// What `cargo xtask first-difference` runs; it checks nothing of the tree.
#[test]
#[ignore = "only for cargo xtask first-difference"]
fn the_first_difference_of_a_request_is_printed() {
    let question = std::env::var(QUESTION).expect("cargo xtask first-difference sets the variable");
    let Question { model, ids, device, dtype, kernels, tolerance } = serde_json::from_str(&question).unwrap();
    let reference = KernelChoice {
        decode: "cpu.reference".into(),
        prefill: "cpu.reference".into(),
        linear: "cpu.reference".into(),
        ..KernelChoice::default()
    };
    let cpu = device::open("cpu", None).unwrap();
    let pass = |device, dtype, kernels| Pass::of_model(device, &model, &ids, dtype, kernels, |_, _| {}).unwrap();
    let by_reference = pass(cpu, Dtype::F32, &reference);
    let chosen = pass(device::open(&device, None).unwrap(), dtype, &kernels);
    let oracle = std::panic::catch_unwind(|| {
        let files = ModelFiles::open(&model).unwrap();
        let config: Value = files.read_json("config.json").unwrap();
        Pass::of_oracle(&config, &Tensors::stored(Weights::open(&files).unwrap()), &ids)
    });
    let others = vec![("cpu.reference".to_string(), &by_reference), (format!("{device}, {dtype}"), &chosen)];
    let (right, others) = match &oracle {
        Ok(oracle) => (("the oracle", oracle), others),
        Err(_) => {
            println!(
                "the oracle does not compute this checkpoint, for the reason above; cpu.reference takes its place"
            );
            (("cpu.reference", &by_reference), others[1..].to_vec())
        }
    };
    let is_compared = others.len() == 2;
    let first = Comparison { right, others, ids: &ids }.print(tolerance);
    println!();
    first.iter().flatten().for_each(|line| println!("{line}"));
    let verdict = match (&first[..], is_compared) {
        ([Some(_), _], true) => {
            "cpu.reference differs: look at the family's declaration (models/src/families/), then at the reading of its tensors"
        }
        ([None, Some(_)], true) | ([Some(_)], false) => "cpu.reference agrees: look at the kernels of the chosen set",
        _ => {
            "no difference is above the tolerance: look at the step (blocks, positions, sampling), and replay a recording"
        }
    };
    println!("{verdict}");
}

#[test]
fn the_first_layer_that_differs_from_the_oracle_is_named() {
    let ids: Vec<u32> = (0..20).map(|i| (i * i * 7 + 3 * i + 5) % 80).collect();
    for (name, layer) in [("qwen3", "model.layers.1.self_attn.o_proj"), ("gpt2", "transformer.h.1.attn.c_proj")] {
        let case = all().into_iter().find(|case| case.name.starts_with(name)).unwrap();
        let (tensors, _) = make(&case.config, 3, ids.len());
        let folder = write(&case.config, tensors.to_bytes(|name, _| Some(name.to_string())));
        let oracle = Pass::of_oracle(&case.config, &tensors, &ids);
        let compute = |fault: bool| {
            let change = |number: usize, attention: &mut Attention| {
                if fault && number == 1 {
                    attention.scale *= 1.01;
                }
            };
            let cpu = device::open("cpu", Some(1)).unwrap();
            Pass::of_model(cpu, folder.path(), &ids, Dtype::F32, &KernelChoice::default(), change).unwrap()
        };
        let (sound, faulty) = (compute(false), compute(true));
        let others = vec![("sound".to_string(), &sound), ("faulty".to_string(), &faulty)];
        let first = Comparison { right: ("the oracle", &oracle), others, ids: &ids }.print(1e-3);
        assert_eq!(first[0], None, "{name}");
        assert!(first[1].as_ref().is_some_and(|line| line.contains(&format!("inputs of {layer},"))), "{:?}", first[1]);
    }
}
