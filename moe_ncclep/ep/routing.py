"""Which experts each token goes to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DROPPED = -1
"""Expert id of a pair that is not sent."""

_TOO_MANY_EXPERTS = -2
"""Marks tokens whose routing map names more experts than top-k; refused by :func:`describe_bad_ids`."""


@dataclass(frozen=True, eq=False)
class Routing:
    """Expert ids and probabilities of the tokens of this rank.

    Args:
        topk_idx: ``[T, K]`` integer, global expert ids in ``[0, num_experts)``; ``-1`` is a dropped pair. A token may
            name an expert twice: it is then counted twice and both rows are summed.
        probs: ``[T, K]`` floating point or None. Carried to the experts in float32 (float64 stays float64).
        num_experts: E, over all ranks of the group.
    """

    topk_idx: Tensor
    probs: Tensor | None
    num_experts: int

    @classmethod
    def from_map(cls, routing_map: Tensor, probs: Tensor, top_k: int) -> Routing:
        """Build from Megatron's dense form, without a host sync.

        Args:
            routing_map: ``[T, E]`` bool, at most ``top_k`` True in a row (more is refused by ``dispatch``).
            probs: ``[T, E]`` floating point; gradients reach the chosen entries.
            top_k: K of the result; rows with fewer experts are filled with ``-1``.

        Returns:
            Routing whose expert ids ascend inside each token.
        """
        num_experts = routing_map.shape[1]
        top_k = min(top_k, num_experts)
        ids = torch.arange(num_experts, device=routing_map.device).expand_as(routing_map)
        topk_idx = torch.where(routing_map, ids, num_experts).topk(top_k, dim=1, largest=False, sorted=True).values
        topk_probs = probs.gather(1, topk_idx.clamp(max=num_experts - 1))
        topk_idx = topk_idx.masked_fill(topk_idx == num_experts, DROPPED)
        overfull = routing_map.sum(dim=1, keepdim=True) > top_k
        return cls(topk_idx.masked_fill(overfull, _TOO_MANY_EXPERTS), topk_probs, num_experts)

    def carried_probs(self) -> Tensor | None:
        """Probabilities in the dtype that travels: float64 stays, everything else becomes float32. Differentiable."""
        if self.probs is None or self.probs.dtype == torch.float64:
            return self.probs
        return self.probs.float()

    def needs_grad(self, x: Tensor) -> bool:
        """Whether autograd will ask for the gradient of these tokens ``x`` or of the probs."""
        wanted = x.requires_grad or (self.probs is not None and self.probs.requires_grad)
        return wanted and torch.is_grad_enabled()


def sort_by_expert(topk_idx: Tensor) -> tuple[Tensor, Tensor]:
    """Sort each token's experts ascending, equal ids in their old order, ``-1`` last.

    Args:
        topk_idx: ``[T, K]`` int64.

    Returns:
        Sorted ids ``[T, K]`` and the old column of each ``[T, K]``.

    Example: ``[[5, -1, 2]]`` gives ``[[2, 5, -1]]`` and ``[[2, 0, 1]]``.
    """
    last = torch.iinfo(topk_idx.dtype).max
    ordered, column = topk_idx.masked_fill(topk_idx < 0, last).sort(dim=1, stable=True)
    return ordered.masked_fill(ordered == last, DROPPED), column


def histogram(index: Tensor, num: int) -> Tensor:
    """``[num]`` int64: how often each value occurs; -1 is not counted. Unlike bincount, never waits for the device."""
    flat = index.flatten()
    counts = torch.zeros(num + 1, dtype=torch.int64, device=index.device)
    return counts.scatter_add_(0, flat.masked_fill(flat < 0, num), torch.ones_like(flat))[:num]


def bad_ids(topk_idx: Tensor, num_experts: int) -> Tensor:
    """Mask ``[T, K]`` of ids that name no expert and are not ``-1``."""
    return (topk_idx < DROPPED) | (topk_idx >= num_experts)


def describe_bad_ids(lowest: int, highest: int, num_experts: int) -> str | None:
    """Text about ids outside ``[-1, num_experts)``, given the extremes of what was routed; None if all are right."""
    if lowest == _TOO_MANY_EXPERTS:
        return "a token's routing map names more experts than top-k"
    for value in (lowest, highest):
        if not DROPPED <= value < num_experts:
            return f"expert id {value} is out of range: ids lie in [0, {num_experts}), -1 is a dropped pair"
    return None
