//! Offline inference: prompts in, texts out.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use text::{Grammars, Tokenizer};

use crate::api::{
    AdapterInfo, Delta, EngineConfig, Event, FinishReason, GenerationParams, GenerationRequest, StructuredOutput,
};
use crate::error::{AdapterError, EngineError, SubmitError};
use crate::serve::constraint::GrammarConstraint;
use crate::serve::text_engine::{NextStep, TextEngine};
use crate::start::{LoadOn, Loaded, load};
use crate::step::Engine;

/// The result of one prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// Prompt as token ids.
    pub prompt_token_ids: Vec<u32>,
    /// One output per requested sequence (`n`).
    pub outputs: Vec<CompletionOutput>,
}

/// One continuation of a prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CompletionOutput {
    /// Generated text.
    pub text: String,
    /// Generated tokens, including the one that ended the sequence.
    pub token_ids: Vec<u32>,
    /// Why the sequence ended.
    pub finish_reason: Option<FinishReason>,
}

/// A model that continues batches of prompts on the caller's thread.
///
/// ```
/// use engine::{EngineConfig, GenerationParams, Llm};
/// let mut llm = Llm::new(EngineConfig::default())?;
/// let params = GenerationParams { max_tokens: Some(8), ..Default::default() };
/// let completions = llm.generate(&["The capital of Japan is"], &params)?;
/// assert!(!completions[0].outputs[0].text.is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Llm {
    engine: TextEngine,
    tokenizer: Arc<Tokenizer>,
    grammars: Arc<Grammars>,
}

impl Llm {
    /// Loads a model.
    pub fn new(config: EngineConfig) -> Result<Llm, EngineError> {
        Llm::of(&config, load(&config, LoadOn::Configured, &|_, _| {})?)
    }

    /// Takes a model that is [loaded](crate::load).
    pub fn of(config: &EngineConfig, loaded: Loaded) -> Result<Llm, EngineError> {
        let grammars = Arc::new(Grammars::new(loaded.tokenizer.clone(), config.max_schema_bytes));
        let engine = TextEngine::new(Engine::new(loaded.parts)?, loaded.tokenizer.clone());
        Ok(Llm { engine, tokenizer: loaded.tokenizer, grammars })
    }

    /// Continues all prompts as one batch. The results are in the order of the prompts.
    pub fn generate(
        &mut self,
        prompts: &[impl AsRef<str>],
        params: &GenerationParams,
    ) -> Result<Vec<Completion>, SubmitError> {
        let encode = |prompt: &str| {
            let ids = self.tokenizer.encode(prompt, true);
            ids.map_err(|e| SubmitError::Invalid { param: "prompt", message: e.to_string() })
        };
        let prompts: Vec<Vec<u32>> = prompts.iter().map(|prompt| encode(prompt.as_ref())).collect::<Result<_, _>>()?;
        let requests = prompts.into_iter().map(|prompt| GenerationRequest {
            prompt,
            params: params.clone(),
            ..Default::default()
        });
        self.run(requests.collect())
    }

    /// Runs requests on token ids to their end, as one batch. The results are in the order of the requests. If one request is
    /// refused, none runs.
    pub fn run(&mut self, requests: Vec<GenerationRequest>) -> Result<Vec<Completion>, SubmitError> {
        Ok(self.run_with_events(requests)?.into_iter().map(|(completion, _)| completion).collect())
    }

    /// Like [`Llm::run`], and also returns every event of each request: log-probabilities, offsets, cached tokens.
    pub fn run_with_events(
        &mut self,
        requests: Vec<GenerationRequest>,
    ) -> Result<Vec<(Completion, Vec<Event>)>, SubmitError> {
        let mut places = HashMap::with_capacity(requests.len());
        let mut results = Vec::with_capacity(requests.len());
        for request in requests {
            let (prompt_token_ids, n) = (request.prompt.clone(), request.params.n);
            let constraint = |wanted: &Arc<StructuredOutput>| match self.grammars.compile_blocking(&wanted.grammar) {
                Ok(matcher) => Ok(Box::new(GrammarConstraint(matcher)) as _),
                Err(problem) => Err(SubmitError::invalid(wanted.param, problem)),
            };
            let constraint = request.params.structured_outputs.as_ref().map(constraint).transpose();
            match constraint.and_then(|constraint| self.engine.submit(request, constraint)) {
                Ok(id) => places.insert(id, results.len()),
                Err(error) => {
                    places.into_keys().for_each(|id| self.engine.abort(id));
                    return Err(error);
                }
            };
            results.push((Completion { prompt_token_ids, outputs: vec![CompletionOutput::default(); n] }, Vec::new()));
        }
        while self.engine.has_work() {
            self.engine.step(NextStep::Planned, |id, event, _| {
                if let Some(&place) = places.get(&id) {
                    let (completion, events): &mut (Completion, Vec<Event>) = &mut results[place];
                    if let Event::Delta(delta) = &event {
                        completion.add(delta);
                    }
                    events.push(event);
                }
            });
        }
        Ok(results)
    }

    /// The model's tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Size of the model's vocabulary in tokens: the length of a row of logits.
    pub fn vocab_size(&self) -> usize {
        self.engine.vocab_size()
    }

    /// Reads the LoRA adapter in a folder and gives it a name for requests ([`GenerationRequest::adapter`]). With `replace`, it takes
    /// the place of another of this name.
    ///
    /// # Errors
    /// The engine takes no adapters, the name is taken, or the adapter cannot be used.
    pub fn load_adapter(&mut self, name: &str, path: &Path, replace: bool) -> Result<(), AdapterError> {
        self.engine.load_adapter(name, path, replace)
    }

    /// Removes an adapter.
    ///
    /// # Errors
    /// No adapter has this name.
    pub fn unload_adapter(&mut self, name: &str) -> Result<(), AdapterError> {
        self.engine.unload_adapter(name)
    }

    /// The adapters, in the order of their names.
    pub fn adapters(&mut self) -> Vec<AdapterInfo> {
        self.engine.adapters()
    }

    /// Statistics since the start.
    pub fn stats(&self) -> crate::EngineStats {
        self.engine.stats()
    }
}

impl Completion {
    fn add(&mut self, delta: &Delta) {
        let output = &mut self.outputs[delta.index as usize];
        output.text += &delta.text;
        output.token_ids.extend(delta.tokens.iter().map(|token| token.id));
        if delta.finish.is_some() {
            output.finish_reason.clone_from(&delta.finish);
        }
    }
}
