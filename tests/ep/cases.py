"""Random but reproducible inputs for a group of ranks, and what each rank does with them.

``check_on_rank`` runs in a worker: it rebuilds the inputs of all ranks from the case, so that only the case travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ncclep.ep import DispatchOutput, EPOptions, Routing, close_engine, combine, dispatch, fp8
from tests.ep.oracle import Expected, expected_combine, expected_dispatch, expected_fp8_rows, expected_probs_grad

SKEWS = ("uniform", "one_expert", "one_rank", "nobody", "repeated")


@dataclass(frozen=True)
class Case:
    """A routing of ``len(num_tokens)`` ranks."""

    num_tokens: tuple[int, ...]
    num_local: int = 2
    top_k: int = 2
    hidden: int = 8
    dtype: torch.dtype = torch.float32
    skew: str = "uniform"
    drop: float = 0.0
    alignment: int = 1
    budgets: tuple[int, ...] | None = None
    rows_per_expert: int | None = None
    engine: str = "auto"
    payload: str = "input"
    fp8_power_of_two: bool = False
    row_format: str = "input"
    seed: int = 0

    @property
    def num_ranks(self) -> int:
        return len(self.num_tokens)

    @property
    def num_experts(self) -> int:
        return self.num_local * self.num_ranks

    def options(self, rank: int) -> EPOptions:
        budget = None if self.budgets is None else self.budgets[rank]
        return EPOptions(
            engine=self.engine,
            alignment=self.alignment,
            budget=budget,
            rows_per_expert=self.rows_per_expert,
            payload=self.payload,
            fp8_power_of_two=self.fp8_power_of_two,
            row_format=self.row_format,
        )

    def quantized(self, tokens: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """FP8 values and scales of every rank's tokens."""
        return [fp8.quantize(x, power_of_two=self.fp8_power_of_two) for x in tokens]

    def carried(self, tokens: list[Tensor]) -> list[Tensor]:
        """What arrives of tokens that travel."""
        if self.payload == "input":
            return tokens
        return [fp8.dequantize(*q, self.dtype) for q in self.quantized(tokens)]


def _numbers(shape: tuple[int, ...], case: Case, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)


def _topk(case: Case, num_tokens: int, generator: torch.Generator) -> Tensor:
    shape = (num_tokens, case.top_k)
    if case.skew == "one_expert":
        idx = torch.full(shape, case.num_experts - 1)
    elif case.skew == "one_rank":
        idx = torch.randint(0, case.num_local, shape, generator=generator)
    elif case.skew == "nobody":
        idx = torch.full(shape, -1)
    elif case.skew == "repeated":
        idx = torch.randint(0, case.num_experts, (num_tokens, 1), generator=generator).repeat(1, case.top_k)
    else:
        scores = torch.rand(num_tokens, max(case.num_experts, case.top_k), generator=generator)
        idx = scores.topk(case.top_k, dim=1).indices % case.num_experts
    return idx.masked_fill(torch.rand(shape, generator=generator) < case.drop, -1)


@dataclass
class Inputs:
    """Per rank: tokens, ids, probs, gradient of the result, and of the probs."""

    x: list[Tensor]
    idx: list[Tensor]
    probs: list[Tensor]
    grad_y: list[Tensor]


def make_inputs(case: Case) -> Inputs:
    g = torch.Generator().manual_seed(case.seed)
    wide = torch.float64 if case.dtype == torch.float64 else torch.float32
    return Inputs(
        x=[_numbers((t, case.hidden), case, g) for t in case.num_tokens],
        idx=[_topk(case, t, g) for t in case.num_tokens],
        probs=[torch.rand(t, case.top_k, generator=g, dtype=wide) for t in case.num_tokens],
        grad_y=[_numbers((t, case.hidden), case, g) for t in case.num_tokens],
    )


