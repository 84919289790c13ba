//! The flags of `llama-server` that command lines have most, and what becomes of each under `quire llama-server`.

use super::Fate::{NoEffect, Only, Ours, Part, Refused, Renamed};
use super::table::{Group, LOG_LEVEL, MODEL_DECIDES, NO_IMAGES, NO_SUCH_FUNCTION, OBJECTS, VISIBLE_DEVICES, group};

const SAMPLING: &str = "override-generation-config";
const NO_THINKING: &str = "use --default-chat-template-kwargs {\"enable_thinking\": false}";
const IN_REQUESTS: &str = "it has no default here; set it in each request";
const SPECULATE: &str = "use --speculative-config";
const RANKS: &str = "use --tensor-parallel-size or --pipeline-parallel-size";
const NO_SUCH_SAMPLER: &str = "this engine has no such sampler; the order of its own is fixed";

/// In the notation of the table of vLLM's flags.
pub const LLAMA_SERVER: &[Group] = &[
    group(
        Ours,
        "model(m):s hf-token(hft):s threads(t):i=-1 host:s port:i=8080 api-key:l api-key-file:s chat-template:s seed(s):i=-1 \
         speculative-config:j",
    ),
    OBJECTS,
    group(Renamed("model"), "hf-repo(hf,hfr):s"),
    group(Renamed("max-model-len"), "ctx-size(c):i=0"),
    group(Renamed("max-num-seqs"), "parallel(np):i=-1"),
    group(Renamed("max-num-batched-tokens"), "batch-size(b):i"),
    group(Renamed("served-model-name"), "alias(a):s"),
    group(Renamed("chat-template"), "chat-template-file:s"),
    group(Renamed("default-chat-template-kwargs"), "chat-template-kwargs:j"),
    group(Renamed("pooling-type"), "pooling:s"),
    group(Renamed("ssl-certfile"), "ssl-cert-file:s"),
    group(Renamed("ssl-keyfile"), "ssl-key-file:s"),
    group(Renamed("send-timeout"), "timeout(to):i"),
    group(Renamed("root-path"), "api-prefix:s"),
    group(Part(SAMPLING, "max_new_tokens"), "predict(n):i=-1 n-predict:i=-1"),
    group(Part(SAMPLING, "temperature"), "temp:f temperature:f"),
    group(Part(SAMPLING, "top_k"), "top-k:i"),
    group(Part(SAMPLING, "top_p"), "top-p:f"),
    group(Part(SAMPLING, "min_p"), "min-p:f"),
    group(Part(SAMPLING, "repetition_penalty"), "repeat-penalty:f"),
    group(NoEffect("all layers are on the device; --device chooses it"), "gpu-layers(ngl):s n-gpu-layers:s fit(fit):s"),
    group(NoEffect("chat templates are always run, and calls parsed"), "jinja"),
    group(
        NoEffect("attention is always computed in blocks"),
        "flash-attn(fa):l ubatch-size(ub):i threads-batch(tb):i swa-full kv-offload op-offload repack",
    ),
    group(NoEffect("requests always share steps"), "cont-batching(cb) kv-unified(kvu)"),
    group(NoEffect("weights are mapped into memory"), "mmap mlock warmup direct-io(dio) check-tensors"),
    group(NoEffect("a request that is longer than the context is refused"), "context-shift keep:i=0"),
    group(NoEffect(MODEL_DECIDES), "embedding embeddings rerank reranking"),
    group(NoEffect("the server has these routes"), "metrics slots props webui ui"),
    group(NoEffect(NO_IMAGES), "mmproj-auto mmproj-offload"),
    group(NoEffect("every prefix is cached"), "cache-reuse:i=0 cache-prompt slot-prompt-similarity(sps):f"),
    group(
        NoEffect("the cache has the size of --kv-cache-memory-bytes"),
        "cache-ram(cram):i ctx-checkpoints(ctxcp):i defrag-thold(dt):f",
    ),
    group(
        NoEffect("threads are those of --threads, each pinned to its core"),
        "numa:s prio:i=0 prio-batch:i=0 poll:i threads-http:i=-1 cpu-mask(C):s cpu-range(Cr):s cpu-strict:i=0",
    ),
    group(
        NoEffect("there is one device, which has all tensors"),
        "cpu-moe(cmoe) n-cpu-moe(ncmoe):i override-tensor(ot):s",
    ),
    group(
        NoEffect(LOG_LEVEL),
        "log-disable verbose(v) log-verbosity(lv,verbosity):i log-colors:s log-timestamps log-prefix perf",
    ),
    group(NoEffect("special tokens are shown where a request asks for it"), "special(sp)"),
    group(
        Only(&["f16", "bf16", "f32"], "use --kv-cache-dtype, such as int8"),
        "cache-type-k(ctk):s=f16 cache-type-v(ctv):s=f16",
    ),
    group(Only(&["auto", "deepseek", "deepseek-legacy"], "use --reasoning-parser none"), "reasoning-format:s=auto"),
    group(Only(&["auto", "on"], NO_THINKING), "reasoning(rea):s=auto"),
    group(
        Only(
            &["-1"],
            "set thinking_token_budget in each request, or --default-chat-template-kwargs {\"enable_thinking\": false}",
        ),
        "reasoning-budget:i=-1",
    ),
    group(Only(&["0", "0.0"], IN_REQUESTS), "presence-penalty:f=0 frequency-penalty:f=0"),
    group(Only(&["1", "1.0"], IN_REQUESTS), "typical:f=1 typical-p:f=1"),
    group(Only(&["-1"], "penalties count all tokens here"), "repeat-last-n:i=64"),
    group(
        Only(&["0", "0.0", "-1", "-1.0"], NO_SUCH_SAMPLER),
        "mirostat:i=0 xtc-probability:f=0 dry-multiplier:f=0 dynatemp-range:f=0 top-n-sigma:f=-1",
    ),
    group(Refused(NO_SUCH_SAMPLER), "samplers:s sampling-seq(sampler-seq):s"),
    group(Refused("set it in each request"), "grammar:s grammar-file:s json-schema(j):s json-schema-file(jf):s"),
    group(Refused("name the file with --hf-repo ORG/NAME:FILE.gguf"), "hf-file(hff):s"),
    group(Refused("download the file, and name it with --model"), "model-url(mu):s docker-repo(dr):s"),
    group(Refused("use --lora-modules NAME=FOLDER with --enable-lora"), "lora:s lora-scaled:s lora-init-without-apply"),
    group(
        Refused(SPECULATE),
        "model-draft(md):s draft-max(draft):i draft-min:i draft-p-min:f gpu-layers-draft(ngld):s ctx-size-draft(cd):i \
         device-draft(devd):s spec-draft-n-max:i spec-draft-n-min:i",
    ),
    group(Only(&["none"], SPECULATE), "spec-type:s=none"),
    group(
        Refused("write rope_parameters into the checkpoint"),
        "rope-scaling:s rope-scale:f rope-freq-base:f rope-freq-scale:f yarn-orig-ctx:i yarn-ext-factor:f \
         yarn-attn-factor:f yarn-beta-slow:f yarn-beta-fast:f override-kv:s",
    ),
    group(Refused(NO_IMAGES), "mmproj(mm):s mmproj-url(mmu):s"),
    group(Refused("one model per process: start several"), "models-dir:s models-preset:s models-max:i=4"),
    group(Only(&["-1"], "use POST /sleep"), "sleep-idle-seconds:i=-1"),
    group(Refused("the page is part of the program"), "path:s webui-config:s webui-config-file:s"),
    group(Refused(NO_SUCH_FUNCTION), "control-vector:s slot-save-path:s tools:s agent"),
    group(Only(&["none", "layer"], RANKS), "split-mode(sm):s=layer"),
    group(Refused(RANKS), "tensor-split(ts):s"),
    group(Only(&["0"], VISIBLE_DEVICES), "main-gpu(mg):i=0"),
];
