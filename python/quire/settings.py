"""Settings of an engine: the flags of `quire serve` as keyword arguments, and vLLM's names for them.

The flags, their defaults and their checks are those of the program. This file knows what vLLM has in addition: such names are accepted
with a value that asks for nothing, and refused otherwise.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire import _quire

__all__ = ["AsyncEngineArgs", "EngineArgs"]

#: Compiled kernels of a package for GPUs; the program looks for them beside its own file.
KERNELS = Path(__file__).parent / "kernels"

#: Names of vLLM that change how fast something is, or what is measured, and no output. They have no effect.
WITHOUT_EFFECT = frozenset(
    """
    cp_kv_cache_interleave_size dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend dcp_q_replicate
    dp_sync_interval elastic_ep_max_dp_size enable_ep_weight_filter enable_hc_sp enable_mamba_shared_prefix_checkpoint
    enable_nccl_comm_suspend fault_tolerance_config mamba_cache_philox_rounds mamba_ssu_algorithm mm_device_do_normalize
    mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin
    mm_encoder_fp8_scale_save_path mm_encoder_only mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_device
    mm_shm_cache_max_object_size_mb mm_tensor_ipc prefix_cache_retention_interval prefix_match_unit replayssm_buffer_len
    shutdown_timeout sleep_mode_offload_cudagraph sleep_preserve_parameter_names sparse_indexer_topk_backend
    specialize_active_lora swa_bounded_replay use_replayssm video_pruning_method video_pruning_rate
    aggregate_engine_logging all2all_backend allow_deprecated_quantization attention_backend attention_config collect_detailed_traces
    compilation_config cpu_distributed_timeout_seconds cudagraph_capture_sizes cudagraph_metrics custom_histogram_buckets
    disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager
    disable_nccl_for_dp_synchronization distributed_timeout_seconds enable_cumem_allocator enable_flashinfer_autotune
    enable_layerwise_nvtx_tracing enable_logging_iteration_details enable_mfu_metrics enable_mm_processor_stats
    enable_shm_tensor_arena fail_on_environ_validation gdn_prefill_backend ignore_patterns ir_op_priority jit_monitor_mode
    jit_monitor_verbose kda_decode_backend kda_prefill_backend kernel_config kv_cache_metrics kv_cache_metrics_sample
    kv_sharing_fast_prefill linear_backend log_config_file logging_config long_prefill_token_threshold
    long_prefill_token_threshold_adaptive mamba_backend mamba_config max_cudagraph_capture_size max_num_active_seqs
    master_addr master_port max_parallel_loading_workers mm_processor_cache_gb mm_processor_cache_type model_loader_extra_config moe_backend
    numa_bind numa_bind_cpus numa_bind_nodes optimization_level per_request_spec_decode_metrics performance_mode
    prefill_schedule_interval prefix_caching_hash_algo profiler_config pt_load_map_location renderer_num_workers
    safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads scheduler_reserve_full_isl
    show_hidden_metrics_for_version skip_mm_profiling stream_interval use_tqdm_on_load watermark
    """.split()
)

#: Other names of vLLM, with the values that ask for nothing besides None, False, 0, "", "auto" and empty containers.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "api_server_count": (1,),
    "config_format": ("hf",),
    "convert": ("none", "embed"),
    "data_parallel_backend": ("mp",),
    "data_parallel_size": (1,),
    "data_parallel_size_local": (1,),
    "dcp_kv_cache_interleave_size": (1,),
    "decode_context_parallel_size": (1,),
    "expert_placement_strategy": ("linear",),
    "kv_offloading_backend": ("native",),
    "logprobs_mode": ("raw_logprobs",),
    "lora_dtype": ("auto",),
    "mamba_cache_mode": ("none",),
    "max_lora_cls_labels": (1,),
    "model_impl": ("vllm",),
    "mm_encoder_tp_mode": ("weights",),
    "nnodes": (1,),
    "offload_num_in_group": (1,),
    "offload_prefetch_step": (1,),
    "prefill_context_parallel_size": (1,),
    "runner": ("generate", "pooling"),
    "tokenizer_mode": ("hf", "fast"),
}
for _name in """
    data_parallel_multi_port_external_lb device_ids ec_manager_config enable_mamba_cache_stochastic_rounding
    enable_mixed_moe_lora_format enable_moe_shared_loras engram_config
    additional_config allowed_local_media_path allowed_media_domains aux_output_config code_revision
    cpu_offload_gb cpu_offload_params data_parallel_address data_parallel_external_lb data_parallel_hybrid_lb
    data_parallel_rank data_parallel_rpc_port data_parallel_start_rank default_mm_loras diffusion_config
    disable_sliding_window ec_transfer_config enable_batch_sharded_sampling enable_dbo enable_elastic_ep enable_eplb
    enable_expert_parallel enable_fault_tolerance enable_log_requests enable_mm_embeds enable_prompt_embeds
    enable_return_routed_experts enable_sleep_mode enable_tower_connector_lora enable_trace_replay eplb_config
    fully_sharded_loras hf_config_path interleave_mm_strings io_processor_plugin kv_cache_dtype_skip_layers
    language_model_only limit_mm_per_prompt logits_processors lora_target_modules mamba_block_size mamba_cache_dtype
    mamba_ssm_cache_dtype max_num_queued_reqs max_num_queued_tokens
    max_num_scheduled_tokens media_io_kwargs mm_processor_kwargs model_class_overrides model_weights node_rank
    num_gpu_blocks_override offload_backend offload_group_size offload_params otlp_traces_endpoint pooler_config
    quantization_config ray_workers_use_nsight reasoning_config reasoning_parser_plugin return_sampling_mask scheduler_cls
    skip_tokenizer_init structured_outputs_config tokens_only ubatch_size use_fp64_gumbel watermark_config
    weight_transfer_config worker_cls worker_extension_cls
    """.split():
    _NEUTRAL[_name] = ()

#: Names of vLLM for parts of `speculative_config`.
_SPECULATIVE = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}

#: All names of vLLM that are no flags.
OF_VLLM = frozenset(
    {*WITHOUT_EFFECT, *_NEUTRAL, *_SPECULATIVE, "tokenizer", "tokenizer_revision", "generation_config"}
    | {"override_generation_config"}
)


def _is_neutral(value: object) -> bool:
    return value is None or value is False or value in ("", "auto") or value == 0 or value in ([], {}, ())


class Settings:
    """Settings of an engine, checked as far as their names go."""

    def __init__(self, owner: str, given: Mapping[str, Any], *, server: bool = False) -> None:
        given = {name: value for name, value in given.items() if not name.startswith("_")}
        #: Chat template as text, for each conversation.
        self.chat_template: str | None = None
        #: Whether `generation_config.json` has no effect on default sampling parameters.
        self.ignores_generation_config: bool = False
        #: Sampling defaults beside those of `generation_config.json`.
        self.sampling_defaults: dict[str, Any] = {}
        values: dict[str, Any] = {}
        # The program knows flags of vLLM too; for those of this file, what it says of their values counts.
        known = set(_quire.settings(server)) - OF_VLLM
        speculative: dict[str, Any] = {}
        for name, value in given.items():
            if name not in known and name not in OF_VLLM:
                near = difflib.get_close_matches(name, [*known, *OF_VLLM], 1)
                guess = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"{owner} got an unexpected keyword argument {name!r}{guess}")
            if value is None or name in WITHOUT_EFFECT:
                continue
            if name in ("tokenizer", "tokenizer_revision"):
                if value != given.get({"tokenizer": "model"}.get(name, "revision")):
                    raise ValueError(f"{name}: found {value!r}, expected that of the model; put its files beside the weights")
            elif name == "generation_config":
                if value not in ("auto", "vllm"):
                    raise ValueError(f"generation_config: found {value!r}, expected auto or vllm")
                self.ignores_generation_config = value == "vllm"
            elif name == "override_generation_config":
                self.sampling_defaults = dict(value)
            elif name in _SPECULATIVE:
                speculative[_SPECULATIVE[name]] = value
            elif name == "chat_template" and isinstance(value, str) and ("{" in value or "\n" in value):
                self.chat_template = value
            elif name in known:
                values[name] = value
            elif not _is_neutral(value) and value not in _NEUTRAL[name]:
                raise ValueError(f"{name}: found {value!r}, which this engine does not have; remove it")
        if "kernels_dir" not in values and KERNELS.is_dir() and "QUIRE_KERNELS_DIR" not in os.environ:
            values["kernels_dir"] = KERNELS
        if speculative:
            values["speculative_config"] = speculative
        self._values = {name: found for name, value in values.items() if (found := _plain(name, value)) is not None}

    def to_json(self) -> str:
        """A JSON object."""
        return json.dumps(self._values)


def _plain(name: str, value: object) -> object:
    """A value as JSON has it; None if it is not set."""
    if name == "hf_token" and isinstance(value, bool):
        return None
    if name == "max_model_len" and value == -1:
        return "auto"
    if name == "dtype" and not isinstance(value, str) and value is not None:
        return str(value).rsplit(".", 1)[-1]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (Path, os.PathLike)):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): found for key, item in value.items() if (found := _plain("", item)) is not None}
    if isinstance(value, (list, tuple)):
        return [_plain("", item) for item in value]
    if hasattr(type(value), "__index__"):
        return int(value)  # type: ignore[call-overload]
    if hasattr(type(value), "__float__"):
        return float(value)  # type: ignore[arg-type]
    raise TypeError(f"{name}: found a value of type {type(value).__name__}, expected a plain value")


def _parsed(text: str) -> Any:
    """A value of a command line: JSON, or text."""
    try:
        return json.loads(text.lower() if text in ("True", "False", "None") else text)
    except ValueError:
        return text


class EngineArgs:
    """Settings of an engine, as attributes. The names are those of `LLM`."""

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        Settings(type(self).__name__ + "()", {"model": model, **settings})
        self.model = model
        self.__dict__.update(settings)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds a flag for each setting. Values are checked when an engine starts."""
        for name in sorted({*_quire.settings(False), *OF_VLLM}):
            longs = ["--" + name.replace("_", "-")] + (["--" + name] if "_" in name else [])
            read = _parsed if name in OF_VLLM else str
            parser.add_argument(*longs, dest=name, nargs="?", const=True, default=None, type=read)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Takes the settings from the result of a parser."""
        names = {*_quire.settings(False), *OF_VLLM}
        given = {name: value for name, value in vars(args).items() if name in names and value is not None}
        return cls(**given)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class AsyncEngineArgs(EngineArgs):
    """Settings of an engine for `AsyncLLM`."""
