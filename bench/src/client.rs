//! An HTTP/1.1 client, with TLS for https: one connection per request, with the answer read at once or as server-sent events.
//!
//! The server is not trusted: it can neither hold the caller forever nor take much memory, and what errors repeat of it
//! has no control characters.

use std::fmt;
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Uri, header};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::tls;

/// Time limit for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Default time limit for the next bytes of an answer. A request may wait in a queue before its first.
const PATIENCE: Duration = Duration::from_secs(600);

/// Greatest size of an answer that is read as a whole, and of an event.
const MAX_BYTES: usize = 64 << 20;

/// Replaces control characters, such as the escape sequences of a terminal.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// The address of a server, the API key for it, and how long to wait for it.
#[derive(Clone)]
pub struct Server {
    authority: String,
    host: String,
    prefix: String,
    key: Option<String>,
    /// Names and values of further headers.
    headers: Vec<(String, String)>,
    tls: Option<TlsConnector>,
    patience: Duration,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Server({})", self.url())
    }
}

/// Bytes to and from a server.
trait Pipe: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Pipe for T {}

impl Server {
    /// The server at `http://HOST[:PORT][/PREFIX]`, or at `https://…`, whose certificate is checked.
    ///
    /// # Errors
    /// The URL has another form, or the certificates to trust cannot be read.
    pub fn new(url: &str, key: Option<String>) -> Result<Server, String> {
        Server::checked(url, key, true)
    }

    /// Like [`Server::new`]; without `checks`, any certificate is accepted.
    ///
    /// # Errors
    /// As [`Server::new`].
    pub fn checked(url: &str, key: Option<String>, checks: bool) -> Result<Server, String> {
        let expected = |found: &str| format!("found {found:?}, expected http://HOST:PORT or https://HOST:PORT");
        let uri: Uri = url.parse().map_err(|_| expected(url))?;
        let (tls, port) = match uri.scheme_str() {
            Some("http") => (None, 80),
            Some("https") => (Some(tls::connector(checks)?), 443),
            _ => return Err(expected(url)),
        };
        let host = uri.host().ok_or_else(|| expected(url))?;
        let authority = format!("{host}:{}", uri.port_u16().unwrap_or(port));
        let (host, prefix) = (host.trim_matches(['[', ']']).to_string(), uri.path().trim_end_matches('/').to_string());
        Ok(Server { authority, host, prefix, key, headers: Vec::new(), tls, patience: PATIENCE })
    }

    /// Sends these headers with every request.
    #[must_use]
    pub fn with_headers(self, headers: Vec<(String, String)>) -> Server {
        Server { headers, ..self }
    }

    /// The address without a path.
    fn url(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.authority)
    }

    /// A connection, after the handshake of TLS if there is one.
    async fn connect(&self) -> Result<Box<dyn Pipe>, String> {
        let stream = TcpStream::connect(&self.authority).await.map_err(|error| error.to_string())?;
        stream.set_nodelay(true).map_err(|error| error.to_string())?;
        let Some(tls) = &self.tls else { return Ok(Box::new(stream)) };
        let name = ServerName::try_from(self.host.clone()).map_err(|error| error.to_string())?;
        Ok(Box::new(tls.connect(name, stream).await.map_err(|error| error.to_string())?))
    }

    /// Sets the time limit for the head of an answer and for each piece of its body.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Server {
        Server { patience, ..self }
    }

    /// Sends a request, a POST if it has a body, and returns when the head of the answer has arrived.
    ///
    /// # Errors
    /// The connection fails, or the status is not a success.
    pub async fn send(&self, path: &str, body: Option<String>) -> Result<Answer, String> {
        let problem = |error: &dyn fmt::Display| format!("{}: {error}", self.url());
        let connecting = timeout(CONNECT_TIMEOUT, self.connect()).await;
        let stream = connecting.map_err(|_| problem(&"no connection within 10 s"))?.map_err(|error| problem(&error))?;
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
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let request = request.body(Full::<Bytes>::from(body.unwrap_or_default())).map_err(|error| problem(&error))?;
        let response = timeout(self.patience, sender.send_request(request)).await;
        let response = response.map_err(|_| problem(&silent(self.patience)))?.map_err(|error| problem(&error))?;
        let status = response.status();
        let answer = Answer { body: response.into_body(), rest: Vec::new(), patience: self.patience };
        if status.is_success() {
            return Ok(answer);
        }
        let text: String = answer.text().await.unwrap_or_default().chars().take(300).collect();
        Err(problem(&format_args!("{status}: {}", printable(&text))))
    }
}

fn lost(error: hyper::Error) -> String {
    format!("the connection was lost during the answer: {error}")
}

fn silent(patience: Duration) -> String {
    format!("the server has sent nothing for {} s", patience.as_secs_f64())
}

fn too_large() -> String {
    format!("found an answer of more than {} MiB, expected less", MAX_BYTES >> 20)
}

/// The body of an answer.
pub struct Answer {
    body: Incoming,
    /// Bytes received after the last complete line.
    rest: Vec<u8>,
    patience: Duration,
}

impl Answer {
    /// Receives the next piece of the body; `None` at its end.
    async fn piece(&mut self) -> Result<Option<Bytes>, String> {
        while let Some(frame) = timeout(self.patience, self.body.frame()).await.map_err(|_| silent(self.patience))? {
            if let Ok(data) = frame.map_err(lost)?.into_data() {
                return Ok(Some(data));
            }
        }
        Ok(None)
    }

    /// Receives the whole body.
    ///
    /// # Errors
    /// The connection is lost, the server sends nothing for too long, or the answer is too large.
    pub async fn text(mut self) -> Result<String, String> {
        let mut all = Vec::new();
        while let Some(piece) = self.piece().await? {
            all.extend_from_slice(&piece);
            if all.len() > MAX_BYTES {
                return Err(too_large());
            }
        }
        Ok(String::from_utf8_lossy(&all).into_owned())
    }

    /// Receives the data of the next server-sent event; `None` at the end of the body.
    ///
    /// # Errors
    /// The connection is lost, the server sends nothing for too long, or the event is too large.
    pub async fn event(&mut self) -> Result<Option<String>, String> {
        loop {
            while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                if let Some(data) = String::from_utf8_lossy(&line).trim_end().strip_prefix("data:") {
                    return Ok(Some(data.trim_start().to_string()));
                }
            }
            match self.piece().await? {
                Some(piece) if self.rest.len() + piece.len() > MAX_BYTES => return Err(too_large()),
                Some(piece) => self.rest.extend_from_slice(&piece),
                None => return Ok(None),
            }
        }
    }
}
