//! TLS: a certificate that is trusted or not, and redirects that would leave it.

use std::net::TcpStream;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use crate::common::server::{Reply, Request, Server, Stream};
use crate::common::{Hub, REPO, fetch, listing, refusal};

/// Self-signed, for 127.0.0.1, from 2020 to 2120. The key is public, so nothing else may trust it.
const CERTIFICATE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tls/certificate.pem");
const KEY: &[u8] = include_bytes!("tls/key.pem");

fn wrap(stream: TcpStream) -> Box<dyn Stream> {
    let certificate = CertificateDer::from_pem_file(CERTIFICATE).unwrap();
    let config = ServerConfig::builder().with_no_client_auth();
    let config = config.with_single_cert(vec![certificate], PrivateKeyDer::from_pem_slice(KEY).unwrap()).unwrap();
    Box::new(StreamOwned::new(ServerConnection::new(Arc::new(config)).unwrap(), stream))
}

fn secure(answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Server {
    Server::wrapped("https", wrap, answer)
}

#[test]
fn a_model_comes_over_tls_from_a_server_with_a_trusted_certificate_only() {
    let plain = Hub::new(&[("config.json", b"{}"), ("tokenizer.json", b"{ }"), ("model.safetensors", b"data")]);
    let server = secure(|request| match request.path.rsplit('/').next().unwrap() {
        "main" => listing(["config.json", "tokenizer.json", "model.safetensors"]),
        name => {
            let contents: &[u8] = match name {
                "config.json" => b"{}",
                "tokenizer.json" => b"{ }",
                _ => b"data",
            };
            Reply::contents(request, contents).with("ETag", &crate::common::git_sha1(contents))
        }
    });
    let endpoint = ("HF_ENDPOINT", server.url());
    let endpoint = (endpoint.0, endpoint.1.as_str());
    let message = refusal(&plain.options_with(&[endpoint]), REPO);
    assert!(message.contains("cannot be reached") && message.to_lowercase().contains("certificate"), "{message}");
    assert_eq!(server.requests().len(), 0, "no request, and no token, before the certificate is checked");
    for variable in ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"] {
        let folder = fetch(&plain.options_with(&[endpoint, (variable, CERTIFICATE)]), REPO).unwrap();
        plain.check(&folder, &["config.json", "model.safetensors", "tokenizer.json"]);
    }
    let empty = plain.home.path().join("empty.pem");
    std::fs::write(&empty, "no certificate").unwrap();
    let message = refusal(&plain.options_with(&[endpoint, ("SSL_CERT_FILE", empty.to_str().unwrap())]), REPO);
    assert!(message.contains("SSL_CERT_FILE") && message.contains("found no certificate"), "{message}");
}

#[test]
fn a_redirect_from_https_to_http_is_refused() {
    let plain = Hub::new(&[("config.json", b"{}")]);
    let target = plain.api.url();
    let server = secure(move |request| {
        Reply::status(302).with("Location", &format!("{target}{}?signature=private", request.path))
    });
    let options = plain.options_with(&[("HF_ENDPOINT", &server.url()), ("SSL_CERT_FILE", CERTIFICATE)]);
    let message = refusal(&options, REPO);
    assert!(message.contains("found a redirect to") && message.contains("as secure"), "{message}");
    assert!(!message.contains("signature") && plain.requests().is_empty(), "{message}");
}
