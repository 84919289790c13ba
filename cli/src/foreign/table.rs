//! The flags of `vllm serve`, and what becomes of each.
//!
//! A group lists flags that have the same fate. An entry is a name with its short names in parentheses, its type after a colon, and its
//! default after `=`. An entry without a type is a switch (`--x`, `--no-x`); types are `i` (a whole number), `h` (a number that may
//! end in `k m g t`, which are decimal, or `K M G T`, which are binary), `f` (a number), `s` (text), `j` (JSON), `l` (several words).

use super::Fate::{self, NoEffect, Only, Ours, Part, Refused, Renamed};

/// Flags with the same fate.
pub struct Group {
    pub fate: Fate,
    pub flags: &'static str,
}

pub const fn group(fate: Fate, flags: &'static str) -> Group {
    Group { fate, flags }
}

const NO_CODE: &str = "code of a user does not run in this engine";
const REPLICAS: &str = "one replica per process: start several and balance the load between them (docs/fleet.md)";
const LAUNCHER: &str = "mpiexec or another launcher starts the ranks of several machines (docs/parallel.md)";
const IN_MEMORY: &str = "weights stay in the memory of the device; choose --quantization q8 or q4, or more ranks";
pub(super) const NO_IMAGES: &str = "models read text only";
pub(super) const NO_SUCH_FUNCTION: &str = "this engine has no such function";
pub(super) const MODEL_DECIDES: &str = "the model decides what it is used for";
pub(super) const LOG_LEVEL: &str = "--log-level sets the level of the log";
pub(super) const VISIBLE_DEVICES: &str = "set CUDA_VISIBLE_DEVICES";
const CHOSEN: &str =
    "kernels are chosen for the model and the machine; `quire kernels` shows them and [kernels] chooses others";
const AS_CALLED: &str = "it concerns the speed of an implementation that this engine does not have";

/// Settings whose values are JSON objects, in every dialect.
pub(super) const OBJECTS: Group = group(
    Ours,
    "kv-transfer-config:j kv-events-config:j hf-overrides:j default-chat-template-kwargs:j override-generation-config:j",
);

