"""Symmetric memory on real GPUs, on 2 and 4 ranks; they may share a GPU. Run with ``-rP`` to see what was measured."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ncclep.ep.agreement import gather_objects
from moe_ncclep.ep.nvlink import memory
from moe_ncclep.ep.nvlink.domain import describe_device, domain_problem, ranks_on_one_device
from moe_ncclep.ep.nvlink.memory import SymmetricMemory, TorchSymmetric, allocate, missing_providers
from tests.gpu.machine import loaded_nccl_version
from tests.ranks import pool

MIB = 1 << 20
SLOT = 1 << 16
"""Bytes that each rank writes into each buffer."""
EACH_WORLD = pytest.mark.parametrize(
    "world", [pytest.param(2, marks=pytest.mark.gpu2), pytest.param(4, marks=pytest.mark.gpu4)]
)
GROUPS = pytest.mark.parametrize("backend", ["nccl", "gloo"])
KERNELS = """
extern "C" __global__ void write_all(const long long* peers, int num_ranks, int rank, int slot, int seed) {
    for (int peer = 0; peer < num_ranks; ++peer) {
        unsigned char* mine = reinterpret_cast<unsigned char*>(peers[peer]) + static_cast<long long>(rank) * slot;
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < slot; i += gridDim.x * blockDim.x) {
            mine[i] = seed + rank * 31 + peer * 7 + i;
        }
    }
    __threadfence_system();
}
extern "C" __global__ void read_all(
    const long long* peers, unsigned char* out, int num_ranks, int rank, int slot
) {
    for (int peer = 0; peer < num_ranks; ++peer) {
        const unsigned char* mine =
            reinterpret_cast<const unsigned char*>(peers[peer]) + static_cast<long long>(rank) * slot;
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < slot; i += gridDim.x * blockDim.x) {
            out[static_cast<long long>(peer) * slot + i] = mine[i];
        }
    }
}
"""


def on_ranks(world: int, fn: Callable, *args: Any, timeout: float = 240) -> list:
    reason = missing_providers()
    if reason is not None:
        pytest.skip(reason)
    results = pool(world, device="cuda").run(fn, *args, timeout=timeout)
    for rank, result in enumerate(results):
        print(f"rank {rank}: {result}")
    return results


@contextlib.contextmanager
def group_of(backend: str) -> Iterator[dist.ProcessGroup]:
    if backend == "nccl":
        yield dist.group.WORLD
        return
    group = dist.new_group(backend=backend)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def barrier() -> None:
    torch.cuda.synchronize()
    gather_objects(dist.group.WORLD, None)


def free_bytes() -> int:
    """Of the whole device, when all ranks are here."""
    gc.collect()
    torch.cuda.empty_cache()
    barrier()
    free = torch.cuda.mem_get_info()[0]
    barrier()
    return free


def told(made: SymmetricMemory) -> str:
    """What one wants to know when a check fails."""
    device = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info()
    return (
        f"rank {dist.get_rank()} of {dist.get_world_size()} on cuda:{device} "
        f"({torch.cuda.get_device_properties(device).uuid}), {made.provider}, NCCL {loaded_nccl_version()}, "
        f"torch {torch.__version__}, local {made.local.data_ptr():#x} of {made.local.numel()} bytes on "
        f"{made.local.device}, peers {[hex(address) for address in made.peers.tolist()]}, "
        f"{free / MIB:.0f} of {total / MIB:.0f} MiB free"
    )


def written(rank: int, peer: int, seed: int) -> torch.Tensor:
    """What ``rank`` writes into its slot of the buffer of ``peer``."""
    return ((torch.arange(SLOT) + seed + rank * 31 + peer * 7) % 256).to(torch.uint8)


def copy(target: int, source: int, num_bytes: int) -> None:
    """The driver's copy between addresses of this process."""
    fn = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoD_v2
    fn.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t]
    torch.cuda.synchronize()
    code = fn(target, source, num_bytes)
    torch.cuda.synchronize()
    assert code == 0, f"cuMemcpyDtoD({target:#x}, {source:#x}, {num_bytes}) returned CUresult {code}"


def check_fresh(made: SymmetricMemory, num_bytes: int, group: dist.ProcessGroup) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    here = torch.device("cuda", torch.cuda.current_device())
    assert (made.local.dtype, made.local.shape, made.local.device) == (torch.uint8, (num_bytes,), here), told(made)
    assert (made.peers.dtype, made.peers.shape, made.peers.device) == (torch.int64, (size,), here), told(made)
    addresses = made.peers.tolist()
    assert addresses[rank] == made.local.data_ptr(), told(made)
    assert len(set(addresses)) == size, told(made)
    assert not any(address % memory.ALIGNMENT for address in addresses), told(made)
    assert int(made.local.count_nonzero()) == 0, told(made)
    barrier()  # nobody writes before all have seen their zeros


