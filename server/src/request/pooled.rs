//! Requests for one vector of each prompt: embeddings, and the logits of labels.
//!
//! Prompts are tokenized without special tokens, cut where the client asks for it, and then get their special tokens, so that a cut text
//! still has the end that the model was trained with.

use engine::{GenerationParams, GenerationRequest, Pooler, Task};
use serde_json::{Value, json};
use text::{Frame, TokenizeError};

use super::cost::Cost;
use super::fields::Fields;
use super::messages::Conversation;
use super::options::{add_special_tokens, cache_salt, check_length, priority, truncation, user};
use super::prompts::{self, Input};
use super::reasoning::Reasoning;
use super::unsupported;
use super::work::Work;
use crate::http::ApiError;

/// The prompt of Qwen3-Reranker, with which it was trained: before the instruction, before the query, before the document, and the end.
const RERANKER: [&str; 4] = [
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the \
     answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n",
    "<Instruct>: ",
    "\n<Query>: ",
    "\n<Document>: ",
];
const RERANKER_END: &str = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
const RERANKER_TASK: &str = "Given a web search query, retrieve relevant passages that answer the query";

/// A prompt of one vector.
pub struct PooledPrompt {
    ids: Vec<u32>,
    /// Where the tokens of a second text begin, if the model tells them apart.
    second: Option<usize>,
}

/// The fields that all these requests have.
#[derive(Default)]
pub struct Pooled {
    /// LoRA adapter that computes the request.
    pub adapter: Option<String>,
    /// Whether to apply the model's last function: the length 1 of embeddings, the scores of labels.
    pub use_activation: Option<bool>,
    keep: Option<usize>,
    keeps_end: bool,
    add_special: bool,
    priority: i32,
    cache_salt: Option<String>,
    /// A text to put before each text.
    prefix: String,
}

impl Pooled {
    /// Reads the fields.
    pub fn read(work: &Work, fields: &Fields<'_>) -> Result<Pooled, ApiError> {
        let adapter = work.choose_model(fields)?;
        unsupported::refuse(fields, &unsupported::POOLED)?;
        user(fields)?;
        let keep = match truncation(fields)? {
            Some(-1) => Some(work.longest_prompt()),
            other => other.and_then(|n| usize::try_from(n).ok()),
        };
        let description =
            "Which part of a prompt truncate_prompt_tokens cuts off: its end (right, the default) or its beginning.";
        let keeps_end = fields.word("truncation_side", &["left", "right"], description)? == Some("left");
        let description =
            "Apply the model's last function, as by default: scores instead of logits, embeddings of length 1.";
        let use_activation = fields.bool("use_activation", description)?;
        Ok(Pooled {
            adapter,
            use_activation,
            keep,
            keeps_end,
            add_special: add_special_tokens(fields)?,
            priority: priority(fields)?,
            cache_salt: cache_salt(fields)?,
            prefix: String::new(),
        })
    }

    /// Cuts prompts to the context, unless the client has given a length: their end, or their beginning with `from_left`.
    pub fn cut_to_context(&mut self, work: &Work, from_left: bool) {
        self.keep.get_or_insert(work.longest_prompt());
        self.keeps_end |= from_left;
    }

    /// Reads `prompt_name`, the name of a text that the checkpoint puts before others.
    pub fn read_prompt_name(&mut self, work: &Work, fields: &Fields<'_>) -> Result<(), ApiError> {
        let prompts = &work.pooler().prompts;
        let description =
            "Name of the text of config_sentence_transformers.json to put before each text; by default none.";
        let Some(name) = fields.str("prompt_name", usize::MAX, description)? else { return Ok(()) };
        let known: Vec<&str> = prompts.keys().map(String::as_str).collect();
        let expected = match known[..] {
            [] => "no name: the checkpoint has no prompts".to_string(),
            _ => format!("one of {}", known.join(", ")),
        };
        let found = prompts.get(name).ok_or_else(|| ApiError::wrong("prompt_name", &Value::from(name), expected))?;
        self.prefix.clone_from(found);
        Ok(())
    }

    /// Reads the texts of `input`, or of `messages` one conversation, which the chat template of the model writes as a text.
    pub fn inputs(&self, work: &Work, fields: &Fields<'_>, description: &str) -> Result<Vec<Input>, ApiError> {
        const INPUT: &str = "input";
        let texts = prompts::given(work, fields, INPUT, description)?;
        let conversation = Conversation::read(fields, &work.options.limits, None, &Reasoning::default(), false)?;
        match (texts, conversation) {
            (Some(_), Some(_)) => Err(ApiError::conflict("messages", INPUT)),
            (Some(texts), None) => Ok(texts),
            (None, Some(conversation)) => {
                let prompt = conversation.render(work)?;
                Ok(vec![Input::Ids(conversation.encode(work, &prompt, self.keep.is_none())?)])
            }
            (None, None) if fields.is_describing() => Ok(Vec::new()),
            (None, None) => {
                Err(ApiError::wrong(INPUT, &Value::Null, format!("{}, or messages", prompts::expected(work))))
            }
        }
    }

