//! The binary from outside: results on standard output alone, one line for what is wrong, no panic.
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use serde_json::Value;

const SMALL: [&str; 4] = ["--kv-cache-memory-bytes", "64M", "--threads", "1"];

fn quire(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_quire"));
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(arguments: &[&str]) -> Output {
    quire(arguments).output().unwrap()
}

fn stdout(output: &Output) -> &str {
    assert!(output.status.success(), "{output:?}");
    std::str::from_utf8(&output.stdout).unwrap()
}

/// The program ends with code 1, nothing on standard output, and one line that holds all of `parts`.
fn assert_refuses(output: &Output, parts: &[&str]) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = stderr.lines().collect();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(output.stdout.is_empty());
    assert!(lines.len() == 1 && lines[0].starts_with("quire: "), "{stderr}");
    for part in parts {
        assert!(lines[0].contains(part), "{part:?} is not in {stderr}");
    }
}

fn file(name: &str, content: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, content).unwrap();
    (folder, path.to_str().unwrap().to_string())
}

#[test]
fn an_invalid_flag_is_one_line_with_the_flag_and_what_was_found() {
    for (arguments, parts) in [
        (&["serve", "--dtype", "float16"][..], &["--dtype", "float16", "float32"][..]),
        (&["serve", "--dtype", "int4"], &["--dtype", "int4", "bfloat16"]),
        (&["serve", "--tensor-parallel-size", "0"], &["--tensor-parallel-size", "'0'", "from 1"]),
        (&["serve", "--distributed-executor-backend", "ray"], &["'ray'", "threads or mpi"]),
        (&["serve", "--tp-reduce", "ring"], &["'ring'", "gather or sum"]),
        (&["serve", "--kv-cache-dtype", "fp4"], &["--kv-cache-dtype", "fp4", "auto", "fp8_e5m2 or int8"]),
        (&["serve", "--kv-cache-memory-bytes", "lots"], &["--kv-cache-memory-bytes", "lots", "512M"]),
        (&["serve", "--kv-cache-memory-bytes=0"], &["--kv-cache-memory-bytes", "above 0"]),
        (&["serve", "--port", "99999"], &["--port", "99999", "65535"]),
        (&["serve", "--api-key", ""], &["--api-key"]),
        (&["serve", "--api-key", " k"], &["--api-key"]),
        (&["serve", "--served-model-name", ""], &["--served-model-name"]),
        (&["plan", "--threads", "0"], &["--threads", "from 1 to "]),
        (&["plan", "--threads", "many"], &["--threads", "'many'", "from 1 to "]),
        (&["plan", "--threads", "1025"], &["--threads", "the cores that this process may use"]),
        (&["bench", "latency", "--batch-size", "0"], &["--batch-size", "from 1"]),
        (&["plan", "--quantization", "q2"], &["--quantization", "q8 or q4"]),
        (&["plan", "--threads=-1"], &["--threads", "-1", "expected a whole number"]),
        (&["plan", "--threads", "-1"], &["--threads", "-1", "expected a whole number"]),
        (&["generate", "-p", "a", "--temperature", "-1"], &["--temperature", "-1"]),
        (&["plan", "-1"], &["-1"]),
        (&["plan", "--max-num-seqs=1.5"], &["--max-num-seqs", "1.5", "expected a whole number"]),
        (&["serve", "--scheduling-policy", "fair"], &["--scheduling-policy", "fair", "fcfs"]),
        (&["generate", "-p", "a", "--block-size", "12"], &["--block-size", "12"]),
        (&["generate", "-p", "a", "--max-model-len", "99999"], &["--max-model-len", "99999", "1024"]),
        (&["generate", "-p", "a", "--device", "tpu"], &["tpu"]),
        (&["generate", "-p", "a", "--frobnicate"], &["--frobnicate"]),
        (&["generate"], &["-p", "--input"]),
        (&["generate", "/no/such/model", "-p", "a"], &["/no/such/model"]),
        (&["generate", "--input", "/no/such/file.jsonl"], &["/no/such/file.jsonl"]),
        (&["plan", "/no/such/model"], &["/no/such/model"]),
        (&["frobnicate"], &["frobnicate"]),
    ] {
        assert_refuses(&run(arguments), parts);
    }
}

