"""FP8 payload: E4M3 values with one float32 scale per 1x128 block, in plain PyTorch.

The format of DeepSeek-V3's training (arXiv 2412.19437, section 3.3.2). This module is the specification; GPU engines
fuse the same arithmetic into their kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
"""Values that share a scale, along the hidden dimension."""

E4M3_MAX = 448.0


def num_blocks(hidden: int) -> int:
    """Scales in a row of ``hidden`` values; the last block may be short."""
    return -(-hidden // BLOCK)


def row_bytes(hidden: int) -> int:
    """Bytes of a quantised row: one a value, four a scale."""
    return hidden + 4 * num_blocks(hidden)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise ``x`` ``[M, H]`` to E4M3 values ``[M, H]`` and float32 scales ``[M, ceil(H / 128)]``.

    ``value * scale`` approximates ``x``; the largest magnitude of a block maps to 448. Blocks of zeros get scale 1.
    A block with an infinity or nan comes back as nan: errors stay visible.
    """
    hidden = x.shape[1]
    blocks = _blocked(x.float())
    largest = blocks.abs().amax(dim=2)
    # On CUDA a division by a number would be a multiplication by its rounded reciprocal.
    scales = torch.where(largest == 0, torch.ones_like(largest), largest / torch.full_like(largest, E4M3_MAX))
    # A subnormal block can round its scale to 0.
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
    values = (blocks / scales.unsqueeze(2)).clamp(-E4M3_MAX, E4M3_MAX)
    return values.flatten(1)[:, :hidden].to(torch.float8_e4m3fn), scales


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values * scales`` as ``[M, H]`` in ``dtype``."""
    blocks = _blocked(values.float()) * scales.unsqueeze(2)
    return blocks.flatten(1)[:, : values.shape[1]].to(dtype)


def pack(x: Tensor) -> Tensor:
    """Quantise ``[M, H]`` to bytes ``[M, row_bytes(H)]``: values, then scales."""
    values, scales = quantize(x)
    return torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], dim=1)


def unpack(packed: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
    """Inverse of :func:`pack` up to the rounding of the quantisation."""
    values = packed[:, :hidden].contiguous().view(torch.float8_e4m3fn)
    scales = packed[:, hidden:].contiguous().view(torch.float32)
    return dequantize(values, scales, dtype)


def _blocked(x: Tensor) -> Tensor:
    m, hidden = x.shape
    short = num_blocks(hidden) * BLOCK - hidden
    return torch.nn.functional.pad(x, (0, short)).view(m, num_blocks(hidden), BLOCK)
