"""Symmetric memory: one buffer on every rank of a group, which all the ranks can read and write.

It comes from a library: windows of NCCL (through nccl4py), or torch's symmetric memory where NCCL is older. Kernels see
only a table of addresses, one for each rank. Nothing here uses NVLink multicast.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ncclep.ep.agreement import first_reason, gather_objects
from moe_ncclep.ep.nvlink.domain import describe_device, ranks_on_one_device

ALIGNMENT = 128
"""Bytes; every address in ``peers`` is a multiple, as bulk copies need."""
MIN_NCCL = (2, 30)
"""First NCCL whose windows give plain addresses of the peers' memory to the host."""

T = TypeVar("T")


class SymmetricMemory(ABC):
    """One buffer of equal size on every rank of a group, each rank able to reach all of them.

    Made by :func:`allocate`. Copies of ``local`` and ``peers`` must not be used after :meth:`close`.
    """

    provider: ClassVar[str]

    def __init__(self, num_bytes: int, group: dist.ProcessGroup):
        # Weak, as in Engine: memory that nobody closes goes with its group.
        self._group = weakref.ref(group)
        self._device = current_device()
        self._closed = False
        self._local: Tensor | None = None
        self._peers: Tensor | None = None
        try:
            self._set_up(num_bytes, group)
        except BaseException:
            with contextlib.suppress(Exception):
                self.close(collective=False)
            raise

    @classmethod
    @abstractmethod
    def missing(cls) -> str | None:
        """Why the provider cannot work in this process, or None. No communication."""

    @classmethod
    @abstractmethod
    def unsuited(cls, facts: list[dict]) -> str | None:
        """Why the provider cannot serve ranks with these devices (see ``describe_device``), or None."""

    @property
    def local(self) -> Tensor:
        """``[num_bytes]`` uint8 on the device that was current in ``allocate``; zeros at first."""
        return self._open(self._local)

    @property
    def peers(self) -> Tensor:
        """``[R]`` int64 on the device: addresses of all ranks' buffers in this rank's address space."""
        return self._open(self._peers)

    def close(self, collective: bool = True) -> None:
        """Free the buffers of all ranks, once nobody uses them any more. Collective; a second call does nothing.

        Args:
            collective: False after a failure, when the other ranks may not come. Frees this rank's share without
                waiting for them: what they still write is lost.
        """
        if self._closed:
            return
        self._closed = True
        group = self._group() if collective else None
        all_came = False
        try:
            synchronize(self._device)
        finally:
            try:
                if group is not None:
                    gather_objects(group, None)  # no rank frees before the kernels of all ranks are done
                    all_came = True
            finally:
                self._free(all_came)

    def __del__(self):
        if not sys.is_finalizing() and not getattr(self, "_closed", True):
            with contextlib.suppress(Exception):
                self.close(collective=False)

    @abstractmethod
    def _set_up(self, num_bytes: int, group: dist.ProcessGroup) -> None:
        """Make buffers and addresses; raise ``ValueError`` on all ranks or on none."""

    @abstractmethod
    def _free(self, all_came: bool) -> None:
        """Let go of what ``_set_up`` got, however far it came. ``all_came``: all ranks are doing the same."""

    def _open(self, tensor: Tensor | None) -> Tensor:
        if self._closed or tensor is None:
            raise RuntimeError("this symmetric memory is closed")
        return tensor

    def _zeroed(self, buffer: Tensor) -> Tensor:
        """``buffer`` with its zeros in place, before any other rank can write to it."""
        buffer.zero_()
        synchronize(self._device)
        return buffer

    def _table(self, addresses: list[int | None], rank: int) -> Tensor:
        for peer, address in enumerate(addresses):
            if not address:
                raise ValueError(f"the memory of rank {peer} is not reachable from rank {rank}: no NVLink between them")
            if address % ALIGNMENT:
                raise ValueError(f"the memory of rank {peer} is at {address:#x}, not aligned to {ALIGNMENT} bytes")
        if addresses[rank] != self._local.data_ptr():
            raise ValueError(f"rank {rank}'s own buffer is not where its address points")
        return torch.tensor(addresses, dtype=torch.int64, device=self._device)


