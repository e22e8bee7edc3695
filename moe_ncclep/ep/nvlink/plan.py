"""The index tensors of one routing on one rank, in one allocation."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ncclep.ep.nvlink import structs
from moe_ncclep.ep.nvlink.sizing import MAX_ROUNDS

_ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True)
class PlanShape:
    """Sizes that the host knows before the routing is exchanged."""

    num_ranks: int
    num_tokens: int
    top_k: int
    num_local_experts: int
    plan_tokens: int
    """Tokens of each rank that there is room for."""
    capacity: int
    """Tokens of a rank that staging holds at a time."""

    @property
    def num_rounds(self) -> int:
        """Rounds in which staging is used."""
        return max(1, -(-self.plan_tokens // self.capacity)) if self.usable else 1

    @property
    def usable(self) -> bool:
        """Whether rows can travel at all: staging holds a token, in not too many rounds."""
        return self.capacity > 0 and self.plan_tokens <= MAX_ROUNDS * self.capacity

    def parts(self) -> tuple[tuple[str, int], ...]:
        """Name and bytes of each array, as in ``csrc/params.h``."""
        items = self.num_ranks * self.plan_tokens
        ranks_per_token = min(self.top_k, self.num_ranks)
        return (
            ("item_token", 4 * items),
            ("item_rows", 4 * items * self.top_k),
            ("item_columns", items * self.top_k),
            ("item_starts", 4 * self.num_ranks * (self.num_rounds + 1)),
            ("token_ranks", self.num_tokens * ranks_per_token),
            ("pair_ranks", self.num_tokens * self.top_k),
            ("token_item", 4 * self.num_tokens),
            ("zone_starts", 8 * self.num_local_experts),
            ("zone_sizes", 8 * self.num_local_experts),
            ("zone_valid", 8 * self.num_local_experts),
            ("dropped", 8),
        )


class RoutePlan:
    """Index tensors on ``device``; :attr:`struct` is what the kernels read."""

    def __init__(self, shape: PlanShape, device: torch.device):
        self.shape = shape
        self._offsets, total = {}, 0
        for name, num_bytes in shape.parts():
            self._offsets[name] = total
            total += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self.memory = torch.empty(total, dtype=torch.uint8, device=device)
        base = self.memory.data_ptr()
        self.struct = structs.Plan(
            **{name: base + offset for name, offset in self._offsets.items()},
            num_tokens=shape.num_tokens,
            top_k=shape.top_k,
            num_local_experts=shape.num_local_experts,
            # In an unusable plan nothing travels, but the tokens are still numbered, all in one round.
            capacity=shape.capacity if shape.usable else max(1, shape.plan_tokens),
            num_rounds=shape.num_rounds,
        )

    def int64(self, name: str) -> Tensor:
        """``zone_*`` as ``[L]``, ``dropped`` as ``[1]`` int64 on the device."""
        count = 1 if name == "dropped" else self.shape.num_local_experts
        start = self._offsets[name]
        return self.memory[start : start + 8 * count].view(torch.int64)

    def for_rows(self, num_rows: int) -> structs.Plan:
        """The struct with the number of output rows filled in."""
        struct = structs.Plan()
        ctypes.pointer(struct)[0] = self.struct
        struct.num_rows = num_rows
        return struct
