"""Shapes and routings of the benchmark."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ncclep.bench.shapes import PRESETS, ROUTINGS, Shape, draw_topk
from moe_ncclep.bench.timing import Timing

SHAPE = Shape(tokens=4000, hidden=64, experts=32, top_k=4)


@settings(deadline=None, max_examples=40)
@given(
    routing=st.sampled_from(ROUTINGS),
    experts=st.sampled_from([2, 8, 60]),
    tokens=st.integers(1, 40),
    data=st.data(),
)
def test_every_routing_names_distinct_experts_that_exist(routing, experts, tokens, data):
    top_k = data.draw(st.integers(1, min(experts, 8)))
    shape = Shape(tokens=tokens, hidden=64, experts=experts, top_k=top_k, routing=routing)
    idx = draw_topk(shape, 2, 1, seed=data.draw(st.integers(0, 9)))
    assert idx.shape == (tokens, top_k)
    assert idx.min() >= 0
    assert idx.max() < experts
    assert (idx.sort(dim=1).values.diff(dim=1) > 0).all()


def test_ranks_and_seeds_differ_and_repeat():
    assert torch.equal(draw_topk(SHAPE, 2, 0), draw_topk(SHAPE, 2, 0))
    assert not torch.equal(draw_topk(SHAPE, 2, 0), draw_topk(SHAPE, 2, 1))
    assert not torch.equal(draw_topk(SHAPE, 2, 0, seed=1), draw_topk(SHAPE, 2, 0, seed=2))


def _shares(routing: str) -> torch.Tensor:
    shape = Shape(tokens=4000, hidden=64, experts=32, top_k=4, routing=routing)
    counts = sum(torch.bincount(draw_topk(shape, 2, rank).flatten(), minlength=32) for rank in range(2))
    return counts / 8000


def test_uniform_is_even():
    assert ((_shares("uniform") - 4 / 32).abs() < 0.02).all()


def test_the_hot_rank_gets_two_to_three_times_as_much():
    shares = _shares("hot-rank")
    assert 2 < shares[:16].sum() / shares[16:].sum() < 3


def test_the_hot_expert_takes_half_of_the_tokens():
    shares = _shares("hot-expert").sort(descending=True).values
    assert abs(shares[0] - 0.5) < 0.02
    assert shares[1] < 0.2


def test_zipf_has_a_head_and_a_tail_and_the_same_head_on_all_ranks():
    shares = _shares("zipf").sort(descending=True).values
    assert shares[0] > 0.5
    assert shares[-1] < 0.1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tokens": 0}, "tokens must be between 1 and 1048576, got 0"),
        ({"experts": 4096}, "experts must be between 1 and 2048, got 4096"),
        ({"experts": 33}, "33 experts cannot be spread evenly over 2 ranks"),
        ({"top_k": 33}, "top-k must be between 1 and the number of experts, 32, got 33"),
        ({"hidden": 4}, "hidden 4 in bf16 makes rows of 8 bytes; they must be a positive multiple of 16"),
        ({"dtype": "int8"}, "unknown dtype 'int8'; choose one of bf16, fp16, fp32"),
        ({"routing": "even"}, "unknown routing 'even'; choose one of uniform, zipf, hot-rank, hot-expert"),
        ({"row_format": "fp8"}, "row_format 'fp8' needs payload 'fp8', got 'input'"),
    ],
)
def test_bad_shapes_are_named(changes, text):
    with pytest.raises(ValueError, match=text):
        Shape(**{**vars(SHAPE), **changes}).validate(2)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_shapes(name):
    model = PRESETS[name]
    Shape(tokens=1, hidden=model.hidden, experts=model.experts, top_k=model.top_k).validate(2)


def test_percentiles_are_nearest_ranks():
    assert Timing.of([float(n) for n in range(100, 0, -1)]) == Timing(50.0, 95.0, 100)
    assert Timing.of([7.0]) == Timing(7.0, 7.0, 1)
    assert Timing.of([1.0, 2.0, 3.0]).p95_us == 3.0
    with pytest.raises(ValueError, match="no measurements"):
        Timing.of([])
