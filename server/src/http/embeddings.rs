//! `POST /v1/embeddings`: texts become vectors, by the served model's own hidden states.
//!
//! The prompts run through the engine like any others, in the same steps and with the same prefix cache; they end where
//! others draw their first token.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use engine::{GenerationParams, GenerationRequest};
use serde_json::{Map, Number, Value, json};

use super::app::App;
use super::body;
use super::error::ApiError;
use super::fields::Fields;
use super::options::{cache_salt, check_length, priority, truncate};
use super::prompts;
use super::reply::Envelope;
use super::run::Run;

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
    let (requests, encoding) = body.read(&app, |app, fields| prepare(app, fields)).await?;
    let prompt_tokens: usize = requests.iter().map(|request| request.prompt.len()).sum();
    let envelope = Envelope::new(&app, "embd", "list");
    let answers = Run::submit(&app, requests).await?.collect().await?;
    let vectors: Option<Vec<Vec<f32>>> = answers.into_iter().map(|answer| answer.embedding).collect();
    let vectors = vectors.ok_or_else(|| ApiError::internal("the engine made no embedding"))?;
    // Many numbers take long to write; nobody else should wait for that.
    let written = tokio::task::spawn_blocking(move || {
        let one = |(index, vector): (usize, Vec<f32>)| json!({"object": "embedding", "index": index, "embedding": write(&vector, encoding)});
        let usage = json!({"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens});
        let data = vectors.into_iter().enumerate().map(one).collect();
        Json(envelope.wrap(Map::from_iter([("data".to_string(), data)]), Some(usage))).into_response()
    });
    written.await.map_err(|error| ApiError::internal(format!("writing the answer failed: {error}")))
}

fn prepare(app: &App, fields: &Fields) -> Result<(Vec<GenerationRequest>, Encoding), ApiError> {
    app.check_model(fields)?;
    let pooling = app.pooling.ok_or_else(|| {
        ApiError::unsupported("model", "its 1_Pooling/config.json asks for another pooling than last token or mean; start the server with --pooling-type")
    })?;
    fields.str("user")?;
    let encoding = match fields.str("encoding_format")? {
        None | Some("float") => Encoding::Float,
        Some("base64") => Encoding::Base64,
        Some(other) => return Err(ApiError::wrong("encoding_format", &Value::from(other), "float or base64")),
    };
    let width = app.engine.info().hidden_size;
    if let Some(asked) = fields.count("dimensions", 1, usize::MAX)?
        && asked != width
    {
        let expected = format!("{width}, the width of this model: it was not made to be cut");
        return Err(ApiError::wrong("dimensions", &Value::from(asked), expected));
    }
    let keep = match fields.integer("truncate_prompt_tokens", -1..=i64::MAX)? {
        Some(-1) => Some(app.context().saturating_sub(1)),
        Some(0) => return Err(ApiError::wrong("truncate_prompt_tokens", &Value::from(0), "-1 or at least 1")),
        other => other.and_then(|n| usize::try_from(n).ok()),
    };
    let add_special = fields.bool("add_special_tokens")?.unwrap_or(true);
    let (priority, cache_salt) = (priority(fields)?, cache_salt(fields)?);
    let request = |input: prompts::Input| {
        let prompt = truncate(input.encode(app, add_special, "input")?.0, keep);
        check_length(app, prompt.len(), "input")?;
        let params = GenerationParams::embedding(pooling);
        Ok(GenerationRequest { prompt, params, priority, cache_salt: cache_salt.clone() })
    };
    let requests: Result<Vec<GenerationRequest>, ApiError> =
        prompts::read(app, fields, "input")?.into_iter().map(request).collect();
    Ok((requests?, encoding))
}

fn write(vector: &[f32], encoding: Encoding) -> Value {
    match encoding {
        // Through the shortest decimal: 0.1 stays 0.1 and is not told to sixteen digits.
        Encoding::Float => {
            let number =
                |x: &f32| x.to_string().parse().ok().and_then(Number::from_f64).map_or(Value::Null, Value::Number);
            vector.iter().map(number).collect()
        }
        Encoding::Base64 => {
            let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            base64(&bytes).into()
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
        assert_eq!(write(&vector, Encoding::Float).to_string(), "[0.1,-1.0,3.5e-9]");
        // struct.pack("<3f", 0.1, -1.0, 3.5e-9), by Python.
        assert_eq!(write(&vector, Encoding::Base64), "zczMPQAAgL+nhHAx");
    }

    #[test]
    fn base64_is_that_of_the_rfc() {
        // The vectors of its section 10.
        for (bytes, text) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }
}
