"""dispatch and combine, differentiable."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_ncclep.ep.checks import check_dispatch
from moe_ncclep.ep.engines.select import choose_engine
from moe_ncclep.ep.handle import DispatchHandle, DispatchOutput
from moe_ncclep.ep.nvtx import nvtx_range
from moe_ncclep.ep.options import EPOptions
from moe_ncclep.ep.routing import Routing

DEFAULT_OPTIONS = EPOptions()


def dispatch(
    x: Tensor,
    routing: Routing,
    group: dist.ProcessGroup | None = None,
    options: EPOptions = DEFAULT_OPTIONS,
    *,
    handle: DispatchHandle | None = None,
) -> DispatchOutput:
    """Send every token to the ranks of its experts. Collective over ``group``.

    Args:
        x: ``[T, H]`` tokens of this rank; T may differ between ranks and be 0. float32, bfloat16, float16 or float64,
            rows a multiple of 16 bytes.
        routing: expert ids and probabilities of these tokens.
        group: expert-parallel group (default: the world). Rank r holds experts ``[r * L, (r + 1) * L)``, L = E / R.
        options: equal on all ranks (``budget``, ``timeout_s`` and ``nvtx`` may differ).
        handle: of an earlier dispatch with the same expert ids; skips the exchange of the routing (recomputation).
            Its group and options count, not the arguments.

    Returns:
        Rows in expert-major order with their probs, and the handle for :func:`combine`. Differentiable in ``x`` and
        ``routing.probs``; for FP8 rows see :class:`DispatchOutput`.

    Raises:
        ValueError: on every rank of the group, if anything is wrong on any of them. With a ``handle`` nothing is
            exchanged beforehand: a mistake is raised only where it is made.
    """
    if handle is None:
        engine = choose_engine(group, options).engine
        with nvtx_range("route", options.nvtx):
            handle = engine.route(x, routing, options)
    else:
        _check_reuse(x, routing, handle)
    if handle.needs_grad and torch.is_grad_enabled() and not routing.needs_grad(x):
        x = x.clone().requires_grad_()  # the other ranks' backward is a collective, and waits for this one
    rows, scales, link, probs = _Dispatch.apply(x, routing.carried_probs(), handle)
    return DispatchOutput(rows=rows, scales=scales, link=link, probs=probs, handle=handle)


def combine(rows: Tensor, handle: DispatchHandle) -> Tensor:
    """Bring expert outputs back and sum them at their tokens. Collective over the handle's group.

    The sum is unweighted and in fixed order: on each expert rank in float32 in ascending expert id, rounded to the
    dtype of the rows; then over ranks in float32 in ascending rank. Pad rows are not read.

    Args:
        rows: ``[N, H]`` in the order of :attr:`DispatchOutput.rows` and the dtype of the tokens. For training they must
            depend on those rows (on :attr:`DispatchOutput.link` if the rows are FP8) also where N = 0: a rank that
            returns new zeros does not enter the backward of dispatch.
        handle: of the dispatch.

    Returns:
        ``[T, H]``; zero for a token without an expert. Differentiable in ``rows``.

    Raises:
        ValueError: on this rank, if ``rows`` do not match the handle.
    """
    if tuple(rows.shape) != (handle.num_rows, handle.hidden):
        raise ValueError(f"combine expects rows of shape {(handle.num_rows, handle.hidden)}, got {tuple(rows.shape)}")
    if rows.dtype != handle.dtype:
        raise ValueError(f"combine expects rows of {handle.dtype} like the tokens, got {rows.dtype}")
    return _Combine.apply(rows, handle)


def _check_reuse(x: Tensor, routing: Routing, handle: DispatchHandle) -> None:
    check_dispatch(x, routing, handle.engine.size, handle.options)
    if tuple(x.shape) != (handle.num_tokens, handle.hidden) or x.dtype != handle.dtype:
        raise ValueError(
            f"the handle was made for {handle.dtype} tokens of shape {(handle.num_tokens, handle.hidden)}, "
            f"got {x.dtype} {tuple(x.shape)}"
        )
    expected = (handle.num_tokens, handle.top_k, handle.num_experts)
    got = (*routing.topk_idx.shape, routing.num_experts)
    if got != expected:
        raise ValueError(f"the handle was made for a routing with (T, K, E) = {expected}, got {got}")


class _Dispatch(torch.autograd.Function):
    """``(x, probs)`` to ``(rows, scales, link, probs)`` as in :class:`DispatchOutput`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor | None, handle: DispatchHandle
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        ctx.handle, ctx.probs_dtype = handle, None if probs is None else probs.dtype
        # Non-reentrant checkpointing recomputes when something saved is asked for. This asks on every rank, also where
        # the experts had no rows and saved nothing; else the others' recomputation would dispatch alone.
        ctx.save_for_backward(x.new_empty(0))
        ctx.set_materialize_grads(False)  # else every backward would allocate a gradient of FP8 rows
        row_format = handle.options.row_format
        with nvtx_range("dispatch", handle.options.nvtx):
            rows, scales, row_probs = handle.engine.dispatch(handle, x, probs, row_format=row_format)
        if row_format == "input":
            return rows, None, None, row_probs
        ctx.mark_non_differentiable(rows, scales)
        return rows, scales, x.new_zeros(()).expand(rows.shape), row_probs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_rows: Tensor | None, _: None, grad_link: Tensor | None, grad_probs: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None]:
        (like,) = ctx.saved_tensors  # see forward
        handle: DispatchHandle = ctx.handle
        # Whatever this rank's own graph needs, all ranks exchange the same tensors.
        grad = grad_rows if handle.options.row_format == "input" else grad_link
        if grad is None:
            grad = like.new_zeros(handle.num_rows, handle.hidden)
        if grad_probs is None and ctx.probs_dtype is not None:
            grad_probs = like.new_zeros(handle.num_rows, dtype=ctx.probs_dtype)
        with nvtx_range("dispatch.backward", handle.options.nvtx):
            grad_x, grad_probs = handle.engine.combine(handle, grad.contiguous(), grad_probs)
        return grad_x, grad_probs, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, handle: DispatchHandle) -> Tensor:
        ctx.handle = handle
        with nvtx_range("combine", handle.options.nvtx):
            return handle.engine.combine(handle, rows.contiguous(), None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None]:
        with nvtx_range("combine.backward", ctx.handle.options.nvtx):
            return ctx.handle.engine.dispatch(ctx.handle, grad_y.contiguous(), None)[0], None
