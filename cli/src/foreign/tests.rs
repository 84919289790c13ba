//! Command lines of `vllm serve`.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::ffi::OsString;

use super::*;
use crate::error::CliError;

/// The flags of vLLM, as its documentation has them.
const FLAGS: &str = include_str!("vllm-flags.txt");

fn serve() -> Command {
    let mut root = crate::command();
    root.build();
    root.find_subcommand("serve").unwrap().clone()
}

fn translated(arguments: &[&str]) -> Result<Translation, CliError> {
    translate(Dialect::vllm(), &serve(), arguments.iter().map(Into::into).collect())
}

/// The words of a line as a shell splits them, where only single quotes quote.
fn words(line: &str) -> Vec<OsString> {
    let mut words = vec![String::new()];
    let mut quoted = false;
    for c in line.chars() {
        match c {
            '\'' => quoted = !quoted,
            ' ' if !quoted => words.push(String::new()),
            other => words.last_mut().unwrap().push(other),
        }
    }
    words.into_iter().filter(|word| !word.is_empty()).map(Into::into).collect()
}

/// The command and the configuration of a line.
fn parsed(line: &str) -> Result<String, String> {
    match crate::parse(words(line)) {
        Ok(parsed) => Ok(format!("{parsed:?}")),
        Err(error) => Err(error.to_string()),
    }
}

#[test]
fn every_flag_of_vllm_is_in_the_table_with_its_type_and_default() {
    let (serve, dialect) = (serve(), Dialect::vllm());
    let mut listed = BTreeSet::new();
    for line in FLAGS.lines().skip(1) {
        let [name, kind, default, short] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let flag = dialect.get(name).unwrap_or_else(|| panic!("{name} is missing"));
        let kinds = ["b", "i", "h", "f", "s", "j", "l"].iter().position(|known| *known == kind).unwrap();
        let kinds = [Kind::Switch, Kind::Whole, Kind::Human, Kind::Number, Kind::Text, Kind::Json, Kind::List][kinds];
        assert_eq!(flag.kind, kinds, "{name}");
        if default != "-" {
            assert_eq!(flag.default, Some(default), "{name}");
        }
        assert_eq!(flag.shorts.first().unwrap_or(&"-"), &short, "{name}");
        assert!(listed.insert(name), "{name} is listed twice");
    }
    assert!(listed.len() >= 317, "{}", listed.len());
    for flag in &dialect.0 {
        let is_own = own(&serve, flag.name).is_some();
        assert_eq!(
            is_own,
            flag.fate == Fate::Ours,
            "{}: a flag of this program if and only if the table says so",
            flag.name
        );
        assert_eq!(dialect.0.iter().filter(|other| other.name == flag.name).count(), 1, "{}", flag.name);
        if let Fate::Renamed(ours) | Fate::Part(ours, _) = flag.fate {
            assert!(own(&serve, ours).is_some(), "{}: there is no --{ours}", flag.name);
        }
    }
}

