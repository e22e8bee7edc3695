"""The benchmark between ranks, on the CPU: right results are timed, wrong ones are not."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ncclep.bench import contenders
from moe_ncclep.bench.mismatch import Mismatch
from moe_ncclep.bench.ranks import PHASES, RanksBench
from moe_ncclep.bench.shapes import Shape
from moe_ncclep.ep.engines.collective import CollectiveEngine
from tests.ranks import pool

CPU = torch.device("cpu")
SHAPE = Shape(tokens=12, hidden=16, experts=6, top_k=3, dtype="fp32")
BOTH = ("collective", "alltoall")


def _measured(shape: Shape, names: tuple[str, ...], **kwargs) -> tuple[list[dict], dict[str, str]]:
    bench = RanksBench(shape, names, CPU, **kwargs)
    bench.check()
    results = bench.measure(3)
    bench.close()
    return results, bench.left_out


def test_contenders_agree_and_every_phase_is_timed():
    first, second = pool(2).run(_measured, SHAPE, contenders.NAMES)
    assert first == second  # the slowest rank's times on all
    results, left_out = first
    assert [(r["contender"], r["phase"]) for r in results] == [(name, phase) for name in BOTH for phase in PHASES]
    assert all(0 < r["us_p50"] <= r["us_p95"] and r["repetitions"] == 3 for r in results)
    assert set(left_out) == {"nvlink", "nccl_ep"}
    assert "needs CUDA GPUs" in left_out["nvlink"]


@pytest.mark.parametrize("routing", ["zipf", "hot-rank", "hot-expert"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_skewed_routings_agree_too(routing, dtype):
    shape = Shape(**{**vars(SHAPE), "routing": routing, "dtype": dtype})
    assert pool(3).run(_measured, shape, BOTH)[0][1] == {}


def test_wire_bytes_are_counted_and_deduplication_saves_some():
    wide = Shape(tokens=40, hidden=16, experts=4, top_k=4, dtype="fp32")  # every token goes to both experts of a rank
    results, _ = pool(2).run(_measured, wide, BOTH)[0]
    sent = {r["contender"]: r["wire_bytes"] for r in results}
    assert sent == {"collective": 40 * 64, "alltoall": 2 * 40 * 64}


def test_fp8_leaves_alltoall_out():
    shape = Shape(**{**vars(SHAPE), "payload": "fp8"})
    results, left_out = pool(2).run(_measured, shape, BOTH)[0]
    assert {r["contender"] for r in results} == {"collective"}
    assert left_out == {"alltoall": "alltoall moves tokens as they are, not payload 'fp8'"}


def _late() -> tuple[list[dict], list[dict]]:
    prompt, _ = _measured(SHAPE, ("collective",))
    late, _ = _measured(SHAPE, ("collective",), late_us=20_000)
    return prompt, late


def test_lateness_is_waited_for_but_not_counted():
    with mock.patch.object(contenders, "NAMES", BOTH):
        prompt, late = pool(2).run(_late)[0]
    for before, after in zip(prompt, late, strict=True):
        assert after["late_us"] == 20_000
        assert after["us_p50"] < before["us_p50"] + 10_000


def _broken(method: str) -> str:
    original = getattr(CollectiveEngine, method)

    def wrong(self, *args, **kwargs):
        first, *rest = original(self, *args, **kwargs)
        if dist.get_rank() == 1 and first.numel():
            first[0, 0] += 1
        return first, *rest

    with mock.patch.object(CollectiveEngine, method, wrong):
        bench = RanksBench(SHAPE, BOTH, CPU)
        with pytest.raises(Mismatch) as caught:
            bench.check()
        bench.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("dispatch", "rank 0: result of alltoall and collective differ"),  # of tokens whose rows on rank 1 are wrong
        ("combine", "rank 1: result of alltoall and collective differ"),
    ],
)
def test_a_wrong_result_on_one_rank_is_an_error_on_all(method, text):
    assert pool(2).run(_broken, method) == [text, text]


def _nobody() -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - asserted by the caller
        RanksBench(SHAPE, ("nvlink",), CPU)
    return str(caught.value)


def test_no_contender_is_an_error_with_the_reasons():
    assert "no contender can run: {'nvlink':" in pool(2).run(_nobody)[0]
