"""The choice of an engine: reasons, log, and life with its group."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from moe_ncclep.ep import EPOptions, Routing, choose_engine, close_engine, combine, dispatch
from moe_ncclep.ep.engines import select
from moe_ncclep.ep.engines.collective import CollectiveEngine
from moe_ncclep.ep.engines.local import LocalEngine
from tests.ranks import pool


def test_one_process_gets_the_local_engine():
    choice = choose_engine(None, EPOptions())
    assert (choice.engine.name, choice.engine.rank, choice.engine.size) == ("local", 0, 1)
    assert choice.reason == "best of all, and every rank can use it"
    assert choose_engine(None, EPOptions()) is choice


def _choice_and_log() -> tuple[str, str, list[str]]:
    close_engine()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    select.logger.addHandler(handler)
    select.logger.setLevel(logging.INFO)
    try:
        choice = choose_engine(None, EPOptions())
        assert choose_engine(None, EPOptions()) is choice
    finally:
        select.logger.removeHandler(handler)
    return choice.engine.name, choice.reason, messages


def test_all_ranks_choose_alike_and_rank_0_says_why():
    (first, second) = pool(2).run(_choice_and_log)
    reason = "local needs a group of 1 rank, this one has 2 (rank 0); nvlink needs CUDA GPUs (rank 0)"
    assert first == ("collective", reason, [f"engine collective for a group of 2: {reason}"])
    assert second == ("collective", reason, [])


def _engines_go_with_their_groups() -> None:
    close_engine()
    before = len(select._choices)
    for _ in range(20):
        group = dist.new_group([0, 1])
        x = torch.ones(2, 8)
        out = dispatch(x, Routing(torch.tensor([[0], [1]]), None, 2), group)
        assert torch.equal(combine(out.rows, out.handle), x)
        dist.destroy_process_group(group)
        del group, out
    gc.collect()
    assert len(select._choices) == before


def test_engines_go_with_their_groups():
    pool(2).run(_engines_go_with_their_groups)


def _one_rank_groups() -> str:
    groups = [dist.new_group([r]) for r in range(2)]
    mine = groups[dist.get_rank()]
    name = choose_engine(mine, EPOptions()).engine.name
    close_engine(mine)
    assert choose_engine(mine, EPOptions(engine="collective")).engine.name == "collective"
    return name


def test_a_group_of_one_rank_is_local_but_may_ask_for_collective():
    assert pool(2).run(_one_rank_groups) == ["local", "local"]


def _group_goes_before_backward() -> None:
    """The collectives of a group that is gone must not fall back to the default group."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[dist.get_rank() // 2]
    x = torch.ones(2, 8, requires_grad=True)
    out = dispatch(x, Routing(torch.tensor([[0], [1]]), None, 2), group)
    y = combine(out.rows, out.handle)
    dist.barrier()
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="not registered"):
        dispatch(x, Routing(torch.tensor([[0], [1]]), None, 2), group)
    del group, pairs
    gc.collect()
    with pytest.raises(RuntimeError, match="process group of this engine no longer exists"):
        y.sum().backward()


def test_a_group_that_is_gone_is_an_error():
    pool(4).run(_group_goes_before_backward)


def _odd_ranks_only() -> list[float] | None:
    x = torch.full((2, 8), float(dist.get_rank()))
    routing = Routing(torch.tensor([[0, 1], [1, -1]]), None, 2)
    group = dist.new_group([3, 1])
    if dist.get_rank() not in (1, 3):
        with pytest.raises(ValueError, match="this rank is not a member of the group"):
            dispatch(x, routing, group)
        return None
    out = dispatch(x, routing, group)
    assert torch.equal(combine(out.rows, out.handle), x * torch.tensor([[2.0], [1.0]]))
    return out.rows[:, 0].tolist()


def test_ranks_are_those_of_the_group_and_others_are_refused():
    assert pool(4).run(_odd_ranks_only) == [None, [1.0, 3.0], None, [1.0, 1.0, 3.0, 3.0]]


def _close_between() -> bool:
    x = torch.ones(2, 8, requires_grad=True)
    routing = Routing(torch.tensor([[0], [1]]), None, 2)
    out = dispatch(x, routing)
    close_engine()
    combine(out.rows, out.handle).sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 8))
    return dispatch(x, routing).handle.engine is out.handle.engine


def test_a_handle_outlives_close_engine():
    assert pool(2).run(_close_between) == [False, False]