    /// Token ids of prompts of one text each.
    pub fn prompts(&self, work: &Work, inputs: Vec<Input>, param: &str) -> Result<Vec<PooledPrompt>, ApiError> {
        let frame = if self.add_special { framed(work.tokenizer().frame(), param)? } else { Frame::default() };
        let mut tokens = 0;
        let one = |input| {
            let ids = match input {
                Input::Ids(ids) => self.cut(ids, self.keep),
                Input::Text(text) => {
                    let text = if self.prefix.is_empty() { text } else { format!("{}{text}", self.prefix) };
                    match self.keep {
                        None => work.encode(&text, self.add_special, param, true)?,
                        Some(keep) => {
                            let room = self.room(keep, frame.len())?;
                            frame.single(&self.cut(work.encode(&text, false, param, false)?, Some(room)))
                        }
                    }
                }
            };
            self.checked(work, PooledPrompt { ids, second: None }, &mut tokens, param)
        };
        inputs.into_iter().map(one).collect()
    }

    /// The prompts of pairs of texts, as the model scores them. `most`: greatest numbers of tokens of the first and of the second text.
    /// Only the second is cut to fit.
    pub fn pairs(
        &self,
        work: &Work,
        pairs: &[(&str, &str)],
        (instruction, most): (Option<&str>, [Option<usize>; 2]),
        param: &str,
    ) -> Result<Vec<PooledPrompt>, ApiError> {
        let form = PairForm::of(work, instruction, self.add_special, param)?;
        let mut tokens = 0;
        let one = |(first, second): &(&str, &str)| {
            let must_fit = self.keep.is_none();
            let encode = |text: &str| work.encode(text, false, param, must_fit);
            let (first, second) = match &form {
                // The texts are one for the tokenizer, so only the whole can be cut.
                PairForm::Reranker { instruction, .. } if most == [None, None] => {
                    let [_, task, query, document] = RERANKER;
                    (Vec::new(), encode(&format!("{task}{instruction}{query}{first}{document}{second}"))?)
                }
                PairForm::Reranker { .. } => {
                    let field = if most[0].is_some() { "max_tokens_per_query" } else { "max_tokens_per_doc" };
                    return Err(ApiError::unsupported(field, "use truncate_prompt_tokens, which cuts the document"));
                }
                PairForm::Texts(_) => {
                    let cut = |ids: Vec<u32>, most: Option<usize>| self.cut(ids, most);
                    (cut(encode(first)?, most[0]), cut(encode(second)?, most[1]))
                }
            };
            let frame = form.frame();
            let room = match self.keep {
                Some(keep) => Some(self.room(keep, frame.len() + first.len())?),
                None => None,
            };
            let (ids, second) = frame.pair(&first, &self.cut(second, room));
            self.checked(work, PooledPrompt { ids, second }, &mut tokens, param)
        };
        pairs.iter().map(one).collect()
    }

    /// Requests for the vectors of prompts, and their cost.
    pub fn requests(
        &self,
        work: &Work,
        prompts: Vec<PooledPrompt>,
    ) -> Result<(Vec<GenerationRequest>, Cost), ApiError> {
        let pooling = work.pooling.ok_or_else(|| {
            let advice = "its 1_Pooling/config.json asks for a pooling that is not supported; set --pooling-type";
            ApiError::unsupported("model", advice)
        })?;
        let tokens = prompts.iter().map(|prompt| prompt.ids.len()).sum();
        let cost = self.cost(work, prompts.len(), tokens);
        cost.check(&work.options.limits)?;
        let request = |PooledPrompt { ids, second }| GenerationRequest {
            prompt: ids,
            params: GenerationParams::pooled(pooling),
            priority: self.priority,
            cache_salt: self.cache_salt.clone(),
            adapter: self.adapter.clone(),
            second,
            ..Default::default()
        };
        Ok((prompts.into_iter().map(request).collect(), cost))
    }

    /// Cost of prompts with at least `tokens` tokens in all.
    pub fn cost(&self, work: &Work, prompts: usize, tokens: usize) -> Cost {
        Cost {
            prompts,
            sequences: 1,
            n: 1,
            prompt_tokens: tokens,
            // The vector and its text.
            list_bytes: work.pooler().width * 20,
            ..Cost::default()
        }
    }

    /// The tokens that truncation leaves for a text beside `others`.
    fn room(&self, keep: usize, others: usize) -> Result<usize, ApiError> {
        keep.checked_sub(others).filter(|room| *room > 0).ok_or_else(|| {
            let expected = format!("more than {others}, the tokens beside the text that is cut");
            ApiError::wrong("truncate_prompt_tokens", &Value::from(keep), expected)
        })
    }

