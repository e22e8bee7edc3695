"""From a kernel's failure record to an exception that says who waited for whom."""

from __future__ import annotations

from moe_ncclep.ep.nvlink.structs import Failure

_KIND_TIMEOUT, _KIND_DISAGREEMENT, _KIND_TOO_MANY_TOKENS = 1, 2, 3
_PHASES = {
    1: "to begin the next operation",
    2: "to publish its routing",
    3: "for its own thread blocks to run",
    4: "to send rows of dispatch",
    5: "to send partial sums of combine",
    6: "to make room for more rows",
}
_STAMPED = (4, 5, 6)
_ROUND_BITS = 16


class PeerFailure(RuntimeError):
    """A rank waited in vain for another. The group's engine cannot be used any more."""


def describe(failure: Failure, timeout_s: float) -> str:
    """One sentence about ``failure``."""
    kind, phase = failure.code >> 40 & 0xFF, failure.code >> 32 & 0xFF
    reporter, peer = failure.code >> 16 & 0xFFFF, failure.code & 0xFFFF
    if kind == _KIND_TOO_MANY_TOKENS:
        return (
            f"a rank dispatched {failure.seen} tokens, but memory was set aside for {failure.expected}; with fixed "
            "sizes it cannot grow: set max_tokens, or make the first dispatch the largest"
        )
    if kind == _KIND_DISAGREEMENT:
        return "the ranks did not make the same call"
    if phase == 3:
        return (
            f"rank {reporter}: not all of its own thread blocks ran within {timeout_s:g} s; something else occupies "
            "the GPU, or num_sms is too large"
        )
    return (
        f"rank {reporter} waited {timeout_s:g} s for rank {peer} {_PHASES.get(phase, f'(phase {phase})')}: "
        f"expected {_show(failure.expected, phase)}, saw {_show(failure.seen, phase)}"
    )


def is_disagreement(failure: Failure) -> bool:
    """Whether the ranks' calls differed, which their headers explain."""
    return failure.code >> 40 & 0xFF == _KIND_DISAGREEMENT


def _show(value: int, phase: int) -> str:
    if phase in _STAMPED:
        return f"operation {value >> _ROUND_BITS} round {value & (1 << _ROUND_BITS) - 1}"
    return f"operation {value}"
