"""nccl4py and torch's symmetric memory without GPUs: they note what is called and fail where a test asks for it."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from moe_ncclep.ep.nvlink import memory

CPU = torch.device("cpu")


@dataclass
class Machine:
    """What one rank has, and where it fails.

    ``nccl``: version of the loaded library, None for no nccl4py. ``gpu``: which GPU, by default one for each rank.
    ``fail``: the call that raises; ``null`` and ``crooked``: the peer whose address is missing or not aligned.
    """

    nccl: tuple[int, ...] | None = (2, 30, 7)
    torch_works: bool = True
    gpu: int | None = None
    index: int | None = None
    may_share: bool = False
    fail: str | None = None
    no_windows: bool = False
    null: int | None = None
    crooked: int | None = None
    calls: list[str] = field(default_factory=list)
    living: int = 0
    """Buffers that have not been freed."""

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fail:
            raise OSError(f"{call} failed")

    def buffer(self, num_bytes: int) -> torch.Tensor:
        room = torch.full((num_bytes + memory.ALIGNMENT,), 7, dtype=torch.uint8)
        start = -room.data_ptr() % memory.ALIGNMENT
        buffer = room[start : start + num_bytes]
        self.living += 1
        weakref.finalize(buffer, self.freed)
        return buffer

    def freed(self) -> None:
        self.living -= 1
        self.calls.append("free")

    def address(self, peer: int) -> int | None:
        if peer == self.null:
            return None
        return 0x7000_0000_0000 + peer * 0x1_0000_0000 + (64 if peer == self.crooked else 0)

    def device(self) -> dict:
        gpu = dist.get_rank() if self.gpu is None else self.gpu
        uuid = f"uuid-{gpu}"
        return {"host": "a", "boot_id": "b", "uuid": uuid, "index": gpu if self.index is None else self.index}


def nccl_modules(machine: Machine) -> dict[str, ModuleType]:
    """``nccl.core`` and what belongs to it."""

    class Window:
        def __init__(self, buffer: torch.Tensor):
            self.handle = 0 if machine.no_windows else buffer.data_ptr()

        def get_peer_device_pointer(self, peer: int) -> int | None:
            return machine.address(peer)

        def close(self) -> None:
            machine.note("deregister")

    class Communicator:
        @classmethod
        def init(cls, size: int, rank: int, unique_id: UniqueId) -> Communicator:
            machine.note("init")
            assert unique_id.id == b"an id"
            return cls()

        def register_window(self, buffer: torch.Tensor, flags: int) -> Window:
            machine.note("register")
            assert not buffer.any(), "others may write before the zeros are in place"
            return Window(buffer)

        def destroy(self) -> None:
            machine.note("destroy")

        def abort(self) -> None:
            machine.note("abort")

    class UniqueId:
        def __init__(self, id: bytes):
            self.id = id

        def __bytes__(self) -> bytes:
            return self.id

        from_bytes = classmethod(lambda cls, id: cls(id))

    class Library:
        version = SimpleNamespace(release=machine.nccl)

        def __str__(self) -> str:
            return ".".join(map(str, machine.nccl))

    def get_unique_id() -> UniqueId:
        machine.note("get_unique_id")
        return UniqueId(b"an id")

    def empty(num_bytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        machine.note("empty")
        return machine.buffer(num_bytes)

    core, interop = ModuleType("nccl.core"), ModuleType("nccl.core.interop.torch")
    core.get_version = lambda: SimpleNamespace(libnccl=Library())
    core.get_unique_id, core.UniqueId, core.Communicator = get_unique_id, UniqueId, Communicator
    core.WindowFlag = SimpleNamespace(DEFAULT=0, COLL_SYMMETRIC=1)
    interop.empty = empty
    return {"nccl.core": core, "nccl.core.interop.torch": interop}


def torch_symmetric(machine: Machine) -> SimpleNamespace:
    """``torch.distributed._symmetric_memory``."""

    def empty_strided_p2p(size: tuple, stride: tuple, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        machine.note("empty")
        return machine.buffer(*size)

    def rendezvous(buffer: torch.Tensor, group: dist.ProcessGroup) -> SimpleNamespace:
        machine.note("rendezvous")
        assert not buffer.any(), "others may write before the zeros are in place"
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        addresses = [machine.address(peer) for peer in range(dist.get_world_size(group))]
        addresses[dist.get_rank(group)] = buffer.data_ptr()
        return SimpleNamespace(buffer_ptrs=addresses)

    return SimpleNamespace(
        rendezvous=rendezvous,
        get_backend=lambda device: "CUDA" if machine.torch_works else "NVSHMEM",
        _SymmetricMemory=SimpleNamespace(empty_strided_p2p=empty_strided_p2p),
    )


@contextlib.contextmanager
def installed(machine: Machine) -> Iterator[Machine]:
    """Let ``memory`` find this machine instead of the real one."""
    absent = {"nccl.core": None, "nccl.core.interop.torch": None}
    modules = absent if machine.nccl is None else nccl_modules(machine)
    environment = {"NCCL_MULTI_RANK_GPU_ENABLE": "1" if machine.may_share else "0"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, modules))
        stack.enter_context(mock.patch.dict(os.environ, environment))
        for name, fake in {
            "import_torch_symmetric": lambda: torch_symmetric(machine),
            "current_device": lambda: CPU,
            "synchronize": lambda device: machine.note("synchronize"),
            "on_device": lambda device: contextlib.nullcontext(),
            "describe_device": machine.device,
            "_no_cuda": lambda: None,
        }.items():
            stack.enter_context(mock.patch.object(memory, name, fake))
        yield machine