    fn cut(&self, mut ids: Vec<u32>, most: Option<usize>) -> Vec<u32> {
        let most = most.unwrap_or(usize::MAX);
        if self.keeps_end {
            ids.drain(..ids.len().saturating_sub(most));
        } else {
            ids.truncate(most);
        }
        ids
    }

    fn checked(
        &self,
        work: &Work,
        prompt: PooledPrompt,
        tokens: &mut usize,
        param: &str,
    ) -> Result<PooledPrompt, ApiError> {
        check_length(work, prompt.ids.len(), param)?;
        *tokens += prompt.ids.len();
        Cost { prompts: 1, prompt_tokens: *tokens, ..Cost::default() }.check(&work.options.limits)?;
        Ok(prompt)
    }
}

/// How the model reads a pair of texts.
enum PairForm {
    /// With the special tokens that the tokenizer puts around a pair.
    Texts(Frame),
    /// In the prompt of Qwen3-Reranker.
    Reranker { instruction: String, frame: Frame },
}

impl PairForm {
    fn of(work: &Work, instruction: Option<&str>, add_special: bool, param: &str) -> Result<PairForm, ApiError> {
        if !work.engine.info().reranker_prompt {
            if instruction.is_some() {
                return Err(ApiError::unsupported(
                    "instruction",
                    "put it into the query: this model has no place for it",
                ));
            }
            let frame = if add_special { framed(work.tokenizer().pair_frame(), param)? } else { Frame::default() };
            return Ok(PairForm::Texts(frame));
        }
        let encode = |text: &str| work.encode(text, false, param, true);
        let frame = Frame { before: encode(RERANKER[0])?, after: encode(RERANKER_END)?, ..Frame::default() };
        Ok(PairForm::Reranker { instruction: instruction.unwrap_or(RERANKER_TASK).to_string(), frame })
    }

    fn frame(&self) -> &Frame {
        match self {
            PairForm::Texts(frame) | PairForm::Reranker { frame, .. } => frame,
        }
    }
}

fn framed(frame: Result<Frame, TokenizeError>, param: &str) -> Result<Frame, ApiError> {
    frame.map_err(|error| ApiError::invalid(param, error))
}

/// An embedding of this length, at length 1 if the client asks for it or the model has it so.
pub fn finish(pooler: &Pooler, vector: Vec<f32>, dimensions: Option<usize>, use_activation: Option<bool>) -> Vec<f32> {
    let vector = match dimensions {
        Some(dimensions) => pooler.cut(vector, dimensions),
        None => vector,
    };
    match (&pooler.task, use_activation) {
        (Task::Embed { normalised: false }, Some(true)) => pooler.at_length_1(&vector),
        (Task::Classify { scores, .. }, asked) if asked != Some(false) => scores.of(&vector),
        _ => vector,
    }
}

/// Refuses `use_activation: false` for embeddings that have length 1 when they leave the engine.
pub fn check_activation(work: &Work, asked: Option<bool>) -> Result<(), ApiError> {
    match (&work.pooler().task, asked) {
        (Task::Embed { normalised: true }, Some(false)) => {
            Err(ApiError::unsupported("use_activation", "remove it: embeddings of this model have length 1"))
        }
        _ => Ok(()),
    }
}

/// Reads the field of a text or of a list of texts, which may have one of these names.
pub fn texts(work: &Work, fields: &Fields<'_>, names: &[&'static str], what: &str) -> Result<Vec<String>, ApiError> {
    let most = work.options.limits.max_prompts;
    let mut given = names.iter().copied().filter(|name| fields.raw(name).is_some());
    let name = given.next().or(names.first().copied()).unwrap_or_default();
    if let Some(other) = given.next() {
        return Err(ApiError::conflict(other, name));
    }
    let part = json!({"type": "object", "description": "A text under `text`, or parts of type text under `content`."});
    let item = json!({"anyOf": [{"type": "string"}, part]});
    for other in names {
        let list = json!({"type": "array", "minItems": 1, "maxItems": most, "items": item});
        fields.describe(other, what, || json!({"anyOf": [{"type": "string"}, part, list]}));
    }
    fields.check_items(name, most, "--max-prompts")?;
    let expected = format!("a text, or a list of 1 to {most} texts");
    let Some(found) = fields.get(name)? else { return fields.required(name, None, &expected) };
    let texts = match found {
        Value::Array(list) if !list.is_empty() => list.iter().map(text_of).collect::<Option<Vec<_>>>(),
        other => text_of(other).map(|text| vec![text]),
    };
    texts.ok_or_else(|| ApiError::wrong(name, found, expected))
}

/// A text: a string, an object with `text`, or one whose `content` has parts of type text.
fn text_of(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Object(map) => match (map.get("text"), map.get("content")) {
            (Some(Value::String(text)), _) => Some(text.clone()),
            (None, Some(Value::Array(parts))) => {
                parts.iter().map(|part| part["text"].as_str().filter(|_| part["type"] == "text")).collect()
            }
            _ => None,
        },
        _ => None,
    }
}
