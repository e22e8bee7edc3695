"""NVTX ranges that cost nothing where there is no CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def nvtx_range(name: str, enabled: bool = True) -> Iterator[None]:
    """Mark a phase for nsys and torch's profiler as ``moe_ncclep.<name>``; inert until CUDA is initialised."""
    if not (enabled and torch.cuda.is_initialized()):
        yield
        return
    torch.cuda.nvtx.range_push(f"moe_ncclep.{name}")
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
