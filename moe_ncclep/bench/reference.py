"""What all ranks of a dispatch get, from the specification in plain PyTorch, on the device of the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ncclep.ep import EPOptions, fp8
from moe_ncclep.ep.placement import Placement, Zones, append_zero_row, sum_in_order
from moe_ncclep.ep.routing import histogram, sort_by_expert


@dataclass
class RankReference:
    """One rank's share of the tokens of all ranks, concatenated in rank order."""

    zones: Zones
    placement: Placement
    column: Tensor

    def rows(self, tokens: Tensor) -> Tensor:
        """Rows ``[N, H]`` of ``tokens`` ``[V, H]``."""
        return self.placement.spread(append_zero_row(tokens))

    def row_probs(self, probs: Tensor) -> Tensor:
        """Probs of the rows ``[N]`` from ``[V, K]``."""
        return self.placement.spread_probs(probs.gather(1, self.column))

    def partial(self, rows: Tensor) -> Tensor:
        """Sums ``[V, H]`` of this rank."""
        return sum_in_order(rows, self.placement.row_of_pair)

    def pair_probs(self, row_probs: Tensor) -> Tensor:
        """``[N]`` back to ``[V, K]``."""
        found = self.placement.collect_probs(row_probs)
        return torch.zeros_like(found).scatter_(1, self.column, found)


class Reference:
    """Reference of a whole group; ``topk_idx`` has one ``[T, K]`` for each rank."""

    def __init__(self, topk_idx: list[Tensor], num_experts: int, options: list[EPOptions]):
        self.num_tokens = [idx.shape[0] for idx in topk_idx]
        size = len(topk_idx)
        num_local = num_experts // size
        expert, column = sort_by_expert(torch.cat(topk_idx).long())
        self.goes_to = [((expert // num_local == rank) & (expert >= 0)).any(1) for rank in range(size)]
        self.ranks = []
        for rank in range(size):
            local = expert - rank * num_local
            local = local.masked_fill((local < 0) | (local >= num_local) | (expert < 0), -1)
            counts = histogram(local, num_local)
            zones = Zones.from_counts(counts, options[rank])
            self.ranks.append(RankReference(zones, Placement.build(local, counts, zones), column))

    def rows(self, x: list[Tensor]) -> list[Tensor]:
        """What every rank gets of ``x``, one ``[T, H]`` for each rank."""
        tokens = torch.cat(x)
        return [rank.rows(tokens) for rank in self.ranks]

    def fp8_rows(self, x: list[Tensor], power_of_two: bool) -> list[tuple[Tensor, Tensor]]:
        """The same as bits of E4M3 and scales."""
        tokens = append_zero_row(torch.cat(x))
        values, scales = fp8.quantize(tokens, power_of_two=power_of_two)
        return [
            (values.view(torch.uint8)[rank.placement.token_of_row], scales[rank.placement.token_of_row])
            for rank in self.ranks
        ]

    def carried(self, x: list[Tensor], power_of_two: bool) -> list[Tensor]:
        """``x`` after quantisation and back."""
        return [fp8.dequantize(*fp8.quantize(tokens, power_of_two=power_of_two), tokens.dtype) for tokens in x]

    def row_probs(self, probs: list[Tensor]) -> list[Tensor]:
        """Probs of every rank's rows."""
        pairs = torch.cat(probs)
        return [rank.row_probs(pairs) for rank in self.ranks]

    def combine(self, rows: list[Tensor]) -> list[Tensor]:
        """Sums ``[T, H]`` of every rank, in the fixed order."""
        wide = torch.promote_types(rows[0].dtype, torch.float32)
        total = rows[0].new_zeros(sum(self.num_tokens), rows[0].shape[1], dtype=wide)
        for rank, goes, mine in zip(self.ranks, self.goes_to, rows, strict=True):
            total += rank.partial(mine).to(wide).masked_fill(~goes.unsqueeze(1), 0)
        return list(total.to(rows[0].dtype).split(self.num_tokens))

    def pair_probs(self, row_probs: list[Tensor]) -> list[Tensor]:
        """Gradients of the probs ``[T, K]`` of every rank."""
        total = sum(rank.pair_probs(mine) for rank, mine in zip(self.ranks, row_probs, strict=True))
        return list(total.split(self.num_tokens))
