"""R = 1 in plain PyTorch: the specification of rows, padding, budgets and the order of sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ncclep.ep.checks import check_dispatch
from moe_ncclep.ep.engines.base import Engine
from moe_ncclep.ep.handle import DispatchHandle, Traffic
from moe_ncclep.ep.options import EPOptions
from moe_ncclep.ep.payload import deliver, encode
from moe_ncclep.ep.placement import Placement, Zones, sum_in_order
from moe_ncclep.ep.routing import Routing, bad_ids, describe_bad_ids, histogram, sort_by_expert


@dataclass(frozen=True, eq=False)
class _Plan:
    placement: Placement
    column: Tensor
    """``[T, K]``: the caller's column of each pair, pairs sorted by expert."""


class LocalEngine(Engine):
    """All experts on this rank. With a budget on a GPU it never waits for the device, so CUDA graphs can capture it;
    ids out of range then count as dropped instead of raising."""

    name = "local"

    @classmethod
    def unavailable(cls, group: dist.ProcessGroup | None) -> str | None:
        """Only a group of one rank will do."""
        size = 1 if group is None else dist.get_world_size(group)
        return None if size == 1 else f"needs a group of 1 rank, this one has {size}"

    def route(self, x: Tensor, routing: Routing, options: EPOptions) -> DispatchHandle:
        """See :meth:`Engine.route`."""
        check_dispatch(x, routing, self.size, options)
        num_experts, topk_idx = routing.num_experts, routing.topk_idx.long()
        bad = bad_ids(topk_idx, num_experts)
        if topk_idx.numel() and not (options.fixed_sizes and x.is_cuda):
            lowest, highest = torch.stack(torch.aminmax(topk_idx)).tolist()  # one wait for the device
            problem = describe_bad_ids(lowest, highest, num_experts)
            if problem is not None:
                raise ValueError(problem)

        expert, column = sort_by_expert(topk_idx.masked_fill(bad, -1))
        counts = histogram(expert, num_experts)
        zones = Zones.from_counts(counts if options.fixed_sizes else counts.cpu(), options)
        return DispatchHandle(
            engine=self,
            options=options,
            num_tokens=x.shape[0],
            top_k=topk_idx.shape[1],
            hidden=x.shape[1],
            dtype=x.dtype,
            num_experts=num_experts,
            num_rows=zones.num_rows,
            tokens_per_expert=zones.sizes,
            valid_per_expert=zones.valid,
            dropped=zones.dropped + bad.sum().to(zones.dropped.device),
            needs_grad=routing.needs_grad(x),
            traffic=Traffic.of(x, options, remote_tokens=0, remote_pairs=0),
            plan=_Plan(Placement.build(expert, counts, zones), column),
        )

    def dispatch(
        self, handle: DispatchHandle, x: Tensor, probs: Tensor | None, *, row_format: str = "input"
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See :meth:`Engine.dispatch`. An FP8 payload is rounded as if it had travelled."""
        placement, column = handle.plan.placement, handle.plan.column
        rows, scales = deliver(handle, placement, encode(handle, x), row_format)
        return rows, scales, None if probs is None else placement.spread_probs(probs.gather(1, column))

    def combine(self, handle: DispatchHandle, rows: Tensor, row_probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Engine.combine`."""
        placement, column = handle.plan.placement, handle.plan.column
        y = sum_in_order(rows, placement.row_of_pair)
        if row_probs is None:
            return y, None
        pair_probs = placement.collect_probs(row_probs)
        return y, torch.empty_like(pair_probs).scatter_(1, column, pair_probs)
