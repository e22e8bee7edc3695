"""Whether the GPUs of a group form one NVLink domain, from facts alone."""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace

import pytest
import torch

from moe_ncclep.ep.nvlink.domain import describe_device, domain_problem, ranks_on_one_device

FABRIC = ("00ff", 3)


def gpu(i: int, host: str = "a", boot_id: str = "1a1a1a1a-boot", visible=range(4), reachable=range(4), **other) -> dict:
    return {
        "host": host,
        "boot_id": boot_id,
        "uuid": f"{host}-{i}",
        "index": i,
        "capability": (9, 0),
        "name": "NVIDIA H200",
        "visible": [f"{host}-{j}" for j in visible],
        "reachable": [f"{host}-{j}" for j in reachable],
        **other,
    }


def elsewhere(i: int, **other) -> dict:
    return gpu(i, host="b", boot_id="2b2b2b2b-boot", **other)


ACROSS = "ranks are on different hosts without a common NVLink domain: rank 0 on a, rank 1 on b"


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ([gpu(0)], None),
        ([gpu(0), gpu(1), gpu(2), gpu(3)], None),
        ([gpu(0, capability=(10, 0)), gpu(1, capability=(12, 0))], None),
        ([gpu(0), gpu(1, capability=(8, 6))], "needs compute capability 9.0, the NVIDIA H200 of rank 1 has 8.6"),
        ([gpu(0), elsewhere(0)], ACROSS),
        (
            [gpu(0), gpu(1), gpu(1, boot_id="3c3c3c3c-boot")],
            "ranks are on different hosts without a common NVLink domain: rank 0 on a (boot 1a1a1a1a), "
            "rank 2 on a (boot 3c3c3c3c)",
        ),
        ([gpu(0, fabric=FABRIC), elsewhere(0, fabric=FABRIC)], None),
        ([gpu(0, fabric=FABRIC), elsewhere(0, fabric=("00ff", 4))], ACROSS),
        ([gpu(0, fabric=FABRIC), elsewhere(0, fabric=("00fe", 3))], ACROSS),
        ([gpu(0, fabric=FABRIC), elsewhere(0)], ACROSS),
        ([gpu(0, fabric=("0000", 3)), elsewhere(0, fabric=("0000", 3))], ACROSS),
        (
            [gpu(0), gpu(1, reachable=[1, 2, 3]), gpu(2)],
            "the GPU of rank 1 cannot access the memory of rank 0's: no peer access",
        ),
        # Each process sees its own GPU only: the question stays open until the memory is set up.
        ([gpu(0, visible=[0], reachable=[0]), gpu(1, visible=[1], reachable=[1])], None),
        # Visible is what this host has, so another host's GPU is not judged by it.
        ([gpu(0, reachable=[0], fabric=FABRIC), elsewhere(1, reachable=[1], fabric=FABRIC)], None),
    ],
)
@pytest.mark.parametrize("asked_for", [False, True])
def test_what_stands_in_the_way(facts, expected, asked_for):
    assert domain_problem(facts, asked_for) == expected


def test_a_shared_gpu_must_be_asked_for():
    facts = [gpu(0), gpu(1), gpu(1)]
    assert ranks_on_one_device(facts) == (1, 2)
    assert domain_problem(facts, True) is None
    assert domain_problem(facts, False) == "ranks 1 and 2 share a GPU, which then works for one of them at a time"


def test_equal_gpus_of_two_hosts_are_not_shared():
    assert ranks_on_one_device([gpu(0), gpu(0, boot_id="3c3c3c3c-boot")]) is None


class _Fabric:
    clusterUuid, cliqueId, state = bytes([0, 255]), 3, 3


@pytest.fixture
def three_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: peer == 2)
    properties = lambda i: SimpleNamespace(uuid=f"uuid-{i}", major=9, minor=0, name="H200")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


def test_description(three_gpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    facts = describe_device()
    assert facts["host"]
    assert facts["boot_id"]
    del facts["host"], facts["boot_id"]
    assert pickle.loads(pickle.dumps(facts)) == {
        "uuid": "uuid-1",
        "index": 1,
        "capability": (9, 0),
        "name": "H200",
        "visible": ["uuid-0", "uuid-1", "uuid-2"],
        "reachable": ["uuid-1", "uuid-2"],
    }


@pytest.mark.parametrize("state", [0, 3])
def test_fabric_of_nvml(three_gpus, monkeypatch, state):
    asked = []
    nvml = SimpleNamespace(
        NVML_GPU_FABRIC_STATE_COMPLETED=3,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: asked.append("shutdown"),
        nvmlDeviceGetHandleByUUID=lambda uuid: asked.append(uuid),
        c_nvmlGpuFabricInfoV_t=_Fabric,
        nvmlDeviceGetGpuFabricInfoV=lambda device, info: None,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr("ctypes.byref", lambda info: info)
    monkeypatch.setattr(_Fabric, "state", state)
    assert describe_device().get("fabric") == (FABRIC if state == 3 else None)
    assert asked == ["GPU-uuid-1", "shutdown"]


def test_an_nvml_that_fails_is_no_fabric(three_gpus, monkeypatch):
    def no_driver() -> None:
        raise RuntimeError("driver not loaded")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=no_driver))
    assert "fabric" not in describe_device()
