//! Prefill and decode of a batch, without a server.

use std::path::Path;
use std::process::Command;

use super::resident::Resident;
use super::{DTYPES, Form, Options, Pythons, Series, Subject, VLLM_SETTINGS, add, measure, median, shown, times};

/// Sequences at once, tokens of each prompt and tokens to generate.
const SETTINGS: [(usize, usize, usize); 5] = [(1, 512, 129), (8, 256, 33), (16, 256, 33), (32, 256, 33), (1, 8064, 65)];

/// Tokens per block of Quire's cache.
const BLOCK_SIZE: usize = 16;

/// Fields of the output of `quire bench latency`, in the order of [`Series`].
const FIELDS: [&str; 4] =
    ["prefill_tokens_per_second", "decode_tokens_per_second", "prefill_share_of_roofline", "decode_share_of_roofline"];

pub(super) fn run(
    quire: &Path,
    options: &Options,
    subjects: &[Subject],
    forms: &[&Form],
    pythons: &Pythons,
) -> Result<(), String> {
    let threads = options.threads.to_string();
    println!("| model | form | sequences, context | | prefill | of the limit | decode | of the limit |");
    println!("|---|---|---|---|---|---|---|---|");
    for subject in subjects {
        for form in subject.forms(forms) {
            let mut peers = Vec::new();
            if let Some(python) = &pythons.llama {
                let file = subject.gguf(form).display().to_string();
                let script = (include_str!("llama.py"), &[file.as_str(), &threads][..]);
                peers.push(Resident::start("llama.cpp", python, script, &[])?);
            }
            if let (Some(python), Some(dtype)) = (&pythons.vllm, form.vllm) {
                let folder = subject.model.display().to_string();
                let script = (include_str!("vllm.py"), &[folder.as_str(), dtype][..]);
                // No second process, which would be busy while others are measured.
                let alone = [("OMP_NUM_THREADS", threads.as_str()), ("VLLM_ENABLE_V1_MULTIPROCESSING", "0")];
                let environment = [&VLLM_SETTINGS[..], &alone].concat();
                peers.push(Resident::start("vLLM", python, script, &environment)?);
            }
            for setting @ (batch, input, _) in SETTINGS {
                let mut theirs: Vec<Series> = peers.iter().map(|_| Series::default()).collect();
                let mut ours = DTYPES.map(|_| Series::default());
                for _ in 0..options.rounds {
                    for (dtype, ours) in DTYPES.into_iter().zip(&mut ours) {
                        let mut command = latency(quire, options, subject, form, dtype, setting);
                        measure(&mut command, &FIELDS, ours)?;
                    }
                    for (peer, theirs) in peers.iter_mut().zip(&mut theirs) {
                        add(peer.name, &peer.measure(setting)?, &["prefill", "decode"], theirs)?;
                    }
                }
                let row = format!("| {} | {} | {batch}, {input}", subject.name, form.name);
                for (peer, [prefill, decode, ..]) in peers.iter().zip(&theirs) {
                    println!("{row} | {} | {} | | {} | |", peer.name, shown(prefill), shown(decode));
                }
                let of = |which: usize| -> Vec<(&str, &[f64])> {
                    peers.iter().zip(&theirs).map(|(peer, series)| (peer.name, &series[which][..])).collect()
                };
                for ((dtype, _), [prefill, decode, prefill_share, decode_share]) in DTYPES.iter().zip(&ours) {
                    println!(
                        "{row} | Quire, {dtype} | {}{} | {:.0} % | {}{} | {:.0} % |",
                        shown(prefill),
                        times(prefill, &of(0)),
                        100.0 * median(prefill_share),
                        shown(decode),
                        times(decode, &of(1)),
                        100.0 * median(decode_share)
                    );
                }
            }
        }
    }
    Ok(())
}

fn latency(
    quire: &Path,
    options: &Options,
    Subject { shape, model, .. }: &Subject,
    form: &Form,
    (dtype, number_bytes): (&str, usize),
    (batch, input, output): (usize, usize, usize),
) -> Command {
    // As large as the sequences need, like that of llama.cpp, so that no run touches new pages.
    let tokens = batch * (input + output).next_multiple_of(BLOCK_SIZE);
    let bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim() * number_bytes * tokens;
    let mut command = Command::new(quire);
    command.args(["bench", "latency"]).arg(model).args([
        &format!("--dtype={dtype}"),
        &format!("--kv-cache-memory-bytes={bytes}"),
        &format!("--block-size={BLOCK_SIZE}"),
        &format!("--threads={}", options.threads),
        &format!("--batch-size={batch}"),
        &format!("--input-len={input}"),
        &format!("--output-len={output}"),
        "--num-iters=1",
        "--num-iters-warmup=1",
        "--output-json=-",
    ]);
    form.add_to(&mut command);
    command
}
