//! Opens and loads the model for drafts.
//!
//! It computes in the type of the model, with kernels of its own choice. Its keys and values lie in the pages of the model, in the blocks of
//! the first group of layers that keeps a whole context.

use std::path::Path;
use std::sync::Arc;

use attention_kernels::{KernelSet, KvCache, Needs, select};
use device::Device;
use models::decoder::Form;
use models::{Decoder, Model, ModelConfig, ModelFiles, PageLayout, StepLimits, Tokenizer, Weights};

use crate::api::EngineConfig;
use crate::error::{EngineError, bad};
use crate::speculate::{DraftCheckpoint, SpeculativeMethod};
use crate::worker::Drafter;

const FLAG: &str = "--speculative-config";

/// The opened model for drafts, before its weights are read.
pub(crate) struct OpenedDraft {
    pub decoder: Decoder,
    pub weights: Weights,
    pub kernels: KernelSet,
    /// Greatest number of tokens of a text with drafts.
    pub max_len: usize,
    /// The group of the model whose blocks it uses.
    group: usize,
}

/// What is known of the model when its draft model is opened.
pub(crate) struct Target<'a> {
    pub files: &'a ModelFiles,
    pub decoder: &'a Decoder,
    pub device: &'a dyn Device,
    pub needs: &'a Needs,
}

impl OpenedDraft {
    /// Opens the model for drafts, if the configuration names one.
    pub fn open(engine: &EngineConfig, target: &Target<'_>) -> Result<Option<OpenedDraft>, EngineError> {
        let Some(speculative) = &engine.speculative else { return Ok(None) };
        let SpeculativeMethod::DraftModel(DraftCheckpoint { model, .. }) = &speculative.method else { return Ok(None) };
        let files = ModelFiles::open(model)?;
        let config = ModelConfig::load(&files)?;
        let weights = Weights::open(&files)?;
        let max_len = config.max_position_embeddings;
        let form = engine.quantization.map_or(Form::Dense, Form::Quantized);
        let context = engine.max_model_len.unwrap_or(max_len).min(max_len);
        let decoder = models::in_stored_forms(config.decoder.in_form(form).for_context(context), &weights)?;
        let refused = |expected: &str| bad(FLAG, format!("the draft model {}", model.display()), expected);
        let is_whole = |layout: &PageLayout| layout.groups.iter().position(|it| it.window.is_none() && !it.state);
        let Some(group) = is_whole(&PageLayout::new(target.decoder)) else {
            let expected =
                "a model with a layer that attends to the whole context, whose blocks the draft model shares";
            return Err(bad(FLAG, "a draft model for a model of windows alone", expected));
        };
        if decoder.recurrent().next().is_some() || PageLayout::new(&decoder).groups.len() != 1 {
            return Err(refused("a model whose layers are attention with one window or none"));
        }
        check_vocabulary(model, &files, target.files)?;
        models::check_weights(&decoder, &weights)?;
        let Needs { dtype, kv_dtype, block_size, codes, .. } = *target.needs;
        let needs = Needs { dtype, kv_dtype, block_size, codes, ..Model::needs(&decoder, target.device) };
        let kernels = select(&Default::default(), &needs)?;
        Ok(Some(OpenedDraft { decoder, weights, kernels, max_len, group }))
    }

    /// Bytes of a token's keys and values in a page.
    pub fn page_bytes_per_token(&self) -> u64 {
        PageLayout::new(&self.decoder).page_bytes_per_token(&self.decoder, &self.kernels.format)
    }

    /// Loads the model, and allocates its part of the pages.
    pub fn load(
        &self,
        limits: &StepLimits,
        device: &Arc<dyn Device>,
        vocab_size: usize,
        progress: models::Progress<'_>,
    ) -> Result<(Drafter, Vec<KvCache>), EngineError> {
        let StepLimits { max_rows, num_blocks, block_size, .. } = *limits;
        let mut model = Model::load(&self.decoder, &self.weights, device.clone(), self.kernels, max_rows, progress)?;
        model.reserve(limits)?;
        let caches = model.new_cache(num_blocks, block_size)?;
        let (of, pool) = ((vocab_size, self.group), (num_blocks, block_size));
        Ok((Drafter::new(device.clone(), model, of, pool, max_rows), caches))
    }
}

/// Checks that both tokenizers have the same text for every id that both know.
fn check_vocabulary(model: &Path, draft: &ModelFiles, target: &ModelFiles) -> Result<(), EngineError> {
    let name = "tokenizer.json";
    if let (Ok(ours), Ok(theirs)) = (draft.bytes(name), target.bytes(name))
        && *ours == *theirs
    {
        return Ok(());
    }
    let (draft, target) = (Tokenizer::load(draft)?, Tokenizer::load(target)?);
    let both = draft.vocab_size().min(target.vocab_size()) as u32;
    match (0..both).find(|id| draft.id_to_token(*id) != target.id_to_token(*id)) {
        None => Ok(()),
        Some(id) => {
            let text = |of: &Tokenizer| of.id_to_token(id).map_or("no token".to_string(), |text| format!("{text:?}"));
            let found = format!("the draft model {}, in which token {id} is {}", model.display(), text(&draft));
            let expected = format!("{} as in the model: use a draft model with the same vocabulary", text(&target));
            Err(bad(FLAG, found, expected))
        }
    }
}
