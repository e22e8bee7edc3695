"""Runs a whole dispatch and combine, forward and backward, on virtual ranks and compares it with the specification."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_ncclep.bench.reference import Reference
from moe_ncclep.ep import EPOptions
from moe_ncclep.ep.nvlink import library
from moe_ncclep.ep.nvlink.sizing import Demand
from moe_ncclep.ep.nvlink.virtual import VirtualGroup
from tests.ep.cases import Case


@dataclass(frozen=True)
class Shape:
    """One dispatch of a group of virtual ranks."""

    num_tokens: tuple[int, ...]
    hidden: int = 2048
    top_k: int = 8
    num_experts: int = 64
    dtype: torch.dtype = torch.bfloat16
    skew: str = "uniform"
    drop: float = 0.0
    alignment: int = 1
    budgets: tuple[int, ...] | None = None
    rows_per_expert: int | None = None
    payload: str = "input"
    row_format: str = "input"
    power_of_two: bool = False
    capacity: int | None = None
    """Tokens that staging holds at a time; None: all."""
    id_dtype: torch.dtype = torch.int64
    seed: int = 0

    @property
    def size(self) -> int:
        return len(self.num_tokens)

    def options(self, rank: int) -> EPOptions:
        return EPOptions(
            alignment=self.alignment,
            budget=None if self.budgets is None else self.budgets[rank],
            rows_per_expert=self.rows_per_expert,
            payload=self.payload,
            row_format=self.row_format,
            fp8_power_of_two=self.power_of_two,
        )

    def topk(self, num_tokens: int, generator: torch.Generator) -> Tensor:
        shape, device = (num_tokens, self.top_k), generator.device
        if self.skew == "one_expert":
            idx = torch.full(shape, self.num_experts - 1, device=device)
        elif self.skew == "one_rank":
            idx = torch.randint(0, self.num_experts // self.size, shape, generator=generator, device=device)
        elif self.skew == "repeated":
            idx = torch.randint(0, self.num_experts, shape, generator=generator, device=device)
        else:
            scores = torch.rand(num_tokens, self.num_experts, generator=generator, device=device)
            idx = scores.topk(self.top_k, dim=1, sorted=False).indices
        dropped = torch.rand(shape, generator=generator, device=device) < self.drop
        return idx.masked_fill(dropped, -1).to(self.id_dtype)


def supported(case: Case) -> Case:
    """``case``, or the nearest that the engine takes: no float64, and FP8 rows of whole 16 bytes."""
    if case.dtype == torch.float64:
        case = replace(case, dtype=torch.float32)
    return replace(case, hidden=-(-case.hidden // 16) * 16) if case.row_format == "fp8" else case


def make_group(shape: Shape, **kwargs) -> VirtualGroup:
    """A group of virtual ranks whose buffers suit ``shape``."""
    lib = library.load()
    demand = Demand.of(
        lib,
        num_ranks=shape.size,
        max_tokens=max(max(shape.num_tokens), 1),
        top_k=shape.top_k,
        hidden=shape.hidden,
        row_bytes=shape.hidden * shape.dtype.itemsize,
        fp8=shape.payload == "fp8",
    )
    if shape.capacity is not None:
        demand = _Bounded(**vars(demand), capacity=shape.capacity)
    return VirtualGroup(lib, demand, **kwargs)


@dataclass(frozen=True)
class _Bounded(Demand):
    """A demand whose staging holds ``capacity`` tokens."""

    capacity: int = 1

    def workspace(self, library):
        workspace = Demand(
            **{name: value for name, value in vars(self).items() if name not in ("capacity", "max_tokens")},
            max_tokens=self.capacity,
        ).workspace(library)
        workspace.routing_bytes = -(-4 * self.top_k * self.max_tokens // 128) * 128
        return workspace


def same(got: Tensor, want: Tensor, what: str) -> None:
    """Equal in every bit but the sign of zero."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if got.dtype == torch.float8_e4m3fn:
        got = got.view(torch.uint8)
    if torch.equal(got, want):
        return
    wrong = (got != want) & ~((got != got) & (want != want))
    if not wrong.any():
        return
    where = wrong.nonzero()
    raise AssertionError(
        f"{what}: {len(where)} of {wrong.numel()} values differ, in {len(where[:, 0].unique())} of {len(wrong)} rows, "
        f"first at {where[0].tolist()}: {got[tuple(where[0])]} instead of {want[tuple(where[0])]}"
    )


