"""AdamW with float32 master weights, a warm-up and cosine schedule, and clipping by the norm of the whole model.

Megatron's own optimizer allocates on CUDA unconditionally; this one runs on the CPU too and does the same arithmetic
on both.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
MAX_NORM = 1.0
FINAL_LR = 0.1
"""Last learning rate as a share of the peak."""
WARMUP = 0.05
"""Share of the steps spent warming up."""
MAX_WARMUP_STEPS = 100


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Learning rate of ``step`` in ``[0, steps)``: linear warm-up, then a cosine down to ``FINAL_LR * peak``."""
    warmup = min(MAX_WARMUP_STEPS, max(1, round(WARMUP * steps)))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress)))


class Optimizer:
    """Updates parameters from the reduced gradients in their ``main_grad``.

    Args:
        parameters: of this rank, as Megatron's ``DistributedDataParallel`` prepared them.
        peak: learning rate after warm-up.
        steps: length of the schedule.
        ep_group: group over which the experts are spread.
    """

    def __init__(self, parameters: list[nn.Parameter], peak: float, steps: int, ep_group: dist.ProcessGroup):
        self._parameters, self._peak, self._steps, self._ep_group = parameters, peak, steps, ep_group
        self._masters = [p if p.dtype == torch.float32 else p.detach().float() for p in parameters]
        matrices = [m for m in self._masters if m.dim() >= 2]
        vectors = [m for m in self._masters if m.dim() < 2]
        self._adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
            lr=peak,
            betas=BETAS,
        )

    @torch.no_grad()
    def step(self, step: int) -> float:
        """Clip, update, and return the norm that the gradient of the whole model had before clipping."""
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad = parameter.main_grad
        norm = self._gradient_norm()
        torch.nn.utils.clip_grads_with_norm_(self._masters, MAX_NORM, norm)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate(step, self._steps, self._peak)
        self._adamw.step()
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad = None
            if master is not parameter:
                parameter.copy_(master)
        return float(norm)

    def _gradient_norm(self) -> torch.Tensor:
        """Norm over the whole model: dense gradients are equal on all ranks, experts are spread over ``ep_group``."""
        square = {}
        for expert in (True, False):
            grads = [p.main_grad for p in self._parameters if is_expert(p) is expert]
            # The norm of no gradients would be on the CPU, which NCCL cannot reduce; with EP 1 no parameter is special.
            norm = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros((), device=self._masters[0].device)
            square[expert] = norm.square()
        dist.all_reduce(square[True], group=self._ep_group)
        return (square[True] + square[False]).sqrt()


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether Megatron keeps this parameter on one expert-parallel rank only."""
    return not getattr(parameter, "allreduce", True)
