//! Vectors in responses.

use std::fmt::Write;

use axum::http::HeaderValue;
use axum::response::Response;
use base64::prelude::{BASE64_STANDARD, Engine};
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use serde_json::json;
use simd::small_float::{f32_to_bf16, f32_to_e4m3, f32_to_e5m2, f32_to_f16};

use super::envelope::{Envelope, prompt_usage};
use crate::http::{ApiError, json};
use crate::request::encoding::{Encoding, Format, Number};

/// The response that has these vectors. In JSON each is an `object` of this type with the vector as the field `name`. `tokens` are as in
/// [`prompt_usage`].
pub fn respond(
    envelope: &Envelope,
    vectors: impl Iterator<Item = Vec<f32>>,
    encoding: Encoding,
    (object, name): (&'static str, &'static str),
    tokens: (usize, usize),
) -> Result<Response, ApiError> {
    let Format::Bytes { described } = encoding.format else {
        let one = |(index, vector)| Item { index, object, name, vector: Vector::new(vector, encoding) };
        return Ok(envelope.respond(vectors.enumerate().map(one), tokens));
    };
    let (mut body, mut data) = (Vec::new(), Vec::new());
    for (index, vector) in vectors.enumerate() {
        let start = body.len();
        put_bytes(&mut body, &vector, encoding);
        data.push(json!({
            "index": index,
            "embed_dtype": encoding.number_name(),
            "endianness": encoding.order_name(),
            "start": start,
            "end": body.len(),
            "shape": [vector.len()],
        }));
    }
    let mut response = json::respond_with("application/octet-stream", body);
    if described {
        let mut text = Vec::new();
        envelope.write::<()>(&mut text, ("data", data), &[], Some(prompt_usage(tokens)));
        let text = in_ascii(&String::from_utf8_lossy(&text));
        let value = HeaderValue::try_from(text).map_err(|error| ApiError::internal(format!("metadata: {error}")))?;
        response.headers_mut().insert("metadata", value);
    }
    Ok(response)
}

/// JSON without other characters than those of ASCII, as headers need it.
fn in_ascii(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for character in json.chars() {
        if character.is_ascii() {
            text.push(character);
        } else {
            // Writing to a `String` cannot fail.
            character.encode_utf16(&mut [0; 2]).iter().for_each(|unit| _ = write!(text, "\\u{unit:04x}"));
        }
    }
    text
}

/// A vector with its place in the list.
struct Item {
    index: usize,
    object: &'static str,
    name: &'static str,
    vector: Vector,
}

impl Serialize for Item {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("index", &self.index)?;
        map.serialize_entry("object", self.object)?;
        map.serialize_entry(self.name, &self.vector)?;
        map.end()
    }
}

/// A vector in JSON.
#[derive(Serialize)]
#[serde(untagged)]
enum Vector {
    /// Written as the shortest decimals of float32: 0.1 and not 0.10000000149011612.
    Numbers(Vec<f32>),
    /// Its bytes.
    Base64(String),
}

impl Vector {
    fn new(vector: Vec<f32>, encoding: Encoding) -> Vector {
        if encoding.format == Format::Numbers {
            return Vector::Numbers(vector);
        }
        let mut bytes = Vec::new();
        put_bytes(&mut bytes, &vector, encoding);
        Vector::Base64(BASE64_STANDARD.encode(bytes))
    }
}

/// Appends the bytes of a vector.
fn put_bytes(bytes: &mut Vec<u8>, vector: &[f32], encoding: Encoding) {
    let mut put = |little: &[u8]| {
        let at = bytes.len();
        bytes.extend_from_slice(little);
        if encoding.is_big_endian {
            bytes[at..].reverse();
        }
    };
    for &x in vector {
        match encoding.number {
            Number::Float32 => put(&x.to_le_bytes()),
            Number::Float16 => put(&f32_to_f16(x).to_le_bytes()),
            Number::Bfloat16 => put(&f32_to_bf16(x).to_le_bytes()),
            Number::E4m3 => put(&[f32_to_e4m3(x)]),
            Number::E5m2 => put(&[f32_to_e5m2(x)]),
        }
    }
}
