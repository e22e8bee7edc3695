"""Every engine against the oracle, bit for bit, on 1, 2 and 4 ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ep.cases import SKEWS, Case, check_on_rank
from tests.ranks import pool

FAST = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow], derandomize=True, print_blob=True
)


@st.composite
def cases(draw, num_ranks: int, engine: str = "auto") -> Case:
    num_local = draw(st.integers(1, 4))
    size = draw(st.sampled_from(["exact", "budget", "fixed"]))
    alignment = draw(st.sampled_from([1, 2, 8, 16]))
    budget = st.integers(0, 10).map(lambda n: n * alignment)
    payload = draw(st.sampled_from(["input", "fp8"]))
    return Case(
        num_tokens=tuple(draw(st.lists(st.integers(0, 9), min_size=num_ranks, max_size=num_ranks))),
        num_local=num_local,
        top_k=draw(st.integers(1, 6)),
        hidden=draw(st.sampled_from([8, 16, 40, 136])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])),
        skew=draw(st.sampled_from(SKEWS)),
        drop=draw(st.sampled_from([0.0, 0.3])),
        alignment=alignment,
        budgets=tuple(draw(budget) for _ in range(num_ranks)) if size == "budget" else None,
        rows_per_expert=draw(budget) if size == "fixed" else None,
        engine=engine,
        payload=payload,
        fp8_power_of_two=draw(st.booleans()),
        row_format=draw(st.sampled_from(["input", "fp8"])) if payload == "fp8" else "input",
        seed=draw(st.integers(0, 1000)),
    )


@FAST
@given(case=cases(1))
def test_local_engine_is_the_contract(case: Case):
    check_on_rank(case)


@FAST
@given(case=cases(1, engine="collective"))
def test_collective_on_one_rank(case: Case):
    pool(1).run(check_on_rank, case)


@FAST
@given(case=cases(2))
def test_collective_on_two_ranks(case: Case):
    pool(2).run(check_on_rank, case)


@FAST
@given(case=cases(4))
def test_collective_on_four_ranks(case: Case):
    pool(4).run(check_on_rank, case)


@pytest.mark.parametrize(
    "num_tokens",
    [(0, 0), (1, 0), (0, 1), (1, 1), (17, 3)],
    ids=["nobody", "first-only", "second-only", "one-each", "uneven"],
)
@pytest.mark.parametrize("skew", SKEWS)
def test_idle_and_uneven_ranks(num_tokens, skew):
    """Empty shapes flow through forward and backward, and every rank issues the same collectives."""
    pool(2).run(check_on_rank, Case(num_tokens=num_tokens, skew=skew, alignment=4))


def test_more_experts_than_tokens_and_wide_top_k():
    pool(2).run(check_on_rank, Case(num_tokens=(3, 2), num_local=64, top_k=32))
    pool(2).run(check_on_rank, Case(num_tokens=(2, 1), num_local=100, top_k=128))


def test_sixty_five_thousand_tokens():
    """Exact for any T that fits memory; ids and slots are 64-bit."""
    pool(2).run(check_totals, 65_536)


def check_totals(num_tokens: int) -> None:
    from moe_ncclep.ep import Routing, combine, dispatch

    g = torch.Generator().manual_seed(1)
    idx = torch.randint(0, 16, (num_tokens, 4), generator=g)
    x = (torch.arange(num_tokens) % 1024).float().unsqueeze(1).repeat(1, 4)
    out = dispatch(x, Routing(idx, None, 16))
    assert out.probs is None
    y = combine(out.rows, out.handle)
    assert torch.equal(y, 4 * x)
