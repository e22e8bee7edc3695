"""Run a function on several ranks (gloo, or NCCL on GPUs), in worker processes that live for the whole test session.

Starting Python and importing torch costs seconds; the pool pays that once per world size, so that hypothesis can send
hundreds of examples. A worker is identified by its rank; every task runs on all ranks of the pool at the same time.
"""

from __future__ import annotations

import atexit
import datetime
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.multiprocessing as mp

TASK_TIMEOUT_S = 120.0


class RankError(AssertionError):
    """A task failed on one rank; carries the rank's own traceback."""


def free_port() -> int:
    """A TCP port on the loopback interface that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _serve(rank: int, world: int, port: int, setup: Callable[[], None] | None, device: str, conn: Connection) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
    )
    torch.set_num_threads(1)
    if setup is not None:
        setup()
    backend = "gloo"
    if device == "cuda":
        backend = "nccl"
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60))
    while True:
        try:
            task = conn.recv()
        except EOFError:
            break
        if task is None:
            break
        fn, args, kwargs = task
        try:
            conn.send((True, fn(*args, **kwargs)))
        except BaseException as error:
            conn.send((False, (type(error).__name__, str(error), traceback.format_exc())))
        if backend == "gloo":
            _end_subgroups()
    dist.destroy_process_group()


def _end_subgroups() -> None:
    """Destroy what a task left behind: the threads of hundreds of idle gloo groups would eat the machine."""
    import torch.distributed as dist

    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


class RankPool:
    """``world`` processes joined by a group, each waiting for tasks.

    Args:
        world: number of ranks.
        setup: picklable function that every worker calls before it joins the group.
        device: "cpu" for gloo; "cuda" for NCCL, the ranks spread over the GPUs there are.
    """

    def __init__(self, world: int, setup: Callable[[], None] | None = None, device: str = "cpu"):
        self.world, self._setup, self._device = world, setup, device
        self._workers: list[tuple[Any, Connection]] = []

    def _start(self) -> None:
        context, port = mp.get_context("spawn"), free_port()
        for rank in range(self.world):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world, port, self._setup, self._device, there), daemon=True
            )
            process.start()
            there.close()
            self._workers.append((process, here))

    def outcomes(
        self, fn: Callable, *args: Any, timeout: float = TASK_TIMEOUT_S, **kwargs: Any
    ) -> list[tuple[bool, Any]]:
        """Run ``fn`` on all ranks; per rank ``(True, result)`` or ``(False, (type, text, traceback))``."""
        if not self._workers:
            self._start()
        for _, conn in self._workers:
            conn.send((fn, args, kwargs))
        results: list[Any] = [None] * self.world
        pending = {conn: rank for rank, (_, conn) in enumerate(self._workers)}
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(pending.values())
                self.close()
                raise RankError(f"ranks {late} of {self.world} did not answer within {timeout:.0f} s: a hang")
            for conn in ready:
                rank = pending.pop(conn)
                try:
                    results[rank] = conn.recv()
                except EOFError:
                    self.close()
                    raise RankError(f"rank {rank} of {self.world} died") from None
        return results

    def run(self, fn: Callable, *args: Any, timeout: float = TASK_TIMEOUT_S, **kwargs: Any) -> list[Any]:
        """Run ``fn`` on all ranks and return the results in rank order; raise :class:`RankError` if any rank failed."""
        results = self.outcomes(fn, *args, timeout=timeout, **kwargs)
        failed = [(rank, value) for rank, (ok, value) in enumerate(results) if not ok]
        if failed:
            text = "\n".join(f"rank {rank}: {value[2]}" for rank, value in failed)
            raise RankError(f"{len(failed)} of {self.world} ranks failed\n{text}")
        return [value for _, value in results]

    def close(self) -> None:
        """End the workers; the next task starts new ones."""
        for process, conn in self._workers:
            conn.close()
            process.join(timeout=0.5)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers = []


_pools: dict[tuple[int, Callable | None, str], RankPool] = {}


def pool(world: int, setup: Callable[[], None] | None = None, device: str = "cpu") -> RankPool:
    """The session's pool of ``world`` ranks with this ``setup`` on this kind of device."""
    key = (world, setup, device)
    if key not in _pools:
        _pools[key] = RankPool(world, setup, device)
    return _pools[key]


def close_all(except_for: Sequence[RankPool] = ()) -> None:
    """End every pool."""
    for p in _pools.values():
        if p not in except_for:
            p.close()


atexit.register(close_all)
