"""Budgets, alignment, de-duplication and the numbers that are reported."""

from __future__ import annotations

import pytest
import torch

from moe_ncclep.ep import EPOptions, Routing, combine, dispatch
from tests.ranks import pool


def test_overflow_is_counted_never_written_and_can_be_raised():
    x = torch.arange(1.0, 7).unsqueeze(1).repeat(1, 8)
    idx = torch.tensor([[0], [0], [1], [1], [1], [0]])
    out = dispatch(x, Routing(idx, None, 2), options=EPOptions(budget=4))
    assert out.rows[:, 0].tolist() == [1, 2, 6, 3]
    assert out.tokens_per_expert.tolist() == [3, 1]
    assert int(out.dropped) == 2
    with pytest.raises(ValueError, match="2 token-expert pairs did not fit into budget 4"):
        out.handle.raise_if_dropped()
    assert combine(out.rows, out.handle)[:, 0].tolist() == [1, 2, 3, 0, 0, 6]


def test_budget_with_room_leaves_a_zero_tail():
    out = dispatch(
        torch.ones(2, 8), Routing(torch.tensor([[0], [1]]), None, 2), options=EPOptions(budget=8, alignment=2)
    )
    assert out.rows[:, 0].tolist() == [1, 0, 1, 0, 0, 0, 0, 0]
    assert out.tokens_per_expert.tolist() == [2, 2]
    assert int(out.dropped) == 0
    out.handle.raise_if_dropped()


def test_budget_zero_is_legal():
    out = dispatch(
        torch.ones(2, 8), Routing(torch.tensor([[0], [1]]), torch.ones(2, 1), 2), options=EPOptions(budget=0)
    )
    assert out.rows.shape == (0, 8)
    assert int(out.dropped) == 2
    assert torch.equal(combine(out.rows, out.handle), torch.zeros(2, 8))


def test_pad_rows_do_not_leak_nan():
    """Experts may leave anything in pad rows; combine does not read them, and the backward writes zeros there."""
    x = torch.ones(3, 8, requires_grad=True)
    out = dispatch(x, Routing(torch.tensor([[0], [0], [1]]), None, 2), options=EPOptions(alignment=4))
    junk = out.rows.detach().clone()
    junk[2:4] = float("nan")
    junk[5:] = float("inf")
    junk.requires_grad_()
    y = combine(junk, out.handle)
    assert torch.equal(y, torch.ones(3, 8))
    y.sum().backward()
    assert torch.equal(junk.grad[[2, 3, 5, 6, 7]], torch.zeros(5, 8))


def test_nan_and_inf_stay_with_their_tokens():
    x = torch.ones(3, 8)
    x[0], x[1] = float("nan"), float("inf")
    probs = torch.tensor([[float("nan"), 1.0], [float("inf"), float("nan")], [1.0, 2.0]], requires_grad=True)
    out = dispatch(x, Routing(torch.tensor([[0, 1], [1, -1], [0, -1]]), probs, 2), options=EPOptions(alignment=4))
    assert str(out.probs.tolist()) == "[nan, 1.0, 0.0, 0.0, 1.0, inf, 0.0, 0.0]"
    assert str(combine(out.rows, out.handle)[:, 0].tolist()) == "[nan, inf, 1.0]"
    grad = torch.tensor([1.0, 2.0, float("nan"), float("nan"), 3.0, 4.0, float("nan"), float("nan")])
    out.probs.backward(grad)  # experts may leave anything at pad rows
    assert probs.grad.tolist() == [[1.0, 3.0], [4.0, 0.0], [2.0, 0.0]]


def test_partial_sums_round_to_inf_in_float16():
    out = dispatch(torch.full((1, 8), 6e4).half(), Routing(torch.tensor([[0, 1, 2]]), None, 3))
    assert combine(out.rows, out.handle).isinf().all()
    signs = torch.tensor([[1.0], [1.0], [-1.0]]).half()
    assert torch.equal(combine(out.rows * signs, out.handle), out.rows[:1])  # not before the whole sum is known


def test_a_budget_cuts_a_token_that_names_an_expert_many_times():
    probs = torch.arange(128.0).view(1, -1)
    out = dispatch(torch.ones(1, 8), Routing(torch.zeros(1, 128).short(), probs, 1), options=EPOptions(budget=5))
    assert int(out.dropped) == 123
    assert out.probs.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(combine(out.rows, out.handle), torch.full((1, 8), 5.0))


def test_offsets_are_64_bit():
    out = dispatch(torch.ones(2, 8), Routing(torch.tensor([[0], [1]]), None, 2))
    placement = out.handle.plan.placement
    assert placement.row_of_pair.dtype == torch.int64
    assert placement.token_of_row.dtype == torch.int64
    assert out.tokens_per_expert.dtype == torch.int64


def _traffic() -> tuple[int, int, int, int]:
    rank = torch.distributed.get_rank()
    idx = torch.tensor([[0, 1, 2, 3], [2, 3, -1, -1], [0, 1, -1, -1]])  # experts 2, 3 live on rank 1
    out = dispatch(torch.ones(3, 8), Routing(idx, None, 4))
    t = out.handle.traffic
    assert out.handle.engine.name == "collective"
    return rank, t.remote_tokens, t.remote_pairs, t.dispatch_bytes


def test_a_token_travels_once_per_rank_and_the_bytes_are_told():
    assert pool(2).run(_traffic) == [(0, 2, 4, 2 * 32), (1, 2, 4, 2 * 32)]


def _two_groups() -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    x = torch.full((2, 8), float(rank + 1))
    wide = dispatch(x, Routing(torch.tensor([[0], [3]]), None, 4))
    narrow = dispatch(x, Routing(torch.tensor([[0], [3]]), None, 4), pairs[rank // 2])
    assert wide.tokens_per_expert.tolist() == [4 if rank in (0, 3) else 0]
    assert narrow.tokens_per_expert.tolist() == [2, 0] if rank % 2 == 0 else [0, 2]
    assert torch.equal(combine(wide.rows, wide.handle), x)
    assert torch.equal(combine(narrow.rows, narrow.handle), x)


def test_two_groups_of_different_size_in_one_process():
    pool(4).run(_two_groups)


def _idle_rank_calls_are_equal() -> int:
    """Every rank issues the same collectives, whatever it holds."""
    import torch.distributed as dist

    calls = []
    real = dist.all_to_all_single
    dist.all_to_all_single = lambda *a, **k: (calls.append(1), real(*a, **k))
    try:
        t = 5 if dist.get_rank() == 0 else 0
        x = torch.ones(t, 8, requires_grad=True)
        out = dispatch(x, Routing(torch.zeros(t, 1, dtype=torch.int64), torch.ones(t, 1), 2))
        combine(out.rows, out.handle).sum().backward()
    finally:
        dist.all_to_all_single = real
    return len(calls)


def test_idle_rank_issues_the_same_collectives():
    first, second = pool(2).run(_idle_rank_calls_are_equal)
    assert first == second == 7  # routing, tokens, probs; sums back; and the three of the backward pass
