"""The portable engine: all-to-all of de-duplicated tokens over torch.distributed (gloo, NCCL, any number of ranks).

A token travels once to each rank that holds at least one of its experts, and one partial sum travels back. It is the
fallback everywhere and the oracle for the engines with kernels of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ncclep.ep.agreement import DEVICES, Counts, agreed_values, exchange, make_header
from moe_ncclep.ep.checks import check_dispatch
from moe_ncclep.ep.engines.base import Engine
from moe_ncclep.ep.handle import DispatchHandle, Traffic
from moe_ncclep.ep.options import EPOptions
from moe_ncclep.ep.payload import deliver, encode
from moe_ncclep.ep.placement import Placement, Zones, sum_in_order
from moe_ncclep.ep.routing import Routing, bad_ids, histogram, sort_by_expert


@dataclass(frozen=True, eq=False)
class _Plan:
    """U tokens leave this rank (one for each destination of each token), V arrive.

    ``column`` ``[T, K]``: the caller's column of each pair, pairs sorted by expert.
    ``token_of_slot`` ``[U]``: which token is sent, in (destination rank, token) order.
    ``slots_of_token`` ``[T, min(K, R)]``: the slots of each token in ascending rank, -1 for none.
    ``wire_of_pair`` ``[T, K]``: position of each pair in the ``[U, K]`` exchanged beside the tokens, U * K for none.
    """

    column: Tensor
    token_of_slot: Tensor
    slots_of_token: Tensor
    wire_of_pair: Tensor
    send: list[int]
    receive: list[int]
    placement: Placement


class CollectiveEngine(Engine):
    """De-duplicating all-to-all-v. Reads the counts on the host once per routing, so CUDA graphs cannot capture it;
    a budget bounds the rows but does not remove that read."""

    name = "collective"

    @classmethod
    def unavailable(cls, group: dist.ProcessGroup | None) -> str | None:
        """Any initialised group will do."""
        return "torch.distributed is not initialised" if group is None else None

    def route(self, x: Tensor, routing: Routing, options: EPOptions) -> DispatchHandle:
        """See :meth:`Engine.route`."""
        try:
            check_dispatch(x, routing, self.size, options)
            self._check_device(x.device)
            values = agreed_values(x, routing, options)
        except ValueError as error:
            self.refuse(str(error))
        except Exception as error:  # whatever it is, the other ranks are already waiting
            self.refuse(f"{type(error).__name__}: {error}")
        top_k, num_local = routing.topk_idx.shape[1], routing.num_experts // self.size
        topk_idx = routing.topk_idx.long()
        expert, column = sort_by_expert(topk_idx.masked_fill(bad_ids(topk_idx, routing.num_experts), -1))

        rank_of_pair = expert.div(num_local, rounding_mode="floor")  # -1 stays -1
        goes_to = _one_hot_any(rank_of_pair, self.size)
        header = make_header(
            self.size,
            self._header_device(),
            values=values,
            needs_grad=routing.needs_grad(x),
            topk_idx=topk_idx,
            tokens_per_rank=goes_to.sum(0),
            pairs_per_expert=histogram(expert, routing.num_experts),
        )
        counts = exchange(header, self.group)
        send = counts.tokens[self.rank]
        receive = [from_rank[self.rank] for from_rank in counts.tokens]

        num_sent = sum(send)
        first_slot = torch.tensor([0, *send[:-1]], device=x.device).cumsum(0)
        slot = (first_slot + goes_to.cumsum(0) - 1).masked_fill(~goes_to, num_sent)  # [T, R]
        token_of_slot = _scatter_index(slot, num_sent)
        slots_of_token = slot.sort(dim=1).values[:, :top_k]
        wire_of_pair = slot.gather(1, rank_of_pair.clamp(min=0)) * top_k
        wire_of_pair = wire_of_pair + torch.arange(top_k, device=x.device)
        wire_of_pair = wire_of_pair.masked_fill(rank_of_pair < 0, num_sent * top_k)

        local_expert = (expert - rank_of_pair * num_local).to(torch.int32)
        sent_experts = _to_wire(local_expert, wire_of_pair, num_sent, fill=-1)
        arrived_experts = self._all_to_all(sent_experts, send, receive).long()

        mine = slice(self.rank * num_local, (self.rank + 1) * num_local)
        pairs_per_expert = counts.pairs[:, mine].sum(0)
        zones = Zones.from_counts(pairs_per_expert, options)
        return DispatchHandle(
            engine=self,
            options=options,
            num_tokens=x.shape[0],
            top_k=top_k,
            hidden=x.shape[1],
            dtype=x.dtype,
            num_experts=routing.num_experts,
            num_rows=zones.num_rows,
            tokens_per_expert=zones.sizes,
            valid_per_expert=zones.valid,
            dropped=zones.dropped.to(x.device),
            needs_grad=counts.needs_grad,
            traffic=self._traffic(counts, mine, x, options),
            plan=_Plan(
                column=column,
                token_of_slot=token_of_slot,
                slots_of_token=slots_of_token.masked_fill(slots_of_token == num_sent, -1),
                wire_of_pair=wire_of_pair,
                send=send,
                receive=receive,
                placement=Placement.build(arrived_experts, pairs_per_expert, zones),
            ),
        )

    def dispatch(
        self, handle: DispatchHandle, x: Tensor, probs: Tensor | None, *, row_format: str = "input"
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See :meth:`Engine.dispatch`."""
        plan: _Plan = handle.plan
        sent = encode(handle, x.index_select(0, plan.token_of_slot))
        arrived = self._all_to_all(sent, plan.send, plan.receive)
        rows, scales = deliver(handle, plan.placement, arrived, row_format)
        if probs is None:
            return rows, scales, None
        sent_probs = _to_wire(probs.gather(1, plan.column), plan.wire_of_pair, sent.shape[0], fill=0)
        return rows, scales, plan.placement.spread_probs(self._all_to_all(sent_probs, plan.send, plan.receive))

    def combine(self, handle: DispatchHandle, rows: Tensor, row_probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Engine.combine`. One partial sum a token comes back from each rank."""
        plan: _Plan = handle.plan
        partial = sum_in_order(rows, plan.placement.row_of_pair)
        y = sum_in_order(self._all_to_all(partial, plan.receive, plan.send), plan.slots_of_token)
        if row_probs is None:
            return y, None
        pair_probs = self._all_to_all(plan.placement.collect_probs(row_probs), plan.receive, plan.send).flatten()
        pair_probs = torch.cat([pair_probs, pair_probs.new_zeros(1)])[plan.wire_of_pair]
        return y, torch.empty_like(pair_probs).scatter_(1, plan.column, pair_probs)

    def refuse(self, problem: str) -> None:
        """Join the other ranks' exchange with an error; raises ``ValueError`` on every rank."""
        exchange(make_header(self.size, self._header_device(), problem=problem), self.group)

    def _backends(self) -> dict[str, str]:
        """The group's backend for each kind of device that this rank has."""
        # "cpu:gloo,cuda:nccl" or just "cuda:nccl"
        backends = dict(entry.split(":") for entry in dist.get_backend_config(self.group).split(","))
        if not torch.cuda.is_available():
            backends.pop("cuda", None)
        return backends

    def _header_device(self) -> torch.device:
        """Where headers travel: the same on every rank and in every call, so that a refusal meets the others."""
        backends = self._backends()
        if backends.get("cuda") == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(next(iter(backends)))

    def _check_device(self, device: torch.device) -> None:
        kinds = self._backends()
        if device.type not in kinds:
            raise ValueError(
                f"the tokens are on {device}, but the group's backend only moves {', '.join(kinds)} tensors"
            )
        if device.type not in DEVICES:
            raise ValueError(f"tokens on {device} are not supported; choose one of {', '.join(DEVICES)}")

    def _all_to_all(self, sent: Tensor, send: list[int], receive: list[int]) -> Tensor:
        # Bytes: every backend moves them, whatever the dtype.
        sent_bytes = sent.contiguous().view(torch.uint8)
        arrived = sent_bytes.new_empty(sum(receive), sent_bytes.shape[1])
        dist.all_to_all_single(arrived, sent_bytes, receive, send, group=self.group)
        return arrived.view(sent.dtype)

    def _traffic(self, counts: Counts, mine: slice, x: Tensor, options: EPOptions) -> Traffic:
        tokens, pairs = counts.tokens[self.rank], counts.pairs[self.rank]
        remote_tokens = sum(tokens) - tokens[self.rank]
        return Traffic.of(x, options, remote_tokens, remote_pairs=int(pairs.sum() - pairs[mine].sum()))


def _one_hot_any(index: Tensor, num: int) -> Tensor:
    """``[T, num]`` bool: True where a row of ``index`` ``[T, K]`` names the column; -1 names none."""
    named = torch.zeros(index.shape[0], num + 1, dtype=torch.bool, device=index.device)
    return named.scatter_(1, index.masked_fill(index < 0, num), True)[:, :num]


def _scatter_index(slot: Tensor, num_slots: int) -> Tensor:
    """``[num_slots]``: the row of ``slot`` ``[T, R]`` that names each slot; ``num_slots`` names none."""
    token = torch.arange(slot.shape[0], device=slot.device).unsqueeze(1).expand_as(slot)
    return token.new_zeros(num_slots + 1).scatter_(0, slot.flatten(), token.flatten())[:-1]


def _to_wire(pair_values: Tensor, wire_of_pair: Tensor, num_slots: int, *, fill: float) -> Tensor:
    """Arrange one value per pair ``[T, K]`` as ``[num_slots, K]``, as it travels beside the tokens."""
    top_k = pair_values.shape[1]
    wire = pair_values.new_full((num_slots * top_k + 1,), fill)
    return wire.scatter_(0, wire_of_pair.flatten(), pair_values.flatten())[:-1].view(num_slots, top_k)
