"""The NVLink engine without a GPU: its host code as it is, and in place of the kernels the specification over gloo.

Shows what the host decides: agreement, growth, refusals, failures. Not how rows travel.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ncclep.bench.reference import Reference
from moe_ncclep.ep import EPOptions
from moe_ncclep.ep.engines import nvlink
from moe_ncclep.ep.nvlink import buffer, library, memory, structs
from moe_ncclep.ep.nvlink.endpoint import Endpoint, RouteCall, RouteReport
from moe_ncclep.ep.nvlink.plan import RoutePlan
from tests.nvlink import shared

CPU = torch.device("cpu")


def size_library() -> ctypes.CDLL:
    """The functions of the compiled kernels that only compute sizes."""
    lib = shared.load()
    lib.ncclep_fp8_fits = lambda hidden, top_k, row_bytes, restore: row_bytes < 1 << 17
    return lib


class HostMemory:
    """Counts the buffers that live on this rank."""

    living = 0
    allocated: list[int] = []  # noqa: RUF012 - of this process

    def __init__(self, num_bytes: int, group: dist.ProcessGroup):
        self.local, self.peers = torch.zeros(64, dtype=torch.uint8), torch.zeros(dist.get_world_size(group))
        self._group = weakref.ref(group)
        HostMemory.living += 1
        HostMemory.allocated.append(num_bytes)

    def close(self, collective: bool) -> None:
        HostMemory.living -= 1
        if collective:
            dist.barrier(self._group())


class HostEndpoint:
    """Stands for :class:`Endpoint`; every operation is an exchange of everything over gloo."""

    plan_shape = Endpoint.plan_shape
    raise_if_failed = Endpoint.raise_if_failed

    def __init__(self, lib, workspace, local: Tensor, peers: Tensor, rank: int, plan_tokens: int):
        self.library, self.workspace, self.rank, self.plan_tokens = lib, workspace, rank, plan_tokens
        self.size, self.device, self.num_sms, self.timeout_s = workspace.num_ranks, CPU, 8, 1.0
        self.failure = structs.Failure()
        self.calls: list[RouteCall] = []

    @property
    def failed(self) -> bool:
        return self.failure.code != 0

    def fail(self, kind: int, expected: int = 0, seen: int = 0) -> None:
        """As every rank's kernels would report it."""
        self.failure = structs.Failure(code=1 << 63 | kind << 40 | 2 << 32, expected=expected, seen=seen)

    def start_route(self, call: RouteCall) -> tuple[RoutePlan, int]:
        self.calls.append(call)
        shape = self.plan_shape(call)
        plan = RoutePlan(shape, CPU)
        everyone = [None] * self.size
        dist.all_gather_object(everyone, (call.header, call.topk_idx, call.exact, shape.plan_tokens, call.budget))
        self._headers = torch.tensor([header for header, *_ in everyone])
        begin, end = call.agreed_words
        agreed = self._headers[:, begin:end]
        differs = bool((agreed != agreed[0]).any()) or bool(self._headers[:, call.refused_word].any())
        ids = [idx for _, idx, *_ in everyone]
        bad = any(((idx < -1) | (idx >= call.num_experts)).any() for idx in ids)
        tokens = self._headers[:, call.tokens_word].tolist()
        self._report = SimpleNamespace(verdict=structs.AGREED, max_tokens=max(tokens), counts=torch.zeros(0))
        fixed = [not exact for _, _, exact, *_ in everyone]
        if any(fixed) and (differs or max(tokens) > shape.plan_tokens):
            self.fail(*((2,) if differs else (3, shape.plan_tokens, max(tokens))))
        if differs or (bad and call.exact):
            self._report.verdict = structs.COMPLAINT
        elif max(tokens) > shape.plan_tokens:
            self._report.verdict = structs.GROW
        else:
            options = [
                EPOptions(alignment=call.alignment, budget=budget, rows_per_expert=call.rows_per_expert)
                for *_, budget in everyone
            ]
            legal = [idx.masked_fill((idx < -1) | (idx >= call.num_experts), -1) for idx in ids]
            plan.reference = Reference(legal, call.num_experts, options)
            zones = plan.reference.ranks[self.rank].zones
            plan.int64("zone_sizes").copy_(zones.sizes)
            plan.int64("zone_valid").copy_(zones.valid)
            plan.int64("dropped").copy_(zones.dropped)
            num_local = call.num_experts // self.size
            flat = torch.cat([idx.flatten() for idx in legal])
            mine = flat[flat.div(num_local, rounding_mode="floor") == self.rank] - self.rank * num_local
            self._report.counts = torch.bincount(mine.long(), minlength=num_local)
        return plan, len(self.calls) if call.exact else 0

    def read_report(self, sequence: int, num_local_experts: int) -> RouteReport:
        assert sequence == len(self.calls), "the report of another call"
        report = self._report
        needs_grad = bool(self._headers[:, self.calls[-1].needs_grad_word].any())
        return RouteReport(report.verdict, report.max_tokens, needs_grad, 0, 0, report.counts)

    def last_headers(self) -> Tensor:
        return self._headers

    def dispatch(self, plan, x, probs, num_rows, *, payload_fp8, rows_fp8, power_of_two, num_ctas):
        everyone = [None] * self.size
        dist.all_gather_object(everyone, (x, probs))
        x = [tokens for tokens, _ in everyone]
        row_probs = None if probs is None else plan.reference.row_probs([theirs for _, theirs in everyone])[self.rank]
        if rows_fp8:
            values, scales = plan.reference.fp8_rows(x, power_of_two)[self.rank]
            return values.view(torch.float8_e4m3fn), scales, row_probs
        tokens = plan.reference.carried(x, power_of_two) if payload_fp8 else x
        rows = plan.reference.rows(tokens)[self.rank]
        assert rows.shape[0] == num_rows
        return rows, None, row_probs

    def combine(self, plan, rows, row_probs, *, num_ctas):
        everyone = [None] * self.size
        dist.all_gather_object(everyone, (rows, row_probs))
        y = plan.reference.combine([theirs for theirs, _ in everyone])[self.rank]
        if row_probs is None:
            return y, None
        return y, plan.reference.pair_probs([theirs for _, theirs in everyone])[self.rank]


class HostNVLinkEngine(nvlink.NVLinkEngine):
    """The engine on CPU tensors."""

    _device_type = "cpu"

    @classmethod
    def unavailable(cls, group):
        return None

    @classmethod
    def probe(cls, group, asked_for):
        return None


@contextmanager
def without_gpu() -> Iterator[None]:
    """Engine ``nvlink`` is :class:`HostNVLinkEngine`."""
    from moe_ncclep.ep.engines import select

    engines = tuple(HostNVLinkEngine if cls is nvlink.NVLinkEngine else cls for cls in select._BEST_FIRST)
    with (
        mock.patch.object(library, "load", size_library),
        mock.patch.object(memory, "allocate", HostMemory),
        mock.patch.object(buffer, "Endpoint", HostEndpoint),
        mock.patch.object(select, "_BEST_FIRST", engines),
    ):
        yield