#[test]
fn every_flag_passes_at_its_default_and_is_refused_by_name_where_it_would_be_missed() {
    for flag in &Dialect::vllm().0 {
        let name = format!("--{}", flag.name);
        if let (Some(default), false) = (flag.default, flag.fate == Fate::Ours) {
            translated(&[&name, default]).unwrap();
        }
        if flag.fate != Fate::Ours && flag.kind == Kind::Switch {
            translated(&[&name.replacen("--", "--no-", 1)]).unwrap();
        }
        let value = match flag.kind {
            Kind::Switch => None,
            Kind::Whole | Kind::Human => Some("77"),
            Kind::Number => Some("7.5"),
            Kind::Json => Some(r#"{"a": 1}"#),
            Kind::Text | Kind::List => Some("unheard"),
        };
        let arguments: Vec<&str> = [name.as_str()].into_iter().chain(value).collect();
        match flag.fate {
            Fate::NoEffect(why) => {
                let done = translated(&arguments).unwrap();
                assert!(done.arguments.is_empty(), "{name}: {done:?}");
                assert_eq!(done.notes, [format!("{name} has no effect: {why}")]);
            }
            Fate::Only(_, advice) | Fate::Refused(advice) => {
                let error = translated(&arguments).unwrap_err().to_string();
                assert!(error.starts_with(&format!("{name}: ")) && error.ends_with(advice), "{error}");
                assert!(error.contains("expected ") && error.lines().count() == 1, "{error}");
            }
            _ => {}
        }
    }
}

/// Command lines as documentation and recipes have them, and the same settings in the flags of this program.
const LINES: &[(&str, &str)] = &[
    ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"),
    (
        "NousResearch/Meta-Llama-3-8B-Instruct --dtype auto --api-key token-abc123",
        "NousResearch/Meta-Llama-3-8B-Instruct --dtype=auto --api-key=token-abc123",
    ),
    (
        "meta-llama/Llama-3.1-8B-Instruct --enable-auto-tool-choice --tool-call-parser llama3_json --chat-template \
         examples/tool_chat_template_llama3.1_json.jinja",
        "meta-llama/Llama-3.1-8B-Instruct --tool-call-parser=llama3_json \
         --chat-template=examples/tool_chat_template_llama3.1_json.jinja",
    ),
    (
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --enable-reasoning --reasoning-parser deepseek_r1",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --reasoning-parser=deepseek_r1",
    ),
    (
        "Qwen/Qwen3-8B --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3 \
         --default-chat-template-kwargs '{\"enable_thinking\": false}'",
        "Qwen/Qwen3-8B --tool-call-parser=hermes --reasoning-parser=qwen3 \
         --default-chat-template-kwargs={\"enable_thinking\":false}",
    ),
    (
        "Qwen/Qwen3-30B-A3B-FP8 -tp 4 --enable-expert-parallel --max-model-len 32K --gpu-memory-utilization 0.95",
        "Qwen/Qwen3-30B-A3B-FP8 --tensor-parallel-size=4 --max-model-len=32768 --gpu-memory-utilization=0.95",
    ),
    (
        "meta-llama/Llama-2-7b-hf --enable-lora --max-loras 4 --max-lora-rank 64 --lora-modules sql-lora=/adapters/sql \
         '{\"name\": \"b\", \"path\": \"/adapters/b\", \"base_model_name\": \"x\"}'",
        "meta-llama/Llama-2-7b-hf --enable-lora --max-loras=4 --max-lora-rank=64 --lora-modules=sql-lora=/adapters/sql \
         --lora-modules=b=/adapters/b",
    ),
    (
        "facebook/opt-6.7b --host 0.0.0.0 --port 8001 --seed 42 -tp=1 --gpu_memory_utilization 0.8 --speculative_config \
         '{\"method\": \"draft_model\", \"model\": \"facebook/opt-125m\", \"num_speculative_tokens\": 5}'",
        "facebook/opt-6.7b --host=0.0.0.0 --port=8001 --seed=42 --tensor-parallel-size=1 --gpu-memory-utilization=0.8 \
         --speculative-config={\"method\":\"draft_model\",\"model\":\"facebook/opt-125m\",\"num_speculative_tokens\":5}",
    ),
    (
        "TheBloke/Mistral-7B-Instruct-v0.2-AWQ --quantization awq --dtype half --max-model-len 4096",
        "TheBloke/Mistral-7B-Instruct-v0.2-AWQ --quantization=awq --dtype=float16 --max-model-len=4096",
    ),
    (
        "openai/gpt-oss-20b --async-scheduling --max-cudagraph-capture-size 2048 --max-num-batched-tokens 8192 \
         --stream-interval 20 --no-enable-prefix-caching",
        "openai/gpt-oss-20b --max-num-batched-tokens=8192 --no-enable-prefix-caching",
    ),
    (
        "nvidia/Llama-3.3-70B-Instruct-FP8 -tp=4 -O3 --compilation-config.pass_config.fuse_allreduce_rms true \
         --kv-cache-dtype fp8 -cc.mode=3",
        "nvidia/Llama-3.3-70B-Instruct-FP8 --tensor-parallel-size=4 --kv-cache-dtype=fp8",
    ),
    (
        "Qwen/Qwen3-Reranker-0.6B --runner pooling --hf_overrides '{\"architectures\": [\"Qwen3ForSequenceClassification\"], \
         \"classifier_from_token\": [\"no\", \"yes\"], \"is_original_qwen3_reranker\": true}'",
        "Qwen/Qwen3-Reranker-0.6B --hf-overrides={\"classifier_from_token\":[\"no\",\"yes\"],\"is_original_qwen3_reranker\":true}",
    ),
    (
        "intfloat/e5-mistral-7b-instruct --task embed --pooler-config '{\"pooling_type\": \"MEAN\", \"normalize\": true}' \
         --trust-remote-code",
        "intfloat/e5-mistral-7b-instruct --pooling-type=mean",
    ),
    (
        "NousResearch/Hermes-2-Pro-Llama-3-8B --tool-call-parser hermes --served-model-name a b --disable-log-requests \
         --uvicorn-log-level warning --enable-prompt-tokens-details",
        "NousResearch/Hermes-2-Pro-Llama-3-8B --tool-call-parser=hermes --served-model-name=a --served-model-name=b",
    ),
    (
        "/models/x --kv-events-config '{\"enable_kv_cache_events\": true, \"publisher\": \"zmq\", \"endpoint\": \"tcp://*:5557\"}' \
         --enable-prefix-caching --block-size 16 --max-num-seqs 128 --prefix-caching-hash-algo sha256_cbor",
        "/models/x --kv-events-config={\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\"} \
         --enable-prefix-caching=true --block-size=16 --max-num-seqs=128",
    ),
    (
        "m --load-format safetensors --tokenizer-mode auto --swap-space 4 --limit-mm-per-prompt image=2 \
         --max-seq-len-to-capture 8192 --data-parallel-size 1 --distributed-executor-backend mp",
        "m --swap-space=4 --distributed-executor-backend=threads",
    ),
    (
        "m --speculative-config.method ngram -sc.num_speculative_tokens=4 --speculative_config.prompt_lookup_max 4",
        "m --speculative-config={\"method\":\"ngram\",\"num_speculative_tokens\":4,\"prompt_lookup_max\":4}",
    ),
    (
        "m --guided-decoding-backend xgrammar --structured-outputs-config.backend xgrammar --generation-config vllm \
         --override-generation-config '{\"temperature\": 0.6, \"top_k\": 20}' --spec-method ngram --spec-tokens 2",
        "m --generation-config=vllm --override-generation-config={\"temperature\":0.6,\"top_k\":20} \
         --speculative-config={\"method\":\"ngram\",\"num_speculative_tokens\":2}",
    ),
    (
        "--model m --max_model_len 25.6k --max_num_batched_tokens 4K --allowed-origins '[\"*\"]' --allowed-methods \
         '[\"GET\", \"POST\"]' --scheduling-policy priority --chat-template-content-format string --tokenizer None",
        "--model=m --max-model-len=25600 --max-num-batched-tokens=4096 --allowed-origins=* --allowed-methods=GET \
         --allowed-methods=POST --scheduling-policy=priority",
    ),
    (
        "m --api-key a b --enable-lora --no-enable-lora --max-num-seqs 4 --max-num-seqs 8 --max-model-len -1 \
         --max-num-queued-reqs 16 --h11-max-header-count 64 --no-enforce-eager --tensor-par 2 --uds /tmp/s --root-path /v",
        "m --api-key=a --api-key=b --enable-lora=false --max-num-seqs=8 --max-model-len=auto --max-queued-requests=16 \
         --max-header-count=64 --enforce-eager=false --tensor-parallel-size=2 --uds=/tmp/s --root-path=/v",
    ),
    (
        "Qwen/Qwen3-Next-80B-A3B-Instruct --speculative-config '{\"method\":\"qwen3_next_mtp\",\"num_speculative_tokens\":2}' \
         --use-v2-block-manager --worker-use-ray --disable-frontend-multiprocessing --mamba_ssm_cache_dtype float32",
        "Qwen/Qwen3-Next-80B-A3B-Instruct --speculative-config={\"method\":\"mtp\",\"num_speculative_tokens\":2}",
    ),
    ("--api-key a --served-model-name x y -- m", "m --api-key=a --served-model-name=x --served-model-name=y"),
    (
        "m --kv-cache-memory-bytes 10g --ssl-certfile c.pem --ssl-keyfile k.pem --ssl-cert-reqs 0 --revision v1 \
         --tokenizer-revision v1 --tokenizer m",
        "m --kv-cache-memory-bytes=10000000000 --ssl-certfile=c.pem --ssl-keyfile=k.pem --ssl-cert-reqs=0 --revision=v1 \
         --tokenizer=m",
    ),
];

#[test]
fn command_lines_of_vllm_have_the_settings_that_they_ask_for() {
    for (line, ours) in LINES {
        let (found, expected) = (parsed(&format!("vllm serve {line}")), parsed(&format!("quire serve {ours}")));
        assert_eq!(found.unwrap(), expected.unwrap(), "{line}");
    }
}

#[test]
fn settings_files_in_yaml_are_those_of_vllm() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.yaml");
    let text = "model: m\nport: 9000\ntensor-parallel-size: 2\nenable-auto-tool-choice: true\nasync-scheduling: false\n\
                trust_remote_code: true\napi-key: [a, b]\nmax-model-len: 32k\nspeculative-config:\n  method: ngram\n  \
                num_speculative_tokens: 4\nlimit-mm-per-prompt: {image: 2}\nenable-prefix-caching: no\nseed: null\n";
    std::fs::write(&path, text).unwrap();
    let same = |line: &str| parsed(line).unwrap().replace(&format!("config: Some({path:?})"), "config: None");
    let flags = "m --tensor-parallel-size=2 --api-key=a --api-key=b --max-model-len=32000 --enable-prefix-caching=false \
                 --speculative-config={\"method\":\"ngram\",\"num_speculative_tokens\":4}";
    let flags = flags.strip_prefix("m ").unwrap();
    assert_eq!(
        same(&format!("vllm serve --config {} --port 9001", path.display())),
        same(&format!("quire serve --model=m --port=9001 {flags}"))
    );
    for (text, part) in [
        ("headless: true\n", "config.yaml: --headless: expected no such flag"),
        ("max-model-length: 3\n", "unknown key"),
        ("port: many\n", "--port"),
        ("- a\n", "expected keys and values"),
    ] {
        std::fs::write(&path, text).unwrap();
        let error = parsed(&format!("vllm serve --config {}", path.display())).unwrap_err();
        assert!(error.contains(part) && error.contains("config.yaml") && error.lines().count() == 1, "{error}");
    }
}

