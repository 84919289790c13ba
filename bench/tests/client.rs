//! Addresses of servers.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::Duration;

use bench::client::Server;

#[test]
fn a_url_is_parsed_or_refused() {
    let shown = |url: &str| format!("{:?}", Server::new(url, None).unwrap());
    let found = shown("http://localhost/api/");
    assert_eq!(found, "Server(http://localhost:80)");
    assert_eq!(shown("http://[::1]:8000"), "Server(http://[::1]:8000)");
    assert_eq!(shown("https://a"), "Server(https://a:443)");
    for wrong in ["localhost:8000", "ftp://a", "", "http://"] {
        assert!(Server::new(wrong, None).unwrap_err().contains("expected http://HOST:PORT"), "{wrong}");
    }
}

/// Runs a request against a server that reads it, sends these bytes, and keeps the connection open.
fn ask(reply: &'static [u8]) -> Result<String, String> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let served = std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        let _ = stream.read(&mut [0; 4096]).unwrap();
        stream.write_all(reply).unwrap();
        // Until the client leaves.
        let _ = stream.read(&mut [0; 16]);
    });
    let server = Server::new(&url, None).unwrap().with_patience(Duration::from_millis(200));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let found = runtime.block_on(async { server.send("/v1/models", None).await?.text().await });
    drop(runtime);
    served.join().unwrap();
    found
}

#[test]
fn a_server_that_falls_silent_is_left() {
    for reply in [&b""[..], b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"] {
        let problem = ask(reply).unwrap_err();
        assert!(problem.contains("has sent nothing for 0.2 s"), "{problem}");
    }
}

#[test]
fn what_an_error_repeats_of_a_server_cannot_control_the_terminal() {
    let problem =
        ask(b"HTTP/1.1 500 No\r\ncontent-length: 22\r\n\r\n\x1b]0;evil\x07\x1b[2J\n\xc2\x9b31m ok").unwrap_err();
    assert!(problem.contains("evil") && problem.contains("ok") && !problem.contains(char::is_control), "{problem:?}");
}
