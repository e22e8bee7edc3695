"""What stops a benchmark before anything is timed."""

from __future__ import annotations

import torch.distributed as dist

from moe_ncclep.ep.agreement import gather_objects


class Mismatch(RuntimeError):
    """A contender's result is wrong; nothing was timed."""


def raise_on_all(problem: str | None) -> None:
    """Raise :class:`Mismatch` with the first rank's problem, on every rank of the default group, if any has one."""
    found = next(filter(None, gather_objects(dist.group.WORLD, problem)), None)
    if found is not None:
        raise Mismatch(found)
