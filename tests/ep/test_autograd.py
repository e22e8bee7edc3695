"""Gradients against numerical ones, in float64, and what autograd must keep alive."""

from __future__ import annotations

import pytest
import torch

from moe_ncclep.ep import EPOptions, Routing, combine, dispatch
from tests.ranks import pool


def _layer(x, probs, idx, num_experts, weights, options=None):
    """A little MoE layer whose experts are nonlinear in the tokens and in the probs."""
    out = dispatch(x, Routing(idx, probs, num_experts), options=options or EPOptions())
    zones = out.tokens_per_expert.tolist()
    used = out.rows[: sum(zones)]
    parts = [torch.tanh(r @ w) for r, w in zip(used.split(zones), weights, strict=True)]
    y = torch.cat([*parts, out.rows[sum(zones) :]]) * out.probs.unsqueeze(1).sin()
    return combine(y, out.handle)


@pytest.mark.parametrize("options", [EPOptions(), EPOptions(alignment=4), EPOptions(budget=6)], ids=str)
def test_gradcheck_local(options):
    torch.manual_seed(0)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(5, 3, dtype=torch.float64, requires_grad=True)
    idx = torch.tensor([[0, 1, 2], [2, 2, -1], [-1, -1, -1], [1, 0, 0], [2, 1, 0]])
    weights = torch.randn(3, 4, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, p: _layer(x, p, idx, 3, weights, options), (x, probs))


def _numerical_gradient_across_ranks(num_tokens: tuple[int, ...]) -> None:
    """Perturb one element of one rank at a time; the loss is the sum over ranks."""
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(3)
    xs = [torch.randn(t, 2, generator=g, dtype=torch.float64) for t in num_tokens]
    ps = [torch.rand(t, 2, generator=g, dtype=torch.float64) for t in num_tokens]
    idx = [torch.randint(-1, 2 * size, (t, 2), generator=g) for t in num_tokens]
    weights = torch.randn(2 * size, 2, 2, generator=g, dtype=torch.float64)[2 * rank : 2 * rank + 2]
    x, p = xs[rank].clone().requires_grad_(), ps[rank].clone().requires_grad_()
    _layer(x, p, idx[rank], 2 * size, weights).sin().sum().backward()

    def total(which: list, source: int, i: int, delta: float) -> torch.Tensor:
        if rank == source:
            which[source].view(-1)[i] += delta
        value = _layer(xs[rank], ps[rank], idx[rank], 2 * size, weights).sin().sum().detach()
        dist.all_reduce(value)
        if rank == source:
            which[source].view(-1)[i] -= delta
        return value

    eps = 1e-6
    for which, grad in ((xs, x.grad), (ps, p.grad)):
        for source in range(size):
            for i in range(which[source].numel()):
                slope = (total(which, source, i, eps) - total(which, source, i, -eps)) / (2 * eps)
                if rank == source:
                    torch.testing.assert_close(grad.view(-1)[i], slope, atol=1e-7, rtol=1e-6)


def test_numerical_gradient_two_ranks():
    pool(2).run(_numerical_gradient_across_ranks, (3, 2))


def test_numerical_gradient_four_ranks_one_idle():
    pool(4).run(_numerical_gradient_across_ranks, (2, 0, 1, 2))


def _backward_reaches_idle_ranks() -> None:
    """A rank that receives and sends nothing still has a graph, so the backward collective is entered by all."""
    rank = torch.distributed.get_rank()
    x = torch.randn(3 if rank else 0, 8, requires_grad=True)
    idx = torch.full((x.shape[0], 2), 3)  # all to the last expert, on rank 1
    probs = torch.rand(x.shape[0], 2, requires_grad=True)
    out = dispatch(x, Routing(idx, probs, 4))
    assert out.rows.shape == ((6, 8) if rank else (0, 8))
    assert out.rows.requires_grad
    assert out.probs.requires_grad
    y = combine(out.rows * 2, out.handle)
    assert y.requires_grad
    assert y.shape == x.shape
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 4.0))
    assert torch.equal(probs.grad, torch.zeros_like(probs))


def test_backward_reaches_idle_ranks():
    pool(2).run(_backward_reaches_idle_ranks)


def _gradients_wanted_by_some(wanted: tuple[str, str]) -> None:
    """Backward is a collective: a rank whose tokens need no gradient enters it if another rank's do."""
    rank = torch.distributed.get_rank()
    x = torch.ones(2 - 2 * rank, 8, requires_grad="x" in wanted[rank])
    probs = torch.ones(x.shape[0], 1, requires_grad="p" in wanted[rank])
    weight = torch.full((8, 8), 0.5, requires_grad=True)
    out = dispatch(x, Routing(torch.ones(x.shape[0], 1, dtype=torch.int64), probs, 2))
    combine(out.rows @ weight * out.probs.unsqueeze(1), out.handle).sum().backward()
    if "x" in wanted[rank]:
        assert torch.equal(x.grad, torch.full_like(x, 4.0))
    else:
        assert x.grad is None
    if "p" in wanted[rank]:
        assert torch.equal(probs.grad, torch.full_like(probs, 32.0))
    assert torch.equal(weight.grad, torch.full_like(weight, 2.0 * rank))


@pytest.mark.parametrize("wanted", [("xp", ""), ("", "xp"), ("x", "p"), ("p", "x"), ("", "")], ids=str)
def test_ranks_may_differ_in_what_needs_a_gradient(wanted):
    pool(2).run(_gradients_wanted_by_some, wanted)


