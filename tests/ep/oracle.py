"""Dispatch and combine of all ranks at once, in loops that share no code with the engines."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Expected:
    """What one rank must get from dispatch. ``origin[n]`` is (source rank, token, column), None for a pad row."""

    rows: Tensor
    probs: Tensor
    tokens_per_expert: list[int]
    valid_per_expert: list[int]
    dropped: int
    origin: list[tuple[int, int, int] | None]


def expected_dispatch(
    xs: list[Tensor],
    idxs: list[Tensor],
    probs: list[Tensor],
    num_experts: int,
    *,
    alignment: int = 1,
    budgets: list[int] | None = None,
    rows_per_expert: int | None = None,
) -> list[Expected]:
    """One :class:`Expected` per rank."""
    num_ranks, hidden = len(xs), xs[0].shape[1]
    num_local = num_experts // num_ranks
    result = []
    for rank in range(num_ranks):
        origin, sizes, valid, dropped = [], [], [], 0
        for expert in range(rank * num_local, (rank + 1) * num_local):
            zone = [
                (source, token, column)
                for source in range(num_ranks)
                for token in range(xs[source].shape[0])
                for column in range(idxs[source].shape[1])
                if int(idxs[source][token, column]) == expert
            ]
            size = -(-len(zone) // alignment) * alignment if rows_per_expert is None else rows_per_expert
            if budgets is not None:
                size = min(size, budgets[rank] - len(origin))
            kept = zone[:size]
            dropped += len(zone) - len(kept)
            origin += kept + [None] * (size - len(kept))
            sizes.append(size)
            valid.append(len(kept))
        if budgets is not None:
            origin += [None] * (budgets[rank] - len(origin))
        rows = torch.zeros(len(origin), hidden, dtype=xs[0].dtype)
        row_probs = torch.zeros(len(origin), dtype=probs[0].dtype)
        for n, where in enumerate(origin):
            if where is not None:
                source, token, column = where
                rows[n] = xs[source][token]
                row_probs[n] = probs[source][token, column]
        result.append(Expected(rows, row_probs, sizes, valid, dropped, origin))
    return result


def expected_fp8_rows(
    expected: list[Expected], values: list[Tensor], scales: list[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Per rank the FP8 rows ``[N, H]`` and their scales, given every rank's quantised tokens; a pad row is 0 and 1."""
    result = []
    for e in expected:
        rows = torch.zeros(len(e.origin), values[0].shape[1]).to(values[0].dtype)
        row_scales = torch.ones(len(e.origin), scales[0].shape[1])
        for n, where in enumerate(e.origin):
            if where is not None:
                source, token, _ = where
                rows[n] = values[source][token]
                row_scales[n] = scales[source][token]
        result.append((rows, row_scales))
    return result


def expected_combine(expected: list[Expected], rows: list[Tensor], num_tokens: list[int]) -> list[Tensor]:
    """Sum ``rows[rank]`` at their tokens: float32 inside a rank, rounded, then float32 over ranks, rounded."""
    hidden, dtype = rows[0].shape[1], rows[0].dtype
    wide = torch.promote_types(dtype, torch.float32)
    result = [torch.zeros(t, hidden, dtype=wide) for t in num_tokens]
    for rank, e in enumerate(expected):
        partial: dict[tuple[int, int], Tensor] = {}
        for n, where in enumerate(e.origin):  # rows ascend in expert
            if where is not None:
                key = where[:2]
                partial[key] = partial.get(key, torch.zeros(hidden, dtype=wide)) + rows[rank][n].to(wide)
        for (source, token), value in partial.items():
            result[source][token] += value.to(dtype).to(wide)
    return [y.to(dtype) for y in result]


def expected_probs_grad(expected: list[Expected], grads: list[Tensor], idxs: list[Tensor]) -> list[Tensor]:
    """Bring ``grads[rank]`` ``[N]`` back to their pairs."""
    result = [torch.zeros(idx.shape, dtype=grads[0].dtype) for idx in idxs]
    for rank, e in enumerate(expected):
        for n, where in enumerate(e.origin):
            if where is not None:
                source, token, column = where
                result[source][token, column] = grads[rank][n]
    return result
