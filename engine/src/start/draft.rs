//! Opens and loads the draft model: a smaller model, an EAGLE-3 head, or the predictor that the checkpoint carries.
//!
//! It computes in the type of the model, with kernels of its own choice. Its keys and values lie in the pages of the model, in the blocks of
//! the first group of layers that keeps a whole context.

use std::path::Path;
use std::sync::Arc;

use attention_kernels::{KernelSet, KvCache, Needs, select};
use device::Device;
use models::decoder::Form;
use models::{Decoder, Eagle3, Model, ModelConfig, ModelFiles, PageLayout, StepLimits, Weights};
use text::Tokenizer;

use super::texts::TextFiles;
use crate::api::EngineConfig;
use crate::error::{EngineError, bad};
use crate::speculate::{DraftCheckpoint, SpeculativeMethod};
use crate::worker::{Drafter, Sizes};

const FLAG: &str = "--speculative-config";

/// The opened draft model, before its weights are read.
pub(crate) struct OpenedDraft {
    pub decoder: Decoder,
    /// `None`: the checkpoint is that of the model.
    weights: Option<Weights>,
    pub kernels: KernelSet,
    /// Greatest number of tokens of a text with drafts.
    pub max_len: usize,
    /// The group of the model whose blocks it uses.
    group: usize,
    /// The tokens of the rows of its head, if it has rows for some alone.
    head_tokens: Option<Vec<u32>>,
    /// Layers of the model in front of which it reads the stream.
    pub taps: Vec<usize>,
}

/// What is known of the model when its draft model is opened.
pub(crate) struct Target<'a> {
    pub files: &'a ModelFiles,
    pub config: &'a ModelConfig,
    pub weights: &'a Weights,
    pub device: &'a dyn Device,
    pub needs: &'a Needs,
}

/// A declaration, its weights, the greatest length of a text, and the layers of the model that it reads.
type Declared = (Decoder, Option<Weights>, usize, Vec<usize>);

impl OpenedDraft {
    /// Opens the draft model, if the configuration asks for one.
    pub fn open(engine: &EngineConfig, target: &Target<'_>) -> Result<Option<OpenedDraft>, EngineError> {
        let Some(speculative) = &engine.speculative else { return Ok(None) };
        let (decoder, weights, max_len, taps) = match &speculative.method {
            SpeculativeMethod::Ngram { .. } | SpeculativeMethod::Suffix(_) => return Ok(None),
            SpeculativeMethod::DraftModel(checkpoint) => draft_model(checkpoint, target)?,
            SpeculativeMethod::Eagle3(DraftCheckpoint { model, .. }) => {
                let files = ModelFiles::open(model)?;
                let weights = Weights::open(&files)?;
                let Eagle3 { decoder, taps, max_position_embeddings } =
                    Eagle3::load(&files, &weights, &target.config.decoder)?;
                (decoder, Some(weights), max_position_embeddings, taps)
            }
            SpeculativeMethod::Mtp => {
                let predictor = target.config.predictor.clone().ok_or_else(|| {
                    let expected = "a checkpoint that carries a layer for further tokens (num_nextn_predict_layers), such as \
                                    DeepSeek V3, GLM-4.5 or Qwen3-Next; or another method";
                    bad(FLAG, format!("mtp with {}", target.files.name()), expected)
                })?;
                (predictor, None, target.config.max_position_embeddings, Vec::new())
            }
        };
        let form = engine.quantization.map_or(Form::Dense, Form::Quantized);
        let context = engine.max_model_len.unwrap_or(max_len).min(max_len);
        let own = weights.as_ref().unwrap_or(target.weights);
        let decoder = models::in_stored_forms(decoder.in_form(form).for_context(context), own)?;
        let is_whole = |layout: &PageLayout| layout.groups.iter().position(|it| it.window.is_none() && !it.state);
        let Some(group) = is_whole(&PageLayout::new(&target.config.decoder)) else {
            let expected =
                "a model with a layer that attends to the whole context, whose blocks the model for drafts shares";
            return Err(bad(FLAG, "a model for drafts beside a model of windows alone", expected));
        };
        if decoder.recurrent().next().is_some() || PageLayout::new(&decoder).groups.len() != 1 {
            let expected = "one whose layers are attention with one window or none";
            return Err(bad(FLAG, "this model for drafts", expected));
        }
        let head_tokens = models::head_tokens(&decoder, own)?;
        let Needs { dtype, arithmetic, kv_dtype, block_size, codes, .. } = *target.needs;
        let needs = Needs { dtype, arithmetic, kv_dtype, block_size, codes, ..Model::needs(&decoder, target.device) };
        let kernels = select(&Default::default(), &needs)?;
        Ok(Some(OpenedDraft { decoder, weights, kernels, max_len, group, head_tokens, taps }))
    }

