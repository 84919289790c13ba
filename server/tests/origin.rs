//! Forged requests that a page of another site, or a name that resolves to this machine, can make a browser send.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use crate::common::{Reply, Server, config};
use engine::AsyncEngine;
use serde_json::json;
use server::{Cors, ServerOptions};

const GOOD: &str = r#"{"prompt": "a", "max_tokens": 1}"#;
const JSON: (&str, &str) = ("Content-Type", "application/json");
const EVIL: &str = "https://attacker.example";

/// Every route: its method, and whether it takes a body.
const ROUTES: [(&str, &str, bool); 18] = [
    ("GET", "/", false),
    ("GET", "/page/app.js", false),
    ("GET", "/health", false),
    ("GET", "/version", false),
    ("GET", "/metrics", false),
    ("GET", "/openapi.json", false),
    ("GET", "/v1/models", false),
    ("GET", "/v1/models/quire-demo", false),
    ("GET", "/v1/responses/resp_1", false),
    ("GET", "/quire/state", false),
    ("GET", "/quire/events", false),
    ("POST", "/v1/completions", true),
    ("POST", "/v1/chat/completions", true),
    ("POST", "/v1/responses", true),
    ("POST", "/v1/responses/input_tokens", true),
    ("POST", "/v1/embeddings", true),
    ("POST", "/tokenize", true),
    ("POST", "/detokenize", true),
];

static SERVER: LazyLock<Server> = LazyLock::new(Server::start);

fn with(options: ServerOptions) -> Server {
    Server::with(config(), options, Duration::ZERO)
}

/// Returns the status. A refusal must be an error object that names the flag, and must not grant anything to a page.
fn status(reply: &Reply) -> u16 {
    if reply.status == 403 {
        let error = reply.error();
        let flag = if error["code"] == "forbidden_host" { "--allowed-hosts" } else { "--allowed-origins" };
        assert!(error["message"].as_str().unwrap().contains(flag), "{error}");
        assert_eq!(reply.header("access-control-allow-origin"), "");
    }
    reply.status
}

/// Sends to every route with these headers and every media type that a page can send; each response must be 403. Returns the
/// shortest time of one.
fn is_refused_everywhere(server: &Server, headers: &[(&str, &str)]) -> Duration {
    let mut best = Duration::MAX;
    for (method, path, takes_body) in ROUTES {
        let types: &[Option<&str>] =
            if takes_body { &[None, Some("text/plain"), Some("application/json")] } else { &[None] };
        for media_type in types {
            let body = if takes_body { GOOD } else { "" };
            let headers = [headers, &media_type.map(|value| ("Content-Type", value)).into_iter().collect::<Vec<_>>()];
            let start = Instant::now();
            let reply = server.send(method, path, &headers.concat(), body.as_bytes());
            best = best.min(start.elapsed());
            assert_eq!(status(&reply), 403, "{method} {path} {headers:?}: {}", reply.body);
        }
    }
    best
}

