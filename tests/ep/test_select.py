"""The choice of an engine: reasons, log, and life with its group."""

from __future__ import annotations

import gc
import logging

import torch
import torch.distributed as dist

from moe_ncclep.ep import EPOptions, Routing, choose_engine, close_engine, combine, dispatch
from moe_ncclep.ep.engines import select
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
    reason = "local needs a group of 1 rank, this one has 2 (rank 0)"
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