#[test]
fn what_is_wrong_with_a_flag_is_one_line() {
    for (line, parts) in [
        ("--data-parallel-size 2", &["--data-parallel-size: found \"2\", expected 1: ", "docs/fleet.md"][..]),
        ("--load-format dummy", &["--load-format: found \"dummy\"", "safetensors"]),
        ("--api-server-count many", &["--api-server-count: found \"many\", expected a whole number"]),
        ("--api-server-count", &["--api-server-count: expected a value"]),
        ("--trust-remote-code=maybe", &["--trust-remote-code: found \"maybe\"", "without a value"]),
        ("--no-enable-lora=1", &["--no-enable-lora: found \"1\", expected no value"]),
        ("--max-model-len.x 1", &["--max-model-len.x: found a key"]),
        ("--speculative-config.. 1", &["--speculative-config: found \".\""]),
        ("--speculative-config 1", &["--speculative-config", "expected a JSON object"]),
        ("--pooler-config x", &["--pooler-config: found \"x\", expected a JSON object"]),
        ("--pooler-config.dimensions 7", &["--pooler-config: found dimensions: 7", "pooling_type"]),
        ("--structured-outputs-config.disable_any_whitespace true", &["found disable_any_whitespace: true"]),
        ("--allowed-origins [1]", &["--allowed-origins: found \"[1]\", expected a list of texts"]),
        ("--tokenizer-revision v2", &["--tokenizer-revision: found \"v2\", expected that of --revision"]),
        ("--ssl-keyfile k", &["--ssl-certfile"]),
        ("--root-path llm", &["--root-path", "expected a path such as /llm"]),
        ("--override-generation-config {\"top_p\":2}", &["top_p: found 2, expected a number above 0"]),
        ("--default-chat-template-kwargs []", &["--default-chat-template-kwargs", "expected a JSON object"]),
        ("--quantization q2", &["--quantization", "q8 or q4"]),
        ("--no-such-flag", &["unexpected argument '--no-such-flag' found"]),
        ("--tokenizer-mode mistral", &["--tokenizer-mode: found \"mistral\"", "--chat-template"]),
        ("--mamba-ssm-cache-dtype float16", &["expected auto or float32"]),
        ("-xy 3", &["-x"]),
    ] {
        let error = parsed(&format!("vllm serve m {line}")).unwrap_err();
        assert!(!error.contains("as a value"), "{error}");
        assert!(error.lines().count() == 1 && parts.iter().all(|part| error.contains(part)), "{line}: {error}");
    }
}

