//! `POST /v1/embeddings`: texts become vectors, by the served model's own hidden states.
//!
//! The prompts run through the engine like any others, in the same steps and with the same prefix cache; they end where
//! others draw their first token.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use engine::{GenerationParams, GenerationRequest};
use serde_json::{Number, Value, json};

use super::app::App;
use super::body;
use super::cost::Cost;
use super::error::ApiError;
use super::fields::Fields;
use super::json::{Json, off_reactor};
use super::options::{cache_salt, check_length, priority, truncate, truncation, user};
use super::prompts::{self, Input};
use super::reply::Envelope;
use super::run::Run;
use super::work::Work;

/// How a vector is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encoding {
    /// A list of numbers.
    Float,
    /// Little-endian float32, as OpenAI's clients ask for by default.
    Base64,
}

/// The handler.
pub async fn embeddings(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let ((requests, encoding), _) = body.read(&app, prepare).await?;
    let prompt_tokens: usize = requests.iter().map(|request| request.prompt.len()).sum();
    let envelope = Envelope::new(&app, "embd", "list");
    let answers = Run::submit(&app, requests).await?.collect(false).await?;
    let vectors: Option<Vec<Vec<f32>>> = answers.into_iter().map(|answer| answer.embedding).collect();
    let vectors = vectors.ok_or_else(|| ApiError::internal("the engine made no embedding"))?;
    off_reactor(true, move || {
        let one = |(index, vector): (usize, Vec<f32>)| {
            let mut item = Json::from(json!({"object": "embedding", "index": index}));
            item.set("embedding", write(&vector, encoding));
            item
        };
        let usage = json!({"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens});
        let data: Vec<Json> = vectors.into_iter().enumerate().map(one).collect();
        envelope.wrap(vec![("data", data.into())], Some(usage)).into_response()
    })
    .await
}

/// What a request says.
pub struct Asked {
    encoding: Encoding,
    keep: Option<usize>,
    add_special: bool,
    priority: i32,
    cache_salt: Option<String>,
    prompts: Vec<Input>,
}

impl Asked {
    /// Reads the fields.
    pub fn read(work: &Work, fields: &Fields<'_>) -> Result<Asked, ApiError> {
        work.check_model(fields)?;
        user(fields)?;
        let description = "float, the default, or base64: little-endian float32.";
        let encoding = match fields.word("encoding_format", &["float", "base64"], description)? {
            Some("base64") => Encoding::Base64,
            _ => Encoding::Float,
        };
        let width = work.engine.info().hidden_size;
        if let Some(asked) = fields.count("dimensions", (1, usize::MAX), "Only the model's own width.")?
            && asked != width
        {
            let expected = format!("{width}, the width of this model: it was not made to be cut");
            return Err(ApiError::wrong("dimensions", &Value::from(asked), expected));
        }
        let keep = match truncation(fields)? {
            Some(-1) => Some(work.context().saturating_sub(1)),
            other => other.and_then(|n| usize::try_from(n).ok()),
        };
        Ok(Asked {
            encoding,
            keep,
            add_special: fields.flag("add_special_tokens", true, "Begin with the tokenizer's special tokens.")?,
            priority: priority(fields)?,
            cache_salt: cache_salt(fields)?,
            prompts: prompts::read(work, fields, "input", "What becomes vectors.")?,
        })
    }
}

fn prepare(work: &Work, fields: &Fields<'_>) -> Result<((Vec<GenerationRequest>, Encoding), Cost), ApiError> {
    let pooling = work.pooling.ok_or_else(|| {
        let advice = "its 1_Pooling/config.json asks for another pooling than last token or mean; start the server with --pooling-type";
        ApiError::unsupported("model", advice)
    })?;
    let Asked { encoding, keep, add_special, priority, cache_salt, prompts } = Asked::read(work, fields)?;
    let width = work.engine.info().hidden_size;
    let least = prompts.iter().map(|input| input.least_tokens(work)).sum();
    let count = prompts.len();
    let cost = |tokens| Cost {
        prompts: count,
        sequences: 1,
        n: 1,
        prompt_tokens: tokens,
        // A vector, and its text.
        list_bytes: width * 20,
        ..Cost::default()
    };
    cost(least).check(&work.limits)?;
    let (mut requests, mut tokens) = (Vec::new(), 0);
    for input in prompts {
        let prompt = truncate(input.encode(work, add_special, "input", keep.is_none())?.0, keep);
        check_length(work, prompt.len(), "input")?;
        tokens += prompt.len();
        cost(tokens).check(&work.limits)?;
        let params = GenerationParams::embedding(pooling);
        requests.push(GenerationRequest { prompt, params, priority, cache_salt: cache_salt.clone() });
    }
    Ok(((requests, encoding), cost(tokens)))
}

/// A vector as JSON text.
fn write(vector: &[f32], encoding: Encoding) -> Json {
    match encoding {
        // Through the shortest decimal: 0.1 stays 0.1 and does not get sixteen digits.
        Encoding::Float => {
            let number = |x: &f32| {
                let value = x.to_string().parse().ok().and_then(Number::from_f64).map_or(Value::Null, Value::Number);
                value.to_string()
            };
            Json::text(format!("[{}]", vector.iter().map(number).collect::<Vec<_>>().join(",")))
        }
        Encoding::Base64 => {
            let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            Json::text(format!("{:?}", base64(&bytes)))
        }
    }
}

/// RFC 4648, with padding.
fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |i: usize| u32::from(group.get(i).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for i in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * i)) as usize & 63];
            text.push(if i <= group.len() { char::from(letter) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vector_is_written_in_short_numbers_or_as_its_bytes() {
        let vector = [0.1_f32, -1.0, 3.5e-9];
        assert_eq!(write(&vector, Encoding::Float).write(), "[0.1,-1.0,3.5e-9]");
        // struct.pack("<3f", 0.1, -1.0, 3.5e-9), by Python.
        assert_eq!(write(&vector, Encoding::Base64).write(), "\"zczMPQAAgL+nhHAx\"");
    }

    #[test]
    fn base64_is_that_of_the_rfc() {
        // The vectors of its section 10.
        for (bytes, text) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }
}
