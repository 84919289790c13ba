//! HTTP as other clients, proxies and attackers send it: each request gets a response or a fitting error, and the server keeps
//! running.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use crate::common::Server;

static SERVER: LazyLock<Server> = LazyLock::new(Server::start);

const JSON: &str = "Content-Type: application/json\r\n";
const GOOD: &str = r#"{"prompt": "a", "max_tokens": 2, "temperature": 0}"#;

/// Returns what the server sends for these bytes until it closes the connection.
fn exchange(bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(SERVER.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // The server may respond and close before everything is written.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn post(head: &str, body: impl AsRef<[u8]>) -> String {
    let body = body.as_ref();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{head}Content-Length: {}\r\n\r\n",
        body.len()
    );
    exchange(&[head.as_bytes(), body].concat())
}

fn chunked(pieces: &str) -> String {
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
    exchange(format!("{head}{pieces}").as_bytes())
}

fn request(line: &str) -> String {
    exchange(format!("{line}\r\nHost: localhost\r\nConnection: close\r\n\r\n").as_bytes())
}

/// Statuses of all responses.
fn statuses(answer: &str) -> Vec<u16> {
    let heads = answer.split("HTTP/1.").skip(1);
    heads.filter_map(|head| head.get(2..5)?.parse().ok()).collect()
}

