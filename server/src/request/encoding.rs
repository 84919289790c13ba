//! How a response has its vectors: fields of vLLM's embeddings.

use super::fields::Fields;
use crate::http::ApiError;

/// Most vectors of a response whose sizes are in a header: many clients accept no header of more than 64 KiB.
const MOST_IN_HEADER: usize = 400;

/// Where the numbers are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// Lists of numbers in JSON.
    #[default]
    Numbers,
    /// Bytes as text in JSON.
    Base64,
    /// The body is the bytes of all vectors. With `described`, a header says where each is.
    Bytes {
        /// Whether there is a header.
        described: bool,
    },
}

/// How bytes have a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Number {
    /// IEEE single precision.
    #[default]
    Float32,
    /// IEEE half precision.
    Float16,
    /// The upper half of single precision.
    Bfloat16,
    /// Eight bits, of which four are the exponent.
    E4m3,
    /// Eight bits, of which five are the exponent.
    E5m2,
}

impl Number {
    const NAMES: [(&str, Number); 5] = [
        ("float32", Number::Float32),
        ("float16", Number::Float16),
        ("bfloat16", Number::Bfloat16),
        ("fp8_e4m3", Number::E4m3),
        ("fp8_e5m2", Number::E5m2),
    ];
}

/// The form of the vectors of a response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Encoding {
    /// Where the numbers are.
    pub format: Format,
    /// How bytes have a number.
    pub number: Number,
    /// The first byte of a number is its most significant one.
    pub is_big_endian: bool,
}

impl Encoding {
    /// Reads `encoding_format`, `embed_dtype` and `endianness`.
    pub fn read(fields: &Fields<'_>) -> Result<Encoding, ApiError> {
        let description = "How to return vectors: float (the default): lists of numbers; base64: their bytes as text; bytes: a body of \
                           the bytes of all vectors, with a header `metadata` that says where each is; bytes_only: without the header.";
        let format = fields.word("encoding_format", &["float", "base64", "bytes", "bytes_only"], description)?;
        let format = match format {
            Some("base64") => Format::Base64,
            Some("bytes") => Format::Bytes { described: true },
            Some("bytes_only") => Format::Bytes { described: false },
            _ => Format::Numbers,
        };
        let names = Number::NAMES.map(|(name, _)| name);
        let name = fields.word("embed_dtype", &names, "Numbers of vectors that are bytes; default float32.")?;
        let number = Number::NAMES.into_iter().find(|(known, _)| Some(*known) == name);
        let description = "Order of the bytes of a number; native, the default, is that of the server, little.";
        let endianness = fields.word("endianness", &["native", "little", "big"], description)?;
        let number = number.map_or(Number::default(), |(_, number)| number);
        Ok(Encoding { format, number, is_big_endian: endianness == Some("big") })
    }

    /// Fails if a header cannot describe so many vectors.
    pub fn check(&self, vectors: usize) -> Result<(), ApiError> {
        if self.format == (Format::Bytes { described: true }) && vectors > MOST_IN_HEADER {
            let advice = "send fewer, or set encoding_format to bytes_only, which has no header";
            return Err(ApiError::over("input", vectors, MOST_IN_HEADER, "vectors described in a header", advice));
        }
        Ok(())
    }

    /// The name of the numbers.
    pub fn number_name(&self) -> &'static str {
        Number::NAMES.into_iter().find(|(_, number)| *number == self.number).map_or("", |(name, _)| name)
    }

    /// The name of the order of bytes.
    pub fn order_name(&self) -> &'static str {
        if self.is_big_endian { "big" } else { "little" }
    }
}