def fake_experts(rows: Tensor, row: int) -> Tensor:
    """A different multiple of every row, so that no two rows can be confused."""
    scale = 1 + (torch.arange(rows.shape[0], device=rows.device).unsqueeze(1) * 7 + row) % 5
    return rows * scale.to(rows.dtype)


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, scales: Tensor, link: Tensor) -> Tensor:
        return fp8.dequantize(rows, scales, link.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, grad


def wide_rows(out: DispatchOutput) -> Tensor:
    """Rows in the dtype of the tokens, differentiable, whatever their format: what an expert computes with."""
    return out.rows if out.scales is None else _Dequantize.apply(out.rows, out.scales, out.link)


def equal(got: Tensor, want: Tensor, what: str) -> None:
    got = got.cpu()
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert torch.equal(got, want), f"{what}: differs by up to {(got - want).abs().max()}"


def _expected(case: Case, inputs: Inputs, tokens: list[Tensor]) -> list[Expected]:
    """What every rank gets from a dispatch of ``tokens`` with the routing of ``inputs``."""
    return expected_dispatch(
        case.carried(tokens),
        inputs.idx,
        inputs.probs,
        case.num_experts,
        alignment=case.alignment,
        budgets=None if case.budgets is None else list(case.budgets),
        rows_per_expert=case.rows_per_expert,
    )


def check_on_rank(case: Case, device: str = "cpu", *, keep_engine: bool = False) -> None:
    """Forward and backward of dispatch and combine on this rank's ``device``, bit for bit against the oracle.

    ``keep_engine``: use the group's engine as earlier cases left it, and leave it to later ones.
    """
    distributed = dist.is_initialized()
    rank = dist.get_rank() if distributed else 0
    group = dist.group.WORLD if distributed else None
    if not keep_engine:
        close_engine(group)  # whatever an earlier test has asked for
    inputs = make_inputs(case)
    expected = _expected(case, inputs, inputs.x)
    x = inputs.x[rank].clone().to(device).requires_grad_()
    probs = inputs.probs[rank].clone().to(device).requires_grad_()
    try:
        routing = Routing(inputs.idx[rank].to(device), probs, case.num_experts)
        out = dispatch(x, routing, group, case.options(rank))
        _check_output(out, expected[rank])
        _check_format(out, case, inputs, expected, rank)

        expert_out = [fake_experts(e.rows, 1) for e in expected]
        y = combine(fake_experts(wide_rows(out), 1), out.handle)
        equal(y.detach(), expected_combine(expected, expert_out, list(case.num_tokens))[rank], "combined tokens")

        # Gradient of the probs: each row's own number, so that a swap shows.
        probs_weight = [torch.arange(1, e.probs.numel() + 1, dtype=e.probs.dtype) for e in expected]
        loss = (y * inputs.grad_y[rank].to(device)).sum() + (out.probs * probs_weight[rank].to(device)).sum()
        loss.backward()
        dispatched_grad = _expected(case, inputs, inputs.grad_y)
        grad_rows = [fake_experts(e.rows, 1) for e in dispatched_grad]
        equal(x.grad, expected_combine(expected, grad_rows, list(case.num_tokens))[rank], "gradient of the tokens")
        equal(probs.grad, expected_probs_grad(expected, probs_weight, inputs.idx)[rank], "gradient of the probs")
    finally:
        if not keep_engine:
            close_engine(group)


def _check_output(out: DispatchOutput, want: Expected) -> None:
    equal(wide_rows(out).detach(), want.rows, "rows")
    equal(out.probs.detach(), want.probs, "probs of the rows")
    assert out.tokens_per_expert.tolist() == want.tokens_per_expert
    assert out.handle.valid_per_expert.tolist() == want.valid_per_expert
    assert int(out.dropped) == want.dropped
    assert out.handle.num_rows == out.rows.shape[0]


def _check_format(out: DispatchOutput, case: Case, inputs: Inputs, expected: list[Expected], rank: int) -> None:
    """FP8 rows are the bits of the quantised tokens, and ``link`` stands for them in the graph."""
    if case.row_format == "input":
        assert out.scales is None
        assert out.link is None
        return
    values, scales = zip(*case.quantized(inputs.x), strict=True)
    rows, row_scales = expected_fp8_rows(expected, list(values), list(scales))[rank]
    assert out.rows.dtype == torch.float8_e4m3fn
    equal(out.rows.view(torch.uint8), rows.view(torch.uint8), "bits of the FP8 rows")
    equal(out.scales, row_scales, "scales of the FP8 rows")
    assert not out.rows.requires_grad
    assert not out.scales.requires_grad
    assert out.link.requires_grad
    assert out.link.untyped_storage().nbytes() == out.link.element_size()
    equal(out.link.detach(), torch.zeros_like(expected[rank].rows), "link")