#[test]
fn other_commands_of_the_engine_take_the_flags_too_and_the_rest_is_left_alone() {
    let plan = parsed("quire plan m -tp 2 --trust-remote-code --max_model_len 4k").unwrap();
    assert_eq!(plan, parsed("quire plan m --tensor-parallel-size=2 --max-model-len=4000").unwrap());
    assert_eq!(parsed("quire generate -p x --no-ignore-eos").unwrap(), parsed("quire generate -p x").unwrap());
    assert!(parsed("quire bench roofline --trust-remote-code").is_err());
}

#[test]
fn command_lines_of_llama_server_have_the_settings_that_they_ask_for() {
    let as_serve = |line: &str| parsed(line).unwrap().replacen("LlamaServer", "Serve", 1);
    for (line, ours) in [
        ("-m model.gguf", "--model=model.gguf --port=8080"),
        (
            "-hf ggml-org/gemma-3-1b-it-GGUF:Q4_K_M -c 8192 -ngl 99 --jinja -fa --port 9000",
            "--model=ggml-org/gemma-3-1b-it-GGUF:Q4_K_M --max-model-len=8192 --port=9000",
        ),
        (
            "-m m.gguf -c 0 -np 4 -b 1024 -ub 512 -t 1 -n -1 --no-mmap --mlock -ctk f16 --host 0.0.0.0 -s -1 --alias x",
            "--model=m.gguf --max-num-seqs=4 --max-num-batched-tokens=1024 --threads=1 --host=0.0.0.0 --served-model-name=x \
             --port=8080",
        ),
        (
            "-m m.gguf -fa on --temp 0.7 --top-k 40 --top-p 0.9 --min-p 0.1 --repeat-penalty 1.1 -n 256 --cont-batching",
            "--model=m.gguf --port=8080 --override-generation-config={\"temperature\":0.7,\"top_k\":40,\"top_p\":0.9,\
             \"min_p\":0.1,\"repetition_penalty\":1.1,\"max_new_tokens\":256}",
        ),
        (
            "-m m.gguf -t 100000 -c 8192 --fit off --no-warmup --no-webui --presence-penalty 0.0 --numa distribute -sm none \
             --cache-reuse 256 -ot exps=CPU --cache-ram 0 --reasoning auto --api-prefix /llm -lv 1 --swa-full",
            "--model=m.gguf --max-model-len=8192 --root-path=/llm --port=8080",
        ),
        (
            "-m e.gguf --embeddings --pooling mean --api-key k --ssl-cert-file c --ssl-key-file k --chat-template chatml",
            "--model=e.gguf --port=8080 --pooling-type=mean --api-key=k --ssl-certfile=c --ssl-keyfile=k --chat-template=chatml",
        ),
    ] {
        assert_eq!(
            as_serve(&format!("quire llama-server {line}")),
            parsed(&format!("quire serve {ours}")).unwrap(),
            "{line}"
        );
    }
    for (line, part) in [
        ("-md d.gguf", "--model-draft: expected no such flag here: use --speculative-config"),
        ("-ctk q4_0", "--cache-type-k: found \"q4_0\", expected f16 or bf16 or f32"),
        ("--presence-penalty 1.5", "--presence-penalty: found \"1.5\", expected 0 or 0.0: it has no default here"),
        ("--reasoning off", "--reasoning: found \"off\", expected auto or on: use --default-chat-template-kwargs"),
        ("--reasoning-budget 0", "thinking_token_budget"),
        ("-sm row", "--tensor-parallel-size"),
        ("--no-such-flag", "--no-such-flag"),
    ] {
        let error = parsed(&format!("quire llama-server -m m {line}")).unwrap_err();
        assert!(error.contains(part) && error.lines().count() == 1, "{error}");
    }
    let (serve, dialect) = (serve(), Dialect::of(llama::LLAMA_SERVER));
    for flag in &dialect.0 {
        assert_eq!(own(&serve, flag.name).is_some(), flag.fate == Fate::Ours, "{}", flag.name);
        if let Fate::Renamed(ours) | Fate::Part(ours, _) = flag.fate {
            assert!(own(&serve, ours).is_some(), "{}: there is no --{ours}", flag.name);
        }
    }
}
