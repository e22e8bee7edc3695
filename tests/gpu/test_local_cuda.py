"""The local engine on a GPU: the oracle's results, and replay from a CUDA graph while the routing changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from moe_ncclep.ep import DispatchOutput, EPOptions, Routing, combine, dispatch
from moe_ncclep.ep.options import ROW_FORMATS
from tests.ep.cases import Case, check_on_rank, wide_rows
from tests.ep.test_contract import cases

pytestmark = pytest.mark.gpu1

FORMATS = pytest.mark.parametrize(("payload", "row_format"), [("input", "input"), ("fp8", "input"), ("fp8", "fp8")])
FEW = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@FEW
@given(case=cases(1))
def test_any_case(case: Case):
    check_on_rank(case, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [256, 200], ids=["whole-blocks", "short-block"])
@pytest.mark.parametrize("row_format", ROW_FORMATS)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_fp8_payload(dtype, hidden, row_format, power_of_two):
    case = Case(
        (9,),
        top_k=3,
        hidden=hidden,
        dtype=dtype,
        payload="fp8",
        fp8_power_of_two=power_of_two,
        row_format=row_format,
        alignment=8,
    )
    check_on_rank(case, device="cuda")


@pytest.mark.parametrize("budgets", [None, (16,)], ids=["exact", "budget"])
@FORMATS
def test_deterministic_algorithms(budgets, payload, row_format):
    torch.use_deterministic_algorithms(True)
    try:
        case = Case((9,), top_k=3, alignment=8, budgets=budgets, payload=payload, row_format=row_format)
        check_on_rank(case, device="cuda")
    finally:
        torch.use_deterministic_algorithms(False)


TOKENS, TOP_K, EXPERTS, HIDDEN = 64, 4, 8, 128


def _step(x: Tensor, idx: Tensor, probs: Tensor, options: EPOptions) -> tuple[DispatchOutput, list[Tensor]]:
    """Forward and backward; everything that comes out."""
    out = dispatch(x, Routing(idx, probs, EXPERTS), options=options)
    rows = wide_rows(out)
    y = combine(rows * out.probs.unsqueeze(1).to(x.dtype), out.handle)
    weights = torch.arange(1, TOKENS + 1, device=x.device, dtype=torch.float32).unsqueeze(1) / TOKENS
    grads = torch.autograd.grad((y.float() * weights).sum(), [x, probs])
    return out, [rows.detach(), out.probs.detach(), out.tokens_per_expert, out.dropped, y.detach(), *grads]


def _inputs(seed: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    idx = torch.rand(TOKENS, EXPERTS, generator=g).topk(TOP_K, dim=1).indices
    if seed % 2:
        idx = idx.masked_fill(torch.rand(TOKENS, TOP_K, generator=g) < 0.3, -1)
    x = torch.randn(TOKENS, HIDDEN, generator=g).bfloat16()
    return (
        x.to(device).requires_grad_(),
        idx.to(device),
        torch.rand(TOKENS, TOP_K, generator=g).to(device).requires_grad_(),
    )


@FORMATS
@pytest.mark.parametrize("budget", [TOKENS * TOP_K + EXPERTS * 16, 128], ids=["room", "overflow"])
def test_a_captured_step_follows_the_routing(budget, payload, row_format):
    options = EPOptions(budget=budget, alignment=16, payload=payload, row_format=row_format)
    x, idx, probs = _inputs(0, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            _step(x, idx, probs, options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # raises if anything waits for the device
        _, captured = _step(x, idx, probs, options)

    for seed in range(1, 5):
        new = _inputs(seed, "cuda")
        with torch.no_grad():
            for static, value in zip((x, idx, probs), new, strict=True):
                static.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        _, eager = _step(*new, options)
        for got, want in zip(captured, eager, strict=True):
            assert torch.equal(got.cpu(), want.cpu())
        used = int((new[1] >= 0).sum())
        assert int(captured[2].sum()) <= budget
        assert (int(captured[3]) == 0) == (budget > used)