class NcclWindows(SymmetricMemory):
    """Windows of NCCL >= 2.30 in memory of NCCL. Several ranks may share a GPU if NCCL is allowed to."""

    provider = "nccl windows"

    @classmethod
    def missing(cls) -> str | None:
        """See :meth:`SymmetricMemory.missing`."""
        problem = _no_cuda()
        if problem is not None:
            return problem
        try:
            library = import_nccl().get_version().libnccl
        except ModuleNotFoundError as error:
            return f"nccl4py is not installed ({error}): pip install nccl4py"
        except Exception as error:
            return f"nccl4py does not work: {_describe(error)}"
        release = () if library is None else tuple(library.version.release)
        if release[:2] < MIN_NCCL:
            need = ".".join(map(str, MIN_NCCL))
            cuda = (torch.version.cuda or "13").partition(".")[0]
            have = "none" if library is None else str(library)
            return f"needs NCCL >= {need}, loaded: {have}; install nvidia-nccl-cu{cuda}>={need} and LD_PRELOAD it"
        return None

    @classmethod
    def unsuited(cls, facts: list[dict]) -> str | None:
        """See :meth:`SymmetricMemory.unsuited`."""
        shared = ranks_on_one_device(facts)
        if shared is None or all(facts[rank]["may_share"] for rank in shared):
            return None
        return f"ranks {shared[0]} and {shared[1]} share a GPU, which NCCL allows with NCCL_MULTI_RANK_GPU_ENABLE=1"

    def _set_up(self, num_bytes: int, group: dist.ProcessGroup) -> None:
        self._communicator = self._window = None
        nccl = import_nccl()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._communicator = _Communicator.of(group, self._device)

        def make_buffer() -> None:
            empty = importlib.import_module("nccl.core.interop.torch").empty
            self._local = self._zeroed(empty(num_bytes, dtype=torch.uint8, device=self._device))

        def register() -> None:
            # Not COLL_SYMMETRIC, which readies NCCL's own kernels for the window: buffers of theirs, and multicast
            # where NCCL may use it. The peers' memory is mapped either way.
            self._window = self._communicator.nccl.register_window(self._local, flags=nccl.WindowFlag.DEFAULT)
            if not self._window.handle:
                raise ValueError(
                    "NCCL has no windows for this group: they need peer access between all of its GPUs, "
                    "and neither NCCL_CUMEM_ENABLE=0 nor NCCL_WIN_ENABLE=0"
                )

        def make_table() -> None:
            addresses = [self._window.get_peer_device_pointer(peer) for peer in range(size)]
            if addresses[rank]:
                # NCCL maps this rank's own memory a second time. Kernels must see one address for it, since accesses
                # through two are not ordered without fences.
                addresses[rank] = self._local.data_ptr()
            self._peers = self._table(addresses, rank)

        together(group, make_buffer)
        together(group, register)
        together(group, make_table)

    def _free(self, all_came: bool) -> None:
        with contextlib.ExitStack() as last_to_first:  # goes on after an error, and raises it at the end
            if self._communicator is not None:
                last_to_first.callback(self._communicator.release, graceful=all_came)
            last_to_first.callback(self._drop)  # frees the memory, unless the caller still has the tensor
            if self._window is not None:
                last_to_first.callback(self._window.close)

    def _drop(self) -> None:
        self._communicator = self._window = self._local = self._peers = None


