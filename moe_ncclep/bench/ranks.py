"""Contenders between real processes, call by call in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ncclep.bench import contenders
from moe_ncclep.bench.contender import Contender
from moe_ncclep.bench.mismatch import raise_on_all
from moe_ncclep.bench.shapes import Shape, draw_topk
from moe_ncclep.bench.timing import Timing, of_slowest_rank, once_us

PHASES = ("route+dispatch", "combine", "combine backward", "dispatch backward")
_ROUNDING = 2.0**-6
"""Of a sum of bf16 rows in another order, relative to the largest value."""


class RanksBench:
    """One shape on the ranks of the default group.

    Args:
        names: contenders; those that cannot run here are left out, with the reason in :attr:`left_out`.
        late_us: rank 0 enters every call that much later; the times are without it.
    """

    def __init__(
        self,
        shape: Shape,
        names: tuple[str, ...],
        device: torch.device,
        *,
        num_sms: int | None = None,
        late_us: float = 0.0,
        seed: int = 0,
    ):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        shape.validate(self.size)
        self.shape, self.device, self._late_us = shape, device, late_us
        generator = torch.Generator().manual_seed(seed * 977 + self.rank)
        self._x = self._numbers(shape.tokens, generator)
        self._grad = self._numbers(shape.tokens, generator)
        self._probs = torch.rand(shape.tokens, shape.top_k, generator=generator).to(device)
        self._idx = draw_topk(shape, self.size, self.rank, seed).to(device)
        self.left_out: dict[str, str] = {}
        self._contenders: list[Contender] = []
        for name in names:
            try:
                self._contenders.append(contenders.make(name, shape, num_sms))
            except ValueError as error:
                self.left_out[name] = str(error)
        if not self._contenders:
            raise ValueError(f"no contender can run: {self.left_out}")

    def check(self) -> None:
        """All contenders against the first; rows bit for bit, sums to rounding where their order differs.

        Raises:
            Mismatch: on every rank.
        """
        results = [self._all_results(contender) for contender in self._contenders]
        problem = None
        for contender, result in zip(self._contenders[1:], results[1:], strict=True):
            for what, exact, mine, first in zip(_WHAT, _EXACT, result, results[0], strict=True):
                exactly = exact or "alltoall" not in (contender.name, self._contenders[0].name)
                if problem is None and not _alike(mine, first, exactly):
                    problem = f"rank {self.rank}: {what} of {contender.name} and {self._contenders[0].name} differ"
        raise_on_all(problem)

    def measure(self, repetitions: int) -> list[dict]:
        """Time every phase of every contender in turns; the slowest rank counts. One result a contender and phase."""
        plans, rows, row_probs = {}, {}, {}
        for contender in self._contenders:
            plans[contender.name] = contender.route(self._idx, self._x, self._probs)
            got, row_probs[contender.name] = contender.dispatch(plans[contender.name], self._x, self._probs)
            rows[contender.name] = self._like_outputs(got)
        times: dict[tuple[str, str], list[float]] = {}
        for _ in range(repetitions):
            for contender in self._contenders:
                name = contender.name
                calls = self._calls(contender, plans[name], rows[name], row_probs[name])
                for phase, call in zip(PHASES, calls, strict=True):
                    times.setdefault((name, phase), []).append(self._time(call))
        sent = torch.tensor([contender.wire_bytes(plans[contender.name]) for contender in self._contenders])
        sent = sent.to(self.device)
        dist.all_reduce(sent, op=dist.ReduceOp.MAX)
        wire = dict(zip((contender.name for contender in self._contenders), sent.tolist(), strict=True))
        results = []
        for (name, phase), values in of_slowest_rank(times, self.device).items():
            timing = Timing.of([value - self._late_us for value in values])
            results.append(
                {
                    "contender": name,
                    "phase": phase,
                    **timing.record(),
                    "wire_bytes": wire[name],
                    "late_us": self._late_us,
                }
            )
        return results

    def close(self) -> None:
        """Free all contenders. Collective."""
        for contender in self._contenders:
            contender.close()

    def _calls(self, contender: Contender, plan: Any, rows: Tensor, row_probs: Tensor) -> list[Callable[[], object]]:
        return [
            lambda: contender.dispatch(contender.route(self._idx, self._x, self._probs), self._x, self._probs),
            lambda: contender.combine(plan, rows, None),
            lambda: contender.dispatch(plan, self._grad, None),
            lambda: contender.combine(plan, rows, row_probs),
        ]

    def _all_results(self, contender: Contender) -> list[Tensor]:
        plan = contender.route(self._idx, self._x, self._probs)
        rows, row_probs = contender.dispatch(plan, self._x, self._probs)
        y, _ = contender.combine(plan, self._like_outputs(rows), None)
        grad_rows, _ = contender.dispatch(plan, self._grad, None)
        grad_x, grad_probs = contender.combine(plan, self._like_outputs(grad_rows), row_probs)
        return [rows, row_probs, y, grad_rows, grad_x, grad_probs]

    def _like_outputs(self, rows: Tensor) -> Tensor:
        """Stand-ins for outputs of experts: the same for equal rows."""
        return rows if rows.dtype == self.shape.torch_dtype else rows.to(torch.float32).to(self.shape.torch_dtype)

    def _numbers(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randn(count, self.shape.hidden, generator=generator).to(self.device, self.shape.torch_dtype)

    def _time(self, call: Callable[[], object]) -> float:
        dist.barrier()

        def work() -> None:
            if self._late_us and self.rank == 0:
                _wait(self._late_us, self.device)
            call()

        return once_us(work, self.device)


_WHAT = ("rows", "probs of the rows", "result", "gradient rows", "gradient of the tokens", "gradient of the probs")
_EXACT = (True, True, False, True, False, True)


def _alike(mine: Tensor, first: Tensor, exactly: bool) -> bool:
    if mine.shape != first.shape or mine.dtype != first.dtype:
        return False
    if mine.dtype == torch.float8_e4m3fn:
        mine, first = mine.view(torch.uint8), first.view(torch.uint8)
    if exactly or torch.equal(mine, first):
        return torch.equal(mine, first)
    gap, scale = (mine.float() - first.float()).abs().max(), first.float().abs().max()
    return bool(gap <= _ROUNDING * scale)


def _wait(late_us: float, device: torch.device) -> None:
    if device.type == "cpu":
        end = time.perf_counter() + late_us / 1e6
        while time.perf_counter() < end:
            pass
        return
    ticks_per_us = torch.cuda.get_device_properties(device).clock_rate / 1e3
    torch.cuda._sleep(int(late_us * ticks_per_us))
