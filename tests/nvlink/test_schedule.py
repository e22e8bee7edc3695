"""Who moves which row: every piece of work has exactly one worker, in an order that cannot deadlock."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.nvlink.shared import span, walk
from tests.nvlink.toolchain import needs_gxx

pytestmark = needs_gxx
MANY = settings(deadline=None, max_examples=150, derandomize=True)


@MANY
@given(st.one_of(st.integers(0, 300), st.integers(0, 2**31 - 1)), st.integers(1, 4096))
@example(2**31 - 1, 4096)
@example(0, 7)
@example(3, 64)
def test_even_span_partitions_evenly(total, workers):
    spans = [span(total, worker, workers) for worker in range(workers)]
    assert spans[0][0] == 0
    assert spans[-1][1] == total
    assert all(one[1] == other[0] for one, other in pairwise(spans))
    lengths = {end - begin for begin, end in spans}
    assert lengths <= {total // workers, -(-total // workers)}


@st.composite
def walks(draw):
    """``starts`` of each source and round, with items as the route kernel numbers them: source after source."""
    ranks = draw(st.one_of(st.integers(1, 5), st.integers(1, 72)))
    rounds = draw(st.integers(1, 4))
    most = 6 if ranks <= 5 else 2
    items = st.sampled_from([0, 0, 1, 2, most, 4 * most])
    starts, item = [], draw(st.integers(0, 3))
    for _ in range(ranks):
        bounds = [item]
        for _ in range(rounds):
            item += draw(items)
            bounds.append(item)
        starts.append(bounds)
    workers = draw(st.sampled_from([1, 2, 3, 5, 8, 16, 31, 132]))
    return starts, draw(st.integers(0, ranks - 1)), workers, draw(st.integers(1, 3))


@MANY
@given(walks())
@example(([[0, 5, 9]], 0, 3, 1))  # one rank: nobody else's items
@example(([[0, 0], [0, 0]], 1, 2, 1))
def test_a_walk_visits_every_unit_of_the_others_once_round_after_round(case):
    starts, skip, workers, units = case
    ranks, rounds = len(starts), len(starts[0]) - 1
    expected = Counter(
        (source, item, unit)
        for source, bounds in enumerate(starts)
        if source != skip
        for item in range(bounds[0], bounds[-1])
        for unit in range(units)
    )
    round_of = {
        (source, item): r
        for source, bounds in enumerate(starts)
        for r in range(rounds)
        for item in range(bounds[r], bounds[r + 1])
    }
    visited = Counter()
    shares = []
    for worker in range(workers):
        mine = walk(starts, skip, worker, workers, units)
        visited.update(mine)
        # Round after round, in each the sources in turn from the next one on, each source in ascending order.
        keys, turns = [], Counter()
        for source, item, unit in mine:
            r = round_of[source, item]
            in_round = (item - starts[source][r]) * units + unit
            assert in_round // workers == turns[r, source], "a worker has one unit of every `workers`"
            keys.append((r, turns[r, source], (source - skip) % ranks))
            turns[r, source] += 1
        assert keys == sorted(keys)
        assert len(set(keys)) == len(keys)
        shares.append(Counter((source, round_of[source, item]) for source, item, _ in mine))
    assert visited == expected
    for source, bounds in enumerate(starts):
        for r in range(rounds if source != skip else 0):
            total = (bounds[r + 1] - bounds[r]) * units
            counts = {share[source, r] for share in shares}
            assert counts <= {total // workers, -(-total // workers)}, "each source and round is dealt out evenly"


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 16, 36, 72])
@pytest.mark.parametrize("workers", [1, 4, 7, 16, 66, 132, 528])
def test_remainders_go_to_different_workers(ranks, workers):
    """One item of each source: no worker gets more than one above the least possible maximum."""
    starts = [[source, source + 1] for source in range(ranks)]
    shares = [len(walk(starts, 0, worker, workers, 1)) for worker in range(workers)]
    assert sum(shares) == ranks - 1
    assert max(shares) <= -(-ranks // workers) + (workers > 1)


def test_sources_take_turns():
    starts = [[4 * source, 4 * source + 4] for source in range(4)]
    assert [source for source, _, _ in walk(starts, 2, 0, 1, 1)] == [3, 0, 1] * 4
    assert [item for _, item, _ in walk(starts, 2, 0, 1, 1)][:6] == [12, 0, 4, 13, 1, 5]


def test_an_item_of_a_later_round_comes_behind_all_of_the_earlier_one():
    starts = [[0, 0, 0], [0, 1, 9], [9, 14, 14]]  # source 1 has one item in round 0, source 2 five
    assert walk(starts, 0, 0, 1, 1)[:6] == [(1, 0, 0), *((2, item, 0) for item in range(9, 14))]
