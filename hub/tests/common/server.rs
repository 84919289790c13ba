//! A small HTTP server whose answers are a function of the request, and may break.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    pub path: String,
    headers: Vec<(String, String)>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// The first byte of the range that is asked for.
    pub fn from(&self) -> Option<usize> {
        self.header("Range")?.strip_prefix("bytes=")?.split_once('-')?.0.parse().ok()
    }

    /// The end of the range that is asked for.
    fn to(&self) -> Option<usize> {
        self.header("Range")?.rsplit_once('-')?.1.parse().ok().map(|last: usize| last + 1)
    }

    /// Whether this asks for the contents of a large file.
    pub fn is_large(&self) -> bool {
        self.method == "GET" && self.path.starts_with("/large/")
    }
}

#[derive(Clone, Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Sends only this much of the body and closes the connection.
    pub cut: Option<usize>,
    /// Keeps the connection open for so long after a cut.
    pub stall: Duration,
    /// Does not state the length: the end of the connection is the end of the body.
    pub no_length: bool,
}

impl Reply {
    pub fn status(status: u16) -> Reply {
        Reply { status, headers: Vec::new(), body: Vec::new(), cut: None, stall: Duration::ZERO, no_length: false }
    }

    pub fn ok(body: Vec<u8>) -> Reply {
        Reply { body, ..Reply::status(200) }
    }

    /// The whole contents, or the range that is asked for.
    pub fn contents(request: &Request, bytes: &[u8]) -> Reply {
        match request.from() {
            None => Reply::ok(bytes.to_vec()),
            Some(from) if from < bytes.len() => {
                let to = request.to().map_or(bytes.len(), |to| to.min(bytes.len()));
                let range = format!("bytes {from}-{}/{}", to - 1, bytes.len());
                Reply { status: 206, ..Reply::ok(bytes[from..to].to_vec()) }.with("Content-Range", &range)
            }
            Some(_) => Reply::status(416),
        }
    }

    pub fn with(mut self, name: &str, value: &str) -> Reply {
        self.headers.push((name.to_string(), value.to_string()));
        self
    }

    /// Breaks the connection after `len` bytes of the body.
    pub fn cut(self, len: usize) -> Reply {
        Reply { cut: Some(len), ..self }
    }

    /// Sends nothing more after a cut, but keeps the connection open.
    pub fn stalling(self, stall: Duration) -> Reply {
        Reply { stall, ..self }
    }

    pub fn without_length(self) -> Reply {
        Reply { no_length: true, ..self }
    }

    fn write(&self, request: &Request, stream: &mut impl Write) -> std::io::Result<()> {
        let mut head = format!("HTTP/1.1 {} Answer\r\nConnection: close\r\n", self.status);
        if !self.no_length {
            head += &format!("Content-Length: {}\r\n", self.body.len());
        }
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        stream.write_all(format!("{head}\r\n").as_bytes())?;
        if request.method != "HEAD" {
            stream.write_all(&self.body[..self.cut.unwrap_or(self.body.len())])?;
        }
        stream.flush()?;
        std::thread::sleep(self.stall);
        Ok(())
    }
}

/// What a connection carries: bytes as they are, or TLS.
pub trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

/// A server that runs until the test program ends.
pub struct Server {
    scheme: &'static str,
    address: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    pub fn start(answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Server {
        Server::wrapped("http", |stream| Box::new(stream), answer)
    }

    /// A server whose connections carry what `wrap` makes of them.
    pub fn wrapped(
        scheme: &'static str,
        wrap: impl Fn(TcpStream) -> Box<dyn Stream> + Copy + Send + 'static,
        answer: impl Fn(&Request) -> Reply + Send + Sync + 'static,
    ) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Server { scheme, address: listener.local_addr().unwrap(), requests: Arc::default() };
        let (answer, requests) = (Arc::new(answer), server.requests.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (answer, requests) = (answer.clone(), requests.clone());
                std::thread::spawn(move || {
                    let stream = stream.unwrap();
                    stream.set_nodelay(true).unwrap();
                    let mut stream = wrap(stream);
                    let Some(request) = read(&mut stream) else { return };
                    requests.lock().unwrap().push(request.clone());
                    // The client may have gone.
                    let _ = answer(&request).write(&request, &mut stream);
                });
            }
        });
        server
    }

    pub fn url(&self) -> String {
        format!("{}://{}", self.scheme, self.address)
    }

    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

/// A request without a body.
fn read(stream: &mut impl Read) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let first = lines.next()?;
    let mut words = first.split(' ');
    let (method, path) = (words.next()?.to_string(), words.next()?);
    // The query of every listing.
    let path = path.strip_suffix("?blobs=true").unwrap_or(path).to_string();
    let pairs = lines.take_while(|line| !line.is_empty());
    let headers = pairs.filter_map(|line| line.split_once(": ").map(|(name, value)| (name.into(), value.into())));
    Some(Request { method, path, headers: headers.collect() })
}
