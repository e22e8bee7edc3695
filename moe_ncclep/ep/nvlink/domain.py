"""Which GPUs the ranks of a group have, and whether each can reach the memory of all others."""

from __future__ import annotations

import ctypes
import socket
from pathlib import Path

import torch

MIN_CAPABILITY = (9, 0)
"""Compute capability from which a GPU has the bulk tensor copies (TMA) of the kernels."""


def describe_device() -> dict:
    """Facts about this rank's current CUDA device, picklable, for :func:`domain_problem` on the facts of all ranks.

    Returns:
        ``host`` (name), ``boot_id`` (tells hosts with equal names apart), ``uuid``, ``index``, ``capability`` and
        ``name`` of the device; ``visible`` (uuids of all devices that this process sees) and ``reachable`` (those of
        them whose memory the device can access, itself included); and, if NVML knows it, ``fabric``
        ``(cluster uuid, clique)`` of a multi-host NVLink domain.
    """
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    facts = {
        "host": socket.gethostname(),
        "boot_id": _boot_id(),
        "uuid": uuids[index],
        "index": index,
        "capability": (properties.major, properties.minor),
        "name": properties.name,
        "visible": uuids,
        "reachable": [
            uuid for i, uuid in enumerate(uuids) if i == index or torch.cuda.can_device_access_peer(index, i)
        ],
    }
    fabric = _fabric(uuids[index])
    if fabric is not None:
        facts["fabric"] = fabric
    return facts


def domain_problem(facts: list[dict], asked_for: bool) -> str | None:
    """Why the GPUs of a group cannot serve kernels that write to each other's memory, or None.

    Args:
        facts: what :func:`describe_device` returned on each rank, in rank order.
        asked_for: whether the user insists; then several ranks may share a GPU, which is slow but right.
    """
    for rank, fact in enumerate(facts):
        if tuple(fact["capability"]) < MIN_CAPABILITY:
            have, need = (".".join(map(str, version)) for version in (fact["capability"], MIN_CAPABILITY))
            return f"needs compute capability {need}, the {fact['name']} of rank {rank} has {have}"
    if not _one_fabric(facts):
        for rank, fact in enumerate(facts):
            if host_of(fact) != host_of(facts[0]):
                return f"ranks are on different hosts without a common NVLink domain: {_hosts(facts[0], fact, rank)}"
    shared = ranks_on_one_device(facts)
    if shared is not None and not asked_for:
        return f"ranks {shared[0]} and {shared[1]} share a GPU, which then works for one of them at a time"
    for rank, fact in enumerate(facts):
        for peer, other in enumerate(facts):
            visible = host_of(fact) == host_of(other) and other["uuid"] in fact["visible"]
            if visible and other["uuid"] not in fact["reachable"]:
                return f"the GPU of rank {rank} cannot access the memory of rank {peer}'s: no peer access"
    return None


def ranks_on_one_device(facts: list[dict]) -> tuple[int, int] | None:
    """The first two ranks that share a device, if any do."""
    first: dict[tuple, int] = {}
    for rank, fact in enumerate(facts):
        owner = first.setdefault((*host_of(fact), fact["uuid"]), rank)
        if owner != rank:
            return owner, rank
    return None


def host_of(fact: dict) -> tuple[str, str]:
    """What tells the host of a rank from others."""
    return fact["host"], fact["boot_id"]


def _hosts(first: dict, other: dict, rank: int) -> str:
    names = [first["host"], other["host"]]
    if names[0] == names[1]:
        names = [f"{fact['host']} (boot {fact['boot_id'][:8]})" for fact in (first, other)]
    return f"rank 0 on {names[0]}, rank {rank} on {names[1]}"


def _one_fabric(facts: list[dict]) -> bool:
    """Whether NVLink spans the hosts: all ranks in the same clique of the same cluster."""
    fabrics = {tuple(fact["fabric"]) if "fabric" in fact else None for fact in facts}
    return len(fabrics) == 1 and None not in fabrics and bool(next(iter(fabrics))[0].strip("0"))


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _fabric(uuid: str) -> tuple[str, int] | None:
    """Cluster uuid in hex and clique of the device, None without NVML, an old driver or no fabric."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return None
    try:
        info = pynvml.c_nvmlGpuFabricInfoV_t()
        device = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        pynvml.nvmlDeviceGetGpuFabricInfoV(device, ctypes.byref(info))
        cluster = bytes(info.clusterUuid).hex()
        return (cluster, int(info.cliqueId)) if info.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED else None
    except Exception:
        return None
    finally:
        pynvml.nvmlShutdown()