class _Communicator:
    """NCCL's communicator for the windows of one group, alive while any of them is."""

    _of_group: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, _Communicator]] = weakref.WeakKeyDictionary()

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        nccl = import_nccl()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        unique_id = together(group, lambda: bytes(nccl.get_unique_id()) if rank == 0 else b"")
        unique_id = gather_objects(group, unique_id)[0]
        self.nccl: Any = None
        self.device = device
        self._users = 0
        self._group = weakref.ref(group)

        def join() -> None:
            with on_device(device):
                self.nccl = nccl.Communicator.init(size, rank, nccl.UniqueId.from_bytes(unique_id))

        try:
            together(group, join)
        except BaseException:
            self._end(graceful=False)
            raise

    @classmethod
    def of(cls, group: dist.ProcessGroup, device: torch.device) -> _Communicator:
        """The communicator of ``group`` with one more user; collective."""

        def known() -> _Communicator | None:
            communicator = cls._of_group.get(group)
            if communicator is not None and communicator.device != device:
                raise ValueError(
                    f"this group has symmetric memory on {communicator.device}, the device now is {device}"
                )
            return communicator

        communicator = together(group, known)
        # A rank may have lost its share to a close without the others: then all begin anew.
        if not all(gather_objects(group, communicator is not None)):
            communicator = cls(group, device)
            cls._of_group[group] = communicator
        communicator._users += 1
        return communicator

    def release(self, graceful: bool) -> None:
        """One user less; the last one ends the communicator, together with the other ranks' or at once."""
        self._users -= 1
        if self._users:
            return
        group = self._group()
        if group is not None and self._of_group.get(group) is self:
            del self._of_group[group]
        self._end(graceful)

    def _end(self, graceful: bool) -> None:
        nccl, self.nccl = self.nccl, None
        if nccl is not None:
            with on_device(self.device):
                (nccl.destroy if graceful else nccl.abort)()


class TorchSymmetric(SymmetricMemory):
    """torch's symmetric memory. One rank on each GPU."""

    provider = "torch symmetric memory"

    @classmethod
    def missing(cls) -> str | None:
        """See :meth:`SymmetricMemory.missing`."""
        problem = _no_cuda()
        if problem is not None:
            return problem
        try:
            torch_symmetric = import_torch_symmetric()
            backend = getattr(torch_symmetric, "get_backend", lambda device: None)(current_device())
        except Exception as error:
            return f"does not work in torch {torch.__version__}: {_describe(error)}"
        if not hasattr(torch_symmetric, "rendezvous"):
            return f"torch {torch.__version__} has no rendezvous of symmetric memory"
        return (
            None if backend in (None, "CUDA") else f"this process has set its backend to {backend}, only CUDA will do"
        )

    @classmethod
    def unsuited(cls, facts: list[dict]) -> str | None:
        """See :meth:`SymmetricMemory.unsuited`."""
        shared = ranks_on_one_device(facts)
        if shared is not None:
            return f"ranks {shared[0]} and {shared[1]} share a GPU"
        first: dict[tuple, int] = {}
        for rank, fact in enumerate(facts):
            other = first.setdefault((fact["host"], fact["index"]), rank)
            if other != rank:  # torch would take them for one device
                return (
                    f"ranks {other} and {rank} both call their GPU cuda:{fact['index']}; "
                    "make all GPUs of the host visible to all of its ranks"
                )
        return None

    def _set_up(self, num_bytes: int, group: dist.ProcessGroup) -> None:
        self._handle = None
        torch_symmetric = import_torch_symmetric()

        def make_buffer() -> None:
            # Not torch's ``empty``: that takes memory from a pool which never gives it back.
            empty = torch_symmetric._SymmetricMemory.empty_strided_p2p
            self._local = self._zeroed(empty((num_bytes,), (1,), torch.uint8, self._device))

        def exchange() -> None:
            with _no_multicast():
                self._handle = torch_symmetric.rendezvous(self._local, group)

        def make_table() -> None:
            self._peers = self._table(list(self._handle.buffer_ptrs), dist.get_rank(group))

        together(group, make_buffer)
        together(group, exchange)
        together(group, make_table)

    def _free(self, all_came: bool) -> None:
        self._handle = self._local = self._peers = None


PROVIDERS: tuple[type[SymmetricMemory], ...] = (NcclWindows, TorchSymmetric)
"""Best first."""