#[test]
fn sampling_flags_are_checked_before_a_model_is_loaded() {
    for (flag, value) in
        [("--temperature", "-1"), ("--top-p", "0"), ("--min-p", "2"), ("--repetition-penalty", "nan"), ("--stop", "")]
    {
        let flag_and_value = format!("{flag}={value}");
        // The model does not exist; had it been looked for, the error would be another.
        assert_refuses(&run(&["generate", "/no/such/model", "-p", "a", &flag_and_value]), &[flag]);
        assert_refuses(&run(&["chat", "/no/such/model", &flag_and_value]), &[flag]);
    }
}

#[test]
fn benches_measure_the_demo_model() {
    let short = ["--input-len", "6", "--output-len", "3", "--output-json", "-"];
    let figures = |command: &str, more: &[&str]| -> Value {
        let output = run(&[&["bench", command], &short[..], more, &SMALL[..], &["--quantization", "q4"]].concat());
        serde_json::from_str(stdout(&output)).unwrap()
    };
    let latency = figures("latency", &["--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "0"]);
    assert_eq!(latency["latencies"].as_array().unwrap().len(), 2);
    for key in ["prefill_tokens_per_second", "decode_tokens_per_second", "decode_share_of_roofline", "avg_latency"] {
        assert!(latency[key].as_f64().unwrap() > 0.0, "{key} in {latency}");
    }
    let throughput = figures("throughput", &["--num-prompts", "3"]);
    assert_eq!(throughput["total_num_tokens"], 3 * (6 + 3));
    let product = throughput["tokens_per_second"].as_f64().unwrap() * throughput["elapsed_time"].as_f64().unwrap();
    assert!((product - 27.0).abs() < 1e-6, "{throughput}");
    assert_eq!(throughput["roofline"]["threads"], 1);
    let table = run(&[&["bench", "throughput", "--input-len", "6", "--output-len", "3"], &SMALL[..]].concat());
    assert!(stdout(&table).contains("of roofline") && stdout(&table).contains("GOP/s"), "{table:?}");
}

#[test]
fn a_profile_is_a_table_and_a_trace_and_its_file_is_opened_before_the_model_loads() {
    let (_folder, path) = file("trace.json", "");
    let short = ["-p", "a", "--max-tokens", "3", "--profile", &path];
    let output = run(&[&["generate"], &short[..], &SMALL[..]].concat());
    assert!(!stdout(&output).contains("profile"), "{output:?}");
    let notes = String::from_utf8_lossy(&output.stderr);
    assert!(notes.contains("profile of 3 steps") && notes.contains("of roofline"), "{notes}");
    let trace: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    assert_eq!(events.iter().filter(|event| event["name"] == "step").count(), 3);
    for command in [&["generate", "/no/such/model", "-p", "a"][..], &["serve", "/no/such/model", "--port", "0"]] {
        let output = run(&[command, &["--profile", "/no/such/folder/trace.json"]].concat());
        assert_refuses(&output, &["--profile /no/such/folder/trace.json", "expected a file that can be written"]);
    }
}

#[test]
fn an_empty_key_in_the_environment_is_refused_like_one_on_the_command_line() {
    let output = quire(&["serve"]).env("QUIRE_API_KEY", "").output().unwrap();
    assert_refuses(&output, &["--api-key"]);
}

#[test]
fn input_that_is_not_utf8_is_an_error() {
    let path = |bytes: &[u8]| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("in.jsonl");
        std::fs::write(&path, bytes).unwrap();
        (folder, path.to_str().unwrap().to_string())
    };
    let (_folder, file) = path(b"{\"prompt\": \"a\"}\n{\"prompt\": \"\xff\"}\n");
    assert_refuses(&run(&["generate", "--input", &file]), &["--input", "in.jsonl", "line 2 is not UTF-8"]);
    let (_folder, file) = path(b"\xef\xbb\xbf{\"prompt\": [5]}\r\n");
    stdout(&run(&[&["generate", "--input", &file, "--max-tokens", "1"][..], &SMALL].concat()));
    let mut chat = quire(&[&["chat"][..], &SMALL].concat()).stdin(Stdio::piped()).spawn().unwrap();
    chat.stdin.take().unwrap().write_all(b"\xff\n").unwrap();
    let output = chat.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).ends_with("quire: standard input is not UTF-8\n"));
}