    /// Bytes of its weights beside those of the model. Reads only the headers of the checkpoint.
    pub fn weight_bytes(&self, device: &dyn Device, target: (&Decoder, &Weights)) -> Result<u64, EngineError> {
        let weights = self.weights.as_ref().unwrap_or(target.1);
        let shares = self.is_predictor().then_some(target.0);
        Ok(models::weight_bytes_beside(&self.decoder, weights, device.features(), &self.kernels, shares)?.all)
    }

    /// Bytes of a token's keys and values in a page.
    pub fn page_bytes_per_token(&self) -> u64 {
        PageLayout::new(&self.decoder).page_bytes_per_token(&self.decoder, &self.kernels.format)
    }

    /// Whether it reads hidden states of the model.
    pub fn is_predictor(&self) -> bool {
        self.decoder.embedding.beside.is_some()
    }

    /// Loads it for a model, and allocates its part of the pages.
    pub fn load(
        &self,
        limits: &StepLimits,
        device: &Arc<dyn Device>,
        (target, weights): (&Model, &Weights),
        progress: models::Progress<'_>,
    ) -> Result<(Drafter, Vec<KvCache>), EngineError> {
        let StepLimits { max_rows, num_blocks, block_size, max_seqs, .. } = *limits;
        let weights = self.weights.as_ref().unwrap_or(weights);
        let mut model = match self.is_predictor() {
            true => Model::load_predictor(&self.decoder, weights, target, self.kernels, max_rows, progress)?,
            false => Model::load(&self.decoder, weights, device.clone(), self.kernels, max_rows, progress)?,
        };
        model.reserve(limits)?;
        let caches = model.new_cache(num_blocks, block_size)?;
        let vocab_size = target.decoder().vocab_size();
        let (group, max_len) = (self.group, self.max_len);
        let sizes = Sizes { vocab_size, group, num_blocks, block_size, max_rows, max_len, max_seqs };
        Ok((Drafter::new(device.clone(), model, sizes, self.head_tokens.clone())?, caches))
    }
}

/// A smaller model with the vocabulary of the model.
fn draft_model(checkpoint: &DraftCheckpoint, target: &Target<'_>) -> Result<Declared, EngineError> {
    let files = ModelFiles::open(&checkpoint.model)?;
    let config = ModelConfig::load(&files)?;
    let weights = Weights::open(&files)?;
    check_vocabulary(&checkpoint.model, &files, target.files)?;
    models::check_weights(&config.decoder, &weights)?;
    Ok((config.decoder, Some(weights), config.max_position_embeddings, Vec::new()))
}

/// Checks that both tokenizers have the same text for every id that both know.
fn check_vocabulary(model: &Path, draft: &ModelFiles, target: &ModelFiles) -> Result<(), EngineError> {
    let name = "tokenizer.json";
    if let (Ok(ours), Ok(theirs)) = (draft.bytes(name), target.bytes(name))
        && *ours == *theirs
    {
        return Ok(());
    }
    let (draft, target) = (Tokenizer::load(&TextFiles(draft))?, Tokenizer::load(&TextFiles(target))?);
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
