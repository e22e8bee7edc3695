"""What the NVLink engine decides on the host, with real processes and without a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings

from moe_ncclep.ep import EPOptions, Routing, close_engine, combine, dispatch
from moe_ncclep.ep.engines import nvlink
from moe_ncclep.ep.engines.select import choose_engine
from moe_ncclep.ep.nvlink.failure import PeerFailure
from tests.ep.cases import Case, check_on_rank
from tests.ep.test_contract import cases
from tests.ep.test_errors import DISAGREEMENTS, LOCAL_MISTAKES, _arguments, bad_then_good
from tests.nvlink.checks import supported
from tests.nvlink.host_endpoint import HostMemory, without_gpu
from tests.ranks import pool

OPTIONS = EPOptions(engine="nvlink")
MIXED = ("fixed rows", "fixed sizes")
"""Disagreements of ranks of which only some wait for the exchange."""
OTHER_TEXT = ("row format",)
"""The engine's own limit comes first: the hidden size of these tests is too small for its FP8 rows."""


def _on_host(fn, *args, keep_engine: bool = False, **kwargs):
    with without_gpu():
        if not keep_engine:
            close_engine()
            HostMemory.allocated.clear()
        try:
            return fn(*args, **kwargs)
        finally:
            if not keep_engine:
                close_engine()
                assert HostMemory.living == 0, "closing left memory behind"


def ranks(world: int, fn, *args, **kwargs) -> list:
    return pool(world).run(_on_host, fn, *args, **kwargs)


def _case(case: Case) -> None:
    check_on_rank(replace(case, engine="nvlink"))


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(case=cases(2, engine="nvlink"))
def test_any_case(case: Case):
    ranks(2, _case, supported(case))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("row_format", ["input", "fp8"])
def test_fp8_payload(world, row_format):
    ranks(world, _case, Case((5, 0, 3)[:world], hidden=272, payload="fp8", row_format=row_format, alignment=4))


@pytest.mark.parametrize("kind", [kind for kind in LOCAL_MISTAKES if kind not in OTHER_TEXT])
@pytest.mark.parametrize("at_first", [True, False], ids=["at_first", "later"])
def test_a_mistake_of_one_rank_is_raised_on_all(kind, at_first):
    texts = ranks(2, _spoilt if at_first else _used_then_spoilt, kind)
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"rank 1: {LOCAL_MISTAKES[kind]}")


def _spoilt(kind: str) -> str:
    return bad_then_good(1, kind, engine="nvlink")


def _used_then_spoilt(kind: str) -> str:
    _good_call()
    return _spoilt(kind)


def _good_call(options: EPOptions = OPTIONS) -> None:
    x, routing, _ = _arguments(dist.get_rank(), None, None)
    out = dispatch(x, routing, options=options)
    assert torch.equal(combine(out.rows, out.handle), torch.full_like(x, float(routing.topk_idx.shape[1])))


@pytest.mark.parametrize("kind", [kind for kind in DISAGREEMENTS if kind not in (*MIXED, *OTHER_TEXT)])
@pytest.mark.parametrize("at_first", [True, False], ids=["at_first", "later"])
def test_ranks_that_disagree_are_named(kind, at_first):
    assert ranks(2, _spoilt if at_first else _used_then_spoilt, kind) == [DISAGREEMENTS[kind]] * 2


def _mixed(kind: str) -> list[str]:
    """What each rank raises when only rank 1 fixes its sizes, and at its next call."""
    _good_call()
    x, routing, options = _arguments(dist.get_rank(), 1, kind)
    texts = []
    for _ in range(2):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - asserted by the caller
            dispatch(x, routing, options=options.replace(engine="nvlink"))
        texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize("kind", MIXED)
def test_a_disagreement_of_which_one_rank_does_not_wait(kind):
    """That rank finds out in its next operation; then the engine is of no use on any rank."""
    waits, does_not = ranks(2, _mixed, kind)
    later = f"an earlier call was wrong: {DISAGREEMENTS[kind]}"
    assert waits == [DISAGREEMENTS[kind], later]
    assert does_not == [later, later]