#[test]
fn a_checkpoint_that_is_broken_is_one_line_that_names_the_file() {
    let (folder, _) = file("config.json", "{\"architectures\": [\"LlamaForCausalLM\"");
    assert_refuses(&run(&["serve", folder.path().to_str().unwrap()]), &["config.json"]);
}

#[test]
fn a_port_in_use_is_one_line_that_names_it() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    assert_refuses(&run(&["serve", "--port", &port]), &["--port", &port]);
}

#[test]
fn a_recorded_run_can_be_replayed_and_printed() {
    let (_folder, path) = file("run", "");
    let generate =
        [&["generate", "-p", "The capital of France is", "--max-tokens", "8", "--record", &path][..], &SMALL];
    // The file is there already.
    assert_refuses(&run(&generate.concat()), &["--record", "run (", "expected a file that does not exist yet"]);
    std::fs::remove_file(&path).unwrap();
    stdout(&run(&generate.concat()));
    let replayed = run(&["replay", &path, "--threads", "1"]);
    let line = "8 steps, 8 tokens drawn: every output is equal to the recording, bit for bit\n";
    assert!(stdout(&replayed).ends_with(line), "{replayed:?}");
    let printed = run(&["replay", &path, "--print"]);
    assert!(stdout(&printed).contains("step 8: 1 spans, 1 tokens") && stdout(&printed).contains("drew"), "{printed:?}");

    assert_refuses(&run(&["replay", "/no/such/run"]), &["/no/such/run", "No such file"]);
    std::fs::write(&path, "a text").unwrap();
    assert_refuses(&run(&["replay", &path]), &["run", "another beginning", "expected a recording"]);
}