def check(shape: Shape, group: VirtualGroup | None = None, *, rounds: int = 1) -> VirtualGroup:
    """Dispatch, combine and both backward passes, ``rounds`` times with new inputs. Returns the group for reuse."""
    group = group or make_group(shape)
    generator = torch.Generator("cuda").manual_seed(shape.seed)

    def numbers(*size: int, dtype: torch.dtype = shape.dtype) -> Tensor:
        return torch.randn(*size, generator=generator, device="cuda").to(dtype)

    for _ in range(rounds):
        x = [numbers(t, shape.hidden) for t in shape.num_tokens]
        idx = [shape.topk(t, generator) for t in shape.num_tokens]
        probs = [torch.rand(t, shape.top_k, generator=generator, device="cuda") for t in shape.num_tokens]
        options = [shape.options(rank) for rank in range(shape.size)]
        want = Reference(idx, shape.num_experts, options)

        routed = group.route(idx, shape.num_experts, x[0], options)
        for rank, (got, expected) in enumerate(zip(routed, want.ranks, strict=True)):
            zones = expected.zones
            assert got.num_rows == zones.num_rows, f"rank {rank}: {got.num_rows} rows, expected {zones.num_rows}"
        _check_dispatch(shape, group, routed, want, x, probs)
        for rank, (got, expected) in enumerate(zip(routed, want.ranks, strict=True)):
            same(got.plan.int64("zone_sizes").cpu(), expected.zones.sizes.cpu(), f"sizes of rank {rank}")
            same(got.plan.int64("zone_valid").cpu(), expected.zones.valid.cpu(), f"valid rows of rank {rank}")
            assert int(got.plan.int64("dropped")) == int(expected.zones.dropped), f"dropped of rank {rank}"
        _check_combine(shape, group, routed, want, numbers)
        group.raise_if_failed()
    return group


def _check_dispatch(shape, group, routed, want, x, probs):
    kwargs = {"payload_fp8": shape.payload == "fp8", "power_of_two": shape.power_of_two}
    outputs = group.dispatch(routed, x, probs, rows_fp8=shape.row_format == "fp8", **kwargs)
    torch.cuda.synchronize()
    group.raise_if_failed()
    for rank, ((_, _, got), expected) in enumerate(zip(outputs, want.row_probs(probs), strict=True)):
        same(got, expected, f"probs of rank {rank}")
    if shape.row_format == "fp8":
        for rank, ((rows, scales, _), (values, want_scales)) in enumerate(
            zip(outputs, want.fp8_rows(x, shape.power_of_two), strict=True)
        ):
            same(scales, want_scales, f"scales of rank {rank}")
            same(rows, values, f"FP8 rows of rank {rank}")
        return
    tokens = want.carried(x, shape.power_of_two) if shape.payload == "fp8" else x
    for rank, ((rows, _, _), expected) in enumerate(zip(outputs, want.rows(tokens), strict=True)):
        same(rows, expected, f"rows of rank {rank}")
    # The backward of combine: no probs.
    for rank, ((rows, _, none), expected) in enumerate(
        zip(group.dispatch(routed, x, None, **kwargs), want.rows(tokens), strict=True)
    ):
        assert none is None
        same(rows, expected, f"gradient rows of rank {rank}")


def _check_combine(shape, group, routed, want, numbers):
    rows = [numbers(r.num_rows, shape.hidden) for r in routed]
    for rank, ((y, none), expected) in enumerate(
        zip(group.combine(routed, rows, None), want.combine(rows), strict=True)
    ):
        assert none is None
        same(y, expected, f"result of rank {rank}")
    row_probs = [numbers(r.num_rows, dtype=torch.float32) for r in routed]
    outputs = group.combine(routed, rows, row_probs)
    for rank, ((y, _), expected) in enumerate(zip(outputs, want.combine(rows), strict=True)):
        same(y, expected, f"gradient of rank {rank}")
    for rank, ((_, got), expected) in enumerate(zip(outputs, want.pair_probs(row_probs), strict=True)):
        same(got, expected, f"gradient of the probs of rank {rank}")
