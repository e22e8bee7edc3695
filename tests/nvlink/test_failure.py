"""What a failure record says to a human."""

from __future__ import annotations

import pytest

from moe_ncclep.ep.nvlink.failure import describe, is_disagreement
from moe_ncclep.ep.nvlink.structs import MAX_RANKS, Failure

TIMEOUT, DISAGREEMENT, TOO_MANY = 1, 2, 3


def record(kind: int, phase: int, reporter: int, peer: int, expected: int = 0, seen: int = 0) -> Failure:
    """As ``Session::fail`` writes it."""
    return Failure(1 << 63 | kind << 40 | phase << 32 | reporter << 16 | peer, expected, seen)


@pytest.mark.parametrize(
    ("phase", "expected", "seen", "text"),
    [
        (1, 9, 7, "to begin the next operation: expected operation 9, saw operation 7"),
        (2, 2**40, 0, "to publish its routing: expected operation 1099511627776, saw operation 0"),
        (4, 9 << 16 | 3, 7 << 16, "to send rows of dispatch: expected operation 9 round 3, saw operation 7 round 0"),
        (
            5,
            9 << 16,
            9 << 16 | 65535,
            "to send partial sums of combine: expected operation 9 round 0, saw operation 9 round 65535",
        ),
        (6, 2 << 16 | 1, 0, "to make room for more rows: expected operation 2 round 1, saw operation 0 round 0"),
        (9, 1, 0, "(phase 9): expected operation 1, saw operation 0"),
    ],
)
def test_a_wait_in_vain(phase, expected, seen, text):
    failure = record(TIMEOUT, phase, 3, MAX_RANKS - 1, expected, seen)
    assert describe(failure, 2.5) == f"rank 3 waited 2.5 s for rank 71 {text}"
    assert not is_disagreement(failure)


def test_ranks_are_told_apart():
    assert describe(record(TIMEOUT, 1, 0, 1), 300).startswith("rank 0 waited 300 s for rank 1 ")
    assert describe(record(TIMEOUT, 1, 1, 0), 300.0).startswith("rank 1 waited 300 s for rank 0 ")


def test_thread_blocks_that_do_not_run():
    assert describe(record(TIMEOUT, 3, 2, 2, expected=64, seen=60), 20) == (
        "rank 2: not all of its own thread blocks ran within 20 s; something else occupies the GPU, or num_sms is too "
        "large"
    )


def test_too_many_tokens():
    failure = record(TOO_MANY, 2, 1, 1, expected=4096, seen=5000)
    assert describe(failure, 20) == (
        "a rank dispatched 5000 tokens, but memory was set aside for 4096; with fixed sizes it cannot grow: set "
        "max_tokens, or make the first dispatch the largest"
    )
    assert not is_disagreement(failure)


def test_disagreement():
    failure = record(DISAGREEMENT, 2, 1, 1)
    assert describe(failure, 20) == "the ranks did not make the same call"
    assert is_disagreement(failure)


def test_no_failure_is_no_disagreement():
    assert not is_disagreement(Failure())
