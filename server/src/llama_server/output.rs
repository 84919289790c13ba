//! Answers and their streams.

use std::sync::Arc;
use std::time::Instant;

use axum::response::Response;
use engine::{Delta, FinishReason, StopCause, TokenLogprobs, TokenOutput};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use text::Tokenizer;

use super::error_json;
use super::request::Asked;
use crate::app::App;
use crate::http::json::{put, response};
use crate::http::{ApiError, sse};
use crate::openai::logprobs::{number, token_text};
use crate::reply::{Translator, Usage};

/// The answer to one prompt.
#[derive(Default)]
struct Answer {
    content: String,
    tokens: Vec<u32>,
    probabilities: Vec<Box<RawValue>>,
    predicted: usize,
    has_new_line: bool,
    finish: Option<FinishReason>,
}

/// Writer of the answers to the prompts of a request, whole or as a stream.
pub struct Writer {
    app: Arc<App>,
    asked: Asked,
    answers: Vec<Answer>,
    usage: Usage,
    began: Instant,
    /// When the last prompt was computed.
    started: Option<Instant>,
    lines: Vec<u8>,
}

impl Writer {
    /// Writer of the answers to a request.
    pub fn new(app: &Arc<App>, asked: Asked) -> Writer {
        let prompt_tokens = asked.prompts.iter().map(|(ids, _)| ids.len()).sum();
        Writer {
            app: app.clone(),
            answers: asked.prompts.iter().map(|_| Answer::default()).collect(),
            asked,
            usage: Usage { prompt_tokens, ..Usage::default() },
            began: Instant::now(),
            started: None,
            lines: Vec::new(),
        }
    }

    /// The response that is not a stream.
    pub fn whole(&self) -> Response {
        let all: Vec<Value> = (0..self.answers.len()).map(|prompt| self.answer(prompt)).collect();
        match &all[..] {
            [one] if !self.asked.is_list => response(one),
            _ => response(&all),
        }
    }

    /// The answer to a prompt, at its end.
    fn answer(&self, prompt: usize) -> Value {
        let Asked { options, prompts, returns_tokens, response_fields, .. } = &self.asked;
        let (answer, (ids, text)) = (&self.answers[prompt], &prompts[prompt]);
        let (stop_type, word) = match &answer.finish {
            Some(FinishReason::Length) => ("limit", ""),
            Some(FinishReason::Stop(Some(StopCause::Text(text)))) => ("word", text.as_str()),
            Some(FinishReason::Stop(_)) => ("eos", ""),
            _ => ("none", ""),
        };
        let mut json = json!({
            "index": prompt,
            "content": answer.content,
            "tokens": if *returns_tokens { &answer.tokens[..] } else { &[] },
            "id_slot": prompt,
            "stop": true,
            "model": options.adapter.as_ref().unwrap_or(&self.app.model),
            "tokens_predicted": answer.predicted,
            "tokens_evaluated": ids.len(),
            "generation_settings": settings(&self.asked),
            "prompt": text,
            "has_new_line": answer.has_new_line,
            "truncated": false,
            "stop_type": stop_type,
            "stopping_word": word,
            "tokens_cached": ids.len() + answer.predicted,
            "timings": self.timings(answer.predicted),
        });
        if options.params.sampling.logprobs.is_some() && !options.stream {
            let entries = answer.probabilities.iter().filter_map(|token| serde_json::from_str(token.get()).ok());
            json["completion_probabilities"] = entries.collect::<Vec<Value>>().into();
        }
        if response_fields.is_empty() { json } else { chosen(&json, response_fields) }
    }

    fn timings(&self, predicted: usize) -> Value {
        let now = Instant::now();
        let started = self.started.unwrap_or(now);
        let milliseconds = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64() * 1e3;
        let (prompt_ms, predicted_ms) = (milliseconds(self.began, started), milliseconds(started, now));
        let computed = self.usage.prompt_tokens.saturating_sub(self.usage.cached_tokens);
        let rates = |count: usize, ms: f64| {
            let count = count as f64;
            (if count > 0.0 { ms / count } else { 0.0 }, if ms > 0.0 { 1e3 * count / ms } else { 0.0 })
        };
        let (prompt, output) = (rates(computed, prompt_ms), rates(predicted, predicted_ms));
        json!({
            "cache_n": self.usage.cached_tokens,
            "prompt_n": computed,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt.0,
            "prompt_per_second": prompt.1,
            "predicted_n": predicted,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": output.0,
            "predicted_per_second": output.1,
        })
    }
}

