//! HTTP/1.1 as a client: one request on a connection of its own, its body in pieces or whole. No TLS.

use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Uri, header};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Time to connect.
const CONNECT: Duration = Duration::from_secs(10);

/// A server, and the key that it wants.
#[derive(Clone, Debug)]
pub struct Server {
    authority: String,
    prefix: String,
    key: Option<String>,
}

impl Server {
    /// The server at `http://HOST[:PORT][/PREFIX]`.
    pub fn new(url: &str, key: Option<String>) -> Result<Server, String> {
        let expected = |found: &str| format!("found {found:?}, expected http://HOST:PORT");
        let uri: Uri = url.parse().map_err(|_| expected(url))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err(format!("found {url:?}; there is no TLS here, go through a proxy that ends it"));
            }
            _ => return Err(expected(url)),
        }
        let host = uri.host().ok_or_else(|| expected(url))?;
        let authority = format!("{host}:{}", uri.port_u16().unwrap_or(80));
        Ok(Server { authority, prefix: uri.path().trim_end_matches('/').to_string(), key })
    }

    /// Sends a request (a POST if it has a body) and gives the answer as its head has come; what is no 200 is an error.
    pub async fn send(&self, path: &str, body: Option<String>) -> Result<Answer, String> {
        let problem = |error: &dyn std::fmt::Display| format!("http://{}: {error}", self.authority);
        let connecting = timeout(CONNECT, TcpStream::connect(&self.authority)).await;
        let stream = connecting.map_err(|_| problem(&"no connection in time"))?.map_err(|error| problem(&error))?;
        stream.set_nodelay(true).map_err(|error| problem(&error))?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|error| problem(&error))?;
        // Ends with the answer, or when it is dropped.
        tokio::spawn(connection);
        let mut request = Request::builder()
            .method(if body.is_some() { "POST" } else { "GET" })
            .uri(format!("{}{path}", self.prefix))
            .header(header::HOST, &self.authority)
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(key) = &self.key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        let request = request.body(Full::<Bytes>::from(body.unwrap_or_default())).map_err(|error| problem(&error))?;
        let response = sender.send_request(request).await.map_err(|error| problem(&error))?;
        let status = response.status();
        let mut answer = Answer { body: response.into_body(), rest: Vec::new() };
        if status.is_success() {
            return Ok(answer);
        }
        let text = answer.text().await.unwrap_or_default();
        Err(problem(&format_args!("{status}: {}", text.chars().take(300).collect::<String>().replace('\n', " "))))
    }
}

/// An answer, as it comes.
pub struct Answer {
    body: Incoming,
    /// Bytes of a line that is not complete.
    rest: Vec<u8>,
}

impl Answer {
    /// The next piece; `None` at the end.
    async fn piece(&mut self) -> Result<Option<Bytes>, String> {
        while let Some(frame) = self.body.frame().await {
            if let Ok(data) = frame.map_err(|error| format!("the answer broke off: {error}"))?.into_data() {
                return Ok(Some(data));
            }
        }
        Ok(None)
    }

    /// All of it.
    pub async fn text(&mut self) -> Result<String, String> {
        let mut all = Vec::new();
        while let Some(piece) = self.piece().await? {
            all.extend_from_slice(&piece);
        }
        Ok(String::from_utf8_lossy(&all).into_owned())
    }

    /// The data of the next server-sent event; `None` at the end of the answer.
    pub async fn event(&mut self) -> Result<Option<String>, String> {
        loop {
            while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                if let Some(data) = String::from_utf8_lossy(&line).trim_end().strip_prefix("data:") {
                    return Ok(Some(data.trim_start().to_string()));
                }
            }
            match self.piece().await? {
                Some(piece) => self.rest.extend_from_slice(&piece),
                None => return Ok(None),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn an_address_is_taken_apart_or_refused_with_what_would_do() {
        let server = Server::new("http://localhost/api/", None).unwrap();
        assert_eq!((server.authority.as_str(), server.prefix.as_str()), ("localhost:80", "/api"));
        assert_eq!(Server::new("http://[::1]:8000", None).unwrap().authority, "[::1]:8000");
        for wrong in ["localhost:8000", "ftp://a", "https://a", "", "http://"] {
            assert!(Server::new(wrong, None).is_err(), "{wrong}");
        }
    }
}
