"""What the dispatcher needs of a Megatron configuration; everything refused is refused here, by the flag's name."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moe_ncclep.ep.checks import MAX_EXPERTS, MAX_TOP_K, ROW_ALIGNMENT_BYTES
from moe_ncclep.ep.nvlink import structs
from moe_ncclep.megatron.arguments import megatron_args
from moe_ncclep.megatron.backend import options_of

STATIC_GRAPH_SCOPES = ("full", "full_iteration", "moe")
"""CUDA graph scopes that would capture dispatch and combine."""

GRAPHABLE_ENGINES: tuple[str, ...] = ("nvlink",)
"""Engines that never wait for the device."""


def check_selection(config: Any) -> None:
    """Raise ``ValueError`` if another flag selects another dispatcher; before Megatron acts upon that flag."""
    if getattr(config, "moe_enable_deepep", False):
        raise ValueError("--moe-enable-deepep cannot be combined with --moe-token-dispatcher-type ncclep; leave it out")


def check_config(config: Any) -> None:
    """Raise ``ValueError`` for a configuration that the dispatcher cannot serve. A dense model passes."""
    options = options_of(config)
    options.validate()
    if options.row_format != "input":
        raise ValueError(
            f"row_format {options.row_format!r} cannot work with Megatron's experts, which take rows in the dtype of "
            "the tokens; leave it at 'input'"
        )
    if config.num_moe_experts is None:
        return
    _check_experts(config)
    _check_row_bytes(config)
    if overlaps_shared_experts(config):
        _check_shared_expert_overlap(config)
    _check_cuda_graphs(config)
    _check_process_group()


def overlaps_shared_experts(config: Any) -> bool:
    """Whether the model has shared experts that run beside the dispatcher; without any, the flag means nothing."""
    return config.moe_shared_expert_overlap and config.moe_shared_expert_intermediate_size is not None


def _check_experts(config: Any) -> None:
    ep, etp = config.expert_model_parallel_size, config.expert_tensor_parallel_size or 1
    if config.num_moe_experts % ep:
        raise ValueError(
            f"--num-experts {config.num_moe_experts} cannot be spread evenly over "
            f"--expert-model-parallel-size {ep} ranks"
        )
    if config.num_moe_experts * etp > MAX_EXPERTS:
        raise ValueError(
            f"--num-experts {config.num_moe_experts} times --expert-tensor-parallel-size {etp} "
            f"is over the limit of {MAX_EXPERTS}"
        )
    engine = options_of(config).engine
    most, of_engine = (structs.MAX_TOP_K, f" of --ncclep-engine {engine}") if engine == "nvlink" else (MAX_TOP_K, "")
    if config.moe_router_topk * etp > most:
        raise ValueError(
            f"--moe-router-topk {config.moe_router_topk} times --expert-tensor-parallel-size {etp} "
            f"is over the limit of {most}{of_engine}"
        )


def _check_row_bytes(config: Any) -> None:
    latent = getattr(config, "moe_latent_size", None)
    flag, width = ("--moe-latent-size", latent) if latent else ("--hidden-size", config.hidden_size)
    # 16-bit training dispatches 16-bit rows even where the parameters are kept in float32.
    dtype = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else config.params_dtype
    row_bytes = width * torch.empty((), dtype=dtype).element_size()
    if row_bytes % ROW_ALIGNMENT_BYTES:
        raise ValueError(
            f"{flag} {width} in {dtype} makes rows of {row_bytes} bytes; they must be a multiple of "
            f"{ROW_ALIGNMENT_BYTES}"
        )


def _check_shared_expert_overlap(config: Any) -> None:
    # Mostly Megatron's own rules, which could not see the flag while it was held back.
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        raise ValueError("--moe-shared-expert-overlap cannot work with --overlap-moe-expert-parallel-comm")
    recomputed = config.recompute_modules or [] if config.recompute_granularity == "selective" else []
    if "shared_experts" in recomputed:
        raise ValueError("--moe-shared-expert-overlap cannot work with --recompute-modules shared_experts")
    # Only the dispatchers of the inference-optimized layers know how to do this.
    if getattr(config, "moe_latent_size", None) and config.transformer_impl != "inference_optimized":
        raise ValueError("--moe-shared-expert-overlap cannot work with --moe-latent-size")
    if config.cuda_graph_impl == "transformer_engine":
        raise ValueError("--moe-shared-expert-overlap cannot work with --cuda-graph-impl transformer_engine")


def _check_cuda_graphs(config: Any) -> None:
    if getattr(config, "cuda_graph_impl", "none") in (None, "none"):
        return
    scopes = getattr(config, "cuda_graph_modules", None)
    if scopes is None:
        scopes = getattr(config, "cuda_graph_scope", None)
    names = [getattr(scope, "name", str(scope)) for scope in (scopes or [])]
    whole = config.cuda_graph_impl if config.cuda_graph_impl in STATIC_GRAPH_SCOPES else None
    captured = whole or next((name for name in names if name in STATIC_GRAPH_SCOPES), None)
    if captured is None and not names:
        captured = "full"  # an empty list means the whole layer
    inference = getattr(config, "inference_cuda_graph_scope", None)
    if captured is None and getattr(inference, "name", inference) == "block":
        captured = "block"  # generation captures all layers at once, whatever is captured in training
    engine = options_of(config).engine
    if captured is None:
        return
    problem = f"--cuda-graph-impl {config.cuda_graph_impl} with scope {captured!r} would capture the dispatcher"
    if engine not in GRAPHABLE_ENGINES:
        raise ValueError(
            f"{problem}, but engine {engine!r} reads the row counts on the host; use scopes such as attn, moe_router, "
            "moe_preprocess"
        )
    if not config.moe_pad_expert_input_to_capacity:
        raise ValueError(
            f"{problem}, whose row counts the host reads; they are fixed only with --moe-pad-expert-input-to-capacity"
        )


def _check_process_group() -> None:
    # Such a group delivers uninitialised memory, which would be taken for expert ids.
    fake = getattr(megatron_args(), "fake_process_group", False)
    if fake or (dist.is_available() and dist.is_initialized() and dist.get_backend() == "fake"):
        raise ValueError("--fake-process-group cannot work with --moe-token-dispatcher-type ncclep; use alltoall")
