//! `quire bench serve` and `quire top` as programs, against a small server of known answers and against the real one.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output};
use std::thread::sleep;
use std::time::Duration;

use crate::common::{Server, config};
use crate::process::Process;
use serde_json::{Value, json};
use server::ServerOptions;

/// Before the first token, and between two.
const FIRST: Duration = Duration::from_millis(40);
const NEXT: Duration = Duration::from_millis(10);

fn quire(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_quire")).args(arguments).env_remove("QUIRE_API_KEY").output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Answers every request with four pieces of text, 40 ms after it came and then 10 ms apart; every third one with a 503.
fn fake(usage: bool) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for (index, stream) in listener.incoming().enumerate() {
            std::thread::spawn(move || answer(stream.unwrap(), index, usage));
        }
    });
    url
}

fn answer(mut stream: TcpStream, index: usize, usage: bool) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let (mut line, mut length) = (String::new(), 0);
    while reader.read_line(&mut line).unwrap() > 2 {
        if let Some(("content-length", value)) = line.to_lowercase().split_once(':') {
            length = value.trim().parse().unwrap();
        }
        line.clear();
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    let body: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!((&body["stream_options"]["include_usage"], &body["ignore_eos"]), (&json!(true), &json!(true)));
    let head = "Connection: close\r\n\r\n";
    if index % 3 == 2 {
        write!(stream, "HTTP/1.1 503 Service Unavailable\r\n{head}{{\"error\": {{\"message\": \"full\"}}}}").unwrap();
        return;
    }
    write!(stream, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{head}").unwrap();
    sleep(FIRST);
    for piece in ["one", " two", " three", " four"] {
        let chunk = json!({"choices": [{"text": piece, "finish_reason": null}]});
        write!(stream, "data: {chunk}\r\n\r\n").unwrap();
        sleep(NEXT);
    }
    if usage {
        let chunk = json!({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 8}});
        write!(stream, "data: {chunk}\n\n").unwrap();
    }
    write!(stream, "data: [DONE]\n\n").unwrap();
}

/// Runs the load and gives its JSON and its table.
fn bench(url: &str, more: &[&str]) -> (Value, String) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("out.json");
    let fixed = ["bench", "serve", "--base-url", url, "--json", file.to_str().unwrap(), "--ignore-eos"];
    let output = quire(&[&fixed[..], more].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    (serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap(), text(&output.stdout))
}

/// Seconds from the first piece of a request to its last.
fn span(request: &Value) -> f64 {
    let at = |index: usize| request["pieces"][index].as_f64().unwrap();
    at(3) - at(0)
}

#[test]
fn an_open_loop_counts_waiting_time_and_failed_requests() {
    let more = ["--model", "m", "--num-prompts", "9", "--request-rate", "200", "--goodput", "ttft:39", "e2el:60000"];
    let (report, table) = bench(&fake(true), &more);
    assert_eq!((&report["completed"], &report["failed"]), (&json!(6), &json!(3)), "{table}");
    assert_eq!((&report["total_input_tokens"], &report["total_output_tokens"]), (&json!(42), &json!(48)));
    assert_eq!(report["request_goodput"], 0.0, "no first token comes before 40 ms");
    let requests = report["requests"].as_array().unwrap();
    assert!(requests.windows(2).all(|pair| pair[0]["meant"].as_f64() <= pair[1]["meant"].as_f64()));
    for request in requests.iter().filter(|request| request["error"].is_null()) {
        let at = |name: &str| request[name].as_f64().unwrap();
        let pieces: Vec<f64> = request["pieces"].as_array().unwrap().iter().map(|p| p.as_f64().unwrap()).collect();
        assert_eq!(pieces.len(), 4);
        assert!(at("meant") <= at("sent") && at("sent") + FIRST.as_secs_f64() <= pieces[0], "{request}");
    }
    // Lower bounds: the server waits this long. How much longer it took depends on the machine.
    assert!(report["p50_ttft_ms"].as_f64().unwrap() >= 40.0 && report["p50_e2el_ms"].as_f64().unwrap() >= 70.0);
    // A client that was held up reads two pieces at once, so the pauses have no least length; the report follows the pieces.
    let spans: Vec<f64> = requests.iter().filter(|request| request["error"].is_null()).map(span).collect();
    let (tpot, want) = (report["mean_tpot_ms"].as_f64().unwrap(), spans.iter().sum::<f64>() / spans.len() as f64 / 7.0);
    assert!((tpot - 1000.0 * want).abs() < 1e-6 * tpot.max(1.0), "a request's time over seven tokens: {tpot}, {want}");
    assert!(
        table.contains("Failed requests                                    3") && table.contains("Request goodput")
    );
}

