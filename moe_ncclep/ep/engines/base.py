"""What an engine is: three collective calls without autograd."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import ClassVar

import torch.distributed as dist
from torch import Tensor

from moe_ncclep.ep.handle import DispatchHandle
from moe_ncclep.ep.options import EPOptions
from moe_ncclep.ep.routing import Routing


class Engine(ABC):
    """Moves tokens between the ranks of one group.

    ``dispatch`` and ``combine`` serve forward and backward alike: the backward of dispatch is a combine of gradients,
    the backward of combine is a dispatch. All ranks of the group make the same calls in the same order, also a rank
    without tokens.

    Args:
        group: process group, or None for a single process without torch.distributed.
    """

    name: ClassVar[str]

    def __init__(self, group: dist.ProcessGroup | None):
        # Weak, so that the table of engines does not keep a group alive that everybody else has let go.
        self._group = None if group is None else weakref.ref(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, None in a process without torch.distributed.

        Raises:
            RuntimeError: if the group is gone; None instead would mean the default group to every collective.
        """
        group = None if self._group is None else self._group()
        if group is None and self._group is not None:
            raise RuntimeError("the process group of this engine no longer exists; keep it until the last backward")
        return group

    @classmethod
    @abstractmethod
    def unavailable(cls, group: dist.ProcessGroup | None) -> str | None:
        """Why this rank cannot use the engine for ``group``, or None if it can. No communication."""

    @classmethod
    def probe(cls, group: dist.ProcessGroup | None, asked_for: bool) -> str | None:
        """Why ``group`` cannot use the engine, found out together with the other ranks, or None if it can.

        Collective: called on all ranks, in the same order of engines, once no rank has found the engine
        ``unavailable``; with a choice left to us only until one engine passes, with an explicit choice only for that
        one. One rank's reason, or exception, rules the engine out for all. A probe that communicates sees to it itself
        that a rank which fails does not leave the others waiting.

        Args:
            asked_for: the engine was named by the user, so what is slow but right is no reason.
        """
        return None

    @abstractmethod
    def route(self, x: Tensor, routing: Routing, options: EPOptions) -> DispatchHandle:
        """Exchange the routing of tokens like ``x`` ``[T, H]`` (its values are not read).

        Raises:
            ValueError: on every rank if the call is wrong on any rank.
        """

    @abstractmethod
    def dispatch(
        self, handle: DispatchHandle, x: Tensor, probs: Tensor | None, *, row_format: str = "input"
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Send tokens and probs to the experts.

        Args:
            handle: of :meth:`route`; its options name the payload.
            x: ``[T, H]`` tokens or gradients, contiguous, in the dtype of the handle.
            probs: ``[T, K]`` float32 or float64, or None.
            row_format: ``"input"`` for rows in the dtype of ``x``; ``"fp8"``, with that payload only, for the values
                and scales that travelled, neither dequantised nor quantised again. Not taken from the options: the
                backward of combine dispatches gradients and always asks for ``"input"``.

        Returns:
            rows: ``[N, H]`` in the dtype of ``x``, pad rows 0; or float8_e4m3fn, pad rows 0.
            scales: None; or ``[N, ceil(H / 128)]`` float32, pad rows 1 (what quantising a row of zeros gives).
            probs: ``[N]`` in their dtype, pad rows 0; None if there were none.
        """

    @abstractmethod
    def combine(self, handle: DispatchHandle, rows: Tensor, row_probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Sum rows ``[N, H]`` at their tokens ``[T, H]`` in the fixed order; ``row_probs`` ``[N]`` go to ``[T, K]``."""

    def refuse(self, problem: str) -> None:
        """Take part in the other ranks' next ``route`` with an error instead; raises ``ValueError`` on all ranks."""
        raise ValueError(problem)

    def close(self) -> None:  # noqa: B027 - most engines hold nothing
        """Free what the engine holds. Collective."""