#[test]
fn pages_of_another_site_are_refused_on_every_route() {
    let server = Server::start();
    let address = server.address.to_string();
    let lookalike = format!("http://{address}.attacker.example");
    for origin in [
        EVIL,
        "null",
        "file://",
        "",
        "http://attacker.example:8000",
        "https://localhost.attacker.example",
        "http://localhost@attacker.example",
        "http://attacker.example@localhost",
        "http://192.168.0.9:3000",
        "chrome-extension://abcdef",
        "localhost",
        &lookalike,
    ] {
        is_refused_everywhere(&server, &[("Origin", origin)]);
    }
    is_refused_everywhere(&server, &[("Origin", "http://localhost"), ("Origin", EVIL)]);
    is_refused_everywhere(&server, &[("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "no-cors")]);
    let socket = [("Origin", EVIL), ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13")];
    let best = is_refused_everywhere(&server, &socket);
    assert!(best < Duration::from_millis(500), "the connection stays open after its answer: {best:?}");
    assert!(server.metric("quire:requests_rejected_total") > 0.0);
    assert_eq!(server.metric("vllm:generation_tokens_total"), 0.0, "nothing was computed for them");
}

#[test]
fn names_that_resolve_to_this_machine_are_refused_on_every_route() {
    let server = Server::start();
    let port = server.address.port();
    for host in [
        "attacker.example",
        "ATTACKER.example.",
        "127.0.0.1.attacker.example",
        "localhost.attacker.example",
        "localhost@attacker.example",
        "attacker.example@localhost",
        "192.168.0.9",
        "[2001:db8::1]",
        "[::ffff:192.168.0.9]",
        "[::1",
        "[::1]x",
        "[::2]",
        "[localhost]",
        "::1",
        "localhost..",
        "localhost/",
        "localhost:x",
        "127.1",
        "0x7f.0.0.1",
        "128.0.0.1",
        "0.0.0.1",
        ".",
    ] {
        for host in [host.to_string(), format!("{host}:{port}")] {
            is_refused_everywhere(&server, &[("Host", &host)]);
            // For the browser the page is from the same site.
            is_refused_everywhere(&server, &[("Host", &host), ("Origin", &format!("http://{host}"))]);
        }
    }
    // A name without a dot is refused too, unless it is a POST without an origin, which browsers do not send.
    for headers in [&[("Host", "x"), ("Origin", "http://x")][..], &[("Host", "x"), ("Sec-Fetch-Site", "same-origin")]] {
        is_refused_everywhere(&server, headers);
    }
    for host in ["x", "notlocalhost", "ｌocalhost"] {
        assert_eq!(server.send("GET", "/quire/state", &[("Host", host)], b"").status, 403, "{host}");
    }
    assert_eq!(server.send("POST", "/v1/completions", &[("Host", "x"), JSON], GOOD.as_bytes()).status, 200);
    for target in ["http://attacker.example/v1/models", "http://localhost@attacker.example/quire/state"] {
        assert_eq!(status(&server.send("GET", target, &[], b"")), 403, "{target}");
    }
    assert_eq!(server.send("CONNECT", "attacker.example:443", &[], b"").status, 403);
    let two = [("Host", "localhost"), ("Host", "attacker.example")];
    assert_eq!(server.send("GET", "/v1/models", &two, b"").status, 400, "one request has one host");
}

#[test]
fn pages_of_this_machine_and_clients_without_a_page_are_served() {
    let port = SERVER.address.port();
    for host in [
        "localhost",
        "LocalHost",
        "localhost.",
        "127.0.0.1",
        "127.8.8.8",
        "0.0.0.0",
        "[::]",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "quire.localhost",
    ] {
        for host in [host.to_string(), format!("{host}:{port}")] {
            let origin = format!("http://{host}");
            let own = [("Host", host.as_str()), ("Origin", &origin), JSON];
            for headers in [&own[..], &own[..1]] {
                assert_eq!(SERVER.send("GET", "/v1/models", headers, b"").status, 200, "{host}");
            }
            assert_eq!(SERVER.send("POST", "/v1/completions", &own, GOOD.as_bytes()).status, 200, "{host}");
        }
    }
    let link = [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "document")];
    assert_eq!(SERVER.send("GET", "/", &link, b"").status, 200, "a link on another site may lead here");
    assert_eq!(SERVER.send("POST", "/v1/completions", &link, GOOD.as_bytes()).status, 403, "a form may not");
    let frame = [link[0], link[1], ("Sec-Fetch-Dest", "iframe")];
    assert_eq!(SERVER.send("GET", "/", &frame, b"").status, 403);
    assert_eq!(SERVER.send("GET", "/v1/models", &[("Sec-Fetch-Site", "same-origin")], b"").status, 200);
    // HTTP/1.0 has no Host, and browsers do not use it.
    let mut stream = TcpStream::connect(SERVER.address).unwrap();
    stream.write_all(b"GET /v1/models HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.0 200"), "{answer}");
}

#[test]
fn a_preflight_is_granted_to_allowed_origins_alone() {
    let preflight = |server: &Server, origin: &str| {
        let asks = [
            ("Origin", origin),
            ("Access-Control-Request-Method", "POST"),
            ("Access-Control-Request-Headers", "content-type"),
            ("Access-Control-Request-Private-Network", "true"),
        ];
        let reply = server.send("OPTIONS", "/v1/completions", &asks, b"");
        (status(&reply), reply.header("access-control-allow-origin").to_string())
    };
    assert_eq!(preflight(&SERVER, EVIL), (403, String::new()));
    assert_eq!(preflight(&SERVER, "null"), (403, String::new()));
    let origins = |origins: &[&str]| Cors { origins: origins.iter().map(|&o| o.into()).collect(), ..Cors::default() };
    let server = with(ServerOptions { cors: origins(&["https://friend.example"]), ..ServerOptions::default() });
    assert_eq!(preflight(&server, "https://friend.example"), (204, "https://friend.example".to_string()));
    assert_eq!(preflight(&server, EVIL), (403, String::new()));
    let friend = [("Origin", "https://friend.example"), ("Sec-Fetch-Site", "cross-site"), JSON];
    let reply = server.send("POST", "/v1/completions", &friend, GOOD.as_bytes());
    assert_eq!((reply.status, reply.header("access-control-allow-origin")), (200, "https://friend.example"));
    assert_eq!(status(&server.send("POST", "/v1/completions", &[("Origin", EVIL), JSON], GOOD.as_bytes())), 403);
    // An allowed origin does not allow the host name.
    let rebound = [("Origin", "https://friend.example"), ("Host", "attacker.example"), JSON];
    let reply = server.send("POST", "/v1/completions", &rebound, GOOD.as_bytes());
    assert_eq!((reply.status, &reply.error()["code"]), (403, &json!("forbidden_host")));
    let open = with(ServerOptions { cors: origins(&["*"]), ..ServerOptions::default() });
    assert_eq!(open.send("POST", "/v1/completions", &[("Origin", EVIL), JSON], GOOD.as_bytes()).status, 200);
    assert_eq!(open.send("GET", "/quire/state", &[("Origin", "null")], b"").status, 200);
    assert_eq!(open.send("GET", "/quire/state", &[("Host", "attacker.example")], b"").status, 403);
}

#[test]
fn host_names_that_the_flag_allows_are_served() {
    let hosts = |hosts: &[&str]| hosts.iter().map(|&host| host.to_string()).collect();
    let server = with(ServerOptions { allowed_hosts: hosts(&["Models.example.org"]), ..ServerOptions::default() });
    let ask = |server: &Server, host: &str| status(&server.send("GET", "/v1/models", &[("Host", host)], b""));
    for host in ["models.example.org", "MODELS.example.org.:8443", "localhost"] {
        assert_eq!(ask(&server, host), 200, "{host}");
    }
    for host in ["example.org", "a.models.example.org", "attacker.example"] {
        assert_eq!(ask(&server, host), 403, "{host}");
    }
    let own = [("Host", "models.example.org"), ("Origin", "https://models.example.org"), JSON];
    assert_eq!(server.send("POST", "/v1/completions", &own, GOOD.as_bytes()).status, 200, "its own page");
    let any = with(ServerOptions { allowed_hosts: hosts(&["*"]), ..ServerOptions::default() });
    assert_eq!(ask(&any, "attacker.example"), 200);
    assert_eq!(status(&any.send("GET", "/v1/models", &[("Host", "a.example"), ("Origin", EVIL)], b"")), 403);
}

#[test]
fn a_server_without_keys_that_other_machines_reach_checks_the_host_too() {
    let hosts = |hosts: &[&str]| hosts.iter().map(|&host| host.to_string()).collect();
    let everywhere = |options| Server::on("0.0.0.0:0", AsyncEngine::start(config(), &|_, _| {}).unwrap(), options);
    let open = everywhere(ServerOptions::default());
    let ask = |server: &Server, host: &str| status(&server.send("GET", "/v1/models", &[("Host", host)], b""));
    for host in ["192.168.0.9", "192.168.0.9:8000", "[2001:db8::1]:8000", "localhost", "quire", "quire:8000"] {
        assert_eq!(ask(&open, host), 200, "{host}");
        let own = [("Host", host), ("Origin", &format!("http://{host}")), JSON];
        assert_eq!(open.send("POST", "/v1/completions", &own, GOOD.as_bytes()).status, 200, "{host}");
    }
    for host in ["attacker.example", "attacker.example:8000", "192.168.0.9.attacker.example", "quire@attacker.example"]
    {
        is_refused_everywhere(&open, &[("Host", host)]);
        // For the browser the page is from the same site.
        is_refused_everywhere(&open, &[("Host", host), ("Origin", &format!("http://{host}"))]);
    }
    let named = everywhere(ServerOptions { allowed_hosts: hosts(&["models.example.org"]), ..ServerOptions::default() });
    assert_eq!((ask(&named, "models.example.org"), ask(&named, "attacker.example")), (200, 403));
    let keyed = everywhere(ServerOptions { api_keys: vec!["s3cret".into()], ..ServerOptions::default() });
    let key = [("Host", "models.example.org"), ("Authorization", "Bearer s3cret")];
    assert_eq!(keyed.send("GET", "/v1/models", &key, b"").status, 200);
}

#[test]
fn a_server_with_keys_requires_the_key_instead() {
    let server = with(ServerOptions { api_keys: vec!["s3cret".into()], ..ServerOptions::default() });
    let foreign = [("Host", "models.example.org"), ("Origin", EVIL), ("Authorization", "Bearer s3cret"), JSON];
    assert_eq!(server.send("POST", "/v1/completions", &foreign, GOOD.as_bytes()).status, 200);
    assert_eq!(server.send("POST", "/v1/completions", &foreign[..2], GOOD.as_bytes()).status, 401);
}

#[test]
fn a_body_must_be_declared_as_json_with_keys_and_without() {
    let keyed = with(ServerOptions { api_keys: vec!["s3cret".into()], ..ServerOptions::default() });
    for server in [&*SERVER, &keyed] {
        for (method, path, _) in ROUTES.into_iter().filter(|route| route.2) {
            for media_type in [
                "",
                "text/plain",
                "text/plain; application/json",
                "text/json",
                "application/x-www-form-urlencoded",
                "multipart/form-data; boundary=application/json",
                "application/jsonx",
                "application/json, text/plain",
            ] {
                let headers = [("Authorization", "Bearer s3cret"), ("Content-Type", media_type)];
                let headers = &headers[..if media_type.is_empty() { 1 } else { 2 }];
                let reply = server.send(method, path, headers, GOOD.as_bytes());
                assert_eq!(reply.status, 415, "{path} {media_type}: {}", reply.body);
                assert!(reply.error()["message"].as_str().unwrap().contains("application/json"), "{}", reply.body);
            }
        }
        let key = ("Authorization", "Bearer s3cret");
        for media_type in ["Application/JSON ; charset=utf-8", "application/vnd.api+json; charset=utf-8"] {
            let headers = [key, ("Content-Type", media_type)];
            assert_eq!(server.send("POST", "/v1/completions", &headers, GOOD.as_bytes()).status, 200, "{media_type}");
        }
        let two = [key, JSON, ("Content-Type", "text/plain")];
        assert_eq!(server.send("POST", "/v1/completions", &two, GOOD.as_bytes()).status, 415);
    }
}
