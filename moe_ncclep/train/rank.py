"""Entry of one rank, started by :mod:`moe_ncclep.train.ranks` or joined under torchrun."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PR_SET_PDEATHSIG = 1
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def die_with(parent: int) -> None:
    """Ask Linux to kill this process as soon as ``parent`` ends; leave at once if it already has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def join(device: str, store_port: int | None = None) -> torch.device:
    """Join the process group that the environment describes (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``).

    Args:
        device: ``cpu`` (gloo) or ``cuda`` (NCCL, on the GPU of this local rank).
        store_port: port of the store that the parent holds on this machine; None to meet as torchrun says.

    Returns:
        This rank's device.
    """
    import torch
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting: dict = {"rank": rank, "world_size": world, "timeout": COLLECTIVE_TIMEOUT}
    if store_port is not None:
        meeting["store"] = dist.TCPStore("127.0.0.1", store_port, world, is_master=False, timeout=COLLECTIVE_TIMEOUT)
    if device == "cpu":
        dist.init_process_group("gloo", **meeting)
        return torch.device("cpu")
    # More ranks than GPUs share them, which NCCL refuses unless it is told otherwise.
    mine = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    torch.cuda.set_device(mine)
    dist.init_process_group("nccl", device_id=mine, **meeting)
    return mine


def main(ticket_json: str, work: Callable[[dict, Callable[[dict], None]], dict | None]) -> int:
    """Do ``work`` as a rank; report events, the result of rank 0, or an error through the pipe."""
    ticket = json.loads(ticket_json)
    die_with(ticket["parent"])
    with os.fdopen(ticket["events_fd"], "w", buffering=1) as pipe:

        def emit(event: dict) -> None:
            pipe.write(json.dumps(event) + "\n")

        try:
            result = work(ticket, emit)
        except Exception as error:
            traceback.print_exc()
            emit({"event": "error", "text": f"{type(error).__name__}: {error}"})
            return 1
        if result is not None:
            emit({"event": "result", "run": result})
    return 0


def _train(ticket: dict, emit: Callable[[dict], None]) -> dict | None:
    import torch
    import torch.distributed as dist

    from moe_ncclep.train.config import TrainConfig
    from moe_ncclep.train.data import load_corpus
    from moe_ncclep.train.loop import train

    torch.set_num_threads(ticket["threads"])
    config = TrainConfig(**ticket["job"])
    device = join(ticket["device"], ticket["store_port"])
    record = train(config, load_corpus(config.data), device, emit)
    rank = dist.get_rank()
    dist.destroy_process_group()  # not after an error: it would wait for peers, and the parent ends us anyway
    return record if rank == 0 else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], _train))
