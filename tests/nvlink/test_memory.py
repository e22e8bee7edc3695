"""Symmetric memory over fake libraries, on real ranks: choice of the provider, failures, teardown."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist

from moe_ncclep.ep.nvlink import memory
from moe_ncclep.ep.nvlink.memory import NcclWindows, SymmetricMemory, TorchSymmetric, allocate, missing_providers
from tests.nvlink.fakes import Machine, installed
from tests.ranks import pool

NCCL, TORCH = Machine(), Machine(nccl=None)
OLD = Machine(nccl=(2, 28, 9))
NEITHER = Machine(nccl=(2, 28, 9), torch_works=False)
MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
TOO_OLD = (
    f"needs NCCL >= 2.30, loaded: 2.28.9; install nvidia-nccl-cu{(torch.version.cuda or '13')[:2]}>=2.30 "
    "and LD_PRELOAD it"
)


def on_each_rank(machines: tuple[Machine, ...]) -> Machine:
    return replace(machines[dist.get_rank()], calls=[])


def attempt(num_bytes: int, group: dist.ProcessGroup | None = None) -> SymmetricMemory | str:
    try:
        return allocate(num_bytes, group)
    except ValueError as error:
        return str(error)


def assert_nothing_left(machine: Machine) -> None:
    gc.collect()
    assert not machine.living, "buffers outlive their memory"
    assert not memory._Communicator._of_group, "a communicator outlives its memory"
    calls = machine.calls
    # A library's call that fails has nothing to be undone; a window that NCCL did not give is closed all the same.
    assert calls.count("deregister") == calls.count("register") - (machine.fail == "register")
    assert calls.count("destroy") + calls.count("abort") == calls.count("init") - (machine.fail == "init")


def _provider(machines: tuple[Machine, ...]) -> str:
    with installed(on_each_rank(machines)) as machine:
        made = attempt(1000)
        if isinstance(made, str):
            assert_nothing_left(machine)
            return made
        assert made.local.shape == (1000,)
        assert made.local.dtype == torch.uint8
        assert not made.local.any()
        assert made.peers.dtype == torch.int64
        rank = dist.get_rank()
        mine = made.local.data_ptr()
        assert made.peers.tolist() == [mine if peer == rank else machine.address(peer) for peer in range(2)]
        name = made.provider
        made.close()
        del made
        assert_nothing_left(machine)
        return name


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        ((NCCL, NCCL), "nccl windows"),
        ((TORCH, TORCH), "torch symmetric memory"),
        ((NCCL, OLD), "torch symmetric memory"),
        ((TORCH, NCCL), "torch symmetric memory"),
        ((replace(NCCL, gpu=0, may_share=True),) * 2, "nccl windows"),
        ((replace(TORCH, index=0), replace(NCCL, index=0, torch_works=False)), None),
    ],
)
def test_all_ranks_take_the_same_provider(machines, expected):
    results = pool(2).run(_provider, machines)
    assert results[0] == results[1]
    if expected is not None:
        assert results[0] == expected


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        (
            (NCCL, NEITHER),
            f"nccl windows: {TOO_OLD} (rank 1); torch symmetric memory: this process has set its backend to NVSHMEM, "
            "only CUDA will do (rank 1)",
        ),
        (
            (replace(NCCL, gpu=0), replace(NCCL, gpu=0, may_share=True)),
            "nccl windows: ranks 0 and 1 share a GPU, which NCCL allows with NCCL_MULTI_RANK_GPU_ENABLE=1; "
            "torch symmetric memory: ranks 0 and 1 share a GPU",
        ),
        (
            (replace(OLD, index=0),) * 2,
            f"nccl windows: {TOO_OLD} (rank 0); torch symmetric memory: ranks 0 and 1 both call their GPU cuda:0; "
            "make all GPUs of the host visible to all of its ranks",
        ),
    ],
)
def test_without_a_provider_all_ranks_say_why(machines, expected):
    text = f"symmetric memory: no provider can serve this group: {expected}"
    assert pool(2).run(_provider, machines) == [text] * 2


def _fails_then_works(machines: tuple[Machine, ...]) -> str:
    text = _provider(machines)
    assert _provider(
        tuple(replace(machine, fail=None, no_windows=False, null=None, crooked=None) for machine in machines)
    )
    return text


UNREACHABLE = "the memory of rank 0 is not reachable from rank 1: no NVLink between them (rank 1)"


@pytest.mark.parametrize(
    ("base", "spoilt", "expected"),
    [
        (NCCL, {"fail": "init"}, "OSError: init failed (rank 1)"),
        (NCCL, {"fail": "empty"}, "OSError: empty failed (rank 1)"),
        (NCCL, {"fail": "register"}, "OSError: register failed (rank 1)"),
        (NCCL, {"fail": "synchronize"}, "OSError: synchronize failed (rank 1)"),
        (NCCL, {"no_windows": True}, "NCCL has no windows for this group"),
        (NCCL, {"null": 0}, UNREACHABLE),
        (NCCL, {"crooked": 0}, "the memory of rank 0 is at 0x700000000040, not aligned to 128 bytes (rank 1)"),
        (TORCH, {"fail": "empty"}, "OSError: empty failed (rank 1)"),
        (TORCH, {"fail": "rendezvous"}, "OSError: rendezvous failed (rank 1)"),
        (TORCH, {"null": 0}, UNREACHABLE),
    ],
)
def test_a_failure_of_one_rank_is_raised_on_all_and_leaves_nothing(base, spoilt, expected):
    texts = pool(2).run(_fails_then_works, (base, replace(base, **spoilt)))
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"symmetric memory: {expected}")


def test_no_id_of_a_communicator():
    texts = pool(2).run(_fails_then_works, (replace(NCCL, fail="get_unique_id"), NCCL))
    assert texts == ["symmetric memory: OSError: get_unique_id failed (rank 0)"] * 2


def _sizes(sizes: tuple) -> str:
    with installed(Machine()) as machine:
        text = attempt(sizes[dist.get_rank()])
        assert_nothing_left(machine)
        return text


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((256, 512), "ranks disagree on the size in bytes: 256 on rank 0, 512 on rank 1"),
        ((256, 0), "the size must be a positive number of bytes, got 0 (rank 1)"),
        ((2.5, 256), "the size must be a positive number of bytes, got 2.5 (rank 0)"),
    ],
)
def test_wrong_sizes(sizes, expected):
    assert pool(2).run(_sizes, sizes) == [f"symmetric memory: {expected}"] * 2


def _growth() -> list[str]:
    with installed(Machine()) as machine:
        small = allocate(256)
        large = allocate(4096)
        assert small.local.data_ptr() != large.local.data_ptr()
        small.close()
        assert large.local.shape == (4096,)
        machine.calls.append("last")
        large.close()
        large.close()
        small.close()
        for made in (small, large):
            with pytest.raises(RuntimeError, match="closed"):
                _ = made.local
            with pytest.raises(RuntimeError, match="closed"):
                _ = made.peers
        assert_nothing_left(machine)
        return machine.calls


def test_growth_shares_a_communicator_which_ends_last():
    one = ["empty", "synchronize", "register"]
    close = ["synchronize", "deregister", "free"]
    expected = ["init", *one, *one, *close, "last", *close, "destroy"]
    assert pool(2).run(_growth) == [["get_unique_id", *expected], expected]


def _repeat(machine: Machine, times: int) -> int:
    with installed(replace(machine, calls=[])) as machine:
        for i in range(times):
            made = allocate(256 * (i + 1))
            made.close()
        del made
        assert_nothing_left(machine)
        kinds = (SymmetricMemory, memory._Communicator)
        assert not any(issubclass(type(obj), kinds) for obj in gc.get_objects())
        return machine.calls.count("free")


@pytest.mark.parametrize("machine", [NCCL, TORCH], ids=["nccl", "torch"])
def test_repeated_creation_leaves_nothing(machine):
    assert pool(2).run(_repeat, machine, 20) == [20, 20]


def _close_alone() -> list[str]:
    with installed(Machine()) as machine:
        first, second = allocate(256), allocate(256)
        if dist.get_rank() == 1:  # as after a failure: nobody waits for rank 0
            second.close(collective=False)
            first.close(collective=False)
            first.close()
        dist.barrier()
        machine.calls.clear()
        third = allocate(256)  # a new communicator for all
        third.close()
        if dist.get_rank() == 0:
            second.close(collective=False)
            first.close(collective=False)
        gc.collect()
        assert not machine.living
        assert not memory._Communicator._of_group
        return [call for call in machine.calls if call in ("init", "destroy", "abort")]


def test_close_without_the_others():
    assert pool(2).run(_close_alone) == [["init", "destroy", "abort"], ["init", "destroy"]]


@dataclass
class Stuck(Machine):
    """A machine on which, from some moment, the device is lost."""

    lost: bool = False

    def note(self, call: str) -> None:
        super().note(call)
        if self.lost and call == "synchronize":
            raise OSError("device lost")


@dataclass
class Clock(Machine):
    """Notes when calls are made; the clock is one for all processes."""

    times: dict[str, float] = field(default_factory=dict)

    def note(self, call: str) -> None:
        super().note(call)
        self.times[call] = time.monotonic()


def _close_late(late: int) -> dict[str, float]:
    with installed(Clock()) as machine:
        made = allocate(256)
        if dist.get_rank() == late:
            time.sleep(0.5)  # as if kernels of this rank still wrote to all
        made.close()
        return machine.times


def test_no_rank_frees_before_the_kernels_of_all_are_done():
    times = pool(2).run(_close_late, 1)
    assert times[0]["deregister"] > times[1]["synchronize"]


def _close_with_a_lost_device() -> str:
    with installed(Stuck()) as machine:
        made = allocate(256)
        machine.lost = dist.get_rank() == 1
        try:
            made.close()
            text = "closed"
        except OSError as error:
            text = str(error)
        del made
        assert_nothing_left(machine)
        return text


def test_close_frees_all_ranks_when_one_has_lost_its_device():
    assert pool(2).run(_close_with_a_lost_device) == ["closed", "device lost"]


def _unclosed_goes_with_its_group() -> list[str]:
    with installed(Machine()) as machine:
        group = dist.new_group([0, 1])
        made = allocate(256, group)
        dist.destroy_process_group(group)
        del group, made
        assert_nothing_left(machine)
        return machine.calls[-4:]


def test_memory_that_nobody_closes_goes_without_waiting():
    assert pool(2).run(_unclosed_goes_with_its_group) == [["synchronize", "deregister", "free", "abort"]] * 2


def _two_groups() -> list[str]:
    with installed(Machine()) as machine:
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        everyone, pair = allocate(256), allocate(512, pairs[dist.get_rank() // 2])
        assert everyone.peers.shape == (4,)
        assert pair.peers.shape == (2,)
        everyone.close()
        assert pair.local.shape == (512,)
        pair.close()
        del everyone, pair
        assert_nothing_left(machine)
        return [call for call in machine.calls if call in ("init", "destroy")]


def test_groups_are_independent():
    assert pool(4).run(_two_groups) == [["init", "init", "destroy", "destroy"]] * 4


def _variable(before: str | None) -> str | None:
    os.environ.pop(MULTICAST, None)
    if before is not None:
        os.environ[MULTICAST] = before
    try:
        with installed(replace(TORCH, calls=[])):
            allocate(256).close()  # the fake rendezvous checks that it is set
        return os.environ.get(MULTICAST)
    finally:
        os.environ.pop(MULTICAST, None)


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_multicast_is_off_for_our_rendezvous_only(before):
    assert pool(2).run(_variable, before) == [before, before]


def test_missing_providers():
    with installed(Machine()):
        assert missing_providers() is None
    with installed(Machine(nccl=None)):
        assert missing_providers() is None
        assert NcclWindows.missing().startswith("nccl4py is not installed (")
        assert NcclWindows.missing().endswith("): pip install nccl4py")
    with installed(Machine(torch_works=False)):
        assert missing_providers() is None
        assert TorchSymmetric.missing() == "this process has set its backend to NVSHMEM, only CUDA will do"
    with installed(NEITHER):
        assert missing_providers() == (
            f"nccl windows: {TOO_OLD}; "
            "torch symmetric memory: this process has set its backend to NVSHMEM, only CUDA will do"
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_this_machine_without_a_gpu():
    assert missing_providers() == "no CUDA device"
