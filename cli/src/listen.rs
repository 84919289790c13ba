//! Where `quire serve` listens: an address, or a Unix socket, with or without TLS.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use clap::Args;
use server::{ACCESS_AND_LIMITS, ClientCertificates, Listener, Tls};

use super::error::CliError;
use super::values;

/// Flags of the socket.
#[derive(Debug, Args)]
pub struct ListenArgs {
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 selects a free one
    #[arg(long, default_value_t = 8000, value_parser = values::whole::<u16>)]
    pub port: u16,
    /// Unix socket to listen on, instead of --host and --port
    ///
    /// It is a new file, or a socket that no program listens on. Who may open the file may use the server.
    #[arg(long, value_name = "FILE")]
    pub uds: Option<PathBuf>,
    /// Speak TLS with this certificate: a file in PEM, with the certificates of its issuers behind it
    ///
    /// The files of TLS are read once, at the start.
    #[arg(long, value_name = "FILE", help_heading = ACCESS_AND_LIMITS)]
    pub ssl_certfile: Option<PathBuf>,
    /// Private key of the certificate, in PEM [default: --ssl-certfile]
    #[arg(long, value_name = "FILE", requires = "ssl_certfile", help_heading = ACCESS_AND_LIMITS)]
    pub ssl_keyfile: Option<PathBuf>,
    /// Certificates of the authorities that issue those of clients, in PEM
    #[arg(long, value_name = "FILE", requires = "ssl_certfile", help_heading = ACCESS_AND_LIMITS)]
    pub ssl_ca_certs: Option<PathBuf>,
    /// Certificates of clients: 0 asks for none, 1 checks one if there is one, 2 requires one [default: 0]
    #[arg(long, value_name = "N", value_parser = client_certificates, help_heading = ACCESS_AND_LIMITS)]
    pub ssl_cert_reqs: Option<ClientCertificates>,
}

fn client_certificates(text: &str) -> Result<ClientCertificates, String> {
    match text {
        "0" => Ok(ClientCertificates::None),
        "1" => Ok(ClientCertificates::Optional),
        "2" => Ok(ClientCertificates::Required),
        _ => Err("expected 0, 1 or 2".to_string()),
    }
}

impl ListenArgs {
    /// Reads the certificates and binds the socket.
    pub fn bind(&self) -> Result<Bound, CliError> {
        let clients = self.ssl_cert_reqs.unwrap_or_default();
        let tls = match &self.ssl_certfile {
            None if clients != ClientCertificates::None => {
                let expected = "expected --ssl-certfile too: certificates of clients are part of TLS";
                return Err(CliError::Usage(format!("--ssl-cert-reqs: found it alone, {expected}")));
            }
            None => None,
            Some(chain) => {
                let key = self.ssl_keyfile.as_deref().unwrap_or(chain);
                Some(Tls::read(chain, key, self.ssl_ca_certs.as_deref(), clients).map_err(CliError::Usage)?)
            }
        };
        let socket = match &self.uds {
            Some(path) => Socket::Unix(bind_unix(path)?, Removed(path.clone())),
            None => {
                let bind = || {
                    let listener = TcpListener::bind((self.host.as_str(), self.port))?;
                    listener.set_nonblocking(true)?;
                    Ok(listener)
                };
                let failed = |source| CliError::Bind { host: self.host.clone(), port: self.port, source };
                Socket::Tcp(bind().map_err(failed)?)
            }
        };
        Ok(Bound { socket, tls })
    }

    /// The address as a client writes it, and what `curl` needs before it.
    pub fn url(&self, bound: &Bound) -> io::Result<(String, String)> {
        let scheme = if bound.tls.is_some() { "https" } else { "http" };
        if let Some(path) = &self.uds {
            return Ok((format!("{scheme}://localhost"), format!("--unix-socket {} ", path.display())));
        }
        let host = if ["0.0.0.0", "::"].contains(&self.host.as_str()) { "127.0.0.1" } else { self.host.as_str() };
        let host = if host.contains(':') { format!("[{host}]") } else { host.to_string() };
        let port = bound.address()?.map_or(self.port, |address| address.port());
        Ok((format!("{scheme}://{host}:{port}"), String::new()))
    }
}

/// A socket that clients can connect to.
pub struct Bound {
    socket: Socket,
    tls: Option<Tls>,
}

enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener, #[expect(dead_code, reason = "it is dropped with the socket")] Removed),
}

/// A file that is removed at the end.
struct Removed(PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Bound {
    /// The address; `None` of a Unix socket.
    pub fn address(&self) -> io::Result<Option<SocketAddr>> {
        match &self.socket {
            Socket::Tcp(listener) => listener.local_addr().map(Some),
            Socket::Unix(..) => Ok(None),
        }
    }

    /// The socket for the server, in the runtime that is entered. Several share it.
    pub fn listener(&self) -> io::Result<Listener> {
        let listener: Listener = match &self.socket {
            Socket::Tcp(listener) => tokio::net::TcpListener::from_std(listener.try_clone()?)?.into(),
            Socket::Unix(listener, _) => tokio::net::UnixListener::from_std(listener.try_clone()?)?.into(),
        };
        Ok(listener.with_tls(self.tls.as_ref()))
    }
}

/// Binds a Unix socket. A socket that a program left behind is replaced; other files are not.
fn bind_unix(path: &Path) -> Result<UnixListener, CliError> {
    let problem = |message: String| CliError::File { flag: "--uds", path: path.to_owned(), message };
    let refused = UnixStream::connect(path).err().is_some_and(|error| error.kind() == ErrorKind::ConnectionRefused);
    if refused && is_socket(path) {
        std::fs::remove_file(path).map_err(|error| problem(error.to_string()))?;
    }
    let bind = || {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    };
    bind().map_err(|error: io::Error| match error.kind() {
        ErrorKind::AddrInUse => {
            problem("found a file, expected none; remove it, or stop the program that listens on it".to_string())
        }
        _ => problem(format!("{error}; expected a path that can be created")),
    })
}

fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket())
}
