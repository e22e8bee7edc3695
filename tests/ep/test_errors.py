"""Bad input: the same ValueError on every rank, naming value and limit, before anybody can hang; then all goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ncclep.ep import EPOptions, Routing, close_engine, combine, dispatch
from tests.ranks import pool

T, K, H, E = 4, 2, 8, 4


def _arguments(rank: int, bad_rank: int | None, kind: str | None):
    """Arguments of a good call, spoilt on ``bad_rank``."""
    x, idx, probs = torch.ones(T, H), torch.arange(T * K).view(T, K) % E, torch.ones(T, K)
    num_experts = E
    options = EPOptions(payload="fp8") if kind == "row format" else EPOptions()
    if rank == bad_rank or bad_rank == -1:
        if kind == "id too high":
            idx[1, 0] = E
        elif kind == "id too low":
            idx[1, 0] = -5
        elif kind == "experts not divisible":
            num_experts = 5
        elif kind == "too many experts":
            num_experts = 4096
        elif kind == "dtype":
            x = x.bfloat16()
        elif kind == "unsupported dtype":
            x = x.to(torch.int32)
        elif kind == "row bytes":
            x = torch.ones(T, 3)
        elif kind == "no hidden":
            x = torch.ones(T, 0)
        elif kind == "hidden":
            x = torch.ones(T, 2 * H)
        elif kind == "top-k":
            idx, probs = idx[:, :1], probs[:, :1]
        elif kind == "top-k too large":
            idx, probs = torch.zeros(T, 129, dtype=torch.int64), torch.ones(T, 129)
        elif kind == "tokens and ids":
            idx = idx[:2]
        elif kind == "probs shape":
            probs = probs[:, :1]
        elif kind == "probs missing":
            probs = None
        elif kind == "float ids":
            idx = idx.float()
        elif kind == "rank of tokens":
            x = x.view(2, 2, H)
        elif kind == "ids of a wrong type":
            idx = idx.tolist()
        else:
            options = {
                "negative budget": EPOptions(budget=-1),
                "float budget": EPOptions(budget=8.0),
                "huge budget": EPOptions(budget=2**62),
                "huge fixed rows": EPOptions(rows_per_expert=2**70),
                "huge num_sms": EPOptions(num_sms=2**70),
                "long text": EPOptions(payload="漢" * 300),
                "budget not aligned": EPOptions(budget=8, alignment=16),
                "zero alignment": EPOptions(alignment=0),
                "alignment": EPOptions(alignment=8),
                "payload": EPOptions(payload="fp8"),
                "unknown payload": EPOptions(payload="int4"),
                "fixed rows": EPOptions(rows_per_expert=8),
                "fixed rows and budget": EPOptions(rows_per_expert=8, budget=8),
                "num_sms": EPOptions(num_sms=0),
                "power of two": EPOptions(fp8_power_of_two=True),
                "power of two in words": EPOptions(fp8_power_of_two="yes"),
                "nvtx in words": EPOptions(nvtx="no"),
                "row format": EPOptions(payload="fp8", row_format="fp8"),
                "unknown row format": EPOptions(payload="fp8", row_format="bf16"),
                "fp8 rows of another payload": EPOptions(row_format="fp8"),
                "timeout": EPOptions(timeout_s=0),
                "long timeout": EPOptions(timeout_s=1e6),
                "no timeout": EPOptions(timeout_s=float("nan")),
                "timeout in words": EPOptions(timeout_s="5 minutes"),
                "buffer": EPOptions(buffer_mib=64),
                "no buffer": EPOptions(buffer_mib=0),
                "max_tokens": EPOptions(max_tokens=4096),
                "fixed sizes": EPOptions(budget=64),
                "huge max_tokens": EPOptions(max_tokens=2**24 + 1),
            }[kind]
    return x, Routing(idx, probs, num_experts), options


LOCAL_MISTAKES = {
    "id too high": "expert id 4 is out of range: ids lie in [0, 4)",
    "id too low": "expert id -5 is out of range: ids lie in [0, 4)",
    "experts not divisible": "5 experts cannot be spread evenly over 2 ranks",
    "too many experts": "num_experts must be between 1 and 2048, got 4096",
    "unsupported dtype": "tokens of torch.int32 are not supported",
    "row bytes": "a row of 3 torch.float32 values has 12 bytes; it must be a positive multiple of 16",
    "no hidden": "a row of 0 torch.float32 values has 0 bytes",
    "top-k too large": "top-k must be between 1 and 128, got 129",
    "tokens and ids": "topk_idx must be [T, K] with T = 4, got shape (2, 2)",
    "probs shape": "probs have shape (4, 1), topk_idx has (4, 2)",
    "float ids": "topk_idx must hold signed integers, got torch.float32",
    "rank of tokens": "tokens must be [T, H], got shape (2, 2, 8)",
    "negative budget": f"budget must be between 0 and {2**40}, got -1",
    "float budget": "budget must be an integer, got 8.0",
    "huge budget": f"budget must be between 0 and {2**40}, got {2**62}",
    "huge fixed rows": f"rows_per_expert must be between 0 and {2**40}, got {2**70}",
    "huge num_sms": f"num_sms must be between 1 and {2**16}, got {2**70}",
    "long text": "unknown payload '漢漢漢",
    "budget not aligned": "budget 8 is not a multiple of alignment 16",
    "zero alignment": "alignment must be between 1 and 4096, got 0",
    "unknown payload": "unknown payload 'int4'; choose one of input, fp8",
    "fixed rows and budget": "budget (8) and rows_per_expert (8) exclude each other",
    "num_sms": f"num_sms must be between 1 and {2**16}, got 0",
    "power of two in words": "fp8_power_of_two must be True or False, got 'yes'",
    "nvtx in words": "nvtx must be True or False, got 'no'",
    "unknown row format": "unknown row_format 'bf16'; choose one of input, fp8",
    "fp8 rows of another payload": "row_format 'fp8' delivers rows as they travelled: it needs payload",
    "timeout": "timeout_s must be between 0.001 and 86400, got 0",
    "long timeout": "timeout_s must be between 0.001 and 86400, got 1000000.0",
    "no timeout": "timeout_s must be between 0.001 and 86400, got nan",
    "timeout in words": "timeout_s must be a number, got '5 minutes'",
    "no buffer": f"buffer_mib must be between 1 and {2**20}, got 0",
    "huge max_tokens": f"max_tokens must be between 1 and {2**24}, got {2**24 + 1}",
}
DISAGREEMENTS = {
    "dtype": "ranks disagree on dtype of the tokens: torch.float32 on rank 0, torch.bfloat16 on rank 1",
    "hidden": "ranks disagree on hidden size: 8 on rank 0, 16 on rank 1",
    "top-k": "ranks disagree on top_k: 2 on rank 0, 1 on rank 1",
    "probs missing": "ranks disagree on dtype of the probs: torch.float32 on rank 0, none on rank 1",
    "alignment": "ranks disagree on alignment: 1 on rank 0, 8 on rank 1",
    "payload": "ranks disagree on payload: input on rank 0, fp8 on rank 1",
    "fixed rows": "ranks disagree on rows_per_expert: none on rank 0, 8 on rank 1",
    "power of two": "ranks disagree on fp8_power_of_two: False on rank 0, True on rank 1",
    "row format": "ranks disagree on row_format: input on rank 0, fp8 on rank 1",
    "buffer": "ranks disagree on buffer_mib: none on rank 0, 64 on rank 1",
    "max_tokens": "ranks disagree on max_tokens: none on rank 0, 4096 on rank 1",
    "fixed sizes": "ranks disagree on whether sizes are fixed (budget or rows_per_expert): "
    "exact on rank 0, fixed on rank 1",
}


def _arguments_on(device: str, *which):
    """The same arguments on ``device``; they are made on the CPU, where some are no tensors at all."""
    x, routing, options = _arguments(*which)
    if device == "cpu":
        return x, routing, options
    probs = None if routing.probs is None else routing.probs.to(device)
    return x.to(device), Routing(routing.topk_idx.to(device), probs, routing.num_experts), options


def bad_then_good(bad_rank: int, kind: str, device: str = "cpu", **common: Any) -> str:
    """The error of a spoilt call; a good call afterwards must work. ``common``: options of both."""
    rank = torch.distributed.get_rank()
    x, routing, options = _arguments_on(device, rank, bad_rank, kind)
    options = options.replace(**common)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is asserted by the caller
        dispatch(x, routing, options=options)
    x, routing, options = _arguments_on(device, rank, None, None)
    out = dispatch(x, routing, options=options.replace(**common))
    assert torch.equal(combine(out.rows, out.handle).cpu(), torch.full((T, H), float(K)))
    return str(caught.value)


@pytest.mark.parametrize("kind", LOCAL_MISTAKES)
@pytest.mark.parametrize("bad_rank", [0, 1, -1], ids=["rank0", "rank1", "all"])
def test_a_mistake_of_one_rank_is_raised_on_all(kind, bad_rank):
    texts = pool(2).run(bad_then_good, bad_rank, kind)
    first_bad = max(bad_rank, 0)
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"rank {first_bad}: {LOCAL_MISTAKES[kind]}")


def test_an_unexpected_exception_of_one_rank_is_told_to_all():
    texts = pool(2).run(bad_then_good, 1, "ids of a wrong type")
    assert texts == ["rank 1: AttributeError: 'list' object has no attribute 'dim'"] * 2


@pytest.mark.parametrize("kind", DISAGREEMENTS)
def test_ranks_that_disagree_are_named(kind):
    assert pool(2).run(bad_then_good, 1, kind) == [DISAGREEMENTS[kind]] * 2


def _options_that_may_differ() -> None:
    rank = torch.distributed.get_rank()
    x, routing, _ = _arguments(rank, None, None)
    own = (EPOptions(timeout_s=0.001, nvtx=False, budget=8), EPOptions(timeout_s=86_400, budget=16))[rank]
    out = dispatch(x, routing, options=own)
    assert torch.equal(combine(out.rows, out.handle), torch.full((T, H), float(K)))


def test_budget_timeout_and_nvtx_may_differ():
    pool(2).run(_options_that_may_differ)


@pytest.mark.parametrize("kind", LOCAL_MISTAKES)
def test_local_engine_refuses_the_same(kind):
    if kind == "experts not divisible":
        pytest.skip("any number of experts fits one rank")
    x, routing, options = _arguments(0, 0, kind)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        dispatch(x, routing, options=options)
    assert str(caught.value).startswith(LOCAL_MISTAKES[kind])


def test_fp8_rows_of_another_payload_name_both_formats():
    with pytest.raises(ValueError, match=r"row_format 'fp8' .* needs payload 'fp8', got 'input'"):
        EPOptions(row_format="fp8").validate()


def test_combine_checks_its_rows():
    x, routing, options = _arguments(0, None, None)
    out = dispatch(x, routing, options=options)
    with pytest.raises(ValueError, match=r"expects rows of shape \(8, 8\), got \(7, 8\)"):
        combine(out.rows[1:], out.handle)
    with pytest.raises(ValueError, match=r"expects rows of torch.float32 like the tokens, got torch.bfloat16"):
        combine(out.rows.bfloat16(), out.handle)


def test_reused_handle_checks_its_tokens():
    x, routing, options = _arguments(0, None, None)
    handle = dispatch(x, routing, options=options).handle
    with pytest.raises(
        ValueError, match=r"made for torch.float32 tokens of shape \(4, 8\), got torch.float32 \(3, 8\)"
    ):
        dispatch(x[:3], Routing(routing.topk_idx[:3], None, E), handle=handle)
    with pytest.raises(ValueError, match=r"routing with \(T, K, E\) = \(4, 2, 4\), got \(4, 1, 4\)"):
        dispatch(x, Routing(routing.topk_idx[:, :1], None, E), handle=handle)
    with pytest.raises(ValueError, match=r"got \(4, 2, 8\)"):
        dispatch(x, Routing(routing.topk_idx, None, 2 * E), handle=handle)
    with pytest.raises(ValueError, match=r"probs have shape \(4, 1\), topk_idx has \(4, 2\)"):
        dispatch(x, Routing(routing.topk_idx, torch.ones(4, 1), E), handle=handle)


def test_a_map_with_more_than_top_k_experts_is_refused():
    routing = Routing.from_map(torch.ones(2, 4, dtype=torch.bool), torch.ones(2, 4), 2)
    with pytest.raises(ValueError, match="names more experts than top-k"):
        dispatch(torch.ones(2, 8), routing)


def _engines(names: tuple[str, str]) -> str:
    rank = torch.distributed.get_rank()
    close_engine()
    x, routing, _ = _arguments(rank, None, None)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        dispatch(x, routing, options=EPOptions(engine=names[rank]))
    return str(caught.value)


def test_engine_wishes_are_settled_together():
    run = pool(2).run
    assert (
        run(_engines, ("auto", "collective")) == ["ranks disagree on engine: auto on rank 0, collective on rank 1"] * 2
    )
    assert (
        run(_engines, ("auto", "warp"))
        == ["rank 1: unknown engine 'warp'; choose one of auto, local, collective, nvlink"] * 2
    )
    local = run(_engines, ("local", "local"))
    assert local == ["engine local cannot be used: needs a group of 1 rank, this one has 2 (rank 0)"] * 2


def _second_wish(bad_rank: int) -> str:
    rank = torch.distributed.get_rank()
    close_engine()
    x, routing, _ = _arguments(rank, None, None)
    dispatch(x, routing)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        dispatch(x, routing, options=EPOptions(engine="collective" if rank == bad_rank else "auto"))
    out = dispatch(x, routing)
    assert out.rows.shape[0] == T * K
    return str(caught.value)


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_second_wish_on_one_rank_is_refused_on_all(bad_rank):
    texts = pool(2).run(_second_wish, bad_rank)
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"rank {bad_rank}: engine 'collective' asked for, but this group already uses")


def test_collective_needs_a_group():
    x, routing, _ = _arguments(0, None, None)
    with pytest.raises(ValueError, match=r"engine collective cannot be used: torch.distributed is not initialised"):
        dispatch(x, routing, options=EPOptions(engine="collective"))
