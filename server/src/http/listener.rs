//! Where clients connect: a TCP port or a Unix socket, with or without TLS.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

/// Bytes from and to a client.
pub trait Bytes: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Bytes for T {}

/// A connection of a client, behind TLS if there is any.
pub type Stream = Box<dyn Bytes>;

/// A socket that clients connect to.
pub struct Listener {
    socket: Socket,
    tls: Option<TlsAcceptor>,
}

enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Listener {
        Listener { socket: Socket::Tcp(listener), tls: None }
    }
}

impl From<UnixListener> for Listener {
    fn from(listener: UnixListener) -> Listener {
        Listener { socket: Socket::Unix(listener), tls: None }
    }
}

impl Listener {
    /// Speaks TLS alone.
    #[must_use]
    pub fn with_tls(self, tls: Option<&Tls>) -> Listener {
        Listener { tls: tls.map(|tls| TlsAcceptor::from(tls.0.clone())), ..self }
    }

    /// Whether only this machine can reach it.
    pub(crate) fn is_local(&self) -> bool {
        match &self.socket {
            Socket::Tcp(listener) => {
                listener.local_addr().is_ok_and(|address| address.ip().to_canonical().is_loopback())
            }
            Socket::Unix(_) => true,
        }
    }

    /// Waits for the next client.
    pub(crate) async fn accept(&self) -> io::Result<Accepted> {
        let stream: Stream = match &self.socket {
            Socket::Tcp(listener) => {
                let stream = listener.accept().await?.0;
                // Tokens are small writes that must not wait for each other. Without the option they are only late.
                let _ = stream.set_nodelay(true);
                Box::new(stream)
            }
            Socket::Unix(listener) => Box::new(listener.accept().await?.0),
        };
        Ok(Accepted { stream, tls: self.tls.clone() })
    }
}

/// A client that has connected, and that has not agreed on TLS yet.
pub struct Accepted {
    stream: Stream,
    tls: Option<TlsAcceptor>,
}

impl From<Stream> for Accepted {
    fn from(stream: Stream) -> Accepted {
        Accepted { stream, tls: None }
    }
}

impl Accepted {
    /// The connection, after the handshake of TLS. `None` if that fails or takes longer than `limit`.
    pub async fn open(self, limit: Duration) -> Option<Stream> {
        let Some(tls) = self.tls else { return Some(self.stream) };
        match timeout(limit, tls.accept(self.stream)).await {
            Ok(Ok(stream)) => Some(Box::new(stream)),
            Ok(Err(error)) => {
                tracing::debug!("no TLS with a client: {error}");
                None
            }
            Err(_) => {
                tracing::debug!("no TLS with a client within {} s (--header-timeout)", limit.as_secs_f64());
                None
            }
        }
    }
}

/// Certificates of a server, and of the clients that it accepts.
#[derive(Clone, Debug)]
pub struct Tls(Arc<ServerConfig>);

/// Whether clients need a certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClientCertificates {
    /// None is asked for.
    #[default]
    None,
    /// One is checked if a client has one.
    Optional,
    /// Each client needs one.
    Required,
}

impl Tls {
    /// Reads PEM files: a chain of certificates, the key of the first, and the authorities of the clients' certificates.
    ///
    /// # Errors
    /// One line: the flag, the file, and what is wrong.
    pub fn read(
        chain: &Path,
        key: &Path,
        authorities: Option<&Path>,
        clients: ClientCertificates,
    ) -> Result<Tls, String> {
        let certificates = read_certificates("--ssl-certfile", chain)?;
        let wrong_key = |error: pem::Error| {
            format!("--ssl-keyfile {}: {}, expected an unencrypted private key in PEM", key.display(), said(&error))
        };
        let secret = PrivateKeyDer::from_pem_file(key).map_err(wrong_key)?;
        let provider = Arc::new(ring::default_provider());
        let versions = ServerConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions();
        let builder = versions.map_err(|error| error.to_string())?;
        let builder = match (clients, authorities) {
            (ClientCertificates::None, _) => builder.with_no_client_auth(),
            (_, None) => {
                return Err(
                    "--ssl-cert-reqs: found a demand for certificates of clients, expected --ssl-ca-certs too: \
                            the authorities that may issue them"
                        .to_string(),
                );
            }
            (clients, Some(path)) => {
                let mut roots = RootCertStore::empty();
                for certificate in read_certificates("--ssl-ca-certs", path)? {
                    roots.add(certificate).map_err(|error| format!("--ssl-ca-certs {}: {error}", path.display()))?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                let verifier = if clients == ClientCertificates::Optional {
                    verifier.allow_unauthenticated().build()
                } else {
                    verifier.build()
                };
                builder.with_client_cert_verifier(
                    verifier.map_err(|error| format!("--ssl-ca-certs {}: {error}", path.display()))?,
                )
            }
        };
        let config = builder.with_single_cert(certificates, secret);
        let mut config = config.map_err(|error| {
            format!("--ssl-keyfile {}: {error}; expected the key of {}", key.display(), chain.display())
        })?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Tls(Arc::new(config)))
    }
}

fn read_certificates(flag: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let problem = |found: String| format!("{flag} {}: {found}, expected certificates in PEM", path.display());
    let all = CertificateDer::pem_file_iter(path).map_err(|error| problem(said(&error)))?;
    let all: Vec<_> = all.collect::<Result<_, _>>().map_err(|error| problem(said(&error)))?;
    if all.is_empty() { Err(problem("found none".to_string())) } else { Ok(all) }
}

fn said(error: &pem::Error) -> String {
    match error {
        pem::Error::Io(error) => error.to_string(),
        pem::Error::NoItemsFound => "found none".to_string(),
        other => other.to_string(),
    }
}
