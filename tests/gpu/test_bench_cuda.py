"""The benchmark's virtual mode on a GPU: checked results, every phase, floors, and a mismatch that is caught."""

from __future__ import annotations

import pytest

from moe_ncclep.bench.shapes import Shape

pytestmark = pytest.mark.gpu1
SMALL = {"tokens": 96, "hidden": 512, "experts": 16, "top_k": 4}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("routing", ["uniform", "zipf", "hot-expert"])
def test_every_phase_stands_beside_its_floor(ranks, routing):
    from moe_ncclep.bench.virtual import VirtualBench

    bench = VirtualBench(Shape(**SMALL, routing=routing), ranks)
    bench.check()
    results = {r["phase"]: r for r in bench.measure(2)}
    ours = {phase for phase, r in results.items() if r["contender"] == "nvlink"}
    assert ours == {"route", "dispatch", "dispatch+probs", "combine", "combine+probs"}
    assert any(phase.startswith("replicate:") for phase in results)
    assert any(phase.startswith("reduce:") for phase in results)
    for phase in ours - {"route"}:
        assert results[phase]["floor_us"] > 0
        assert results[phase]["wire_bytes"] == bench.remote_tokens * 1024


@pytest.mark.parametrize("row_format", ["input", "fp8"])
def test_fp8(row_format):
    from moe_ncclep.bench.virtual import VirtualBench

    bench = VirtualBench(Shape(**SMALL, payload="fp8", row_format=row_format), 2, num_sms=16)
    bench.check()
    assert {r["phase"] for r in bench.measure(2)} == {"route", "dispatch", "dispatch+probs"}


def test_a_wrong_result_is_not_timed():
    from moe_ncclep.bench.mismatch import Mismatch
    from moe_ncclep.bench.virtual import VirtualBench

    bench = VirtualBench(Shape(**SMALL), 2)
    bench.reference.ranks[0].placement.token_of_row[0] += 1
    with pytest.raises(Mismatch, match="rows of dispatch differ"):
        bench.check()