def _checkpointed(reentrant: bool | None) -> list[torch.Tensor]:
    """Experts on rank 1 alone; where there are no rows, nothing is computed and nothing saved."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(torch.distributed.get_rank())
    idx = torch.tensor([[2, 3], [3, -1], [-1, 2]])
    x, probs = torch.randn(3, 8, requires_grad=True), torch.rand(3, 2, requires_grad=True)

    def layer(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        out = dispatch(x, Routing(idx, probs, 4))
        rows = out.rows.tanh() * out.probs.unsqueeze(1) if out.rows.shape[0] else out.rows
        return combine(rows, out.handle)

    y = layer(x, probs) if reentrant is None else checkpoint(layer, x, probs, use_reentrant=reentrant)
    y.sum().backward()
    return [y.detach(), x.grad, probs.grad]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_with_an_idle_rank(reentrant):
    plain, recomputed = (pool(2).run(_checkpointed, mode) for mode in (None, reentrant))
    for want, got in zip(plain, recomputed, strict=True):
        assert all(torch.equal(w, g) for w, g in zip(want, got, strict=True))


def test_a_graph_may_be_walked_twice_and_for_the_probs_alone():
    x, probs = torch.randn(3, 8, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    out = dispatch(x, Routing(torch.tensor([[0, 1], [1, 1], [-1, 0]]), probs, 2))
    y = combine(out.rows * out.probs.unsqueeze(1), out.handle).sum()
    first = torch.autograd.grad(y, (x, probs), retain_graph=True)
    second = torch.autograd.grad(y, (x, probs), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(torch.autograd.grad(y, probs)[0], first[1])


def test_nothing_need_be_contiguous():
    x, probs = torch.randn(8, 3).t().requires_grad_(), torch.rand(2, 3).t().requires_grad_()
    idx = torch.tensor([[0, 1, 1], [1, 0, -1]], dtype=torch.int8).t()
    out = dispatch(x, Routing(idx, probs, 2))
    y = combine(out.rows.t().contiguous().t(), out.handle)
    times = (idx >= 0).sum(1, keepdim=True).float()
    assert torch.equal(y, x * times)
    (y.sum() + out.probs.sum()).backward()  # gradients are expanded scalars
    assert torch.equal(x.grad, times.expand(3, 8))
    assert torch.equal(probs.grad, (idx >= 0).float())


def test_a_handle_made_in_inference_mode_serves_training():
    routing = Routing(torch.tensor([[0], [1]]), None, 2)
    with torch.inference_mode():
        handle = dispatch(torch.ones(2, 8), routing).handle
    x = torch.ones(2, 8, requires_grad=True)
    combine(dispatch(x, routing, handle=handle).rows, handle).sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 8))


def test_probs_alone_and_tokens_alone_can_require_grad():
    idx = torch.tensor([[0, 1]])
    probs = torch.ones(1, 2, requires_grad=True)
    out = dispatch(torch.ones(1, 8), Routing(idx, probs, 2))
    (out.probs * torch.tensor([2.0, 3.0])).sum().backward()
    assert probs.grad.tolist() == [[2.0, 3.0]]

    x = torch.ones(1, 8, requires_grad=True)
    out = dispatch(x, Routing(idx, None, 2))
    assert out.probs is None
    combine(out.rows, out.handle).sum().backward()
    assert torch.equal(x.grad, torch.full((1, 8), 2.0))


def test_low_precision_probs_are_carried_in_float32():
    probs = torch.tensor([[0.3, 0.7]], dtype=torch.bfloat16, requires_grad=True)
    out = dispatch(torch.ones(1, 8, dtype=torch.bfloat16), Routing(torch.tensor([[1, 0]]), probs, 2))
    assert out.probs.dtype == torch.float32
    assert torch.equal(out.probs, probs.float()[0].flip(0))
    out.probs.sum().backward()
    assert probs.grad.dtype == torch.bfloat16


def test_inputs_may_be_freed_after_dispatch_and_rows_after_combine():
    """Megatron frees both by resizing their storage; backward must not need them."""
    x = torch.randn(4, 8, requires_grad=True)
    tokens = x * 1
    out = dispatch(tokens, Routing(torch.tensor([[0, 1]] * 4), None, 2))
    expert_out = out.rows + 0
    y = combine(expert_out, out.handle)
    tokens.untyped_storage().resize_(0)
    expert_out.untyped_storage().resize_(0)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_a_handle_serves_several_passes_and_many_may_be_in_flight():
    idx = [torch.tensor([[i % 3, 2], [0, -1]]) for i in range(4)]
    xs = [torch.randn(2, 8, requires_grad=True) for _ in idx]
    outs = [dispatch(x, Routing(i, None, 3)) for x, i in zip(xs, idx, strict=True)]
    ys = [combine(o.rows * 3, o.handle) for o in reversed(outs)][::-1]
    again = dispatch(xs[0], Routing(idx[0], None, 3), handle=outs[0].handle)
    assert torch.equal(again.rows, outs[0].rows)
    for y in ys:
        y.sum().backward()
    for x, i in zip(xs, idx, strict=True):
        assert torch.equal(x.grad, 3.0 * (i >= 0).sum(1, keepdim=True).expand(2, 8))
