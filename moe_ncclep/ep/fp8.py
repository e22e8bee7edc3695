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

_MANTISSA = 0x007F_FFFF
_EXPONENT = 0x7F80_0000
"""Bits of a float32."""


def num_blocks(hidden: int) -> int:
    """Scales in a row of ``hidden`` values; the last block may be short."""
    return -(-hidden // BLOCK)


def row_bytes(hidden: int) -> int:
    """Bytes of a quantised row: one a value, four a scale."""
    return hidden + 4 * num_blocks(hidden)


def quantize(x: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise ``x`` ``[M, H]``, any floating dtype, in float32 arithmetic.

    Of each block: scale = largest magnitude / 448, at least the smallest normal float32, 1 for a block of zeros; with
    ``power_of_two`` rounded up to the next power of two. Then value = x * (1 / scale), clamped to +-448 and rounded to
    the nearest E4M3. Both divisions are true ones, rounded to nearest.

    A block with an infinity or nan comes back from :func:`dequantize` as nan throughout: errors stay visible.

    Returns:
        Values ``[M, H]`` float8_e4m3fn and scales ``[M, ceil(H / 128)]`` float32; ``value * scale`` approximates ``x``.
    """
    hidden = x.shape[1]
    blocks = _blocked(x.float())
    largest = blocks.abs().amax(dim=2)
    # Tensor by tensor: on CUDA a division by a number would be a multiplication by its rounded reciprocal.
    scales = torch.where(largest == 0, torch.ones_like(largest), largest / torch.full_like(largest, E4M3_MAX))
    # A subnormal block can round its scale to 0, and the reciprocal of a subnormal scale could overflow.
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
    if power_of_two:
        scales = _round_up_to_power_of_two(scales)
    # One division a block. An infinite scale has the reciprocal 0, which makes its infinities nan.
    reciprocals = torch.ones_like(scales) / scales
    values = (blocks * reciprocals.unsqueeze(2)).clamp(-E4M3_MAX, E4M3_MAX)
    return values.flatten(1)[:, :hidden].to(torch.float8_e4m3fn), scales


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values * scales`` as ``[M, H]`` in ``dtype``."""
    blocks = _blocked(values.float()) * scales.unsqueeze(2)
    return blocks.flatten(1)[:, : values.shape[1]].to(dtype)


def pack(x: Tensor, *, power_of_two: bool = False) -> Tensor:
    """Quantise ``[M, H]`` to bytes ``[M, row_bytes(H)]``: values, then scales."""
    values, scales = quantize(x, power_of_two=power_of_two)
    return torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], dim=1)


def split(packed: Tensor, hidden: int) -> tuple[Tensor, Tensor]:
    """The values and scales of :func:`quantize` in bytes ``[M, row_bytes(H)]`` of :func:`pack`."""
    # Copies in any case: a slice of one row counts as contiguous wherever it starts, also between two float32.
    values, scales = (
        part.clone(memory_format=torch.contiguous_format) for part in (packed[:, :hidden], packed[:, hidden:])
    )
    return values.view(torch.float8_e4m3fn), scales.view(torch.float32)


def unpack(packed: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
    """Inverse of :func:`pack` up to the rounding of the quantisation."""
    return dequantize(*split(packed, hidden), dtype)


def _round_up_to_power_of_two(scales: Tensor) -> Tensor:
    """Normal positive float32 to the power of two at or above each; infinity and nan stay what they are."""
    bits = scales.view(torch.int32)
    rounded = (bits + _MANTISSA) & _EXPONENT  # a carry out of the mantissa is the step to the next exponent
    return torch.where(scales.isfinite(), rounded, bits).view(torch.float32)


def _blocked(x: Tensor) -> Tensor:
    m, hidden = x.shape
    short = num_blocks(hidden) * BLOCK - hidden
    return torch.nn.functional.pad(x, (0, short)).view(m, num_blocks(hidden), BLOCK)