@pytest.mark.parametrize(
    ("backends", "has_cuda", "expected"),
    [
        ("cpu:gloo", False, "cpu"),
        ("cpu:gloo,cuda:gloo", True, "cpu"),
        ("cuda:nccl", True, "cuda:0"),
        ("cpu:gloo,cuda:nccl", True, "cuda:0"),
        ("cpu:gloo,cuda:nccl", False, "cpu"),
    ],
)
def test_headers_of_a_group_travel_on_one_device(monkeypatch, backends, has_cuda, expected):
    """Whatever a rank's tokens are on: a rank that refuses its own must meet the others in the same backend."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert str(CollectiveEngine(None)._header_device()) == expected


class _Probed(CollectiveEngine):
    """An engine whose probe answers as the test says; ``probes`` lists who was asked, on this rank."""

    probes: ClassVar[list[tuple[str, bool]]] = []
    local: ClassVar[dict[int, str]] = {}
    answers: ClassVar[dict[int, str | Exception]] = {}

    @classmethod
    def unavailable(cls, group):
        return cls.local.get(dist.get_rank(group))

    @classmethod
    def probe(cls, group, asked_for):
        _Probed.probes.append((cls.name, asked_for))
        dist.barrier(group)  # hangs unless all ranks are asked in the same order
        answer = cls.answers.get(dist.get_rank(group))
        if isinstance(answer, Exception):
            raise answer
        return answer


class _First(_Probed):
    name = "first"


class _Second(_Probed):
    name = "second"


class _Third(_Probed):
    name = "third"


def _probe(engine: str, local: dict[str, dict], answers: dict[str, dict]) -> tuple[str, list]:
    with pytest.MonkeyPatch.context() as patch:
        engines = (_First, _Second, _Third)
        patch.setattr(select, "_BEST_FIRST", engines)
        patch.setattr(select, "ENGINES", ("auto", "first", "second", "third"))
        patch.setattr(_Probed, "probes", [])
        for cls in engines:
            patch.setattr(cls, "local", local.get(cls.name, {}))
            patch.setattr(cls, "answers", answers.get(cls.name, {}))
        close_engine()
        try:
            choice = choose_engine(None, replace(EPOptions(), engine=engine))
            outcome = f"{choice.engine.name}: {choice.reason}"
            assert choose_engine(None, replace(EPOptions(), engine=engine)) is choice  # and asks no more
        except ValueError as error:
            outcome = str(error)
        finally:
            close_engine()
        return outcome, _Probed.probes


@pytest.mark.parametrize(
    ("engine", "local", "answers", "expected", "probes"),
    [
        ("auto", {}, {}, "first: best of all, and every rank can use it", [("first", False)]),
        (
            "auto",
            {"first": {1: "no GPU"}},
            {"second": {0: "too far apart"}},
            "third: first no GPU (rank 1); second too far apart (rank 0)",
            [("second", False), ("third", False)],
        ),
        (
            "auto",
            {},
            {"first": {1: RuntimeError("driver lost")}},
            "second: first RuntimeError: driver lost (rank 1)",
            [("first", False), ("second", False)],
        ),
        ("second", {}, {"first": {0: "never asked"}}, "second: asked for", [("second", True)]),
        (
            "second",
            {},
            {"second": {1: "too far apart"}},
            "engine second cannot be used: too far apart (rank 1)",
            [("second", True)],
        ),
        ("second", {"second": {0: "no GPU"}}, {}, "engine second cannot be used: no GPU (rank 0)", []),
        (
            "auto",
            {"first": {0: "no GPU"}, "second": {1: "no GPU"}},
            {"third": {0: "a", 1: "b"}},
            "no engine can serve this group: first no GPU (rank 0); second no GPU (rank 1); third a (rank 0)",
            [("third", False)],
        ),
    ],
)
def test_probes_are_joint_and_only_of_engines_that_matter(engine, local, answers, expected, probes):
    assert pool(2).run(_probe, engine, local, answers) == [(expected, probes)] * 2


def test_a_single_process_is_probed_too(monkeypatch):
    monkeypatch.setattr(select, "_alone", {})
    monkeypatch.setattr(LocalEngine, "probe", classmethod(lambda cls, group, asked_for: f"{group} {asked_for}"))
    with pytest.raises(ValueError, match=r"engine local cannot be used: None True$"):
        choose_engine(None, EPOptions(engine="local"))
