"""How large the communication buffer is.

With R ranks, T tokens set aside for each, K experts a token, rows of B bytes and S = ceil(B / 16384) flags a row, a
rank's buffer holds, for each of two parities and R sources,

    T * 4K bytes of routing  +  C * (B + 4K + 8S) bytes of staging and flags

(4K rounded up to 16), plus at most 2.3 MiB, most of which counts the pairs of 2048 / R experts. C = T unless
``buffer_mib`` bounds it; then a dispatch proceeds in ceil(T / C) rounds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, fields

from moe_ncclep.ep.nvlink import structs
from moe_ncclep.ep.nvlink.structs import Workspace

DEFAULT_BUFFER_MIB = 2048
MAX_ROUNDS = 2**16 - 1
_TOKEN_GRANULE = 128


@dataclass(frozen=True)
class Demand:
    """What the largest dispatch of a group needs; equal on all ranks."""

    num_ranks: int
    max_tokens: int
    """T set aside for each rank."""
    top_k: int
    row_bytes: int
    slot_bytes: int
    segments: int
    buffer_mib: int | None
    """None: :data:`DEFAULT_BUFFER_MIB`."""

    @classmethod
    def of(
        cls,
        library: ctypes.CDLL,
        *,
        num_ranks: int,
        max_tokens: int,
        top_k: int,
        hidden: int,
        row_bytes: int,
        fp8: bool = False,
        buffer_mib: int | None = None,
    ) -> Demand:
        """Of rows of ``hidden`` values and ``row_bytes`` bytes, quantised on the wire if ``fp8``."""
        return cls(
            num_ranks=num_ranks,
            max_tokens=max_tokens,
            top_k=top_k,
            row_bytes=row_bytes,
            slot_bytes=library.ncclep_slot_bytes(row_bytes, hidden, top_k, fp8),
            segments=library.ncclep_num_segments(row_bytes),
            buffer_mib=buffer_mib,
        )

    @classmethod
    def largest(cls, demands: Iterable[Demand]) -> Demand:
        """What serves all of ``demands``."""
        demands = list(demands)
        sizes = {
            f.name: max(getattr(demand, f.name) for demand in demands) for f in fields(cls) if f.name != "buffer_mib"
        }
        return cls(**sizes, buffer_mib=max(demand.buffer_mib or DEFAULT_BUFFER_MIB for demand in demands))

    def workspace(self, library: ctypes.CDLL) -> Workspace:
        """The sizes of a buffer for it.

        Raises:
            ValueError: if ``buffer_mib`` has no room for it in any number of rounds.
        """
        limit = (self.buffer_mib or DEFAULT_BUFFER_MIB) * 2**20

        def of(capacity: int) -> Workspace:
            return Workspace(
                num_ranks=self.num_ranks,
                num_local_experts=structs.MAX_EXPERTS // self.num_ranks,
                routing_bytes=_up(4 * self.top_k * self.max_tokens, 128),
                staging_bytes=_up(capacity * self.slot_bytes, 128),
                num_flags=_up(capacity * self.segments, 16),
            )

        whole = of(self.max_tokens)
        if library.ncclep_workspace_bytes(whole) <= limit:
            return whole
        rest = library.ncclep_workspace_bytes(of(0))
        a_token = 2 * self.num_ranks * (self.slot_bytes + 8 * self.segments)
        rounding = 2 * self.num_ranks * 2 * 128
        capacity = (limit - rest - rounding) // a_token
        least = -(-self.max_tokens // MAX_ROUNDS)
        if capacity < least:
            needed = -(-(rest + rounding + least * a_token) // 2**20)
            raise ValueError(
                f"buffer_mib {limit // 2**20} is too small for {self.num_ranks} ranks, {self.max_tokens} tokens and "
                f"rows of {self.row_bytes} bytes: at least {needed} is needed"
            )
        return of(capacity)


def at_least(wanted: Workspace, present: Workspace) -> Workspace:
    """``wanted`` with no size smaller than in ``present``: plans made for that one stay valid."""
    return Workspace(*(max(getattr(wanted, name), getattr(present, name)) for name, _ in Workspace._fields_))


def tokens_to_set_aside(largest: int, max_tokens: int | None) -> int:
    """T for a group whose largest batch so far has ``largest`` tokens: an eighth more, unless the caller knows it."""
    if max_tokens is not None and max_tokens >= largest:
        return max_tokens
    return max(_TOKEN_GRANULE, _up(largest + largest // 8, _TOKEN_GRANULE))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