/// Flags of vLLM 0.32, and those of older versions that command lines still have.
pub const VLLM: &[Group] = &[
    group(
        Ours,
        "model:s config:s shutdown-timeout:i=0 enable-log-requests max-log-len:i lora-modules:l tool-call-parser:s \
         reasoning-parser:s host:s port:i=8000 api-key:l allowed-origins:j allowed-methods:j allowed-headers:j dtype:s=auto \
         seed:i=0 revision:s max-model-len:h enforce-eager max-logprobs:i=20 served-model-name:l hf-token:s download-dir:s \
         pipeline-parallel-size(pp):i=1 tensor-parallel-size(tp):i=1 block-size:i gpu-memory-utilization:f=0.92 \
         kv-cache-memory-bytes:h kv-cache-dtype:s=auto enable-prefix-caching kv-offloading-size:f enable-lora max-loras:i=1 \
         max-lora-rank:i=16 max-cpu-loras:i log-level:s max-num-batched-tokens:h max-num-seqs:i scheduling-policy:s=fcfs \
         enable-chunked-prefill speculative-config(sc):j quantization(q):s distributed-executor-backend:s chat-template:s \
         trust-request-chat-template allow-credentials uds:s root-path:s tokenizer:s generation-config:s=auto \
         enable-force-include-usage exclude-tools-when-tool-choice-none ssl-keyfile:s \
         ssl-certfile:s ssl-ca-certs:s ssl-cert-reqs:i=0 calculate-kv-scales device:s swap-space:f preemption-mode:s",
    ),
    OBJECTS,
    group(Renamed("gpu-memory-utilization"), "device-memory-utilization:f=0.92"),
    group(Renamed("max-header-bytes"), "h11-max-incomplete-event-size:i=4194304"),
    group(Renamed("max-header-count"), "h11-max-header-count:i=256"),
    group(Renamed("max-queued-requests"), "max-num-queued-reqs:i"),
    group(Part("speculative-config", "method"), "spec-method:s"),
    group(Part("speculative-config", "model"), "spec-model:s speculative-model:s"),
    group(Part("speculative-config", "num_speculative_tokens"), "spec-tokens:i num-speculative-tokens:i"),
    group(Fate::Pooler, "pooler-config:j override-pooler-config:j"),
    group(Fate::StructuredOutputs, "structured-outputs-config:j"),
    group(Fate::SameRevision, "tokenizer-revision:s"),
    // Already so.
    group(NoEffect("the calls of every chat with tools are parsed"), "enable-auto-tool-choice"),
    group(NoEffect("every answer says how many tokens of its prompt were cached"), "enable-prompt-tokens-details"),
    group(NoEffect("every answer has the header x-request-id"), "enable-request-id-headers"),
    group(NoEffect("no code of a checkpoint runs, except its chat template"), "trust-remote-code code-revision:s"),
    group(NoEffect("the form of a message follows from the chat template"), "chat-template-content-format:s=auto"),
    group(NoEffect("the next step is always prepared while one runs on a GPU"), "async-scheduling"),
    group(NoEffect("what a step adds to an answer is sent at once"), "stream-interval:i=1"),
    group(
        NoEffect("weights are mapped into memory and read once"),
        "safetensors-load-strategy:s safetensors-prefetch-num-threads:i=8 safetensors-prefetch-block-size:h=16777216 \
         ignore-patterns:l pt-load-map-location:s=cpu max-parallel-loading-workers:i use-tqdm-on-load",
    ),
    group(
        NoEffect("a request is admitted when its blocks are free"),
        "scheduler-reserve-full-isl watermark:f=0 prefill-schedule-interval:i=1 long-prefill-token-threshold:i=0 \
         long-prefill-token-threshold-adaptive",
    ),
    group(
        NoEffect("the tokens of a cached block are compared, whatever its hash is"),
        "prefix-caching-hash-algo:s=sha256 prefix-match-unit:i prefix-cache-retention-interval:i=0",
    ),
    group(
        NoEffect("requests are parsed by the threads of this process"),
        "renderer-num-workers:i=1 api-server-count(asc):i aggregate-engine-logging",
    ),
    group(
        NoEffect("the checkpoint and --dtype decide"),
        "allow-deprecated-quantization lora-dtype:s=auto use-fp64-gumbel enable-mixed-moe-lora-format",
    ),
    group(NoEffect(MODEL_DECIDES), "skip-mm-profiling language-model-only"),
    group(NoEffect("a grammar is compiled by the one backend that there is"), "guided-decoding-backend:s"),
    group(NoEffect("reasoning is parsed if the chat template has it, or with --reasoning-parser"), "enable-reasoning"),
    group(NoEffect("a step is planned while one runs"), "num-scheduler-steps:i disable-async-output-proc"),
    group(
        NoEffect("only older versions of vLLM had it"),
        "use-v2-block-manager disable-frontend-multiprocessing multi-step-stream-outputs scheduler-delay-factor:f \
         num-lookahead-slots:i max-context-len-to-capture:i lora-extra-vocab-size:i disable-mm-preprocessor-cache",
    ),
    group(NoEffect("ranks are threads, or are started by mpiexec"), "worker-use-ray engine-use-ray"),
    // Logs and metrics.
    group(
        NoEffect("there are no statistics in the log; /metrics has them"),
        "disable-log-stats fail-on-environ-validation log-error-stack enable-per-request-metrics \
         show-hidden-metrics-for-version:s per-request-spec-decode-metrics:s=none kv-cache-metrics \
         kv-cache-metrics-sample:f=0.01 custom-histogram-buckets:l cudagraph-metrics enable-layerwise-nvtx-tracing \
         enable-mfu-metrics enable-logging-iteration-details jit-monitor-mode:s=warn jit-monitor-verbose",
    ),
    group(NoEffect("requests are logged only with --enable-log-requests"), "disable-log-requests"),
    group(NoEffect("answers are not logged"), "enable-log-deltas"),
    group(NoEffect("there is no access log"), "disable-uvicorn-access-log disable-access-log-for-endpoints:s"),
    group(NoEffect("the number of requests is always counted"), "enable-server-load-tracking"),
    group(Only(&["critical", "error", "warning", "info", "debug", "trace"], LOG_LEVEL), "uvicorn-log-level:s=info"),
    // HTTP.
    group(NoEffect("/openapi.json describes the routes"), "disable-fastapi-docs enable-offline-docs"),
    group(NoEffect("certificates are read once; restart the server to read new ones"), "enable-ssl-refresh"),
    group(
        NoEffect("this engine has no such route"),
        "cohere-is-reasoning-model cohere-format:s=cmd4 enable-flash-late-interaction",
    ),
    // Speed.
    group(
        NoEffect(CHOSEN),
        "gdn-prefill-backend:s kda-prefill-backend:s kda-decode-backend:s attention-backend:s dcp-comm-backend:s \
         moe-backend:s=auto linear-backend:s=auto sparse-indexer-topk-backend:s=auto \
         all2all-backend:s=allgather_reducescatter mamba-backend:s=triton mamba-ssu-algorithm:s \
         mamba-cache-philox-rounds:i=0 mamba-block-size:i mamba-cache-mode:s=none disable-cascade-attn \
         disable-custom-all-reduce attention-config(ac):j kernel-config:j ir-op-priority:j enable-flashinfer-autotune \
         enable-batch-sharded-sampling",
    ),
    group(
        NoEffect("no code is compiled; CUDA graphs are captured at the start, and --enforce-eager turns them off"),
        "optimization-level(O):i=2 performance-mode:s=balanced compilation-config(cc):j cudagraph-capture-sizes:l \
         cuda-graph-sizes:l max-cudagraph-capture-size:i max-seq-len-to-capture:i",
    ),
    group(
        NoEffect(AS_CALLED),
        "disable-hybrid-kv-cache-manager disable-nccl-for-dp-synchronization eplb-config:j enable-expert-parallel(ep) \
         kv-sharing-fast-prefill swa-bounded-replay use-replayssm replayssm-buffer-len:i=16 \
         enable-mamba-shared-prefix-checkpoint enable-cumem-allocator enable-nccl-comm-suspend enable-eplb \
         enable-ep-weight-filter enable-hc-sp enable-dbo enable-shm-tensor-arena fully-sharded-loras specialize-active-lora \
         expert-placement-strategy:s=linear dbo-decode-token-threshold:i=32 dbo-prefill-token-threshold:i=512 ubatch-size:i=0 \
         ray-workers-use-nsight numa-bind numa-bind-nodes:l numa-bind-cpus:l distributed-timeout-seconds:i \
         cpu-distributed-timeout-seconds:i",
    ),
    // Images.
    group(
        NoEffect(NO_IMAGES),
        "limit-mm-per-prompt:j trust-request-mm-kwargs allowed-local-media-path:s allowed-media-domains:l media-io-kwargs:j \
         mm-processor-kwargs:j mm-processor-cache-gb:f=4 mm-processor-cache-type:s=lru mm-processor-device:s=auto \
         mm-hasher-algorithm:s=blake3 mm-shm-cache-max-object-size-mb:i=128 mm-tensor-ipc:s=direct_rpc \
         mm-ipc-gpu-memory-gb:f=0 mm-device-do-normalize mm-encoder-tp-mode:s=weights mm-encoder-attn-backend:s \
         mm-encoder-attn-dtype:s mm-encoder-fp8-scale-path:s mm-encoder-fp8-scale-save-path:s \
         mm-encoder-fp8-scale-save-margin:f=1.5 interleave-mm-strings video-pruning-rate:f video-pruning-method:s=evs \
         disable-chunked-mm-input enable-tower-connector-lora",
    ),
    // Values that ask for nothing; others would be missed.
    group(Only(&["auto", "generate", "pooling"], MODEL_DECIDES), "runner:s=auto"),
    group(
        Only(&["auto", "none", "embed"], "a checkpoint without a head for labels cannot give scores of them"),
        "convert:s=auto",
    ),
    group(
        Only(&["auto", "generate", "embed", "embedding", "score", "reward", "classify"], MODEL_DECIDES),
        "task:s=auto",
    ),
    group(
        Only(
            &["auto", "hf", "safetensors", "gguf"],
            "the format follows from the files, which are needed; omit the flag if the model has safetensors or GGUF files",
        ),
        "load-format:s=auto",
    ),
    group(
        Only(
            &["auto", "hf", "fast", "slow", "vllm"],
            "checkpoints are in the layout of Hugging Face; omit the flag if the model has these files too",
        ),
        "config-format:s=auto model-impl:s=auto",
    ),
    group(
        Only(
            &["auto", "hf", "fast", "slow"],
            "the tokenizer follows from the files; --chat-template has forms without a template: mistral, deepseek_v32",
        ),
        "tokenizer-mode:s=auto",
    ),
    group(Only(&["assistant"], "answers are those of an assistant"), "response-role:s=assistant"),
    group(NoEffect("a comment is sent after each 15 seconds of silence"), "sse-keep-alive-interval:i=0"),
    group(
        Only(&["auto"], "thinking is turned off where the template can"),
        "anthropic-disabled-thinking-effort:s=auto",
    ),
    group(Only(&["auto", "function"], "tools are checked where a request asks for it"), "tool-strict-level:s=auto"),
    group(Only(&["full"], "the fingerprint is that of the engine"), "fingerprint-mode:s=full fingerprint-value:s"),
    group(
        Only(&["raw_logprobs"], "log-probabilities are those of the model, before penalties"),
        "logprobs-mode:s=raw_logprobs",
    ),
    group(
        Only(&["auto", "float32"], "recurrent states are float32"),
        "mamba-cache-dtype:s=auto mamba-ssm-cache-dtype:s=auto",
    ),
    group(Only(&["native"], "--kv-offloading-size is the memory of this process"), "kv-offloading-backend:s=native"),
    group(
        Only(&[], "use --max-num-batched-tokens and --max-num-seqs"),
        "max-num-scheduled-tokens:h max-num-active-seqs:i",
    ),
    group(Only(&["1"], REPLICAS), "data-parallel-size(dp):i=1 data-parallel-size-local(dpl):i=1"),
    group(Only(&["0"], REPLICAS), "data-parallel-rank(dpn):i data-parallel-start-rank(dpr):i"),
    group(Only(&["mp"], REPLICAS), "data-parallel-backend(dpb):s=mp"),
    group(
        Refused(REPLICAS),
        "data-parallel-address(dpa):s data-parallel-rpc-port(dpp):i data-parallel-hybrid-lb(dph) \
         data-parallel-external-lb(dpe) data-parallel-multi-port-external-lb(dpm) headless tokens-only \
         enable-elastic-ep elastic-ep-max-dp-size:i=1 enable-fault-tolerance fault-tolerance-config:j enable-scale-out",
    ),
    group(
        NoEffect("there is one replica in this process"),
        "data-parallel-supervisor-port:i=9256 dp-supervisor-probe-interval-s:f=5 dp-supervisor-probe-timeout-s:f=5 \
         dp-supervisor-probe-failure-threshold:i=3 dp-sync-interval:i=16 dcp-kv-cache-interleave-size:i=1 \
         cp-kv-cache-interleave-size:i=1 dcp-q-replicate",
    ),
    group(
        Only(&["1"], "a context is not cut over ranks; use --tensor-parallel-size"),
        "decode-context-parallel-size(dcp):i=1 prefill-context-parallel-size(pcp):i=1",
    ),
    group(Only(&["1"], LAUNCHER), "nnodes(n):i=1"),
    group(Only(&["0"], LAUNCHER), "node-rank(r):i=0"),
    group(Only(&["127.0.0.1"], LAUNCHER), "master-addr:s=127.0.0.1"),
    group(Only(&["29501"], LAUNCHER), "master-port:i=29501"),
    group(Only(&["0"], IN_MEMORY), "cpu-offload-gb:f=0 offload-group-size:i=0"),
    group(Only(&["auto"], IN_MEMORY), "offload-backend:s=auto"),
    group(Only(&["1"], IN_MEMORY), "offload-num-in-group:i=1 offload-prefetch-step:i=1"),
    group(Refused(IN_MEMORY), "cpu-offload-params:l offload-params:l"),
    // What would be missed.
    group(Refused("the server speaks HTTP; use --port or --uds"), "grpc grpc-port:i"),
    group(Refused("rustls chooses the ciphers of TLS 1.2 and 1.3"), "ssl-ciphers:s"),
    group(
        Refused(NO_CODE),
        "tool-parser-plugin:s reasoning-parser-plugin:s middleware:l logits-processors:l io-processor-plugin:s \
         worker-cls:s=auto worker-extension-cls:s scheduler-cls:s model-class-overrides:j model-loader-extra-config:j \
         additional-config:j",
    ),
    group(Refused("use --log-level and --log-format"), "logging-config:j log-config-file:s"),
    group(
        Refused("OTEL_EXPORTER_OTLP_ENDPOINT names the collector of traces"),
        "otlp-traces-endpoint:s collect-detailed-traces:l",
    ),
    group(Refused("use --profile FILE"), "profiler-config:j"),
    group(Refused(VISIBLE_DEVICES), "device-ids:s"),
    group(Refused("use --kv-cache-memory-bytes"), "num-gpu-blocks-override:i"),
    group(Refused("use --max-queued-requests or --max-inflight-bytes"), "max-num-queued-tokens:h"),
    group(Refused("use --reasoning-parser"), "reasoning-config:j"),
    group(Refused("use return_token_ids of a request"), "return-tokens-as-token-ids"),
    group(Refused("answers are not logged; --record writes all steps to a file"), "enable-log-outputs"),
    group(Refused("--server-dev-mode opens such routes"), "enable-tokenizer-info-endpoint enable-sleep-mode"),
    group(Refused("use --kv-cache-dtype for all layers"), "kv-cache-dtype-skip-layers:l"),
    group(
        Refused("convert the checkpoint with `quire convert`, or use --quantization q8 or q4"),
        "quantization-config:j",
    ),
    group(Refused("write rope_parameters into config.json"), "rope-scaling:j rope-theta:f"),
    group(Refused("put config.json beside the weights"), "hf-config-path:s"),
    group(
        Refused("prompts are text or token ids"),
        "enable-prompt-embeds enable-mm-embeds skip-tokenizer-init mm-encoder-only default-mm-loras:j",
    ),
    group(
        Refused("adapters apply to the modules that their files name"),
        "lora-target-modules:l max-lora-cls-labels:i enable-moe-shared-loras",
    ),
    group(
        Refused("stop the process instead"),
        "sleep-mode-offload-cudagraph sleep-preserve-parameter-names:l weight-transfer-config:j",
    ),
    group(
        Refused(NO_SUCH_FUNCTION),
        "tool-server:s enable-return-routed-experts enable-trace-replay enable-mamba-cache-stochastic-rounding \
         return-sampling-mask disable-sliding-window aux-output-config:j watermark-config:j diffusion-config(dc):j \
         ec-transfer-config:j ec-manager-config:j engram-config:j",
    ),
];

