"""How large a communication buffer is, and what it then holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from moe_ncclep.ep.nvlink.sizing import DEFAULT_BUFFER_MIB, MAX_ROUNDS, Demand, at_least, tokens_to_set_aside
from moe_ncclep.ep.nvlink.structs import Workspace
from tests.nvlink import shared
from tests.nvlink.toolchain import needs_gxx

pytestmark = needs_gxx
MANY = settings(deadline=None, max_examples=200, derandomize=True)


def make(num_ranks: int, max_tokens: int, top_k: int, row_bytes: int, buffer_mib: int | None) -> Demand:
    return Demand.of(
        shared.load(),
        num_ranks=num_ranks,
        max_tokens=max_tokens,
        top_k=top_k,
        hidden=0,
        row_bytes=row_bytes,
        buffer_mib=buffer_mib,
    )


tokens = st.one_of(st.integers(1, 256), st.integers(1, 2**17)).map(lambda granules: 128 * granules)
rows = st.one_of(st.integers(1, 64), st.integers(1, 8192)).map(lambda vectors: 16 * vectors)
limits = st.one_of(st.none(), st.integers(1, 64), st.integers(1, 2**17))
demands = st.builds(make, st.integers(2, 72), tokens, st.integers(1, 32), rows, limits)


def workspace_of(demand: Demand) -> Workspace | None:
    try:
        return demand.workspace(shared.load())
    except ValueError:
        return None


def size(workspace: Workspace) -> int:
    return shared.load().ncclep_workspace_bytes(workspace)


def capacity(workspace: Workspace, demand: Demand) -> int:
    return shared.load().ncclep_capacity(workspace, demand.row_bytes, demand.slot_bytes)


def limit(demand: Demand) -> int:
    return (demand.buffer_mib or DEFAULT_BUFFER_MIB) * 2**20


# ---- one demand


@MANY
@given(demands)
@example(make(8, 4096, 8, 14336, None))
@example(make(8, 16384, 8, 14336, 1024))
def test_a_buffer_stays_within_its_bound_and_uses_it(demand):
    workspace = workspace_of(demand)
    assume(workspace is not None)
    assert size(workspace) <= limit(demand)
    assert workspace.num_ranks == demand.num_ranks
    assert workspace.num_local_experts * demand.num_ranks <= 2048 < (workspace.num_local_experts + 1) * demand.num_ranks
    assert workspace.routing_bytes % 128 == 0
    assert workspace.routing_bytes >= 4 * demand.top_k * demand.max_tokens
    held = capacity(workspace, demand)
    assert held * MAX_ROUNDS >= demand.max_tokens
    if held < demand.max_tokens:  # bounded: no more than the rounding of a source's sizes is left unused
        more = held + 1 + -(-256 // (demand.slot_bytes + 8 * demand.segments))
        larger = Workspace(
            workspace.num_ranks,
            workspace.num_local_experts,
            workspace.routing_bytes,
            -(-more * demand.slot_bytes // 128) * 128,
            -(-more * demand.segments // 16) * 16,
        )
        assert size(larger) > limit(demand)


@MANY
@given(demands)
def test_without_a_bound_all_tokens_are_held_at_once(demand):
    workspace = replace(demand, buffer_mib=2**30).workspace(shared.load())
    staging = -(-demand.max_tokens * demand.slot_bytes // 128) * 128
    assert demand.max_tokens <= capacity(workspace, demand)
    assert workspace.staging_bytes == staging
    assert workspace.num_flags == -(-demand.max_tokens * demand.segments // 16) * 16


@MANY
@given(demands)
@example(make(2, 128, 4, 16, None))
@example(make(72, 4096, 8, 14336, None))
def test_the_formula_of_the_documentation(demand):
    ranks, top_k = demand.num_ranks, demand.top_k
    workspace = workspace_of(demand)
    assume(workspace is not None)
    held = min(capacity(workspace, demand), demand.max_tokens)
    probs = -(-4 * top_k // 16) * 16
    a_source = 4 * top_k * demand.max_tokens + held * (demand.row_bytes + probs + 8 * -(-demand.row_bytes // 16384))
    rest = size(workspace) - 2 * ranks * a_source
    assert 0 < rest <= 2.3 * 2**20
    if ranks >= 8:
        assert rest <= 700 * 2**10


@MANY
@given(demands)
@example(make(72, 2**24, 32, 2**17, 1))
def test_a_bound_that_is_too_small_names_the_least_that_works(demand):
    least = replace(demand, buffer_mib=1)
    assume(workspace_of(least) is None)
    with pytest.raises(ValueError, match="buffer_mib") as caught:
        least.workspace(shared.load())
    head, _, tail = str(caught.value).partition(": at least ")
    assert head == (
        f"buffer_mib 1 is too small for {demand.num_ranks} ranks, {demand.max_tokens} tokens and rows of "
        f"{demand.row_bytes} bytes"
    )
    needed = int(tail.removesuffix(" is needed"))
    assert workspace_of(replace(demand, buffer_mib=needed)) is not None
    assert workspace_of(replace(demand, buffer_mib=needed - 1)) is None


def test_none_is_the_default_bound():
    demand = make(8, 2**20, 8, 16384, None)
    assert bytes(workspace_of(demand)) == bytes(workspace_of(replace(demand, buffer_mib=DEFAULT_BUFFER_MIB)))
    assert capacity(workspace_of(demand), demand) < 2**20


# ---- several demands


@MANY
@given(st.lists(demands, min_size=1, max_size=4))
def test_the_largest_of_several_demands(several):
    several = [replace(demand, num_ranks=several[0].num_ranks) for demand in several]
    largest = Demand.largest(iter(several))
    for name in ("num_ranks", "max_tokens", "top_k", "row_bytes", "slot_bytes", "segments"):
        assert getattr(largest, name) == max(getattr(demand, name) for demand in several)
    assert limit(largest) == max(map(limit, several))


def test_a_bound_above_the_default_survives_a_demand_without_one():
    demand = make(8, 2**20, 8, 16384, 4 * DEFAULT_BUFFER_MIB)
    assert Demand.largest([demand, replace(demand, buffer_mib=None)]) == demand


@MANY
@given(demands, demands)
@example(make(8, 16384, 8, 16384, 256), make(8, 32768, 8, 16384, 256))  # more routing, hence less staging
@example(make(8, 16384, 4, 256, 64), make(8, 256, 4, 65536, 64))  # larger rows, hence fewer flags
def test_what_was_planned_for_a_buffer_works_in_its_successor(one, other):
    other = replace(other, num_ranks=one.num_ranks)
    present, wanted = workspace_of(one), workspace_of(Demand.largest([one, other]))
    assume(present is not None and wanted is not None)
    successor = at_least(wanted, present)
    assert capacity(successor, one) >= capacity(present, one)
    assert capacity(successor, other) >= capacity(wanted, other)
    assert successor.routing_bytes >= 4 * max(one.top_k, other.top_k) * max(one.max_tokens, other.max_tokens)
    assert bytes(at_least(successor, present)) == bytes(successor)
    flags = 2 * one.num_ranks * 8 * max(present.num_flags, wanted.num_flags)
    routing = 2 * one.num_ranks * wanted.routing_bytes
    assert size(successor) <= max(limit(one), limit(other)) + flags + routing


@pytest.mark.parametrize(
    ("largest", "max_tokens", "expected"),
    [
        (0, None, 128),
        (1, None, 128),
        (128, None, 256),
        (1000, None, 1152),  # 1125
        (1024, None, 1152),
        (100, 4096, 4096),
        (4096, 4096, 4096),
        (8, 8, 8),
        (4097, 4096, 4736),  # too large for what was announced: 4609
    ],
)
def test_tokens_to_set_aside(largest, max_tokens, expected):
    assert tokens_to_set_aside(largest, max_tokens) == expected
