"""Floors: the same bytes moved by the plainest kernels on one GPU, with no rank to wait for."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # without a CUDA build of torch
    triton: ModuleType | None = None

_BLOCK = 1024

if triton is not None:

    @triton.jit
    def _gather_kernel(source, index, out, hidden, BLOCK: tl.constexpr):
        row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        token = tl.load(index + row)
        inside = columns < hidden
        tl.store(out + row * hidden + columns, tl.load(source + token * hidden + columns, mask=inside), mask=inside)

    @triton.jit
    def _reduce_kernel(rows, index, out, hidden, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
        token, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < hidden
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for k in tl.static_range(TOP_K):
            row = tl.load(index + token * TOP_K + k)
            total += tl.load(rows + row * hidden + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + token * hidden + columns, total.to(out.dtype.element_ty), mask=inside)


def replicates(tokens: Tensor, token_of_row: Tensor, out: Tensor) -> dict[str, Callable[[], object]]:
    """Ways to copy ``tokens`` ``[T, H]`` to ``out`` ``[N, H]``: row n is token ``token_of_row[n]`` (int64)."""
    ways: dict[str, Callable[[], object]] = {
        "index_select": lambda: torch.index_select(tokens, 0, token_of_row, out=out)
    }
    if triton is not None:
        grid = (out.shape[0], triton.cdiv(out.shape[1], _BLOCK))
        ways["triton"] = lambda: _gather_kernel[grid](tokens, token_of_row, out, out.shape[1], BLOCK=_BLOCK)
    return ways


def reduces(rows: Tensor, rows_of_token: Tensor, out: Tensor) -> dict[str, Callable[[], object]]:
    """Ways to sum the rows ``rows_of_token`` ``[T, K]`` of ``rows`` ``[N, H]`` into ``out`` ``[T, H]``."""
    if triton is None:
        return {"embedding_bag": lambda: torch.nn.functional.embedding_bag(rows_of_token, rows, mode="sum")}
    top_k = rows_of_token.shape[1]
    grid = (out.shape[0], triton.cdiv(out.shape[1], _BLOCK))
    return {"triton": lambda: _reduce_kernel[grid](rows, rows_of_token, out, out.shape[1], TOP_K=top_k, BLOCK=_BLOCK)}
