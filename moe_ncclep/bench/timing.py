"""Times in microseconds: contenders take turns, so that whatever drifts hits all of them alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
CALLS_PER_GRAPH = 10


@dataclass(frozen=True)
class Timing:
    """Summary of repeated measurements, in microseconds."""

    p50_us: float
    p95_us: float
    repetitions: int

    @classmethod
    def of(cls, times_us: Sequence[float]) -> Timing:
        """Nearest-rank percentiles."""
        if not times_us:
            raise ValueError("no measurements")
        ordered = sorted(times_us)

        def rank(q: float) -> float:
            return ordered[max(0, math.ceil(q * len(ordered)) - 1)]

        return cls(round(rank(0.5), 2), round(rank(0.95), 2), len(ordered))

    def record(self) -> dict:
        """As it stands in a result."""
        return {"us_p50": self.p50_us, "us_p95": self.p95_us, "repetitions": self.repetitions}


class Graph:
    """``CALLS_PER_GRAPH`` calls of ``work`` in a CUDA graph: no launch from the host is in the time."""

    def __init__(self, work: Callable[[], object]):
        work()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(CALLS_PER_GRAPH):
                work()
        self._graph.replay()
        torch.cuda.synchronize()

    def time_us(self) -> float:
        """Microseconds of one call, mean over one replay."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self._graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3 / CALLS_PER_GRAPH


def alternate(timers: dict[str, Callable[[], float]], repetitions: int) -> dict[str, list[float]]:
    """Call every timer ``repetitions`` times, one after the other in each round."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(repetitions):
        for name, timer in timers.items():
            times[name].append(timer())
    return times


def of_slowest_rank(times_us: dict[T, list[float]], device: torch.device) -> dict[T, list[float]]:
    """Every measurement as the slowest rank of the default group saw it. Collective."""
    table = torch.tensor(list(times_us.values()), dtype=torch.float64).to(device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return dict(zip(times_us, table.tolist(), strict=True))


def once_us(work: Callable[[], object], device: torch.device) -> float:
    """Microseconds of one eager call: on the GPU between two events, on the CPU by the clock."""
    if device.type == "cpu":
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e6
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3