def check_slots(made: SymmetricMemory, seed: int, how: str) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    found = made.local[: size * SLOT].cpu().view(size, SLOT)
    for writer in range(size):
        wrong = int((found[writer] != written(writer, rank, seed)).sum())
        head = found[writer, :8].tolist()
        assert wrong == 0, f"{how}: {wrong} of {SLOT} bytes from rank {writer} are wrong, first {head}; {told(made)}"
    rest = int(made.local[size * SLOT :].count_nonzero())
    assert rest == 0, f"{how}: {rest} bytes behind the slots were written; {told(made)}"


def copy_everywhere(made: SymmetricMemory, seed: int) -> None:
    """Each rank writes its slot of all buffers by copies, and reads them back."""
    rank = dist.get_rank()
    for peer, address in enumerate(made.peers.tolist()):
        source = written(rank, peer, seed).cuda()
        copy(address + rank * SLOT, source.data_ptr(), SLOT)
    barrier()
    check_slots(made, seed, "copies")
    back = torch.zeros(SLOT, dtype=torch.uint8, device="cuda")
    for peer, address in enumerate(made.peers.tolist()):
        copy(back.data_ptr(), address + rank * SLOT, SLOT)
        assert torch.equal(back.cpu(), written(rank, peer, seed)), f"read back from rank {peer}; {told(made)}"
    barrier()


def _copies_and_growth(backend: str) -> str:
    with group_of(backend) as group:
        size = dist.get_world_size(group)
        start = time.perf_counter()
        small = allocate(size * SLOT, group)
        first = time.perf_counter() - start
        check_fresh(small, size * SLOT, group)
        copy_everywhere(small, 1)
        start = time.perf_counter()
        large = allocate(4 * size * SLOT + 100, group)
        second = time.perf_counter() - start
        check_fresh(large, 4 * size * SLOT + 100, group)
        copy_everywhere(large, 2)
        check_slots(small, 1, "the old buffer beside the new")
        text = f"{told(small)}; first allocation {first:.2f} s, second {second:.2f} s"
        start = time.perf_counter()
        small.close()
        copy_everywhere(large, 3)
        large.close()
        large.close()
        with pytest.raises(RuntimeError, match="closed"):
            _ = large.local
        return f"{text}, closing {time.perf_counter() - start:.2f} s"


@EACH_WORLD
@GROUPS
def test_every_rank_writes_to_every_rank(world, backend):
    on_ranks(world, _copies_and_growth, backend)


def _kernels() -> str:
    size, rank = dist.get_world_size(), dist.get_rank()
    write, read = (torch.cuda._compile_kernel(KERNELS, name) for name in ("write_all", "read_all"))
    made = allocate(size * SLOT)
    try:
        for seed in range(5):
            write(grid=(8, 1, 1), block=(256, 1, 1), args=(made.peers, size, rank, SLOT, seed))
            barrier()
            check_slots(made, seed, "stores of a kernel")
            out = torch.zeros(size, SLOT, dtype=torch.uint8, device="cuda")
            read(grid=(8, 1, 1), block=(256, 1, 1), args=(made.peers, out, size, rank, SLOT))
            expected = torch.stack([written(rank, peer, seed) for peer in range(size)])
            assert torch.equal(out.cpu(), expected), f"loads of a kernel; {told(made)}"
            barrier()
        return told(made)
    finally:
        made.close()


@EACH_WORLD
@pytest.mark.skipif(not hasattr(torch.cuda, "_compile_kernel"), reason="torch cannot compile a kernel at run time")
def test_kernels_write_and_read_through_the_table(world):
    on_ranks(world, _kernels)


def _repeat(times: int, num_bytes: int, keep_one: bool) -> dict:
    """Free memory of the device in MiB, relative to the start, after each repetition."""
    keeper = allocate(MIB) if keep_one else None
    for _ in range(2):
        allocate(num_bytes).close()
    before = free_bytes()
    trail = []
    start = time.perf_counter()
    for i in range(times):
        made = allocate(num_bytes)
        if i == 0:
            held = before - free_bytes()
        made.close()
        del made
        trail.append(round((free_bytes() - before) / MIB, 1))
    seconds = (time.perf_counter() - start) / times
    if keeper is not None:
        keeper.close()
    return {"trail": trail, "held": round(held / MIB, 1), "seconds": round(seconds, 2)}


