"""FP8 rows out of dispatch: the bits that travelled, and gradients through ``link``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ncclep.ep import DispatchOutput, EPOptions, Routing, combine, dispatch, fp8
from tests.ep.cases import Case, check_on_rank, wide_rows
from tests.ranks import pool

FP8 = EPOptions(payload="fp8", row_format="fp8")
TOKENS = {1: (9,), 2: (7, 4), 4: (5, 0, 9, 2)}
BUDGETS = {1: (16,), 2: (16, 8), 4: (16, 8, 0, 24)}
LAYOUTS = ("exact", "padded", "budget", "fixed", "dropped")


def _case(world: int, layout: str, **changes: Any) -> Case:
    case = Case(
        TOKENS[world], top_k=3, hidden=200, dtype=torch.bfloat16, payload="fp8", row_format="fp8", engine="collective"
    )
    layouts = {
        "exact": {},
        "padded": {"alignment": 8},
        "budget": {"alignment": 8, "budgets": BUDGETS[world]},
        "fixed": {"rows_per_expert": 4},
        "dropped": {"drop": 0.4, "alignment": 4},
    }
    return replace(case, **layouts[layout], **changes)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_are_the_quantised_tokens(world, layout, power_of_two):
    case = _case(world, layout, fp8_power_of_two=power_of_two)
    pool(world).run(check_on_rank, case)
    if world == 1:
        check_on_rank(replace(case, engine="local"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("hidden", [8, 128, 384])
def test_any_width_and_dtype(dtype, hidden):
    pool(2).run(check_on_rank, _case(2, "padded", dtype=dtype, hidden=hidden))


@pytest.mark.parametrize("num_tokens", [(0, 0), (3, 0), (0, 2)], ids=str)
def test_idle_ranks(num_tokens):
    pool(2).run(check_on_rank, replace(_case(2, "padded"), num_tokens=num_tokens))
    pool(2).run(check_on_rank, replace(_case(2, "exact"), num_tokens=num_tokens, skew="one_rank"))


class _Linear(torch.autograd.Function):
    """An expert as users write it, see :class:`DispatchOutput`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, scales: Tensor, link: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, scales, weight)
        return fp8.dequantize(rows, scales, weight.dtype) @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, Tensor]:
        rows, scales, weight = ctx.saved_tensors
        return None, None, grad @ weight.t(), fp8.dequantize(rows, scales, grad.dtype).t() @ grad


def _experts(out: DispatchOutput, weight: Tensor) -> Tensor:
    if out.scales is None:
        return out.rows @ weight
    return _Linear.apply(out.rows, out.scales, out.link, weight)


def _layer(row_format: str, reentrant: bool | None = None) -> list[Tensor]:
    """Result and gradients of a layer with a weight on each rank. The last rank sends nothing, the first gets nothing.

    ``reentrant``: recompute the layer in the backward pass, in this mode of torch's checkpoint.
    """
    from torch.utils.checkpoint import checkpoint

    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    g = torch.Generator().manual_seed(rank)
    num_tokens = 0 if rank == size - 1 else 6
    x = torch.randn(num_tokens, 256, generator=g).requires_grad_()
    probs = torch.rand(num_tokens, 2, generator=g).requires_grad_()
    idx = torch.randint(2, 2 * size, (num_tokens, 2), generator=g)
    weight = torch.randn(256, 256, generator=g).requires_grad_()
    options = FP8.replace(alignment=4, row_format=row_format)

    def layer(x: Tensor, probs: Tensor) -> Tensor:
        out = dispatch(x, Routing(idx, probs, 2 * size), options=options)
        rows = _experts(out, weight) * out.probs.unsqueeze(1)
        return combine(rows, out.handle)

    y = layer(x, probs) if reentrant is None else checkpoint(layer, x, probs, use_reentrant=reentrant)
    (y * torch.randn(y.shape, generator=g)).sum().backward()
    return [y.detach(), x.grad, probs.grad, weight.grad]


@pytest.mark.parametrize("reentrant", [None, True, False], ids=["stored", "reentrant", "recomputed"])
@pytest.mark.parametrize("world", [2, 4])
def test_result_and_gradients_are_those_without_fp8_rows(world, reentrant):
    plain, fp8_rows = pool(world).run(_layer, "input"), pool(world).run(_layer, "fp8", reentrant)
    for want, got in zip(plain, fp8_rows, strict=True):
        assert all(torch.equal(w, g) for w, g in zip(want, got, strict=True))
    assert any(got[1].any() for got in fp8_rows)


def test_only_what_asks_for_a_gradient_gets_one():
    idx = torch.tensor([[0, 1], [1, -1]])
    x, probs = torch.ones(2, 8, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    out = dispatch(x, Routing(idx, probs, 2), options=FP8)
    out.probs.sum().backward()  # nobody uses the rows
    assert torch.equal(x.grad, torch.zeros(2, 8))
    assert probs.grad.tolist() == [[1, 1], [1, 0]]

    probs.grad = None
    out = dispatch(x, Routing(idx, probs, 2), options=FP8)
    combine(wide_rows(out), out.handle).sum().backward()  # nobody uses the probs
    assert torch.equal(x.grad, torch.tensor([[2.0], [1.0]]).expand(2, 8))
    assert torch.equal(probs.grad, torch.zeros(2, 2))

    out = dispatch(x.detach(), Routing(idx, None, 2), options=FP8)
    assert out.probs is None
    assert not out.link.requires_grad


def test_a_reused_handle_keeps_its_format():
    x, routing = torch.randn(3, 8), Routing(torch.tensor([[0], [1], [0]]), None, 2)
    out = dispatch(x, routing, options=FP8)
    again = dispatch(x, routing, handle=out.handle)
    assert torch.equal(again.rows.view(torch.uint8), out.rows.view(torch.uint8))
    assert torch.equal(again.scales, out.scales)


def test_fp8_rows_are_no_input_of_combine():
    out = dispatch(torch.ones(1, 8), Routing(torch.tensor([[0]]), None, 1), options=FP8)
    with pytest.raises(ValueError, match=r"expects rows of torch.float32 like the tokens, got torch.float8_e4m3fn"):
        combine(out.rows, out.handle)