/// Flags of `vllm bench serve` that `quire bench serve` does not have.
pub const VLLM_BENCH: &[Group] = &[
    group(
        NoEffect("the server counts tokens"),
        "tokenizer:s tokenizer-mode:s=auto trust-remote-code skip-chat-template custom-skip-chat-template",
    ),
    group(NoEffect("there is no progress bar"), "disable-tqdm"),
    group(NoEffect("requests are sent at once; wait for /health of the server"), "ready-check-timeout-sec:i"),
    group(NoEffect("the server names its answers"), "request-id-prefix:s"),
    group(
        Refused("use --extra-body"),
        "top-p:f top-k:i min-p:f frequency-penalty:f presence-penalty:f repetition-penalty:f logprobs:i use-beam-search",
    ),
    group(Refused("answers are timed as they stream"), "no-stream"),
    group(Refused("start the server with --profile FILE"), "profile profile-batch"),
    group(
        Refused("run once for each rate, with --request-rate"),
        "ramp-up-strategy:s ramp-up-start-rps:f ramp-up-end-rps:f",
    ),
    group(Refused("name an adapter with --model"), "lora-modules:l lora-assignment:s"),
    group(
        Refused("download the dataset, and name it with --dataset-name sharegpt or custom and --dataset-path"),
        "hf-name:s hf-split:s hf-subset:s hf-output-len:i burstgpt-path:s",
    ),
];