#[test]
fn generate_prints_only_the_text() {
    let arguments = ["generate", "-p", "The capital of France is", "--max-tokens", "12"];
    let output = run(&[&arguments[..], &SMALL].concat());
    let text = stdout(&output);
    assert!(text.contains("Paris"), "{text}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("demo model"));
    // The same with token ids.
    let output = run(&[&arguments[..], &["--json"], &SMALL].concat());
    let record: Value = serde_json::from_str(stdout(&output)).unwrap();
    assert_eq!(format!("{}\n", record["text"].as_str().unwrap()), text);
    assert!(
        record["token_ids"].as_array().unwrap().len() <= 12
            && !record["prompt_token_ids"].as_array().unwrap().is_empty()
    );
}

#[test]
fn a_file_of_prompts_gives_one_record_per_prompt_in_order() {
    let (_folder, path) = file("in.jsonl", "{\"prompt\": \"One\"}\n\n{\"prompt\": [5, 6, 7]}\n{\"prompt\": \"Two\"}\n");
    let output = run(&[&["generate", "--input", &path, "--max-tokens", "4"][..], &SMALL].concat());
    let records: Vec<Value> = stdout(&output).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(records.iter().map(|r| r["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(records[2]["prompt"], "Two");
    assert_eq!(records[1]["prompt_token_ids"], serde_json::json!([5, 6, 7]));
    // Each is what it is alone.
    let alone = run(&[&["generate", "-p", "Two", "--max-tokens", "4", "--json"][..], &SMALL].concat());
    let alone: Value = serde_json::from_str(stdout(&alone)).unwrap();
    assert_eq!(alone["token_ids"], records[2]["token_ids"]);
}

#[test]
fn a_refused_prompt_of_a_file_does_not_stop_the_others() {
    let (_folder, path) = file("in.jsonl", "{\"prompt\": [99999999]}\n{\"prompt\": \"One\"}\n");
    let output = run(&[&["generate", "--input", &path, "--max-tokens", "2"][..], &SMALL].concat());
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stdout).unwrap();
    let records: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(records[0]["error"].as_str().unwrap().contains("99999999"));
    assert!(records[1]["text"].is_string());
    let (_folder, path) = file("in.jsonl", "{\"prompt\": \"a\"}\n{\"promt\": \"b\"}\n");
    assert_refuses(&run(&["generate", "--input", &path]), &["in.jsonl", "line 2", "\"promt\""]);
    let (_folder, path) = file("in.jsonl", "{\"prompt\": \"a\", \"temperature\": 1}\n");
    assert_refuses(&run(&["generate", "--input", &path]), &["in.jsonl", "line 1", "\"temperature\""]);
}

#[test]
fn a_flag_beats_the_environment_which_beats_the_file() {
    let toml = "max_model_len = 64\nmax-tokens = 3\nport = 0\nenable-prefix-caching = false\n";
    let (_folder, path) = file("quire.toml", toml);
    let context = |environment: Option<&str>, flags: &[&str]| {
        let mut command = quire(&[&["generate", "-p", "One", "--json", "--config", &path][..], flags, &SMALL].concat());
        command.envs(environment.map(|value| ("QUIRE_MAX_MODEL_LEN", value)));
        let output = command.output().unwrap();
        let record: Value = serde_json::from_str(stdout(&output)).unwrap();
        assert_eq!(record["token_ids"].as_array().unwrap().len(), 3, "max-tokens of the file");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(context(None, &[]).contains("context of 64 tokens"));
    assert!(context(Some("80"), &[]).contains("context of 80 tokens"));
    assert!(context(Some("80"), &["--max-model-len", "96"]).contains("context of 96 tokens"));
}

#[test]
fn an_error_in_a_settings_file_names_the_file() {
    for (toml, parts) in [
        ("max-modle-len = 5", &["quire.toml", "max-modle-len", "max-model-len"][..]),
        ("block-size = \"x\"", &["quire.toml", "--block-size", "'x'"]),
        ("port = \nx", &["quire.toml", "line"]),
        ("kernels = 3", &["quire.toml", "kernels"]),
        ("[kernels]\ndecode = \"cuda.none\"", &["decode", "cuda.none", "cpu.reference"]),
        ("[kernels]\ndecod = \"auto\"", &["quire.toml", "decod", "decode"]),
    ] {
        let (_folder, path) = file("quire.toml", toml);
        assert_refuses(&run(&["kernels", "--config", &path]), parts);
    }
    let (_folder, path) = file("quire.toml", "colour = 1");
    let output = run(&["plan", "--config", &path]);
    assert_refuses(&output, &["unknown key \"colour\""]);
    assert!(!String::from_utf8_lossy(&output.stderr).contains("similar"));
    assert_refuses(&run(&["plan", "--config", "/no/such/quire.toml"]), &["--config /no/such/quire.toml"]);
}

#[test]
fn plan_and_kernels_print_their_tables() {
    let plan = run(&[&["plan"][..], &SMALL].concat());
    assert!(stdout(&plan).contains("quire-demo") && stdout(&plan).contains("1024"), "{plan:?}");
    let json: Value = serde_json::from_str(stdout(&run(&[&["plan", "--json"][..], &SMALL].concat()))).unwrap();
    assert_eq!(json["max_model_len"], 1024);
    assert!(json["weight_bytes"].as_u64().unwrap() > 0 && json["num_blocks"].as_u64().unwrap() > 0, "{json}");
    let kernels = run(&["kernels"]);
    assert!(stdout(&kernels).contains("cpu.reference"), "{kernels:?}");
}

#[test]
fn help_and_tables_fit_in_100_columns() {
    let main = run(&["--help"]);
    let commands = stdout(&main).lines().skip_while(|line| *line != "Commands:").skip(1);
    let commands: Vec<&str> = commands.map_while(|line| line.split_whitespace().next()).collect();
    assert!(commands.contains(&"serve") && commands.contains(&"plan"), "{commands:?}");
    let help = commands.iter().map(|command| vec![*command, "--help"]);
    let tables =
        [&["--help"][..], &["bench", "serve", "--help"], &["bench", "kernels", "--help"], &["plan"], &["kernels"]];
    for args in help.chain(tables.map(<[&str]>::to_vec)) {
        let output = run(&args);
        let long = stdout(&output).lines().find(|line| line.chars().count() > 100);
        assert!(!stdout(&output).is_empty() && long.is_none(), "{args:?}: {long:?}");
        assert!(!stdout(&output).contains("]("), "{args:?}: a link of the page in the help");
    }
}

#[test]
fn plan_prints_the_layers_of_a_checkpoint() {
    let output = run(&["plan", "--decoder", "--quantization", "q8"]);
    let tree = stdout(&output);
    for line in [
        "LlamaForCausalLM: 5 layers, 1894464 weights",
        "├─ embedding  model.embed_tokens [1536, 192] q8, column",
        "├─ layers 0 to 4",
        "│  ├─ norm       input_layernorm.weight [192] eps 1e-5",
        "│  ├─ attention  6 query and 2 key/value heads of 32, scale 0.17677669, the whole context",
        "│  │  ├─ qkv        self_attn.q_proj + k_proj + v_proj [320, 192] q8, column",
        "│  │  └─ output     self_attn.o_proj [192, 192] q8, row",
        "└─ head       the embedding",
    ] {
        assert!(tree.lines().any(|found| found == line), "{line:?} is not in\n{tree}");
    }
    assert!(tree.lines().all(|line| line.chars().count() <= 100), "{tree}");
    let model = format!("{}/../models/tests/reference/qwen2", env!("CARGO_MANIFEST_DIR"));
    let biased = run(&["plan", "--decoder", &model]);
    assert!(stdout(&biased).contains("q_proj + k_proj + v_proj [160, 96] dense, column, bias\n"), "{biased:?}");
    let json: Value = serde_json::from_str(stdout(&run(&["plan", "--decoder", "--json"]))).unwrap();
    let layers = json["decoder"]["layers"].as_array().unwrap();
    let qkv = &layers[4]["branches"][0]["mixer"]["attention"]["qkv"];
    assert_eq!(qkv["parts"][1], serde_json::json!({"name": "model.layers.4.self_attn.k_proj", "rows": 64}));
    assert_eq!((layers.len(), &qkv["form"], &qkv["role"]), (5, &"dense".into(), &"column".into()));
}

#[test]
fn sampling_defaults_of_a_checkpoint_are_printed_at_start() {
    let model = format!("{}/../models/tests/reference/qwen2", env!("CARGO_MANIFEST_DIR"));
    let said = String::from_utf8(run(&["chat", &model, "--kv-cache-memory-bytes", "4M"]).stderr).unwrap();
    let line = "  sampling defaults from generation_config.json: temperature 0.7, top_p 0.8, top_k 20, \
                repetition_penalty 1.05; a request can override each";
    assert!(said.lines().any(|found| found == line), "{said}");
    let demo = String::from_utf8(run(&["chat", "--kv-cache-memory-bytes", "4M"]).stderr).unwrap();
    assert!(demo.contains("generation_config.json: temperature 0.6, top_p 0.95; a request"), "{demo}");
}

#[test]
fn chat_answers_line_by_line_until_exit() {
    let mut chat =
        quire(&[&["chat", "--temperature", "0"][..], &SMALL].concat()).stdin(Stdio::piped()).spawn().unwrap();
    let mut input = chat.stdin.take().unwrap();
    input.write_all(b"What is the capital of France?\n\nWhat is the capital of France?\n/exit\nnot read\n").unwrap();
    drop(input);
    let output = chat.wait_with_output().unwrap();
    let answers: Vec<&str> = stdout(&output).lines().collect();
    assert!(answers[0].contains("Paris") && answers.len() == 2, "{answers:?}");
}

#[test]
fn a_closed_pipe_ends_the_program_quietly() {
    let arguments = ["generate", "-p", "One", "--max-tokens", "900", "--ignore-eos"];
    let mut child = quire(&[&arguments[..], &SMALL].concat()).spawn().unwrap();
    let mut pipe: ChildStdout = child.stdout.take().unwrap();
    pipe.read_exact(&mut [0; 1]).unwrap();
    drop(pipe);
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !stderr.contains("quire:") && !stderr.contains("panicked"), "{stderr}");
}

/// A server and the rest of its standard error after the address was printed.
fn serve(arguments: &[&str]) -> (Child, String, BufReader<std::process::ChildStderr>) {
    let mut child = quire(&[&["serve", "--port", "0"][..], arguments, &SMALL].concat()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    let mut greeting = String::new();
    while !greeting.contains("\"temperature\": 0}'") {
        assert!(lines.read_line(&mut greeting).unwrap() > 0, "{greeting}");
    }
    (child, greeting, lines)
}

fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
}

#[test]
fn serve_says_what_it_serves_and_a_signal_ends_it_with_code_0() {
    for name in ["-TERM", "-INT"] {
        let (mut child, greeting, _lines) = serve(&[]);
        assert!(greeting.starts_with("demo model: quire-demo"), "{greeting}");
        assert!(greeting.contains("listening on http://127.0.0.1:") && greeting.contains("  curl http"), "{greeting}");
        signal(&child, name);
        assert_eq!(child.wait().unwrap().code(), Some(0));
    }
}

#[test]
fn a_second_signal_ends_the_server_at_once() {
    let (mut child, greeting, mut lines) = serve(&[]);
    let address = greeting.split("http://").nth(1).unwrap().split(',').next().unwrap().to_string();
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    let body = "{\"prompt\": \"One\", \"max_tokens\": 1000, \"ignore_eos\": true, \"stream\": true}";
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
    stream.write_all(format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()).as_bytes()).unwrap();
    stream.read_exact(&mut [0; 1]).unwrap();
    signal(&child, "-TERM");
    let mut line = String::new();
    while !line.contains("stopping") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0);
    }
    signal(&child, "-TERM");
    let code = child.wait().unwrap().code();
    // 143 is 128 + SIGTERM; 0 if the stream had ended in between.
    assert!(code == Some(143) || code == Some(0), "{code:?}");
}

