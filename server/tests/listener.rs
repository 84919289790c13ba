//! Sockets that clients connect to: TLS with and without certificates of clients, and Unix sockets.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::{AsyncEngine, EngineConfig};
use server::{App, ClientCertificates, Limits, Listener, ServerOptions, Tls, serve};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::common::{config, slow};

/// A file beside this one.
fn pem(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tls").join(name)
}

fn tls(clients: ClientCertificates) -> Tls {
    Tls::read(&pem("server.pem"), &pem("server.key"), Some(&pem("ca.pem")), clients).unwrap()
}

/// A client that trusts the test's authority, with or without a certificate.
fn connector(has_certificate: bool) -> TlsConnector {
    let certificates = |name: &str| CertificateDer::pem_file_iter(pem(name)).unwrap().map(Result::unwrap);
    let mut roots = RootCertStore::empty();
    certificates("ca.pem").for_each(|certificate| roots.add(certificate).unwrap());
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
    let config = if has_certificate {
        let key = PrivateKeyDer::from_pem_file(pem("client.key")).unwrap();
        builder.with_client_auth_cert(certificates("client.pem").collect(), key).unwrap()
    } else {
        builder.with_no_client_auth()
    };
    TlsConnector::from(Arc::new(config))
}

/// The answer to a request, as far as it comes within a few seconds.
async fn get(mut stream: impl AsyncRead + AsyncWrite + Unpin, path: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    let mut answer = Vec::new();
    let read = async {
        stream.write_all(request.as_bytes()).await?;
        stream.flush().await?;
        stream.read_to_end(&mut answer).await
    };
    let _ = tokio::time::timeout(Duration::from_secs(20), read).await.unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

fn run<F: Future>(test: F) -> F::Output {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap().block_on(test)
}

/// Serves the demo model until the runtime ends.
fn start(config: EngineConfig, listener: Listener, options: ServerOptions) {
    let engine = AsyncEngine::start(config, &|_, _| {}).unwrap();
    tokio::spawn(serve(listener, Arc::new(App::new(engine, options)), std::future::pending(), Duration::ZERO));
}

#[test]
fn requests_come_through_tls_and_what_is_none_is_closed() {
    run(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let limits = Limits { header_timeout: Duration::from_millis(300), max_connections: 1, ..Limits::default() };
        let tls = tls(ClientCertificates::None);
        let options = ServerOptions { limits, ..ServerOptions::default() };
        start(slow(config()), Listener::from(listener).with_tls(Some(&tls)), options);
        let open = async || {
            let stream = TcpStream::connect(address).await.unwrap();
            connector(false).connect("localhost".try_into().unwrap(), stream).await.unwrap()
        };
        let secure = async |path| get(open().await, path).await;
        let models = secure("/v1/models").await;
        assert!(models.starts_with("HTTP/1.1 200 ") && models.contains("quire-demo"), "{models}");
        // Bytes that are no TLS, and a client that says nothing: both are let go.
        assert!(!get(TcpStream::connect(address).await.unwrap(), "/health").await.contains("HTTP/1.1"));
        let (mut silent, since) = (TcpStream::connect(address).await.unwrap(), Instant::now());
        assert_eq!(silent.read(&mut [0; 8]).await.unwrap_or(0), 0);
        assert!(since.elapsed() >= Duration::from_millis(300));
        // Another client does not wait for that.
        let _silent = TcpStream::connect(address).await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(secure("/health").await.starts_with("HTTP/1.1 200 "));
        // Over the limit of connections that are answered, the error comes through TLS too.
        let body = r#"{"prompt": "One", "max_tokens": 900, "ignore_eos": true, "stream": true}"#;
        let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
        let mut running = open().await;
        let request = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
        running.write_all(request.as_bytes()).await.unwrap();
        running.read_exact(&mut [0; 64]).await.unwrap();
        let full = secure("/health").await;
        assert!(full.starts_with("HTTP/1.1 503 ") && full.contains("--max-connections"), "{full}");
    });
}

#[test]
fn certificates_of_clients_are_required_or_optional() {
    run(async {
        for (clients, without) in [(ClientCertificates::Required, false), (ClientCertificates::Optional, true)] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let listener = Listener::from(listener).with_tls(Some(&tls(clients)));
            let loading = tokio::spawn(server::refuse_while_loading(listener));
            for (has_certificate, is_answered) in [(true, true), (false, without)] {
                let stream = TcpStream::connect(address).await.unwrap();
                let stream = connector(has_certificate).connect("localhost".try_into().unwrap(), stream).await;
                // With TLS 1.3 a client learns that it is refused when it reads.
                let answer = get(stream.unwrap(), "/health").await;
                assert_eq!(answer.starts_with("HTTP/1.1 503 "), is_answered, "{clients:?} {has_certificate}: {answer}");
            }
            loading.abort();
        }
    });
}

#[test]
fn a_unix_socket_serves_with_and_without_the_prefix_of_a_proxy() {
    run(async {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("quire.sock");
        let options = ServerOptions { root_path: Some("/llm".into()), ..ServerOptions::default() };
        start(config(), UnixListener::bind(&path).unwrap().into(), options);
        let ask = async |target| get(UnixStream::connect(&path).await.unwrap(), target).await;
        for target in ["/v1/models", "/llm/v1/models", "/llm/health"] {
            let answer = ask(target).await;
            assert!(answer.starts_with("HTTP/1.1 200 "), "{target}: {answer}");
            assert!(answer.contains("x-request-id"), "{answer}");
        }
        for target in ["/other/v1/models", "/llm/llm/v1/models", "/llm/nothing"] {
            let answer = ask(target).await;
            assert!(answer.starts_with("HTTP/1.1 404 ") && answer.contains("\"error\""), "{target}: {answer}");
        }
        // The URLs of the page are relative to a slash at the end.
        assert!(ask("/llm/").await.starts_with("HTTP/1.1 200 "));
        let page = "/llm HTTP/1.1\r\nAccept: text/html\r\nX-Rest:";
        let answer = ask(page).await;
        assert!(answer.starts_with("HTTP/1.1 307 ") && answer.contains("location: llm/\r\n"), "{answer}");
        assert!(ask("/llm/openapi.json").await.contains(r#""servers":[{"url":"/llm"}]"#));
    });
}

#[test]
fn files_that_are_no_certificates_are_one_line_with_the_flag() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("empty.pem");
    std::fs::write(&empty, "nothing").unwrap();
    let (chain, key, none) = (pem("server.pem"), pem("server.key"), ClientCertificates::None);
    let required = ClientCertificates::Required;
    for (chain, key, authorities, clients, part) in [
        (&empty, &key, None, none, "--ssl-certfile"),
        (&chain, &empty, None, none, "--ssl-keyfile"),
        (&chain, &pem("client.key"), None, none, "expected the key of"),
        (&folder.path().join("no"), &key, None, none, "No such file"),
        (&chain, &key, None, required, "expected --ssl-ca-certs too"),
        (&chain, &key, Some(&empty), required, "--ssl-ca-certs"),
    ] {
        let error = Tls::read(chain, key, authorities.map(PathBuf::as_path), clients).unwrap_err();
        assert!(error.contains(part) && error.lines().count() == 1, "{error}");
    }
}
