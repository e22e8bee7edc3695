"""The ``MoETokenDispatcher`` that Megatron's MoE layer calls: policy here, transport in :mod:`moe_ncclep.ep`."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization, get_capacity
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from moe_ncclep.ep import DispatchHandle, EPOptions, Routing, Traffic, combine, dispatch
from moe_ncclep.megatron.registration import options_of


class SchedulerView:
    """What Megatron's schedulers read and write as ``dispatcher._comm_manager``.

    The 1F1B schedule stores detached probs here; the dispatcher takes them from its arguments instead, which the same
    schedule passes. The over-budget rerun sets the capacity factor to None and back.
    """

    def __init__(self, rank_capacity_factor: float | None):
        self.moe_expert_rank_capacity_factor = rank_capacity_factor
        self.over_budget: Tensor | None = None
        self.token_probs: Tensor | None = None
        self.dispatched_probs: Tensor | None = None
        self._tokens_per_expert: Tensor | None = None

    def get_number_of_tokens_per_expert(self) -> Tensor | None:
        """``[L]`` int64 of the latest dispatch."""
        return self._tokens_per_expert


class NCCLEPTokenDispatcher(MoETokenDispatcher):
    """Dispatch and combine over the expert-tensor-parallel x expert-parallel group.

    With expert tensor parallelism each shard of an expert counts as an expert of its own: rank
    ``ep_rank * tp + tp_rank`` of the group holds its shard of the local experts, every token goes to all shards, and
    combine sums their partial outputs.

    Args:
        num_local_experts: experts of this expert-parallel rank.
        local_expert_indices: their global ids, consecutive.
        config: transformer configuration; its capacity settings are read at every call, as inference changes them.
        pg_collection: process groups ``ep``, ``expt_tp`` and ``tp_ep``.
    """

    def __init__(self, num_local_experts, local_expert_indices, config, pg_collection=None):
        super().__init__(config=config, pg_collection=pg_collection)
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices
        self.options = options_of(config)
        self.drop_and_pad = config.moe_pad_expert_input_to_capacity
        self._comm_manager = SchedulerView(getattr(config, "moe_expert_rank_capacity_factor", None))

        # Between the calls of one forward pass only. Partial CUDA graphs return these attributes by name.
        self.cudagraph_attrs = ["topk_idx"]
        self.topk_idx: Tensor | None = None
        self.hidden_shape: torch.Size | None = None
        self._handle: DispatchHandle | None = None
        self._unused_rows = 0

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Turn the dense routing into top-k form. No communication, no host sync.

        Args:
            hidden_states: ``[S, B, H]`` (any leading dimensions).
            routing_map: ``[T, E]`` bool.
            probs: ``[T, E]``.

        Returns:
            Tokens ``[T, H]`` and probs ``[T, K]``, K = top-k times expert tensor parallel size.
        """
        self.hidden_shape = hidden_states.shape
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        if self.drop_and_pad:
            # The map also names the filler tokens of each expert, with probability 0; our filler rows are zeros.
            routing_map = routing_map & (probs != 0)
        routing = Routing.from_map(routing_map, probs, self.config.moe_router_topk)
        self.topk_idx = self._expert_of_each_shard(routing.topk_idx)
        return tokens, routing.probs.repeat_interleave(self.tp_size, dim=1)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Send tokens ``[T, H]`` and probs ``[T, K]`` to the experts; returns rows ``[N, H]`` and probs ``[N]``."""
        shared = self.shared_experts
        if shared is not None:
            shared.pre_forward_comm(hidden_states.view(self.hidden_shape))
        routing = Routing(self.topk_idx, probs, self.config.num_moe_experts * self.tp_size)
        out = dispatch(hidden_states, routing, self.tp_ep_group, self._call_options(hidden_states.shape[0]))
        if shared is not None:
            # After the dispatch in program order, so that its backward runs before the dispatch's.
            shared.linear_fc1_forward_and_act(out.rows)
        self._handle = out.handle
        self._comm_manager._tokens_per_expert = out.tokens_per_expert
        if out.handle.options.budget is not None:
            self._note_over_budget(out.dropped)
        return out.rows, out.probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows ``[N, H]`` are expert-major already; returns them with ``[L]`` counts and probs ``[N]``."""
        tokens_per_expert = self._handle.tokens_per_expert
        self._unused_rows = 0
        if self._handle.options.budget is not None:
            # Experts split the rows by the counts, TransformerEngine's fused ones too (on Hopper): no tail for them.
            used = int(tokens_per_expert.sum())
            self._unused_rows = hidden_states.shape[0] - used
            hidden_states, probs = hidden_states[:used], probs[:used]
        return hidden_states, tokens_per_expert, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Give expert outputs the shape that was dispatched."""
        if self._unused_rows:
            hidden_states = torch.nn.functional.pad(hidden_states, (0, 0, 0, self._unused_rows))
        return hidden_states

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Sum expert outputs ``[N, H]`` at their tokens ``[T, H]``."""
        output = combine(hidden_states, self._handle)
        self._handle = None  # autograd keeps its own reference
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(output)
            self.shared_experts.post_forward_comm()
        return output

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Restore the shape of the layer's input and add the shared experts' output."""
        output = hidden_states.view(self.hidden_shape)
        if self.shared_experts is not None:
            output = output + self.shared_experts.get_output()
        return output

    @property
    def traffic(self) -> Traffic | None:
        """Rows that this rank sends in the forward pass under way; None before its dispatch and after its combine."""
        return None if self._handle is None else self._handle.traffic

    def check_over_budget(self) -> Tensor | None:
        """``[1]`` bool on the device: True if any dispatch since the last reset exceeded its budget."""
        return self._comm_manager.over_budget

    def reset_over_budget(self) -> None:
        """Clear what :meth:`check_over_budget` returns."""
        if self._comm_manager.over_budget is not None:
            self._comm_manager.over_budget.zero_()

    # Versions after 0.19 ask these three of every dispatcher that reports an exceeded budget. Rows are allocated anew
    # in every call, so that the rerun without a budget needs nothing of them.

    def check_required_capacity(self) -> None:
        """Rows that would have sufficed are not recorded; None says so."""

    def grow_ep_recv_capacity(self, new_capacity: int) -> None:
        """Nothing is allocated ahead, so nothing has to grow."""

    def invalidate_ep_bootstrap(self) -> None:
        """The next dispatch reads the capacity factor as it is then."""

    def _note_over_budget(self, dropped: Tensor) -> None:
        if self._comm_manager.over_budget is None:
            with torch.inference_mode(False):  # else training could not update what a generation has made
                self._comm_manager.over_budget = torch.zeros(1, dtype=torch.bool, device=dropped.device)
        self._comm_manager.over_budget |= dropped != 0

    def _expert_of_each_shard(self, topk_idx: Tensor) -> Tensor:
        """``[T, K]`` expert ids to ``[T, K * tp]`` ids of their shards; ids below 0 mean the same as before."""
        if self.tp_size == 1:
            return topk_idx
        ep_rank = topk_idx.div(self.num_local_experts, rounding_mode="floor")
        shards = torch.arange(self.tp_size, device=topk_idx.device)
        ranks = ep_rank.unsqueeze(2) * self.tp_size + shards
        ids = ranks * self.num_local_experts + (topk_idx % self.num_local_experts).unsqueeze(2)
        return torch.where(topk_idx.unsqueeze(2) < 0, topk_idx.unsqueeze(2), ids).flatten(1)

    def _call_options(self, num_tokens: int) -> EPOptions:
        """Options of one call, from what Megatron's configuration says right now."""
        config = self.config
        alignment = get_align_size_for_quantization(config) if config.fp8 or getattr(config, "fp4", None) else 1
        if self.drop_and_pad:
            capacity = get_capacity(
                num_tokens=num_tokens * config.moe_router_topk,
                num_experts=config.num_moe_experts,
                capacity_factor=config.moe_expert_capacity_factor,
            )
            rows = capacity * self.tp_size * self.ep_size
            return self.options.replace(alignment=alignment, rows_per_expert=_round_up(rows, alignment))
        budget = None
        if self._comm_manager.moe_expert_rank_capacity_factor is not None:
            balanced = num_tokens * config.moe_router_topk * self.tp_size
            budget = _round_up(int(balanced * self._comm_manager.moe_expert_rank_capacity_factor), alignment)
        return self.options.replace(alignment=alignment, budget=budget)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