def allocate(num_bytes: int, group: dist.ProcessGroup | None = None) -> SymmetricMemory:
    """Make a zeroed buffer of ``num_bytes`` on the current CUDA device of every rank of ``group``. Collective.

    When it returns, every rank's buffer is ready for the writes of all others.

    Raises:
        ValueError: on every rank, if no provider can serve all ranks, the ranks ask for different sizes, a GPU is out
            of the others' reach, or anything fails on any rank; the text names the rank.
    """
    group = dist.group.WORLD if group is None else group
    reports = gather_objects(group, _report(num_bytes))
    for rank, report in enumerate(reports):
        if "problem" in report:
            raise ValueError(f"symmetric memory: {report['problem']} (rank {rank})")
        if report["num_bytes"] != reports[0]["num_bytes"]:
            sizes = f"{reports[0]['num_bytes']} on rank 0, {report['num_bytes']} on rank {rank}"
            raise ValueError(f"symmetric memory: ranks disagree on the size in bytes: {sizes}")
    reasons = []
    for provider in PROVIDERS:
        reason = first_reason([report["missing"][provider.provider] for report in reports])
        if reason is None:
            reason = provider.unsuited([report["device"] for report in reports])
        if reason is None:
            return provider(num_bytes, group)
        reasons.append(f"{provider.provider}: {reason}")
    raise ValueError(f"symmetric memory: no provider can serve this group: {'; '.join(reasons)}")


def missing_providers() -> str | None:
    """Why no provider can work in this process, or None if one can. No communication."""
    reasons = {cls.provider: cls.missing() for cls in PROVIDERS}
    if None in reasons.values():
        return None
    if len(set(reasons.values())) == 1:
        return next(iter(reasons.values()))
    return "; ".join(f"{provider}: {reason}" for provider, reason in reasons.items())


def together(group: dist.ProcessGroup, step: Callable[[], T]) -> T:
    """Take a step that may fail on any rank; then it fails on all of them. Collective.

    What must be undone when another rank fails, the step keeps somewhere itself.

    Raises:
        ValueError: on every rank, with the reason and rank of the first that failed.
    """
    result, problem, cause = None, None, None
    try:
        result = step()
    except Exception as error:
        problem, cause = _describe(error), error
    reason = first_reason(gather_objects(group, problem))
    if reason is not None:
        raise ValueError(f"symmetric memory: {reason}") from cause
    return result


def import_nccl() -> ModuleType:
    """``nccl.core`` of nccl4py."""
    return importlib.import_module("nccl.core")


def import_torch_symmetric() -> ModuleType:
    """``torch.distributed._symmetric_memory``."""
    return importlib.import_module("torch.distributed._symmetric_memory")


def current_device() -> torch.device:
    """The CUDA device on which :func:`allocate` allocates."""
    return torch.device("cuda", torch.cuda.current_device())


def synchronize(device: torch.device) -> None:
    """Wait for all that runs on ``device``."""
    torch.cuda.synchronize(device)


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """A context in which ``device`` is the current one."""
    return torch.cuda.device(device)


def _no_cuda() -> str | None:
    return None if torch.cuda.is_available() else "no CUDA device"


def _report(num_bytes: int) -> dict:
    """What the other ranks must know of this one before anything is allocated."""
    if not isinstance(num_bytes, int) or num_bytes <= 0:
        return {"problem": f"the size must be a positive number of bytes, got {num_bytes!r}"}
    try:
        missing = {provider.provider: provider.missing() for provider in PROVIDERS}
        may_share = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        device = {**describe_device(), "may_share": may_share} if None in missing.values() else {}
    except Exception as error:  # whatever it is, the other ranks are already waiting
        return {"problem": _describe(error)}
    return {"num_bytes": num_bytes, "missing": missing, "device": device}


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _no_multicast() -> Iterator[None]:
    """Keep torch from making an NVLink multicast object at the rendezvous.

    The kernels do not use it, some machines have none (H20, virtual machines) and fail, and its faults can disable the
    GPUs of a whole host. torch reads the variable at each rendezvous; other users of the process get it back as it was.
    """
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
