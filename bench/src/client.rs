//! An HTTP/1.1 client without TLS: one connection per request, with the answer read at once or as server-sent events.

use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Uri, header};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The address of a server and the API key for it.
#[derive(Clone, Debug)]
pub struct Server {
    authority: String,
    prefix: String,
    key: Option<String>,
}

impl Server {
    /// The server at `http://HOST[:PORT][/PREFIX]`.
    ///
    /// # Errors
    /// The URL has another form.
    pub fn new(url: &str, key: Option<String>) -> Result<Server, String> {
        let expected = |found: &str| format!("found {found:?}, expected http://HOST:PORT");
        let uri: Uri = url.parse().map_err(|_| expected(url))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err(format!(
                    "found {url:?}, expected http://HOST:PORT: TLS is not supported, use a proxy for it"
                ));
            }
            _ => return Err(expected(url)),
        }
        let host = uri.host().ok_or_else(|| expected(url))?;
        let authority = format!("{host}:{}", uri.port_u16().unwrap_or(80));
        Ok(Server { authority, prefix: uri.path().trim_end_matches('/').to_string(), key })
    }

    /// Sends a request, a POST if it has a body, and returns when the head of the answer has arrived.
    ///
    /// # Errors
    /// The connection fails, or the status is not a success.
    pub async fn send(&self, path: &str, body: Option<String>) -> Result<Answer, String> {
        let problem = |error: &dyn std::fmt::Display| format!("http://{}: {error}", self.authority);
        let connecting = timeout(CONNECT_TIMEOUT, TcpStream::connect(&self.authority)).await;
        let stream = connecting.map_err(|_| problem(&"no connection within 10 s"))?.map_err(|error| problem(&error))?;
        stream.set_nodelay(true).map_err(|error| problem(&error))?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|error| problem(&error))?;
        // The task ends with the answer, or when the answer is dropped.
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
        let answer = Answer { body: response.into_body(), rest: Vec::new() };
        if status.is_success() {
            return Ok(answer);
        }
        let text = answer.text().await.unwrap_or_default();
        Err(problem(&format_args!("{status}: {}", text.chars().take(300).collect::<String>().replace('\n', " "))))
    }
}

fn lost(error: hyper::Error) -> String {
    format!("the connection was lost during the answer: {error}")
}

/// The body of an answer.
pub struct Answer {
    body: Incoming,
    /// Bytes received after the last complete line.
    rest: Vec<u8>,
}

impl Answer {
    /// Receives the next piece of the body; `None` at its end.
    async fn piece(&mut self) -> Result<Option<Bytes>, String> {
        while let Some(frame) = self.body.frame().await {
            if let Ok(data) = frame.map_err(lost)?.into_data() {
                return Ok(Some(data));
            }
        }
        Ok(None)
    }

    /// Receives the whole body.
    ///
    /// # Errors
    /// The connection is lost.
    pub async fn text(self) -> Result<String, String> {
        let all = self.body.collect().await.map_err(lost)?.to_bytes();
        Ok(String::from_utf8_lossy(&all).into_owned())
    }

    /// Receives the data of the next server-sent event; `None` at the end of the body.
    ///
    /// # Errors
    /// The connection is lost.
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
