"""Entry of one rank of a benchmark, started by :mod:`moe_ncclep.bench.job`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from moe_ncclep.train import rank


def bench(ticket: dict, emit: Callable[[dict], None]) -> dict | None:
    """Measure as one rank; the record on rank 0."""
    import torch
    import torch.distributed as dist

    from moe_ncclep.bench.job import BenchConfig
    from moe_ncclep.bench.work import between_ranks

    torch.set_num_threads(ticket["threads"])
    job = {name: tuple(value) if isinstance(value, list) else value for name, value in ticket["job"].items()}
    device = rank.join(ticket["device"], ticket["store_port"])
    measured = between_ranks(BenchConfig(**job), device, emit)
    first = dist.get_rank() == 0
    dist.destroy_process_group()
    return measured if first else None


if __name__ == "__main__":
    sys.exit(rank.main(sys.argv[1], bench))
