"""What travels for a token, and the rows that are made of it: the dtype of the tokens or FP8, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ncclep.ep import fp8
from moe_ncclep.ep.handle import DispatchHandle
from moe_ncclep.ep.placement import Placement, append_zero_row


def encode(handle: DispatchHandle, x: Tensor) -> Tensor:
    """Tokens ``[M, H]`` as they travel: themselves, or bytes ``[M, fp8.row_bytes(H)]``."""
    options = handle.options
    return fp8.pack(x, power_of_two=options.fp8_power_of_two) if options.payload == "fp8" else x


def deliver(
    handle: DispatchHandle, placement: Placement, arrived: Tensor, row_format: str
) -> tuple[Tensor, Tensor | None]:
    """Make rows and their scales of tokens that have travelled.

    Args:
        handle: of the dispatch.
        placement: from V arrived tokens to N rows.
        arrived: V tokens in the form of :func:`encode`.
        row_format: see :meth:`moe_ncclep.ep.engines.base.Engine.dispatch`.

    Returns:
        See :meth:`moe_ncclep.ep.engines.base.Engine.dispatch`. FP8 rows are copies of the bytes that travelled.
    """
    if row_format == "fp8":
        pad = fp8.pack(torch.zeros(1, handle.hidden, device=arrived.device))
        return fp8.split(placement.spread(torch.cat([arrived, pad])), handle.hidden)
    if handle.options.payload == "fp8":
        arrived = fp8.unpack(arrived, handle.hidden, handle.dtype)
    return placement.spread(append_zero_row(arrived)), None
