"""The NVLink kernels on virtual ranks of one GPU, beside floors that move the same bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_ncclep.bench import floors
from moe_ncclep.bench.mismatch import Mismatch
from moe_ncclep.bench.reference import Reference
from moe_ncclep.bench.shapes import Shape, draw_topk
from moe_ncclep.bench.timing import Graph, Timing, alternate
from moe_ncclep.ep import EPOptions, fp8
from moe_ncclep.ep.nvlink import library
from moe_ncclep.ep.nvlink.sizing import Demand
from moe_ncclep.ep.nvlink.virtual import Routed, VirtualGroup

FLOOR_OF = {"dispatch": "replicate", "dispatch+probs": "replicate", "combine": "reduce", "combine+probs": "reduce"}
"""Which floor a phase is measured against. FP8 rows have none: half of their bytes are computed."""


class VirtualBench:
    """One shape on ``num_ranks`` virtual ranks that share ``num_sms`` SMs (None: all of them).

    Raises:
        ValueError: if the shape cannot be served.
        Mismatch: from :meth:`check`.
    """

    def __init__(self, shape: Shape, num_ranks: int, num_sms: int | None = None, seed: int = 0):
        shape.validate(num_ranks)
        if num_sms is not None and num_sms < 2 * num_ranks:
            raise ValueError(f"num_sms must be at least 2 for each of {num_ranks} virtual ranks, got {num_sms}")
        self.shape, self.num_ranks, self.num_sms = shape, num_ranks, num_sms
        lib = library.load()
        demand = Demand.of(
            lib,
            num_ranks=num_ranks,
            max_tokens=shape.tokens,
            top_k=shape.top_k,
            hidden=shape.hidden,
            row_bytes=shape.row_bytes,
            fp8=shape.payload == "fp8",
        )
        self._group = VirtualGroup(lib, demand, ctas_per_rank=None if num_sms is None else num_sms // num_ranks)
        generator = torch.Generator("cuda").manual_seed(seed)
        self._idx = [draw_topk(shape, num_ranks, rank, seed).cuda() for rank in range(num_ranks)]
        self._x = [self._numbers(shape.tokens, generator) for _ in range(num_ranks)]
        self._probs = [
            torch.rand(shape.tokens, shape.top_k, generator=generator, device="cuda") for _ in range(num_ranks)
        ]
        exact = self._route([self._options()] * num_ranks)
        self.remote_tokens = max(routed.report.remote_tokens for routed in exact)
        self._fixed = [self._options(routed.num_rows) for routed in exact]
        self._routed = self._route(self._fixed)
        self._rows = [self._numbers(routed.num_rows, generator) for routed in exact]
        self._row_probs = [torch.rand(r.num_rows, generator=generator, device="cuda") for r in exact]
        self.reference = Reference(self._idx, shape.experts, self._fixed)

    def check(self) -> None:
        """Compare all results with the specification, bit for bit."""
        shape, want = self.shape, self.reference
        if shape.row_format == "fp8":
            for got, (values, scales) in zip(self._dispatch(self._probs), want.fp8_rows(self._x, False), strict=True):
                _same(got[0].view(torch.uint8), values, "FP8 rows")
                _same(got[1], scales, "scales")
        else:
            tokens = want.carried(self._x, False) if shape.payload == "fp8" else self._x
            for got, rows in zip(self._dispatch(self._probs), want.rows(tokens), strict=True):
                _same(got[0], rows, "rows of dispatch")
        for got, y in zip(self._combine(self._row_probs), want.combine(self._rows), strict=True):
            _same(got[0], y, "result of combine")
        self._group.raise_if_failed()

    def measure(self, repetitions: int) -> list[dict]:
        """Time route, dispatch and combine and their floors, taking turns; one result a phase."""
        work: dict[str, Callable[[], object]] = {
            "route": lambda: self._route(self._fixed),
            "dispatch": lambda: self._dispatch(None),
            "dispatch+probs": lambda: self._dispatch(self._probs),
        }
        if self.shape.payload == "input":
            work["combine"] = lambda: self._combine(None)
            work["combine+probs"] = lambda: self._combine(self._row_probs)
            work |= self._floors()
        graphs = {name: Graph(call) for name, call in work.items()}
        times = alternate({name: graph.time_us for name, graph in graphs.items()}, repetitions)
        self._group.raise_if_failed()
        timings = {name: Timing.of(values) for name, values in times.items()}
        best = {}
        for name, timing in timings.items():
            floor, _, _ = name.partition(":")
            if name != floor and timing.p50_us < best.get(floor, float("inf")):
                best[floor] = timing.p50_us
        return [self._result(name, timing, best) for name, timing in timings.items()]

    def _result(self, name: str, timing: Timing, best: dict[str, float]) -> dict:
        is_floor = ":" in name
        floor = None if is_floor else best.get(FLOOR_OF.get(name, ""))
        row_bytes = fp8.row_bytes(self.shape.hidden) if self.shape.payload == "fp8" else self.shape.row_bytes
        moves = name.startswith(("dispatch", "combine"))
        return {
            "contender": "floor" if is_floor else "nvlink",
            "phase": name,
            **timing.record(),
            "wire_bytes": self.remote_tokens * row_bytes if moves else 0,
            "floor_us": floor,
            "share_of_floor": None if floor is None else round(floor / timing.p50_us, 3),
        }

    def _floors(self) -> dict[str, Callable[[], object]]:
        """Replicate and reduce of all ranks together, as one kernel over one memory."""
        tokens = torch.cat(self._x)
        placements = [rank.placement for rank in self.reference.ranks]
        token_of_row = torch.cat([placement.token_of_row for placement in placements]).clamp(max=len(tokens) - 1)
        rows = torch.cat(self._rows)
        # Every pair lies on exactly one rank; its row counts from that rank's first.
        first = [0, *torch.tensor([len(r) for r in self._rows]).cumsum(0).tolist()]
        rows_of_token = torch.full((len(tokens), self.shape.top_k), -1, dtype=torch.int64, device="cuda")
        for placement, start in zip(placements, first[:-1], strict=True):
            here = placement.row_of_pair >= 0
            rows_of_token = torch.where(here, placement.row_of_pair + start, rows_of_token)
        if bool((rows_of_token < 0).any()):
            raise Mismatch("some pair has no row")
        out, total = torch.empty_like(rows), torch.empty_like(tokens)
        named = {f"replicate:{way}": call for way, call in floors.replicates(tokens, token_of_row, out).items()}
        return named | {f"reduce:{way}": call for way, call in floors.reduces(rows, rows_of_token, total).items()}

    def _options(self, budget: int | None = None) -> EPOptions:
        return EPOptions(budget=budget, payload=self.shape.payload, row_format=self.shape.row_format)

    def _numbers(self, count: int, generator: torch.Generator) -> Tensor:
        numbers = torch.randn(count, self.shape.hidden, generator=generator, device="cuda")
        return numbers.to(self.shape.torch_dtype)

    def _route(self, options: list[EPOptions]) -> list[Routed]:
        return self._group.route(self._idx, self.shape.experts, self._x[0], options)

    def _dispatch(self, probs: list[Tensor] | None) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
        quantised = {"payload_fp8": self.shape.payload == "fp8", "rows_fp8": self.shape.row_format == "fp8"}
        return self._group.dispatch(self._routed, self._x, probs, **quantised)

    def _combine(self, row_probs: list[Tensor] | None) -> list[tuple[Tensor, Tensor | None]]:
        return self._group.combine(self._routed, self._rows, row_probs)


def _same(got: Tensor, want: Tensor, what: str) -> None:
    if got.shape != want.shape or not torch.equal(got, want):
        raise Mismatch(f"engine nvlink: {what} differ from the specification")