#[test]
fn completions_and_manual_pages_know_every_command_and_its_flags() {
    let quire = |words: &[&str]| Command::new(env!("CARGO_BIN_EXE_quire")).args(words).output().unwrap();
    let commands = cli::command();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = quire(&["completions", shell]);
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{shell}");
        for command in commands.get_subcommands() {
            assert!(script.contains(command.get_name()), "{shell}: {}", command.get_name());
        }
        assert!(script.contains("max-num-seqs") && !script.contains(".md)"), "{shell}");
    }
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man1");
    assert!(quire(&["man", pages.to_str().unwrap()]).status.success());
    for command in commands.get_subcommands() {
        let page = std::fs::read_to_string(pages.join(format!("quire-{}.1", command.get_name()))).unwrap();
        assert!(page.contains(".SH NAME") && page.contains(".SH SYNOPSIS") && !page.contains(".md)"), "{page}");
    }
    assert!(std::fs::read_to_string(pages.join("quire-serve.1")).unwrap().contains("max\\-num\\-seqs"));
    let refused = |words: &[&str]| {
        let said = String::from_utf8(quire(words).stderr).unwrap();
        assert!(said.starts_with("quire: ") && said.lines().count() == 1, "{said}");
        said
    };
    assert!(refused(&["completions", "tcsh"]).contains("possible values: bash"));
    let file = folder.path().join("file");
    std::fs::write(&file, "x").unwrap();
    assert!(refused(&["man", file.to_str().unwrap()]).contains("name another folder"));
}