def _growth() -> list[int]:
    for case in (
        Case((3, 3)),
        Case((700, 5)),
        Case((300, 300), num_local=8, top_k=8, hidden=64),
        Case((200, 9), num_local=8, top_k=16, hidden=1024),
        Case((5, 2)),
    ):
        check_on_rank(replace(case, engine="nvlink"), keep_engine=True)
        assert HostMemory.living == 1
    return list(HostMemory.allocated)


def test_the_buffer_grows_on_all_ranks_alike_and_never_shrinks():
    first, second = ranks(2, _growth)
    assert first == second == sorted(first)
    assert len(first) == 4


def _fixed_growth() -> int:
    """With fixed sizes, rows may become wider and top-k larger."""
    for case in (Case((4, 9)), Case((4, 9), hidden=512), Case((8, 1), num_local=8, top_k=8, hidden=512)):
        check_on_rank(replace(case, engine="nvlink", rows_per_expert=6), keep_engine=True)
    return len(HostMemory.allocated)


def test_fixed_sizes_grow_for_what_all_ranks_see():
    assert ranks(2, _fixed_growth) == [3, 3]


def _too_many_tokens(max_tokens: int | None) -> str:
    rank = dist.get_rank()
    options = OPTIONS.replace(rows_per_expert=8, max_tokens=max_tokens)
    x, routing, _ = _arguments(rank, None, None)
    dispatch(x, routing, options=options)
    many = 500 if rank == 1 else 4
    routing = Routing(torch.zeros(many, 2, dtype=torch.int64), None, 4)
    try:
        out = dispatch(torch.ones(many, 8), routing, options=options)
        combine(out.rows, out.handle)
    except ValueError as error:
        return str(error)
    return ""


def test_fixed_sizes_cannot_grow_for_more_tokens():
    first, second = ranks(2, _too_many_tokens, None)
    reason = "500 tokens, but memory was set aside for 128; with fixed sizes it cannot grow: set max_tokens"
    assert second.startswith(f"rank 1: {reason}")
    assert first.startswith(f"an earlier call was wrong: rank 1: {reason}")
    assert ranks(2, _too_many_tokens, 500) == ["", ""]


def _bounded() -> int:
    options = OPTIONS.replace(buffer_mib=4)
    x = torch.ones(400, 2048) * (dist.get_rank() + 1)
    routing = Routing(torch.arange(800).view(400, 2) % 4, None, 4)
    out = dispatch(x, routing, options=options)
    assert torch.equal(combine(out.rows, out.handle), 2 * x)
    assert HostMemory.allocated[-1] <= 4 * 2**20
    return out.handle.plan.shape.num_rounds


def test_a_bounded_buffer_takes_rounds():
    first, second = ranks(2, _bounded)
    assert first == second > 1


def _too_bounded() -> str:
    x = torch.ones(4, 2**17)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        dispatch(x, Routing(torch.zeros(4, 1, dtype=torch.int64), None, 2), options=OPTIONS.replace(buffer_mib=1))
    return str(caught.value)


def test_a_bound_without_room_for_a_row_is_an_error_on_all():
    first, second = ranks(2, _too_bounded)
    assert first == second
    assert first.startswith("buffer_mib 1 is too small for 2 ranks, 128 tokens and rows of 524288 bytes")


def _capture(setup: bool, **options) -> str:
    if setup:
        _good_call()
    x, routing, _ = _arguments(0, None, None)
    with mock.patch.object(nvlink, "_capturing", return_value=True), pytest.raises(ValueError) as caught:  # noqa: PT011
        dispatch(x, routing, options=OPTIONS.replace(**options))
    if setup:
        _good_call()
    return str(caught.value)


def test_what_a_graph_cannot_capture_is_refused_on_the_spot():
    assert "dispatch once before the capture" in ranks(2, _capture, False, rows_per_expert=4)[0]
    assert "set budget or rows_per_expert" in ranks(2, _capture, True)[0]
    assert "budget 7 is not a multiple of alignment 2" in ranks(2, _capture, True, budget=7, alignment=2)[0]


def _growth_after_capture() -> str:
    x, routing, _ = _arguments(0, None, None)
    options = OPTIONS.replace(rows_per_expert=8)
    dispatch(x, routing, options=options)
    with mock.patch.object(nvlink, "_capturing", return_value=True):
        out = dispatch(x, routing, options=options)
        combine(out.rows, out.handle)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        dispatch(torch.ones(900, 8), Routing(torch.zeros(900, 2, dtype=torch.int64), None, 4), options=OPTIONS)
    _good_call()  # what fits still works
    return str(caught.value)


