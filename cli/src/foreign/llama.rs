//! The flags of `llama-server` that command lines have most, and what becomes of each under `quire llama-server`.

use super::Fate::{NoEffect, Only, Ours, Part, Refused, Renamed};
use super::table::{Group, group};

const SAMPLING: &str = "override-generation-config";

/// In the notation of the table of vLLM's flags.
pub const LLAMA_SERVER: &[Group] = &[
    group(
        Ours,
        "model(m):s hf-token(hft):s threads(t):i=-1 host:s port:i=8080 api-key:l api-key-file:s chat-template:s seed(s):i=-1 \
         default-chat-template-kwargs:j override-generation-config:j speculative-config:j hf-overrides:j kv-events-config:j \
         kv-transfer-config:j",
    ),
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
    group(Part(SAMPLING, "max_new_tokens"), "predict(n):i=-1 n-predict:i=-1"),
    group(Part(SAMPLING, "temperature"), "temp:f temperature:f"),
    group(Part(SAMPLING, "top_k"), "top-k:i"),
    group(Part(SAMPLING, "top_p"), "top-p:f"),
    group(Part(SAMPLING, "min_p"), "min-p:f"),
    group(Part(SAMPLING, "repetition_penalty"), "repeat-penalty:f"),
    group(NoEffect("all layers are on the device; --device chooses it"), "gpu-layers(ngl):s n-gpu-layers:s"),
    group(NoEffect("chat templates are always run, and calls parsed"), "jinja"),
    group(NoEffect("attention is always computed in blocks"), "flash-attn(fa):l ubatch-size(ub):i threads-batch(tb):i"),
    group(NoEffect("requests always share steps"), "cont-batching(cb) kv-unified(kvu)"),
    group(NoEffect("weights are mapped into memory"), "mmap mlock warmup"),
    group(NoEffect("a request that is longer than the context is refused"), "context-shift"),
    group(NoEffect("the model decides what it is used for"), "embedding embeddings rerank reranking"),
    group(NoEffect("the server has these routes"), "metrics slots props webui"),
    group(NoEffect("--log-level sets the level of the log"), "log-disable verbose(v) log-colors:s log-timestamps"),
    group(
        Only(&["f16", "bf16", "f32"], "use --kv-cache-dtype, such as int8"),
        "cache-type-k(ctk):s=f16 cache-type-v(ctv):s=f16",
    ),
    group(Only(&["auto", "deepseek", "deepseek-legacy"], "use --reasoning-parser none"), "reasoning-format:s=auto"),
    group(Only(&["-1"], "use --default-chat-template-kwargs {\"enable_thinking\": false}"), "reasoning-budget:i=-1"),
    group(Refused("name the file with --hf-repo ORG/NAME:FILE.gguf"), "hf-file(hff):s"),
    group(Refused("use --lora-modules NAME=FOLDER with --enable-lora"), "lora:s lora-scaled:s"),
    group(Refused("use --speculative-config"), "model-draft(md):s draft-max(draft):i draft-min:i"),
    group(
        Refused("write rope_parameters into the checkpoint"),
        "rope-scaling:s rope-scale:f rope-freq-base:f rope-freq-scale:f",
    ),
    group(Refused("models read text only"), "mmproj(mm):s"),
    group(
        Refused("use --tensor-parallel-size or --pipeline-parallel-size"),
        "split-mode(sm):s tensor-split(ts):s main-gpu(mg):i",
    ),
];
