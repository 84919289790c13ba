//! Forms in any pieces.
#![allow(clippy::unwrap_used)]

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderValue, header};
use futures_util::stream;
use proptest::prelude::*;

use super::{Multipart, Part};
use crate::http::ApiError;

fn form(kind: &str, body: &[u8], piece: usize, most: usize) -> Result<Vec<(Part, Vec<u8>)>, ApiError> {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_str(kind).unwrap());
    let pieces: Vec<_> =
        body.chunks(piece).map(|piece| Ok::<_, std::io::Error>(Bytes::copy_from_slice(piece))).collect();
    let body = Body::from_stream(stream::iter(pieces));
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
        let mut form = Multipart::new(&headers, body, most)?;
        let mut parts = Vec::new();
        while let Some(part) = form.next().await? {
            let mut data = Vec::new();
            while let Some(chunk) = form.chunk().await? {
                assert!(!chunk.is_empty());
                data.extend(chunk);
            }
            parts.push((part, data));
        }
        Ok(parts)
    })
}

proptest! {
    #[test]
    fn a_form_in_any_pieces_has_its_parts(
        parts in prop::collection::vec(("[a-z]{1,8}", prop::option::of("[a-z \"\\\\é]{0,8}"), prop::collection::vec(prop::sample::select(b"\r\n-bx\0".to_vec()), 0..60)), 0..4),
        piece in 1..80_usize,
    ) {
        let quoted = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"");
        // What contains the delimiter would end there.
        prop_assume!(parts.iter().all(|(_, _, data)| !data.windows(6).any(|bytes| bytes == b"\r\n--bx")));
        let mut body = Vec::new();
        for (name, file, data) in &parts {
            body.extend(format!("--bx\r\nContent-Type: text/plain\r\ncontent-disposition: form-data; name=\"{name}\"").into_bytes());
            if let Some(file) = file {
                body.extend(format!("; filename=\"{}\"", quoted(file)).into_bytes());
            }
            body.extend(b"\r\n\r\n");
            body.extend(data);
            body.extend(b"\r\n");
        }
        body.extend(b"--bx--\r\n");
        let found = form("multipart/form-data; boundary=\"bx\"", &body, piece, 1 << 20).unwrap();
        let expected: Vec<(Part, Vec<u8>)> = parts.into_iter().map(|(name, file_name, data)| (Part { name, file_name }, data)).collect();
        prop_assert_eq!(found, expected);
        // Cut anywhere before its last boundary, it is refused.
        prop_assert!(form("multipart/form-data; boundary=bx", &body[..body.len() - 5], piece, 1 << 20).is_err());
    }
}

#[test]
fn a_form_costs_bounded_memory() {
    let kind = "multipart/form-data; boundary=b";
    let long = [b"--b\r\nx: ".to_vec(), vec![b'y'; 100_000]].concat();
    assert!(form(kind, &long, 4096, 1 << 20).unwrap_err().message().contains("more than 8192 bytes"));
    let body =
        [b"--b\r\nContent-Disposition: form-data; name=a\r\n\r\n".to_vec(), vec![b'y'; 100_000], b"\r\n--b--".to_vec()]
            .concat();
    assert_eq!(form(kind, &body, 4096, 1 << 20).unwrap()[0].1.len(), 100_000);
    let refused = form(kind, &body, 4096, 50_000).unwrap_err();
    assert_eq!(refused.status(), 413);
    for kind in
        ["application/json", "multipart/form-data", "multipart/form-data; boundary=", "multipart/mixed; boundary=b"]
    {
        assert_eq!(form(kind, &body, 4096, 1 << 20).unwrap_err().status(), 415, "{kind}");
    }
}
