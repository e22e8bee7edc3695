"""Virtual ranks: all ranks of a group in one process on one GPU, each with a stream and a buffer of its own.

The kernels see nothing but a table of addresses, so they run as they would on several GPUs, at the speed of one GPU's
memory. For tests and benchmarks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ncclep.ep.nvlink import structs
from moe_ncclep.ep.nvlink.endpoint import Endpoint, RouteCall, RouteReport
from moe_ncclep.ep.nvlink.plan import RoutePlan
from moe_ncclep.ep.nvlink.sizing import Demand
from moe_ncclep.ep.options import EPOptions
from moe_ncclep.ep.placement import Zones

_WORDS = {"refused_word": 0, "needs_grad_word": 1, "tokens_word": 2, "agreed_words": (3, 8)}


@dataclass(frozen=True)
class Routed:
    """What one virtual rank knows after the exchange."""

    plan: RoutePlan
    report: RouteReport | None
    num_rows: int
    zones: Zones | None


class VirtualGroup:
    """``demand.num_ranks`` endpoints on the current GPU, which they divide evenly.

    Args:
        library: the compiled kernels.
        demand: what the communication buffers have to serve.
        ctas_per_rank: thread blocks of a kernel; all ranks' together must fit on the GPU at once.
        timeout_s: seconds until a wait in a kernel gives up.
    """

    def __init__(
        self, library: ctypes.CDLL, demand: Demand, *, ctas_per_rank: int | None = None, timeout_s: float = 20
    ):
        self.size = demand.num_ranks
        device = torch.device("cuda", torch.cuda.current_device())
        self.ctas = ctas_per_rank or torch.cuda.get_device_properties(device).multi_processor_count // self.size
        workspace = demand.workspace(library)
        num_bytes = library.ncclep_workspace_bytes(workspace)
        self.buffers = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(self.size)]
        peers = torch.tensor([buffer.data_ptr() for buffer in self.buffers], dtype=torch.int64)
        self.endpoints = [
            Endpoint(library, workspace, self.buffers[rank], peers, rank, demand.max_tokens)
            for rank in range(self.size)
        ]
        for endpoint in self.endpoints:
            endpoint.timeout_s = timeout_s
        self.streams = [torch.cuda.Stream() for _ in range(self.size)]
        torch.cuda.synchronize()

    def each(self, work: Callable[[int, Endpoint], Any]) -> list[Any]:
        """Call ``work(rank, endpoint)`` for every rank on its stream, between the work before and after."""
        current = torch.cuda.current_stream()
        results = []
        for stream in self.streams:
            stream.wait_stream(current)
        for rank, (endpoint, stream) in enumerate(zip(self.endpoints, self.streams, strict=True)):
            with torch.cuda.stream(stream):
                results.append(work(rank, endpoint))
        for stream in self.streams:
            current.wait_stream(stream)
        return results

    def route(self, topk_idx: list[Tensor], num_experts: int, like: Tensor, options: list[EPOptions]) -> list[Routed]:
        """Exchange the routing of tokens like those of ``like`` ``[?, H]``."""

        def start(rank: int, endpoint: Endpoint) -> tuple[RouteCall, RoutePlan, int]:
            call = self.call(topk_idx[rank], num_experts, like, options[rank])
            return (call, *endpoint.start_route(call))

        routed = []
        started = self.each(start)
        for rank, (call, plan, sequence) in enumerate(started):
            if not call.exact:
                rows = call.rows_per_expert
                num_rows = call.budget if rows is None else rows * (num_experts // self.size)
                routed.append(Routed(plan, None, num_rows, None))
                continue
            report = self.endpoints[rank].read_report(sequence, num_experts // self.size)
            if report.verdict != structs.AGREED:
                raise ValueError(f"virtual rank {rank}: verdict {report.verdict}, {report.max_tokens} tokens")
            zones = Zones.from_counts(report.counts, options[rank])
            routed.append(Routed(plan, report, zones.num_rows, zones))
        return routed

    def call(self, topk_idx: Tensor, num_experts: int, like: Tensor, options: EPOptions) -> RouteCall:
        """The arguments of a rank's exchange."""
        return RouteCall(
            topk_idx=topk_idx,
            num_experts=num_experts,
            hidden=like.shape[1],
            dtype=like.dtype,
            fp8=options.payload == "fp8",
            alignment=options.alignment,
            budget=options.budget,
            rows_per_expert=options.rows_per_expert,
            header=[0, 0, topk_idx.shape[0], num_experts, topk_idx.shape[1], like.shape[1]],
            num_ctas=self.ctas,
            **_WORDS,
        )

    def dispatch(
        self, routed: list[Routed], x: list[Tensor], probs: list[Tensor] | None, **kwargs: Any
    ) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
        """See :meth:`Endpoint.dispatch`."""
        return self.each(
            lambda rank, endpoint: endpoint.dispatch(
                routed[rank].plan,
                x[rank],
                None if probs is None else probs[rank],
                routed[rank].num_rows,
                num_ctas=self.ctas,
                **kwargs,
            )
        )

    def combine(
        self, routed: list[Routed], rows: list[Tensor], row_probs: list[Tensor] | None
    ) -> list[tuple[Tensor, Tensor | None]]:
        """See :meth:`Endpoint.combine`."""
        return self.each(
            lambda rank, endpoint: endpoint.combine(
                routed[rank].plan, rows[rank], None if row_probs is None else row_probs[rank], num_ctas=self.ctas
            )
        )

    def raise_if_failed(self) -> None:
        """Raise what any rank's kernels reported."""
        for endpoint in self.endpoints:
            endpoint.raise_if_failed()
