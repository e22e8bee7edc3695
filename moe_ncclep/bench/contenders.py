"""The contenders between real processes, by name."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moe_ncclep.bench.alltoall import AllToAll
from moe_ncclep.bench.contender import Contender
from moe_ncclep.bench.shapes import Shape
from moe_ncclep.ep import EPOptions, Routing, close_engine
from moe_ncclep.ep.engines.select import choose_engine

NAMES = ("nvlink", "collective", "alltoall", "nccl_ep")


class EngineContender(Contender):
    """One of our engines, on a group of its own."""

    def __init__(self, name: str, shape: Shape, num_sms: int | None):
        super().__init__(name)
        self._shape = shape
        self._options = EPOptions(engine=name, payload=shape.payload, row_format=shape.row_format, num_sms=num_sms)
        self._group = dist.new_group()
        try:
            self._engine = choose_engine(self._group, self._options).engine
        except ValueError:
            dist.destroy_process_group(self._group)
            raise

    def route(self, topk_idx: Tensor, x: Tensor, probs: Tensor) -> Any:
        """See :meth:`Contender.route`."""
        return self._engine.route(x, Routing(topk_idx, probs, self._shape.experts), self._options)

    def dispatch(self, plan: Any, x: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Contender.dispatch`."""
        rows, _, row_probs = self._engine.dispatch(plan, x, probs, row_format=self._shape.row_format)
        return rows, row_probs

    def combine(self, plan: Any, rows: Tensor, row_probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Contender.combine`."""
        return self._engine.combine(plan, rows, row_probs)

    def wire_bytes(self, plan: Any) -> int:
        """See :meth:`Contender.wire_bytes`."""
        return plan.traffic.dispatch_bytes

    def close(self) -> None:
        """See :meth:`Contender.close`."""
        close_engine(self._group)
        dist.destroy_process_group(self._group)


def make(name: str, shape: Shape, num_sms: int | None) -> Contender:
    """The contender called ``name``. Collective.

    Raises:
        ValueError: on every rank, with the reason, if it cannot run here.
    """
    if name == "alltoall":
        if shape.payload != "input":
            raise ValueError(f"alltoall moves tokens as they are, not payload {shape.payload!r}")
        return AllToAll(shape)
    if name == "nccl_ep":
        found = importlib.util.find_spec("nccl") is not None and importlib.util.find_spec("nccl.ep") is not None
        raise ValueError("nccl.ep is installed, but no engine for it yet" if found else "nccl.ep is not installed")
    return EngineContender(name, shape, num_sms)
