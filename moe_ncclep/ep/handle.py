"""What ``dispatch`` hands to ``combine`` and to both backward passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_ncclep.ep import fp8
from moe_ncclep.ep.options import EPOptions

if TYPE_CHECKING:
    from moe_ncclep.ep.engines.base import Engine


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Rows that leave this rank in one dispatch (as many come back in its combine).

    ``remote_tokens`` counts a token once per destination rank, as it travels; ``remote_pairs`` counts it once per
    expert, as an all-to-all without de-duplication would send it. Rows that stay on this rank are in neither.
    """

    remote_tokens: int
    remote_pairs: int
    payload_row_bytes: int
    input_row_bytes: int

    @classmethod
    def of(cls, x: Tensor, options: EPOptions, remote_tokens: int, remote_pairs: int) -> Traffic:
        """Traffic of rows like those of ``x`` ``[T, H]``."""
        plain = x.shape[1] * x.element_size()
        return cls(
            remote_tokens=remote_tokens,
            remote_pairs=remote_pairs,
            payload_row_bytes=fp8.row_bytes(x.shape[1]) if options.payload == "fp8" else plain,
            input_row_bytes=plain,
        )

    @property
    def dispatch_bytes(self) -> int:
        """Payload bytes that this rank sends in dispatch."""
        return self.remote_tokens * self.payload_row_bytes

    @property
    def alltoall_bytes(self) -> int:
        """Payload bytes that an all-to-all without de-duplication would send in dispatch."""
        return self.remote_pairs * self.input_row_bytes


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DispatchHandle:
    """Immutable record of one routing. Owns everything that ``combine`` and both backward passes read.

    No state hides anywhere else: a handle may be used several times (recompute), and any number may be in flight.
    """

    engine: Engine
    options: EPOptions
    num_tokens: int
    """T of this rank."""
    top_k: int
    hidden: int
    dtype: torch.dtype
    """dtype of the tokens, of what combine takes, and of all gradients."""
    num_experts: int
    num_rows: int
    """N, pad rows included."""
    tokens_per_expert: Tensor
    """``[L]`` int64: rows of each local expert, pad rows included; sums to N unless a budget leaves a tail.
    On the host where the engine knows it, else on the device of the tokens."""
    valid_per_expert: Tensor
    """``[L]`` int64: rows of each local expert that hold a token."""
    dropped: Tensor
    """``[]`` int64: pairs routed to this rank that did not fit and were left out (0 with exact sizes)."""
    needs_grad: bool
    """Whether any rank of the group needs the backward of this dispatch, which all must then enter."""
    traffic: Traffic | None = None
    """None where the engine never reads the counts on the host."""
    plan: Any = None
    """Index tensors of the engine."""

    def __repr__(self) -> str:
        return (
            f"DispatchHandle(engine={self.engine.name}, T={self.num_tokens}, K={self.top_k}, H={self.hidden}, "
            f"E={self.num_experts}, N={self.num_rows}, dtype={self.dtype})"
        )

    def raise_if_dropped(self) -> None:
        """Raise ``ValueError`` if a budget was exceeded. Reads the device: not for the hot path."""
        dropped = int(self.dropped)
        if dropped:
            limit = (
                f"budget {self.options.budget}"
                if self.options.rows_per_expert is None
                else f"rows_per_expert {self.options.rows_per_expert}"
            )
            raise ValueError(f"{dropped} token-expert pairs did not fit into {limit} and were dropped")


@dataclass(frozen=True, kw_only=True, eq=False)
class DispatchOutput:
    """Result of ``dispatch``.

    ``rows`` ``[N, H]`` are expert-major; inside an expert in (source rank, source token) order, then zero pad rows.
    ``probs`` ``[N]`` are their probabilities (0 on pad rows), None if the routing had none.

    With ``row_format="fp8"`` the rows are float8_e4m3fn and ``scales`` ``[N, ceil(H / 128)]`` float32 belong to them
    (1 on pad rows), one for each 1x128 block. Autograd does not flow through either, hence ``link``: ``[N, H]`` in the
    dtype of the tokens, all zeros, without memory of its own. It stands for the rows in the graph. An expert takes it
    as one more input and returns the gradient of the rows, in full precision, as the gradient of ``link``:

    .. code-block:: python

        class Linear(torch.autograd.Function):
            @staticmethod
            def forward(ctx, rows, scales, link, weight):  # link is not read
                ctx.save_for_backward(rows, scales, weight)
                return fp8_matmul(rows, scales, weight)

            @staticmethod
            def backward(ctx, grad):
                rows, scales, weight = ctx.saved_tensors
                wide = fp8.dequantize(rows, scales, grad.dtype)
                return None, None, grad @ weight.t(), wide.t() @ grad  # [N, H] for link

        y = combine(Linear.apply(out.rows, out.scales, out.link, weight), out.handle)

    ``scales`` and ``link`` are None with ``row_format="input"``.
    """

    rows: Tensor
    scales: Tensor | None = None
    link: Tensor | None = None
    probs: Tensor | None
    handle: DispatchHandle

    @property
    def tokens_per_expert(self) -> Tensor:
        """``[L]`` int64, see :attr:`DispatchHandle.tokens_per_expert`."""
        return self.handle.tokens_per_expert

    @property
    def dropped(self) -> Tensor:
        """``[]`` int64, see :attr:`DispatchHandle.dropped`."""
        return self.handle.dropped