#[test]
fn every_form_of_a_good_request_is_answered() {
    let one_by_one: String = GOOD.chars().map(|c| format!("1\r\n{c}\r\n")).collect();
    let bom = [b"\xef\xbb\xbf", GOOD.as_bytes()].concat();
    for (what, answer) in [
        ("plain", post(JSON, GOOD)),
        ("charset", post("content-type: Application/JSON ; charset=\"UTF-8\"\r\n", GOOD)),
        ("a byte order mark", post(JSON, bom)),
        ("identity", post("Content-Type: application/json\r\nContent-Encoding: identity\r\n", GOOD)),
        ("space around", post(JSON, format!(" \r\n\t{GOOD}\n "))),
        ("a field twice", post(JSON, r#"{"prompt": "a", "max_tokens": 9, "max_tokens": 2}"#)),
        ("a NUL as an escape", post(JSON, r#"{"prompt": "a\u0000b", "max_tokens": 2}"#)),
        ("chunks of one byte", chunked(&format!("{one_by_one}0\r\n\r\n"))),
        ("extensions and trailers", chunked(&format!("{:X};a=b\r\n{GOOD}\r\n0\r\nX-Sum: 1\r\n\r\n", GOOD.len()))),
        ("an absolute target", request("GET http://localhost/v1/models HTTP/1.1")),
        ("a query", request("GET /v1/models?limit=1&after=x HTTP/1.1")),
        ("an escaped name", request("GET /v1/models/quire%2Ddemo HTTP/1.1")),
        ("HEAD", request("HEAD /v1/models HTTP/1.1")),
        ("HTTP/1.0", exchange(b"GET /v1/models HTTP/1.0\r\n\r\n")),
        ("large headers", request(&format!("GET /health HTTP/1.1\r\nX-Large: {}", "a".repeat(30_000)))),
    ] {
        assert_eq!(statuses(&answer), [200], "{what}: {answer}");
    }
    let expects = post("Content-Type: application/json\r\nExpect: 100-continue\r\n", GOOD);
    assert_eq!(statuses(&expects), [100, 200]);
    let one = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: {}\r\n\r\n{GOOD}",
        GOOD.len()
    );
    let last = "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    assert_eq!(statuses(&exchange(format!("{one}{one}{one}{last}").as_bytes())), [200; 4], "pipelined");
    // HTTP/1.0 has no chunks: the stream ends with the connection.
    let stream = r#"{"prompt": "a", "max_tokens": 2, "stream": true}"#;
    let old = format!("POST /v1/completions HTTP/1.0\r\n{JSON}Content-Length: {}\r\n\r\n{stream}", stream.len());
    let answer = exchange(old.as_bytes());
    assert!(answer.ends_with("data: [DONE]\n\n") && !answer.contains("chunked"), "{answer}");
}

#[test]
fn a_client_whose_body_arrives_after_the_refusal_can_send_all_of_it_and_reads_the_refusal() {
    const BODY: usize = 100_000;
    let mut stream = TcpStream::connect(SERVER.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n";
    stream.write_all(format!("{head}Content-Length: {BODY}\r\n\r\n").as_bytes()).unwrap();
    stream.peek(&mut [0]).unwrap();
    // Each write would see the reset that answers the one before.
    for part in [0; BODY].chunks(BODY / 4) {
        std::thread::sleep(Duration::from_millis(30));
        stream.write_all(part).unwrap();
    }
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert_eq!(statuses(&answer), [415], "{answer}");
}

#[test]
fn every_form_of_a_bad_request_is_refused_with_the_error_object() {
    let deep = |open: &str, close: &str| {
        format!("{{\"prompt\": \"a\", \"x\": {}{}}}", open.repeat(100_000), close.repeat(100_000))
    };
    let field = |literal: &str| post(JSON, format!(r#"{{"prompt": "a", "max_tokens": {literal}}}"#));
    for (what, status, answer) in [
        ("a form", 415, post("Content-Type: application/x-www-form-urlencoded\r\n", "prompt=a")),
        ("a file", 415, post("Content-Type: multipart/form-data; boundary=x\r\n", "--x--")),
        ("text", 415, post("Content-Type: text/plain\r\n", GOOD)),
        ("no content type", 415, post("", GOOD)),
        ("gzip", 415, post("Content-Type: application/json\r\nContent-Encoding: gzip\r\n", b"\x1f\x8b\x08\x00")),
        ("UTF-16", 400, post(JSON, b"\xff\xfe{\x00}\x00")),
        ("bytes that are no UTF-8", 400, post(JSON, b"{\"prompt\": \"\xc3\x28\"}")),
        ("a NUL as it is", 400, post(JSON, b"{\"prompt\": \"a\0b\"}")),
        ("half a surrogate pair", 400, post(JSON, r#"{"prompt": "\ud800"}"#)),
        ("the other half", 400, post(JSON, r#"{"prompt": "\udc00 x"}"#)),
        ("two values", 400, post(JSON, format!("{GOOD}{GOOD}"))),
        ("a comment", 400, post(JSON, format!("/* x */{GOOD}"))),
        ("lists in lists", 400, post(JSON, deep("[", "]"))),
        ("objects in objects", 400, post(JSON, deep("{\"a\":", "}"))),
        ("1e400", 400, field("1e400")),
        ("a leading zero", 400, field("02")),
        ("hexadecimal", 400, field("0x2")),
        ("a plus", 400, field("+2")),
        ("a half", 400, field("2.5")),
        ("1e19", 400, field("1e19")),
        ("text for a number", 400, field("\"2\"")),
        ("a boolean for a number", 400, field("true")),
        ("a broken chunk", 400, chunked(&format!("ZZ\r\n{GOOD}\r\n0\r\n\r\n"))),
        ("GET", 405, request("GET /v1/completions HTTP/1.1")),
        ("an unknown method", 405, request("BREW /v1/completions HTTP/1.1")),
        ("OPTIONS", 405, request("OPTIONS /v1/models HTTP/1.1")),
        ("a slash too many", 404, request("GET /v1/models/ HTTP/1.1")),
        ("two slashes", 404, request("GET //v1/models HTTP/1.1")),
        ("a way up", 404, request("GET /v1/../etc/passwd HTTP/1.1")),
        ("no path", 404, request("OPTIONS * HTTP/1.1")),
    ] {
        assert_eq!(statuses(&answer), [status], "{what}: {answer}");
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let error: serde_json::Value = serde_json::from_str(body).unwrap_or_else(|_| panic!("{what}: {body}"));
        assert_eq!(error["error"].as_object().unwrap().len(), 4, "{what}: {body}");
        assert_eq!(status == 405, head.to_ascii_lowercase().contains("\r\nallow: "), "{what}: {head}");
    }
}

/// Checks the error object and returns the status.
fn refusal(what: &str, answer: &str) -> u16 {
    let [status] = statuses(answer)[..] else { panic!("{what}: {answer}") };
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.to_ascii_lowercase().contains("content-type: application/json"), "{what}: {head}");
    let error: serde_json::Value = serde_json::from_str(body).unwrap_or_else(|_| panic!("{what}: {body}"));
    assert_eq!(error["error"].as_object().unwrap().len(), 4, "{what}: {body}");
    status
}

#[test]
fn bytes_that_are_not_http_get_the_error_object() {
    let long = format!("GET /{} HTTP/1.1\r\nHost: localhost\r\n\r\n", "a".repeat(70_000));
    let huge = format!("GET /health HTTP/1.1\r\nHost: localhost\r\nX-Huge: {}\r\n\r\n", "a".repeat(2 << 20));
    let many = format!("GET /health HTTP/1.1\r\nHost: localhost\r\n{}\r\n", "X-Many: a\r\n".repeat(500));
    let after = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nno request\r\n\r\n";
    for (what, status, bytes) in [
        ("TLS", 400, &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..]),
        ("a bad version", 400, b"GET / HTTP/9.9\r\n\r\n"),
        ("no version", 400, b"GET /health\r\n\r\n"),
        ("a bad method", 400, b"G@T / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        ("a NUL in a header", 400, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n"),
        ("a space before the colon", 400, b"GET / HTTP/1.1\r\nHost: localhost\r\nX : a\r\n\r\n"),
        ("a folded header", 400, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n"),
        ("no host", 400, b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"),
        ("two hosts", 400, b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"),
        (
            "two lengths",
            400,
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        ),
        ("a negative length", 400, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n"),
        (
            "chunked before another coding",
            400,
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked, gzip\r\n\r\n",
        ),
        ("chunks in HTTP/1.0", 400, b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        ("HTTP/2", 505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        ("a long target", 414, long.as_bytes()),
        ("huge headers", 431, huge.as_bytes()),
        ("many headers", 431, many.as_bytes()),
    ] {
        assert_eq!(refusal(what, &exchange(bytes)), status, "{what}");
    }
    let half_body = format!("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: 50\r\n\r\n{{");
    for (what, bytes) in [("half a head", "GET /health HTTP/1.1\r\nHost:"), ("half a body", half_body.as_str())] {
        assert_eq!(refusal(what, &half_closed(bytes.as_bytes())), 400, "{what}");
    }
    assert_eq!(half_closed(b"\r\n\r\n\r\n"), "", "there was no request");
    let answers = exchange(after.as_bytes());
    assert_eq!(statuses(&answers), [200, 400], "{answers}");
    refusal("after a valid request", &answers[answers.rfind("HTTP/1.1 ").unwrap()..]);
    assert_eq!(statuses(&request("GET /health HTTP/1.1")), [200]);
}

/// Returns what a client receives that closes its sending side after these bytes.
fn half_closed(bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(SERVER.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn a_connection_ends_with_its_last_answer_whatever_else_the_client_offered() {
    let took = |headers: &str| {
        let start = Instant::now();
        assert_eq!(statuses(&request(&format!("GET /health HTTP/1.1\r\n{headers}X-Last: 1"))), [200], "{headers}");
        start.elapsed()
    };
    for headers in ["", "Upgrade: websocket\r\n", "Connection: Upgrade\r\nUpgrade: h2c\r\n"] {
        // The best of several: the machine may be busy. A connection that waits for its client takes a second.
        let best = (0..3).map(|_| took(headers)).min().unwrap();
        assert!(best < Duration::from_millis(500), "{headers}: {best:?}");
    }
}

#[test]
fn connections_are_kept_alive_as_each_http_version_defines() {
    let get = |version: &str, more: &str| format!("GET /health HTTP/1.{version}\r\nHost: localhost\r\n{more}\r\n");
    for (what, answered, bytes) in [
        ("1.0 ends", 1, get("0", "") + &get("0", "")),
        ("1.0 is kept where it asks", 2, get("0", "Connection: keep-alive\r\n") + &get("0", "")),
        ("1.1 is kept", 3, get("1", "") + &get("1", "") + &get("1", "Connection: close\r\n")),
        ("1.1 ends where it asks", 1, get("1", "Connection: Close\r\n") + &get("1", "")),
    ] {
        assert_eq!(statuses(&exchange(bytes.as_bytes())).len(), answered, "{what}");
    }
}

#[test]
fn a_content_length_next_to_chunks_is_ignored() {
    // RFC 9112, section 6.3: the coding wins in either order; what a proxy may take for a second request is body.
    for lengths in [["Content-Length: 3\r\n", ""], ["", "Content-Length: 3\r\n"]] {
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{JSON}{}Transfer-Encoding: chunked\r\n{}\r\n",
            lengths[0], lengths[1]
        );
        let answer = exchange(format!("{head}{:x}\r\n{GOOD}\r\n0\r\n\r\n", GOOD.len()).as_bytes());
        assert_eq!(statuses(&answer), [200], "{answer}");
    }
}