/// The fields of these names, of which the last part is the name in the result.
fn chosen(json: &Value, names: &[String]) -> Value {
    let one = |name: &String| {
        let found = json.pointer(&format!("/{name}"))?;
        Some((name.rsplit('/').next().unwrap_or(name).to_string(), found.clone()))
    };
    names.iter().filter_map(one).collect::<Map<String, Value>>().into()
}

/// The sampling parameters of a request.
fn settings(asked: &Asked) -> Value {
    let options = &asked.options;
    let mut settings = sampling(&options.params.sampling);
    let limit = options.max_tokens.and_then(|(_, limit)| i64::try_from(limit).ok().filter(|limit| *limit < i64::MAX));
    for (name, value) in [
        ("n_predict", json!(limit.unwrap_or(-1))),
        ("stop", json!(&options.params.stop[..])),
        ("stream", json!(options.stream)),
        ("ignore_eos", json!(options.params.ignore_eos)),
        ("n_probs", json!(options.params.sampling.logprobs.unwrap_or(0))),
    ] {
        settings[name] = value;
    }
    settings
}

/// Sampling parameters under the names of this API.
pub fn sampling(sampling: &engine::SamplingParams) -> Value {
    // The shortest decimal: 0.6 and not 0.6000000238418579.
    let short = |x: f32| x.to_string().parse::<f64>().ok();
    json!({
        "seed": sampling.seed,
        "temperature": short(sampling.temperature),
        "top_k": sampling.top_k,
        "top_p": short(sampling.top_p),
        "min_p": short(sampling.min_p),
        "typical_p": sampling.typical_p.map_or(Some(1.0), short),
        "repeat_last_n": -1,
        "repeat_penalty": short(sampling.repetition_penalty),
        "presence_penalty": short(sampling.presence_penalty),
        "frequency_penalty": short(sampling.frequency_penalty),
    })
}

/// JSON of a token with its alternatives.
fn probability(tokenizer: &Tokenizer, token: &TokenOutput, most: usize) -> Option<Value> {
    let TokenLogprobs { logprob, top, .. } = token.logprobs.as_ref()?;
    let one = |id: u32, logprob: f32| json!({"id": id, "token": token_text(tokenizer, id), "bytes": tokenizer.token_bytes(id), "logprob": number(logprob)});
    let mut json = one(token.id, *logprob);
    json["top_logprobs"] = top.iter().take(most).map(|(id, logprob)| one(*id, *logprob)).collect::<Vec<_>>().into();
    Some(json)
}

impl Translator for Writer {
    fn usage(&mut self) -> &mut Usage {
        &mut self.usage
    }

    fn started(&mut self) {
        self.started = Some(Instant::now());
    }

    fn delta(&mut self, prompt: usize, delta: &Delta) {
        let tokenizer = self.app.tokenizer();
        let (streams, most) = (self.asked.options.stream, self.asked.options.params.sampling.logprobs);
        let probabilities =
            most.map(|most| delta.tokens.iter().filter_map(move |token| probability(tokenizer, token, most)));
        let Some(answer) = self.answers.get_mut(prompt) else { return };
        answer.predicted += delta.tokens.len();
        answer.has_new_line |= delta.text.contains('\n');
        answer.finish.clone_from(&delta.finish);
        let ids = delta.tokens.iter().map(|token| token.id);
        if !streams {
            answer.content += &delta.text;
            if self.asked.returns_tokens {
                answer.tokens.extend(ids);
            }
            let texts =
                probabilities.into_iter().flatten().filter_map(|json| RawValue::from_string(json.to_string()).ok());
            answer.probabilities.extend(texts);
            return;
        }
        if !delta.text.is_empty() || !delta.tokens.is_empty() {
            let mut json = json!({
                "index": prompt,
                "content": delta.text,
                "tokens": ids.collect::<Vec<u32>>(),
                "stop": false,
                "id_slot": prompt,
                "tokens_predicted": answer.predicted,
                "tokens_evaluated": self.asked.prompts[prompt].0.len(),
            });
            if let Some(probabilities) = probabilities {
                json["completion_probabilities"] = probabilities.collect::<Vec<Value>>().into();
            }
            sse::event(&mut self.lines, None, |text| put(text, &json));
        }
        if delta.finish.is_some() {
            let last = self.answer(prompt);
            sse::event(&mut self.lines, None, |text| put(text, &last));
        }
    }

    fn end(&mut self, failure: Option<ApiError>) {
        if let Some(error) = failure.filter(|_| self.asked.options.stream) {
            sse::event(&mut self.lines, None, |text| put(text, &error_json(&error)));
        }
    }

    fn write(&mut self, lines: &mut Vec<u8>) -> bool {
        let is_empty = self.lines.is_empty();
        lines.append(&mut self.lines);
        !is_empty
    }
}