@EACH_WORLD
@pytest.mark.timeout(900)
@pytest.mark.parametrize("keep_one", [True, False], ids=["one-communicator", "new-communicators"])
def test_repetitions_give_all_memory_back(world, keep_one):
    for result in on_ranks(world, _repeat, 20, 64 * MIB, keep_one, timeout=800):
        assert result["held"] > 60, result  # the measurement sees the buffers at all
        assert min(result["trail"][-5:]) > -16, result


def _broken(self: SymmetricMemory, buffer: torch.Tensor) -> torch.Tensor:
    raise OSError("broken")


def _failures_and_recovery() -> list[str]:
    texts, before = [], None

    def attempt(num_bytes: int) -> None:
        with pytest.raises(ValueError, match="symmetric memory") as caught:
            allocate(num_bytes)
        texts.append(str(caught.value))
        del caught

    for _ in range(2):  # once to load everything, once to look for what is left
        texts.clear()
        before = free_bytes()
        attempt(MIB * (1 + dist.get_rank()))
        attempt(1 << 50)
        broken = mock.patch.object(SymmetricMemory, "_zeroed", _broken)
        with broken if dist.get_rank() == 1 else contextlib.nullcontext():
            attempt(MIB)
        keeper = allocate(MIB)
        attempt(1 << 50)  # beside memory that stays
        copy_everywhere(keeper, 4)
        keeper.close()
        texts.append(f"{(free_bytes() - before) / MIB:.1f} MiB")
    return texts


@EACH_WORLD
def test_failures_are_raised_on_all_ranks_and_leave_nothing(world):
    results = on_ranks(world, _failures_and_recovery)
    sizes, huge, broken, beside, left = results[0]
    assert sizes == f"symmetric memory: ranks disagree on the size in bytes: {MIB} on rank 0, {2 * MIB} on rank 1"
    assert "(rank 0)" in huge
    assert broken == "symmetric memory: OSError: broken (rank 1)"
    assert "(rank 0)" in beside
    assert all(result[:3] == results[0][:3] for result in results)
    assert float(left.split()[0]) > -16, results


def _without_the_others() -> str:
    """Memory that is closed without the others, or by nobody, and a fresh start after that."""
    allocate(MIB).close(collective=False)
    barrier()
    made = allocate(MIB)
    text = told(made)
    del made
    gc.collect()
    barrier()
    assert not memory._Communicator._of_group
    again = allocate(MIB)
    copy_everywhere(again, 5)
    again.close()
    return text


@EACH_WORLD
def test_closing_without_the_others(world):
    on_ranks(world, _without_the_others)


def _two_groups() -> str:
    gloo = dist.new_group(backend="gloo")
    one, two = allocate(MIB), allocate(2 * MIB, gloo)
    copy_everywhere(one, 6)
    copy_everywhere(two, 7)
    check_slots(one, 6, "two groups")
    one.close()
    copy_everywhere(two, 8)
    two.close()
    dist.destroy_process_group(gloo)
    return "right"


@EACH_WORLD
def test_two_groups_at_once(world):
    on_ranks(world, _two_groups)


def _facts() -> dict:
    return describe_device()


@EACH_WORLD
def test_the_domain(world):
    facts = on_ranks(world, _facts)
    assert domain_problem(facts, asked_for=True) is None
    shared = ranks_on_one_device(facts)
    assert (domain_problem(facts, asked_for=False) is None) == (shared is None)


def _torch_only() -> str:
    with mock.patch.object(memory, "PROVIDERS", (TorchSymmetric,)):
        try:
            made = allocate(dist.get_world_size() * SLOT)
        except ValueError as error:
            return str(error)
        check_fresh(made, dist.get_world_size() * SLOT, dist.group.WORLD)
        assert not made._handle.multicast_ptr, told(made)
        copy_everywhere(made, 9)
        text = told(made)
        made.close()
        return text


def _torch_repeat(times: int, num_bytes: int) -> dict:
    with mock.patch.object(memory, "PROVIDERS", (TorchSymmetric,)):
        return _repeat(times, num_bytes, False)


@EACH_WORLD
def test_torch_as_the_provider(world):
    results = on_ranks(world, _torch_only)
    if torch.cuda.device_count() >= world:
        assert all("torch symmetric memory" in result for result in results)
        for result in on_ranks(world, _torch_repeat, 20, 64 * MIB):
            assert min(result["trail"][-5:]) > -16, result
    else:
        sharing = f"ranks 0 and {torch.cuda.device_count()} share a GPU"
        expected = f"symmetric memory: no provider can serve this group: torch symmetric memory: {sharing}"
        assert results == [expected] * world
