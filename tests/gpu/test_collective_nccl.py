"""The collective engine over NCCL against the oracle, bit for bit, on 2 and 4 ranks; they may share a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from moe_ncclep.ep import dispatch
from moe_ncclep.ep.options import ROW_FORMATS
from tests.ep.cases import SKEWS, Case, check_on_rank
from tests.ep.test_contract import cases
from tests.ep.test_errors import DISAGREEMENTS, LOCAL_MISTAKES, _arguments, bad_then_good
from tests.ranks import pool

FEW = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
TOKENS = {2: (7, 4), 4: (5, 0, 9, 2)}
BUDGETS = {2: (16, 8), 4: (16, 8, 0, 24)}
EACH_WORLD = pytest.mark.parametrize(
    "world", [pytest.param(2, marks=pytest.mark.gpu2), pytest.param(4, marks=pytest.mark.gpu4)]
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def run(world: int, case: Case) -> None:
    pool(world, device="cuda").run(check_on_rank, case, device="cuda")


@pytest.mark.gpu2
@FEW
@given(case=cases(2, engine="collective"))
def test_any_case_on_two_ranks(case: Case):
    run(2, case)


@pytest.mark.gpu4
@FEW
@given(case=cases(4, engine="collective"))
def test_any_case_on_four_ranks(case: Case):
    run(4, case)


@EACH_WORLD
@DTYPES
@pytest.mark.parametrize("skew", SKEWS)
def test_uneven_ranks(world, dtype, skew):
    run(world, Case(TOKENS[world], top_k=3, hidden=64, dtype=dtype, skew=skew, drop=0.3, engine="collective"))


@EACH_WORLD
@DTYPES
def test_budget(world, dtype):
    case = Case(TOKENS[world], top_k=4, dtype=dtype, alignment=8, budgets=BUDGETS[world], engine="collective")
    run(world, case)


@EACH_WORLD
@DTYPES
def test_fixed_rows(world, dtype):
    run(world, Case(TOKENS[world], top_k=4, dtype=dtype, rows_per_expert=4, engine="collective"))


@EACH_WORLD
@DTYPES
@pytest.mark.parametrize("hidden", [256, 200], ids=["whole-blocks", "short-block"])
@pytest.mark.parametrize("row_format", ROW_FORMATS)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_fp8_payload(world, dtype, hidden, row_format, power_of_two):
    """Values and scales are those of the CPU, to the bit."""
    case = Case(
        TOKENS[world],
        top_k=3,
        hidden=hidden,
        dtype=dtype,
        payload="fp8",
        fp8_power_of_two=power_of_two,
        row_format=row_format,
        alignment=8,
        engine="collective",
    )
    run(world, case)


@EACH_WORLD
def test_wide_rows_and_many_tokens(world):
    run(world, Case((300,) * world, num_local=8, top_k=8, hidden=1024, dtype=torch.bfloat16, engine="collective"))


def check_deterministically(case: Case) -> None:
    torch.use_deterministic_algorithms(True)  # raises where an operation has no deterministic form
    try:
        check_on_rank(case, device="cuda")
    finally:
        torch.use_deterministic_algorithms(False)


@EACH_WORLD
@pytest.mark.parametrize(("payload", "row_format"), [("input", "input"), ("fp8", "input"), ("fp8", "fp8")])
def test_deterministic_algorithms(world, payload, row_format):
    case = Case(
        TOKENS[world],
        top_k=3,
        hidden=64,
        dtype=torch.bfloat16,
        payload=payload,
        row_format=row_format,
        engine="collective",
    )
    for variant in (case, replace(case, alignment=8, budgets=BUDGETS[world], drop=0.3)):
        pool(world, device="cuda").run(check_deterministically, variant)


@pytest.mark.gpu2
@pytest.mark.parametrize("kind", LOCAL_MISTAKES)
def test_a_mistake_of_one_rank_is_raised_on_all(kind):
    texts = pool(2, device="cuda").run(bad_then_good, 1, kind, "cuda")
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"rank 1: {LOCAL_MISTAKES[kind]}")


@pytest.mark.gpu2
@pytest.mark.parametrize("kind", DISAGREEMENTS)
def test_ranks_that_disagree_are_named(kind):
    assert pool(2, device="cuda").run(bad_then_good, 1, kind, "cuda") == [DISAGREEMENTS[kind]] * 2


def _tokens_on_the_host() -> str:
    x, routing, options = _arguments(0, None, None)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        dispatch(x, routing, options=options)
    return str(caught.value)


@pytest.mark.gpu2
def test_tokens_on_a_device_that_nccl_does_not_move():
    texts = pool(2, device="cuda").run(_tokens_on_the_host)
    assert texts == ["rank 0: the tokens are on cpu, but the group's backend only moves cuda tensors"] * 2
