"""The arrays of a plan: how large, where, in how many rounds."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_ncclep.ep.nvlink import structs
from moe_ncclep.ep.nvlink.plan import PlanShape, RoutePlan
from moe_ncclep.ep.nvlink.sizing import MAX_ROUNDS

MANY = settings(deadline=None, max_examples=200, derandomize=True)
CPU = torch.device("cpu")


@st.composite
def shapes(draw) -> PlanShape:
    plan_tokens = draw(st.integers(0, 300))
    return PlanShape(
        num_ranks=draw(st.integers(2, 72)),
        num_tokens=draw(st.integers(0, 300)),
        top_k=draw(st.integers(1, 32)),
        num_local_experts=draw(st.integers(1, 64)),
        plan_tokens=plan_tokens,
        capacity=draw(st.integers(0, plan_tokens)),
    )


def shape(plan_tokens: int, capacity: int) -> PlanShape:
    return PlanShape(
        num_ranks=4, num_tokens=5, top_k=3, num_local_experts=2, plan_tokens=plan_tokens, capacity=capacity
    )


@pytest.mark.parametrize(
    ("plan_tokens", "capacity", "rounds"),
    [(10, 10, 1), (10, 5, 2), (10, 4, 3), (10, 1, 10), (MAX_ROUNDS, 1, MAX_ROUNDS), (2 * MAX_ROUNDS, 2, MAX_ROUNDS)],
)
def test_rounds(plan_tokens, capacity, rounds):
    assert shape(plan_tokens, capacity).usable
    assert shape(plan_tokens, capacity).num_rounds == rounds


@pytest.mark.parametrize(("plan_tokens", "capacity"), [(10, 0), (0, 0), (MAX_ROUNDS + 1, 1), (2 * MAX_ROUNDS + 1, 2)])
def test_unusable(plan_tokens, capacity):
    assert not shape(plan_tokens, capacity).usable
    assert shape(plan_tokens, capacity).num_rounds == 1


def test_sizes_of_the_arrays():
    assert shape(10, 4).parts() == (
        ("item_token", 4 * 40),
        ("item_rows", 4 * 40 * 3),
        ("item_columns", 40 * 3),
        ("item_starts", 4 * 4 * (3 + 1)),
        ("token_ranks", 5 * 3),
        ("pair_ranks", 5 * 3),
        ("token_item", 4 * 5),
        ("zone_starts", 8 * 2),
        ("zone_sizes", 8 * 2),
        ("zone_valid", 8 * 2),
        ("dropped", 8),
    )
    few_ranks = PlanShape(num_ranks=2, num_tokens=5, top_k=3, num_local_experts=2, plan_tokens=10, capacity=10)
    assert dict(few_ranks.parts())["token_ranks"] == 5 * 2, "a token goes to min(K, R) ranks"


@MANY
@given(shapes())
@example(shape(300, 0))
def test_arrays_are_aligned_and_disjoint_within_one_allocation(shape):
    plan = RoutePlan(shape, CPU)
    sizes = dict(shape.parts())
    pointers = [name for name, kind in structs.Plan._fields_ if kind is structs.c_void_p]
    assert set(pointers) == set(sizes)
    spans = sorted((getattr(plan.struct, name), sizes[name], name) for name in pointers)
    base = plan.memory.data_ptr()
    assert spans[0][0] == base
    for (start, size, name), (following, _, _) in pairwise([*spans, (base + plan.memory.numel(), 0, "end")]):
        assert start % 16 == 0, name
        assert start + size <= following, f"{name} overlaps its successor"


@MANY
@given(shapes())
@example(shape(300, 0))
@example(shape(2**17, 1))
def test_every_token_has_its_round(shape):
    """The route kernel writes ``item_starts`` by a token's round, also in a plan that cannot be used."""
    struct = RoutePlan(shape, CPU).struct
    assert struct.capacity >= 1
    assert max(0, shape.plan_tokens - 1) // struct.capacity < struct.num_rounds <= MAX_ROUNDS
    if shape.usable:
        assert struct.capacity == shape.capacity
    assert (struct.num_tokens, struct.top_k, struct.num_local_experts) == (
        shape.num_tokens,
        shape.top_k,
        shape.num_local_experts,
    )


def test_views_are_of_the_arrays_that_kernels_fill():
    plan = RoutePlan(shape(10, 4), CPU)
    for i, name in enumerate(("zone_starts", "zone_sizes", "zone_valid", "dropped")):
        view = plan.int64(name)
        assert view.shape == ((1,) if name == "dropped" else (2,))
        assert view.data_ptr() == getattr(plan.struct, name)
        view.fill_(i)
    assert [plan.int64(name).tolist() for name in ("zone_starts", "zone_valid", "dropped")] == [[0, 0], [2, 2], [3]]


def test_for_rows_leaves_the_shared_struct_alone():
    plan = RoutePlan(shape(10, 4), CPU)
    before = bytes(plan.struct)
    one, other = plan.for_rows(7), plan.for_rows(2**31)
    assert (one.num_rows, other.num_rows) == (7, 2**31)
    assert bytes(plan.struct) == before
    one.num_rows = 0
    assert bytes(one) == before
