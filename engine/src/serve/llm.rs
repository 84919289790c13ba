//! Offline inference: prompts in, texts out.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use models::Pooling;
use serde_json::{Map, Value};
use text::{ChatInput, ChatTemplate, Grammars, Tokenizer};

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
/// All prompts of a call run together and share steps. The configuration names the model; without one it is the small model that is
/// built in, as in these examples:
///
/// ```
/// use engine::{EngineConfig, GenerationParams, Llm, SamplingParams};
///
/// let mut llm = Llm::new(EngineConfig::default())?;
/// let sampling = SamplingParams { temperature: 0.0, ..Default::default() };
/// let params = GenerationParams { sampling, max_tokens: Some(8), ..Default::default() };
/// let completions = llm.generate(&["The capital of France is", "The capital of Japan is"], &params)?;
/// assert_eq!(completions[0].outputs[0].text, " Paris. The capital of I");
/// assert_eq!(completions[1].outputs[0].token_ids.len(), 8);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Chat
///
/// [`Llm::chat`] renders conversations with the model's chat template:
///
/// ```
/// use engine::{EngineConfig, GenerationParams, Llm, SamplingParams};
/// use serde_json::json;
///
/// let mut llm = Llm::new(EngineConfig::default())?;
/// let sampling = SamplingParams { temperature: 0.0, ..Default::default() };
/// let params = GenerationParams { sampling, max_tokens: Some(32), ..Default::default() };
/// let conversation = [json!({"role": "user", "content": "What is the capital of France?"})];
/// let answers = llm.chat(&[&conversation], &params)?;
/// assert_eq!(answers[0].outputs[0].text, "The capital of France is Paris.");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Embeddings
///
/// [`Llm::embed`] returns vectors of length 1, so the cosine of two is their scalar product:
///
/// ```
/// use engine::{EngineConfig, Llm};
///
/// let mut llm = Llm::new(EngineConfig::default())?;
/// let vectors = llm.embed(&["a cat", "a dog", "the price of steel"])?;
/// let cosine = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f32>();
/// assert!((cosine(&vectors[0], &vectors[0]) - 1.0).abs() < 1e-5);
/// assert!(cosine(&vectors[0], &vectors[1]) < 1.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Structured output
///
/// A grammar of [`GenerationParams::structured_outputs`] constrains the whole text:
///
/// ```
/// use std::sync::Arc;
/// use engine::{EngineConfig, GenerationParams, Grammar, Llm, StructuredOutput};
///
/// let mut llm = Llm::new(EngineConfig::default())?;
/// let grammar = Grammar::Regex("(yes|no), [0-9]{3}".to_string());
/// // A grammar that cannot be compiled is refused with this name.
/// let wanted = StructuredOutput { grammar, param: "grammar" };
/// let params = GenerationParams { structured_outputs: Some(Arc::new(wanted)), ..Default::default() };
/// let text = llm.generate(&["Answer: "], &params)?[0].outputs[0].text.clone();
/// assert!(text.starts_with("yes, ") || text.starts_with("no, "), "{text}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # LoRA adapters
///
/// [`EngineConfig::lora`] reserves memory for adapters. [`Llm::load_adapter`] reads one, and a request chooses it by its name:
///
/// ```
/// use engine::{EngineConfig, GenerationParams, GenerationRequest, Llm, LoraConfig};
///
/// # let folder = tempfile::tempdir()?;
/// # let modules = [("model.layers.0.self_attn.o_proj".to_string(), 192, 192)];
/// # testkit::adapters::simple(&folder.path().join("sql"), &modules, 2, 1);
/// # let adapters = folder.path();
/// let mut llm = Llm::new(EngineConfig { lora: Some(LoraConfig::default()), ..Default::default() })?;
/// llm.load_adapter("sql", &adapters.join("sql"), false)?;
/// let prompt = llm.tokenizer().encode("The capital of France is", true)?;
/// let params = GenerationParams { max_tokens: Some(64), ignore_eos: true, ..Default::default() };
/// let plain = GenerationRequest { prompt, params, ..Default::default() };
/// let adapted = GenerationRequest { adapter: Some("sql".to_string()), ..plain.clone() };
/// let completions = llm.run(vec![plain, adapted])?;
/// assert_ne!(completions[0].outputs[0].token_ids, completions[1].outputs[0].token_ids);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Llm {
    engine: TextEngine,
    tokenizer: Arc<Tokenizer>,
    grammars: Arc<Grammars>,
    chat_template: Option<ChatTemplate>,
    pooling: Option<Pooling>,
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
        let (chat_template, pooling) = (loaded.chat_template, loaded.info.pooler.pooling);
        Ok(Llm { engine, tokenizer: loaded.tokenizer, grammars, chat_template, pooling })
    }

    /// Continues all prompts as one batch. The results are in the order of the prompts.
    pub fn generate(
        &mut self,
        prompts: &[impl AsRef<str>],
        params: &GenerationParams,
    ) -> Result<Vec<Completion>, SubmitError> {
        let requests = prompts.iter().map(|prompt| self.request("prompt", prompt.as_ref(), true, params));
        self.run(requests.collect::<Result<_, _>>()?)
    }

    /// Answers conversations as one batch. Messages are objects with `role` and `content`, as in OpenAI's API.
    ///
    /// # Errors
    /// The model has no chat template, or its template refuses the messages. No conversation is answered then.
    pub fn chat(
        &mut self,
        conversations: &[impl AsRef<[Value]>],
        params: &GenerationParams,
    ) -> Result<Vec<Completion>, SubmitError> {
        let wrong = |message: String| SubmitError::Invalid { param: "messages", message };
        let template = self.chat_template.as_ref().ok_or_else(|| {
            wrong(
                "found a model without a chat template; set EngineConfig::chat_template, or use Llm::generate"
                    .to_string(),
            )
        })?;
        let request = |messages: &[Value]| {
            let input = ChatInput {
                messages,
                tools: None,
                add_generation_prompt: true,
                continue_final_message: false,
                kwargs: &Map::new(),
            };
            let prompt = template.render(&input).map_err(|error| wrong(error.to_string()))?;
            // The template writes special tokens itself.
            self.request("messages", &prompt, false, params)
        };
        let requests: Vec<_> =
            conversations.iter().map(|messages| request(messages.as_ref())).collect::<Result<_, _>>()?;
        self.run(requests)
    }

    /// Returns the embedding of each prompt, or the logits of its labels if the model classifies: what its
    /// [`Pooler`](crate::Pooler) makes of hidden states.
    ///
    /// # Errors
    /// The checkpoint pools in a way that is not supported, or a prompt does not fit the context.
    pub fn embed(&mut self, prompts: &[impl AsRef<str>]) -> Result<Vec<Vec<f32>>, SubmitError> {
        let unsupported = || {
            SubmitError::Invalid {
            param: "model",
            message: "found a checkpoint whose pooling is not supported; call Llm::run_with_events with GenerationParams::pooled".to_string(),
        }
        };
        let params = GenerationParams::pooled(self.pooling.ok_or_else(unsupported)?);
        let requests = prompts.iter().map(|prompt| self.request("prompt", prompt.as_ref(), true, &params));
        let results = self.run_with_events(requests.collect::<Result<_, _>>()?)?;
        let vector = |event| if let Event::Embedding(vector) = event { Some(vector) } else { None };
        Ok(results.into_iter().filter_map(|(_, events)| events.into_iter().find_map(vector)).collect())
    }

    /// A request for a text. `param` is its name in errors.
    fn request(
        &self,
        param: &'static str,
        text: &str,
        add_special: bool,
        params: &GenerationParams,
    ) -> Result<GenerationRequest, SubmitError> {
        let prompt = self.tokenizer.encode(text, add_special);
        let prompt = prompt.map_err(|error| SubmitError::Invalid { param, message: error.to_string() })?;
        Ok(GenerationRequest { prompt, params: params.clone(), ..Default::default() })
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