def test_a_captured_buffer_stays_where_it_is():
    for text in ranks(2, _growth_after_capture):
        assert text.startswith("1024 tokens of 32 bytes need a larger communication buffer, but a CUDA graph has")


def _after_a_failure() -> list[str]:
    x, routing, _ = _arguments(0, None, None)
    out = dispatch(x, routing, options=OPTIONS)
    out.handle.engine._endpoint.fail(1, 7, 6)
    texts = []
    for call in (
        partial(dispatch, x, routing, options=OPTIONS),
        partial(combine, out.rows, out.handle),
        partial(dispatch, x, routing, handle=out.handle),
    ):
        with pytest.raises(PeerFailure) as caught:
            call()
        texts.append(str(caught.value))
    close_engine()  # waits for nobody
    _good_call()
    return texts


def test_after_a_failure_every_call_raises_until_the_engine_is_closed():
    for texts in ranks(2, _after_a_failure):
        assert (
            texts
            == ["rank 0 waited 300 s for rank 0 to publish its routing: expected operation 7, saw operation 6"] * 3
        )


LIMITS = {
    "dtype": (
        {"dtype": torch.float64},
        "engine nvlink moves torch.float32, torch.bfloat16, torch.float16 tokens, got torch.float64; engine "
        "'collective' can do that",
    ),
    "top_k": (
        {"top_k": 33},
        "top-k 33 is over the limit of 32 of engine nvlink; engine 'collective' can do that",
    ),
    "num_sms": ({"num_sms": 1}, "num_sms must be at least 2 for engine nvlink, got 1"),
    "budget": ({"budget": 2**32}, f"{2**32} rows are over the limit of {2**31 - 1} of engine nvlink"),
    "fp8_rows": (
        {"payload": "fp8", "row_format": "fp8", "hidden": 72},
        "FP8 rows of engine nvlink need a hidden size",
    ),
    "fp8_width": (
        {"payload": "fp8", "hidden": 2**17},
        f"a row of {2**17} torch.bfloat16 values is too large for the FP8 payload",
    ),
}
"""What is beyond the engine, and how its error begins."""


def beyond_a_limit(device: str, **changes) -> str:
    """The error of a dispatch on ``device`` that is over a limit of the engine."""
    hidden, dtype = changes.pop("hidden", 64), changes.pop("dtype", torch.bfloat16)
    x = torch.ones(4, hidden, dtype=dtype, device=device)
    idx = torch.zeros(4, changes.pop("top_k", 2), dtype=torch.int64, device=device)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is asserted by the caller
        dispatch(x, Routing(idx, None, 4), options=OPTIONS.replace(**changes))
    return str(caught.value)


@pytest.mark.parametrize(("changes", "text"), LIMITS.values(), ids=LIMITS)
def test_limits_of_the_engine(changes, text):
    texts = ranks(2, beyond_a_limit, "cpu", **changes)
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"rank 0: {text}")


def _other_probs(dtype: torch.dtype) -> None:
    probs = torch.tensor([[0.5, 0.25], [1 / 3, 0.125]], dtype=dtype, requires_grad=True)
    x = torch.ones(2, 8)
    out = dispatch(x, Routing(torch.tensor([[0, 1], [1, 0]]), probs, 2), options=OPTIONS)
    assert out.probs.dtype == torch.promote_types(dtype, torch.float32)
    want = [0.5, 0.125] * 2 if dist.get_rank() == 0 else [0.25, float(probs[1, 0].float())] * 2
    assert out.probs.tolist() == want
    (combine(out.rows, out.handle).sum() * 0 + (out.probs * 3).sum()).backward()
    assert torch.equal(probs.grad, torch.full_like(probs, 3.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_probs_of_any_dtype_travel_in_float32(dtype):
    ranks(2, _other_probs, dtype)


def _chosen() -> tuple[str, str]:
    choice = choose_engine(None, EPOptions())
    return choice.engine.name, choice.reason


def test_auto_takes_it_where_all_ranks_can():
    assert ranks(2, _chosen) == [("nvlink", "local needs a group of 1 rank, this one has 2 (rank 0)")] * 2
