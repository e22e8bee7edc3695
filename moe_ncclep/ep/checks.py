"""Host-side checks of what a caller passes: a ``ValueError`` names the value and the limit."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ncclep.ep.options import EPOptions
from moe_ncclep.ep.routing import Routing

MAX_EXPERTS = 2048
"""Experts of a group (E). With expert tensor parallelism every shard counts as one."""

MAX_TOP_K = 128
"""Experts of a token (K)."""

ROW_ALIGNMENT_BYTES = 16
"""Rows are moved in pieces of this size."""

PAYLOAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""dtypes of tokens. Their position is their code on the wire."""


def check_dispatch(x: Tensor, routing: Routing, group_size: int, options: EPOptions) -> None:
    """Raise ``ValueError`` for anything wrong that the host can see without reading the device."""
    options.validate()
    idx, probs = routing.topk_idx, routing.probs
    if x.dim() != 2:
        raise ValueError(f"tokens must be [T, H], got shape {tuple(x.shape)}")
    if x.dtype not in PAYLOAD_DTYPES:
        raise ValueError(f"tokens of {x.dtype} are not supported; choose one of {', '.join(map(str, PAYLOAD_DTYPES))}")
    if x.shape[1] == 0 or x.shape[1] * x.element_size() % ROW_ALIGNMENT_BYTES:
        raise ValueError(
            f"a row of {x.shape[1]} {x.dtype} values has {x.shape[1] * x.element_size()} bytes; "
            f"it must be a positive multiple of {ROW_ALIGNMENT_BYTES}"
        )
    if idx.dim() != 2 or idx.shape[0] != x.shape[0]:
        raise ValueError(f"topk_idx must be [T, K] with T = {x.shape[0]}, got shape {tuple(idx.shape)}")
    if idx.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8):
        raise ValueError(f"topk_idx must hold signed integers, got {idx.dtype}")
    if not 1 <= idx.shape[1] <= MAX_TOP_K:
        raise ValueError(f"top-k must be between 1 and {MAX_TOP_K}, got {idx.shape[1]}")
    if idx.device != x.device:
        raise ValueError(f"topk_idx is on {idx.device}, the tokens are on {x.device}")
    if probs is not None:
        if probs.shape != idx.shape:
            raise ValueError(f"probs have shape {tuple(probs.shape)}, topk_idx has {tuple(idx.shape)}")
        if not probs.is_floating_point():
            raise ValueError(f"probs must be floating point, got {probs.dtype}")
        if probs.device != x.device:
            raise ValueError(f"probs are on {probs.device}, the tokens are on {x.device}")
    check_num_experts(routing.num_experts, group_size)
    if options.budget is not None and options.budget % options.alignment:
        raise ValueError(f"budget {options.budget} is not a multiple of alignment {options.alignment}")


def check_num_experts(num_experts: int, group_size: int) -> None:
    """Raise ``ValueError`` unless ``num_experts`` can be spread evenly over ``group_size`` ranks."""
    if not isinstance(num_experts, int) or not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_experts must be between 1 and {MAX_EXPERTS}, got {num_experts!r}")
    if num_experts % group_size:
        raise ValueError(f"{num_experts} experts cannot be spread evenly over {group_size} ranks")