#[test]
fn without_usage_pieces_are_counted_and_the_report_says_so() {
    let (report, table) = bench(&fake(false), &["--model", "m", "--num-prompts", "2", "--max-concurrency", "1"]);
    assert_eq!((&report["total_output_tokens"], &report["counted_by_pieces"]), (&json!(8), &json!(2)));
    assert!(table.contains("requests counted by pieces, not usage"), "{table}");
    let requests = report["requests"].as_array().unwrap();
    assert!(requests[1]["meant"].as_f64() >= requests[0]["end"].as_f64(), "one at once");
}

#[test]
fn a_real_server_is_measured_through_both_apis_and_with_a_workload_file() {
    let server = Server::start();
    let url = format!("http://{}", server.address);
    let folder = tempfile::tempdir().unwrap();
    let (workload, chart) = (folder.path().join("w.json"), folder.path().join("c.svg"));
    let requests: Vec<Value> =
        (1..6).map(|n| json!({"id": n, "prompt": vec![300 + n; 20], "output_len": 4 * n})).collect();
    std::fs::write(&workload, json!({"name": "w", "requests": requests}).to_string()).unwrap();
    let more = ["--dataset", workload.to_str().unwrap(), "--svg", chart.to_str().unwrap(), "--max-concurrency", "2"];
    let (report, _) = bench(&url, &more);
    assert_eq!((&report["completed"], &report["model_id"]), (&json!(5), &json!("quire-demo")));
    assert_eq!((&report["total_input_tokens"], &report["total_output_tokens"]), (&json!(100), &json!(60)));
    assert!(std::fs::read_to_string(chart).unwrap().contains("quire-demo: 5 requests"));
    let more = ["--endpoint", "chat", "--num-prompts", "3", "--random-output-len", "9", "--random-input-len", "12"];
    let (report, _) = bench(&url, &more);
    assert_eq!((&report["completed"], &report["total_output_tokens"]), (&json!(3), &json!(27)));
}

#[test]
fn an_invalid_flag_or_server_is_one_line() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let closed = format!("http://{closed}");
    for (arguments, expected) in [
        (&["--base-url", "ftp://example.org"][..], "--base-url: found \"ftp://example.org\""),
        (&["--base-url", &closed], "quire: http://127.0.0.1:"),
        (&["--request-rate", "0"], "--request-rate: found 0, expected a number above 0, or inf"),
        (&["--request-rate", "nan"], "--request-rate: found NaN"),
        (&["--burstiness", "-1"], "--burstiness: found -1"),
        (&["--goodput", "fast"], "expected limits in ms"),
        (&["--dataset", "no/such/file"], "--dataset no/such/file: "),
        (&["--dataset-name", "sonnet"], "expected --dataset-path FILE with it"),
        (&["--dataset-path", "x"], "expected sharegpt, sonnet or custom"),
        (&["--backend", "tgi"], "expected vllm, openai"),
        (&["--metric-percentiles", "50,101"], "expected numbers from 0 to 100"),
        (&["--percentile-metrics", "ttft,speed"], "expected some of ttft,tpot,itl,e2el"),
        (&["--header", "a b=c"], "expected NAME=VALUE of a header"),
        (&["--top-p", "0.9"], "--top-p: expected no such flag here: use --extra-body"),
        (&["--extra_body", "[]"], "expected a JSON object"),
    ] {
        let output = quire(&[&["bench", "serve"], arguments].concat());
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(message.contains(expected) && message.lines().count() == 1, "{arguments:?}: {message}");
    }
}

#[test]
fn a_file_that_cannot_be_written_is_an_error_before_any_request_is_sent() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    listener.set_nonblocking(true).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for flag in ["--json", "--svg"] {
        for path in ["/no/such/folder/file", folder.path().to_str().unwrap()] {
            let output = quire(&["bench", "serve", "--base-url", &url, flag, path]);
            let message = text(&output.stderr);
            assert_eq!((output.status.code(), message.lines().count()), (Some(1), 1), "{message}");
            assert!(message.starts_with(&format!("quire: {flag} {path}: ")), "{message}");
            assert!(
                message.ends_with("; expected a file that can be written\n") && output.stdout.is_empty(),
                "{message}"
            );
            assert!(listener.accept().is_err(), "{flag} {path}: the server was called");
        }
    }
}

