"""The contender that Megatron's ``alltoall`` dispatcher is: every pair travels, nothing is de-duplicated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ncclep.bench.contender import Contender
from moe_ncclep.bench.shapes import Shape


@dataclass(frozen=True, eq=False)
class AllToAllPlan:
    """Index tensors between T tokens, S sent pairs and N rows.

    ``token_of_slot`` ``[S]``: token of each sent pair, by expert. ``pair_of_slot`` ``[S]``: its place in the flat
    ``[T, K]``. ``order`` ``[N]``: arrived slot of each row, by (local expert, source rank).
    """

    num_tokens: int
    top_k: int
    token_of_slot: Tensor
    pair_of_slot: Tensor
    order: Tensor
    send: list[int]
    receive: list[int]


class AllToAll(Contender):
    """Permute, all-to-all, sort by local expert; and back. On the default group."""

    def __init__(self, shape: Shape):
        super().__init__("alltoall")
        self._shape, self._rank, self._size = shape, dist.get_rank(), dist.get_world_size()

    def route(self, topk_idx: Tensor, x: Tensor, probs: Tensor) -> AllToAllPlan:
        """See :meth:`Contender.route`. Exchanges the counts and reads them on the host."""
        num_local = self._shape.experts // self._size
        _, pair_of_slot = topk_idx.flatten().sort(stable=True)
        counts = torch.bincount(topk_idx.flatten(), minlength=self._shape.experts)
        everyone = [torch.empty_like(counts) for _ in range(self._size)]
        dist.all_gather(everyone, counts)
        table = torch.stack(everyone).cpu().view(self._size, self._size, num_local)
        mine = table[:, self._rank]  # [source, local expert]
        expert_of_chunk = torch.arange(num_local, device=topk_idx.device).repeat(self._size)
        chunks = mine.flatten().to(topk_idx.device)
        expert_of_slot = expert_of_chunk.repeat_interleave(chunks, output_size=int(mine.sum()))
        return AllToAllPlan(
            num_tokens=topk_idx.shape[0],
            top_k=topk_idx.shape[1],
            token_of_slot=pair_of_slot // topk_idx.shape[1],
            pair_of_slot=pair_of_slot,
            order=expert_of_slot.sort(stable=True).indices,
            send=table[self._rank].sum(1).tolist(),
            receive=mine.sum(1).tolist(),
        )

    def dispatch(self, plan: AllToAllPlan, x: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Contender.dispatch`."""
        rows = self._exchange(x.index_select(0, plan.token_of_slot), plan.send, plan.receive)
        rows = rows.index_select(0, plan.order)
        if probs is None:
            return rows, None
        sent = probs.flatten().index_select(0, plan.pair_of_slot)
        return rows, self._exchange(sent, plan.send, plan.receive).index_select(0, plan.order)

    def combine(self, plan: AllToAllPlan, rows: Tensor, row_probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Contender.combine`. Sums in the dtype of the rows."""
        sent = torch.empty_like(rows).index_copy_(0, plan.order, rows)
        back = self._exchange(sent, plan.receive, plan.send)
        y = rows.new_zeros(plan.num_tokens, rows.shape[1]).index_add_(0, plan.token_of_slot, back)
        if row_probs is None:
            return y, None
        sent = torch.empty_like(row_probs).index_copy_(0, plan.order, row_probs)
        back = self._exchange(sent, plan.receive, plan.send)
        pairs = torch.empty_like(back).index_copy_(0, plan.pair_of_slot, back)
        return y, pairs.view(plan.num_tokens, plan.top_k)

    def wire_bytes(self, plan: AllToAllPlan) -> int:
        """See :meth:`Contender.wire_bytes`."""
        return (sum(plan.send) - plan.send[self._rank]) * self._shape.row_bytes

    def _exchange(self, sent: Tensor, send: list[int], receive: list[int]) -> Tensor:
        arrived = sent.new_empty(sum(receive), *sent.shape[1:])
        dist.all_to_all_single(arrived, sent, receive, send)
        return arrived
