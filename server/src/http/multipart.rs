//! Forms with files (`multipart/form-data`, RFC 7578), read in pieces, so that a file is never whole in memory.

use axum::body::{Body, BodyDataStream};
use axum::http::{HeaderMap, StatusCode, header};
use futures_util::StreamExt;

use super::ApiError;

/// Greatest size of the head of a part.
const MAX_HEAD: usize = 8 << 10;
/// Greatest length of a boundary, and of a name.
const MAX_NAME: usize = 512;

/// A form that is being received.
pub struct Multipart {
    chunks: BodyDataStream,
    /// What was received and not given out.
    buffer: Vec<u8>,
    /// Ends a part.
    delimiter: Vec<u8>,
    seen: usize,
    most: usize,
}

/// The name of a part, and that of its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Name of the field.
    pub name: String,
    /// Name of the file.
    pub file_name: Option<String>,
}

impl Multipart {
    /// A form of at most `most` bytes (`--max-file-bytes`).
    pub fn new(headers: &HeaderMap, body: Body, most: usize) -> Result<Multipart, ApiError> {
        let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let boundary = kind.split_once(';').filter(|(kind, _)| kind.trim().eq_ignore_ascii_case("multipart/form-data"));
        let boundary = boundary.and_then(|(_, parameters)| parameter(parameters, "boundary"));
        let Some(boundary) = boundary.filter(|text| !text.is_empty() && text.len() <= MAX_NAME) else {
            let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
            return Err(ApiError::header(status, "content-type", Some(kind), "multipart/form-data with a boundary"));
        };
        // The first boundary is found like all others.
        let (buffer, delimiter) = (b"\r\n".to_vec(), format!("\r\n--{boundary}").into_bytes());
        Ok(Multipart { chunks: body.into_data_stream(), buffer, delimiter, seen: 0, most })
    }

    /// Skips the rest of a part and begins the next; `None` at the end of the form.
    pub async fn next(&mut self) -> Result<Option<Part>, ApiError> {
        while self.chunk().await?.is_some() {}
        self.buffer.drain(..self.delimiter.len());
        while self.buffer.len() < 2 {
            self.receive().await?;
        }
        if self.buffer.starts_with(b"--") {
            return Ok(None);
        }
        let end = loop {
            if let Some(end) = self.buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
                break end;
            }
            if self.buffer.len() > MAX_HEAD {
                return Err(wrong(&format!("a part whose head has more than {MAX_HEAD} bytes")));
            }
            self.receive().await?;
        };
        let head: Vec<u8> = self.buffer.drain(..end + 4).collect();
        let head = String::from_utf8_lossy(&head);
        let disposition = head.split("\r\n").filter_map(|line| line.split_once(':'));
        let mut disposition = disposition.filter(|(name, _)| name.trim().eq_ignore_ascii_case("content-disposition"));
        let parameters = disposition.next().and_then(|(_, value)| value.split_once(';')).map(|(_, rest)| rest);
        let named = |name| parameters.and_then(|rest| parameter(rest, name)).filter(|text| text.len() <= MAX_NAME);
        let name = named("name").ok_or_else(|| wrong("a part without a name"))?;
        Ok(Some(Part { name, file_name: named("filename") }))
    }

    /// The next piece of the part; `None` at its end.
    pub async fn chunk(&mut self) -> Result<Option<Vec<u8>>, ApiError> {
        loop {
            let end = find(&self.buffer, &self.delimiter);
            if end == Some(0) {
                return Ok(None);
            }
            // What may be the beginning of a delimiter waits for more.
            let kept = self.delimiter.len() - 1;
            let given = end.unwrap_or(self.buffer.len().saturating_sub(kept));
            if given > 0 {
                return Ok(Some(self.buffer.drain(..given).collect()));
            }
            self.receive().await?;
        }
    }

    async fn receive(&mut self) -> Result<(), ApiError> {
        let chunk = self.chunks.next().await.ok_or_else(|| wrong("an end within a part"))?;
        let chunk = chunk
            .map_err(|error| ApiError::bad_request(format!("the body could not be read: {error}; send it again")))?;
        self.seen += chunk.len();
        if self.seen > self.most {
            let message = format!(
                "the body is too large, expected at most {} bytes; send less or raise --max-file-bytes",
                self.most
            );
            return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message));
        }
        self.buffer.extend_from_slice(&chunk);
        Ok(())
    }
}

fn wrong(found: &str) -> ApiError {
    ApiError::bad_request(format!("found {found}, expected multipart/form-data (RFC 7578)"))
}

fn find(buffer: &[u8], delimiter: &[u8]) -> Option<usize> {
    let mut from = 0;
    while let Some(at) = buffer.get(from..)?.iter().position(|byte| *byte == b'\r') {
        let at = from + at;
        if buffer[at..].starts_with(delimiter) {
            return Some(at);
        }
        from = at + 1;
    }
    None
}

/// A parameter of a header, in quotes or not.
fn parameter(mut text: &str, name: &str) -> Option<String> {
    while let Some((found, rest)) = text.split_once('=') {
        let rest = rest.trim_start();
        let (value, rest) = match rest.strip_prefix('"') {
            Some(quoted) => {
                let mut end = None;
                let mut value = String::new();
                let mut escaped = false;
                for (at, c) in quoted.char_indices() {
                    match c {
                        _ if escaped => {
                            escaped = false;
                            value.push(c);
                        }
                        '\\' => escaped = true,
                        '"' => {
                            end = Some(at + 1);
                            break;
                        }
                        c => value.push(c),
                    }
                }
                (value, &quoted[end?..])
            }
            None => {
                let end = rest.find(';').unwrap_or(rest.len());
                (rest[..end].trim().to_string(), &rest[end..])
            }
        };
        if found.trim_matches(|c: char| c == ';' || c.is_whitespace()).eq_ignore_ascii_case(name) {
            return Some(value);
        }
        text = rest;
    }
    None
}

#[cfg(test)]
#[path = "../../tests/unit/multipart.rs"]
mod tests;