#[test]
fn top_prints_one_plain_frame_and_sends_its_key() {
    let options = ServerOptions { api_keys: vec!["s3cret".into()], ..ServerOptions::default() };
    let server = Server::with(config(), options, Duration::ZERO);
    let url = format!("http://{}", server.address);
    let key = [("Authorization", "Bearer s3cret"), ("Content-Type", "application/json")];
    let body = json!({"prompt": "Once", "max_tokens": 30, "ignore_eos": true}).to_string();
    assert_eq!(server.send("POST", "/v1/completions", &key, body.as_bytes()).status, 200);
    let output = quire(&["top", &url, "--once", "--api-key", "s3cret"]);
    let frame = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(frame.starts_with("quire-demo  context 1024") && frame.contains("blocks [+"), "{frame}");
    assert!(frame.contains("no requests") && !frame.contains('\u{1b}'), "{frame}");
    let refused = quire(&["top", &url, "--once"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("401 Unauthorized"), "{}", text(&refused.stderr));
}

#[test]
fn the_result_file_has_the_keys_of_vllm() {
    let (folder, url) = (tempfile::tempdir().unwrap(), fake(true));
    let (host, port) = url.strip_prefix("http://").unwrap().split_once(':').unwrap();
    let fixed = ["bench", "serve", "--backend", "vllm", "--host", host, "--port", port, "--model", "org/m"];
    let flags =
        ["--served-model-name", "m", "--tokenizer", "org/m", "--disable-tqdm", "--num-prompts", "6", "--ignore-eos"];
    let saved =
        ["--save-result", "--save-detailed", "--metric_percentiles", "25,99.9", "--percentile-metrics", "ttft,itl"];
    let more = ["--metadata", "gpu=none", "--result-dir", folder.path().to_str().unwrap()];
    let output = quire(&[&fixed[..], &flags, &saved, &more].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("--tokenizer has no effect"), "{}", text(&output.stderr));
    let files: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    let name = files[0].file_name().unwrap().to_str().unwrap();
    assert!(files.len() == 1 && name.starts_with("openai-infqps-m-20") && name.ends_with(".json"), "{files:?}");
    let result: Value = serde_json::from_str(&std::fs::read_to_string(&files[0]).unwrap()).unwrap();
    assert_eq!((&result["completed"], &result["failed"], &result["num_prompts"]), (&json!(4), &json!(2), &json!(6)));
    assert_eq!(
        (&result["request_rate"], &result["gpu"], &result["model_id"]),
        (&json!("inf"), &json!("none"), &json!("m"))
    );
    assert_eq!((&result["total_output_tokens"], &result["tokenizer_id"]), (&json!(32), &json!("org/m")));
    for key in
        ["mean_ttft_ms", "median_ttft_ms", "p25_ttft_ms", "p99.9_ttft_ms", "p99.9_itl_ms", "std_itl_ms", "duration"]
    {
        assert!(result[key].as_f64().is_some(), "{key}: {result}");
    }
    assert!(result["p99_ttft_ms"].is_null() && result["mean_tpot_ms"].is_null());
    for list in ["input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors"] {
        assert_eq!(result[list].as_array().unwrap().len(), 6, "{list}");
    }
    let texts = result["generated_texts"].as_array().unwrap();
    assert_eq!(texts.iter().filter(|text| **text == "one two three four").count(), 4);
    // A second run is a second line.
    let again = ["--append-result", "--result-filename", name];
    assert!(quire(&[&fixed[..], &flags, &more, &again].concat()).status.success());
    let lines = std::fs::read_to_string(&files[0]).unwrap();
    let runs: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(runs.len() == 2 && runs[1]["ttfts"].is_null(), "{lines}");
}

#[test]
fn a_server_with_a_certificate_is_measured_over_tls() {
    let pem = |name: &str| testkit::workspace::root().join("server/tests/tls").join(name).display().to_string();
    let process = Process::start_with(&["--ssl-certfile", &pem("server.pem")], |command| {
        command.args(["--ssl-keyfile", &pem("server.key")]);
    });
    let url = format!("https://localhost:{}", process.address.port());
    let flags = [
        "bench",
        "serve",
        "--backend",
        "openai-chat",
        "--base-url",
        &url,
        "--num-prompts",
        "2",
        "--random-output-len",
        "4",
    ];
    let run = |more: &[&str], authority: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_quire"));
        command.args(flags).args(more).env("SSL_CERT_FILE", pem(authority)).output().unwrap()
    };
    let output = run(&[], "ca.pem");
    assert!(
        output.status.success()
            && text(&output.stdout).contains("Successful requests                                2"),
        "{output:?}"
    );
    assert!(run(&["--insecure"], "client.pem").status.success());
    let refused = text(&run(&[], "client.pem").stderr);
    assert!(refused.contains("https://localhost:") && refused.contains("certificate"), "{refused}");
    process.stop();
}
