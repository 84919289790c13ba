//! Vectors in responses.

use base64::prelude::{BASE64_STANDARD, Engine};
use serde::Serialize;

/// A vector in a response.
#[derive(Serialize)]
#[serde(untagged)]
pub enum Vector {
    /// Written as the shortest decimals of float32: 0.1 and not 0.10000000149011612.
    Numbers(Vec<f32>),
    /// Its little-endian bytes.
    Base64(String),
}

impl Vector {
    /// A vector in one of the two forms.
    pub fn new(vector: Vec<f32>, is_base64: bool) -> Vector {
        let bytes = || vector.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        if is_base64 { Vector::Base64(BASE64_STANDARD.encode(bytes())) } else { Vector::Numbers(vector) }
    }
}
