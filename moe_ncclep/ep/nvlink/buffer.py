"""The communication buffer of a group: set up and grown by all ranks together."""

from __future__ import annotations

import ctypes

import torch.distributed as dist

from moe_ncclep.ep.agreement import gather_objects
from moe_ncclep.ep.nvlink import memory
from moe_ncclep.ep.nvlink.endpoint import Endpoint
from moe_ncclep.ep.nvlink.sizing import Demand, at_least
from moe_ncclep.ep.nvlink.structs import Workspace


class CommunicationBuffer:
    """Owns the symmetric memory of one group and this rank's endpoint on it."""

    def __init__(self, library: ctypes.CDLL, rank: int):
        self._library, self._rank = library, rank
        self._memory: memory.SymmetricMemory | None = None
        self._captured = False
        self.endpoint: Endpoint | None = None
        self.demand: Demand | None = None
        self._served: set[Demand] = set()

    def set_up(self, group: dist.ProcessGroup, wish: Demand | str) -> None:
        """Allocate for the first dispatch: every rank comes with its demand, or with the reason why its call is wrong.

        Raises:
            ValueError: on every rank, if any rank came with a reason or memory cannot be had.
        """
        wishes = gather_objects(group, wish)
        for rank, theirs in enumerate(wishes):
            if isinstance(theirs, str):
                raise ValueError(f"rank {rank}: {theirs}")
        demand = Demand.largest(wishes)
        self._allocate(group, demand, demand.workspace(self._library))

    def grow(self, group: dist.ProcessGroup, demand: Demand) -> bool:
        """Replace the buffer by one that serves ``demand`` (equal on all ranks) too. False if that changes nothing.

        Handles stay valid: they hold no address of the buffer, and no size of the new one is smaller. For that a buffer
        at its bound grows beyond ``buffer_mib`` by what routing and flags grow.

        Raises:
            ValueError: on every rank, if the buffer must grow but a CUDA graph has recorded its address, or it would
                exceed ``buffer_mib``.
        """
        if demand in self._served:
            return False
        larger = Demand.largest([self.demand, demand])
        workspace = at_least(larger.workspace(self._library), self.endpoint.workspace)
        if bytes(workspace) == bytes(self.endpoint.workspace):
            self.demand = larger
            self.endpoint.plan_tokens = larger.max_tokens
            self._served.add(demand)
            return False
        if self._captured:
            raise ValueError(
                f"{demand.max_tokens} tokens of {demand.row_bytes} bytes need a larger communication buffer, but a "
                "CUDA graph has captured this one: set max_tokens, or run the largest batch before the capture"
            )
        self._allocate(group, larger, workspace)
        return True

    def note_capture(self) -> None:
        """Remember that a CUDA graph holds the buffer's address."""
        self._captured = True

    def close(self) -> None:
        """Free the memory. Collective, unless a rank has failed: then nobody waits for it."""
        if self._memory is not None:
            self._memory.close(collective=not self.endpoint.failed)
        self._memory = self.endpoint = self.demand = None
        self._captured = False
        self._served.clear()

    def _allocate(self, group: dist.ProcessGroup, demand: Demand, workspace: Workspace) -> None:
        self.close()
        self._memory = memory.allocate(self._library.ncclep_workspace_bytes(workspace), group)
        self.demand = demand
        self.endpoint = Endpoint(
            self._library, workspace, self._memory.local, self._memory.peers, self._rank, demand.max_tokens
        )
