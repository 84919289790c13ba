//! Merged operations against separate ones.

use attention_kernels::{Dtype, KernelChoice, Needs, select};
use device::Options;
use linear::Quantization;

use super::*;
use crate::decoder::Form;
use crate::forward::program::Program;
use crate::forward::step::{StepBuffers, StepSizes};
use crate::forward::{LOGIT_ROWS, StepLimits};
use crate::{ModelConfig, ModelFiles, Weights};

const LIMITS: StepLimits = StepLimits { max_rows: 32, max_seqs: 2, max_model_len: 64, block_size: 8, num_blocks: 8 };

/// Bits of the logits of a prompt's last token and of one decoded token.
fn logits(
    (case, kernels): (&str, &KernelChoice),
    device: &Arc<dyn Device>,
    dtype: Dtype,
    form: Form,
    merged: bool,
) -> Vec<u32> {
    let folder = format!("{}/tests/reference/{case}", env!("CARGO_MANIFEST_DIR"));
    let files = ModelFiles::open(folder.as_ref()).unwrap();
    let decoder = ModelConfig::load(&files).unwrap().decoder.in_form(form);
    let stored = if device.features().launches { dtype } else { Dtype::F32 };
    let needs = Needs { dtype: stored, arithmetic: dtype, window: true, ..Model::needs(&decoder, &**device) };
    let kernels = select(kernels, &needs).unwrap();
    let weights = Weights::open(&files).unwrap();
    let mut model = Model::load(&decoder, &weights, device.clone(), kernels, LIMITS.max_rows, &|_, _| Ok(())).unwrap();
    if !merged {
        model.program = Program::plain(&decoder);
        let sizes = StepSizes::new(&decoder, &model.program, stored, LIMITS.max_rows, LOGIT_ROWS);
        model.step = StepBuffers::new(&**device, sizes, LIMITS.max_rows).unwrap();
    }
    let has = |op: fn(&Op) -> bool| model.program.ops.iter().any(op);
    assert_eq!(has(|op| matches!(op, Op::AddNorm { .. })), merged);
    assert_eq!(has(|op| matches!(op, Op::Add { .. })), !merged);
    let activates = merged && model.kernels.linear.capabilities.activates;
    assert_eq!(has(|op| matches!(op, Op::LinearActivate { .. })), activates);
    model.reserve(&LIMITS).unwrap();
    let mut caches = model.new_cache(LIMITS.num_blocks, LIMITS.block_size).unwrap();
    let (table, mut found) = ([5, 1, 4], Vec::new());
    let (mut batch, prompt): (_, Vec<u32>) = (ForwardBatch::default(), (3..20).collect());
    for (start, tokens) in [(0, &prompt[..]), (prompt.len(), &[7])] {
        let slots = (start..start + tokens.len()).map(|at| i64::from(table[at / 8]) * 8 + at as i64 % 8);
        batch.clear(1);
        let row = batch.push(start, tokens, [(&slots.collect::<Vec<_>>()[..], &table[..])]);
        batch.needed = Some(vec![row]);
        model.forward(&batch, &mut caches).unwrap();
        found.extend(model.logits(&[row]).unwrap().iter().map(|logit| logit.to_bits()));
    }
    found
}

#[test]
fn merged_operations_have_the_bits_of_separate_ones() {
    let cpu = device::open("cpu", Some(1)).unwrap();
    let kernels = testkit::kernels::host::folder_for_tests();
    let options = Options { threads: Some(1), kernels: kernels.clone(), ..Options::default() };
    let name = testkit::kernels::host::device_for_tests();
    let sim = kernels.map(|_| device::open_with(name, &options).unwrap());
    let on_cpu = [Form::Dense, Form::Quantized(Quantization::Q8), Form::Quantized(Quantization::Q4)];
    let on_sim = Dtype::ALL.map(|dtype| sim.as_ref().map(|sim| (sim, dtype, Form::Dense)));
    let all = on_cpu.map(|form| Some((&cpu, Dtype::F32, form))).into_iter().chain(on_sim).flatten();
    let usual = KernelChoice::default();
    for (device, dtype, form) in all {
        let [merged, plain] = [true, false].map(|merged| logits(("qwen3", &usual), device, dtype, form, merged));
        assert!(merged == plain, "{} in {dtype}, {form}", device.name());
    }
    let tiles = KernelChoice { linear: "cpu.portable_tiles".to_string(), ..usual };
    for case in ["qwen3", "llama"] {
        let [merged, plain] =
            [true, false].map(|merged| logits((case, &tiles), &cpu, Dtype::Bf16, Form::Dense, merged));
        assert!(merged == plain, "{case} on tiles");
    }
}
